# SPDX-License-Identifier: Apache-2.0
"""A rollout of clips: its samples and draws, the stochastic chain that makes them, and the loss of its steps.

path = chain_path(world, rl, condition, None, noise)
final, kept = roll_out(path, noise, noise_of, keep=(0, 3))
step = judge(path, kept[3])                # under new weights, with gradients
output, loss = Losses(world, rl).of(part)  # of a micro-batch: the objective, the distance to a reference, the data term

Under context parallelism a rank has its frames alone; ratios and errors are those of whole clips, alike on all ranks.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, Literal, cast

import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.rectified_flow import add_noise, flow_time
from cosmos_predict2.diffusion.transitions import FLOW_KINDS, Chain, ChurnChain, FlowChain, Normal, log_ratio
from cosmos_predict2.rl import objectives
from cosmos_predict2.rl.config import ANY, KEY, RLConfig
from cosmos_predict2.rl.learner import joined, mapped, require_ratio_one
from cosmos_predict2.rl.objectives import Clipped, FreshNoise, RatioStep, WithoutRatio, objective_of
from cosmos_predict2.world_model.objectives import FLOW_SOLVER, Objective
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire import random
from imaginaire.errors import ConfigError, DataError, TrainingError, raised_as


@dataclass(frozen=True)
class KeptStep:
    """One step of a rollout, with all that training needs of it."""

    k: int
    x_B_C_T_H_W: Tensor
    x_next_B_C_T_H_W: Tensor
    mean_B_C_T_H_W: Tensor
    previous_x0_B_C_T_H_W: Tensor | None
    reference_mean_B_C_T_H_W: Tensor | None = None  # where it is to stay near


@dataclass(frozen=True)
class Forward:
    """A generated clip with fresh noise at one level, for forward-process objectives; and what was predicted there, of
    this rank's frames."""

    x0_B_C_T_H_W: Tensor
    epsilon_B_C_T_H_W: Tensor
    t_B: Tensor
    v_old_B_C_T_H_W: Tensor | None = None  # by the sampling policy; None: the weights are still those
    v_reference_B_C_T_H_W: Tensor | None = None


@dataclass(frozen=True)
class Data:
    """The true clips, and the noise and level at which the data term judges them."""

    x0_B_C_T_H_W: Tensor
    epsilon_B_C_T_H_W: Tensor
    sigma_B_1: Tensor
    condition: Condition


Conditions = tuple[Condition, Condition | None]  # the second is what guidance leads away from


def conditions_of(conditions: Conditions, rows_B: Tensor) -> Conditions:
    """Those of some samples, whose rows these are: a group's text is not copied for its members."""
    condition, other = conditions
    return condition.rows(rows_B), None if other is None else other.rows(rows_B)


@dataclass(frozen=True)
class MicroBatch:
    """Some samples at one trained step (`kept`) or level (`forward`)."""

    condition: Condition
    unconditional: Condition | None
    noise_B_C_T_H_W: Tensor  # the start of the rollout
    advantage_B: Tensor
    window: tuple[int, ...] | None
    kept: KeptStep | None = None
    forward: Forward | None = None
    data: Data | None = None
    is_before_update: bool = True  # no step was taken since the rollout, so that ratios are 1
    teaches: bool = True  # there is something to learn in its update, on any rank
    facts: dict[str, float] = field(default_factory=dict)  # of the whole rollout, to be logged


@dataclass
class Samples:
    """The samples of one rollout, rows in step: groups one after the other, the members of a group together."""

    rows_B: Tensor  # the row of each one's condition
    places_B_2: Tensor  # of each its condition's place in the stream, and which member of the group it is
    noise: Tensor
    final: Tensor
    window: tuple[int, ...] | None
    levels: list[float]  # noise levels sigma of the steps
    kept: dict[int, KeptStep] = field(default_factory=dict)  # of ratio objectives, by step
    forwards: dict[int, Forward] = field(default_factory=dict)  # of forward-process objectives, by level

    def __len__(self) -> int:
        return len(self.noise)


