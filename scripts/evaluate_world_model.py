# SPDX-License-Identifier: Apache-2.0
"""Measure a world model on clips that it never saw; a page shows it beside the truth, its verdict first.

A model with actions (--dit_path alone): how near what it imagines is to the truth, frame by frame and chunk by chunk,
and whether it obeys its actions. On the toy world also whether whole episodes end as the simulator's do.

A tiny Video2World model (the folder of its run, or --experiment): its loss at fixed noise levels before and after
training and that of linear denoisers, and its generated frames against the last conditioning frame repeated, where
something moves.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from cosmos_predict2.evaluation.reports.evaluation_page import FIGURES
from imaginaire import command_line
from imaginaire.errors import CheckpointError, ConfigError, DataError

log = logging.getLogger(__name__)

CONFIG = "cosmos_predict2/configs/base/config.py"
NUM_STEPS = 35
NUM_CHUNKS = 2
WITH_ACTIONS = "a model with actions"  # the flags of these alone
NUM_EPISODES = 400  # whole ones of the toy world

_EPILOG = """\
With actions, --data names the recordings: toy, toy:hard, or a folder in Bridge's or LeRobot's layout, of which the
held-out split is taken; without it, those that the run of the weights was validated on.

Without actions, the config.yaml of the run names the clips: those of dataloader_train for the linear denoisers, those
of dataloader_val for everything else. --data FOLDER takes these from another folder of the training data's kind;
--experiment takes all from an experiment, for weights that lie in no run. Words after -- are overrides, as in
scripts.train. "Before" are the weights that the training began with.

examples:
  python -m scripts.evaluate_world_model --dit_path checkpoints/PROJECT/GROUP/NAME --out outputs/NAME
  python -m scripts.evaluate_world_model --model_size 2B --data datasets/bridge --num_clips 32 --device cuda
  python -m scripts.evaluate_world_model --dit_path RUN --load_ema --out outputs/NAME --save_path out.mp4
  python -m scripts.evaluate_world_model --dit_path RUN -- dataloader_val.dataset.dataset_dir=datasets/NAME/val
  python -m scripts.evaluate_world_model --experiment NAME --dit_path model.pt
