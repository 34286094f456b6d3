# SPDX-License-Identifier: Apache-2.0
"""Success of a policy, and agreement of a world model with it.

found = evaluate(policy, env, num_episodes=800)
beside = compare(policy, env, imagined_env, num_episodes=800)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.evaluation.metrics.agreement import wilson
from cosmos_predict2.rl.envs.first_frames import whole_pictures
from cosmos_predict2.rl.envs.replays import rested
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts, Trajectories, frames_of, repeated_steps, replayed
from cosmos_predict2.rl.interfaces import EnvDefaults, Mode, Policy, VecEnv, completed
from cosmos_predict2.rl.policies.null import are_motions
from imaginaire.errors import DataError
from imaginaire.random import derive_seed

Z = 1.96  # of an interval that holds the truth in 95 of 100 cases
SEVERAL = 4  # draws of a start


@dataclass(frozen=True)
class Rate:
    """A share of episodes, with Wilson's interval.

    Episodes of one start, which differ in the policy's draws, are not independent: ``independent`` is how many that are
    would have this spread between the ``starts``. It lies between the number of starts, where a start decides its
    outcome, and that of episodes, where it does not matter.
    """

    successes: int
    episodes: int
    starts: int | None = None  # null: each episode has its own
    independent: float | None = None

    @classmethod
    def of(cls, success_E: Tensor, valid_E: Tensor, starts: Starts) -> "Rate":
        by_start: dict[tuple[int, int], list[float]] = {}
        for start, is_success, is_valid in zip(zip(starts.task_ids, starts.trial_ids), success_E, valid_E):
            if is_valid:
                by_start.setdefault(start, []).append(float(is_success))
        successes, episodes, num = int((success_E & valid_E).sum()), int(valid_E.sum()), len(by_start)
        if num == episodes:
            return cls(successes, episodes)
        p = successes / episodes
        # The variance of a mean of clusters, whose sizes may differ: draws are lost with their workers.
        residuals = [sum(some) - p * len(some) for some in by_start.values()]
        variance = sum(r**2 for r in residuals) * num / max(1, num - 1) / episodes**2
        independent = p * (1 - p) / variance if variance else 0.0  # all alike: no more is known than of the starts
        return cls(successes, episodes, num, min(max(independent, num), episodes))

    @property
    def rate(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the true rate, in 95 of 100 cases."""
        count = self.independent or self.episodes
        return wilson(self.rate, count, Z) if count else (math.nan, math.nan)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        found = {"successes": self.successes, "episodes": self.episodes, "rate": self.rate, "low": low, "high": high}
        return found if self.starts is None else {**found, "starts": self.starts}

    def as_text(self) -> str:
        low, high = self.interval
        of_starts = "" if self.starts is None else f" from {self.starts} starts"
        return f"{self.rate:.3f} [{low:.3f}, {high:.3f}] of {self.episodes}{of_starts}"


@dataclass(frozen=True)
class Evaluation:
    """Success by task, and of all."""

    mode: Mode
    tasks: Mapping[str, Rate]
    played: Trajectories
    starts: Starts

    @property
    def total(self) -> Rate:
        return Rate.of(self.played.success_E, self.played.is_valid_E, self.starts)

    def as_dict(self) -> dict[str, Any]:
        tasks = {name: rate.as_dict() for name, rate in self.tasks.items()}
        return {"mode": self.mode, "success": self.total.as_dict(), "tasks": tasks}


@dataclass(frozen=True)
class Comparison:
    """Imagined against true success of the same starts and actions, where neither episode was lost. Shares of nothing
    are NaN."""

    episodes: int
    true_rate: float
    imagined_rate: float
    agreement: float
    true_positive_rate: float  # of what truly succeeds, imagined to succeed
    false_positive_rate: float  # of what truly fails, imagined to succeed

    @classmethod
    def of(cls, imagined_E: Tensor, true_E: Tensor, valid_E: Tensor) -> "Comparison":
        imagined, true = imagined_E[valid_E].bool(), true_E[valid_E].bool()

        def share(values: Tensor) -> float:
            return float(values.double().mean()) if len(values) else math.nan

        return cls(
            episodes=len(true),
            true_rate=share(true),
            imagined_rate=share(imagined),
            agreement=share(imagined == true),
            true_positive_rate=share(imagined[true]),
            false_positive_rate=share(imagined[~true]),
        )

    def as_text(self) -> str:
        positives = f"true positives {self.true_positive_rate:.3f}, false positives {self.false_positive_rate:.3f}"
        rates = f"imagined {self.imagined_rate:.3f}, true {self.true_rate:.3f}"
        return f"{rates}; agreement {self.agreement:.3f}, {positives}"


