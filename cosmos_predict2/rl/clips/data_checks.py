# SPDX-License-Identifier: Apache-2.0
"""Checks, before anything is built, that the data of a run have what its rewards compare with."""

from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_predict2.data.dataset_prompts import TRUE_FRAMES_KEY
from cosmos_predict2.rl.config import KEY, RLConfig, reward_configs
from cosmos_predict2.rl.rewards.remote import LAST_LOOK_S
from imaginaire import distributed
from imaginaire.buildable import resolve
from imaginaire.config.names import target_of
from imaginaire.data.facts import facts_of
from imaginaire.errors import DataError
from imaginaire.findings import CheckContext, Finding, error

OF_TRUE_CLIPS = ("true_video", "true_latents")


def check_rewards(rl: RLConfig, context: CheckContext) -> Iterator[Finding]:
    """An error for each reward that requires what a data set does not have (``requires`` of its class)."""
    limit = distributed.timeout_s()
    if context.config is not None:
        limit = min(limit, context.config.trainer.timeout_period)
    for name, reward in reward_configs(rl).items():
        if reward.deadline + LAST_LOOK_S >= limit:
            text = f"{reward.deadline:g} s, but ranks that wait, and the watchdog, give up after {limit:g} s"
            yield error(f"{KEY}.rewards.{name}.deadline", text, "Lower it, or raise trainer.timeout_period")
        required = getattr(resolve(reward.make, "reward"), "requires", ())
        for key, data in context.training.items():
            for missing in (one for one in required if lacks(data, one)):
                yield error(
                    f"{KEY}.rewards.{name}",
                    f"it compares with '{missing}', which {target_of(data).__name__} ({key}) does not have",
                    "Choose a reward that judges the clip alone, or data that have it",
                )


def check_conditions(rl: RLConfig, context: CheckContext) -> Iterator[Finding]:
    """Conditioning frames that data without true clips do not have."""
    for key, data in context.training.items():
        true_frames = facts_of(data).num_true_frames
        if true_frames is not None and rl.max_num_conditional_frames > true_frames:
            text = f"{rl.max_num_conditional_frames}, but samples of {key} have {true_frames} true frames"
            yield error(f"{KEY}.max_num_conditional_frames", text, f"Set it to {true_frames}, and the smallest too")


def lacks(data: Mapping[str, Any], name: str) -> bool:
    """True where a data set is known to have no such thing in its samples."""
    facts = facts_of(data)
    if name in OF_TRUE_CLIPS:
        return facts.num_true_frames is not None
    return name == "actions" and facts.has_actions is False


def require_true_frames(batch: Mapping[str, Any], num_latent_frames: int) -> None:
    """Raise for a batch that would condition on frames that are not true."""
    if TRUE_FRAMES_KEY in batch and (least := int(min(batch[TRUE_FRAMES_KEY]))) < num_latent_frames:
        raise DataError(
            f"The samples have {least} true frames, but {num_latent_frames} are to condition them:"
            f" set {KEY}.max_num_conditional_frames={least}, and the smallest number too."
        )
