# SPDX-License-Identifier: Apache-2.0
"""Reading the action from two frames: a small regression that is fitted to true frames and applied to imagined ones.

The features of a pair of frames are how much better a shift of the first one fits the second than the opposite shift,
for each colour. They are nearly linear in the motion of an object, so ridge regression is enough where camera and
background stand still. A frame that is off by a third of a pixel, as a tokenizer leaves it, spoils the
reading of both steps beside it; the sums over four steps (``r2_of_sums``) measure the model's own part. The score on
true frames shows how far to trust it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from imaginaire.errors import DataError

REACH = 3  # pixels of a shift, at the size at which pairs are compared
LONGEST_SIDE = 64  # larger frames are made smaller
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # in units of a standardised feature's variance; one is chosen
SUMMED = 4
HELD_BACK = 4  # every HELD_BACK-th clip chooses it
PAIRS_AT_ONCE = 1024


@dataclass(frozen=True)
class ActionAgreement:
    """Agreement of the actions that were read with those that were commanded."""

    r2: float  # the mean over the numbers of an action that vary in the scored clips; nan: none does
    r2_of_sums: float  # the same of their sums over four steps, one latent frame
    r2_by_number: dict[int, float]
    r2_by_step: list[float]  # of the actions at each place in the clip
    error: float  # root mean square, in the unit of the actions


@dataclass(frozen=True)
class Probe:
    """A linear map from a pair's features to the numbers of an action that vary."""

    numbers: list[int]  # which ones
    mean_P: Tensor
    scale_P: Tensor
    weight_P_D: Tensor
    bias_D: Tensor

    def read(self, frames_B_C_F_H_W: Tensor) -> Tensor:
        """[B, F - 1, d]: what was done between the frames, of the numbers that vary."""
        return self._of(pair_features(frames_B_C_F_H_W))

    def score(self, frames_B_C_F_H_W: Tensor, action_B_A_D: Tensor) -> ActionAgreement:
        """Agreement of what is read from the frames with these actions."""
        return self._score(self.read(frames_B_C_F_H_W), action_B_A_D)

    def by_chunk(self, frames_B_C_F_H_W: Tensor, action_B_A_D: Tensor, chunk: int) -> list[float]:
        """R2 of the sums of four actions in each chunk; nan where none varies."""
        read = self.read(frames_B_C_F_H_W)
        parts = zip(read.split(chunk, dim=1), action_B_A_D.split(chunk, dim=1), strict=True)
        return [self._score(found, wanted).r2_of_sums for found, wanted in parts]

    def _of(self, features_B_A_P: Tensor) -> Tensor:
        return ((features_B_A_P - self.mean_P) / self.scale_P) @ self.weight_P_D + self.bias_D

    def _score(self, found_B_A_D: Tensor, action_B_A_D: Tensor) -> ActionAgreement:
        wanted_B_A_D = action_B_A_D[..., self.numbers].to(found_B_A_D)
        error = float((found_B_A_D - wanted_B_A_D).square().mean().sqrt())
        # A number that varied where the probe was fitted may stay the same here: there is no variance to be found.
        varies = varying(wanted_B_A_D)
        found_B_A_D, wanted_B_A_D = found_B_A_D[..., varies], wanted_B_A_D[..., varies]
        squared = (found_B_A_D - wanted_B_A_D).square()
        spread = (wanted_B_A_D - wanted_B_A_D.mean(dim=(0, 1))).square()
        r2_D = _r2(found_B_A_D, wanted_B_A_D)
        r2_A = 1 - squared.sum(dim=(0, 2)) / spread.sum(dim=(0, 2)).clamp(min=1e-12 if varies else 0.0)
        sums, wanted_sums = _sums(found_B_A_D), _sums(wanted_B_A_D)
        varied = varying(wanted_sums)
        return ActionAgreement(
            r2=float(r2_D.mean()),
            r2_of_sums=float(_r2(sums[..., varied], wanted_sums[..., varied]).mean()),
            r2_by_number=dict(zip([self.numbers[i] for i in varies], r2_D.tolist())),
            r2_by_step=r2_A.tolist(),
            error=error,
        )


def fit_probe(frames_B_C_F_H_W: Tensor, action_B_A_D: Tensor) -> Probe:
    """The regression from true clips, 2 * HELD_BACK at least, whose actions vary. How strongly it is held back is
    chosen on a quarter of the clips."""
    numbers = varying(action_B_A_D)
    if len(frames_B_C_F_H_W) < 2 * HELD_BACK:
        raise DataError(
            f"{len(frames_B_C_F_H_W)} clips are too few to learn from what was done in a clip: it takes"
            f" {2 * HELD_BACK} at least."
        )
    if not numbers:
        raise DataError(
            f"The actions of all {len(frames_B_C_F_H_W)} clips are the same, so that nothing can be learnt from what"
            " was done: take more clips, or clips of other actions."
        )
    features = pair_features(frames_B_C_F_H_W)
    wanted = action_B_A_D[..., numbers].double()
    chosen = torch.arange(len(features)) % HELD_BACK == 0
    fitted = [_ridge(features[~chosen], wanted[~chosen], numbers, ridge) for ridge in RIDGES]
    found = [probe._score(probe._of(features[chosen]), action_B_A_D[chosen]) for probe in fitted]
    scores = [-score.error if math.isnan(score.r2) else score.r2 for score in found]  # nan: none varies in them
    best = RIDGES[max(range(len(RIDGES)), key=lambda i: scores[i])]
    return _ridge(features, wanted, numbers, best)


