# SPDX-License-Identifier: Apache-2.0
"""A robot that is driven in what a world model imagines: deflections become actions, actions become pictures.

    drive = Drive(env, Controls.of(env.starts.recorded, env.action_dim), policy=policy)
    (first,) = drive.restart(0)
    moments = drive.advance([1.0, 0.0, 0.0, 0.0])    # the next pictures, four by default

`drive_of` makes one of a command's flags: recordings or starts, and perhaps a policy, a reward and a simulator.
Nothing here knows a browser; `server` does. Letters: A actions, D numbers of an action.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.data.split import SUCCESS_COLUMN
from cosmos_predict2.data.video.clips import Fit, stretch
from cosmos_predict2.data.views import require_same, views_of
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.first_frames import (
    FirstFrames,
    RecordedFacts,
    SimulatedStarts,
    StartsDefaults,
    whole_pictures,
)
from cosmos_predict2.rl.envs.recorded_starts import RecordedStarts
from cosmos_predict2.rl.envs.replays import ZeroReward, recorded_actions, with_actions_of
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.streamed import StreamedEnv
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv, require_inputs
from cosmos_predict2.rl.episodes.episodes import lost
from cosmos_predict2.rl.episodes.recording import CAMERA
from cosmos_predict2.rl.imagined.check import PictureDistances, chosen, read_episodes
from cosmos_predict2.rl.imagined.watch import HELD_OUT, LEARNT
from cosmos_predict2.rl.interfaces import VecEnv
from cosmos_predict2.rl.policies.files import find_policy
from cosmos_predict2.rl.policies.null import are_motions, doing_nothing
from cosmos_predict2.rl.rewards.resnet import read_reward
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire import random
from imaginaire.errors import ConfigError, DataError

IMAGINED = "observation.images.imagined"  # so that nobody takes its pictures for a camera's
ACROSS = 20  # actions that move a place over its whole range
MOST = 3000  # pictures of a recording, which are kept in memory


@dataclass(frozen=True)
class Controls:
    """Actions within the recorded range from deflections of -1 to 1: motions are as large as the deflection,
    places are moved on by it."""

    names: Sequence[str]
    range_2_D: Tensor

    @classmethod
    def of(cls, recorded: RecordedFacts | None, dim: int, names: Sequence[str] = ()) -> "Controls":
        """Without facts of recordings the range is -1 to 1."""
        low, high = ([-1.0] * dim, [1.0] * dim) if recorded is None else (recorded.low, recorded.high)
        return cls(names or [f"action {i + 1}" for i in range(dim)], torch.tensor([list(low), list(high)]))

    def action(self, deflections_D: Tensor, scale: float, before_D: Tensor) -> Tensor:
        """The action of these deflections, after another one."""
        low_D, high_D = self.range_2_D
        if are_motions(self.range_2_D):
            return scale * (deflections_D.clamp(min=0) * high_D - deflections_D.clamp(max=0) * low_D)
        return (before_D + scale * deflections_D * (high_D - low_D) / ACROSS).clamp(low_D, high_D)


@dataclass(frozen=True)
class Moment:
    """A picture uint8 [H, W, 3], the simulator's after the same actions, and figures by name."""

    picture: Tensor
    true: Tensor | None
    figures: dict[str, Any]


