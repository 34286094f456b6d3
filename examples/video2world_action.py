# SPDX-License-Identifier: Apache-2.0
"""A picture and a robot's actions become the video of what they do."""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from cosmos_predict2.world_model.options import (
    ActionModel,
    Machine,
    Reading,
    RequestText,
    RolloutSettings,
    SamplingOptions,
)
from imaginaire import command_line
from imaginaire.buildable import locate
from imaginaire.command_line import Help, Parser, add_flags, values_of
from imaginaire.errors import ConfigError

log = logging.getLogger("video2world_action")

# What a record beside a video need not have: these change no result, or other entries have what they led to.
NOT_RECORDED = {
    *("checkpoint_dir", "import", "num_gpus", "offload_tokenizer"),
    *("disable_guardrail", "disable_prompt_refiner", "debug"),
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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    return _settled(_parser().parse_args(arguments))


def _settled(args: argparse.Namespace) -> argparse.Namespace:
    """The flags, with the published name of --num_conditional_frames in its place."""
    if args.num_latent_conditional_frames is not None:
        args.num_conditional_frames = 4 * args.num_latent_conditional_frames - 3
    return args


def _parser() -> Parser:
    parser = Parser(
        description="Imagine what a robot's actions do: a video from its first picture and the actions from there on.",
        epilog=_EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    add_flags(parser.add_argument_group("model").add_argument, ActionModel)
    add_recording_flags(parser.add_argument_group("recordings").add_argument)
    add_flags(parser.add_argument_group("text (most action models have none)").add_argument, RequestText)
    rollout = parser.add_argument_group("rollout").add_argument
    whole = "all actions, chunk after chunk; without it one chunk of an --input_annotation"
    rollout("--autoregressive", action="store_true", help=whole)
    rollout("--single_chunk", action="store_true", help="one chunk of each recording of an --input_root")
    given = "frames that the rollout and each chunk begin with; released weights know 1"
    rollout("--num_conditional_frames", type=int, choices=[1, 5], default=1, help=given)
    rollout("--num_latent_conditional_frames", type=int, choices=[0, 1, 2], default=None, help=argparse.SUPPRESS)
    add_flags(rollout, RolloutSettings)
    sampling = parser.add_argument_group("sampling").add_argument
    steps = {"default": None, "help": "sampling steps (default 35, or the run's timestamps.nfe)"}
    solver = (
        "default 2ab, or unipc for Predict2.5 weights, which 2ab fits too; distilled: for weights that were made for"
        " --num_steps 4 and fewer"
    )
    add_flags(sampling, SamplingOptions, num_steps=steps, solver={"help": solver})
    sampling("--seed", type=int, default=0, help="of the first chunk's noise; a later one's: plus its first action")
    one = {"help": "1: for several, give each its own --start and --end"}
    add_flags(parser.add_argument_group("machine").add_argument, Machine, num_gpus=one)
    safety = parser.add_argument_group("guardrail and prompt refiner").add_argument
    safety("--disable_guardrail", action="store_true", help="no check of the --prompt")
    safety("--disable_prompt_refiner", action="store_true", help="accepted: no action model has one")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_recording_flags(add: Any) -> None:
    add("--input_annotation", default="", metavar="FILE", help="a JSON with the states or actions of a recording")
    video = "its video, or its first frame as a picture (default: the video that the annotation names)"
    add("--input_video", default="", metavar="FILE", help=video)
    add("--save_path", default="output/imagined.mp4", metavar="FILE", help="the mp4; a .json beside it records all")
    root = "a folder of recordings, whose videos lie below it, or a LeRobot data set"
    add("--input_root", default="", metavar="DIR", help=root)
    folder = "where their annotations are below it"
    add("--input_json_sub_folder", default="annotation/test", metavar="DIR", help=folder)
    add("--save_root", default="results/action2world", metavar="DIR", help="where their videos go, named as they are")
    episodes = "of a LeRobot data set as --input_root (default: those that training holds out)"
    add("--episodes", type=int, nargs="+", default=None, metavar="N", help=episodes)
    add("--camera", default="", metavar="KEY", help="of a LeRobot data set (default: the run's, or its only one)")
    add("--start", type=int, default=0, help="the first annotation of the folder, by name")
    add("--end", type=int, default=100, help="the first one that is left out again")
    add("--overwrite", action="store_true", help="with --input_root: make outputs again that exist")
    add_flags(add, Reading)
    size = (
        "frames are stretched to this size (default: that of the run's clips, else that of the video; none: that of the"
        " video)"
    )
    add("--resolution", default="", metavar="H,W", help=size)
    code = (
        "code of your own: called without arguments, it gives f(annotation, video_path, flags), which gives {actions,"
        " initial_frame, video_path}, the actions already scaled"
    )
    add("--action_load_fn", default="", metavar="MODULE.FUNCTION", help=code)


def run(args: argparse.Namespace) -> int:
    """Check all that can be known to be wrong, then build the model and imagine."""
    from cosmos_predict2.checkpoints.adapters import parse_lora, read_adapter
    from cosmos_predict2.configs.action_conditioned.networks import choose_action_model
    from cosmos_predict2.models.text import network_text_width
    from cosmos_predict2.pipelines.action_requests import prepare, read_texts, run_rollouts
    from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
    from cosmos_predict2.world_model.assembly import check_device, check_parts
    from cosmos_predict2.world_model.config import PRECISIONS
    from cosmos_predict2.world_model.objectives import chosen_solver, objective_of

    check_flags(args)
    check_device(args.device or ("cuda" if args.use_cuda_graphs else "cpu"))
    of_lerobot = is_lerobot(args.input_root)
    requests, skipped = ([], 0) if of_lerobot else requests_of(args)
    if not (of_lerobot or requests):
        return nothing_to_do(skipped)
    choice = choose_action_model(values_of(ActionModel, args))
    config = choice.config
    config.guardrail_config.enabled = bool(args.prompt) and not args.disable_guardrail
    config.text_encoder = None
    chosen_solver(objective_of(config), args.solver)
    for adapter in args.lora:
        read_adapter(parse_lora(adapter)[0])
    check_parts(config.net, choice.dit_path, [config.tokenizer], "net_ema" if args.load_ema else "auto")
    texts = read_texts(values_of(RequestText, args), config, choice.card, network_text_width(config.net))
    settings, lerobot = settings_of(args, choice), None
    if of_lerobot:
        lerobot, requests, skipped = lerobot_requests_of(args, choice)
        if not requests:
            return nothing_to_do(skipped)
    else:
        require_views(choice, None, "its views are in a LeRobot data set: give one as --input_root")
    jobs, failed = prepare(requests, reading_of(args, choice), settings, args.input_root, lerobot)
    warn_of_differences(args, choice, {tuple(job.episode.first_frames_C_F_H_W.shape[2:]) for job in jobs})
    pipe = Video2WorldActionConditionedPipeline.from_config(
        config,
        choice.dit_path,
        use_text_encoder=False,
        device=args.device,
        torch_dtype=PRECISIONS[args.dtype] if args.dtype else None,
        load_ema_to_reg=args.load_ema,
        lora=args.lora,
        offload_tokenizer=args.offload_tokenizer,
    )
    if args.prompt:
        pipe.checked_prompt(args.prompt)
    run_rollouts(pipe, jobs, settings, texts)
    log.info("%d made, %d skipped, %d failed", len(jobs), skipped, failed)
    return 1 if failed else 0


def nothing_to_do(skipped: int) -> int:
    log.info("all %d outputs exist; --overwrite makes them again", skipped)
    return 0


def is_lerobot(folder: str) -> bool:
    """True for the folder of a LeRobot data set."""
    return bool(folder) and Path(folder, "meta", "info.json").is_file()


def check_flags(args: argparse.Namespace) -> None:
    """Raise for flags that cannot be meant, whatever the model is."""
    from cosmos_predict2.data.lerobot.info import sets_below

    if bool(args.input_annotation) == bool(args.input_root) or os.path.isdir(args.input_annotation):
        raise ConfigError("Give either --input_annotation FILE or --input_root DIR.")
    if args.input_root and args.input_video:
        raise ConfigError("--input_video goes with --input_annotation; an --input_root has the videos below it.")
    if is_lerobot(args.input_root):
        for flag, usual in (("action_load_fn", ""), ("camera_id", 0), ("action_source", "auto")):
            if (value := getattr(args, flag)) not in (usual, "action"):
                raise ConfigError(
                    f"--{flag} {value} is of annotation files, but {args.input_root} is a LeRobot data set: it takes"
                    " --episodes, --camera and --action_key."
                )
    elif args.episodes or args.camera:
        flag, value = ("--episodes", args.episodes) if args.episodes else ("--camera", args.camera)
        below = sets_below(Path(args.input_root)) if args.input_root else ""
        raise ConfigError(f"{flag} {value} is of LeRobot data sets: give one as --input_root.{below}")
    if args.num_gpus != 1:
        raise ConfigError(
            f"--num_gpus {args.num_gpus}: start one program for each GPU, with CUDA_VISIBLE_DEVICES and its own --start"
            " and --end."
        )
    if args.num_conditional_frames < 1:
        raise ConfigError("--num_latent_conditional_frames 0: a rollout begins with a picture; give 1 or 2.")
    if args.start < 0 or args.end <= args.start:
        raise ConfigError(f"--start {args.start} --end {args.end}: 0 at least, and the end behind the start.")


def requests_of(args: argparse.Namespace) -> tuple[list[Any], int]:
    """The recordings that are asked for, and how many of a folder are skipped because their outputs exist."""
    from cosmos_predict2.pipelines.action_inputs import find_annotations
    from cosmos_predict2.pipelines.action_requests import ActionRequest

    if args.input_annotation:
        return [ActionRequest(args.input_annotation, args.save_path, args.input_video, args.seed)], 0
    found = find_annotations(args.input_root, args.input_json_sub_folder, args.start, args.end)
    outputs = {path: str(Path(args.save_root, f"{Path(path).stem}.mp4")) for path in found}
    return not_yet_there([ActionRequest(path, output, "", args.seed) for path, output in outputs.items()], args)


def lerobot_requests_of(args: argparse.Namespace, choice: Any) -> tuple[Any, list[Any], int]:
    """The LeRobot data set of --input_root, its episodes that are asked for, and how many are skipped."""
    from cosmos_predict2.pipelines.action_inputs import LeRobotRecordings, dataset_of_run
    from cosmos_predict2.pipelines.action_requests import ActionRequest

    trained = dataset_of_run(choice.card.run)
    given: dict[str, Any] = {"camera": args.camera} if args.camera else {}
    given |= {"action_keys": args.action_key.split(",")} if args.action_key else {}
    given |= {"stride": args.fps_downsample_ratio} if args.fps_downsample_ratio != 1 else {}
    given |= {"combine_actions": args.combine_actions} if args.combine_actions else {}
    recordings = LeRobotRecordings.open(args.input_root, choice.config.transform, trained, **given)
    require_views(choice, recordings.data.source.camera, "--camera as in the run of the weights")
    found = recordings.chosen(args.episodes or [], trained)
    if not (chosen := found if args.episodes else found[args.start : args.end]):
        raise ConfigError(f"--start {args.start} --end {args.end}: none of {len(found)} episodes is left.")
    outputs = {number: str(Path(args.save_root, f"episode_{number:06d}.mp4")) for number in chosen}
    all_of_them = [ActionRequest(args.input_root, path, "", args.seed, number) for number, path in outputs.items()]
    return recordings, *not_yet_there(all_of_them, args)


def require_views(choice: Any, camera: str | None, cure: str) -> None:
    from cosmos_predict2.data.views import require_same, views_of

    require_same(choice.card.views, views_of(camera), choice.card.source, "what is read of the recordings", cure)


def not_yet_there(requests: list[Any], args: argparse.Namespace) -> tuple[list[Any], int]:
    """The requests whose outputs do not exist, or with --overwrite all; and how many are skipped."""
    left = [one for one in requests if args.overwrite or not os.path.exists(one.save_path)]
    return left, len(requests) - len(left)


def reading_of(args: argparse.Namespace, choice: Any) -> Reading:
    """The settings by which recordings are read."""
    config = choice.config
    return values_of(
        Reading,
        args,
        transform=config.transform,
        chunk_size=config.chunk_size,
        num_given=args.num_conditional_frames,
        most_actions=None if is_whole(args) else config.chunk_size,
        size=size_asked(args.resolution, choice.video_size),
        fps=choice.fps,
        load=load_function(args.action_load_fn) if args.action_load_fn else None,
        arguments=args,
    )


def is_whole(args: argparse.Namespace) -> bool:
    """True if all actions of a recording are imagined, not those of one chunk."""
    return args.autoregressive if args.input_annotation else not args.single_chunk


def settings_of(args: argparse.Namespace, choice: Any) -> RolloutSettings:
    """The settings of all rollouts; the flags that change a result are recorded with the values that they led to."""
    from cosmos_predict2.pipelines.action_requests import constant_text
    from cosmos_predict2.pipelines.requests import fingerprint

    num_steps = args.num_steps or choice.config.timestamps.nfe
    own = -1.0 if choice.config.flow is None else choice.config.flow.conditional_frame_timestep
    text = constant_text(choice.card) if args.prompt_embeddings is None else args.prompt_embeddings
    flags = {name: value for name, value in vars(args).items() if name not in NOT_RECORDED}
    flags |= {"model_size": choice.model_size, "given_timestep": own if own >= 0 else None}
    flags |= {"prompt_embeddings": text, "autoregressive": is_whole(args)}
    return values_of(
        RolloutSettings,
        args,
        weights=fingerprint(choice.dit_path),
        sampling=values_of(SamplingOptions, args, num_steps=num_steps, progress=True),
        history=(args.num_conditional_frames + 3) // 4,
        other_flags=flags,
    )


def size_asked(text: str, trained: tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) of --resolution, else of the run's clips; None: the video's own."""
    if text in ("", "none"):
        return None if text else trained
    try:
        height, width = (int(side) for side in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--resolution {text}: height and width, such as 256,320, or none.") from error
    return height, width


def load_function(name: str) -> Any:
    """The loader that a function of this name returns when it is called without arguments."""
    load = locate(name, f"--action_load_fn {name}")()
    if not callable(load):
        raise ConfigError(f"--action_load_fn {name}: called without arguments, it must give a function.")
    return load


def warn_of_differences(args: argparse.Namespace, choice: Any, sizes: set[Any]) -> None:
    """Warn of conditioning frames, and of (height, width) of first frames, that the weights were not trained with."""
    from cosmos_predict2.configs.base.config_video2world import warn_of_size
    from cosmos_predict2.tokenizers.sizes import pixel_frames

    most = None if choice.run is None else choice.run.max_conditioning_frames
    if args.num_conditional_frames > pixel_frames(max(1, most or 1)):
        trained = "does not record that it" if most is None else f"(max_num_conditional_frames={most})"
        log.warning(
            "--num_conditional_frames %d, but %s %s was trained with more than %d: expect smeared frames",
            *(args.num_conditional_frames, choice.dit_path, trained, pixel_frames(max(1, most or 1))),
        )
    for size in sizes if choice.run is not None else ():
        warn_of_size(choice.run, size)


def main(arguments: list[str] | None = None) -> int:
    return command_line.main(_parser(), lambda args: run(_settled(args)), arguments)


if __name__ == "__main__":
    sys.exit(main())