def pair_features(frames_B_C_F_H_W: Tensor) -> Tensor:
    """[B, F - 1, P] float64 of successive frames, uint8 or floats from 0 to 255."""
    frames = smaller(frames_B_C_F_H_W)
    before, after = (part.transpose(1, 2) for part in (frames[:, :, :-1], frames[:, :, 1:]))
    size, steps = before.shape[:2]
    pairs = zip(before.flatten(0, 1).split(PAIRS_AT_ONCE), after.flatten(0, 1).split(PAIRS_AT_ONCE))
    features = torch.cat([_features(a, b) for a, b in pairs])
    return features.view(size, steps, -1)


def _features(before_N_C_H_W: Tensor, after_N_C_H_W: Tensor) -> Tensor:
    """[N, P]: for each shift of half a neighbourhood the misfit of it less that of its opposite, and mean colours."""
    before, after = before_N_C_H_W.float() / 255, after_N_C_H_W.float() / 255
    height, width = before.shape[-2:]
    inside = after[:, :, REACH : height - REACH, REACH : width - REACH]

    def misfit(down: int, right: int) -> Tensor:
        top, left = REACH - down, REACH - right
        shifted = before[:, :, top : top + inside.shape[2], left : left + inside.shape[3]]
        return (shifted - inside).square().sum(dim=(2, 3))

    shifts = [(y, x) for y in range(REACH + 1) for x in range(-REACH, REACH + 1) if y > 0 or x > 0]
    columns = [misfit(-y, -x) - misfit(y, x) for y, x in shifts]
    columns += [misfit(0, 0), before.mean(dim=(2, 3)), after.mean(dim=(2, 3))]
    return torch.cat(columns, dim=1).double()


def varying(action_B_A_D: Tensor) -> list[int]:
    """The numbers of an action that are not the same everywhere."""
    if not action_B_A_D.numel():  # a deviation is of one value at least
        return []
    spread_D = action_B_A_D.double().flatten(0, 1).std(dim=0, correction=0)
    found: list[int] = (spread_D > max([1e-9, *(1e-6 * spread_D).tolist()])).nonzero()[:, 0].tolist()
    return found


def _r2(found_B_A_D: Tensor, wanted_B_A_D: Tensor) -> Tensor:
    """[D], the share of the variance that is found."""
    spread = (wanted_B_A_D - wanted_B_A_D.mean(dim=(0, 1))).square().sum(dim=(0, 1)).clamp(min=1e-12)
    return 1 - (found_B_A_D - wanted_B_A_D).square().sum(dim=(0, 1)) / spread


def _sums(action_B_A_D: Tensor) -> Tensor:
    """Sums over each four steps; over all where there are fewer."""
    steps = min(SUMMED, action_B_A_D.shape[1])
    whole = action_B_A_D[:, : action_B_A_D.shape[1] // steps * steps]
    return whole.unflatten(1, (-1, steps)).sum(dim=2)


def smaller(frames_B_C_F_H_W: Tensor) -> Tensor:
    """Frames at the size at which pairs are compared; such frames are returned as they are."""
    longest = max(frames_B_C_F_H_W.shape[-2:])
    if longest <= LONGEST_SIDE:
        return frames_B_C_F_H_W
    factor = -(-longest // LONGEST_SIDE)
    return functional.avg_pool3d(frames_B_C_F_H_W.float(), (1, factor, factor))


def _ridge(features_B_A_P: Tensor, wanted_B_A_D: Tensor, numbers: list[int], ridge: float) -> Probe:
    x_N_P, y_N_D = features_B_A_P.flatten(0, 1), wanted_B_A_D.flatten(0, 1)
    mean_P, scale_P = x_N_P.mean(dim=0), x_N_P.std(dim=0).clamp(min=1e-9)
    bias_D = y_N_D.mean(dim=0)
    x_N_P = (x_N_P - mean_P) / scale_P
    square = x_N_P.T @ x_N_P / len(x_N_P)
    mixed = x_N_P.T @ (y_N_D - bias_D) / len(x_N_P)
    unit = torch.eye(len(square), dtype=square.dtype)
    return Probe(numbers, mean_P, scale_P, torch.linalg.solve(square + ridge * unit, mixed), bias_D)
