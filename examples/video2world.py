# SPDX-License-Identifier: Apache-2.0
"""A picture or the end of a clip, and a prompt, become a video."""

import argparse
import contextlib
import io
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file runs from a checkout as it is

from cosmos_predict2.world_model.options import Machine, SamplingOptions, Settings, VideoModel, VideoRequest
from imaginaire import log as logs
from imaginaire.command_line import Help, Parser, add_flags, explained, values_of
from imaginaire.errors import ConfigError, UserError

log = logging.getLogger("video2world")

DEFAULT_INPUT = "assets/video2world/input0.jpg"
TINY_INPUT = "assets/toy_world/first_frame.png"
INFERENCE_TYPES = {"text2world": 0, "image2world": 1, "video2world": 5}  # conditioning pixel frames
BENCHMARK_RUNS = 4  # the first warms up and is not counted


Jobs = tuple[list[VideoRequest], Settings | list[Settings]]  # settings for all requests, or for each


def choose_video_model(args: argparse.Namespace) -> Any:
    from cosmos_predict2.configs.base.config_video2world import choose_model

    return choose_model(values_of(VideoModel, args), args.input_path)


@dataclass(frozen=True)
class Program:
    """A program of this family: this one, with flags of its own, and steps that change what is made."""

    description: str = "Make a video that begins with a picture or with the end of a clip, and follows a prompt."
    add_flags: Callable[[Callable[..., Any]], None] = lambda add: None
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of flags, in place of this program's
    older: Mapping[str, str] = field(default_factory=dict)  # published spellings -> flags
    shares_input: bool = False  # entries of a batch that have no input have that of the flags
    model_flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options of flags of the model
    # Completes the flags before a model is chosen by them; an exit code where the work is done without one.
    settle: Callable[[argparse.Namespace], int | None] = lambda args: None
    choose: Callable[[argparse.Namespace], Any] = choose_video_model
    # (flags, choice of the model, requests and settings of the flags) -> those that are carried out
    plan: Callable[[argparse.Namespace, Any, Jobs], Jobs] = lambda args, choice, jobs: jobs
    after: Callable[[argparse.Namespace, Any, Jobs], None] = lambda args, choice, jobs: None  # with the videos


VIDEO2WORLD = Program()


def _parser(program: Program) -> Parser:
    parser = Parser(description=program.description, formatter_class=Help, allow_abbrev=False)
    parser.older = program.older
    parser.set_defaults(lora_alpha=None, keep_going=None, skip_existing=None, is_stage=False)  # of some programs
    program.add_flags(parser.add_argument_group("this program").add_argument)
    add_flags(parser.add_argument_group("model").add_argument, VideoModel, **program.model_flags)
    request = parser.add_argument_group("request").add_argument
    inputs = f"a picture, or an mp4 whose last frames are continued (default {DEFAULT_INPUT}; tiny: {TINY_INPUT})"
    negative = "what guidance leads away from (default: a description of poor video; tiny: no text)"
    add_flags(
        request,
        VideoRequest,
        input_path={"default": None, "help": inputs},
        negative_prompt={"default": None, "help": negative},
        num_conditional_frames={"default": None},
    )
    named = "the same by its name at Predict2.5: from the prompt alone (0), a picture (1), or a clip (5)"
    request("--inference_type", choices=list(INFERENCE_TYPES), help=named)
    request("--num_conditional_frmaes", type=int, choices=[1, 5], help=argparse.SUPPRESS)
    batch = "a list of {input_video, prompt, output_video}; outputs that exist are skipped"
    request("--batch_input_json", metavar="FILE", help=batch)
    request("--overwrite", action="store_true", help="with --batch_input_json: make outputs again that exist")
    embeddings = "embeddings written by scripts.encode_prompts, in place of the text encoder"
    request("--prompt_embeddings", metavar="FILE", help=embeddings)
    add_flags(request, Settings)
    guidance = {"default": None, "help": "x = cond + guidance (cond - uncond); 0: none (default 7; tiny: 0)"}
    sampling = parser.add_argument_group("sampling").add_argument
    steps = {"default": None, "help": "sampling steps (default 35; of a student its own)"}
    add_flags(sampling, SamplingOptions, guidance=guidance, num_steps=steps)
    machine = parser.add_argument_group("machine").add_argument
    add_flags(machine, Machine)
    machine("--offload_text_encoder", action="store_true", help="keep the text encoder in host memory between uses")
    machine("--downcast_text_encoder", action="store_true", help="the text encoder in bfloat16")
    machine("--text_encoder_8bit", action="store_true", help="the text encoder's linear layers in 8 bits")
    runs = f"make the video {BENCHMARK_RUNS} times and print the mean time of all but the first"
    machine("--benchmark", action="store_true", help=runs)
    safety = parser.add_argument_group("guardrail and prompt refiner").add_argument
    safety("--disable_guardrail", action="store_true", help="no check of prompt and video")
    safety("--offload_guardrail", action="store_true", help="the guardrail's models in host memory between checks")
    safety("--disable_prompt_refiner", action="store_true", help="use the prompt as it is")
    safety("--offload_prompt_refiner", action="store_true", help="the refiner's model in host memory between prompts")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(**program.defaults)
    return parser


