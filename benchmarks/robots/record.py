# SPDX-License-Identifier: Apache-2.0
"""Recordings of mixed skill of a public simulator's robot, as a team of operators leaves them.

    python -m benchmarks.robots.record reach my_data --episodes 300 [--replays 0.5] [--clumsy] [--wrist gripperPOV]

Each episode has a driver of his own: he sees the object and the goal at places that are wrong by some centimetres,
his hand trembles, and he is more or less quick. Many failures are near misses. One in ten drivers moves at random.
Nobody drives a replay: the actions of an episode that succeeded, from another start. Starts are numbers from
1,000,000 on, that no evaluation has.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from benchmarks.robots.worlds import METAWORLD, SENTENCES, SUITES
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.rl.envs.simulators.gym import GymTask
from imaginaire import command_line
from imaginaire.config.lazy_config import plain_data
from imaginaire.errors import ConfigError, DataError
from imaginaire.log import tracked

FIRST = 1_000_000
STEPS, HELD = 24, 4
# The largest deviation of a place in metres and share of a draw that is held for four actions, of which a driver's own
# are a part by the square of a uniform draw, and his least speed. The drawer takes most of an episode to open; of
# coffee-pull 29 of 300 succeed by reach's faults, 44 by those of the last two.
FAULTS = {
    "reach": (0.08, 0.4, 0.6),
    "drawer": (0.02, 0.2, 0.9),
    "maze": (0.8, 0.4, 0.6),
    **dict.fromkeys(("pull", "pushv"), (0.05, 0.3, 0.6)),
}
CLUMSY = (0.2, 0.8, 0.3)  # about one in eight succeeds, where of the others a third to two thirds do
AIMLESS = 0.1  # the share of episodes that move at random
NOISE = 0.05

Actor = Callable[[Any, Any, NDArray[Any]], NDArray[Any]]  # of observation, environment, errors [2, 3]

parser = command_line.parser("benchmarks.robots.record", __doc__, "")
parser.add_argument("robot", choices=tuple(SUITES))
parser.add_argument("out", type=command_line.folder_to_write, metavar="DIR")
parser.add_argument("--episodes", type=command_line.at_least(1), default=300)
parser.add_argument("--wrist", default="", metavar="CAMERA", help="recorded besides, as observation.images.wrist")
parser.add_argument("--replays", type=float, default=0.0, metavar="SHARE", help="of the episodes, the last ones")
parser.add_argument("--clumsy", action="store_true", help="drivers who misjudge and tremble more, and are slower")
parser.add_argument("--seed", type=command_line.at_least(0), default=0, help="of drivers; starts are the same")


def run(args: argparse.Namespace) -> None:
    if not 0 <= args.replays < 1:
        raise ConfigError(f"--replays {args.replays} is a share of the episodes: at least 0 and less than 1")
    task, actor = made(args.robot, args.wrist)
    faults = CLUMSY if args.clumsy else FAULTS.get(args.robot, FAULTS["reach"])
    rng = numpy.random.default_rng(args.seed)
    writer, successes = Writer(Path(args.out), fps=10, robot=args.robot), 0
    to_replay: list[NDArray[Any]] = []
    num_driven = round(args.episodes * (1 - args.replays))
    for episode in tracked(range(args.episodes), "recordings", unit="episode"):
        start = FIRST + episode
        if episode < num_driven:
            acts = driver(task, actor, rng, faults)
        elif to_replay:
            acts = replayed(to_replay[rng.integers(len(to_replay))], rng)
        else:
            raise DataError(f"none of {num_driven} driven episodes of {args.robot} succeeded: there is none to replay")
        recording = recorded(task, acts, start, SENTENCES[args.robot])
        if recording.columns["next.success"].any():
            successes += 1
            if episode < num_driven:
                to_replay.append(recording.columns["action"])
        writer.add(recording)
    writer.finish()
    task.close()
    print(f"{args.out}: {args.episodes} episodes of {args.robot}, {successes} with success")


def made(robot: str, wrist: str = "") -> tuple[GymTask, Actor]:
    """The environment as the suite's address has it, and an expert who sees its state."""
    address, _, words = SUITES[robot].removeprefix("gym:").partition("?")
    given = (word.partition("=") for word in words.split("&"))
    settings: dict[str, Any] = {name: plain_data(value, name) for name, _, value in given}
    settings["wrist"] = [wrist] if wrist else []
    if robot not in METAWORLD:
        return GymTask(address, **settings), {"push": pusher, "touch": toucher, "maze": roller}[robot]
    from metaworld.policies import ENV_POLICY_MAP

    expert = ENV_POLICY_MAP[METAWORLD[robot]]()

    def act(observed: NDArray[Any], env: Any, errors: NDArray[Any]) -> NDArray[Any]:
        """The expert must see the goal, which the observation hides."""
        seen = numpy.concatenate([observed[:-3], env.unwrapped._target_pos + errors[1]])
        seen[4:7] += errors[0]
        action: NDArray[Any] = expert.get_action(seen)
        return action

    return GymTask(address, **settings), act


