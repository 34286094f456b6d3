# SPDX-License-Identifier: Apache-2.0
"""A picture and a robot's actions become the video of what they do.

python examples/video2world_action.py --input_annotation 0.json --input_video 0.mp4 --autoregressive --save_path out.mp4
python examples/video2world_action.py --dit_path RUN/checkpoints/model/iter_000001000.pt --input_root datasets/bridge
python examples/video2world_action.py --dit_path RUN --input_root datasets/my_lerobot --episodes 3 --side_by_side
"""

import argparse
import importlib
import logging
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file runs from a checkout as it is

from examples.video2world_action_choice import ActionChoice, choose_action_model, read_texts, tell_differences
from examples.video2world_action_flags import NOT_RECORDED, parse
from imaginaire import log as logs
from imaginaire.errors import ConfigError, UserError, near

log = logging.getLogger("video2world_action")


def run(args: argparse.Namespace) -> int:
    """Check all that can be known to be wrong, then build the model and imagine."""
    from cosmos_predict2.checkpoints import checkpoint_dir, parse_lora
    from cosmos_predict2.checkpoints.adapters.adapters import read_adapter
    from cosmos_predict2.pipelines.action_requests import prepare, run_rollouts
    from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
    from cosmos_predict2.world_model.assembly import check_parts
    from cosmos_predict2.world_model.config import PRECISIONS
    from examples.video2world import check_device

    if args.checkpoint_dir:
        os.environ["COSMOS_PREDICT2_ARGS"] = f"--checkpoints {shlex.quote(args.checkpoint_dir)}"
    check_flags(args)
    check_device(args.device or ("cuda" if args.use_cuda_graphs else "cpu"))
    of_lerobot = is_lerobot(args.input_root)
    if not of_lerobot:
        requests, skipped = requests_of(args)
        if not requests:
            return nothing_to_do(skipped)
    choice = choose_action_model(args)
    config = choice.config
    config.guardrail_config.checkpoint_dir = checkpoint_dir()
    config.guardrail_config.enabled = bool(args.prompt) and not args.disable_guardrail
    config.text_encoder = None
    check_solver(args.solver, config)
    for adapter in args.lora:
        read_adapter(parse_lora(adapter)[0])
    check_parts(config.net, choice.dit_path, [config.tokenizer], "net_ema" if args.load_ema else "auto")
    width = config.net.get("crossattn_proj_in_channels") or config.net.get("crossattn_emb_channels") or 1024
    text, negative = read_texts(args, choice, width)
    settings, lerobot = settings_of(args, choice), None
    if of_lerobot:
        lerobot, requests, skipped = lerobot_requests_of(args, choice)
        if not requests:
            return nothing_to_do(skipped)
    jobs, failed = prepare(requests, reading_of(args, choice), settings, args.input_root, lerobot)
    shapes = [job.episode.first_frames_C_F_H_W.shape for job in jobs]
    tell_differences(choice, args.num_conditional_frames, args.resolution, [(shape[2], shape[3]) for shape in shapes])
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
        pipe.checked_prompt(args.prompt, jobs[0].episode.video)
    run_rollouts(pipe, jobs, settings, text_B_S_E=text, negative_text_B_S_E=negative)
    log.info("%d made, %d skipped, %d failed", len(jobs), skipped, failed)
    return 1 if failed else 0


def is_lerobot(folder: str) -> bool:
    """Whether a LeRobot data set lies in a folder."""
    return bool(folder) and Path(folder, "meta", "info.json").is_file()


