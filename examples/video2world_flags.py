# SPDX-License-Identifier: Apache-2.0
"""The flags of examples/video2world.py."""

import argparse
import sys

from imaginaire.command_line import Help, Parser, above_zero

DEFAULT_INPUT = "assets/video2world/input0.jpg"
TINY_INPUT = "assets/toy_world/first_frame.png"
INFERENCE_TYPES = {"text2world": 0, "image2world": 1, "video2world": 5}  # given pixel frames
BENCHMARK_RUNS = 4  # the first warms up and is not counted


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Make a video that begins with a picture or with the end of a clip, and follows a prompt.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model_size",
        type=_name,
        choices=["2B", "14B", "tiny"],
        default=None,
        help="default 2B, or that of the run that --dit_path lies in; tiny: the toy world, on any CPU, no download",
    )
    model.add_argument(
        "--model",
        type=_name,
        choices=["2B/pre-trained", "2B/post-trained", "14B/pre-trained", "14B/post-trained"],
        default=None,
        help="a released model of Predict2.5, in place of Predict2; weights of one in --dit_path are recognised",
    )
    model.add_argument(
        "--resolution", choices=["480", "720", "48"], default=None, help="default 720, or the run's; tiny: 48"
    )
    model.add_argument(
        "--fps",
        type=above_zero,
        default=None,
        metavar="RATE",
        help="frames per second: default 16 (93 frames; Predict2.5: 77), or those of the run's clips; 10: the released"
        " weights for 61 frames; tiny: 10; any other is the rate of the mp4",
    )
    model.add_argument(
        "--num_frames",
        type=int,
        default=None,
        metavar="N",
        help="frames of the video, 1 + 4k, in place of those of the model",
    )
    model.add_argument(
        "--dit_path",
        default="",
        metavar="PATH",
        help="weights in place of the released ones: a .pt or safetensors file, a run or diffusers folder, a hub id",
    )
    model.add_argument("--random_weights", action="store_true", help="no weights: what is generated is noise")
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
        "--start_frame_idx",
        type=int,
        default=None,
        metavar="N",
        help="begin with frame N of the input clip, 0 for its first, in place of its last frames",
    )
    request.add_argument(
        "--negative_prompt",
        default=None,
        help="what guidance leads away from (default: a description of poor video; tiny: no text)",
    )
    request.add_argument(
        "--aspect_ratio",
        choices=["1:1", "4:3", "3:4", "16:9", "9:16"],
        default=None,
        help="default 16:9, or the run's; tiny: 1:1",
    )
    request.add_argument(
        "--num_conditional_frames",
        type=int,
        choices=[0, 1, 5],
        default=None,
        help="frames of the input that the video begins with (default 1); 5 needs a clip, 0 none (Predict2.5 only)",
    )
    request.add_argument(
        "--inference_type",
        choices=list(INFERENCE_TYPES),
        default=None,
        help="the same by its name at Predict2.5: from the prompt alone (0), a picture (1), or a clip (5)",
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
        help="a true clip to show above the generated one on the contact sheet: the input itself from the frame that"
        " was taken of it, another one from its first",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--guidance", type=float, default=None, help="x = cond + guidance (cond - uncond); 0: none (default 7; tiny: 0)"
    )
    sampling.add_argument("--num_steps", type=int, default=35, help="sampling steps")
    sampling.add_argument(
        "--solver",
        choices=["2ab", "2ab_float64", "1euler", "2mid", "2mid_stable", "2heun_edm", "unipc"],
        default=None,
        help="default 2ab, of Predict2.5 unipc, which knows flow times only",
    )
    sampling.add_argument("--seed", type=int, default=0, help="of the initial noise: equal seeds give equal videos")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default=None, help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    machine.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default=None,
        help="of the network (default bfloat16 on a GPU, float32 on a CPU)",
    )
    machine.add_argument(
        "--num_gpus", type=int, default=1, help="processes that share a video; more than one: torchrun"
    )
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
    of_type = INFERENCE_TYPES.get(args.inference_type)
    if None not in (of_type, args.num_conditional_frames) and of_type != args.num_conditional_frames:
        parser.error(
            f"--inference_type {args.inference_type} gives {of_type} frames: leave --num_conditional_frames out"
        )
    if args.num_conditional_frames is None:
        args.num_conditional_frames = 1 if of_type is None else of_type
    return args


def _name(text: str) -> str:
    """A model's name; one that is published, and runs elsewhere or not yet here, is told so."""
    from cosmos_predict2.released import not_yet_here

    if why := not_yet_here(text):
        raise argparse.ArgumentTypeError(why)
    if text.endswith("action-cond"):
        raise argparse.ArgumentTypeError(f"{text} takes actions: run it with examples/action_conditioned.py")
    return text