def driver(
    task: GymTask, actor: Actor, rng: numpy.random.Generator, faults: tuple[float, float, float]
) -> Iterator[NDArray[Any]]:
    """Actions of a driver whose faults are drawn."""
    misjudged, trembling, slowest = faults
    errors = misjudged * rng.uniform() ** 2 * rng.normal(size=(2, 3))
    trembling = 1.0 if rng.uniform() < AIMLESS else trembling * rng.uniform() ** 2
    speed = rng.uniform(slowest, 1)
    for step in range(STEPS):
        if step % HELD == 0:
            elsewhere = rng.uniform(-1, 1, task.action_dim)
        wanted = speed * numpy.clip(actor(task._observed, task._env, errors), -1, 1)
        yield (1 - trembling) * wanted + trembling * elsewhere + rng.normal(0, NOISE, task.action_dim)


def replayed(actions: NDArray[Any], rng: numpy.random.Generator) -> Iterator[NDArray[Any]]:
    """The same actions, as exactly as a robot repeats them."""
    yield from actions[:STEPS] + rng.normal(0, NOISE, actions[:STEPS].shape)


def recorded(task: GymTask, acts: Iterator[NDArray[Any]], start: int, sentence: str) -> Recording:
    seen = task.reset(0, start, 0)
    pictures, wrists, actions, done = [seen["full_image"]], [seen["wrist_image"]], [], [0.0]
    for action in acts:
        actions.append(numpy.clip(action, -1, 1).astype(numpy.float32))
        seen, _, is_success = task.step(actions[-1])
        pictures.append(seen["full_image"])
        wrists.append(seen["wrist_image"])
        done.append(float(is_success))
    columns = {"action": numpy.stack([*actions, actions[-1]]), "next.success": numpy.array(done, numpy.float32)}
    views = {"front": numpy.stack(pictures), **dict(zip(["wrist"], numpy.stack(wrists, axis=1)))}
    videos = {f"observation.images.{name}": torch.from_numpy(view).permute(3, 0, 1, 2) for name, view in views.items()}
    return Recording(columns, videos, sentence)


def pusher(observed: Any, env: Any, errors: NDArray[Any]) -> NDArray[Any]:
    """Goes behind the block as seen from the goal, above the table, and pushes it there."""
    goal, block = observed["desired_goal"] + errors[1], observed["achieved_goal"] + errors[0]
    hand = observed["observation"][:3]
    way = (goal - block)[:2]
    distance = float(numpy.linalg.norm(way))
    ahead = way / max(distance, 1e-6)
    aside = numpy.array([-ahead[1], ahead[0]])
    behind, table = block[:2] - ahead * 0.07, 0.425
    along = float((block[:2] - hand[:2]) @ ahead)
    if distance < 0.02:
        return numpy.array([0.0, 0.0, 1.0, 0.0])
    if abs((block[:2] - hand[:2]) @ aside) > 0.02 or along < 0.02:
        is_there = numpy.linalg.norm(hand[:2] - behind) < 0.03
        return numpy.array([*(25 * (numpy.array([*behind, table if is_there else 0.48]) - hand)), 0.0])
    pushed = 12 * (numpy.array([*(block[:2] + ahead * (min(distance, 0.06) - 0.02)), table]) - hand)
    pushed[:2] -= 4 * aside * float((hand[:2] - block[:2]) @ aside)
    return numpy.array([*pushed, 0.0])


def toucher(observed: Any, env: Any, errors: NDArray[Any]) -> NDArray[Any]:
    return numpy.array([*(10 * (observed["desired_goal"] + errors[1] - observed["achieved_goal"])), 0.0])


def roller(observed: Any, env: Any, errors: NDArray[Any]) -> NDArray[Any]:
    place, speed = numpy.split(observed["observation"], 2)
    return numpy.asarray(4 * (observed["desired_goal"] + errors[1, :2] - place) - 2 * speed)


if __name__ == "__main__":
    import sys

    sys.exit(command_line.main(parser, run))
