# SPDX-License-Identifier: Apache-2.0
"""The flags of examples/video2world_action.py."""

import argparse

from cosmos_predict2.actions.transforms import COMBINATIONS
from imaginaire.command_line import Help, Parser, above_zero

DEFAULT_SAVE_PATH = "output/imagined.mp4"
DEFAULT_SAVE_ROOT = "results/action2world"

# What a record beside a video need not have: these change no result, or other entries tell what they led to.
NOT_RECORDED = {
    *("checkpoint_dir", "num_gpus", "offload_tokenizer", "disable_guardrail", "disable_prompt_refiner", "debug"),
    *("input_annotation", "input_video", "input_root", "input_json_sub_folder"),  # annotation, video
    *("save_root", "start", "end", "overwrite"),  # save_path
    "episodes",  # episode
    *("dit_path", "num_latent_conditional_frames", "single_chunk"),  # weights, num_conditional_frames, autoregressive
    *("action_scaler", "gripper_scale", "use_quat"),  # action_transform
}

_EPILOG = """\
One recording: --input_annotation FILE.json [--input_video FILE.mp4]. A folder of them: --input_root DIR with
--input_json_sub_folder annotation/test; outputs that exist are skipped. A LeRobot data set: --input_root DIR with
--episodes; camera, columns and stride are as in the run of the weights.

examples:
  python examples/video2world_action.py --input_annotation datasets/bridge/annotation/test/0.json \\
      --input_video datasets/bridge/videos/test/0/rgb.mp4 --autoregressive --save_path output/0.mp4
  python examples/video2world_action.py --dit_path checkpoints/.../iter_000001000.pt --input_root datasets/toy_bridge \\
      --input_json_sub_folder annotation/val --save_root output/val --side_by_side
  python examples/video2world_action.py --dit_path checkpoints/.../NAME --input_root datasets/my_lerobot --episodes 3
"""


