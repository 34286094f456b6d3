# SPDX-License-Identifier: Apache-2.0
"""Episodes of an environment: which one each place plays, how far it is, how it ended, and what imagined chunks earn.

All that the contract of environments requires of indexed calls, task and trial numbers, checked actions, ends and saved
states is in `Book`; what happens on a step is the environment's own. `score` turns judgements of imagined pictures into
rewards and ends. The guards against success that is only imagined are here: confirmation over several pictures, and
agreement of several noises, of which the worst one counts.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import attrs
import numpy
import torch
from numpy.random import Generator, Philox
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.rl.interfaces import Judgement
from imaginaire import foreign_json
from imaginaire.checkpoint.plain_pickle import FAULTS
from imaginaire.config.schema import Section, at_least, one_of
from imaginaire.errors import CheckpointError, ConfigError, DataError, near, raised_as

Ids = NDArray[numpy.int64]
Bounds = tuple[float | Sequence[float], float | Sequence[float]]  # lowest and highest value, of all or of each number

RESET_OPTIONS = ("env_ids", "task_ids", "trial_ids", "seeds")
_ROWS = ("task_ids", "trial_ids", "seeds", "steps", "resets", "is_over", "is_success", "has_begun")
_FORMAT = 1


@dataclass
class Chunk:
    """The results of a chunk of actions in the environments that were stepped: one row for each."""

    reward_E_A: Tensor
    terminated_E_A: Tensor
    truncated_E_A: Tensor
    executed_E_A: Tensor

    @classmethod
    def empty(cls, num_envs: int, num_actions: int) -> "Chunk":
        shape = (num_envs, num_actions)
        flags = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
        return cls(torch.zeros(shape), *flags)

    def put(self, rows: Sequence[int] | Ids, k: int, reward: Any, ends: tuple[Any, Any]) -> None:
        """Action ``k`` of these rows; ``ends`` as `Book.end` gives them."""
        self.executed_E_A[rows, k] = True
        parts = (self.reward_E_A, self.terminated_E_A, self.truncated_E_A)
        for part, values in zip(parts, (reward, *ends), strict=True):
            part[rows, k] = torch.as_tensor(values, dtype=part.dtype)


class Book:
    """One row for each environment. Trials are numbered from 0 and taken modulo ``num_trials``, tasks likewise."""

    def __init__(self, num_envs: int, *, num_tasks: int, num_trials: int, max_steps: int, seed: int) -> None:
        for name, value in (("num_envs", num_envs), ("max_steps", max_steps)):
            if value < 1:
                raise ConfigError(f"{name}={value}: an environment needs at least 1.")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed={seed}: 0 to 2**63 - 1.")
        self.num_envs, self.num_tasks, self.num_trials = num_envs, num_tasks, num_trials
        self.max_steps, self.seed = max_steps, seed
        self.limits = numpy.full(num_envs, max_steps, dtype=numpy.int64)  # of the present episodes, where they differ
        numbers = {name: numpy.zeros(num_envs, dtype=numpy.int64) for name in _ROWS[:5]}
        flags = {name: numpy.zeros(num_envs, dtype=bool) for name in _ROWS[5:]}
        self.task_ids, self.trial_ids, self.seeds, self.steps, self.resets = numbers.values()
        self.is_over, self.is_success, self.has_begun = flags.values()

    # --- which environments, which episodes

    def ids(self, env_ids: Sequence[int] | None) -> Ids:
        """The environments that a call is about, all where it names none."""
        if env_ids is None:
            return numpy.arange(self.num_envs)
        ids = numpy.asarray(env_ids, dtype=numpy.int64).reshape(-1)
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self.num_envs or len(set(ids.tolist())) < len(ids):
            raise DataError(f"env_ids={ids.tolist()}: different numbers from 0 to {self.num_envs - 1}, one at least.")
        return ids

    def begin(self, seed: int | None, options: Mapping[str, Any] | None) -> Ids:
        """Begin episodes as the options of a reset say, and give the environments that began one."""
        options = options or {}
        if unknown := [key for key in options if key not in RESET_OPTIONS]:
            raise ConfigError(f"reset has no option '{unknown[0]}'.{near(str(unknown[0]), RESET_OPTIONS)}")
        ids = self.ids(options.get("env_ids"))
        draws = [self._draws(int(i), seed) for i in ids]
        drawn = {
            "task_ids": [int(draw.integers(self.num_tasks)) for draw in draws],
            "trial_ids": [int(draw.integers(self.num_trials)) for draw in draws],
            "seeds": [int(draw.integers(2**31)) for draw in draws],
        }
        for name, values in drawn.items():
            drawn[name] = values if options.get(name) is None else [int(value) for value in options[name]]
            if (count := len(drawn[name])) != len(ids):
                raise DataError(f"{name} has {count} numbers for {len(ids)} environments: one for each.")
        self.task_ids[ids] = numpy.mod(drawn["task_ids"], self.num_tasks)
        self.trial_ids[ids] = numpy.mod(drawn["trial_ids"], self.num_trials)
        self.seeds[ids] = drawn["seeds"]
        self.steps[ids], self.is_over[ids], self.is_success[ids] = 0, False, False
        self.resets[ids] += 1
        self.has_begun[ids] = True
        return ids

    def _draws(self, env: int, seed: int | None) -> Generator:
        """The random numbers of a reset: without a seed, of the environment's next episode."""
        key = [self.seed, self.resets[env] << 20 | env] if seed is None else [int(seed) ^ 1 << 63, env]
        return Generator(Philox(key=numpy.array(key, dtype=numpy.uint64)))

    # --- steps

    def check_actions(
        self, actions_E_A_D: Any, ids: Ids, action_dim: int, execute: int | None, *, bounds: Bounds | None = (-1.0, 1.0)
    ) -> tuple[Tensor, int]:
        """Actions [E, A, D], float32 within ``bounds`` on the host, and how many of them are executed."""
        actions = torch.as_tensor(actions_E_A_D).detach().to("cpu", torch.float32)
        if actions.ndim != 3 or actions.shape[0] != len(ids) or actions.shape[2] != action_dim or not actions.shape[1]:
            raise DataError(
                f"Actions of shape {list(actions.shape)}, but [{len(ids)}, actions, {action_dim}] are expected: a chunk"
                f" for each environment that is stepped, {action_dim} numbers per action. A policy of another size is"
                " cloned anew, from demonstrations of this robot: python -m scripts.train_policy."
            )
        if not (finite := torch.isfinite(actions).flatten(1).all(dim=1)).all():
            bad = ids[~finite.numpy()].tolist()
            raise DataError(f"The actions of environments {bad} are not finite. Did the policy diverge?")
        if idle := ids[~self.has_begun[ids]].tolist():
            raise DataError(f"Environments {idle} were never reset: call reset before chunk_step.")
        count = actions.shape[1] if execute is None else execute
        if not 1 <= count <= actions.shape[1]:
            raise DataError(f"execute={execute} of a chunk of {actions.shape[1]} actions: 1 to all of them.")
        if bounds is not None:
            actions = actions.clamp(*(torch.as_tensor(bound, dtype=torch.float32) for bound in bounds))
        return actions, count

    def end(self, ids: Ids, is_success: NDArray[numpy.bool_], ends_on_success: bool | None) -> tuple[Any, Any]:
        """Flags of the environments that a step terminated, and of those that it truncated; success wins.

        At the last step of an episode success terminates it, too.
        """
        is_last = self.steps[ids] >= self.limits[ids]
        terminated = is_success & (is_last | bool(ends_on_success))
        truncated = is_last & ~terminated
        self.is_success[ids] = is_success
        self.is_over[ids] = terminated | truncated
        return terminated, truncated

    def info(self, ids: Ids, chunk: Chunk | None = None) -> dict[str, Any]:
        """The entries that the contract asks for after a reset or a chunk, and which episodes these are."""
        over = self.is_over[ids]
        info: dict[str, Any] = {
            "success": torch.from_numpy(self.is_success[ids]),
            "active": torch.from_numpy(~over),
            "finish_step": torch.from_numpy(numpy.where(over, self.steps[ids], -1)),
            "task_ids": torch.from_numpy(self.task_ids[ids]),
            "trial_ids": torch.from_numpy(self.trial_ids[ids]),
        }
        return info if chunk is None else {**info, "executed": chunk.executed_E_A}

    # --- saved

    def to_bytes(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
        """This book and what an environment has besides, as a NumPy archive without pickles."""
        content = {f"book.{name}": getattr(self, name) for name in _ROWS} | dict(arrays)
        file = io.BytesIO()
        numpy.savez(file, about=numpy.asarray(json.dumps({"format": _FORMAT, **about}, sort_keys=True)), **content)
        return file.getvalue()

    def from_bytes(self, state: bytes, about: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Read this book, and give what the environment has besides; raises for a state of another environment."""
        with raised_as(CheckpointError, "This is no state of an environment, or it is damaged", *FAULTS):
            with numpy.load(io.BytesIO(state), allow_pickle=False) as file:
                content = {name: file[name] for name in file.files}
            saved = foreign_json.loads(str(content.pop("about")))
            rows = {name: content.pop(f"book.{name}") for name in _ROWS}
        expected = {"format": _FORMAT, **json.loads(json.dumps(about))}
        for key in {**expected, **saved}:
            if saved.get(key) != expected.get(key):
                found = f"The state is of an environment with {key}={saved.get(key)!r}"
                raise CheckpointError(f"{found}, but this one has {expected.get(key)!r}.")
        for name, values in rows.items():
            getattr(self, name)[:] = values
        return content


@attrs.define(kw_only=True, slots=False)
class Scoring(Section):
    """Rules by which judgements become rewards."""

    # Pictures that are judged: after each executed action, or after the last one of a chunk alone.
    judge: str = attrs.field(default="all", validator=one_of("all", "last"))
    # Paid: the value of each judged picture, or that of an episode's last one alone.
    reward_on: str = attrs.field(default="each", validator=one_of("each", "last"))
    reward_coef: float = 1.0
    sparse: bool = False  # pay 1 for a picture that shows success and 0 for any other, in place of its value
    use_rel_reward: bool = False  # pay differences between successive judged pictures, the first one's to 0
    success_threshold: float | None = None  # of the value; null: the reward's
    # A picture's value is the mean of so many judged ones of its chunk, itself the last: one alone is noisy.
    mean_of: int = attrs.field(default=1, validator=at_least(1))
    confirm: int = attrs.field(default=1, validator=at_least(1))  # successive judged pictures that must show success
    terminate_on_success: bool = False  # at the end of the chunk

    def __attrs_post_init__(self) -> None:
        if self.use_rel_reward and self.reward_on == "last":
            raise ConfigError("scoring.use_rel_reward=true pays for changes: it needs scoring.reward_on=each.")
        if self.mean_of > 1 and self.judge == "last":
            raise ConfigError(f"scoring.mean_of={self.mean_of} pictures of a chunk: it needs scoring.judge=all.")


@dataclass(frozen=True)
class Scored:
    """One row for each of E environments, a column for each of A actions."""

    reward_E_A: NDArray[numpy.float32]  # with reward_on "last" as if each episode ended here
    is_success_E: NDArray[numpy.bool_]  # at the last executed action; of one that ends on success, at any
    value_E: NDArray[numpy.float32]  # of the last judged picture
    value_E_A: NDArray[numpy.float32]  # of the judged pictures, 0 elsewhere
    disagrees_E: NDArray[numpy.bool_]  # one noise shows success there and another does not
    previous_E: NDArray[numpy.float32]  # for the next chunk
    streak_E: NDArray[numpy.int64]


def merged(judgement: Judgement, num_noises: int) -> tuple[Any, Any, Any]:
    """Value [E, F] and success [E, F] of judgements of noise after noise, the worst of them; and who disagrees."""
    value, success = (tensor.detach().cpu() for tensor in (judgement.value_E_F, judgement.success_E_F))
    if value.shape != success.shape or value.ndim != 2 or value.shape[0] % num_noises:
        raise DataError(f"A reward gave value {list(value.shape)} and success {list(success.shape)}: [E, F] each.")
    value_N_E_F = value.float().numpy().reshape(num_noises, -1, value.shape[1])
    success_N_E_F = success.bool().numpy().reshape(value_N_E_F.shape)
    if not numpy.isfinite(value_N_E_F).all():
        raise DataError("A reward judged pictures by a value that is not finite.")
    everywhere, anywhere = success_N_E_F.all(0), success_N_E_F.any(0)
    return value_N_E_F.min(0), everywhere, everywhere != anywhere


def score(
    scoring: Scoring,
    judged: tuple[Any, Any, Any],
    counts_E: NDArray[numpy.int64],
    num_actions: int,
    previous_E: NDArray[numpy.float32],
    streak_E: NDArray[numpy.int64],
) -> Scored:
    """The worth of a chunk of which ``counts_E`` actions were executed; ``judged`` as `merged` gives it."""
    value_E_F, success_E_F, differs_E_F = judged
    if scoring.mean_of > 1:
        ends = range(1, 1 + value_E_F.shape[1])
        value_E_F = numpy.stack([value_E_F[:, max(0, k - scoring.mean_of) : k].mean(1) for k in ends], axis=1)
    if scoring.success_threshold is not None:
        success_E_F = value_E_F >= scoring.success_threshold
    size, previous, streak = len(counts_E), previous_E.copy(), streak_E.copy()
    reward, values = numpy.zeros((2, size, num_actions), dtype=numpy.float32)
    is_success, ever, differs = numpy.zeros((3, size), dtype=bool)
    value = numpy.zeros(size, dtype=numpy.float32)
    for k in range(value_E_F.shape[1]):
        column = counts_E - 1 if scoring.judge == "last" else numpy.full(size, k)
        seen = column < counts_E
        is_last = seen & (column == counts_E - 1)
        paid = scoring.reward_coef * (success_E_F[:, k].astype(value_E_F.dtype) if scoring.sparse else value_E_F[:, k])
        earned = paid - previous if scoring.use_rel_reward else paid
        pays = is_last if scoring.reward_on == "last" else seen
        reward[pays, column[pays]] = earned[pays]
        values[seen, column[seen]] = value_E_F[seen, k]
        previous = numpy.where(seen, paid, previous)
        streak = numpy.where(seen, numpy.where(success_E_F[:, k], streak + 1, 0), streak)
        is_success = numpy.where(seen, streak >= scoring.confirm, is_success)
        ever |= is_success
        value = numpy.where(seen, value_E_F[:, k], value)
        differs = numpy.where(seen, differs_E_F[:, k], differs)
    success, last = ever if scoring.terminate_on_success else is_success, value.astype(numpy.float32)
    return Scored(reward, success, last, values, differs, previous.astype(numpy.float32), streak)
