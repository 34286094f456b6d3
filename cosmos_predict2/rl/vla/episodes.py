# SPDX-License-Identifier: Apache-2.0
"""Episodes: a policy decides and an environment executes, chunk after chunk.

    source = LocalRollout(policy, env)
    played = source.collect(starts, mode="sample")

What a policy draws follows from an episode's own number, so that an episode is the same in any company.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from cosmos_predict2.rl.experience import joined
from cosmos_predict2.rl.interfaces import Decision, Info, Observation, Policy, VecEnv
from imaginaire import distributed, random
from imaginaire.errors import ConfigError
from imaginaire.progress import tracked

BAR = "Generating Rollout Epochs"  # as the public trainer calls them: episodes that are played at once
Mode = Literal["sample", "greedy"]


@dataclass(frozen=True)
class Starts:
    """Where episodes begin, and what they draw from: of the policy (``draws``), inside the environment (``seeds``)."""

    task_ids: list[int]
    trial_ids: list[int]
    seeds: list[int]
    draws: list[int]

    def __len__(self) -> int:
        return len(self.task_ids)

    def part(self, rows: slice) -> "Starts":
        return Starts(self.task_ids[rows], self.trial_ids[rows], self.seeds[rows], self.draws[rows])


def validation_starts(task_ids: list[int], trial_ids: list[int]) -> Starts:
    """The same draws in every validation of every run, and others for each task and trial."""
    names = [f"validation/{task}" for task in task_ids]
    return Starts(
        task_ids,
        trial_ids,
        seeds=[random.derive_seed(0, trial, f"{name}/world") % 2**31 for name, trial in zip(names, trial_ids)],
        draws=[random.derive_seed(0, trial, f"{name}/policy") for name, trial in zip(names, trial_ids)],
    )


@dataclass(frozen=True)
class Trajectories:
    """Episodes [E] of M decisions of A actions each. What was not executed has reward 0."""

    record: dict[str, Tensor]  # [M, E, ...]
    actions_M_E_A_D: Tensor
    reward_M_E_A: Tensor
    executed_M_E_A: Tensor  # bool
    success_E: Tensor  # bool, at the end
    finish_step_E: Tensor
    is_valid_E: Tensor  # bool; an episode that was lost with its worker is not
    frames_E_F_H_W_C: Tensor | None = None  # uint8, the first one included, where the environment keeps them
    moved_E_L: Tensor | None = None  # bool, likewise: the actions that moved something besides the robot

    def __len__(self) -> int:
        return len(self.success_E)

    def rows(self, rows: Tensor) -> "Trajectories":
        """Some of the episodes."""
        return replace(
            self,
            record={key: value[:, rows] for key, value in self.record.items()},
            actions_M_E_A_D=self.actions_M_E_A_D[:, rows],
            reward_M_E_A=self.reward_M_E_A[:, rows],
            executed_M_E_A=self.executed_M_E_A[:, rows],
            success_E=self.success_E[rows],
            finish_step_E=self.finish_step_E[rows],
            is_valid_E=self.is_valid_E[rows],
            frames_E_F_H_W_C=None if self.frames_E_F_H_W_C is None else self.frames_E_F_H_W_C[rows],
            moved_E_L=None if self.moved_E_L is None else self.moved_E_L[rows],
        )

    @property
    def return_E(self) -> Tensor:
        return self.reward_M_E_A.sum(dim=(0, 2))


class RolloutSource(Protocol):
    """Where episodes are played: in this process, or elsewhere."""

    def sync(self, policy: Policy) -> None:
        """The weights to decide with from now on."""

    def collect(self, starts: Starts, mode: Mode = "sample", on_progress: Any = None) -> Trajectories: ...


@dataclass
class LocalRollout:
    """Plays in this process, as many episodes at once as the environment has places."""

    policy: Policy
    env: VecEnv
    execute: int | None = None  # of the actions of a decision; all
    keep_frames: bool = False
    temperature: float = 1.0

    def sync(self, policy: Policy) -> None:
        self.policy = policy

    @torch.no_grad()
    def collect(self, starts: Starts, mode: Mode = "sample", on_progress: Any = None) -> Trajectories:
        size, parts = self.env.num_envs, []
        is_shown = on_progress is not None and distributed.is_rank0()
        for start in tracked(range(0, len(starts), size), BAR, is_shown=is_shown, leave=False):
            if on_progress is not None:
                on_progress(f"episode {start + 1} of {len(starts)}")
            parts.append(self._played(starts.part(slice(start, start + size)), mode))
        return concatenated(parts)

    def _played(self, starts: Starts, mode: Mode) -> Trajectories:
        ids = list(range(len(starts)))
        options = dict(env_ids=ids, task_ids=starts.task_ids, trial_ids=starts.trial_ids, seeds=starts.seeds)
        observation, info = self.env.reset(options=options)
        played, frames, moved = _Played(len(ids)), [info.get("frames")], []
        while ids:
            generators = [random.generator(starts.draws[i], len(played), "decision") for i in ids]
            decision = self.policy.act(observation, mode=mode, generators=generators, temperature=self.temperature)
            observation, reward, _, _, info = self.env.chunk_step(decision.actions_E_A_D, ids, self.execute)
            played.add(ids, decision, reward, info)
            frames.append(info["frames"][:, : self.execute] if "frames" in info else None)
            moved += [info["moved"][:, : self.execute]] if "moved" in info else []
            num = -(-int(self.env.metadata["max_steps"]) // (self.execute or reward.shape[1]))
            if len(played) == num:
                break
            if not (self.keep_frames or info["active"].all()):  # nobody decides for an episode that is over
                ids = [i for i, is_active in zip(ids, info["active"].tolist()) if is_active]
                observation = _rows_of(observation, info["active"])
        return replace(
            played.trajectories(num),
            frames_E_F_H_W_C=_film(frames) if self.keep_frames else None,
            moved_E_L=torch.cat(moved, dim=1) if self.keep_frames and moved else None,
        )


class _Played:
    """The decisions of episodes. One that is over keeps its last decision, of which nothing more is executed."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.steps: list[dict[str, Any]] = []
        self.ends: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, ids: Sequence[int], decision: Decision, reward: Tensor, info: Info) -> None:
        step = {"record": dict(decision.record), "actions": decision.actions_E_A_D}
        done = {"reward": reward, "executed": info["executed"]}
        ends = {name: info[name] for name in ("success", "finish_step")}
        ends["valid"] = info.get("valid", torch.ones(len(ids), dtype=torch.bool))
        if len(ids) < self.num:
            last = self.steps[-1]
            step = _put({name: last[name] for name in step}, ids, step)
            done = _put({name: torch.zeros_like(last[name]) for name in done}, ids, done)
            ends = _put(self.ends, ids, ends)
        self.steps.append({**step, **done})
        self.ends = ends

    def trajectories(self, num: int) -> Trajectories:
        """With ``num`` decisions of each episode."""
        last = self.steps[-1]
        nothing = {**last, "reward": torch.zeros_like(last["reward"]), "executed": torch.zeros_like(last["executed"])}
        steps = self.steps + [nothing] * (num - len(self.steps))
        return Trajectories(
            record={key: torch.stack([one["record"][key] for one in steps]) for key in last["record"]},
            actions_M_E_A_D=torch.stack([one["actions"] for one in steps]),
            reward_M_E_A=torch.stack([one["reward"] for one in steps]),
            executed_M_E_A=torch.stack([one["executed"] for one in steps]),
            success_E=self.ends["success"],
            finish_step_E=self.ends["finish_step"],
            is_valid_E=self.ends["valid"],
        )


