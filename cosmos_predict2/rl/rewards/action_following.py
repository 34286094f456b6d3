# SPDX-License-Identifier: Apache-2.0
"""Inverse dynamics as a reward: does a clip show what its actions command? Read from the clip, no true future."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.evaluation.metrics.inverse_dynamics import SUMMED, Probe, fit_probe, smaller
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.verifiable import _OfPixels, _required, _video
from cosmos_predict2.tokenizers.sizes import pixel_frames
from imaginaire import random
from imaginaire.errors import ConfigError, DataError

FEWEST = 8  # clips that a regression can be fitted to


class ActionFollowing(_OfPixels):
    """Minus how far the motion that is read from a clip is from the commanded one, in deviations of an action.

    A regression reads the action between two frames; it is fitted once, to the first ``num_clips`` items of ``data``,
    which are true clips of the same size with ``action``. Errors are summed from the last conditioning frame on and
    counted at each latent frame's end: what a single frame's blur adds to one step it takes from the next.
    """

    requires = ("actions",)

    def __init__(self, data: Any, num_clips: int = 256, seed: int = 0) -> None:
        if not FEWEST <= num_clips <= len(data):
            raise ConfigError(
                f"num_clips={num_clips} of {type(data).__name__}, which has {len(data)}: a regression that reads"
                f" actions needs {FEWEST} clips at least."
            )
        with random.preserved():
            numpy.random.seed(seed)
            items = [data[i] for i in range(num_clips)]
        frames_B_C_F_H_W, action_B_A_D = _clips_of(items, type(data).__name__)
        self.probe: Probe = fit_probe(frames_B_C_F_H_W, action_B_A_D)
        self.spread_D = action_B_A_D[..., self.probe.numbers].double().flatten(0, 1).std(dim=0)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        wanted_B_A_D = _required(context, "actions")[..., self.probe.numbers].double()
        error_B_A_D = (self.probe.read(_video(clips)) - wanted_B_A_D) / self.spread_D
        first_B = torch.tensor([pixel_frames(max(int(n), 1)) - 1 for n in context["num_conditional_frames"]])
        counted_B_A = torch.arange(error_B_A_D.shape[1])[None] >= first_B[:, None]
        error_B_A_D = error_B_A_D * counted_B_A[..., None]
        drift_B_T = error_B_A_D.cumsum(dim=1)[:, SUMMED - 1 :: SUMMED].square().mean(dim=2).sqrt()
        ends_B_T = counted_B_A[:, SUMMED - 1 :: SUMMED]
        step_B = error_B_A_D.square().mean(dim=2).sum(dim=1) / counted_B_A.sum(dim=1)
        return {"value": -(drift_B_T * ends_B_T).sum(dim=1) / ends_B_T.sum(dim=1), "step_error": step_B.sqrt()}


def _clips_of(items: Sequence[Mapping[str, Any]], name: str) -> tuple[Tensor, Tensor]:
    """Frames and actions of items that are alike."""
    for key in ("video", "action"):
        if any(key not in item for item in items):
            raise DataError(f"Items of {name} have no '{key}': actions are read by what clips with actions show.")
        if len(shapes := {tuple(item[key].shape) for item in items}) > 1:
            found = " and ".join(map(str, sorted(shapes)[:2]))
            raise DataError(f"'{key}' of {name} has shapes {found}, but clips of one size are needed: set its size.")
    return torch.cat([smaller(item["video"][None]) for item in items]), torch.stack([item["action"] for item in items])