@dataclass(frozen=True)
class RowDraws:
    """Draws of an experience: of a sample by the run's seed and its place; of all ranks alike by a place ``first``."""

    seed: int
    first: int

    def _generators(self, places_B_2: Tensor, purpose: str) -> Iterator[torch.Generator]:
        for position, member in places_B_2.tolist():
            yield random.generator(self.seed, position, f"rl/{purpose}/{member}")

    def normal(self, shape: tuple[int, ...], places_B_2: Tensor, purpose: str) -> Tensor:
        return torch.stack([torch.randn(shape, generator=g) for g in self._generators(places_B_2, purpose)])

    def uniform(self, count: int, places_B_2: Tensor, purpose: str) -> Tensor:
        draws = self._generators(places_B_2, purpose)
        return torch.stack([torch.rand(count, dtype=torch.float64, generator=g) for g in draws])

    def permutation(self, count: int, purpose: str) -> list[int]:
        """The same for the batches of all ranks and for all rollouts of an experience."""
        generator = random.generator(self.seed, self.first, f"rl/{purpose}")
        return torch.randperm(count, generator=generator).tolist()  # type: ignore[no-any-return]


ONE_MEMBER = torch.tensor([1, 0])  # times places: members of a group draw the same


@dataclass(frozen=True)
class Rollout:
    """The samples of a batch; and, a row for each of its conditions, these, the true latents, and the condition of the
    data term."""

    samples: Samples
    conditions: Conditions
    true_latents: Tensor
    data_condition: Condition
    draws: RowDraws

    def conditions_of(self, samples: slice) -> Conditions:
        return conditions_of(self.conditions, self.samples.rows_B[samples])

    def rows(self, rows: Tensor) -> "Rollout":
        """Some of the samples, with the conditions of all."""
        return replace(self, samples=mapped(self.samples, lambda tensor: tensor[rows.to(tensor.device)]))

    def with_others(self, others: Sequence["Rollout"]) -> "Rollout":
        """The samples of several rollouts at the same steps, one after the other."""
        parts = [self, *others]
        lengths = {part.data_condition.crossattn_emb_B_S_E.shape[1] for part in parts}
        if len(lengths) > 1:
            found = f"max_rollouts joins several batches, but their texts have {sorted(lengths)} tokens"
            raise DataError(f"{found}: give all embeddings one length.")
        starts = itertools.accumulate((len(part.true_latents) for part in parts), initial=0)
        samples = [replace(one.samples, rows_B=one.samples.rows_B + start) for one, start in zip(parts, starts)]
        conditions, unconditional = zip(*(part.conditions for part in parts), strict=True)
        return Rollout(
            samples=joined(samples),
            conditions=(_stacked(conditions), None if unconditional[0] is None else _stacked(unconditional)),
            true_latents=torch.cat([part.true_latents for part in parts]),
            data_condition=_stacked([part.data_condition for part in parts]),
            draws=self.draws,
        )


def _stacked(conditions: Sequence[Condition]) -> Condition:
    return reduce(Condition.stacked_with, conditions)


LARGEST_DEVIATION = 2.0  # of states from that of their level, as a factor: shipped schedules stay within 1.7
LEVEL_SOLVER = "2ab"  # of the paths by noise level


@dataclass(frozen=True)
class ChainPath:
    """A chain with the network that judges its states. ``denoise(x, k)`` estimates the clean latents at step k."""

    chain: Chain
    denoise: Callable[[Tensor, float], Tensor]
    finish: Callable[[Tensor], Tensor]


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
    solver, nothing = _solver(objective, rl), (cast(Condition, None), torch.zeros(1))
    path = objective.sampling_path(lambda predict: lambda x, level: x, *nothing, solver, rl.sample_steps)
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
        order = cast(Literal["1euler", "2ab"], rl.solver_option)
        return ChurnChain(sigmas.tolist(), rl.s_churn, order, rl.s_noise, rl.s_t_min, rl.s_t_max, window)
    times = sigmas if solver == FLOW_SOLVER else flow_time(sigmas)
    with raised_as(ConfigError, f"{KEY}.transition={rl.transition}, sample_steps={rl.sample_steps}", ValueError):
        return FlowChain(times.tolist(), rl.transition, rl.noise_level, window)