@dataclass
class Drive:
    """One robot in one imagined environment. All parts are tried at once: what does not fit is an error here."""

    env: WorldModelEnv
    controls: Controls
    policy: Any = None
    execute: int | None = None  # actions of each of its decisions
    simulator: VecEnv | None = None  # gets the same actions
    fit: Fit | None = None  # of its pictures
    familiar: PictureDistances | None = None  # measures how far pictures are from recorded ones
    has_reward: bool = False
    actions: int = 4  # of one look at the keys
    first_action: Callable[[int], Tensor] | None = None  # of a start; null: doing nothing
    out: Path | None = None  # the data set that episodes are added to
    fps: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.env.keep_frames = True
        if self.out is not None:
            self._writer(self.out)
        if self.policy is not None:
            require_inputs(self.env, self.policy)
        for autopilot in (False, True):
            self.restart(0)
            self.advance(autopilot=autopilot)

    def facts(self) -> dict[str, Any]:
        """All that a page shows before the first picture."""
        has = {name: getattr(self, name) is not None for name in ("policy", "simulator", "familiar", "out")}
        about = dict(names=list(self.controls.names), range=self.controls.range_2_D.tolist(), actions=self.actions)
        about |= dict(are_motions=are_motions(self.controls.range_2_D), noise_steps=self.env.sampling.num_steps)
        return {**has, **about, "reward": self.has_reward, "starts": 0 if self.simulator else len(self.env.starts)}

    def restart(self, number: int) -> list[Moment]:
        """Begin at a start, and give its picture alone; what was being recorded is dropped."""
        tasks, seeds = self.env.starts.num_tasks, [random.derive_seed(self.seed, number, "drive") % 2**31]
        options = dict(task_ids=[number % tasks], trial_ids=[number // tasks], seeds=seeds)
        self._seen, _ = self.env.reset(options=options)
        self._before_D = self.first_action(number) if self.first_action else doing_nothing(self.controls.range_2_D)
        self._planned: list[Tensor] = []  # actions, by the policy
        self.recorded: list[Moment] = []
        self._number, self._num_steps, self._num_decisions = number, 0, 0
        picture = whole_pictures(self._seen, len(self.env.views))[0].cpu()
        self._last = Moment(picture, picture if self.simulator else None, {"step": 0})
        return [self._last]

    def advance(self, deflections: Sequence[float] = (), scale: float = 1.0, autopilot: bool = False) -> list[Moment]:
        """Act as the keys want it, or without a key as the policy does, and give the picture after each action."""
        spent = time.process_time()
        is_policy = autopilot and self.policy is not None and not any(deflections)
        actions_A_D = self._decided() if is_policy else self._driven(deflections, scale)
        self._seen, _, _, _, info = self.env.chunk_step(actions_A_D[None])
        if self.env.bounds is not None:  # as just now
            actions_A_D = actions_A_D.clamp(*(torch.as_tensor(bound, dtype=torch.float32) for bound in self.env.bounds))
        moments, of_chunk = [], {"autopilot": is_policy, "success": bool(info["success"][0])}
        for action_D, picture in zip(actions_A_D, info["frames"][0].cpu(), strict=True):
            self._num_steps += 1
            figures, true = dict(of_chunk, step=self._num_steps, action=action_D.tolist()), None
            if self.simulator is not None:
                observation, _, _, _, known = self.simulator.chunk_step(action_D[None, None])
                true = whole_pictures(observation, len(self.env.views), self.fit)[0].cpu()
                figures |= {"success": bool(known["success"][0]), "is_over": not known["active"][0]}
            moments.append(Moment(picture, true, figures))
        self._before_D, self._last = actions_A_D[-1], moments[-1]
        if self.has_reward:
            self._last.figures.update(value=float(info["value"][0]), is_valued=bool(info["success"][0]))
        if self.familiar is not None:
            familiar, picture = self.familiar, self._last.picture[None]
            unlike = float(familiar.distances(picture)[0]) / max(familiar.usual, 1e-6)
            self._last.figures.update(unlike=unlike, is_faded=familiar.faded(picture) > 0)
        if self.recorded:
            self.recorded += moments[: MOST - len(self.recorded)]
        self._last.figures["processor_ms"] = 1e3 * (time.process_time() - spent) / len(moments)
        return moments

    def _driven(self, deflections: Sequence[float], scale: float) -> Tensor:
        self._planned, rows, deflections_D = [], [self._before_D], torch.zeros(self.env.action_dim)
        deflections_D[: len(deflections)] = torch.tensor(deflections)
        for _ in range(self.actions):
            rows.append(self.controls.action(deflections_D, scale, rows[-1]))
        return torch.stack(rows[1:])

    def _decided(self) -> Tensor:
        """The next actions of the policy's decision, which is made anew where none are left."""
        if not self._planned:
            seed = random.derive_seed(self.seed, self._number, "policy")
            generators = [random.generator(seed, self._num_decisions, "decision")]
            decision = self.policy.act(self._seen, mode="greedy", generators=generators)
            if bool(lost(decision).any()):
                raise ConfigError("The policy does not answer: drive by hand, or press P again.")
            self._planned = list(decision.actions_E_A_D[0, : self.execute].float().cpu())
            self._num_decisions += 1
        now, self._planned = self._planned[: self.actions], self._planned[self.actions :]
        return torch.stack(now)

    def record(self) -> str:
        """Record an episode from the present picture on, until `save`."""
        self.recorded = [self._last]
        return "recording ..."

    def save(self) -> str:
        """Add what was recorded to the data set; gives a sentence about it."""
        moments = self.recorded
        if len(moments) < 2 or self.out is None:
            self.recorded = []
            return "Nothing was recorded."
        actions = [moment.figures["action"] for moment in moments[1:]]
        columns: dict[str, Any] = {"action": numpy.array([*actions, actions[-1]], numpy.float32)}
        if self.simulator or self.has_reward:
            columns[SUCCESS_COLUMN] = numpy.array([False, *(moment.figures["success"] for moment in moments[1:])])
        films = {IMAGINED: [moment.picture for moment in moments]}
        films |= {CAMERA: [moment.true for moment in moments if moment.true is not None]} if self.simulator else {}
        videos = {name: torch.stack(film).permute(3, 0, 1, 2) for name, film in films.items()}
        writer = self._writer(self.out)
        writer.add(Recording(columns, videos, self._seen["task_description"][0]))
        writer.finish()
        self.recorded = []  # not before: a full disk can be mended, and the button pressed again
        return f"Episode {len(writer) - 1} of {self.out} has {len(moments)} pictures."

    def _writer(self, out: Path) -> Writer:
        if not (out.exists() and any(out.iterdir())):
            return Writer(out, self.fps, robot="imagined")
        writer = Writer.after(out)
        if IMAGINED not in writer.names or abs(writer.fps - self.fps) > 1e-6:
            raise DataError(f"--out {out} holds no driven episodes of {self.fps:g} pictures per second: name another.")
        return writer


ENDLESS = 2**31 - 1  # actions of an episode


class FirstPictures(StartsDefaults):
    """The first pictures of recordings as the starts of one task, each read when it is asked for."""

    num_tasks = history = 1

    def __init__(self, source: LeRobotSource, camera: str, fit: Fit | None) -> None:
        self.source, self.camera, self.fit = source, camera, fit
        self.numbers = chosen(range(len(source)), LEARNT + HELD_OUT, seed=0)  # that stand for all
        self.recorded = RecordedFacts.of([recorded_actions(source, i).numpy() for i in self.numbers])

    def __len__(self) -> int:
        return len(self.source)

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames:
        numbers = [trial % len(self) for trial in trial_ids]
        pictures = [self.source.frames(i, self.camera, [0], fit=self.fit).permute(1, 2, 3, 0) for i in numbers]
        return FirstFrames(torch.stack(pictures), None, [self.source.caption(i) for i in numbers])

    def first_action(self, number: int) -> Tensor:
        rows = self.source.parts(number % len(self), self.source.action_parts())
        return torch.from_numpy(rows[0].astype(numpy.float32))  # an episode of one picture has it, too

    def names(self) -> Sequence[str]:
        """The names of an action's numbers; none where the data set has not one for each."""
        return self.source.action_contract(self.source.action_parts()).names

    def familiar(self, chunk: int) -> PictureDistances | None:
        """Distances from these recordings; None of fewer than five."""
        first, outcomes = len(self.numbers) * LEARNT // (LEARNT + HELD_OUT), [False] * len(self)
        parts = (self.numbers[first:], self.numbers[:first]) if len(self) > 4 else ()
        read = [read_episodes(self.source, self.camera, part, outcomes, chunk, self.fit) for part in parts]
        return PictureDistances(*read) if read else None


@contextmanager
def drive_of(args: argparse.Namespace, imagination: Imagination, size: tuple[int, int] | None) -> Iterator[Drive]:
    """The drive of scripts.drive's flags, until it is left; ``size`` is that of the world model's pictures."""
    fit = None if size is None else partial(stretch, size=size)
    first = None
    if args.data:
        source = with_actions_of(LeRobotSource.open(args.data), imagination)
        require_same(imagination.views, views_of(args.camera), "The world model", "--camera", "give its cameras.")
        first = FirstPictures(source, source.camera(args.camera), fit)
    starts: Any = RecordedStarts(args.starts, by_task=False, size=size) if args.starts else first
    if starts is None and not args.suite:
        cure = "Give --data FOLDER, --starts FOLDER of scripts.make_reset_states, or --suite ENV."
        raise ConfigError(f"There is no picture to begin with: the world model records no data set of here. {cure}")
    recorded, dim, simulator = None if starts is None else starts.recorded, imagination.transform.dim, None
    policy: Any
    policy, card = find_policy(args.policy) if args.policy else (None, None)
    reward: Any = read_reward(args.reward) if args.reward else ZeroReward()
    for part in (policy, reward):
        if part is not None:
            part.to(imagination.world.device)
    with ExitStack() as stack:
        if args.suite:
            views, tasks = len(imagination.views), tuple(first.source.tasks.values()) if first else ()
            height = first.source.frames(0, first.camera, [0]).shape[-2] // views if first else 0
            drawn = suites.size_of_recordings(args.suite, height) if height else {}
            place = suites.find(args.suite, max_steps=args.max_steps, **drawn)
            player = policy or SimpleNamespace(chunk=imagination.config.chunk_size, action_dim=dim, sentences=tasks)
            simulator = place.env(1, player)
            stack.enter_context(closing(simulator))
            simulator.terminate_on_success = False
            starts = SimulatedStarts(simulator, len(place.tasks), fit, views)
            starts.recorded = recorded
        options: dict[str, Any] = dict(scoring=Scoring(judge="last"), clip_actions="recorded" if recorded else True)
        options["sampling"] = replace(ONE_EVALUATION, num_steps=args.num_steps)
        kind = StreamedEnv if args.stream else WorldModelEnv
        if args.stream and args.actions % 4:
            raise ConfigError(f"--actions {args.actions}: --stream makes four pictures at a time. Give 4, 8 or 12.")
        env = kind(imagination, starts, reward, 1, ENDLESS, **options)
        controls = Controls.of(recorded, dim, first.names() if first else ())
        execute = card.about.get("execute") if card else None
        how: dict[str, Any] = dict(has_reward=bool(args.reward), actions=args.actions)
        how |= dict(out=Path(args.out) if args.out else None, fps=args.fps or float(imagination.config.fps))
        how["first_action"] = first.first_action if first and starts is first else None
        familiar = first.familiar(env.chunk) if first else None
        yield Drive(env, controls, policy, execute, simulator, fit, familiar, **how)