"""

count, number = (command_line.at_least(least, 2**30 - 1) for least in (1, 0))
parser = command_line.parser(
    "scripts.evaluate_world_model", __doc__, _EPILOG, {"--resolution": "--size", "--chunks": "--num_chunks"}
)
add = parser.add_argument
add("--dit_path", default="", metavar="PATH", help="the weights: a run's folder, a .pt or a safetensors file")
add("--data", default="", metavar="DATA", help="a folder; with actions also toy, toy:hard (default: of the run)")
command_line.common(add, "load_ema")
add("--num_clips", type=count, default=64, help="held-out clips")
add("--num_steps", type=count, default=None, help="sampling steps (default 35; with actions, those of the run)")
add("--fps", type=command_line.above_zero, help="frames per second of the videos (default: as the clips have)")
out: dict[str, Any] = dict(type=command_line.folder_to_write, default="outputs/evaluation", metavar="DIR")
add("--out", help="the folder of the page and its videos", **out)
add("--json", type=command_line.file_to_write, metavar="FILE", help="write the figures to this file too")
actions = parser.add_argument_group(WITH_ACTIONS).add_argument
actions("--split", default="", metavar="FILE", help="of --data: the part test of scripts.split_recordings")
of_rollout = "of a rollout, each from the last imagined frame (default: 2, of shorter recordings 1)"
actions("--num_chunks", type=count, default=None, help=f"chunks {of_rollout}")
actions("--size", type=int, nargs=2, metavar=("H", "W"), help="of a folder's frames (default: that of the run)")
actions("--model_size", choices=["2B", "tiny"], default=None, help="of weights that lie in no run (default 2B)")
actions("--tokenizer_path", default="", metavar="FILE", help="where the tokenizer's file lies (default: as recorded)")
actions("--action_transform", default="", metavar="NAME", help="of the training, where such weights record none")
actions("--guidance", type=float, default=0.0, help="away from no text: 0 for models that have none")
actions("--seed", type=number, default=0, help="of the noise, clip i has seed + i; and of the toy world's episodes")
actions("--batch_size", type=count, default=None, help="clips imagined together (default: as many as fit)")
command_line.common(actions, "device")
actions("--toy_episodes", type=number, default=None, help="whole episodes of the toy world (default 400; 0: none)")
actions("--lpips", action="store_true", help="with the package lpips in place of the similarity of gradients")
others = parser.add_argument_group("a tiny Video2World model").add_argument
others("--experiment", default="", help="whose model and clips (default: those of the run of the weights)")
others("--config", default=CONFIG, metavar="FILE", help="where the experiment is")
others("--save_path", default="", metavar="FILE", help="an mp4 of truth, before and after, and a .png beside it")
others("overrides", nargs="*", metavar="OVERRIDE", help="of the run's configuration or the experiment's, after --")


def run(args: argparse.Namespace) -> int:
    from cosmos_predict2.checkpoints.card import read_card
    from cosmos_predict2.data.video.media import WRITTEN_VIDEO_SUFFIXES, check_writable
    from cosmos_predict2.evaluation.reports.held_out_evaluation import evaluate
    from cosmos_predict2.pipelines.recorded_run import composed_run, is_video2world
    from imaginaire.config.compose import compose

    _check_flags(args)
    card = read_card(args.dit_path)
    if not args.experiment and not is_video2world(card):
        return evaluate_actions(args)
    if not args.dit_path:
        raise ConfigError("--dit_path is needed beside --experiment: give a run's folder or a file.")
    of_actions = next(group for group in parser._action_groups if group.title == WITH_ACTIONS)._group_actions
    for flag in of_actions:
        if getattr(args, flag.dest) not in (flag.default, "cpu"):
            name = flag.option_strings[0]
            raise ConfigError(f"{name} goes with models with actions, and {args.dit_path} has none. Leave it out.")
    if args.save_path:
        check_writable(args.save_path, WRITTEN_VIDEO_SUFFIXES, flag="--save_path")
    overrides = [f"experiment={args.experiment}", *args.overrides]
    config = compose(args.config, overrides) if args.experiment else composed_run(card, args.overrides)
    own = dict(which="net_ema" if args.load_ema else "auto", num_steps=args.num_steps or NUM_STEPS)
    found = evaluate(config, args.dit_path, **command_line.options_of(evaluate, args, **own))
    print(found.figures.as_text())
    fps = args.fps or found.fps
    found.write_report(Path(args.out), fps)
    if args.save_path:
        sheet = found.show(Path(args.save_path), fps)
        print(f"video: {args.save_path} (truth, before, after); contact sheet: {sheet}")
    return _finished(args)


def _finished(args: argparse.Namespace) -> int:
    """Write --json as the page has it, and print the path of the page."""
    if args.json:
        Path(args.json).write_text((Path(args.out) / FIGURES).read_text())
    print(f"page: {Path(args.out) / 'index.html'}")
    return 0


def evaluate_actions(args: argparse.Namespace) -> int:
    from cosmos_predict2.checkpoints.card import ModelCard, read_card
    from cosmos_predict2.checkpoints.dit_loading import unregistered
    from cosmos_predict2.checkpoints.dit_weights import described_weights
    from cosmos_predict2.configs.action_conditioned.networks import choose_action_model
    from cosmos_predict2.evaluation.metrics.video_quality import lpips_package
    from cosmos_predict2.evaluation.reports.action_evaluation import evaluate as measured
    from cosmos_predict2.evaluation.reports.action_evaluation import write_report as write_page
    from cosmos_predict2.evaluation.reports.toy_world import imagine_futures, measure
    from cosmos_predict2.pipelines.action_requests import read_texts
    from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
    from cosmos_predict2.toy_world.physics import SETTINGS, find_tasks
    from cosmos_predict2.world_model.assembly import check_device
    from cosmos_predict2.world_model.options import ActionModel, RequestText

    if args.overrides or args.save_path:
        first = (args.overrides or ["--save_path"])[0]
        raise ConfigError(f"{first} goes with models without actions: the folder of a run, or --experiment NAME.")
    check_device(args.device or "cpu")
    if args.lpips:
        lpips_package()
    if args.dit_path and not (card := read_card(args.dit_path).opened()).has_action_embedders:
        cure = "Give --experiment NAME, by which a tiny Video2World model was trained, or weights of one with actions."
        without = f"{args.dit_path} is of a model without actions, and lies in no run of one. {cure}"
        raise CheckpointError(unregistered(card) or without)
    model_flags = ("model_size", "dit_path", "load_ema", "action_transform", "tokenizer_path")
    choice = choose_action_model(ActionModel(**{name: getattr(args, name) for name in model_flags}))
    recordings = _recordings(args, choice)
    if recordings.episodes is None and args.toy_episodes:
        log.warning("--toy_episodes %d is left out: only --data toy has whole episodes to judge", args.toy_episodes)
    choice.config.guardrail_config.enabled = choice.config.prompt_refiner_config.enabled = False  # there is no prompt
    pipe = Video2WorldActionConditionedPipeline.from_config(
        choice.config, choice.dit_path, use_text_encoder=False, device=args.device, load_ema_to_reg=args.load_ema
    )
    text, _ = read_texts(RequestText(), choice.config, choice.card or ModelCard(), pipe.dit.text_channels)
    num_steps = args.num_steps or choice.config.timestamps.nfe
    own = dict(num_steps=num_steps, text_1_S_E=text, with_lpips=args.lpips, views=choice.card.views)
    own["weights"] = described_weights(choice.dit_path, "net_ema" if args.load_ema else "auto")
    report, imagined, tried = measured(pipe, recordings, **command_line.options_of(measured, args, **own))
    print(report.as_text())
    futures = figures = None
    num_episodes = NUM_EPISODES if args.toy_episodes is None else args.toy_episodes
    if recordings.episodes is not None:
        episodes = recordings.episodes
        names = sorted(set(episodes.tasks))
        world: dict[str, Any] = dict(setting=episodes.setting, size=episodes.size, num_steps=num_steps)
        task = "push_puck" if "push_puck" in names else names[0]
        futures = imagine_futures(pipe, task=task, seed=args.seed, **world)
        seen = [name for name in names if find_tasks([name])[0].verb != "touch"]  # whose end a picture shows
        if not seen or choice.config.chunk_size >= SETTINGS[episodes.setting].num_steps:
            log.warning("whole episodes are left out: a chunk is as long as they are, or no picture shows their ends")
        elif num_episodes:
            figures = measure(pipe, num_episodes=num_episodes, tasks=seen, seed=episodes.seed, **world)
            print(figures.as_text())
    fps = args.fps or choice.fps
    write_page(Path(args.out), report, recordings, imagined, tried, fps=fps, futures=futures, figures=figures)
    return _finished(args)


def _check_flags(args: argparse.Namespace) -> None:
    """Raise for values that do not go together, and for outputs that could not be written in the end."""
    from cosmos_predict2.data.clip_dataset import shape_problems

    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json} cannot be written: give a file in a folder that exists.")
    if args.size is None:
        return
    size = "{} {}".format(*args.size)
    if wrong := [*shape_problems(2, tuple(args.size))]:
        raise ConfigError(f"--size {size}: {wrong[0].partition('; ')[2]}.")
    if not Path(args.data).is_dir():
        raise ConfigError(f"--size {size} goes with --data FOLDER; other data have a size of their own. Leave it out.")


def _recordings(args: argparse.Namespace, choice: Any) -> Any:
    """The held-out recordings that --data names, or those that the run was validated on."""
    from cosmos_predict2.world_model.imagination import check_bases

    transform, chunks = choice.config.transform, args.num_chunks or NUM_CHUNKS
    if transform.accumulate == "window" and chunks > 1:
        log.warning("actions of this model are relative to the first frame of a chunk: one chunk is measured")
        chunks = 1
    if chunks > 1:
        check_bases(transform, choice.config.chunk_size)
    try:
        return _of_length(args, choice, chunks)
    except DataError as error:
        if args.num_chunks is not None or chunks == 1:
            raise
        log.warning("%s One chunk is measured.", error)
        return _of_length(args, choice, 1)


def _of_length(args: argparse.Namespace, choice: Any, chunks: int) -> Any:
    from cosmos_predict2.pipelines.evaluation_data import read_recordings, recordings_of_run, size_of_world

    transform = choice.config.transform
    wanted = dict(num=args.num_clips, num_actions=chunks * choice.config.chunk_size, seed=args.seed)
    loader = choice.card.run.get("dataloader_val") or {}
    if args.data:
        trained = loader.get("dataset")
        size = tuple(args.size) if args.size else choice.video_size
        size = size or size_of_world(trained or {}, choice.config.resolution)
        return read_recordings(args.data, transform, size=size, trained=trained, split_file=args.split, **wanted)
    if args.split:
        raise ConfigError(f"--split {args.split} is of recordings: give their folder, --data.")
    if not loader.get("dataset"):
        raise ConfigError("No run records what these weights were validated on: give --data toy, toy:hard or a folder.")
    return recordings_of_run(loader["dataset"], transform, **wanted)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