def parse(arguments: Sequence[str] | None = None, program: Program = VIDEO2WORLD) -> argparse.Namespace:
    parser = _parser(program)
    args = parser.parse_args(arguments)
    if args.num_conditional_frmaes is not None:
        print("note: --num_conditional_frmaes is read as --num_conditional_frames", file=sys.stderr)
        args.num_conditional_frames = args.num_conditional_frmaes
    of_type = INFERENCE_TYPES.get(args.inference_type)
    if None not in (of_type, args.num_conditional_frames) and of_type != args.num_conditional_frames:
        parser.error(f"--inference_type {args.inference_type} has {of_type} frames: leave --num_conditional_frames out")
    if args.num_conditional_frames is None:
        args.num_conditional_frames = 1 if of_type is None else of_type
    return args


def run(args: argparse.Namespace, program: Program) -> int:
    from cosmos_predict2.pipelines.video2world import follow, lead
    from imaginaire import distributed

    if (code := program.settle(args)) is not None:
        return code
    prepared = distributed.agreed(lambda: prepare(args, program), ConfigError)
    if prepared.make_videos is None:
        follow(lambda: prepared.make_pipeline().world)
        return 0
    make_videos = partial(prepared.make_videos, prepared.make_pipeline)
    return lead(make_videos) if args.num_gpus > 1 else make_videos()


MakeVideos = Callable[[Callable[[], Any]], int]  # given what makes the pipeline, the exit code


@dataclass(frozen=True)
class PreparedRun:
    """The checked work of the flags: one process makes the videos, or rank 0 does with the help of the others."""

    make_pipeline: Callable[[], Any]
    make_videos: MakeVideos | None  # of rank 0


