# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.interfaces import EnvDefaults, FrameRewardDefaults, PolicyDefaults, RewardDefaults, completed
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.config.lazy_config import LazyCall as L


class Bare:
    __slots__ = ("inner", "offload_policy")

    def __init__(self) -> None:
        self.inner, self.offload_policy = ToyEnv(4), "mine"


class Wraps:
    """An environment with the required members alone."""

    def __init__(self) -> None:
        self.inner = ToyEnv(4)
        self.num_envs, self.metadata = self.inner.num_envs, self.inner.metadata

    def reset(self, **numbers: Any) -> Any:
        return self.inner.reset(**numbers)

    def chunk_step(self, *arguments: Any) -> Any:
        return self.inner.chunk_step(*arguments)


class Decides(torch.nn.Module):
    """A policy with the required members alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ToyPolicy(width=8)

    def act(self, *arguments: Any, **named: Any) -> Any:
        return self.inner.act(*arguments, **named)

    def log_prob(self, record: Any) -> Any:
        return self.inner.log_prob(record)


def test_objects_get_the_optional_members_that_they_lack_and_keep_their_own() -> None:
    one: Any = completed(Bare(), EnvDefaults)
    assert (one.keep_frames, one.offload_policy, one.imagination, one.release) == (None, "mine", None, None)
    one.offload()
    assert completed(None, EnvDefaults) is None
    assert not hasattr(object, "offload")


@pytest.mark.parametrize("defaults", [EnvDefaults, PolicyDefaults, RewardDefaults, FrameRewardDefaults])
def test_classes_of_defaults_complete_an_empty_class(defaults: type) -> None:
    found = completed(type("Empty", (), {})(), defaults)
    assert all(hasattr(found, name) for name in vars(defaults) if not name.startswith("_"))


def test_a_run_takes_a_policy_and_an_environment_with_the_required_members_alone() -> None:
    rl = VLARLConfig(group_size=2)
    one = VLAGRPOModel(VLAGRPOConfig(policy=L(Decides)(), env=L(Wraps)(), rl=rl))
    batch = {"task_id": torch.zeros(2, dtype=torch.long), "trial_id": torch.arange(2)}
    assert next(one.train_batches([batch])).facts["valid_rate"] == 1
    one.on_before_zero_grad(None, None, 0)
    assert "greedy_success" in one.validation_step(batch, 0)[0]
