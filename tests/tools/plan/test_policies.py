# SPDX-License-Identifier: Apache-2.0
"""Activations of policies as they are planned, beside the bytes that tiny ones keep, and beside runs on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.policies.network import cast, parallelize_policy
from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05
from cosmos_predict2.rl.policies.pi05.config import Stream
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.tools.plan.policies import POLICIES, PolicySize, activations
from imaginaire.distributed.parallel import ParallelDims
from tests.kept_bytes import kept_bytes

ROWS, SIDE = 4, 56


def tiny(name: str, folder: Path) -> tuple[Any, PolicySize]:
    """A policy, and its sizes as the plan has those of published ones."""
    size = POLICIES[name]
    if name == "openpi":
        vlm, expert = Stream(64, 4, 96, 8, 1, 16, tiny_pi05.VOCAB), Stream(128, 4, 384, 8, 1, 16)
        tiny_pi05.write_tiny(folder, vlm=vlm, expert=expert, action_horizon=10, num_steps=3)
        assert size.expert is not None
        sizes: dict[str, Any] = dict(blocks=4, heads=8, head_dim=16)
        trunk = replace(size.trunk, width=64, mlp=96, **sizes)
        found = replace(size.expert, width=128, mlp=384, **sizes)
        policy: Any = Pi05Policy(str(folder), train_expert_only=True)
        return policy, replace(size, trunk=trunk, expert=found, expert_keys=16, patches=(SIDE // 14) ** 2)
    tiny_openvla.write_tiny(
        folder, image_size=SIDE, width=128, layers=4, mlp=352, heads=4, vision=(64, 96), vision_layers=4, bins=32,
        text_tokens=300, action_chunk=4, num_images_in_input=2,
    )  # fmt: skip
    towers = tuple(
        replace(tower, blocks=3, width=width, mlp=mlp, heads=4, head_dim=width // 4)
        for tower, width, mlp in zip(size.towers, (64, 96), (256, 358), strict=True)
    )
    trunk = replace(size.trunk, blocks=4, width=128, mlp=352, heads=4, head_dim=32)
    sizes = dict(patches=(SIDE // 14) ** 2, pixels=6 * SIDE**2, vocabulary=300 + 32 + 64, bins=32, answer=4 * 7 + 1)
    return OpenVLAPolicy(str(folder)), replace(size, towers=towers, trunk=trunk, **sizes)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["openvla_oft", "openpi"])
def test_what_a_policy_keeps_is_what_is_planned(
    name: str, precision: torch.dtype, recomputes: bool, tmp_path: Path
) -> None:
    policy, size = tiny(name, tmp_path)
    cast(policy, precision)
    parallelize_policy(policy, ParallelDims(), 0, recompute=recomputes)
    seen = {
        "full_image": torch.randint(0, 255, (ROWS, SIDE, SIDE, 3), dtype=torch.uint8),
        "wrist_image": torch.randint(0, 255, (ROWS, 1, SIDE, SIDE, 3), dtype=torch.uint8),
        "state": torch.zeros(ROWS, 3),
        "task_description": ["push the red disc to the ring"] * ROWS,
    }
    generators = [torch.Generator().manual_seed(i) for i in range(ROWS)]
    record = policy.act(seen, mode="sample", generators=generators).record
    words = record["length"][0] if "length" in record else record["token_mask"][0].sum()
    known = [*policy.parameters(), *policy.buffers(), *record.values()]
    found = kept_bytes(lambda: policy.log_prob(record).log_prob_B_K_N, known)
    planned = activations(replace(size, words=int(words)), ROWS, 2, precision.itemsize, recomputes=recomputes)
    assert planned.before_trunk + planned.trunk == pytest.approx(found, rel=0.05)


def test_an_h100_took_what_is_planned() -> None:
    """GB in use at most, above what was there before: OpenVLA-OFT's backward pass, and PI0.5's prefix."""
    size = POLICIES["openvla_oft"]
    weights = 2 * size.parameters
    found = activations(size, 32, 1, 2, recomputes=True)
    assert 4 * weights + found.peak(weights, accumulates=False) == pytest.approx(62.55e9, rel=0.06)
    assert found.before_trunk + found.trunk == pytest.approx(50.67e9 - 3 * weights, rel=0.25)  # with a block at work
    assert activations(size, 32, 1, 2, recomputes=False).trunk > 80e9
    found = activations(POLICIES["openpi"], 128, 1, 4, recomputes=False)
    assert found.trunk == pytest.approx(17.77e9 - 13.42e9, rel=0.05)
    assert found.peak(0, accumulates=True) == pytest.approx(22.17e9 - 13.42e9, rel=0.06)