def nothing_to_do(skipped: int) -> int:
    log.info("all %d outputs exist; --overwrite makes them again", skipped)
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """Raise for flags that cannot be meant."""
    from cosmos_predict2.data.lerobot.info import sets_below

    if bool(args.input_annotation) == bool(args.input_root):
        both = "both are given" if args.input_root else "neither is given"
        raise ConfigError(f"--input_annotation FILE or --input_root DIR: {both}, but one is needed.")
    if args.input_root and args.input_video:
        raise ConfigError("--input_video goes with --input_annotation; an --input_root has the videos below it.")
    if os.path.isdir(args.input_annotation):
        raise ConfigError(f"--input_annotation {args.input_annotation} is a folder: give it as --input_root.")
    if is_lerobot(args.input_root):
        for flag in ("action_load_fn", "camera_id"):
            if value := getattr(args, flag):
                raise ConfigError(
                    f"--{flag} {value} is of annotation files, but {args.input_root} is a LeRobot data set: it takes"
                    " --episodes, --camera and --action_key."
                )
        if args.action_source == "state":
            raise ConfigError(f"--action_source state: {args.input_root} is a LeRobot data set, whose rows are taken.")
    elif args.episodes or args.camera:
        flag, value = ("--episodes", args.episodes) if args.episodes else ("--camera", args.camera)
        below = sets_below(Path(args.input_root)) if args.input_root else ""
        raise ConfigError(
            f"{flag} {value} is of LeRobot data sets: give one as --input_root (it has meta/info.json).{below}"
        )
    if args.num_gpus != 1:
        raise ConfigError(
            f"--num_gpus {args.num_gpus}: a chunk is too short to be spread. Start one program for each GPU, with"
            " CUDA_VISIBLE_DEVICES and its own --start and --end."
        )
    if args.num_conditional_frames < 1:
        raise ConfigError("--num_latent_conditional_frames 0: a rollout begins with a picture; give 1 or 2.")
    if args.keep_reference and args.num_conditional_frames < 5:
        raise ConfigError(
            "--keep_reference keeps the first picture as the first of five given frames: add --num_conditional_frames"
            " 5 (for weights that were trained with five), or leave it out."
        )
    if not math.isfinite(args.guidance):
        raise ConfigError(f"--guidance {args.guidance}: a number, 0 for none.")
    for name in ("num_steps", "batch_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value}: at least 1.")
    if args.start < 0 or args.end <= args.start:
        raise ConfigError(f"--start {args.start} --end {args.end}: 0 at least, and the end behind the start.")


def check_solver(name: str | None, config: Any) -> None:
    from cosmos_predict2.world_model.objectives import objective_of

    if name is not None and name not in (known := objective_of(config).solvers):
        raise ConfigError(f"--solver {name}: there is none of that name for these weights.{near(name, known)}")


def requests_of(args: argparse.Namespace) -> tuple[list[Any], int]:
    """The recordings that are asked for, and how many of a folder are skipped because their outputs exist."""
    from cosmos_predict2.pipelines.action_inputs import find_annotations
    from cosmos_predict2.pipelines.action_requests import ActionRequest

    if args.input_annotation:
        return [ActionRequest(args.input_annotation, args.save_path, args.input_video, args.seed)], 0
    found = find_annotations(args.input_root, args.input_json_sub_folder, args.start, args.end)
    all_of_them = [
        ActionRequest(path, str(Path(args.save_root, f"{Path(path).stem}.mp4")), "", args.seed) for path in found
    ]
    return not_yet_there(all_of_them, args)


def lerobot_requests_of(args: argparse.Namespace, choice: ActionChoice) -> tuple[Any, list[Any], int]:
    """The LeRobot data set of --input_root, its episodes that are asked for, and how many are skipped."""
    from cosmos_predict2.pipelines.action_requests import ActionRequest
    from cosmos_predict2.pipelines.lerobot_inputs import LeRobotRecordings, dataset_of_run

    trained = dataset_of_run(choice.card.run)
    said: dict[str, Any] = {"camera": args.camera} if args.camera else {}
    if args.action_key:
        said["action_keys"] = args.action_key.split(",")
    if args.fps_downsample_ratio != 1:
        said["stride"] = args.fps_downsample_ratio
    if args.combine_actions:
        said["combine_actions"] = args.combine_actions
    recordings = LeRobotRecordings.open(args.input_root, choice.config.transform, trained, **said)
    found = recordings.chosen(args.episodes or [], trained)
    if not (asked := found if args.episodes else found[args.start : args.end]):
        raise ConfigError(f"--start {args.start} --end {args.end}: none of {len(found)} episodes is left.")
    all_of_them = [
        ActionRequest(args.input_root, str(Path(args.save_root, f"episode_{number:06d}.mp4")), "", args.seed, number)
        for number in asked
    ]
    return recordings, *not_yet_there(all_of_them, args)