def roll_out(
    path: ChainPath,
    noise_B_C_T_H_W: Tensor,
    noise_of: Callable[[int], Tensor],
    keep: Collection[int],
    *,
    is_checked: bool = False,
) -> tuple[Tensor, dict[int, KeptStep]]:
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
            kept[k] = KeptStep(k, x, x_next, step.mean_B_C_T_H_W, previous if chain.uses_previous else None)
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
        return  # training handles numbers that are not finite
    raise TrainingError(
        f"After step {k} of a rollout's {chain.num_steps} its states have a deviation of {found:.3g}, but this level of"
        f" noise has {wanted:.3g}: such steps are too coarse for their noise. Raise {KEY}.sample_steps, lower"
        f" {KEY}.noise_level, or take {KEY}.transition=cps."
    )


def judge(path: ChainPath, kept: KeptStep) -> Normal:
    """The distribution of the kept step's next state under the present weights."""
    x0 = path.denoise(kept.x_B_C_T_H_W, path.chain.levels[kept.k])
    return path.chain.step(kept.k, kept.x_B_C_T_H_W, x0, kept.previous_x0_B_C_T_H_W)


def of_whole_clip(world: WorldModel, value_B: Tensor) -> Tensor:
    """The mean over whole clips of a mean over this rank's frames, alike on all ranks of a context-parallel group."""
    context = world.context
    return context.gather_frames(value_B[:, None], 1).mean(dim=1) if context.is_on else value_B


# --- the loss of a micro-batch


