# SPDX-License-Identifier: Apache-2.0
"""Figures of how well a world model follows its actions, which any data allow.

`action_gap` is its loss with the actions of another sample over that with the true ones: 1 where they are ignored.
`prediction_distance` (three forward passes) and `video_distances` are how far a prediction or a video moves with other
actions, over how far it moves with other noise.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.conditioner import ACTION_KEY, TEXT_KEY, Condition, Conditioner
from cosmos_predict2.diffusion.rectified_flow import rectified_flow_weight
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.world_model import WorldModel

SIGMAS = (5.0, 10.0, 20.0, 40.0)  # where the noisy frames do not give away what happens
PURE_NOISE = 80.0
BATCH = 32
LEAST_DIFFERENCE = 0.1  # of two samples' actions, as a share of the spread of all


def differing(action_B_A_D: Tensor) -> Tensor:
    """[B, B], true where the actions of two samples differ by a tenth of the spread of all at least, root mean
    square."""
    flat_B_I = action_B_A_D.detach().flatten(1).double().cpu()
    least = LEAST_DIFFERENCE * float((flat_B_I - flat_B_I.mean(0)).square().mean().sqrt())
    apart_B_B = (flat_B_I[:, None] - flat_B_I[None]).square().mean(2).sqrt()
    return apart_B_B > max(least, 1e-9)


def lending_order(origins: Sequence[str], size: int) -> Tensor:
    """[B, B], for each sample all others in the order in which their actions are lent to it, at last itself.

    Those of the next recordings come first, whose windows are no neighbours of its own; then those of its own, the
    farthest in time first. ``origins`` names the recording of each; empty: each sample is one of its own.
    """
    names = list(origins) or [str(i) for i in range(size)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    places = [names[:i].count(name) for i, name in enumerate(names)]  # of each sample in its recording

    def rank(i: int, k: int) -> tuple[bool, int, int]:
        if names[i] == names[k]:
            return True, -abs(places[k] - places[i]), 0
        return False, (places[k] - places[i]) % size, (numbers[names[k]] - numbers[names[i]]) % len(numbers)

    return torch.tensor([sorted(range(size), key=partial(rank, i)) for i in range(size)])


def partners(action_B_A_D: Tensor, origins: Sequence[str] = ()) -> tuple[Tensor, Tensor]:
    """[B], the index of the first in `lending_order` with other actions, and [B], true where there is one."""
    order_B_B = lending_order(origins, len(action_B_A_D))
    differs_B_B = differing(action_B_A_D).gather(1, order_B_B)
    first_B = differs_B_B.int().argmax(dim=1)
    return order_B_B.gather(1, first_B[:, None])[:, 0], differs_B_B.any(dim=1)


def action_condition(
    config: Video2WorldPipelineConfig,
    action_B_A_D: Tensor,
    x0_B_C_T_H_W: Tensor,
    text_1_S_E: Tensor,
    size: Sequence[int],
) -> Condition:
    """The condition of clips of this (height, width) with these actions, one text and their first frame."""
    count, device = len(x0_B_C_T_H_W), x0_B_C_T_H_W.device
    batch = {
        TEXT_KEY: text_1_S_E.expand(count, -1, -1),
        "fps": torch.full((count,), float(config.fps)),
        "padding_mask": torch.zeros(count, 1, *size),
        ACTION_KEY: action_B_A_D,
    }
    on_device = {key: value.to(device) for key, value in batch.items()}
    condition = Conditioner(config.conditioner).condition(on_device, is_image=False)
    return condition.with_conditioning_frames(x0_B_C_T_H_W, torch.ones(count, device=device))


@dataclass(frozen=True)
class ActionGap:
    """The loss of the velocity at each noise level, with the true actions and with those of another sample."""

    sigmas: list[float]
    true: list[float]
    swapped: list[float]
    num_samples: int  # that have a partner with other actions
    share: float  # of them, whose loss over all noise levels is larger with the other actions: half by chance

    @property
    def ratios(self) -> list[float]:
        return [swapped / max(true, 1e-30) for swapped, true in zip(self.swapped, self.true)]

    @property
    def mean(self) -> float:
        """Swapped over true, the mean over the noise levels."""
        return sum(self.ratios) / len(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratios": self.ratios, "mean": self.mean}


@torch.no_grad()
def action_gap(
    world: WorldModel,
    x0_B_C_T_H_W: Tensor,
    epsilon_B_C_T_H_W: Tensor,
    condition: Condition,
    sigmas: Sequence[float] = SIGMAS,
    *,
    origins: Sequence[str] = (),
) -> ActionGap | None:
    """The gap on these clips, without their conditioning frames; None where no two have different actions. ``origins``
    names their recordings, as in `lending_order`."""
    if (swapped := _swapped(condition, origins)) is None:
        return None
    exchanged, chosen = swapped
    losses: dict[str, list[float]] = {"true": [], "swapped": []}
    worse_B = torch.zeros(len(chosen), dtype=torch.float64)
    for sigma in sigmas:
        sums = {"true": 0.0, "swapped": 0.0}
        for part_B, worse in zip(chosen.split(BATCH), worse_B.split(BATCH)):
            rows = part_B.to(x0_B_C_T_H_W.device)
            x0, epsilon = x0_B_C_T_H_W[rows], epsilon_B_C_T_H_W[rows]
            for name, whole, sign in (("true", condition, -1), ("swapped", exchanged, 1)):
                condition_of = whole.rows(part_B)
                errors_B = velocity_errors(world, x0, epsilon, sigma, condition_of).double().cpu()
                sums[name] += float(errors_B.sum())
                worse += sign * errors_B  # a view of its rows
        for name, total in sums.items():
            losses[name].append(total / len(chosen))
    share = float(((worse_B > 0).double() + 0.5 * (worse_B == 0).double()).mean())
    return ActionGap([float(sigma) for sigma in sigmas], losses["true"], losses["swapped"], len(chosen), share)


def _swapped(condition: Condition, origins: Sequence[str]) -> tuple[Condition, Tensor] | None:
    """The condition with the actions of each sample's partner, and the numbers of those that have one; None: none."""
    action_B_A_D = condition.action_B_A_D
    assert action_B_A_D is not None, "a condition without actions"
    partner_B, counts_B = partners(action_B_A_D, origins)
    if not counts_B.any():
        return None
    other = replace(condition, action_B_A_D=action_B_A_D[partner_B.to(action_B_A_D.device)])
    return other, counts_B.nonzero()[:, 0]


