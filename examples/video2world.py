# SPDX-License-Identifier: Apache-2.0
"""A picture or the end of a clip, and a prompt, become a video.

python examples/video2world.py --model_size 2B --prompt "..." --input_path image.jpg --save_path out.mp4
python examples/video2world.py --model_size tiny --prompt "..." --input_path assets/toy_world/first_frame.png
"""

import argparse
import logging
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file runs from a checkout as it is

from examples.video2world_flags import BENCHMARK_RUNS, DEFAULT_INPUT, TINY_INPUT, parse
from imaginaire import log as logs
from imaginaire.errors import ConfigError, UserError

log = logging.getLogger("video2world")


def run(args: argparse.Namespace, command: list[str]) -> int:
    check_processes(args.num_gpus, command)
    from cosmos_predict2.auxiliary.guardrail.runner import create_guardrail
    from cosmos_predict2.checkpoints import checkpoint_dir, parse_lora
    from cosmos_predict2.checkpoints.adapters import read_adapter
    from cosmos_predict2.pipelines.assembly import check_parts
    from cosmos_predict2.pipelines.requests import Request, Settings, fingerprint, read_batch, run_all
    from cosmos_predict2.pipelines.video2world import PRECISIONS, Video2WorldPipeline
    from cosmos_predict2.text.prompt_embeddings import read_prompt_embeddings
    from cosmos_predict2.text.prompts import DEFAULT_NEGATIVE_PROMPT

    if args.checkpoint_dir:
        os.environ["COSMOS_PREDICT2_ARGS"] = f"--checkpoints {shlex.quote(args.checkpoint_dir)}"
    choice = choose_model(args)
    config, is_tiny, dit_path = choice.config, choice.model_size == "tiny", choice.dit_path
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
    if args.benchmark and args.batch_input_json:
        raise ConfigError("--benchmark makes one video again and again: give it without --batch_input_json.")
    if args.guidance is not None and not math.isfinite(args.guidance):
        raise ConfigError(f"--guidance {args.guidance}: a number, such as 7.")
    if args.num_steps < 1:
        raise ConfigError(f"--num_steps {args.num_steps}: at least 1.")
    if args.downcast_text_encoder and not is_tiny:
        config.text_encoder.dtype = "bfloat16"
    negative = args.negative_prompt
    if negative is None:
        negative = "" if is_tiny else DEFAULT_NEGATIVE_PROMPT
    request = Request(
        input_path=args.input_path or str(ROOT / (TINY_INPUT if is_tiny else DEFAULT_INPUT)),
        prompt=args.prompt,
        save_path=args.save_path,
        negative_prompt=negative,
        num_conditional_frames=args.num_conditional_frames,
        seed=args.seed,
        compare_to=args.compare_to,
    )
    requests = read_batch(args.batch_input_json, request) if args.batch_input_json else [request]
    if not args.batch_input_json:
        request.check(args.contact_sheet)
    if args.load_ema and not args.dit_path:
        raise ConfigError("--load_ema takes the averaged weights of a file: name it with --dit_path.")
    embeddings = read_prompt_embeddings(args.prompt_embeddings) if args.prompt_embeddings else None
    for adapter in args.lora:
        read_adapter(parse_lora(adapter)[0])
    if embeddings is not None:
        check_embeddings(embeddings, requests, args.prompt_embeddings, text_width(config.net))
    others = [config.tokenizer, config.text_encoder if embeddings is None else None]
    check_parts(config.net, dit_path, others, "net_ema" if args.load_ema else "auto")
    guidance = args.guidance if args.guidance is not None else (0.0 if is_tiny else 7.0)
    if args.negative_prompt and guidance == 0:
        log.warning("--negative_prompt has no effect with --guidance 0")
    settings = Settings(
        aspect_ratio=choice.aspect_ratio,
        guidance=guidance,
        num_steps=args.num_steps,
        fps=config.fps,
        weights=fingerprint(dit_path),
        use_cuda_graphs=args.use_cuda_graphs,
        contact_sheet=args.contact_sheet,
    )

    def make_pipeline() -> Video2WorldPipeline:
        return Video2WorldPipeline.from_config(
            config,
            dit_path,
            use_text_encoder=embeddings is None,
            device=args.device,
            torch_dtype=PRECISIONS[args.dtype] if args.dtype else None,
            load_ema_to_reg=args.load_ema,
            lora=args.lora,
            offload_text_encoder=args.offload_text_encoder,
            offload_tokenizer=args.offload_tokenizer,
        )

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