class Losses:
    """The losses of a run's micro-batches."""

    def __init__(self, world: WorldModel, rl: RLConfig) -> None:
        self.world, self.rl, self.objective = world, rl, objective_of(rl.objective)

    def of(self, part: MicroBatch) -> tuple[dict[str, Any], Tensor]:
        """Numbers to log, and the loss."""
        output, loss, kl = self._forward_loss(part) if part.kept is None else self._ratio_loss(part)
        if kl is not None:
            output["kl_loss"] = kl.detach()
            loss = loss + self.rl.kl_beta * kl
        if (data := part.data) is not None:  # DDRL: the error of the clean clip by (s^2 + s_d^2) / (s s_d)^2
            predicted = self._clean(data.x0_B_C_T_H_W, data.epsilon_B_C_T_H_W, data.sigma_B_1, data.condition)
            sigma_B, sigma_data = data.sigma_B_1[:, 0], self.world.config.sigma_data
            weight_B = (sigma_B**2 + sigma_data**2) / (sigma_B * sigma_data) ** 2
            error_B = objectives.mean_drift(predicted, self._part(data.x0_B_C_T_H_W))
            data_loss = (weight_B * of_whole_clip(self.world, error_B)).mean()
            output["data_loss"] = data_loss.detach()
            loss = loss + self.rl.data_beta * data_loss
        return output, self.rl.loss_scale * loss

    def velocity(self, condition: Condition, forward: Forward) -> Tensor:
        """The network's velocity at the samples' times for this rank's frames, eps - x_0 where it is right."""
        t_B, x0, epsilon = forward.t_B, forward.x0_B_C_T_H_W, forward.epsilon_B_C_T_H_W
        predicted = self._clean(x0, epsilon, (t_B / (1 - t_B))[:, None], condition)
        t = t_B.reshape(-1, *[1] * (x0.dim() - 1)).to(x0)
        return (objectives.noised(self._part(x0), self._part(epsilon), t_B) - predicted) / t

    def _ratio_loss(self, part: MicroBatch) -> tuple[dict[str, Any], Tensor, Tensor | None]:
        """Numbers to log, the objective, and the distance to the reference."""
        rl, kept, conditions = self.rl, part.kept, (part.condition, part.unconditional)
        assert kept is not None
        path = chain_path(self.world, rl, *conditions, part.noise_B_C_T_H_W, part.window)
        step = judge(path, kept)
        mean, old = step.mean_B_C_T_H_W, kept.mean_B_C_T_H_W
        std = step.std if rl.ratio_normalisation == "gaussian" else None
        log_ratio_B = of_whole_clip(self.world, log_ratio(kept.x_next_B_C_T_H_W, mean, old, std))
        drift_B = of_whole_clip(self.world, objectives.mean_drift(mean, old))
        advantage_B = part.advantage_B.to(log_ratio_B)
        if rl.exp_reward:  # the theoretical form of DDRL: negative for every sample
            largest = rl.advantage.adv_clip_max
            advantage_B = -(math.e**-advantage_B).clamp(max=largest)
        limits = (rl.clip_ratio, path.chain.length(kept.k), rl.clip_ratio_high, rl.dual_clip)
        policy = self.objective.function(RatioStep(log_ratio_B, advantage_B, drift_B, step.std, *limits))
        loss, kl = policy.loss_B.mean(), None
        if kept.reference_mean_B_C_T_H_W is not None:
            kl_B = of_whole_clip(self.world, objectives.mean_drift(mean, kept.reference_mean_B_C_T_H_W))
            kl = (kl_B if std is None else objectives.gaussian_kl(kl_B, std)).mean()
        return self._watched(part, policy, log_ratio_B, loss), loss, kl

    def _watched(self, part: MicroBatch, policy: Clipped, log_ratio_B: Tensor, loss: Tensor) -> dict[str, Any]:
        ratio_B, k = policy.ratio_B.detach(), None if part.kept is None else part.kept.k
        if part.is_before_update and self.rl.on_policy:
            off = float(log_ratio_B.detach().abs().max())
            at = "" if k is None else f" at step {k}"
            if math.isnan(off):
                raise TrainingError(
                    f"A rollout's states are not finite{at}, nor is what training computes from them. In float16"
                    " numbers end at 65504: set model.config.precision=bfloat16; else lower optimizer.lr."
                )
            why = f"training does not compute what the rollout did{at}. Use the same precision and attention for both."
            require_ratio_one(off, self.rl.ratio_tolerance, why)
        std = ratio_B.std(correction=0)
        of_step = {} if k is None or part.is_before_update else {f"ratio_std_step{k}": std}  # once ratios move
        return {
            "policy_loss": loss.detach(),
            "log_prob_ratio": ratio_B.mean(),
            "ratio_std": std,
            **of_step,
            "clip_fraction_above": policy.is_above_B.float().mean(),
            "clip_fraction_below": policy.is_below_B.float().mean(),
            "approx_kl": objectives.approximate_kl(log_ratio_B.detach()),
        }

    def _forward_loss(self, part: MicroBatch) -> tuple[dict[str, Any], Tensor, Tensor | None]:
        """The same of an objective of fresh noise."""
        rl, forward = self.rl, part.forward
        assert forward is not None
        v = self.velocity(part.condition, forward)
        v_old = v.detach() if forward.v_old_B_C_T_H_W is None else forward.v_old_B_C_T_H_W
        x0, epsilon, t_B = self._part(forward.x0_B_C_T_H_W), self._part(forward.epsilon_B_C_T_H_W), forward.t_B
        advantage_B = part.advantage_B.to(v)
        of_clip = partial(of_whole_clip, self.world)
        numbers = (rl.clip_ratio, rl.nft_beta, rl.advantage.adv_clip_max, of_clip, rl.clip_ratio_high, rl.dual_clip)
        found = self.objective.function(FreshNoise(x0, epsilon, t_B, v, v_old, advantage_B, *numbers))
        loss, kl = found.loss_B.mean(), None
        if isinstance(found, WithoutRatio):
            output = {"policy_loss": loss.detach(), **found.watched}
        else:
            output = self._watched(part, found, found.ratio_B.log(), loss)
        if forward.v_reference_B_C_T_H_W is not None:
            kl = of_clip(objectives.mean_drift(v, forward.v_reference_B_C_T_H_W)).mean()
        return output, loss, kl

    def _clean(self, x0: Tensor, epsilon: Tensor, sigma_B_1: Tensor, condition: Condition) -> Tensor:
        """Clean latents of this rank's frames. Context parallelism stays on, as recomputation must meet it again."""
        context = self.world.context
        context.activate(True)
        xt = self._part(add_noise(x0, epsilon, sigma_B_1))
        return self.world.denoiser(xt, sigma_B_1, context.part_of(condition))

    def _part(self, x: Tensor) -> Tensor:
        return self.world.context.split_frames(x)