@dataclass(frozen=True)
class Distances:
    """Root mean square distances between what should differ by its actions, and by its seed."""

    actions: float
    seeds: float

    @property
    def ratio(self) -> float:
        """The change by other actions over that by another seed."""
        return self.actions / max(self.seeds, 1e-12)


@torch.no_grad()
def prediction_distance(
    world: WorldModel,
    x0_B_C_T_H_W: Tensor,
    epsilon_B_C_T_H_W: Tensor,
    condition: Condition,
    origins: Sequence[str] = (),
) -> Distances | None:
    """Distances of the clean latents predicted from pure noise: to those with another sample's actions, and to those
    with another sample's noise. None where no two samples have different actions."""
    if (swapped := _swapped(condition, origins)) is None:
        return None
    other, chosen = swapped[0], swapped[1].to(x0_B_C_T_H_W.device)
    sigma_B_1 = x0_B_C_T_H_W.new_full((len(x0_B_C_T_H_W), 1), PURE_NOISE)
    own, changed, reseeded = (
        world.predict_clean(x0_B_C_T_H_W, epsilon, sigma_B_1, given)[chosen]
        for epsilon, given in (
            (epsilon_B_C_T_H_W, condition),
            (epsilon_B_C_T_H_W, other),
            (epsilon_B_C_T_H_W.roll(1, 0), condition),
        )
    )
    return Distances(_rms(own - changed), _rms(own - reseeded))


def video_distances(videos_K_R_C_F_H_W: Tensor) -> Distances:
    """Distances of videos from one first frame by K sequences of actions and R seeds, over the frames after the first.

    They are means over pairs of sequences with the same seed, and over pairs of seeds with the same sequence, in the
    unit of the pixels.
    """
    videos = videos_K_R_C_F_H_W[:, :, :, 1:].double()
    assert min(videos.shape[:2]) >= 2, f"{videos.shape[0]} sequences of actions and {videos.shape[1]} seeds"
    return Distances(_between(videos), _between(videos.transpose(0, 1)))


def _between(videos_N_M_C_F_H_W: Tensor) -> float:
    """Mean over the pairs of N, and over M."""
    flat = videos_N_M_C_F_H_W.flatten(2)
    pairs = torch.combinations(torch.arange(len(flat)))
    return float((flat[pairs[:, 0]] - flat[pairs[:, 1]]).square().mean(2).sqrt().mean())


def _rms(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


def velocity_errors(
    world: WorldModel, x0_B_C_T_H_W: Tensor, epsilon_B_C_T_H_W: Tensor, sigma: float, condition: Condition
) -> Tensor:
    """[B], the mean squared error of the velocity at a noise level over the latent frames that are not given.

    Sigma stands for t = sigma / (1 + sigma) where the model is a flow.
    """
    sigma_B_1 = x0_B_C_T_H_W.new_full((len(x0_B_C_T_H_W), 1), sigma)
    predicted = world.predict_clean(x0_B_C_T_H_W, epsilon_B_C_T_H_W, sigma_B_1, condition)
    squared_B_T = (predicted - x0_B_C_T_H_W).square().mean(dim=(1, 3, 4)) * rectified_flow_weight(sigma_B_1)
    if condition.condition_mask_B_1_T_H_W is None:
        return squared_B_T.mean(dim=1)
    rest_B_T = 1 - condition.condition_mask_B_1_T_H_W[:, 0, :, 0, 0].to(squared_B_T)
    return (squared_B_T * rest_B_T).sum(dim=1) / rest_B_T.sum(dim=1).clamp(min=1)
