# SPDX-License-Identifier: Apache-2.0
"""A world model on a stochastic chain: how it is rolled out, and how one of its steps is judged again.

path = chain_path(world, rl, condition, None, noise)
final, kept = roll_out(path, noise, noise_of, keep=(0, 3))
step = judge(path, kept[3])                # under new weights, with gradients
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.rectified_flow import flow_time
from cosmos_predict2.diffusion.transitions import FLOW_KINDS, Chain, ChurnChain, FlowChain, Normal
from cosmos_predict2.models.config import LATEST_TIME
from cosmos_predict2.rl.config import RLConfig
from cosmos_predict2.world_model.objectives import FLOW_SOLVER, SamplingPath
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.world_model import WorldModel

LEVEL_SOLVER = "2ab"  # of the paths by noise level


@dataclass(frozen=True)
class ChainPath:
    """A chain with the network that judges its states. ``denoise(x, k)`` estimates the clean latents at step k."""

    chain: Chain
    denoise: Callable[[Tensor, float], Tensor]
    finish: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Kept:
    """What training needs of one step of a rollout."""

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
    is_flow_model = FLOW_SOLVER in world.objective.solvers
    by_level = rl.transition not in FLOW_KINDS
    solver = LEVEL_SOLVER if by_level or not is_flow_model else FLOW_SOLVER
    options = SamplingOptions(guidance=rl.guidance, num_steps=rl.sample_steps, solver=solver)
    path = world.sampling_path(condition, unconditional, noise_B_C_T_H_W, options)
    if by_level:
        chain: Chain = ChurnChain(
            path.sigmas.tolist(),
            rl.s_churn,
            "1euler" if rl.solver_option == "1euler" else "2ab",
            noise_scale=rl.s_noise,
            sigma_min=rl.s_t_min,
            sigma_max=rl.s_t_max,
            window=window,
        )
        return ChainPath(chain, _at_level(path), path.finish)
    if is_flow_model:
        chain = FlowChain(path.sigmas.tolist(), rl.transition, rl.noise_level, window)
        return ChainPath(chain, _at_level(path), path.finish)
    chain = FlowChain(flow_time(path.sigmas).tolist(), rl.transition, rl.noise_level, window)
    return ChainPath(chain, _at_time(path), path.finish)


def _at_level(path: SamplingPath) -> Callable[[Tensor, float], Tensor]:
    return lambda x, level: path.denoise(x, x.new_full((len(x),), level))


def _at_time(path: SamplingPath) -> Callable[[Tensor, float], Tensor]:
    def denoise(y: Tensor, t: float) -> Tensor:
        return path.denoise(y / (1 - t), y.new_full((len(y),), t / (1 - t)))

    return denoise


def roll_out(
    path: ChainPath,
    noise_B_C_T_H_W: Tensor,
    noise_of: Callable[[int], Tensor],
    keep: Collection[int],
    on_step: Callable[[int], None] = lambda k: None,
) -> tuple[Tensor, dict[int, Kept]]:
    """Latents, and what the steps of ``keep`` are judged by. ``noise_of(k)`` is that of step k, of the start for -1."""
    chain, kept = path.chain, {}
    x, previous = chain.start(noise_B_C_T_H_W, noise_of(-1)), None
    for k in range(chain.num_steps):
        x0 = path.denoise(x, chain.levels[k])
        step = chain.step(k, x, x0, previous)
        x_next = step.draw(noise_of(k)) if chain.is_stochastic(k) else step.mean_B_C_T_H_W
        if k in keep:
            kept[k] = Kept(k, x, x_next, step.mean_B_C_T_H_W, previous)
        x, previous = x_next, x0
        on_step(k)
    if chain.final_level is not None:
        x = path.denoise(x, chain.final_level)
    return path.finish(x), kept


def judge(path: ChainPath, kept: Kept) -> tuple[Normal, Tensor]:
    """The distribution of the kept step's next state under the present weights, and the estimate it follows from."""
    x0 = path.denoise(kept.x_B_C_T_H_W, path.chain.levels[kept.k])
    return path.chain.step(kept.k, kept.x_B_C_T_H_W, x0, kept.previous_x0_B_C_T_H_W), x0


def of_whole_clip(world: WorldModel, value_B: Tensor) -> Tensor:
    """The mean over whole clips of a mean over this rank's frames, alike on all ranks of a context-parallel group."""
    context = world.context
    return context.gather_frames(value_B[:, None], 1).mean(dim=1) if context.is_on else value_B


def sigma_of(level: float, rl: RLConfig) -> float:
    """The noise level of a chain's level."""
    return level if rl.transition == "churn" else level / max(1 - level, 1 - LATEST_TIME)