def prepare(args: argparse.Namespace, program: Program = VIDEO2WORLD) -> PreparedRun:
    """Raise for whatever can be known to be wrong; nothing heavy is built. Requests are checked on rank 0 alone."""
    from cosmos_predict2.checkpoints.adapters import parse_lora, read_adapter
    from cosmos_predict2.pipelines.multiview import MultiviewPipeline
    from cosmos_predict2.pipelines.video2world import Video2WorldPipeline, announce, check_num_gpus
    from cosmos_predict2.world_model.assembly import check_device, check_parts
    from cosmos_predict2.world_model.config import PRECISIONS, MultiviewPipelineConfig
    from cosmos_predict2.world_model.objectives import chosen_solver, objective_of
    from imaginaire import distributed
    from imaginaire.distributed.parallel import current_dims

    check_flags(args)
    choice = program.choose(args)
    config, dit_path = choice.config, choice.dit_path
    check_num_gpus(args.num_gpus, config.net.num_heads, config.state_t)
    if not args.is_stage:
        check_processes(args.num_gpus)
    if args.natten and choice.aspect_ratio != "16:9":
        raise ConfigError(f"--natten goes with --aspect_ratio 16:9, not {choice.aspect_ratio}.")
    guardrail, refiner = config.guardrail_config, config.prompt_refiner_config
    guardrail.enabled, guardrail.offload_model_to_cpu = not args.disable_guardrail, args.offload_guardrail
    refiner.enabled &= not args.disable_prompt_refiner and not args.prompt_embeddings  # they are of prompts as written
    refiner.offload_model_to_cpu = args.offload_prompt_refiner
    check_device(args.device or ("cuda" if args.use_cuda_graphs else "cpu"))
    config.require_conditioning(args.num_conditional_frames)
    chosen_solver(objective_of(config), args.solver)
    is_leader = distributed.is_rank0()
    make_videos = prepare_requests(args, choice, program) if is_leader else None
    for adapter in args.lora:
        read_adapter(parse_lora(adapter)[0])
    others = [config.tokenizer, config.text_encoder if not args.prompt_embeddings else None]
    which, lora_alpha = "net_ema" if args.load_ema else "auto", args.lora_alpha
    check_parts(config.net, dit_path, others if is_leader else [], which, lora_alpha)
    device = args.device if args.num_gpus == 1 or args.device == "cpu" else distributed.device()

    def make_pipeline() -> Any:
        if args.num_gpus > 1 and is_leader:
            announce()
        pipeline = MultiviewPipeline if isinstance(config, MultiviewPipelineConfig) else Video2WorldPipeline
        return pipeline.from_config(
            config,
            dit_path,
            use_text_encoder=not args.prompt_embeddings,
            device=device,
            torch_dtype=PRECISIONS[args.dtype] if args.dtype else None,
            load_ema_to_reg=args.load_ema,
            load_prompt_refiner=None,
            lora=args.lora,
            lora_alpha=lora_alpha,
            offload_text_encoder=args.offload_text_encoder,
            downcast_text_encoder="int8" if args.text_encoder_8bit else args.downcast_text_encoder,
            offload_tokenizer=args.offload_tokenizer,
            group=current_dims().cp_group if args.num_gpus > 1 else None,
            is_follower=not is_leader,
        )

    return PreparedRun(make_pipeline, make_videos)


def prepare_requests(args: argparse.Namespace, choice: Any, program: Program) -> MakeVideos:
    """The function that makes the requested videos; raises for a mistake in a single one, or in all of a batch."""
    from cosmos_predict2.guardrail.runner import create_guardrail
    from cosmos_predict2.pipelines.requests import check_request, fingerprint, generate_to_file, read_batch, run_all
    from cosmos_predict2.released import DEFAULT_NEGATIVE_PROMPT
    from cosmos_predict2.text.prompt_embeddings import read_prompt_embeddings

    config, is_tiny = choice.config, choice.model_size == "tiny"
    text_guardrail = create_guardrail(config.guardrail_config, with_networks=False)  # the pipeline has all parts
    negative = "" if is_tiny else DEFAULT_NEGATIVE_PROMPT
    request = request_of(args, negative, is_tiny=is_tiny)
    guidance = args.guidance if args.guidance is not None else (0.0 if is_tiny else 7.0)
    settings = values_of(
        Settings,
        args,
        aspect_ratio=choice.aspect_ratio,
        fps=config.fps,
        weights=fingerprint(choice.dit_path),
        sampling=values_of(
            SamplingOptions, args, guidance=guidance, num_steps=args.num_steps or choice.num_steps, progress=True
        ),
    )
    requests = [request]
    if args.batch_input_json:
        requests = read_batch(args.batch_input_json, request, shares_input=program.shares_input)
    jobs = requests, of_requests = program.plan(args, choice, (requests, settings))
    if not args.batch_input_json and not args.keep_going and not args.skip_existing:
        if bundled := "" if args.input_path else request.input_path:
            log.info("input: %s, the bundled picture (--input_path: yours)", bundled)
        for one in requests:
            check_request(one, args.contact_sheet)
    embeddings = read_prompt_embeddings(args.prompt_embeddings) if args.prompt_embeddings else None
    if embeddings is not None:
        check_embeddings(embeddings, requests, args.prompt_embeddings, config)

    def make_videos(make_pipeline: Callable[[], Any]) -> int:
        if args.benchmark:
            pipe, first = make_pipeline(), of_requests if isinstance(of_requests, Settings) else of_requests[0]
            seconds = [generate_to_file(pipe, requests[0], first, embeddings) for _ in range(BENCHMARK_RUNS)]
            mean = sum(seconds[1:]) / (BENCHMARK_RUNS - 1)
            print(f"runs: {' '.join(f'{s:.2f}' for s in seconds)} s; mean of all but the first: {mean:.2f} s")
            return 0
        failed = run_all(
            make_pipeline,
            requests,
            of_requests,
            embeddings=embeddings,
            skip_existing=bool(args.batch_input_json) and not args.overwrite
            if args.skip_existing is None
            else args.skip_existing,
            guardrail=text_guardrail,
            keep_going=args.keep_going,
        )
        program.after(args, choice, jobs)
        return 1 if failed else 0

    return make_videos


