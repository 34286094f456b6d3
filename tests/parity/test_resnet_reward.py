# SPDX-License-Identifier: Apache-2.0
"""The success classifier with the published names, narrow and at full size, against golden values."""

import math

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.rewards import resnet
from cosmos_predict2.rl.rewards.resnet import WIDTHS, ResnetReward, SuccessClassifier
from imaginaire.checkpoint import weights
from tests.goldens import Golden

AREA = "action"
FILE = "resnet_reward.safetensors"
PROBABILITY = 5e-5
FULL = 1e-4  # of the largest magnitude
FULL_PICTURES = (2, 3, 64, 80)


def test_resnet_reward(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, config = golden.tensors(FILE), golden.metadata(FILE)["config"]
    model = SuccessClassifier(config["widths"].use()).eval()
    source = {name: tensors[name].use() for name in tensors if name.startswith("net.")}
    weights.load_into(model.state_dict(), source).require(["*.num_batches_tracked"])
    images = tensors["in.images"].use()
    config["hw"].compare(list(images.shape[2:]))
    with torch.no_grad():
        probability = model(images)
    tensors["out.prob"].compare(probability, atol=PROBABILITY)
    monkeypatch.setattr(resnet, "to_unit", lambda pictures_B_H_W_C: pictures_B_H_W_C.permute(0, 3, 1, 2))  # they are
    judged = ResnetReward(model=model, rounded=True, device="cpu").judge(images.permute(0, 2, 3, 1)[None], {})
    tensors["out.reward"].compare(judged.value_E_F.reshape(probability.shape))


def test_resnet_reward_at_full_size(golden: Golden) -> None:
    tensors, config = golden.tensors(FILE), golden.metadata(FILE)["config"]
    model = SuccessClassifier(WIDTHS).eval()
    _fill(model.state_dict())
    count = math.prod(FULL_PICTURES)
    images = torch.sin(config["freq"].use() * torch.arange(count, dtype=torch.float64)).float().reshape(FULL_PICTURES)
    with torch.no_grad():
        tensors["full.pooled512"].compare(model.net[:7](images), of_largest=FULL)
        tensors["full.prob"].compare(model(images), of_largest=FULL)


def _fill(state: dict[str, Tensor]) -> None:
    """The weights that a formula gives, as the golden folder's README has it."""
    for k, name in enumerate(sorted(state)):
        target = state[name]
        if name.endswith("num_batches_tracked"):
            continue
        i = torch.arange(target.numel(), dtype=torch.float64)
        q = 43758.5453 * torch.sin(12.9898 * (i + 1) + 78.233 * (k + 1))
        v = (2 * (q - q.floor()) - 1).reshape(target.shape)
        is_norm = ".bn" in name or name.startswith("net.0.1")
        if name.endswith("running_var"):
            v = 1 + 0.5 * v
        elif target.ndim >= 2:
            v = v * 2 / math.sqrt(math.prod(target.shape[1:]))
        elif is_norm and name.endswith(".weight"):
            v = 1 + 0.2 * v
        else:
            v = 0.1 * v
        target.copy_(v.float())
