# SPDX-License-Identifier: Apache-2.0
"""Cloning: a policy learns to decide as demonstrations do.

    demonstrations = toy_demonstrations(20, seed=0)
    clone(policy, demonstrations.windows(chunk=12, starts=[0, 12]), steps=1500, lr=1e-3, batch_size=64, seed=0)

A demonstration is a recorded episode; a window of it is one picture and the chunk of actions that followed. Any policy
can be cloned that offers what `Cloneable` names.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cosmos_predict2.actions.statistics import usual_statistics
from cosmos_predict2.actions.transforms import UNKNOWN, ActionContract
from cosmos_predict2.data.action_conditioned.recorded_episodes import RecordedEpisode, open_episodes
from cosmos_predict2.data.lerobot.info import held_out
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import split_of
from cosmos_predict2.data.views import split, views_of
from cosmos_predict2.rl.interfaces import Observation, PolicyDefaults, completed, observation_of
from imaginaire import random
from imaginaire.buildable import made, path_of, recorded, resolve
from imaginaire.errors import ConfigError, DataError, TrainingError
from imaginaire.log import Progress
from imaginaire.random import generator

log = logging.getLogger(__name__)

MOST_OUTSIDE = 0.05  # of a number: 2 % lie beyond its own q01 and q99
MIX = "expert"  # skill .85 to 1
TASK = "push_puck"  # what the toy world's expert demonstrates


class Cloneable(Protocol):
    """A policy, a module, that learns from demonstrations besides.

    Optional, both of its class: ``cloning``, in place of `DEFAULTS`, and ``to_clone``, which makes one of a
    `CloneStart` with the flags that it takes.
    """

    cloning: ClassVar[Mapping[str, Any]]
    to_clone: ClassVar[Callable[..., Any]]
    action_dim: int

    def record_of(self, observation: Observation, actions_B_A_D: Tensor) -> dict[str, Tensor]:
        """The record of demonstrators who saw this and did that, one row each."""

    def shares_outside(self, actions_B_A_D: Tensor) -> Tensor:
        """The share of each number of the demonstrations [D] that lies beyond what the policy scales to -1 and 1."""

    def cloning_loss(self, record: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """A loss that falls as the policy becomes likelier to do the same; draws come from ``generator``."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


NEEDED = ("act", "record_of", "cloning_loss", "parameters")


def cloneable(policy: str) -> Any:
    """The class of a policy by its name, which must have what cloning calls."""
    cls = resolve(policy, "policy")
    if missing := [name for name in NEEDED if not hasattr(cls, name)]:
        raise ConfigError(
            f"The policy {policy} cannot be cloned: it has no {', '.join(missing)}. A policy of your own is a torch"
            " module with these methods: documentations/extending_rl.md"
        )
    if recorded(path_of(cls).replace(":", "."), "policy") is None:
        raise ConfigError(f'{policy} is not registered, so no program could read its clone: @buildable("policy").')
    return cls


# How a policy is cloned that does not say it by its ``cloning``. A clone that succeeds about every second time leaves
# reinforcement learning something to begin with and to improve.
DEFAULTS: Mapping[str, Any] = dict(demonstrations=100, windows="all", steps=1500, lr=1e-3, batch_size=64)


