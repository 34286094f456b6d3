# SPDX-License-Identifier: Apache-2.0
"""The drive of a command's flags: recordings or starts, and perhaps a policy, a reward and a simulator."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.video.clips import Fit, stretch
from cosmos_predict2.data.views import require_same, views_of
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.recorded_starts import RecordedStarts
from cosmos_predict2.rl.envs.replays import Unjudged, recorded_actions, require_actions_of
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import FirstFrames, Recorded, SimulatedStarts, StartsDefaults
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.imagined.check import Familiar, chosen, read_episodes, read_reward
from cosmos_predict2.rl.imagined.watch import HELD_OUT, LEARNT
from cosmos_predict2.rl.policies.files import find_policy
from cosmos_predict2.tools.drive.session import Controls, Drive
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import ConfigError

ENDLESS = 2**31 - 1  # actions of an episode


class FirstPictures(StartsDefaults):
    """The first pictures of recordings as the starts of one task, each read when it is asked for."""

    num_tasks = history = 1

    def __init__(self, source: LeRobotSource, camera: str, fit: Fit | None) -> None:
        self.source, self.camera, self.fit = source, camera, fit
        self.numbers = chosen(range(len(source)), LEARNT + HELD_OUT, seed=0)  # that stand for all
        self.recorded = Recorded.of([recorded_actions(source, i).numpy() for i in self.numbers])

    def __len__(self) -> int:
        return len(self.source)

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames:
        numbers = [trial % len(self) for trial in trial_ids]
        pictures = [self.source.frames(i, self.camera, [0], fit=self.fit).permute(1, 2, 3, 0) for i in numbers]
        return FirstFrames(torch.stack(pictures), None, [self.source.caption(i) for i in numbers])

    def first_action(self, number: int) -> Tensor:
        rows = self.source.parts(number % len(self), self.source.action_parts(None))
        return torch.from_numpy(rows[0].astype(numpy.float32))  # an episode of one picture has it, too

    def names(self) -> Sequence[str]:
        """The names of an action's numbers; none where the data set has not one for each."""
        return self.source.action_contract(self.source.action_parts(None)).names

    def familiar(self, chunk: int) -> Familiar | None:
        """Distances from these recordings; None of fewer than five."""
        first, outcomes = len(self.numbers) * LEARNT // (LEARNT + HELD_OUT), [False] * len(self)
        parts = (self.numbers[first:], self.numbers[:first]) if len(self) > 4 else ()
        read = [read_episodes(self.source, self.camera, part, outcomes, chunk, self.fit) for part in parts]
        return Familiar(*read) if read else None


@contextmanager
def drive_of(args: argparse.Namespace, imagination: Imagination, size: tuple[int, int] | None) -> Iterator[Drive]:
    """The drive of scripts.drive's flags, until it is left; ``size`` is that of the world model's pictures."""
    fit = None if size is None else partial(stretch, size=size)
    first = None
    if args.data:
        source = LeRobotSource.open(args.data)
        require_actions_of(source, imagination)
        require_same(imagination.views, views_of(args.camera), "The world model", "--camera", "give its cameras.")
        first = FirstPictures(source, source.camera(args.camera), fit)
    starts: Any = RecordedStarts(args.starts, by_task=False, size=size) if args.starts else first
    if starts is None and not args.suite:
        raise ConfigError(
            "There is no picture to begin with, as the world model records no data set that is here: --data FOLDER,"
            " --starts FOLDER of scripts.make_reset_states, or --suite ENV."
        )
    recorded, dim, simulator = None if starts is None else starts.recorded, imagination.transform.dim, None
    policy: Any
    policy, card = find_policy(args.policy) if args.policy else (None, None)
    reward: Any = read_reward(args.reward) if args.reward else Unjudged()
    for part in (policy, reward):
        if hasattr(part, "to"):  # a driver of one's own may be no module
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
        env = WorldModelEnv(imagination, starts, reward, 1, ENDLESS, **options)
        controls = Controls.of(recorded, dim, first.names() if first else ())
        execute = card.about.get("execute") if card else None
        how: dict[str, Any] = dict(has_reward=bool(args.reward), actions=args.actions)
        how |= dict(out=Path(args.out) if args.out else None, fps=args.fps or float(imagination.config.fps))
        how["first_action"] = first.first_action if first and starts is first else None
        familiar = first.familiar(env.chunk) if first else None
        yield Drive(env, controls, policy, execute, simulator, fit, familiar, **how)
