# SPDX-License-Identifier: Apache-2.0
"""A picture or the end of a clip, and a prompt, become a video.

python examples/video2world.py --model_size 2B --prompt "..." --input_path image.jpg --save_path out.mp4
python examples/video2world.py --model_size tiny --prompt "..." --input_path assets/toy_world/first_frame.png
torchrun --nproc_per_node=8 --master_port=12341 examples/video2world.py --num_gpus 8 --model_size 14B --prompt "..."
"""

import argparse
import contextlib
import io
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file runs from a checkout as it is

from examples.video2world_choice import choose_model
from examples.video2world_flags import BENCHMARK_RUNS, DEFAULT_INPUT, TINY_INPUT, parse
from imaginaire import log as logs
from imaginaire.errors import ConfigError, UserError

log = logging.getLogger("video2world")


def run(args: argparse.Namespace, command: list[str]) -> int:
    from cosmos_predict2.pipelines.context_parallel import agreed, follow, lead

    job = agreed(lambda: prepare(args, command))
    if job.make_videos is None:
        follow(lambda: job.make_pipeline().world)
        return 0
    make_videos = partial(job.make_videos, job.make_pipeline)
    return lead(make_videos) if args.num_gpus > 1 else make_videos()


MakeVideos = Callable[[Callable[[], Any]], int]  # given what makes the pipeline, the exit code


@dataclass(frozen=True)
class Job:
    """What the flags ask for, checked: one process makes the videos, or rank 0 does with the help of the others."""

    make_pipeline: Callable[[], Any]
    make_videos: MakeVideos | None  # of rank 0


def prepare(args: argparse.Namespace, command: list[str]) -> Job:
    """Raise for whatever can be known to be wrong; nothing heavy is built. Requests are looked at on rank 0 alone."""
    from cosmos_predict2.checkpoints import checkpoint_dir, parse_lora
    from cosmos_predict2.checkpoints.adapters.adapters import read_adapter
    from cosmos_predict2.pipelines import context_parallel
    from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
    from cosmos_predict2.world_model.assembly import check_parts
    from cosmos_predict2.world_model.config import PRECISIONS
    from imaginaire import distributed
    from imaginaire.distributed.parallel import current_dims

    if args.checkpoint_dir:
        os.environ["COSMOS_PREDICT2_ARGS"] = f"--checkpoints {shlex.quote(args.checkpoint_dir)}"
    if args.num_gpus < 1:
        raise ConfigError(f"--num_gpus {args.num_gpus}: at least 1.")
    choice = choose_model(args)
    config, dit_path = choice.config, choice.dit_path
    context_parallel.check_num_gpus(args.num_gpus, config.net.num_heads, config.state_t)
    check_processes(args.num_gpus, command)
    if args.natten:
        if choice.aspect_ratio != "16:9":
            raise ConfigError(f"--natten goes with --aspect_ratio 16:9, not {choice.aspect_ratio}.")
        log.info("natten: these weights run with dense attention here; sparse kernels are not built in")
    config.guardrail_config.checkpoint_dir = config.prompt_refiner_config.checkpoint_dir = checkpoint_dir()
    config.guardrail_config.enabled = not args.disable_guardrail
    config.guardrail_config.offload_model_to_cpu = args.offload_guardrail
    config.prompt_refiner_config.enabled = not args.disable_prompt_refiner
    config.prompt_refiner_config.offload_model_to_cpu = args.offload_prompt_refiner
    check_device(args.device or ("cuda" if args.use_cuda_graphs else "cpu"))
    check_sampling(args)
    check_frames(args, config)
    if args.load_ema and not args.dit_path:
        raise ConfigError("--load_ema takes the averaged weights of a file: name it with --dit_path.")
    is_leader = distributed.is_rank0()
    make_videos = prepare_requests(args, choice) if is_leader else None
    for adapter in args.lora:
        read_adapter(parse_lora(adapter)[0])
    others = [config.tokenizer, config.text_encoder if not args.prompt_embeddings else None]
    check_parts(config.net, dit_path, others if is_leader else [], "net_ema" if args.load_ema else "auto")
    device = args.device if args.num_gpus == 1 or args.device == "cpu" else distributed.device()

    def make_pipeline() -> Video2WorldPipeline:
        if args.num_gpus > 1 and is_leader:
            context_parallel.announce()
        return Video2WorldPipeline.from_config(
            config,
            dit_path,
            use_text_encoder=not args.prompt_embeddings,
            device=device,
            torch_dtype=PRECISIONS[args.dtype] if args.dtype else None,
            load_ema_to_reg=args.load_ema,
            lora=args.lora,
            offload_text_encoder=args.offload_text_encoder,
            downcast_text_encoder=args.downcast_text_encoder,
            offload_tokenizer=args.offload_tokenizer,
            group=current_dims().cp_group,
            is_follower=not is_leader,
        )

    return Job(make_pipeline, make_videos)


