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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file runs from a checkout as it is

from imaginaire import log as logs
from imaginaire.command_line import Help, Parser
from imaginaire.errors import ConfigError, UserError

log = logging.getLogger("video2world")

DEFAULT_INPUT = "assets/video2world/input0.jpg"
TINY_INPUT = "assets/toy_world/first_frame.png"
BENCHMARK_RUNS = 4  # the first warms up and is not counted


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Make a video that begins with a picture or with the end of a clip, and follows a prompt.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model_size", choices=["2B", "14B", "tiny"], default="2B", help="tiny: the toy world, on any CPU, no download"
    )
    model.add_argument("--resolution", choices=["480", "720", "48"], default=None, help="default 720; tiny: 48")
    model.add_argument(
        "--fps",
        type=int,
        choices=[10, 16],
        default=None,
        help="default 16 (93 frames), 10: 61 frames; tiny: 10, 13 frames",
    )
    model.add_argument(
        "--dit_path",
        default="",
        metavar="PATH",
        help="weights in place of the released ones: a .pt or safetensors file, a run or diffusers folder, a hub id",
    )
    model.add_argument("--load_ema", action="store_true", help="take the averaged weights (net_ema.) of the file")
    model.add_argument(
        "--lora", action="append", default=[], metavar="PATH[:WEIGHT]", help="an adapter to add; may be repeated"
    )
    model.add_argument(
        "--natten", action="store_true", help="the weights of the sparse variant (720, 16:9), run with dense attention"
    )
    model.add_argument(
        "--checkpoint_dir",
        default=None,
        metavar="DIR",
        help="where released weights lie (default checkpoints, or what COSMOS_PREDICT2_ARGS says)",
    )
    request = parser.add_argument_group("request")
    request.add_argument("--prompt", default="", help="what should happen")
    request.add_argument(
        "--input_path",
        default=None,
        metavar="FILE",
        help=f"a picture, or an mp4 whose last frames are continued (default {DEFAULT_INPUT}; tiny: {TINY_INPUT})",
    )
    request.add_argument(
        "--negative_prompt",
        default=None,
        help="what guidance leads away from (default: a description of poor video; tiny: no text)",
    )
    request.add_argument(
        "--aspect_ratio", choices=["1:1", "4:3", "3:4", "16:9", "9:16"], default=None, help="default 16:9; tiny: 1:1"
    )
    request.add_argument(
        "--num_conditional_frames",
        type=int,
        choices=[1, 5],
        default=1,
        help="frames of the input that the video begins with; 5 needs a clip",
    )
    request.add_argument("--num_conditional_frmaes", type=int, choices=[1, 5], default=None, help=argparse.SUPPRESS)
    request.add_argument(
        "--batch_input_json",
        default=None,
        metavar="FILE",
        help="a list of {input_video, prompt, output_video}; outputs that exist are skipped",
    )
    request.add_argument(
        "--overwrite", action="store_true", help="with --batch_input_json: make outputs again that exist"
    )
    request.add_argument(
        "--prompt_embeddings",
        default=None,
        metavar="FILE",
        help="embeddings written by scripts.encode_prompts, in place of the text encoder",
    )
    request.add_argument(
        "--save_path",
        default="output/generated_video.mp4",
        metavar="FILE",
        help="the mp4; a .txt and a .json beside it record how it was made",
    )
    request.add_argument(
        "--contact_sheet", action="store_true", help="also write frames of the video as one picture, a .png beside it"
    )
    request.add_argument(
        "--compare_to",
        default="",
        metavar="FILE",
        help="a true clip to show above the generated one on the contact sheet",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--guidance", type=float, default=None, help="x = cond + guidance (cond - uncond); 0: none (default 7; tiny: 0)"
    )
    sampling.add_argument("--num_steps", type=int, default=35, help="sampling steps")
    sampling.add_argument("--seed", type=int, default=0, help="of the initial noise: equal seeds give equal videos")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default=None, help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    machine.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default=None,
        help="of the network (default bfloat16 on a GPU, float32 on a CPU)",
    )
    machine.add_argument("--num_gpus", type=int, default=1, help="more than one: start with torchrun")
    machine.add_argument(
        "--offload_text_encoder", action="store_true", help="keep the text encoder in host memory between uses"
    )
    machine.add_argument("--downcast_text_encoder", action="store_true", help="the text encoder in bfloat16")
    machine.add_argument(
        "--offload_tokenizer", action="store_true", help="keep the video tokenizer in host memory between uses"
    )
    machine.add_argument("--use_cuda_graphs", action="store_true", help="capture the network's forward pass")
    machine.add_argument(
        "--benchmark",
        action="store_true",
        help=f"make the video {BENCHMARK_RUNS} times and print the mean time of all but the first",
    )
    safety = parser.add_argument_group("guardrail and prompt refiner")
    safety.add_argument("--disable_guardrail", action="store_true", help="no check of the prompt")
    safety.add_argument("--offload_guardrail", action="store_true", help="keep the guardrail's models in host memory")
    safety.add_argument("--disable_prompt_refiner", action="store_true", help="use the prompt as it is")
    safety.add_argument("--offload_prompt_refiner", action="store_true", help="keep the refiner's model in host memory")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(arguments)
    if args.num_conditional_frmaes is not None:
        print("note: --num_conditional_frmaes is read as --num_conditional_frames", file=sys.stderr)
        args.num_conditional_frames = args.num_conditional_frmaes
    return args


def run(args: argparse.Namespace, command: list[str]) -> int:
    check_processes(args.num_gpus, command)
    from cosmos_predict2.auxiliary.guardrail.runner import create_guardrail
    from cosmos_predict2.checkpoints import checkpoint_dir, parse_lora
    from cosmos_predict2.checkpoints.adapters import read_adapter
    from cosmos_predict2.configs.base.config_video2world import (
        check_variant,
        get_cosmos_predict2_video2world_pipeline,
        get_dit_path,
    )
    from cosmos_predict2.pipelines.assembly import check_parts
    from cosmos_predict2.pipelines.requests import Request, Settings, fingerprint, read_batch, run_all
    from cosmos_predict2.pipelines.video2world import PRECISIONS, Video2WorldPipeline
    from cosmos_predict2.text.prompt_embeddings import read_prompt_embeddings
    from cosmos_predict2.text.prompts import DEFAULT_NEGATIVE_PROMPT

    if args.checkpoint_dir:
        os.environ["COSMOS_PREDICT2_ARGS"] = f"--checkpoints {shlex.quote(args.checkpoint_dir)}"
    is_tiny = args.model_size == "tiny"
    variant = dict(model_size=args.model_size, resolution=args.resolution or "", fps=args.fps or 0, natten=args.natten)
    size = check_variant(**variant)
    aspect_ratio = args.aspect_ratio or size.aspect_ratio
    if args.natten:
        if aspect_ratio != "16:9":
            raise ConfigError(f"--natten goes with --aspect_ratio 16:9, not {aspect_ratio}.")
        log.info("natten: these weights run with dense attention here; sparse kernels are not built in")
    config = get_cosmos_predict2_video2world_pipeline(**variant)
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
    dit_path = args.dit_path or get_dit_path(**variant)
    if args.load_ema and not dit_path:
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
        aspect_ratio=aspect_ratio,
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
