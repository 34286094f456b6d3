# SPDX-License-Identifier: Apache-2.0
"""Driving in imagination: pictures per second of one environment, and milliseconds from a key to its picture.

    python -m benchmarks.driving [--teacher W] [--student W] [--causal W] [--threads 1] [--rounds 60]
    python -m benchmarks.driving --student RUN --causal RUN --minute 896 [--actions 12]

Four actions follow one look at the keys, as in scripts.drive. Today's way imagines a whole chunk for them and drops the
rest; so does a student, in one evaluation. A causal student makes the next frame alone: without a cache from all frames
of the chunk so far, with one from keys and values that were kept. All ways take turns at the same keys. Without
--student and --causal the teacher's weights stand in: as fast, but no pictures to look at.

`--minute` drives so many pictures of eight tables instead, by the same keys, and looks at the last one of each
`--actions`. It gives by quarter four shares of them: unlike all recordings (the gate allows .30); faded, that is
showing less than recordings do; gripper, puck and ring all seen; the gripper within 3 pixels of the simulator's, which
gets the same actions and is the first row.
"""

import argparse
import copy
from dataclasses import replace
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.evaluation.metrics.imagined_episodes import held_out_episodes, pictures
from cosmos_predict2.rl.envs.replays import ZeroReward
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.streamed import StreamedEnv
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.imagined.check import PictureDistances
from cosmos_predict2.tools.drive.session import ENDLESS, Controls, Drive
from cosmos_predict2.toy_world.rendering import detect
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.objectives import Student
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire.config import L

TODAY = "teacher, a chunk each time"
LOOK = 4  # actions of one look at the keys
SEEN = ("gripper", "puck", "ring")


def stand_in(imagination: Imagination) -> Imagination:
    """The same weights as a causal student, which they are not."""
    world, config = imagination.world, copy.copy(imagination.config)
    config.objective = L(Student)(causal=True)
    return Imagination(WorldModel(config, copy.deepcopy(world.net), world.tokenizer, device=world.device))


def environments(args: argparse.Namespace, num_envs: int) -> dict[str, WorldModelEnv]:
    teacher = imagination_of(args.teacher, load_ema=args.load_ema)
    causal = imagination_of(args.causal, load_ema=True) if args.causal else stand_in(teacher)
    one, several = ONE_EVALUATION, replace(ONE_EVALUATION, num_steps=args.teacher_steps)
    made: dict[str, Any] = {TODAY: (WorldModelEnv, teacher, several, {})}
    if args.student:
        student = imagination_of(args.student, load_ema=True)
        made["student, a chunk each time"] = (WorldModelEnv, student, one, {})
    made["causal, a chunk each time"] = (WorldModelEnv, causal, one, {})
    made["causal, without a cache"] = (StreamedEnv, causal, one, dict(keeps=False))
    made["causal, with a cache"] = (StreamedEnv, causal, one, {})
    return {
        name: kind(imagination, ToyStarts(split="val"), ZeroReward(), num_envs, ENDLESS, sampling=sampling, **options)
        for name, (kind, imagination, sampling, options) in made.items()
    }


def speed(args: argparse.Namespace) -> None:
    drives = {name: Drive(env, Controls.of(None, env.action_dim)) for name, env in environments(args, 1).items()}
    keys = iter_keys(1, (args.rounds or 60) + 1)
    looks = {name: iter(keys) for name in drives}

    def look(name: str) -> None:
        drives[name].advance(next(looks[name])[0].tolist())

    for drive in drives.values():
        drive.restart(0)
    taken = machine.in_turns({name: lambda name=name: look(name) for name in drives}, args.rounds or 60)  # type: ignore[misc]
    print(f"{'one look at the keys, four pictures':36} pictures/s   ms, key to picture: median, slowest   of processor")
    for name in drives:
        wall, core = (times[name] for times in (taken.wall, taken.core))
        times = f"{1e3 * median(wall):18.1f} {1e3 * max(wall):19.1f} {1e3 * median(core):16.1f}"
        faster = "" if name == TODAY else f"   {taken.ratio(TODAY, name, of_core=True):.2f} x faster"
        print(f"  {name:34} {LOOK / mean(wall):10.1f} {times}{faster}", flush=True)


