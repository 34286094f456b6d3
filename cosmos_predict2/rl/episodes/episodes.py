# SPDX-License-Identifier: Apache-2.0
"""Episodes: a policy decides and an environment executes, chunk after chunk.

    source = LocalRollout(policy, env)
    played = source.collect(starts, mode="sample")

What a policy draws follows from an episode's own number, so that an episode is the same in any company.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmos_predict2.data.views import named
from cosmos_predict2.rl.envs.first_frames import whole_pictures
from cosmos_predict2.rl.interfaces import (
    Decision,
    EnvDefaults,
    Info,
    Mode,
    Observation,
    Policy,
    PolicyDefaults,
    VecEnv,
    completed,
    rows_of,
)
from imaginaire import distributed, random
from imaginaire.errors import ConfigError, near
from imaginaire.log import Progress

MOST_DISTORTED = 1.1  # ratio of aspect ratios: sides are rounded to multiples of 8 or 16
BAR = "Generating Rollout Epochs"  # as the public trainer calls it; here it counts episodes


@dataclass(frozen=True)
class Starts:
    """Tasks and starts of episodes, and the seeds of draws: the policy's (``draws``), the environment's (``seeds``)."""

    task_ids: list[int]
    trial_ids: list[int]
    seeds: list[int]
    draws: list[int]

    def __len__(self) -> int:
        return len(self.task_ids)

    def part(self, rows: slice) -> "Starts":
        return Starts(self.task_ids[rows], self.trial_ids[rows], self.seeds[rows], self.draws[rows])

    def options(self, env_ids: list[int]) -> dict[str, list[int]]:
        """The options of a reset of these environments."""
        return dict(env_ids=env_ids, task_ids=self.task_ids, trial_ids=self.trial_ids, seeds=self.seeds)

    def repeated(self, times: int) -> "Starts":
        """Each start so often, one after the other, with other draws of the policy each time but the first."""

        def each(values: list[int]) -> list[int]:
            return [value for value in values for _ in range(times)]

        draws = [random.derive_seed(draw, k, "again") if k else draw for draw in self.draws for k in range(times)]
        return Starts(each(self.task_ids), each(self.trial_ids), each(self.seeds), draws)


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
    """Episodes [E] of M decisions of A actions each, on the host. What was not executed has reward 0."""

    record: dict[str, Tensor]  # [M, E, ...]
    actions_M_E_A_D: Tensor
    reward_M_E_A: Tensor
    executed_M_E_A: Tensor  # bool
    success_E: Tensor  # bool, at the end
    finish_step_E: Tensor
    is_valid_E: Tensor  # bool; an episode that was lost with its worker is not
    log_prob_M_E_K_N: Tensor | None = None  # that the policy drew with, where the record is kept
    disagrees_M_E: Tensor | None = None  # bool, of an environment with two noises: only one of them shows success
    frames_E_F_H_W_C: Tensor | None = None  # uint8, the first one included, where the environment keeps them
    moved_E_L: Tensor | None = None  # bool, likewise: the actions that moved something besides the robot

    def __len__(self) -> int:
        return len(self.success_E)

    def rows(self, rows: Tensor) -> "Trajectories":
        """Some of the episodes."""
        return self.changed(lambda values, dim: values[0].index_select(dim, rows.to(values[0].device)))

    def changed(
        self, change: Callable[[list[Tensor], int], Tensor], others: Sequence["Trajectories"] = ()
    ) -> "Trajectories":
        """With each tensor as it is after a change, which gets those of ``others`` too, and which dimension is E."""

        def of(values: list[Any], dim: int) -> Any:
            if isinstance(values[0], dict):
                return {name: of([value[name] for value in values], dim) for name in values[0]}
            return None if values[0] is None else change(values, dim)

        values = {one.name: [getattr(each, one.name) for each in (self, *others)] for one in fields(self)}
        return Trajectories(**{name: of(v, int("_M_" in name or name == "record")) for name, v in values.items()})

    def with_others(self, others: Sequence["Trajectories"]) -> "Trajectories":
        """The episodes of several collections, one after the other."""
        return self.changed(torch.cat, others) if others else self

    @property
    def return_E(self) -> Tensor:
        return self.reward_M_E_A.sum(dim=(0, 2))


def without_unreliable(played: Trajectories, *, is_paid_last: bool) -> Trajectories:
    """Without the decisions on which two noises disagree: they are as if they were not executed, and the return is that
    of the others, per decision. Where the last decision alone is paid (``is_paid_last``), the episode is not valid
    without it."""
    assert played.disagrees_M_E is not None
    happened_M_E = played.executed_M_E_A.any(dim=2)
    counts_M_E = happened_M_E & ~played.disagrees_M_E
    count_E, left_E = happened_M_E.sum(dim=0), counts_M_E.sum(dim=0)
    is_valid_E = played.is_valid_E & (left_E > 0)
    scale_E = torch.ones_like(count_E, dtype=played.reward_M_E_A.dtype)
    if is_paid_last:
        is_valid_E &= counts_M_E[count_E.clamp(min=1) - 1, torch.arange(len(count_E))]
    else:
        scale_E = count_E / left_E.clamp(min=1)
    return replace(
        played,
        executed_M_E_A=played.executed_M_E_A & counts_M_E[..., None],
        reward_M_E_A=torch.where(counts_M_E[..., None], played.reward_M_E_A, 0.0) * scale_E[None, :, None],
        is_valid_E=is_valid_E,
    )


class RolloutSource(Protocol):
    """Plays episodes, in this process or elsewhere.

    Optional: ``is_elsewhere`` (this process needs no whole policy for it) and ``release()``, as of `VecEnv`.
    """

    is_elsewhere: bool
    release: Callable[[], None] | None

    def sync(self, policy: Policy) -> None:
        """The weights to decide with from now on."""

    def collect(self, starts: Starts, mode: Mode = "sample", on_progress: Any = None) -> Trajectories: ...


class RolloutDefaults:
    is_elsewhere: bool = False
    release: Callable[[], None] | None = None


@dataclass
class LocalRollout(RolloutDefaults):
    """Plays in this process, as many episodes at once as the environment has places.

    An environment whose episode is over takes the next start while others go on; see `Places`. Evaluations do without
    the record of the decisions (``keep_record``), most of which are pictures.
    """

    policy: Policy
    env: VecEnv
    execute: int | None = None  # of the actions of a decision; all
    keep_frames: bool = False
    temperature: float = 1.0
    keep_record: bool = True

    def __post_init__(self) -> None:
        completed(self.env, EnvDefaults)
        completed(self.policy, PolicyDefaults)

    def sync(self, policy: Policy) -> None:
        self.policy = policy

    @torch.no_grad()
    def collect(self, starts: Starts, mode: Mode = "sample", on_progress: Any = None) -> Trajectories:
        places, played = Places(self.env, starts), _Played(len(starts), int(self.env.metadata["max_steps"]), self)
        is_shown = on_progress is not None and distributed.is_rank0()
        with Progress(BAR, len(starts), unit="episode", is_shown=is_shown, leave=False, as_bar=True) as progress:
            while not places.are_done:
                if places.are_due:
                    begun = places.begin()
                    require_known_sentences(self.policy.sentences, begun[1])
                    require_views(type(self.policy).__name__, self.policy.views, begun[1])
                    if self.env.imagination is None:  # a world model stretches the recordings' own pictures
                        require_shape(type(self.policy).__name__, self.policy.recorded_size, begun[1])
                    played.begin(*begun)
                numbers = places.episodes
                draws = [random.generator(starts.draws[i], played.counts[i], "decision") for i in numbers]
                options: Any = dict(mode=mode, generators=draws, temperature=self.temperature)
                decision = self.policy.act(places.observation, **options)
                observation, reward, _, _, info = self.env.chunk_step(decision.actions_E_A_D, places.ids, self.execute)
                is_over_E = played.add(numbers, decision, reward, info)
                places.go_on(observation, is_over_E)
                progress.update(int(is_over_E.sum()))
                if on_progress is not None:
                    on_progress(f"{progress.done} of {len(starts)} episodes")
        return played.trajectories()


def require_known_sentences(known: Sequence[str], observation: Observation) -> None:
    """Raise where a task is described by other words than in the recordings that a policy is cloned from, if any are
    known."""
    if known and (other := next((one for one in observation["task_description"] if one not in known), None)):
        found = f"The environment calls its task '{other}', which no recording of the policy does.{near(other, known)}"
        raise ConfigError(f"{found} Give it the recorded words: --suite 'gym:ID?sentence=WORDS', or task_description.")


def require_views(what: str, views: Sequence[str], observation: Observation) -> None:
    """Raise where an environment shows fewer views than the recordings that a policy is cloned from have."""
    if len(views) > 1 and (count := 1 + observation["wrist_image"].shape[1]) < len(views):
        cure = "give it a wrist camera (of gym:ID ?wrist=CAMERA), or clone on one camera"
        raise ConfigError(f"{what} has {named(views)}, but the environment shows {count}: {cure}.")


def require_shape(what: str, size: Sequence[int], observation: Observation) -> None:
    """Raise where an environment's pictures have another shape than those of the recordings that a policy is cloned
    from, if that is known. It brings another size to its own, but another shape shows something else, or distorts."""
    height, width = observation["full_image"].shape[1:3]
    ratio = width * size[0] / (height * size[1]) if size else 1.0
    if max(ratio, 1 / ratio) > MOST_DISTORTED:
        raise ConfigError(
            f"{what}: recorded pictures have height {size[0]} and width {size[1]}, but the environment shows height"
            f" {height} and width {width}, another shape. Let it draw as was recorded ('gym:ID?image_size="
            f"[{size[0]},{size[1]}]'), or clone on recordings of its pictures."
        )


class Places:
    """The episode that each environment plays.

    An idle environment takes the next start at once, unless others would have to wait for its reset (``reset_chunks``
    of the metadata). Then it waits until the idle ones have waited together as long as the others would. With the
    cheapest resets that is at once, with the dearest when all are idle.
    """

    def __init__(self, env: VecEnv, starts: Starts) -> None:
        self.env, self.starts = env, starts
        self.reset_chunks = int(env.metadata.get("reset_chunks", 0))
        self.ids: list[int] = []  # environments that play, and which episodes
        self.episodes: list[int] = []
        self.observation: Observation = {}
        self._begun = 0
        self._waited = 0  # chunks that idle environments did not play, since the last reset

    @property
    def are_done(self) -> bool:
        return not self.ids and self._num_idle == 0

    @property
    def are_due(self) -> bool:
        return self._num_idle > 0 and self._waited >= self.reset_chunks * len(self.ids)

    @property
    def _num_idle(self) -> int:
        """Environments without an episode that could have one."""
        return min(self.env.num_envs - len(self.ids), len(self.starts) - self._begun)

    def begin(self) -> tuple[list[int], Observation]:
        """The next episodes, in the environments that are idle, and what is seen at their starts."""
        ids = [i for i in range(self.env.num_envs) if i not in self.ids][: self._num_idle]
        episodes = list(range(self._begun, self._begun + len(ids)))
        part = self.starts.part(slice(self._begun, self._begun + len(ids)))
        observation, _ = self.env.reset(options=part.options(ids))
        self.observation = _joined_rows(self.observation, observation) if self.ids else observation
        self.ids, self.episodes = self.ids + ids, self.episodes + episodes
        self._begun, self._waited = self._begun + len(ids), 0
        return episodes, observation

    def go_on(self, observation: Observation, is_over_E: Tensor) -> None:
        """After a chunk of all that play: those whose episodes are over are idle now."""
        self._waited += self._num_idle
        goes_on = [row for row, is_over in enumerate(is_over_E.tolist()) if not is_over]
        if 0 < len(goes_on) < len(self.ids):
            observation = rows_of(observation, goes_on)
        self.observation = observation
        self.ids, self.episodes = [self.ids[row] for row in goes_on], [self.episodes[row] for row in goes_on]


class _Played:
    """The decisions [M] of episodes [E], in the host's memory, which is taken once: pictures of a rollout are larger
    than what a policy leaves of a GPU's.

    What is left of M after an episode's end repeats its last decision, of which nothing is executed, and its last
    picture.
    """

    def __init__(self, num_episodes: int, max_steps: int, rollout: LocalRollout) -> None:
        self.max_steps, self.rollout = max_steps, rollout
        self.counts = [0] * num_episodes  # of decisions
        self.num_decisions = 0
        self.num_actions = 0  # of each decision that are executed, at most
        self.decided: dict[str, Tensor] = {}  # [M, E, ...], by the names of `Trajectories`
        self.record: dict[str, Tensor] = {}
        self.ends: dict[str, Tensor] = {}  # [E]
        self.films: list[list[Tensor]] = [[] for _ in self.counts]
        self.moved: list[list[Tensor]] = [[] for _ in self.counts]

    def begin(self, episodes: Sequence[int], observation: Observation) -> None:
        if self.rollout.keep_frames:
            for i, picture in zip(episodes, whole_pictures(observation, len(self.rollout.env.views))):
                self.films[i].append(picture[None].cpu())

    def add(self, episodes: Sequence[int], decision: Decision, reward: Tensor, info: Info) -> Tensor:
        """A decision of each of these episodes, and what came of it; which of them are over, [E]."""
        if not self.num_actions:
            self.num_actions = self.rollout.execute or reward.shape[1]
            self.num_decisions = -(-self.max_steps // self.num_actions)
        steps, size = [self.counts[i] for i in episodes], (self.num_decisions, len(self.counts))
        decided = dict(actions_M_E_A_D=decision.actions_E_A_D, reward_M_E_A=reward, executed_M_E_A=info["executed"])
        if self.rollout.keep_record and decision.log_prob_E_K_N is not None:
            decided["log_prob_M_E_K_N"] = decision.log_prob_E_K_N
        if self.rollout.env.num_noises > 1:
            decided["disagrees_M_E"] = info["disagrees"]
        _write(self.decided, decided, size, (steps, episodes))
        if self.rollout.keep_record:
            _write(self.record, decision.record, size, (steps, episodes))
        lost_E = lost(decision)
        ends = dict(success_E=info["success"], finish_step_E=info["finish_step"], is_valid_E=valid(info) & ~lost_E)
        _write(self.ends, ends, size[1:], (episodes,))
        if self.rollout.keep_frames:
            shape, expected = frames_of(info, self.rollout.env).shape[2:], self.films[episodes[0]][0].shape[1:]
            if shape != expected:
                env, found = type(self.rollout.env).__name__, f'info["frames"] has pictures {list(shape)}'
                views = f"{list(expected)} are those of {named(self.rollout.env.views)}"
                raise ConfigError(f"{env}: {found}, but {views}: full_image, and wrist_image below it.")
            for name, kept in (("frames", self.films), ("moved", self.moved)):
                for i, values in zip(episodes, info.get(name, ())):
                    kept[i].append(values[: self.rollout.execute].cpu())
        is_over = ~info["active"].cpu() | lost_E
        names = ("actions_M_E_A_D", "log_prob_M_E_K_N")
        repeated = [*(self.decided[name] for name in names if name in self.decided), *self.record.values()]
        for row, i in enumerate(episodes):
            self.counts[i] += 1
            count = self.counts[i]
            is_over[row] |= count == self.num_decisions
            if is_over[row]:
                for value in repeated:
                    value[count:, i] = value[count - 1, i]
        return is_over

    def trajectories(self) -> Trajectories:
        num_steps = self.num_decisions * self.num_actions
        films: dict[str, Tensor] = {}
        if self.rollout.keep_frames:
            films["frames_E_F_H_W_C"] = _of_length(self.films, 1 + num_steps, repeats=True)
            if any(self.moved):
                films["moved_E_L"] = _of_length(self.moved, num_steps, repeats=False)
        return Trajectories(self.record, **self.decided, **self.ends, **films)


def _write(whole: dict[str, Tensor], rows: Mapping[str, Tensor], size: tuple[int, ...], where: Any) -> None:
    """Values of some episodes, into memory of all of them, which begins as zeros."""
    for name, value in rows.items():
        value = value.cpu()
        if name not in whole:
            whole[name] = value.new_zeros(*size, *value.shape[1:])
        whole[name][where] = value


def _of_length(parts: Sequence[Sequence[Tensor]], length: int, *, repeats: bool) -> Tensor:
    """Parts [n, ...] of each episode, [E, length, ...]: behind them the last one again, or zeros."""
    whole = parts[0][0].new_zeros(len(parts), length, *parts[0][0].shape[1:])
    for row, of_episode in zip(whole, parts):
        count = sum(map(len, of_episode))
        row[:count] = torch.cat(list(of_episode))
        if repeats:
            row[count:] = row[count - 1]
    return whole


def lost(decision: Decision) -> Tensor:
    """The rows that no decision could be had for, [E]."""
    is_lost_E, none = decision.is_lost_E, torch.zeros(len(decision.actions_E_A_D), dtype=torch.bool)
    return none if is_lost_E is None else is_lost_E.cpu()


def valid(info: Info) -> Tensor:
    """The episodes that were not lost, [E]; all, where an environment never loses one."""
    return info.get("valid", torch.ones_like(info["success"])).cpu()  # type: ignore[no-any-return]


def _joined_rows(first: Observation, second: Observation) -> Observation:
    return {
        name: torch.cat([value, second[name]]) if isinstance(value, Tensor) else [*value, *second[name]]
        for name, value in first.items()
    }


def frames_of(info: Info, env: VecEnv) -> Tensor:
    """The pictures [E, A, H, W, 3] after each action of a chunk, which an environment gives with ``keep_frames``."""
    if "frames" in info:
        return info["frames"]  # type: ignore[no-any-return]
    cure = {
        None: 'give it an attribute keep_frames, and where that is true info["frames"] [E, A, H, W, 3] after a chunk',
        True: 'its keep_frames is true, so chunk_step must give info["frames"] [E, A, H, W, 3]',
        False: "set its keep_frames=True",
    }[env.keep_frames]
    raise ConfigError(f'{type(env).__name__} gave no info["frames"] after a chunk, which are to be shown: {cure}.')


def release(*players: "VecEnv | RolloutSource | None") -> None:
    """Environments or rollouts end their simulators, where they have some, and start them again when they play."""
    for player in players:
        if player is not None and player.release is not None:
            player.release()


def repeated_steps(
    env: VecEnv, starts: Starts, actions_M_E_A_D: Tensor, execute: int | None
) -> Iterator[tuple[Observation, list[tuple[Tensor, Info]]]]:
    """The first observation of the same starts, and reward and info after each decision of the same actions, of as many
    episodes at a time as the environment has places."""
    for first in range(0, len(starts), env.num_envs):
        rows = slice(first, first + env.num_envs)
        part = starts.part(rows)
        ids = list(range(len(part)))
        observation, _ = env.reset(options=part.options(ids))
        yield observation, [env.chunk_step(actions, ids, execute)[1::3] for actions in actions_M_E_A_D[:, rows]]


@torch.no_grad()
def replayed(
    env: VecEnv, starts: Starts, actions_M_E_A_D: Tensor, execute: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Success and return [E] of the same starts and actions in another environment, and which episodes are valid."""
    found = []
    for _, steps in repeated_steps(env, starts, actions_M_E_A_D, execute):
        info, total = steps[-1][1], sum((reward.sum(dim=1).cpu() for reward, _ in steps), torch.zeros(()))
        found.append((info["success"].cpu(), total, valid(info)))
    success_E, return_E, valid_E = (torch.cat(parts) for parts in zip(*found, strict=True))
    return success_E, return_E, valid_E