def not_yet_there(requests: list[Any], args: argparse.Namespace) -> tuple[list[Any], int]:
    """The requests whose outputs do not exist, or with --overwrite all; and how many are skipped."""
    wanted = [one for one in requests if args.overwrite or not os.path.exists(one.save_path)]
    return wanted, len(requests) - len(wanted)


def reading_of(args: argparse.Namespace, choice: ActionChoice) -> Any:
    """How the recordings are read."""
    from cosmos_predict2.pipelines.action_inputs import Reading

    config = choice.config
    return Reading(
        transform=config.transform,
        chunk_size=config.chunk_size,
        source=args.action_source,
        state_key=args.state_key,
        gripper_key=args.gripper_key,
        action_key=args.action_key,
        stride=args.fps_downsample_ratio,
        combine=args.combine_actions,
        start=args.start_frame_idx,
        camera=args.camera_id,
        num_given=args.num_conditional_frames,
        most_actions=None if is_whole(args) else config.chunk_size,
        size=size_asked(args.resolution, choice.video_size),
        fps=choice.fps,
        load=load_function(args.action_load_fn) if args.action_load_fn else None,
        arguments=args,
    )


def is_whole(args: argparse.Namespace) -> bool:
    """Whether all actions of a recording are imagined, not those of one chunk."""
    return args.autoregressive if args.input_annotation else not args.single_chunk


def settings_of(args: argparse.Namespace, choice: ActionChoice) -> Any:
    """What all rollouts share."""
    from cosmos_predict2.pipelines.action_requests import RolloutSettings
    from cosmos_predict2.pipelines.requests import fingerprint
    from cosmos_predict2.world_model.sampling import SamplingOptions

    return RolloutSettings(
        save_fps=args.save_fps,
        weights=fingerprint(choice.dit_path),
        sampling=SamplingOptions(
            guidance=args.guidance,
            num_steps=args.num_steps or choice.config.timestamps.nfe,
            solver=args.solver,
            use_cuda_graphs=args.use_cuda_graphs,
            progress=True,
        ),
        history=(args.num_conditional_frames + 3) // 4,
        reference=args.keep_reference,
        float_hand_over=args.float_hand_over,
        last_chunk=args.last_chunk,
        batch_size=args.batch_size,
        side_by_side=args.side_by_side,
        contact_sheet=args.contact_sheet,
        asked=asked_of(args, choice),
    )


def asked_of(args: argparse.Namespace, choice: ActionChoice) -> dict[str, Any]:
    """The flags that change a result, for the record: with what they led to where they left it open."""
    told = choice.config.flow.conditional_frame_timestep if choice.config.flow is not None else None
    return {
        **{name: value for name, value in vars(args).items() if name not in NOT_RECORDED},
        "model_size": choice.model_size,
        "given_timestep": told if told is not None and told >= 0 else None,
        "prompt_embeddings": choice.constant_text if args.prompt_embeddings is None else args.prompt_embeddings,
        "autoregressive": is_whole(args),
    }


def size_asked(text: str, trained: tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) of --resolution, else of the run's clips; None: the video's own."""
    if not text:
        return trained
    if text == "none":
        return None
    try:
        height, width = (int(side) for side in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--resolution {text}: height and width, such as 256,320, or none.") from error
    return height, width


def load_function(name: str) -> Any:
    """What a function by this name gives when it is called without arguments."""
    module, _, function = name.rpartition(".")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--action_load_fn {name}: MODULE.FUNCTION cannot be imported: {error}.") from error
    if not callable(make) or not callable(load := make()):
        raise ConfigError(f"--action_load_fn {name}: called without arguments, it must give a function.")
    return load


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    logs.setup()
    start = time.monotonic()
    try:
        code = run(args)
    except UserError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written of the videos in work", file=sys.stderr)
        return 130
    log.info("done in %.1f s", time.monotonic() - start)
    return code


if __name__ == "__main__":
    sys.exit(main())
