# SPDX-License-Identifier: Apache-2.0
"""Policies in half precision: frequencies of positions, and what is published in float32, are not rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.released import EMBODIED
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.policies.network import cast
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.config import L, lazy_config
from imaginaire.errors import CheckpointError
from imaginaire.findings import CheckContext
from imaginaire.optim.adamw import FusedAdamW


@pytest.fixture(scope="module")
def policies(folders: dict[str, str]) -> dict[str, Any]:
    return {
        "openvla": L(OpenVLAPolicy)(path=folders["openvla"], temperature=1.6),
        "adapters": L(OpenVLAPolicy)(path=folders["openvla"], lora_rank=2),
        "pi05": L(Pi05Policy)(path=folders["pi05"], noise_method="flow_noise", joint_logprob=True),
        "expert": L(Pi05Policy)(path=folders["pi05"], train_expert_only=True, lora_rank=2),
        "toy": L(ToyPolicy)(),
    }


@pytest.mark.parametrize("name", ["openvla", "adapters", "pi05", "expert", "toy"])
def test_it_is_trained_in_bfloat16(name: str, policies: dict[str, Any]) -> None:
    torch.manual_seed(0)
    apart = lazy_config.instantiate(policies[name])
    torch.manual_seed(0)
    rl = VLARLConfig(group_size=2, updates=2)
    options: dict[str, Any] = dict(policy=policies[name], env=L(ToyEnv)(num_envs=8), rl=rl)
    model = VLAGRPOModel(VLAGRPOConfig(**options, precision="bfloat16"))
    buffers = {key: value.clone() for key, value in apart.named_buffers() if "inv_freq" in key}
    cast(apart, torch.bfloat16)
    for key, value in model.net.named_buffers():
        if "inv_freq" in key or "logvar" in key:
            assert value.dtype == torch.float32 and torch.equal(value, buffers.get(key, value)), key
    assert (name == "toy") == (not buffers)
    kinds = {key: weight.dtype for key, weight in model.net.named_parameters()}
    wide = {key for key, kind in kinds.items() if kind == torch.float32}
    for key, weight in apart.named_parameters():  # already, so that no wider ones are moved to a device
        assert weight.dtype == kinds[key] and torch.equal(weight, model.net.get_parameter(key)), key
    model.on_train_start()
    assert wide != kinds.keys() and bool(wide) == (name in ("pi05", "expert"))
    learnt = [weight for weight in model.net.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in learnt]
    optimizer = FusedAdamW(learnt, lr=1e-2)
    trials = torch.arange(4)
    starts = {"task_id": torch.zeros_like(trials), "trial_id": trials}
    for decisions in model.train_batches([starts]):
        _, loss = model.training_step(decisions, 0)  # raises unless the first ratio is 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(not torch.equal(*pair) for pair in zip(before, learnt))


def test_what_pi05_keeps_in_float32_makes_its_decisions_more_exact(policies: dict[str, Any]) -> None:
    """Against all of it in bfloat16, as sharding needs it."""
    args = {key: value for key, value in policies["pi05"].items() if key != "_target_"}
    seen: Any = {
        "full_image": torch.randint(256, (4, 48, 64, 3), generator=torch.Generator().manual_seed(3)).to(torch.uint8),
        "wrist_image": torch.zeros(4, 0, 48, 64, 3, dtype=torch.uint8),
        "state": torch.zeros(4, 3),
        "task_description": ["push the puck"] * 4,
    }
    actions = []
    for uniform in (None, False, True):
        torch.manual_seed(0)
        policy = Pi05Policy(**args)
        if uniform is not None:
            cast(policy, torch.bfloat16, is_uniform=uniform)
        draws = [torch.Generator().manual_seed(i) for i in range(4)]
        actions.append(policy.act(seen, mode="greedy", generators=draws).actions_E_A_D)
    exact, mixed, rounded = actions
    assert (mixed - exact).abs().mean() < (rounded - exact).abs().mean() < 0.05


@pytest.mark.parametrize(("policy", "name"), [(OpenVLAPolicy, "openvla_oft"), (Pi05Policy, "pi05")])
def test_a_policy_without_weights_is_refused_before_anything_is_built(policy: Any, name: str, tmp_path: Path) -> None:
    def found(path: str) -> str:
        (one,) = policy.check({"path": path}, CheckContext(key="model.config.policy"))
        assert one.level == "error"
        return str(one)

    told = found("")
    assert told.startswith("model.config.policy.path: the policy has no weights")
    assert f"model.config.policy.path=models/{EMBODIED[name][1]}" in told
    assert f"python -m scripts.download_checkpoints --embodied {name}" in told
    assert f"{tmp_path} has no config.json" in found(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert not [*policy.check({"path": str(tmp_path)}, CheckContext()), *policy.check({"path": "a/b"}, CheckContext())]
    with pytest.raises(CheckpointError, match=f"download_checkpoints --embodied {name}"):
        policy("")