def _put(whole: Any, rows: Sequence[int], part: Any) -> Any:
    """The whole with these rows replaced, in every tensor."""
    if isinstance(whole, Mapping):
        return {key: _put(value, rows, part[key]) for key, value in whole.items()}
    return whole.index_copy(0, torch.tensor(rows, device=whole.device), part)


def _rows_of(observation: Observation, is_chosen_E: Tensor) -> Observation:
    chosen = is_chosen_E.nonzero().flatten().tolist()
    return {
        name: value[chosen] if isinstance(value, Tensor) else [value[i] for i in chosen]
        for name, value in observation.items()
    }


@torch.no_grad()
def replayed(env: VecEnv, starts: Starts, actions_M_E_A_D: Tensor, execute: int | None = None) -> tuple[Tensor, Tensor]:
    """Success and return [E] of the same starts and actions in another environment."""
    size, successes, returns = env.num_envs, [], []
    for first in range(0, len(starts), size):
        part = starts.part(slice(first, first + size))
        ids = list(range(len(part)))
        env.reset(options=dict(env_ids=ids, task_ids=part.task_ids, trial_ids=part.trial_ids, seeds=part.seeds))
        total = torch.zeros(len(part))
        for actions in actions_M_E_A_D[:, first : first + size]:
            _, reward, _, _, info = env.chunk_step(actions, ids, execute)
            total += reward.sum(dim=1).to(total)
        successes.append(info["success"])
        returns.append(total)
    return torch.cat(successes), torch.cat(returns)


def concatenated(parts: Sequence[Trajectories]) -> Trajectories:
    """Episodes of several collections, one after the other."""
    if len(parts) == 1:
        return parts[0]
    of_time = [{"record": p.record, "a": p.actions_M_E_A_D, "r": p.reward_M_E_A, "x": p.executed_M_E_A} for p in parts]
    turned = joined([_swapped(one) for one in of_time])
    back = _swapped(turned)
    return Trajectories(
        record=back["record"],
        actions_M_E_A_D=back["a"],
        reward_M_E_A=back["r"],
        executed_M_E_A=back["x"],
        success_E=torch.cat([p.success_E for p in parts]),
        finish_step_E=torch.cat([p.finish_step_E for p in parts]),
        is_valid_E=torch.cat([p.is_valid_E for p in parts]),
        frames_E_F_H_W_C=_joined([p.frames_E_F_H_W_C for p in parts]),
        moved_E_L=_joined([p.moved_E_L for p in parts]),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    kept = [part for part in parts if part is not None]
    return torch.cat(kept) if kept else None


def _swapped(value: Any) -> Any:
    """Decisions and episodes exchanged, in every tensor."""
    if isinstance(value, Mapping):
        return {key: _swapped(one) for key, one in value.items()}
    return value.transpose(0, 1)


def _film(frames: Sequence[Tensor | None]) -> Tensor:
    kept = [part for part in frames if part is not None]
    if len(kept) < len(frames):
        raise ConfigError(
            "The environment of these episodes keeps no frames, which are to be recorded: set its keep_frames=True."
        )
    return torch.cat(kept, dim=1)