def prepare_requests(args: argparse.Namespace, choice: Any) -> MakeVideos:
    """What makes the videos that are asked for; raises for what is wrong with one alone, or with all of a batch."""
    from cosmos_predict2.guardrail.runner import create_guardrail
    from cosmos_predict2.pipelines.requests import Request, Settings, fingerprint, read_batch, run_all
    from cosmos_predict2.text.prompt_embeddings import read_prompt_embeddings
    from cosmos_predict2.text.prompts import DEFAULT_NEGATIVE_PROMPT
    from cosmos_predict2.world_model.sampling import SamplingOptions

    config, is_tiny = choice.config, choice.model_size == "tiny"
    negative = args.negative_prompt
    if negative is None:
        negative = "" if is_tiny else DEFAULT_NEGATIVE_PROMPT
    bundled = str(ROOT / (TINY_INPUT if is_tiny else DEFAULT_INPUT)) if args.num_conditional_frames else ""
    request = Request(
        input_path=args.input_path or bundled,
        prompt=args.prompt,
        save_path=args.save_path,
        negative_prompt=negative,
        num_conditional_frames=args.num_conditional_frames,
        seed=args.seed,
        compare_to=args.compare_to,
        start_frame_idx=args.start_frame_idx,
    )
    if not args.input_path and not args.batch_input_json and bundled:
        log.info("input: %s, the bundled picture (--input_path: yours)", request.input_path)
    requests = read_batch(args.batch_input_json, request) if args.batch_input_json else [request]
    if not args.batch_input_json:
        request.check(args.contact_sheet)
    embeddings = read_prompt_embeddings(args.prompt_embeddings) if args.prompt_embeddings else None
    if embeddings is not None:
        check_embeddings(embeddings, requests, args.prompt_embeddings, config)
    guidance = args.guidance if args.guidance is not None else (0.0 if is_tiny else 7.0)
    if args.negative_prompt and guidance == 0:
        log.warning("--negative_prompt has no effect with --guidance 0")
    settings = Settings(
        aspect_ratio=choice.aspect_ratio,
        fps=config.fps,
        weights=fingerprint(choice.dit_path),
        sampling=SamplingOptions(
            guidance=guidance,
            num_steps=args.num_steps,
            solver=args.solver,
            use_cuda_graphs=args.use_cuda_graphs,
            progress=True,
        ),
        contact_sheet=args.contact_sheet,
    )

    def make_videos(make_pipeline: Callable[[], Any]) -> int:
        if args.benchmark:
            return benchmark(make_pipeline(), request, settings, embeddings)
        failed = run_all(
            make_pipeline,
            requests,
            settings,
            embeddings=embeddings,
            skip_existing=bool(args.batch_input_json) and not args.overwrite,
            guardrail=create_guardrail(config.guardrail_config),
        )
        return 1 if failed else 0

    return make_videos


def check_sampling(args: argparse.Namespace) -> None:
    """Raise for flags of sampling that cannot be meant."""
    if args.benchmark and args.batch_input_json:
        raise ConfigError("--benchmark makes one video again and again: give it without --batch_input_json.")
    if args.guidance is not None and not math.isfinite(args.guidance):
        raise ConfigError(f"--guidance {args.guidance}: a number, such as 7.")
    if args.num_steps < 1:
        raise ConfigError(f"--num_steps {args.num_steps}: at least 1.")
    if args.num_gpus > 1 and args.use_cuda_graphs:
        raise ConfigError("--use_cuda_graphs captures what one GPU does: give it without --num_gpus.")
    if args.num_gpus > 1 and args.device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {args.device}: with --num_gpus every process has a GPU of its own; leave it out.")