@dataclass(frozen=True)
class Demonstrations:
    """Recorded episodes: their actions, and any of their pictures when it is asked for, with all ``views``."""

    actions: Sequence[NDArray[numpy.float32]]  # of each episode [T, D]
    tasks: Sequence[str]  # what each episode shows, as a sentence
    picture: Callable[[int, Sequence[int]], Tensor]  # (episode, frames) -> uint8 [F, V * H, W, 3]
    source: str
    views: tuple[str, ...] = ("",)
    contract: ActionContract = UNKNOWN
    states: Sequence[NDArray[numpy.float32]] | None = None  # of the robot before each action [T, S], where asked for

    def places(self, chunk: int, starts: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """(episode, step) of the windows that begin at these steps; None means at every step."""
        longest = max(len(of_episode) for of_episode in self.actions)
        if late := [start for start in starts or () if not 0 <= start <= longest - chunk]:
            raise DataError(
                f"{self.source}: no demonstration holds a window of {chunk} actions that begins at {late}; the longest"
                f" has {longest} actions."
            )
        found = []
        for i, of_episode in enumerate(self.actions):
            last = len(of_episode) - chunk
            found += [(i, k) for k in (range(last + 1) if starts is None else starts) if 0 <= k <= last]
        if not found:
            lengths = sorted({len(of_episode) for of_episode in self.actions})
            raise DataError(f"{self.source}: demonstrations of {lengths} actions hold no window of {chunk}.")
        return found

    def windows(self, chunk: int, starts: Sequence[int] | None = None) -> "CloneWindows":
        """The windows that begin at these steps, with their pictures; None means at every step."""
        places = self.places(chunk, starts)
        own: dict[int, list[int]] = {}
        for i, start in places:
            own.setdefault(i, []).append(start)
        return self.without_pictures(chunk, places, torch.cat([self.picture(i, some) for i, some in own.items()]))

    def without_pictures(
        self, chunk: int, places: Sequence[tuple[int, int]], pictures_B_H_W_C: Tensor | None = None
    ) -> "CloneWindows":
        """The windows at these places, of whose pictures none is read."""
        actions = numpy.stack([self.actions[i][start : start + chunk] for i, start in places])
        pictures = torch.empty(0, 0, 0, 3, dtype=torch.uint8) if pictures_B_H_W_C is None else pictures_B_H_W_C
        states = None if self.states is None else numpy.stack([self.states[i][start] for i, start in places])
        return CloneWindows(
            pictures,
            torch.from_numpy(actions).float(),
            [self.tasks[i] for i, _ in places],
            self.views,
            self.contract,
            None if states is None else torch.from_numpy(states).float(),
        )


@dataclass(frozen=True)
class CloneWindows:
    """Pictures that a policy sees, with all their views (`data.views`), and what the demonstrator did then."""

    pictures_B_H_W_C: Tensor
    actions_B_A_D: Tensor
    tasks: list[str]
    views: tuple[str, ...] = ("",)
    contract: ActionContract = UNKNOWN
    state_B_S: Tensor | None = None  # of the robot, where the policy is to read it
    recorded_size: tuple[int, ...] = ()  # height and width of a view, where known

    def __len__(self) -> int:
        return len(self.actions_B_A_D)

    @property
    def observation(self) -> Observation:
        """The observation in an environment's form; without a state unless there is one."""
        return observation_of(split(self.pictures_B_H_W_C, len(self.views), dim=1), self.state_B_S, self.tasks)

    def statistics(self) -> dict[str, list[Any]]:
        """Statistics of the actions, as public files have them."""
        return usual_statistics(self.actions_B_A_D.flatten(0, 1), [True] * self.actions_B_A_D.shape[2]).to_dict()

    def state_statistics(self) -> dict[str, list[Any]] | None:
        """Likewise of the robot's state; None without one."""
        if self.state_B_S is None:
            return None
        return usual_statistics(self.state_B_S, [True] * self.state_B_S.shape[1]).to_dict()


@dataclass(frozen=True)
class CloneStart:
    """The purpose of a policy that is to be cloned; ``folder`` is an empty one, for weights that are drawn. No picture
    of recordings has been read."""

    windows: CloneWindows
    folder: Path
    seed: int
    chunk: int
    num_knots: int

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of an action, and for how many actions each knot is held."""
        if self.chunk % self.num_knots:
            raise ConfigError(f"--chunk {self.chunk} is no multiple of --knots {self.num_knots}: choose one that is.")
        return dict(action_dim=self.windows.actions_B_A_D.shape[2], hold=self.chunk // self.num_knots)


def begin(
    policy: str,
    start: CloneStart,
    arguments: Mapping[str, Any],
    where: str,
    **draws: float | None,
) -> Any:
    """A `Cloneable` policy, with weights of a base or drawn ones; ``where`` comes before a wrong argument. Of
    ``draws``, how an attempt differs from what is played, it is given those that it takes."""
    cls, windows = cloneable(policy), start.windows
    sizes = dict(action_dim=windows.actions_B_A_D.shape[2], chunk=start.chunk, num_knots=start.num_knots)
    with random.preserved():
        torch.manual_seed(random.derive_seed(start.seed, 0, "policy"))
        offered: dict[str, Any] = dict(start=start, **sizes)
        offered |= {name: value for name, value in draws.items() if value is not None}
        begun: Any = completed(made(getattr(cls, "to_clone", cls), arguments, where, **offered), PolicyDefaults)
    if begun.action_dim != sizes["action_dim"]:
        recorded_ones = f"the recordings have {sizes['action_dim']}"
        cure = "Let its constructor take action_dim, or choose what makes an action (action_keys)"
        raise ConfigError(f"{policy} decides on {begun.action_dim} numbers per action, {recorded_ones}. {cure}.")
    if arguments.get("keep_statistics"):
        warn_of_outside(begun, windows, str(arguments.get("base")))
    return begun


def toy_demonstrations(num: int, seed: int, setting: str = "default", action_dim: int = 4) -> Demonstrations:
    """Episodes of the toy world's expert, of the part of the series that training has."""
    from cosmos_predict2.data.toy.videos import SPLITS
    from cosmos_predict2.toy_world.episodes import make_episodes
    from cosmos_predict2.toy_world.physics import find_tasks

    episodes = make_episodes(num, seed, mix=MIX, setting=setting, action_dim=action_dim, first=SPLITS["train"])
    return Demonstrations(
        list(episodes.actions),
        [find_tasks([TASK])[0].sentence] * num,  # as the environment asks for it
        lambda i, frames: torch.from_numpy(numpy.stack([episodes.render(i, k, k + 1)[0] for k in frames])),
        f"{num} {MIX} episodes of the toy world, seed {seed}",
    )


def recorded_demonstrations(
    folder: Path,
    num: int | None = None,
    camera: str | None = None,
    action_keys: Sequence[str] | None = None,
    split_file: str = "",
    part: str = "train",
    held_out_share: float = 0.0,
    state: bool = False,
    embodiment: str | None = None,
    units: str | None = None,
) -> Demonstrations:
    """The first episodes of a folder of recordings, with their own sentences; see `open_episodes`. With a split they
    are the first of a part's successes; without, a share of them is held out, which any other part than train is."""
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist: give the folder of the recordings to clone.")
    robot: dict[str, Any] = dict(action_keys=action_keys, embodiment=embodiment, units=units)
    everything = open_episodes(folder, camera=camera, **robot)
    if split_file:
        numbers = split_of(split_file, LeRobotSource.open(folder)).successes(part)
    else:
        everything = everything[:num]
        numbers = tuple(numpy.flatnonzero(held_out(len(everything), held_out_share) == (part != "train")).tolist())
    if not (episodes := [everything[i] for i in numbers][:num]):
        raise DataError(f"{folder}: none of its {len(everything)} recordings is for the part '{part}': record more.")
    if nameless := [episode.path for episode in episodes if not episode.task]:
        raise DataError(f"{nameless[0]} names no task: its sentence is what a policy is asked for.")
    # a table may have a row for each picture: the last one's action leads nowhere
    actions = [episode.actions()[: episode.num_frames - 1].astype(numpy.float32) for episode in episodes]
    for episode, of_episode in zip(episodes, actions, strict=True):
        if not numpy.isfinite(of_episode).all():
            row = int(numpy.flatnonzero(~numpy.isfinite(of_episode).all(axis=1))[0])
            raise DataError(f"{episode.path} ({episode.name}): action {row} is not finite: mend or drop the recording.")
    return Demonstrations(
        actions,
        [episode.task for episode in episodes],
        lambda i, frames: torch.from_numpy(episodes[i].pictures(frames)),
        str(folder),
        views_of(camera),
        episodes[0].contract if state else episodes[0].contract.without_state(),
        [_states(episode, len(rows)) for episode, rows in zip(episodes, actions, strict=True)] if state else None,
    )


def _states(episode: RecordedEpisode, num: int) -> NDArray[numpy.float32]:
    known = [episode.known(k) for k in range(num)]
    if "state" not in known[0]:
        raise DataError(f"{episode.path} ({episode.name}) has no state of the robot: leave dataset.state=False.")
    states = numpy.stack([one["state"] for one in known]).astype(numpy.float32)
    if not numpy.isfinite(states).all():
        raise DataError(f"{episode.path} ({episode.name}): its state has numbers that are not finite.")
    return states


def warn_of_outside(policy: Cloneable, windows: CloneWindows, base: str) -> None:
    """Warn of numbers that lie beyond a policy's statistics more often than q01 and q99 leave out: the units differ."""
    shares = policy.shares_outside(windows.actions_B_A_D)
    for k in (shares > MOST_OUTSIDE).nonzero().flatten().tolist():
        values = windows.actions_B_A_D[..., k]
        log.warning(
            "%.0f %% of number %d of the actions, which lies in %.3g..%.3g, is beyond the statistics of %s, and what is"
            " beyond them is clipped or learnt badly. Without --keep_statistics those of the recordings are used",
            *(100 * float(shares[k]), k, float(values.min()), float(values.max()), base),
        )


def clone(
    policy: Cloneable, windows: CloneWindows, *, steps: int, lr: float, batch_size: int, seed: int
) -> list[float]:
    """Make the demonstrated actions likelier, by a learning rate that falls to 0 in a line; gives the losses."""
    if windows.actions_B_A_D.shape[2] != policy.action_dim:
        raise ConfigError(
            f"The demonstrations have {windows.actions_B_A_D.shape[2]} numbers per action, the policy"
            f" {policy.action_dim}: set --action_dim {windows.actions_B_A_D.shape[2]}."
        )
    record = policy.record_of(windows.observation, windows.actions_B_A_D)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-6, steps)
    draws, losses = generator(seed, 0, "cloning"), []
    with Progress("cloning", steps, unit="step") as progress:
        for step in range(steps):
            rows = torch.randint(len(windows), (batch_size,), generator=draws)
            loss = policy.cloning_loss({name: value[rows] for name, value in record.items()}, draws)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            if not numpy.isfinite(losses[-1]):
                raise TrainingError(f"Cloning diverged at step {step} of {steps}: lower --lr ({lr}).")
            progress.update()
    return losses