def combinations(text: str) -> str | list[str]:
    """The ``type`` of --combine_actions."""
    if unknown := [word for word in text.split(",") if word not in COMBINATIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(COMBINATIONS)}")
    return text.split(",") if "," in text else text


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Imagine what a robot's actions do: a video from its first picture and the actions from there on.",
        epilog=_EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model").add_argument
    model(
        "--model_size",
        choices=["2B", "tiny"],
        default=None,
        help="default 2B, or that of the run that --dit_path lies in; tiny: the toy world, on any CPU, no download",
    )
    model(
        "--dit_path",
        default="",
        metavar="PATH",
        help="weights in place of the released ones: a .pt or safetensors file, a run's folder. Which network they are"
        " of, flat or chunk, Predict2 or Predict2.5, they say themselves",
    )
    model("--load_ema", action="store_true", help="take the averaged weights (net_ema.) of the file")
    model("--lora", action="append", default=[], metavar="PATH[:WEIGHT]", help="an adapter to add; may be repeated")
    model(
        "--action_transform",
        default="",
        metavar="NAME",
        help="what the weights were trained with, where they do not say: relative_pose:20, controller:20x7, or JSON"
        " {kind, scale, offset}",
    )
    model("--action_scaler", type=float, default=None, help="relative_pose with this scale (default 20)")
    model("--gripper_scale", type=float, default=None, help="relative_pose with this scale of the gripper (default 1)")
    model("--use_quat", action="store_true", help="relative_pose with quaternions: 8 numbers per action")
    model(
        "--checkpoint_dir",
        default=None,
        metavar="DIR",
        help="where released weights lie (default checkpoints, or what COSMOS_PREDICT2_ARGS says)",
    )
    request = parser.add_argument_group("recordings").add_argument
    request("--input_annotation", default="", metavar="FILE", help="a JSON with the states or actions of a recording")
    request(
        "--input_video",
        default="",
        metavar="FILE",
        help="its video, or its first frame as a picture (default: the video that the annotation names)",
    )
    request("--save_path", default=DEFAULT_SAVE_PATH, metavar="FILE", help="the mp4; a .json beside it records all")
    request(
        "--input_root",
        default="",
        metavar="DIR",
        help="a folder of recordings, whose videos lie below it, or a LeRobot data set",
    )
    request(
        "--input_json_sub_folder", default="annotation/test", metavar="DIR", help="where their annotations are below it"
    )
    request("--save_root", default=DEFAULT_SAVE_ROOT, metavar="DIR", help="where their videos go, named as they are")
    request(
        "--episodes",
        type=int,
        nargs="+",
        default=None,
        metavar="N",
        help="of a LeRobot data set as --input_root (default: those that training holds out)",
    )
    request("--camera", default="", metavar="KEY", help="of a LeRobot data set (default: the run's, or its only one)")
    request("--start", type=int, default=0, help="the first annotation of the folder, by name")
    request("--end", type=int, default=100, help="the first one that is left out again")
    request("--overwrite", action="store_true", help="with --input_root: make outputs again that exist")
    request("--camera_id", type=int, default=0, help="which of an annotation's videos")
    request("--start_frame_idx", type=int, default=0, help="the frame of the recording to begin with")
    request("--fps_downsample_ratio", type=int, default=1, help="take every so many frames of the recording")
    request(
        "--combine_actions",
        type=combinations,
        default=None,
        metavar="WORD",
        help="what becomes of the actions in between: sum for moves, last (or first) for absolute targets, or with"
        " commas a word for each number (default: the run's, or what a LeRobot data set says; of an annotation's rows:"
        " sum)",
    )
    request(
        "--resolution",
        default="",
        metavar="H,W",
        help="frames are stretched to this size (default: that of the run's clips, else that of the video; none:"
        " that of the video)",
    )
    request(
        "--action_source",
        choices=["auto", "state", "action"],
        default="auto",
        help="state: computed from the poses, as in training; action: as recorded; auto: state where it can be",
    )
    request("--state_key", default="state", help="the poses' name in the annotation")
    request("--gripper_key", default="continuous_gripper_state", help="the gripper states' name")
    request(
        "--action_key",
        default="",
        help="the actions' name (default: action, actions or toy_actions); of a LeRobot data set the run's, or names"
        " with commas between them",
    )
    request(
        "--action_load_fn",
        default="",
        metavar="MODULE.FUNCTION",
        help="code of your own: called without arguments, it gives f(annotation, video_path, flags), which gives"
        " {actions, initial_frame, video_path}, the actions already scaled",
    )
    text = parser.add_argument_group("text (most action models have none)").add_argument
    text("--prompt", default="", help="a text, for weights that were trained with one")
    text("--negative_prompt", default="", help="what guidance leads away from")
    text(
        "--prompt_embeddings",
        default=None,
        metavar="FILE",
        help="embeddings written by scripts.encode_prompts, or a .pt of the empty prompt's",
    )
    rollout = parser.add_argument_group("rollout").add_argument
    rollout(
        "--autoregressive",
        action="store_true",
        help="all actions, chunk after chunk; without it one chunk of an --input_annotation",
    )
    rollout("--single_chunk", action="store_true", help="one chunk of each recording of an --input_root")
    rollout("--chunk_size", type=int, default=None, help="actions of a chunk (default 12, or the run's)")
    rollout(
        "--num_conditional_frames",
        type=int,
        choices=[1, 5],
        default=1,
        help="frames that the rollout and each chunk begin with; released weights know 1",
    )
    rollout("--num_latent_conditional_frames", type=int, choices=[0, 1, 2], default=None, help=argparse.SUPPRESS)
    rollout(
        "--keep_reference",
        action="store_true",
        help="with --num_conditional_frames 5: the first picture stays the first of the five; needs training for it",
    )
    rollout("--float_hand_over", action="store_true", help="chunks hand on frames as decoded, not rounded to bytes")
    rollout("--last_chunk", choices=["pad", "drop"], default="pad", help="actions that fill no chunk: filled, left out")
    rollout("--batch_size", type=int, default=16, help="recordings that are imagined together; changes no result")
    sampling = parser.add_argument_group("sampling").add_argument
    sampling(
        "--guidance",
        type=float,
        default=0.0,
        help="x = cond + g (cond - uncond), away from the negative prompt; 0: none",
    )
    sampling("--num_steps", type=int, default=None, help="sampling steps (default 35, or the run's timestamps.nfe)")
    sampling(
        "--solver",
        default=None,
        help="default 2ab, or unipc for Predict2.5 weights, which 2ab fits too; distilled: for weights that were made"
        " for --num_steps 4 and fewer",
    )
    sampling(
        "--given_timestep",
        type=float,
        default=None,
        metavar="T",
        help="what Predict2.5 weights are told of given frames, 0 to 1000: 0.1 where they were trained so (default: the"
        " run's, else that of the other frames)",
    )
    sampling("--seed", type=int, default=0, help="of the first chunk's noise; a later one's: plus its first action")
    output = parser.add_argument_group("output").add_argument
    output(
        "--save_fps",
        type=above_zero,
        default=None,
        help="of the mp4 (default: that of the frames taken of the recording; of a picture the run's)",
    )
    output("--side_by_side", action="store_true", help="also write NAME_side_by_side.mp4: true on the left")
    output("--contact_sheet", action="store_true", help="also write frames of both as one picture, NAME.png")
    machine = parser.add_argument_group("machine").add_argument
    machine("--device", default=None, help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    machine(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default=None,
        help="of the network (default bfloat16 on a GPU, float32 on a CPU)",
    )
    machine("--num_gpus", type=int, default=1, help="1: for several, give each its own --start and --end")
    machine("--offload_tokenizer", action="store_true", help="keep the video tokenizer in host memory between uses")
    machine("--use_cuda_graphs", action="store_true", help="capture the network's forward pass")
    safety = parser.add_argument_group("guardrail and prompt refiner").add_argument
    safety("--disable_guardrail", action="store_true", help="no check of the --prompt")
    safety("--disable_prompt_refiner", action="store_true", help="accepted: no action model has one")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(arguments)
    if args.num_latent_conditional_frames is not None:
        args.num_conditional_frames = 4 * args.num_latent_conditional_frames - 3
    return args
