# SPDX-License-Identifier: Apache-2.0
"""A world model on a stochastic chain: how it is rolled out, and how one of its steps is judged again.

path = chain_path(world, rl, condition, None, noise)
final, kept = roll_out(path, noise, noise_of, keep=(0, 3))
step = judge(path, kept[3])                # under new weights, with gradients
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.rectified_flow import flow_time
from cosmos_predict2.diffusion.transitions import FLOW_KINDS, Chain, ChurnChain, FlowChain, Normal
from cosmos_predict2.rl.config import ANY, KEY, RLConfig
from cosmos_predict2.world_model.objectives import FLOW_SOLVER, Objective
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire.errors import ConfigError, TrainingError

LARGEST_DEVIATION = 2.0  # of states from that of their level, as a factor: shipped schedules stay within 1.7
LEVEL_SOLVER = "2ab"  # of the paths by noise level


@dataclass(frozen=True)
class ChainPath:
    """A chain with the network that judges its states. ``denoise(x, k)`` estimates the clean latents at step k."""

    chain: Chain
    denoise: Callable[[Tensor, float], Tensor]
    finish: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Kept:
    """One step of a rollout, with all that training needs of it."""

    k: int
    x_B_C_T_H_W: Tensor
    x_next_B_C_T_H_W: Tensor
    mean_B_C_T_H_W: Tensor
    previous_x0_B_C_T_H_W: Tensor | None
    reference_mean_B_C_T_H_W: Tensor | None = None  # where it is to stay near


def chain_path(
    world: WorldModel,
    rl: RLConfig,
    condition: Condition,
    unconditional: Condition | None,
    noise_B_C_T_H_W: Tensor,
    window: Collection[int] | None = None,
) -> ChainPath:
    """The chain of the options on a world model, for these conditions and this rank's part of their frames.

    A model of flow times is asked at those of its own schedule. One of noise levels takes them for flow times t =
    sigma / (1 + sigma), where its states are x / (1 + sigma), or as they are for "churn".
    """
    solver = _solver(world.objective, rl)
    options = SamplingOptions(guidance=rl.guidance, num_steps=rl.sample_steps, solver=solver, is_repeatable=True)
    path = world.sampling_path(condition, unconditional, noise_B_C_T_H_W, options)

    def at_level(x: Tensor, level: float) -> Tensor:
        return path.denoise(x, x.new_full((len(x),), level))

    def at_time(y: Tensor, t: float) -> Tensor:
        return at_level(y / (1 - t), t / (1 - t))

    is_by_time = rl.transition in FLOW_KINDS and solver == LEVEL_SOLVER
    return ChainPath(_chain(rl, solver, path.sigmas, window), at_time if is_by_time else at_level, path.finish)


def check_chain(objective: Objective, rl: RLConfig) -> None:
    """Raise for steps that are too coarse for their noise, or trained and without any, before there is a network."""
    solver, no_condition = _solver(objective, rl), cast(Condition, None)
    path = objective.sampling_path(
        lambda predict: lambda x, level: x, no_condition, torch.zeros(1), solver, rl.sample_steps
    )
    chain = _chain(rl, solver, path.sigmas)
    may_train = range(rl.sample_steps - 1) if ANY in rl.train_on else rl.train_on
    if rl.is_ratio and (still := [k for k in may_train if not chain.is_stochastic(k)]):
        raise ConfigError(
            f"{KEY}.train_on: steps {still} of {rl.transition} draw nothing, so that they have no probability. See"
            f" {KEY}.s_churn, s_t_min and s_t_max, or take another transition."
        )


def _solver(objective: Objective, rl: RLConfig) -> str:
    is_by_time = rl.transition in FLOW_KINDS and FLOW_SOLVER in objective.solvers
    return FLOW_SOLVER if is_by_time else LEVEL_SOLVER


def _chain(rl: RLConfig, solver: str, sigmas: Tensor, window: Collection[int] | None = None) -> Chain:
    if rl.transition not in FLOW_KINDS:
        return ChurnChain(
            sigmas.tolist(),
            rl.s_churn,
            "1euler" if rl.solver_option == "1euler" else "2ab",
            noise_scale=rl.s_noise,
            sigma_min=rl.s_t_min,
            sigma_max=rl.s_t_max,
            window=window,
        )
    times = sigmas if solver == FLOW_SOLVER else flow_time(sigmas)
    try:
        return FlowChain(times.tolist(), rl.transition, rl.noise_level, window)
    except ValueError as error:
        raise ConfigError(f"{KEY}.transition={rl.transition}, sample_steps={rl.sample_steps}: {error}") from error


def roll_out(
    path: ChainPath,
    noise_B_C_T_H_W: Tensor,
    noise_of: Callable[[int], Tensor],
    keep: Collection[int],
    *,
    is_checked: bool = False,
) -> tuple[Tensor, dict[int, Kept]]:
    """Latents, and what the steps of ``keep`` are judged by. ``noise_of(k)`` is that of step k, of the start for -1.

    ``is_checked`` compares the deviation of each state with that of its level.
    """
    chain, kept = path.chain, {}
    x, previous = chain.start(noise_B_C_T_H_W, noise_of(-1)), None
    for k in range(chain.num_steps):
        x0 = path.denoise(x, chain.levels[k])
        step = chain.step(k, x, x0, previous)
        x_next = step.draw(noise_of(k)) if chain.is_stochastic(k) else step.mean_B_C_T_H_W
        if k in keep:
            kept[k] = Kept(k, x, x_next, step.mean_B_C_T_H_W, previous if chain.uses_previous else None)
        if is_checked:
            _check_deviation(chain, k, x_next, x0)
        x, previous = x_next, x0
    if chain.final_level is not None:
        x = path.denoise(x, chain.final_level)
    return path.finish(x), kept


def _check_deviation(chain: Chain, k: int, x_next: Tensor, x0: Tensor) -> None:
    """Raise where the state after step k has another deviation than its level, with clean latents as large as x0."""
    found, of_x0 = (float(tensor.float().square().mean().sqrt()) for tensor in (x_next, x0))
    wanted = chain.deviation_after(k, of_x0)
    if not math.isfinite(found) or 1 / LARGEST_DEVIATION <= found / wanted <= LARGEST_DEVIATION:
        return  # training says what to do about numbers that are not finite
    raise TrainingError(
        f"After step {k} of a rollout's {chain.num_steps} its states have a deviation of {found:.3g}, but at this level"
        f" of noise it is {wanted:.3g}: such steps are too coarse for their noise, and what they end in is no clip of"
        f" the model. Raise {KEY}.sample_steps, lower {KEY}.noise_level, or take {KEY}.transition=cps."
    )


def judge(path: ChainPath, kept: Kept) -> tuple[Normal, Tensor]:
    """The distribution of the kept step's next state under the present weights, and the estimate it follows from."""
    x0 = path.denoise(kept.x_B_C_T_H_W, path.chain.levels[kept.k])
    return path.chain.step(kept.k, kept.x_B_C_T_H_W, x0, kept.previous_x0_B_C_T_H_W), x0


def of_whole_clip(world: WorldModel, value_B: Tensor) -> Tensor:
    """The mean over whole clips of a mean over this rank's frames, alike on all ranks of a context-parallel group."""
    context = world.context
    return context.gather_frames(value_B[:, None], 1).mean(dim=1) if context.is_on else value_B
