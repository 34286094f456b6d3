# SPDX-License-Identifier: Apache-2.0
"""A video of the released size: seconds of its parts, of a step, and the memory that each part takes.

    python -m benchmarks.inference --released [--resolutions 480 720] [--steps 4]
    python -m benchmarks.inference --released --compile_network
    python -m benchmarks.inference [--size tiny]

The product's pipeline makes a video of 93 frames from a picture, with guidance, out of random weights and texts. The
two halves of the guidance pass the network as one batch where memory allows. With fewer ``--steps`` than 35 the seconds
of 35 are computed, and marked as computed.
"""

import dataclasses
import gc
import statistics
from typing import Any

import torch

from benchmarks import machine
from cosmos_predict2.configs.base.config_video2world import get_cosmos_predict2_video2world_pipeline
from cosmos_predict2.nn.flops import forward_flops
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.world_model.options import GUIDED
from cosmos_predict2.world_model.world_model import WorldModel

STEPS = 35
PICTURES = {"tiny": "assets/toy_world/first_frame.png"}
PICTURE = "assets/video2world/input0.jpg"
PROMPTS = ("a robot", "a poor video")  # whose embeddings are random
TEXT_TOKENS = {"tiny": 64, "2B": 512}


def pipeline(size: str, resolution: str) -> Video2WorldPipeline:
    """The released pipeline with random weights, without what needs files of its own."""
    is_tiny = size == "tiny"
    config = get_cosmos_predict2_video2world_pipeline(model_size=size, resolution="" if is_tiny else resolution)
    config.guardrail_config.enabled = config.prompt_refiner_config.enabled = False
    if not is_tiny:
        config.tokenizer.vae_pth, config.tokenizer.allow_random = "", True
    return Video2WorldPipeline.from_config(config, use_text_encoder=False)


def counted(world: WorldModel) -> list[tuple[float, int]]:
    """Seconds and samples of the batch of each pass of the network from now on."""
    passes, forward = list[tuple[float, int]](), world.net.forward

    def call(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        spent, found = machine.timed(lambda: forward(x, *arguments, **options))
        passes.append((spent, len(x)))
        return found

    world.net.forward = call  # type: ignore[assignment, method-assign]
    return passes


def measure(size: str, resolution: str, num_steps: int, is_compiled: bool = False) -> dict[str, float]:
    """Print the table of one resolution; seconds by part."""
    pipe = pipeline(size, resolution)
    world = pipe.world
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(2, TEXT_TOKENS[size], pipe.dit.text_channels, generator=generator)
    options = dataclasses.replace(GUIDED, num_steps=num_steps, compile_network=is_compiled)

    def make(options: Any) -> torch.Tensor:
        texts = dict(zip(PROMPTS, text))
        video: torch.Tensor = pipe(PICTURES.get(size, PICTURE), *PROMPTS, options=options, embeddings=texts)
        return video

    warm = dataclasses.replace(options, num_steps=1, final_evaluation=False)  # kernels are chosen, memory is taken
    begun = machine.seconds(lambda: make(warm))
    phases, passes = machine.Phases(), counted(world)
    for part, name in (("encode", "given_latents"), ("denoise", "generate_latents"), ("decode", "decode")):
        phases.watch(part, world, name)
    whole, video = machine.timed(lambda: make(options))
    shape = tuple(video.shape[2:])
    if not torch.isfinite(video).all():
        raise SystemExit(f"{size} {resolution}: the video is not finite.")

    batch = passes[0][1]
    halves = 2 if batch == 1 else 1  # passes of an evaluation
    evaluations = len(passes) // halves
    each = halves * statistics.median(spent for spent, _ in passes)
    latent = (pipe.config.state_t, shape[1] // 8, shape[2] // 8)
    flops = forward_flops(pipe.dit, latent, text_tokens=text.shape[1], is_prepared=True, batch_size=2).total
    print(f"\n{size} {resolution}: {shape[0]} frames of {shape[1]} x {shape[2]}, guidance, {num_steps} steps")
    way = "as one batch of two" if batch == 2 else "one after the other"
    print(f"  the halves of the guidance pass {way}; {evaluations} evaluations")
    share = machine.of_data_sheet(flops / each)
    print(f"  an evaluation {each:.3f} s ({flops / 1e12:.4g} TFLOP, {share} of the data sheet)")
    if is_compiled:
        print(f"  compiled blocks; the first video of one step took {begun:.1f} s")
    print(f"  {'':10}{'seconds':>10}{'GB in use':>12}{'GB taken':>12}")
    for part, spent in phases.seconds.items():
        in_use, taken = phases.memory[part]
        print(f"  {part:10}{spent:>10.2f}{in_use / 1e9:>12.2f}{taken / 1e9:>12.2f}")
    print(f"  {'whole':10}{whole:>10.2f}", flush=True)
    if num_steps != STEPS:
        more = (STEPS - num_steps) * each
        print(f"  {STEPS} steps would take {whole + more:.1f} s: computed, {more:.1f} s more at the median evaluation")
    return {**phases.seconds, "whole": whole, "evaluation": each}


def main() -> None:
    parser = machine.parser(__doc__, "threads")
    parser.add_argument("--released", action="store_true", help="the 2B network at the resolutions")
    parser.add_argument("--size", choices=tuple(TEXT_TOKENS), help="default: tiny, and 2B where --released is given")
    parser.add_argument("--resolutions", nargs="*", default=["480", "720"], choices=("480", "720"))
    parser.add_argument("--steps", type=int, default=STEPS, help=f"fewer than {STEPS}: the rest is computed")
    parser.add_argument("--compile_network", action="store_true", help="as the flag of programs does")
    args = machine.parse(parser)
    machine.quiet_trainer()
    print(f"{machine.described(machine.device_and_dtype()[0])}, random weights")
    size = args.size or ("2B" if args.released else "tiny")
    machine.require_gpu(size)
    for resolution in ["48"] if size == "tiny" else args.resolutions:
        measure(size, resolution, args.steps, args.compile_network)
        gc.collect()  # the timed parts hold each other


if __name__ == "__main__":
    main()
