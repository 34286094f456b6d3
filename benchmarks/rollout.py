# SPDX-License-Identifier: Apache-2.0
"""Imagined frames per second with actions, as the public code makes them and as ours does.

    python -m benchmarks.rollout [--model_size 2B] [--batches 1 16 64] [--threads N] [--rounds N] [--quick]

The first row of each table does it as the public code does: one recording after another, the whole clip encoded though
one frame is given, two passes of the network for a guidance whose halves are equal, positions and the text's keys and
values at every step, attention to a text of zeros. The second has all recordings in one batch; the last is
``generate_actions``. That all rows give the same videos is checked first. Weights are random: the time does not depend
on them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import machine
from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.conditioner import ACTION_KEY, TEXT_KEY
from cosmos_predict2.configs.action_conditioned.networks import get_cosmos_predict2_action_conditioned_pipeline
from cosmos_predict2.diffusion.rectified_flow import karras_sigmas
from cosmos_predict2.diffusion.solvers import guide, sample
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from cosmos_predict2.world_model.world_model import (
    SamplingOptions,
    WorldModel,
    build_world_model,
    initial_noise,
    to_uint8,
)
from imaginaire.config.lazy_config import LazyCall as L

LARGEST_DIFFERENCE = {"cpu": 1e-5, "cuda": 1e-4}  # of pixels in [-1, 1], in float32; kernels differ by batch
GUIDANCE = 7.0
SETTINGS = {  # height, width, tokens of the text of zeros
    "tiny": (48, 48, 64),
    "2B": (256, 320, 512),
}


WAYS = {"as the public code does": True, "the same in one batch": False}  # whether one after another


class Inputs(NamedTuple):
    """First frames, actions and seeds of a batch."""

    frames: Tensor
    actions: Tensor
    seeds: list[int]


def make_pipeline(size: str, device: torch.device, dtype: torch.dtype) -> Video2WorldActionConditionedPipeline:
    """The model with random weights in every part."""
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size=size, network="chunk")
    config.action_transform = controller(config.net.action_dim, 1.0).to_dict()
    config.tokenizer = L(TinyTokenizer)() if size == "tiny" else L(WanTokenizer)(allow_random=True, dtype=dtype)
    world = build_world_model(config, dtype=dtype, device=device).load()
    world.tokenizer.to(device)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in world.net.named_parameters():
            if "adaln_modulation" in name or "action_embedder" in name:  # zero in a fresh network
                nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5, generator=generator)
    return Video2WorldActionConditionedPipeline(world)


def make_inputs(size: str, batch: int, dim: int) -> Inputs:
    height, width, _ = SETTINGS[size]
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (batch, 3, 1, height, width), dtype=torch.uint8, generator=generator)
    return Inputs(frames, torch.rand(batch, 12, dim, generator=generator) * 2 - 1, list(range(batch)))


@torch.no_grad()
def imagine(
    pipe: Video2WorldActionConditionedPipeline, one_by_one: bool, inputs: Inputs, num_steps: int, num_tokens: int
) -> Tensor:
    """Videos in [-1, 1], made as the public code makes them."""
    step = 1 if one_by_one else len(inputs.seeds)
    rows = [slice(i, i + step) for i in range(0, len(inputs.seeds), step)]
    parts = [Inputs(inputs.frames[i], inputs.actions[i], inputs.seeds[i]) for i in rows]
    return torch.cat([_imagine(pipe, part, num_steps, num_tokens) for part in parts])


def _imagine(pipe: Video2WorldActionConditionedPipeline, inputs: Inputs, num_steps: int, num_tokens: int) -> Tensor:
    config, device, size = pipe.config, pipe.device, len(inputs.seeds)
    dtype = torch.promote_types(pipe.dit.dtype, torch.float32)
    tail = inputs.frames.new_zeros(size, 3, 12, *inputs.frames.shape[3:])
    pixels = torch.cat([inputs.frames, tail], dim=2).to(device, dtype) / 127.5 - 1
    given = pipe.world.tokenizer.encode(pixels).to(dtype) * config.sigma_data
    batch = {
        TEXT_KEY: torch.zeros(size, num_tokens, pipe.dit.text_channels, device=device),
        ACTION_KEY: inputs.actions.to(device),
        "fps": torch.full((size,), float(config.fps), device=device),
        "padding_mask": torch.zeros(size, 1, *inputs.frames.shape[3:], device=device),
    }
    num_B = torch.ones(size, device=device)
    pair = [one.with_conditioning_frames(given, num_B) for one in pipe.world.conditioner.guidance_pair(batch)]

    def denoise(x: Tensor, sigma_B: Tensor) -> Tensor:
        positive, negative = (pipe.world.denoiser(x, sigma_B, condition, None) for condition in pair)
        return guide(positive, negative, GUIDANCE)

    levels = config.timestamps
    sigmas = karras_sigmas(num_steps, levels.t_min, levels.t_max, levels.order)
    noise = initial_noise(tuple(given.shape), inputs.seeds).to(given) * levels.t_max
    return pipe.world.decode(sample(denoise, noise, sigmas))


def check_equal(size: str, device: torch.device) -> float:
    """The largest difference of any way to the pipeline's own videos, in float32; raises where there is one."""
    torch.backends.cudnn.allow_tf32 = False  # float32 in full for the comparison
    pipe = make_pipeline(size, device, torch.float32)
    inputs = make_inputs(size, 2, pipe.transform.dim)
    ours = pipe.generate_actions(*inputs, SamplingOptions(num_steps=2, guidance=GUIDANCE), as_float=True)
    worst = 0.0
    for way, one_by_one in WAYS.items():
        difference = float((imagine(pipe, one_by_one, inputs, 2, SETTINGS[size][2]) - ours).abs().max())
        if not difference <= LARGEST_DIFFERENCE[device.type]:
            raise SystemExit(f"'{way}' gives other videos: they differ by {difference:.1e}.")
        worst = max(worst, difference)
    torch.backends.cudnn.allow_tf32 = True
    return worst


