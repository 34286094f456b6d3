# SPDX-License-Identifier: Apache-2.0
"""Long imagined episodes, chunk by chunk: likeness where something moves, and in the toy world what no likeness shows.

They are read together: a model that regresses to a future which its picture does not decide gets no worse in any one of
them, and blurs everything.

* Unseen: the share of a chunk's last pictures on which the gripper or an object is not found. In the error of its place
  an unseen thing counts as where it was on the first picture of the episode.
* Consistency: the things are read off the imagined first picture of a chunk, the simulator plays the chunk's actions
  from there, and the imagined end is compared. Pairs with a thing that is not found on both pictures do not count; they
  are the unseen ones.
* Chaos: how far true episodes come apart, where the model's errors of its first chunk are added at the end of each.
  Nobody foresees the place of things better from such a model.
"""

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.evaluation.metrics import video_quality
from cosmos_predict2.evaluation.metrics.imagined_episodes import mean_or_nan
from cosmos_predict2.toy_world.episodes import Episodes
from cosmos_predict2.toy_world.physics import GRIPPER, OBJECTS, Floats, find_setting, object_position, simulate
from cosmos_predict2.toy_world.rendering import detect

THINGS = ("gripper", *OBJECTS)
COLUMNS = (GRIPPER, *(object_position(k) for k in range(len(OBJECTS))))


def by_chunk(video_B_C_F_H_W: Tensor, truth_B_C_F_H_W: Tensor, chunk: int) -> dict[str, list[float]]:
    """PSNR in dB, that over the pixels where something moves, SSIM, sharpness and fine detail (of the truth: 1) of each
    chunk's frames. Where nothing moves in a whole chunk, its second figure is NaN."""
    names = ("PSNR", "PSNR where something moves", "SSIM", "sharpness", "fine detail")
    found: dict[str, list[float]] = {name: [] for name in names}
    for start in range(1, truth_B_C_F_H_W.shape[2], chunk):
        video, truth = (part[:, :, start : start + chunk] for part in (video_B_C_F_H_W, truth_B_C_F_H_W))
        moves = video_quality.moves(truth, truth_B_C_F_H_W[:, :, start - 1 : start])  # since the chunk's first picture
        squared = (video.float() - truth.float()).square().mean(dim=1, keepdim=True)[moves]
        figures = (
            video_quality.psnr(video, truth).mean(),
            10 * torch.log10(255**2 / squared.double().mean().clamp(min=0.01)),
            video_quality.ssim(video, truth).mean(),
            (video_quality.sharpness(video) / video_quality.sharpness(truth)).mean(),
            (video_quality.fine_detail(video) / video_quality.fine_detail(truth)).mean(),
        )
        for name, figure in zip(names, figures, strict=True):
            found[name].append(float(figure))
    return found


def things_by_chunk(episodes: Episodes, video_B_C_F_H_W: Tensor, chunk: int) -> dict[str, list[float]]:
    """Figures of each chunk in the toy world: see above. Distances are pixels, means over episodes."""
    ends = range(0, video_B_C_F_H_W.shape[2], chunk)
    seen_N_B_K_2 = [_places(video_B_C_F_H_W[:, :, end]) for end in ends]
    is_there_B_K = _of_states(episodes.states[:, 0])[..., 0] > 0
    rows = ("unseen", "consistency (px)", "error (px)", "error by chaos (px)")
    found: dict[str, list[float]] = {f"{row}, {thing}": [] for row in rows for thing in ("gripper", "objects")}
    chaotic, generator, first_errors_B_K_2 = episodes.states[:, 0], numpy.random.default_rng(0), None
    for i, end in enumerate(ends[1:]):
        before, after = seen_N_B_K_2[i], seen_N_B_K_2[i + 1]
        is_lost, begun = numpy.isnan(after[..., 0]), ~numpy.isnan(before[..., 0])
        state = _placed(episodes.states[:, end - chunk], before, is_there_B_K & begun)
        errors = after - _of_states(_simulated(episodes, state, end - chunk, chunk))
        counts, true = is_there_B_K & begun & ~is_lost, _of_states(episodes.states[:, end])
        if first_errors_B_K_2 is None:
            first_errors_B_K_2 = numpy.where(counts[..., None], errors, 0.0)
        chaotic = _simulated(episodes, chaotic, end - chunk, chunk)
        drawn = _of_states(chaotic) + first_errors_B_K_2[generator.permutation(len(chaotic))]
        chaotic = _placed(chaotic, drawn, is_there_B_K)
        place = numpy.where(is_lost[..., None], _of_states(episodes.states[:, 0]), after)
        figures = (is_lost, _length(errors), _length(place - true), _length(_of_states(chaotic) - true))
        for row, figure in zip(rows, figures, strict=True):
            of = counts if row.startswith("consistency") else is_there_B_K
            for thing, k in (("gripper", slice(0, 1)), ("objects", slice(1, None))):
                found[f"{row}, {thing}"].append(mean_or_nan(figure[:, k][of[:, k]]))
    return found


def _simulated(episodes: Episodes, state: Floats, start: int, count: int) -> Floats:
    """The states [B, 10] after some of the episodes' actions."""
    constants, size = find_setting(episodes.setting, episodes.size)
    return simulate(state, episodes.actions[:, start : start + count], constants, size)[:, -1]


def _placed(states_B_S: Floats, places_B_K_2: Floats, which_B_K: NDArray[numpy.bool_]) -> Floats:
    """The states with some of the things elsewhere."""
    states = states_B_S.copy()
    for k, columns in enumerate(COLUMNS):
        states[which_B_K[:, k], columns] = places_B_K_2[which_B_K[:, k], k]
    return states


def _places(pictures_B_C_H_W: Tensor) -> Floats:
    """The place of each thing, [B, things, 2], NaN where it is not seen."""
    found = detect(pictures_B_C_H_W.permute(0, 2, 3, 1).contiguous().numpy(), THINGS)
    return numpy.stack([found.position[thing] for thing in THINGS], axis=1)


def _of_states(states_B_S: Floats) -> Floats:
    return numpy.stack([states_B_S[:, columns] for columns in COLUMNS], axis=1)


def _length(vectors: Floats) -> Floats:
    return numpy.hypot(vectors[..., 0], vectors[..., 1])