def request_of(args: argparse.Namespace, negative_prompt: str = "", *, is_tiny: bool = False) -> VideoRequest:
    """The request of the flags, with a bundled picture and a negative prompt where they have none."""
    bundled = str(ROOT / (TINY_INPUT if is_tiny else DEFAULT_INPUT)) if args.num_conditional_frames else ""
    negative = negative_prompt if args.negative_prompt is None else args.negative_prompt
    return values_of(VideoRequest, args, input_path=args.input_path or bundled, negative_prompt=negative)


def check_flags(args: argparse.Namespace) -> None:
    """Raise for flags that cannot be meant, whatever the model is."""
    if args.benchmark and args.batch_input_json:
        raise ConfigError("--benchmark makes one video again and again: give it without --batch_input_json.")
    if args.num_gpus > 1 and (args.use_cuda_graphs or args.device not in (None, "cpu", "cuda")):
        raise ConfigError("--num_gpus: every process has a GPU of its own; leave --device and --use_cuda_graphs out.")
    if args.load_ema and not args.dit_path:
        raise ConfigError("--load_ema takes the averaged weights of a file: name it with --dit_path.")


def check_embeddings(embeddings: Any, requests: Any, path: str, config: Any) -> None:
    """Raise for embeddings that this model was not trained with, and for prompts that the file has no embedding of."""
    from cosmos_predict2.models.text import network_text_width
    from cosmos_predict2.text.trained_text import other_text

    if embeddings.width != (width := network_text_width(config.net)):
        raise ConfigError(
            f"{path} has embeddings of width {embeddings.width} by {embeddings.name}, but this model takes {width}."
            " Write it with the encoder of this model: python -m scripts.encode_prompts --text_encoder."
        )
    if (problem := other_text(config.text_encoder_name, embeddings.name, embeddings.values())) is not None:
        raise ConfigError(f"{path} {problem} (python -m scripts.encode_prompts writes it.)")
    texts = [text for request in requests for text in (request.prompt, request.negative_prompt) if text]
    lines = [line for text in texts for line in ([text] if text in embeddings else text.split("\n")) if line]
    if missing := [line for line in lines if line not in embeddings]:
        raise ConfigError(f"{path} has no embedding of {missing[0]!r}. Write it with python -m scripts.encode_prompts.")


def check_processes(num_gpus: int) -> None:
    """Raise where the number of processes is not that of the flag."""
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) != num_gpus:
        raise ConfigError(
            f"{processes} processes were started, but --num_gpus is {num_gpus}. Start it with:\n"
            f"  torchrun --nproc_per_node={num_gpus} --master_port=12341 {shlex.join(sys.argv)}"
        )


def main(arguments: Sequence[str] | None = None, program: Program = VIDEO2WORLD) -> int:
    rank = int(os.environ.get("RANK", "0"))
    with contextlib.redirect_stderr(sys.stderr if rank == 0 else io.StringIO()):
        args = parse(arguments, program)  # a wrong flag is reported once
    logs.setup(None, rank)
    start = time.monotonic()
    try:
        if args.num_gpus > 1:
            join(args.num_gpus)
        code = run(args, program)
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        if (fault := explained(error, vars(args))) is None or args.debug:
            raise
        if rank == 0:
            print(f"error: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written of the video in work", file=sys.stderr)
        return 130
    if args.num_gpus > 1:
        from imaginaire import distributed

        distributed.shutdown()
    log.info("done in %.1f s", time.monotonic() - start)
    return code


def join(num_gpus: int) -> None:
    """Form the group of processes that torchrun announced, all of which work on one video."""
    from imaginaire import distributed
    from imaginaire.distributed.parallel import init_dims

    distributed.init()
    if distributed.world_size() == num_gpus:
        init_dims(num_gpus)


if __name__ == "__main__":
    sys.exit(main())