def measure(pipe: Video2WorldActionConditionedPipeline, size: str, batch: int, num_steps: int, rounds: int) -> None:
    """Print the table of one batch size: how many times as fast as the first way each is."""
    inputs = make_inputs(size, batch, pipe.transform.dim)
    runs = {way: partial(imagine, pipe, one, inputs, num_steps, SETTINGS[size][2]) for way, one in WAYS.items()}
    options = SamplingOptions(num_steps=num_steps, guidance=GUIDANCE)
    runs["generate_actions"] = partial(pipe.generate_actions, *inputs, options, as_float=True)
    seconds = machine.in_turns(runs, rounds)
    print(f"\nbatch {batch}: 12 frames each, {num_steps} steps")
    for name in runs:
        ratio, took = seconds.ratio(next(iter(WAYS)), name), seconds.median(name)
        print(f"  {name:40s} {took * 1e3:9.1f} ms {12 * batch / took:9.1f} frames/s {ratio:6.2f} x", flush=True)


def published(world: WorldModel, num_tokens: int) -> Callable[..., torch.Tensor]:
    """A replacement of `Imagination.generate_actions`: the same videos, made as the public code makes them, in one
    batch."""
    pipe = Video2WorldActionConditionedPipeline(world)

    def generate(first: Tensor, actions: Tensor, seeds: list[int], options: Any, *, frames: range, **_: Any) -> Tensor:
        inputs = Inputs(first, actions, seeds)
        video = imagine(pipe, False, inputs, options.num_steps, num_tokens)
        return to_uint8(video[:, :, frames.start : frames.stop])

    return generate


def main() -> None:
    parser = machine.parser(__doc__, "quick", "threads", "rounds")
    parser.add_argument("--model_size", choices=list(SETTINGS), default="tiny", help="2B needs a GPU")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--num_steps", type=int, default=10, help="sampling steps (default 10)")
    arguments = machine.parse(parser)
    if min(*arguments.batches, arguments.num_steps, arguments.rounds or 1) < 1:
        parser.error("--batches, --num_steps and --rounds are 1 at least")
    device, dtype = machine.device_and_dtype()
    size = arguments.model_size
    machine.require_gpu(size)
    height, width, _ = SETTINGS[size]
    print(f"{machine.described(device)}, {dtype}, {size} network by frames, {height}x{width}", flush=True)
    print("whether all ways give the same videos, in float32: ", end="", flush=True)
    print(f"yes, up to {check_equal(size, device):.1e}", flush=True)
    pipe = make_pipeline(size, device, dtype)
    for batch in arguments.batches:
        rounds = arguments.rounds or (1 if arguments.quick else 5)
        measure(pipe, size, batch, arguments.num_steps, rounds)


if __name__ == "__main__":
    main()
