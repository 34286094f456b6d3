# SPDX-License-Identifier: Apache-2.0
"""Chunks of a world model as an environment: seconds, frames per second, and where the time goes.

    python -m benchmarks.imagination --released [--envs 16] [--rounds 2] [--size tiny]

Chunks of the published sizes with random weights: the 2B network with actions and the Wan tokenizer in bfloat16 imagine
12 frames of 256x320 in 10 steps of the 2AB solver (11 evaluations) with guidance 7, and a classifier judges every
picture, as a published folder is set up for it. What has no effect is left out. Rows below the first are the published
way (`benchmarks.rollout`) with all environments in a batch, and compiled blocks.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks import machine, rollout
from benchmarks.dit import ceiling
from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStart, RecordedStarts, write_starts
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.rewards.resnet import ResnetReward, SuccessClassifier
from cosmos_predict2.world_model.assembly import network_of
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.options import SamplingOptions

CHUNK_PARTS = ("encode", "network", "imagine", "decode", "reward", "environment")
SAMPLING = SamplingOptions(num_steps=10, guidance=rollout.GUIDANCE, solver="2ab")
GOAL_S, GOAL_SHARE = 2.4, 0.45


def make_env(size: str, num_envs: int, folder: Path) -> WorldModelEnv:
    """The environment of `from_model_dir` with random weights, and with random first pictures below a folder."""
    device, dtype = machine.device_and_dtype()
    height, width, _ = rollout.SETTINGS[size]
    generator = numpy.random.default_rng(0)
    shape = (1, height, height, 3)  # squares, which are stretched to the world model's size
    pictures = [generator.integers(0, 256, shape, dtype=numpy.uint8) for _ in range(num_envs)]
    write_starts(folder / FILE, (RecordedStart(f"start{i}", "a task", picture) for i, picture in enumerate(pictures)))
    torch.manual_seed(0)
    imagination = Imagination(rollout.make_pipeline(size, device, dtype).world)
    starts = RecordedStarts(str(folder), size=(height, width))
    reward = ResnetReward(model=SuccessClassifier(), rounded=True, device=str(device))
    how: dict[str, Any] = dict(scoring=Scoring(use_rel_reward=True, terminate_on_success=True), hand_over="uint8")
    return WorldModelEnv(imagination, starts, reward, num_envs, 256, sampling=SAMPLING, **how)


def chunk(env: WorldModelEnv) -> float:
    """Seconds of the first chunk of an episode in all environments."""
    trials = list(range(env.num_envs))
    env.reset(options={"trial_ids": trials, "seeds": trials})
    actions = torch.rand(env.num_envs, env.chunk, env.action_dim, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return machine.seconds(partial(env.chunk_step, actions))


def step_flops(config: Video2WorldPipelineConfig, num_envs: int, size: str) -> int:
    """Operations of one evaluation of the network for all environments, as far as they have an effect: without the
    attention to a text of zeros."""
    height, width, _ = rollout.SETTINGS[size]
    net = network_of({**config.net, "reads_text": False})
    shape = (config.state_t, height // 8, width // 8)
    return forward_flops(net, shape, text_tokens=0, timestep_rows=shape[0], batch_size=num_envs, is_prepared=True).total


def time_parts(env: WorldModelEnv) -> machine.Phases:
    """Time what a chunk consists of from now on; the device is waited for after each part."""
    shares, imagination = machine.Phases(), env.imagination
    for part, holder, name in (
        ("encode", imagination.world, "given_latents"),
        ("network", imagination.world, "denoiser"),
        ("imagine", imagination, "generate_actions"),
        ("decode", imagination.world, "decode"),
        ("reward", env.reward, "judge"),
        ("environment", env, "chunk_step"),
    ):
        shares.watch(part, holder, name)
    return shares


def measure_released(size: str, num_envs: int, rounds: int) -> None:
    machine.require_gpu(size)
    peak = ceiling()
    height, width, num_tokens = rollout.SETTINGS[size]
    print(f"{size}, {num_envs} environments, 12 frames of {height}x{width}, {SAMPLING.num_steps} steps", flush=True)
    machine.forget_peak_memory()
    with tempfile.TemporaryDirectory() as folder:
        env = make_env(size, num_envs, Path(folder))
        first = chunk(env)
        ours = report_chunk("all pictures judged", env, rounds)
        print(f"    goal {GOAL_S} s at the published sizes; the first chunk took {first:.2f} s", flush=True)
        report_memory(*machine.peak_memory())
        attempt = machine.Attempts()
        generate, denoiser = env.imagination.generate_actions, env.imagination.world.denoiser
        shares = time_parts(env)
        report_chunk("all pictures judged, by part", env, rounds)
        evaluations = rounds * (SAMPLING.num_steps + 1)
        report_parts(shares, rounds)
        report_step(shares.seconds["network"] / evaluations, step_flops(env.imagination.config, num_envs, size), peak)
        imagine = rollout.published(env.imagination.world, num_tokens)
        env.imagination.generate_actions = shares.timed("imagine", imagine)  # type: ignore[method-assign]
        shares.seconds.clear()
        shares.memory.clear()
        machine.forget_peak_memory()
        name = "as the public code does, in one batch"
        if (took := attempt(name, lambda: report_chunk(name, env, 1))) is not None:
            report_parts(shares, 1)
            print(f"    {took / ours:.2f} times ours")
            report_memory(*shares.peak())
        if env.device.type == "cuda":
            env.imagination.generate_actions, env.imagination.world.denoiser = generate, denoiser  # type: ignore[method-assign]
            env.sampling = replace(env.sampling, compile_network=True)
            took = attempt("compilation", lambda: chunk(env))
            attempt("compiled blocks", lambda: report_chunk("compiled blocks", env, rounds))
            print(f"    compiled in about {took or 0:.0f} s", flush=True)
    attempt.end()


def report_chunk(name: str, env: WorldModelEnv, rounds: int) -> float:
    """Print the mean seconds of a chunk; gives them."""
    took = sum(chunk(env) for _ in range(rounds)) / rounds
    print(f"  {name:44s} {took:8.3f} s a chunk {env.num_envs * env.chunk / took:9.1f} frames/s", flush=True)
    return took


def report_parts(shares: machine.Phases, rounds: int) -> None:
    total = sum(shares.seconds.values())
    each = {part: shares.seconds[part] for part in CHUNK_PARTS}
    parts = "  ".join(f"{part} {seconds / rounds:.3f} s ({seconds / total:.0%})" for part, seconds in each.items())
    print(f"    {parts}", flush=True)


def report_step(seconds: float, flops: int, peak: float) -> None:
    """One evaluation of the network beside the fastest matrix product, and beside the data sheet."""
    rate = flops / seconds
    shares = f"{rate / peak:.1%} of the fastest product, {machine.of_data_sheet(rate)} of the data sheet"
    speed = f"{1e3 * seconds:.1f} ms, {flops / 1e12:.4g} TFLOP, {rate / 1e12:.4g} TFLOP/s"
    print(f"    a denoising step: {speed}: {shares} (goal {GOAL_SHARE:.0%})", flush=True)


def report_memory(used: int, taken: int) -> None:
    print(f"    peak memory: {used / 1e9:.2f} GB in use, {taken / 1e9:.2f} GB taken", flush=True)


def main() -> None:
    parser = machine.parser(__doc__, "threads", "rounds", rounds=2)
    parser.add_argument("--envs", nargs="*", type=int, default=[16])
    parser.add_argument("--released", action="store_true", help="accepted: nothing else is measured")
    parser.add_argument("--size", default="2B", choices=list(rollout.SETTINGS), help="2B needs a GPU")
    args = machine.parse(parser)
    for num_envs in args.envs:
        measure_released(args.size, num_envs, args.rounds)


if __name__ == "__main__":
    main()