def held_out_starts(
    num: int, num_tasks: int, seed: int, first: int = 0, *, in_blocks: bool = False, draws: int = 1
) -> Starts:
    """``num`` starts, tasks in turn and trials in order; what is drawn in episode i follows from the seed and i.

    ``in_blocks`` has the same starts, those of a task together. Of each, the policy draws ``draws`` times.
    """
    numbers = list(range(first, first + num))
    if in_blocks:
        numbers.sort(key=lambda i: i % num_tasks)
    once = Starts(
        task_ids=[i % num_tasks for i in numbers],
        trial_ids=[i // num_tasks for i in numbers],
        seeds=[derive_seed(seed, i, "environment") % 2**31 for i in numbers],
        draws=[derive_seed(seed, i, "policy") for i in numbers],
    )
    return once.repeated(draws)


def draws_of(policy: Policy, mode: Mode, asked: int | None = None) -> int:
    """Number of times that each start is played: as asked, or several where the policy's decisions draw noise."""
    draws_noise = mode == "sample" or policy.draws_when_greedy
    return asked or (SEVERAL if draws_noise else 1)


def evaluate(
    policy: Policy,
    env: VecEnv,
    starts: Starts,
    tasks: Sequence[str],
    mode: Mode = "greedy",
    execute: int | None = None,
    on_progress: Any = None,
) -> Evaluation:
    """Play an episode from each start; ``tasks`` names the environment's. Episodes that were lost do not count."""
    played = LocalRollout(policy, env, execute, keep_record=False).collect(starts, mode, on_progress)
    if not played.is_valid_E.any():
        raise DataError(
            f"All {len(played)} episodes were lost, so nothing was measured. What the environment raised stands above;"
            " python -m scripts.check_environment looks at it."
        )
    task_E = torch.tensor(starts.task_ids) % len(tasks)
    trials = env.metadata.get("num_trials")  # more of a task are the same starts again
    starts = replace(starts, trial_ids=[trial % trials for trial in starts.trial_ids]) if trials else starts
    rates = {name: Rate.of(played.success_E, played.is_valid_E & (task_E == k), starts) for k, name in enumerate(tasks)}
    return Evaluation(mode, rates, played, starts)


def imagined_along(true: Trajectories, starts: Starts, imagined_env: VecEnv, execute: int | None = None) -> Comparison:
    """Imagined beside true success, of the actions that the policy chose in the true environment. Where that ended an
    episode, at success mostly, the robot rests: imagination goes on, and shows the last picture."""
    imagined_E, _, valid_E = replayed(imagined_env, starts, _with_rest(true, execute), execute)
    return Comparison.of(imagined_E, true.success_E, true.is_valid_E & valid_E)


def _with_rest(played: Trajectories, execute: int | None) -> Tensor:
    """Actions [M, E, A, D] of which those behind the end of an episode are rest."""
    executed_M_E_K, actions_M_E_A_D = played.executed_M_E_A[:, :, :execute], played.actions_M_E_A_D.clone()
    if executed_M_E_K.all() or not executed_M_E_K.any():
        return actions_M_E_A_D
    has_motions, size = are_motions(actions_M_E_A_D[played.executed_M_E_A]), executed_M_E_K.shape[2]
    for i, count in enumerate(executed_M_E_K.sum(dim=(0, 2)).tolist()):
        if count:
            rows_L_D = actions_M_E_A_D[:, i, :size].flatten(0, 1)
            longer_L_D = rested(rows_L_D[:count], len(rows_L_D), has_motions)
            actions_M_E_A_D[:, i, :size] = longer_L_D.unflatten(0, (-1, size))
    return actions_M_E_A_D


def played_along(imagined: Trajectories, starts: Starts, true_env: VecEnv, execute: int | None = None) -> Comparison:
    """True beside imagined success, of the actions that the policy chose in imagination."""
    true_E, _, valid_E = replayed(true_env, starts, imagined.actions_M_E_A_D, execute)
    return Comparison.of(imagined.success_E, true_E, imagined.is_valid_E & valid_E)


@torch.no_grad()
def film(env: VecEnv, starts: Starts, actions_M_E_A_D: Tensor, execute: int | None = None) -> Tensor:
    """The pictures of these actions, uint8 [E, 3, F, H, W], the first one included.

    As many episodes as ``env`` has places are played together.
    """
    before, films = completed(env, EnvDefaults).keep_frames, []
    if before is None:
        frames_of({}, env)  # raises
    env.keep_frames = True  # training does without
    try:
        for observation, steps in repeated_steps(env, starts, actions_M_E_A_D, execute):
            pictures = [frames_of(info, env)[:, :execute].cpu() for _, info in steps]
            first = whole_pictures(observation, len(env.views)).cpu()
            film_E_F_H_W_C = torch.cat([first[:, None], *pictures], dim=1)
            films.append(film_E_F_H_W_C.permute(0, 4, 1, 2, 3))
    finally:
        env.keep_frames = before
    return torch.cat(films)