@dataclass(frozen=True)
class Choice:
    """The model that the flags and the run of the weights ask for."""

    model_size: str
    config: Any  # Video2WorldPipelineConfig
    aspect_ratio: str
    dit_path: str  # empty: random weights


def choose_model(args: argparse.Namespace) -> Choice:
    """The pipeline's config and weights: what no flag says is as in the run that the weights come from."""
    from cosmos_predict2.checkpoints import parse_lora
    from cosmos_predict2.configs.base.config_video2world import (
        SIZES,
        get_cosmos_predict2_video2world_pipeline,
        get_dit_path,
    )
    from cosmos_predict2.pipelines.recorded_run import recorded_run

    if args.random_weights and args.dit_path:
        raise ConfigError(f"--random_weights and --dit_path {args.dit_path}: give one of them.")
    sources = [args.dit_path] if args.dit_path else [parse_lora(adapter)[0] for adapter in args.lora]
    run = next((found for path in sources if (found := recorded_run(path)) is not None), None)
    trained = run.model_size(SIZES) if run is not None else None
    size = args.model_size or trained or "2B"
    if run is not None and trained not in (None, size):
        raise ConfigError(
            f"--model_size {size}, but {run.folder} trained a {trained} model. Leave --model_size out, or give weights"
            f" of a {size} model."
        )
    variant = dict(model_size=size, resolution=args.resolution or "", fps=args.fps or 0, natten=args.natten)
    config = get_cosmos_predict2_video2world_pipeline(**variant)
    aspect_ratio = args.aspect_ratio or SIZES[size].aspect_ratio
    if run is not None:
        aspect_ratio = follow(run, config, args) or aspect_ratio
    dit_path = args.dit_path
    if not dit_path and not args.random_weights:
        is_there = run is not None and run.dit_path and os.path.exists(run.dit_path)
        dit_path = run.dit_path if run is not None and is_there else get_dit_path(**variant)
    return Choice(size, config, aspect_ratio, dit_path)


def follow(run: Any, config: Any, args: argparse.Namespace) -> str | None:
    """Make the config that of the run but for what the flags say, and tell where they differ; the aspect ratio of the
    run where the flags give none."""
    state_t, fps = config.state_t, config.fps
    resolution, aspect_ratio = run.shape
    run.apply_to(config)
    log.info("run: %s: %s", run.folder, run)
    asked = [("--resolution", args.resolution, resolution), ("--fps", args.fps, run.fps)]
    asked += [("--aspect_ratio", args.aspect_ratio, aspect_ratio)]
    for flag, wanted, trained in asked:
        if wanted is not None and trained is not None and wanted != trained:
            log.warning("%s %s, but %s was trained at %s: %s", flag, wanted, run.folder, trained, run)
    if args.fps is not None and args.fps != run.fps:
        config.state_t, config.fps = state_t, fps
    config.resolution = args.resolution or resolution
    return args.aspect_ratio or aspect_ratio


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


def text_width(net) -> int:
    """The width of the text that a network's lazy node takes."""
    return net.get("crossattn_proj_in_channels") or net.get("crossattn_emb_channels") or 1024


def check_embeddings(embeddings, requests, path: str, width: int) -> None:
    """Raise for embeddings of another width, and for prompts that the file has no embedding of."""
    if embeddings.width != width:
        raise ConfigError(
            f"{path} has embeddings of width {embeddings.width} by {embeddings.name}, but this model takes {width}."
            " Write it with the encoder of this model: python -m scripts.encode_prompts --text_encoder."
        )
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
    """Raise where the number of processes is not what the flag says, or more than this version can use."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_gpus < 1:
        raise ConfigError(f"--num_gpus {num_gpus}: at least 1.")
    if num_gpus > 1 and processes != num_gpus:
        raise ConfigError(
            f"--num_gpus {num_gpus} needs {num_gpus} processes, but there is {processes}. Start it with:\n"
            f"  torchrun --nproc_per_node={num_gpus} --master_port=12341 {shlex.join(command)}\n"
            "But this version uses one GPU for a video: more are not built in yet, so leave --num_gpus out."
        )
    if processes > 1:
        raise ConfigError(
            f"{processes} processes were started, but this version makes a video on one GPU: spreading one over several"
            " (context parallelism) is not built in yet. Start one process, with --num_gpus 1."
        )


def main() -> int:
    args = parse()
    logs.setup()
    start = time.monotonic()
    try:
        code = run(args, sys.argv)
    except UserError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written of the video in work", file=sys.stderr)
        return 130
    log.info("done in %.1f s", time.monotonic() - start)
    return code


if __name__ == "__main__":
    sys.exit(main())