def check_frames(args: argparse.Namespace, config: Any) -> None:
    """Raise for a number of given frames, or a solver, that the network does not know."""
    least = config.min_num_conditional_frames
    if args.num_conditional_frames < least:
        raise ConfigError(
            f"--num_conditional_frames {args.num_conditional_frames}: this network was trained with a picture at least."
            " Give 1 or 5, or take a Predict2.5 model (--model 2B/post-trained), which can begin with the prompt alone."
        )
    if args.solver == "unipc" and config.flow is None:
        raise ConfigError("--solver unipc is for Predict2.5 networks; this one is asked by noise levels: take 2ab.")


def check_device(device: str) -> None:
    """Raise for a device that torch does not know or this machine does not have."""
    import torch

    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device}: use cpu, cuda, or cuda:1.") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: use cpu, cuda, or cuda:1.")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {device} (which --use_cuda_graphs needs too): torch sees no GPU here. Leave it out, or use"
            " --device cpu."
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {device}: torch sees {torch.cuda.device_count()} GPU, numbered from 0.")


def check_embeddings(embeddings, requests, path: str, config) -> None:
    """Raise for embeddings that this model was not trained with, and for prompts that the file has no embedding of."""
    from cosmos_predict2.models.text_widths import network_text_width
    from cosmos_predict2.text.trained_text import other_text

    if embeddings.width != (width := network_text_width(config.net)):
        raise ConfigError(
            f"{path} has embeddings of width {embeddings.width} by {embeddings.name}, but this model takes {width}."
            " Write it with the encoder of this model: python -m scripts.encode_prompts --text_encoder."
        )
    if (problem := other_text(config.text_encoder_name, embeddings.name, embeddings.values())) is not None:
        raise ConfigError(f"{path} {problem} (python -m scripts.encode_prompts writes it.)")
    wanted = dict.fromkeys(text for r in requests for text in (r.prompt, r.negative_prompt) if text)
    if missing := [text for text in wanted if text not in embeddings]:
        raise ConfigError(
            f"{path} has no embedding of {missing[0]!r}. Write it with python -m scripts.encode_prompts --prompt and"
            f" --negative_prompt. It has: {'; '.join(repr(text[:60]) for text in list(embeddings)[:5])}."
        )


def benchmark(pipe, request, settings, embeddings) -> int:
    from cosmos_predict2.pipelines.requests import generate_to_file

    seconds = [generate_to_file(pipe, request, settings, embeddings) for _ in range(BENCHMARK_RUNS)]
    counted = seconds[1:]
    print(
        f"runs: {' '.join(f'{s:.2f}' for s in seconds)} s;"
        f" mean of the last {len(counted)}: {sum(counted) / len(counted):.2f} s"
    )
    return 0


def check_processes(num_gpus: int, command: list[str]) -> None:
    """Raise where the number of processes is not what the flag says."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == num_gpus:
        return
    if processes > 1:
        raise ConfigError(f"{processes} processes were started, but --num_gpus is {num_gpus}: make them equal.")
    raise ConfigError(
        f"--num_gpus {num_gpus} needs {num_gpus} processes, but there is 1. Start it with:\n"
        f"  torchrun --nproc_per_node={num_gpus} --master_port=12341 {shlex.join(command)}"
    )


def main() -> int:
    rank = int(os.environ.get("RANK", "0"))
    with contextlib.redirect_stderr(sys.stderr if rank == 0 else io.StringIO()):
        args = parse()  # a wrong flag is said once
    logs.setup(None, rank)
    start = time.monotonic()
    try:
        if args.num_gpus > 1:
            join(args.num_gpus)
        code = run(args, sys.argv)
    except UserError as error:
        if args.debug:
            raise
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written of the video in work", file=sys.stderr)
        return 130
    if args.num_gpus > 1:
        leave()
    log.info("done in %.1f s", time.monotonic() - start)
    return code


def join(num_gpus: int) -> None:
    """Form the group of processes that torchrun announced, all of which work on one video."""
    from imaginaire import distributed
    from imaginaire.distributed.parallel import init_dims

    distributed.init()
    if distributed.world_size() == num_gpus:
        init_dims(num_gpus)


def leave() -> None:
    from imaginaire import distributed

    distributed.shutdown()


if __name__ == "__main__":
    sys.exit(main())
