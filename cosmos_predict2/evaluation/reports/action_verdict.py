# SPDX-License-Identifier: Apache-2.0
"""The verdict on whether a world model follows its actions, in one sentence with its reasons.

Three signs, each beside a control that was measured in the same run. A model that ignores its actions shows none of
them, one that follows them shows all; what could not be measured does not count.

* The loss is larger with the actions of another clip: 1.05 times, on three clips of four. Control: the true actions.
* A video moves with the actions of another clip, half as far at least as with another seed, the control.
* Its actions can be read from the imagined frames, with half the R2 of true frames through the tokenizer, the upper
  control. The lower one: the actions of other clips cannot be read from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cosmos_predict2.evaluation.metrics.controllability import ActionGap, Distances
from cosmos_predict2.evaluation.metrics.inverse_dynamics import ActionFollowing

LEAST_RATIO, LEAST_SHARE = 1.05, 0.75
LEAST_DISTANCE = 0.5  # of that between seeds
LEAST_READ = 0.5  # of the R2 of true frames through the tokenizer
READABLE = 0.2  # R2 of those from which on the probe can be trusted
TRUE, CODED, IMAGINED, EXCHANGED = "true frames", "through the tokenizer", "imagined", "imagined, other clips' actions"


Sign = tuple[bool, str]  # whether a measurement shows obedience, and a sentence


@dataclass(frozen=True)
class Verdict:
    """``word`` is "follows", "ignores", "in part" or "unknown"."""

    word: str
    sentence: str


def verdict(
    gap: ActionGap | None, distances: Distances | None, following: Mapping[str, ActionFollowing], reason: str = ""
) -> Verdict:
    """The signs together; ``reason``: why nothing could be measured, if so."""
    measured = (_loss_sign(gap), _distance_sign(distances), _reading_sign(following))
    signs = [sign for sign in measured if sign is not None]
    shown = sum(is_shown for is_shown, _ in signs)
    if not signs:
        return Verdict("unknown", f"cannot say whether it follows its actions: {reason or 'nothing was measured'}")
    because = "; ".join(sentence for _, sentence in signs)
    if shown == len(signs):
        return Verdict("follows", f"follows its actions: {because}")
    if not shown:
        return Verdict("ignores", f"ignores its actions: {because}")
    return Verdict("in part", f"follows its actions only in part ({shown} of {len(signs)} signs): {because}")


def _loss_sign(gap: ActionGap | None) -> Sign | None:
    if gap is None:
        return None
    return (
        gap.mean >= LEAST_RATIO and gap.share >= LEAST_SHARE,
        f"with the actions of another clip its loss is {gap.mean:.2f} times as large, and larger on {gap.share:.0%} of"
        " the clips (1.00 and 50% for a model that ignores them)",
    )


def _distance_sign(distances: Distances | None) -> Sign | None:
    if distances is None:
        return None
    return (
        distances.ratio >= LEAST_DISTANCE,
        f"other actions change a video by {distances.actions:.2f} of 255, another seed by {distances.seeds:.2f} (0 for"
        " a model that ignores them)",
    )


def _reading_sign(following: Mapping[str, ActionFollowing]) -> Sign | None:
    if not {CODED, IMAGINED} <= set(following) or following[CODED].r2_of_sums < READABLE:
        return None
    read, best = following[IMAGINED].r2_of_sums, following[CODED].r2_of_sums
    control = f", other clips' actions with {following[EXCHANGED].r2_of_sums:.2f}" if EXCHANGED in following else ""
    return (
        read >= LEAST_READ * best,
        f"its actions are read from the imagined frames with R2 {read:.2f} (from true frames through the tokenizer with"
        f" {best:.2f}{control})",
    )