def iter_keys(num_envs: int, count: int) -> list[Tensor]:
    """Deflections [E, 2] for each look; each is held for three looks, and led back from for three."""
    generator = torch.Generator().manual_seed(0)
    held = torch.rand(-(-count // 6), num_envs, 2, generator=generator) * 2 - 1
    return [held[i // 6] * (1 if i % 6 < 3 else -1) for i in range(count)]


def minute(args: argparse.Namespace) -> None:
    """Drive all tables for so many pictures."""
    films = [pictures(held_out_episodes(64, seed, mix="mixed").states, 48).permute(0, 2, 3, 4, 1) for seed in (1, 2)]
    learnt = SimpleNamespace(films=[film[:, ::4].flatten(0, 1) for film in films[:1]], tails=[])
    familiar: Any = PictureDistances(SimpleNamespace(last_E_H_W_C=films[1][:, -1]), learnt)  # type: ignore[arg-type]
    envs: dict[str, Any] = {"the simulator": ToyEnv(args.tables, num_steps=ENDLESS, split="val")}
    envs |= {name: env for name, env in environments(args, args.tables).items() if "without" not in name}
    keys_N_E_2 = torch.stack(iter_keys(args.tables, args.minute // LOOK)).repeat_interleave(LOOK, dim=0)
    true: list[Tensor] = []  # places of the simulator's gripper
    print(
        f"{args.minute} pictures of {args.tables} tables, by quarter: unlike recordings, faded, all seen, gripper there"
    )
    for name, env in envs.items():
        env.terminate_on_success = False
        env.reset(
            options=dict(task_ids=[0] * args.tables, **{key: range(args.tables) for key in ("trial_ids", "seeds")})
        )
        rows = []
        for i, keys in enumerate(keys_N_E_2.split(args.actions)):
            actions = torch.zeros(args.tables, len(keys), env.metadata["action_dim"])
            actions[:, :, :2] = keys.transpose(0, 1)
            shown = env.chunk_step(actions)[0]["full_image"].cpu()
            places = {name: torch.from_numpy(place) for name, place in detect(shown.numpy()).position.items()}
            seen_E = torch.stack([places[thing].isfinite().all(-1) for thing in SEEN]).all(0)
            if env is envs["the simulator"]:
                true.append(places["gripper"])
            there_E = (places["gripper"] - true[i]).norm(dim=-1) < 3
            shares = (float(is_so_E.float().mean()) for is_so_E in (seen_E, there_E))
            rows.append((familiar.unlike(shown), familiar.faded(shown), *shares))
        figures = torch.tensor(rows).unfold(0, len(rows) // 4, len(rows) // 4).mean(-1)[:4]
        by_quarter = ("  ".join(f"{value:.2f}" for value in figures[:, k]) for k in range(figures.shape[1]))
        print(f"  {name:28} {'    '.join(by_quarter)}", flush=True)


def main() -> None:
    parser = machine.parser(__doc__, "threads", "rounds")
    add = parser.add_argument
    add("--teacher", default="", help="a run or weights (default: the tiny model that ships)")
    add("--load_ema", action="store_true", help="its averaged weights; students have theirs always")
    add("--teacher_steps", type=int, default=1, help="evaluations of the teacher for a chunk")
    add("--student", default="", help="a run of tiny_student")
    add("--causal", default="", help="a run of tiny_student_causal")
    add("--minute", type=int, default=0, metavar="N", help="drive N pictures, a multiple of 16, and look at them")
    add("--actions", type=int, default=LOOK, help="of a minute, so many at once: 4, 8 or 12")
    add("--tables", type=int, default=8, help="of a minute")
    args = machine.parse(parser)
    device, _ = machine.device_and_dtype()
    print(machine.described(device))
    minute(args) if args.minute else speed(args)


if __name__ == "__main__":
    main()
