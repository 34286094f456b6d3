# SPDX-License-Identifier: Apache-2.0
"""Learning from rewards on a GPU: ratios of one, runs that resume, and what the host would have learnt."""

import json
import math
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05
from cosmos_predict2.rl.rewards.remote import RemoteReward
from cosmos_predict2.rl.rewards.service.scoring import build_decoder
from cosmos_predict2.rl.rewards.service.settings import DecodeSettings
from tests.programs import HANG_S
from tests.rl import vla_runs
from tests.rl.rewards.doubles import HERE, clips_of, served
from tests.rl.runs import run
from tests.rl.test_flow_grpo import VARIANTS

pytestmark = pytest.mark.gpu
DECODING = f"""
[decode_args]
model_path = "tiny"
[[reward_args]]
reward_type = "pixels"
make = "{HERE}:Pixels"
"""


@pytest.mark.parametrize("name", ["reference", "adapters", "nft", "predict2p5"])  # the last in bfloat16
def test_a_run_learns_resumes_and_has_ratios_of_one(name: str, tmp_path: Path) -> None:
    run(tmp_path, *VARIANTS[name])
    records = run(tmp_path, *VARIANTS[name], "trainer.max_iter=3", "checkpoint.save_iter=9")
    assert [one["iteration"] for one in records] == [1, 2, 3]
    for one in records:
        assert math.isfinite(one["train/loss"]) and one["train/grad_norm"] > 0
        assert one["train/agreement_valid_rate"] == 1
        assert name == "nft" or (one["train/log_prob_ratio"], one["train/ratio_std"]) == (1.0, 0.0)


def there_and_on_the_host(learn: Callable[..., Any], root: Path, *args: Any) -> tuple[Any, Any]:
    """The result of a function here, and in a process that sees no GPU, which runs beside it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
            host = pool.submit(learn, root / "host", *args)
        return learn(root / "gpu", *args), host.result()


def test_rewards_and_gradients_are_those_of_the_host(tmp_path: Path) -> None:
    found, expected = there_and_on_the_host(run, tmp_path, *VARIANTS["reference"])
    for key, away in (("train/reward_mean", 2e-2), ("train/grad_norm", 5e-2)):  # convolutions in tf32
        assert found[0][key] == pytest.approx(expected[0][key], rel=away), key


def decide(root: Path, policies: Path) -> dict[str, list[dict[str, Any]]]:
    """An experience of each policy in the simulator, and of one in what a world model imagines."""
    found = {}
    for policy in ("toy", "openvla", "pi05"):
        path = [] if policy == "toy" else [f"model.config.policy.path={policies / policy}"]
        found[policy] = vla_runs.run(root / policy, *path, "trainer.max_iter=4", name=f"{policy}_policy")
    options = [*vla_runs.SMALL, "world_model.config.precision=float32", "refinement.optimizer.precision=float32"]
    options = [option if "=float32" not in option else f"model.config.{option}" for option in options]
    found["imagined"] = vla_runs.run(root / "imagined", *options, "trainer.max_iter=4", name=vla_runs.IMAGINED)
    return found


def test_policies_learn_what_they_would_on_the_host(tmp_path: Path) -> None:
    tiny_openvla.write_tiny(tmp_path / "openvla", hold=3, action_chunk=4, action_dim=4, bins=32)
    tiny_pi05.write_tiny(tmp_path / "pi05", hold=3, action_horizon=4)
    found, expected = there_and_on_the_host(decide, tmp_path, tmp_path)
    for policy, records in found.items():
        assert len(records) == len(expected[policy]) >= 2
        first, other = records[0], expected[policy][0]  # later ones follow from what the first did
        away = 5e-2 if policy == "imagined" else 1e-2  # convolutions in tf32
        for key in ("train/reward_mean", "train/grad_norm", "train/edm_loss"):
            assert (key in first) == (key in other), (policy, key)
            assert first.get(key, 0) == pytest.approx(other.get(key, 0), rel=away, abs=1e-3), (policy, key)


def test_the_service_decodes_there_for_a_judge(tmp_path: Path) -> None:
    clips = clips_of("a", "b", value=0.5)
    with served(tmp_path, config=DECODING) as service:
        address = dict(enqueue_url=service.url("/api/reward/enqueue"), fetch_url=service.url("/api/reward/pull"))
        reward = RemoteReward("pixels", **address)
        scores = reward.fetch(reward.submit(clips, {}, "run/a"), HANG_S)
    assert scores.is_valid_B.all()
    pixels = build_decoder(DecodeSettings(model_path="tiny"), "cpu").decode(clips.latents_B_C_T_H_W)
    expected = ((pixels.clamp(-1, 1) + 1) * 127.5).mean(dim=(1, 2, 3, 4))
    assert torch.allclose(scores.value_B, expected, atol=1.0), json.dumps([scores.value_B.tolist(), expected.tolist()])
