# SPDX-License-Identifier: Apache-2.0
"""The speed of the toy world on one core: steps with pictures, physics alone, pictures alone, episodes, training items.

python -m benchmarks.toy_world [--quick]

An environment step is physics, reward and the RGB observation of one environment. Each figure is the best and the
median of several blocks, since other work on the machine only ever takes time away.
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy
import torch

from benchmarks import machine
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.toy_world.episodes import make_episodes
from cosmos_predict2.toy_world.physics import advance
from cosmos_predict2.toy_world.rendering import detect
from cosmos_predict2.toy_world.world import ToyWorld

NUM_ENVS = 64
AIM = 60_000  # environment steps a second with pictures: 64 environments, 64 x 64, one core

WORLDS: list[tuple[str, dict[str, Any]]] = [
    ("64x64, puck, hard setting", dict(setting="hard")),
    ("64x64, two objects and grasp", dict(size=64, tasks=("choose_puck", "choose_box", "carry_puck"))),
    ("48x48, puck", dict()),
    ("48x48, two objects", dict(tasks=("choose_puck", "choose_box"))),
    ("96x96, puck, 7-D actions", dict(size=96, action_dim=7)),
]


def rates(block: Callable[[], int], num_blocks: int) -> tuple[float, float]:
    """Best and median number per second of a block that returns how many it did."""
    count = block()
    seconds = machine.in_turns({"": block}, num_blocks, warm_up=0)
    return count / min(seconds.wall[""]), count / seconds.median("")


def report(name: str, best: float, median: float, unit: str) -> None:
    print(f"{name:<44} {best:>10,.0f} {median:>10,.0f} {unit}")


def worlds(num_steps: int, num_blocks: int) -> float:
    """Print the figures of all worlds; the median of the first."""
    first = 0.0
    for name, arguments in WORLDS:
        world = ToyWorld(NUM_ENVS, **arguments)
        actions = numpy.random.default_rng(0).uniform(-1, 1, (num_steps, NUM_ENVS, world.action_dim))

        def steps(world: ToyWorld = world, actions: numpy.ndarray = actions) -> int:
            world.reset()
            for action in actions:
                world.step(action)
            return num_steps * NUM_ENVS

        def physics(world: ToyWorld = world, actions: numpy.ndarray = actions) -> int:
            states = world.states
            for action in actions:
                states = advance(states, action, world.setting, world.size)
            return num_steps * NUM_ENVS

        best, median = rates(steps, num_blocks)
        first = first or median
        report(name, best, median, "env-steps/s with pictures and resets")
        report("   physics alone", *rates(physics, num_blocks), "env-steps/s")
    return first


def main() -> None:
    args = machine.parser(__doc__, "quick").parse_args()
    torch.set_num_threads(1)
    num_blocks = 3 if args.quick else 11
    print(f"numpy {numpy.__version__}, {platform.processor() or platform.machine()}, {NUM_ENVS} environments")
    print(f"{'':<44} {'best':>10} {'median':>10}")
    median = worlds(48 if args.quick else 192, num_blocks)
    num = 256 if args.quick else 2048
    report("episodes of 24 steps, mixed", *rates(lambda: len(make_episodes(num, 0)), 3), "episodes/s")
    videos = ToyWorldVideos(num_episodes=256)
    report("training items, 13 frames 48x48", *rates(lambda: len([videos[i] for i in range(256)]), 3), "items/s")
    frames = videos.episodes.render(0).repeat(20, axis=0)
    report("detector, 48x48", *rates(lambda: len(detect(frames).is_closed), 3), "pictures/s")
    print(f"aim: {AIM:,} env-steps/s at 64 environments, 64x64: {'reached' if median >= AIM else 'NOT reached'}")


if __name__ == "__main__":
    main()
