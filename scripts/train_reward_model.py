# SPDX-License-Identifier: Apache-2.0
"""Train a success classifier: a reward model that looks at pictures and judges whether the task is done.

It learns from recordings, a LeRobot data set with a column that has for each frame whether the task is done: with
--world_model their own actions are imagined, too, and what truly happened is the label. Half of the held-out episodes
calibrate probabilities and threshold, the other half measures.
"""

import argparse
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line, storage
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

FILE, FIGURES, PICTURE = "reward_model.safetensors", "quality.json", "reliability.svg"
_MARGIN = 1.2  # above the recall that the measured half must have: it is found on the other half
LEAST_RECALL = 0.5  # of the successes on true pictures, by the threshold
FEW_ENDS = 20  # of an outcome: with 80 of the other chance gives an area of up to .62, 9 and 81 give .67
SIZES = {"tiny": (16, 16, 32, 32, 64), "published": (64, 64, 128, 256, 512)}

_EPILOG = """\
writes OUT/reward_model.safetensors (its header records the threshold), quality.json and reliability.svg. Use it as
L(ResnetReward)(path="OUT/reward_model.safetensors").

Imagined pictures are labelled by how the true episode of the same actions stood: that also counts what the world model
imagines wrongly, which no judge of pictures sees. A reward is refused where it separates imagined ends of successes and
failures no better than chance.

example:
  python -m scripts.train_reward_model --data datasets/my_robot --split split.json --world_model my_world_model \\
    --out reward_model
"""

parser = command_line.parser("scripts.train_reward_model", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
add("--out", required=True, type=command_line.folder_to_write, metavar="DIR", help="a new folder")
add("--data", required=True, metavar="DATA", help="the folder of a LeRobot data set")
add("--world_model", default="", metavar="PATH", help="imagines their actions (default: none, true pictures only)")
add("--size", choices=tuple(SIZES), default="tiny", help="of the network: tiny, or that of the published weights")
add("--steps", type=count, default=800, help="of the optimizer")
add("--lr", type=command_line.above_zero, default=2e-3, help="learning rate, which falls to 0")
add("--batch_size", type=command_line.at_least(2, 10**5), default=64, help="pictures of a step, half with success")
add("--precision", type=float, default=0.98, help="share of judged successes that must be true")
below = "below it on held-out pictures the reward model is not written (default: {}; 0: any is)"
none = "0.8; with a world model 0, the area of ends decides"
add("--least_precision", type=float, default=None, help=below.format(none))
of_true = f"{LEAST_RECALL}, of others none: the area of ends decides"
add("--least_recall", type=float, default=None, help=below.format(of_true))
least_area = "area under the curve of ends, likewise (default: more than chance gives; 0: any)"
add("--least_area", type=float, default=None, metavar="AREA", help=least_area)
command_line.common(add, "overwrite", "seed", "device")
add("--success_column", default="next.success", help="1 on frames that show success")
add("--camera", default=None, help="of several, the one to look at")
add("--near", type=command_line.at_least(0), default=8, help="frames before a success that count as near misses")
add("--split", default="", metavar="FILE", help="of scripts.split_recordings: learn, calibrate and measure by it")
add("--val_fraction", type=float, default=0.25, help="without --split: share of the episodes that is held out")


def run(args: argparse.Namespace) -> None:
    import torch

    from cosmos_predict2.evaluation.reports.evaluation_page import drawn_file
    from cosmos_predict2.rl.rewards import success_training
    from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, write_classifier
    from cosmos_predict2.rl.rewards.success_training import LabelledPictures, measure, measure_ends
    from cosmos_predict2.world_model.assembly import device_of
    from imaginaire import random
    from imaginaire.training.provenance import run_record

    out = Path(args.out)
    if out.resolve() == Path(args.data).resolve():
        raise ConfigError(f"--out {out} is the folder of the recordings: give another.")
    if (out / FILE).exists() and not args.overwrite:
        raise ConfigError(f"--out {out} holds a reward model: give another folder, or --overwrite.")
    if args.least_precision is None:
        args.least_precision = 0.0 if args.world_model else 0.8
    if not 0 < args.precision < 1:
        raise ConfigError(f"--precision {args.precision}: above 0 and below 1.")
    for flag in ("least_precision", "least_recall", "least_area"):
        if (least := getattr(args, flag)) is not None and not 0 <= least < 1:
            raise ConfigError(f"--{flag} {least}: 0 or more and below 1.")
    device = device_of(args.device)
    shown = _pictures(args, device)
    with random.preserved():
        torch.manual_seed(random.derive_seed(args.seed, 0, "success classifier"))
        model = SuccessClassifier(SIZES[args.size], progress=True)
    for part in shown.calibrating.values():
        part.require_both("of held-out episodes, by which probabilities are calibrated,")
    if args.least_area != 0:
        for part in shown.ends.values():
            part.require_both("at the ends of held-out episodes, which are compared,")
    pictures = LabelledPictures.joined(shown.learnt)
    log.info("%d pictures to learn from, %d with success", len(pictures), int(pictures.success_N.sum()))
    options = success_training.TrainingOptions(args.steps, args.lr, args.batch_size)
    losses = success_training.train(model, pictures, options, args.seed, device)
    scales = success_training.scale_to(model, LabelledPictures.joined(list(shown.calibrating.values())))
    kinds = [*shown.calibrating.values(), *shown.calibrating_ends]
    recall = min(1.0, _MARGIN * (LEAST_RECALL if args.least_recall is None else args.least_recall))
    threshold = success_training.middle_threshold(model, kinds, args.precision, recall)
    if not threshold.is_precise:
        asked = f"--precision {args.precision:g} and a recall of {recall:g} (--least_recall and a fifth)"
        log.warning("no threshold reaches %s on held-out pictures: one of the best there are is taken", asked)
    qualities = {name: measure(model, part, threshold.value) for name, part in shown.measured.items()}
    ends = {name: measure_ends(model, part, threshold.value, shown.num_setting) for name, part in shown.ends.items()}
    judged: list[tuple[str, Any]] = [*qualities.items(), *ends.items()]
    print("\n".join(f"{name}: {found.as_text()}" for name, found in judged))
    about: dict[str, Any] = dict(
        **{name: getattr(args, name) for name in ("data", "world_model", "seed", "steps")},
        **dict(threshold=threshold.value, threshold_range=[threshold.low, threshold.high]),
        **dict(outputs=["success", "progress"], precision_asked=args.precision),
        **dict(loss=sum(losses[-50:]) / len(losses[-50:]), scale=scales[0][0], offset=scales[0][1]),
        command=parser.command(),
        **shown.about,
    )
    storage.write_json(out / FIGURES, {**about, "versions": run_record(), "quality": qualities, "ends": ends})
    lines = {name: [(one.probability, one.rate) for one in quality.bins] for name, quality in qualities.items()}
    drawn = drawn_file("share of true successes", {**lines, "as it should be": [(0, 0), (1, 1)]}, "probability")
    (out / PICTURE).write_text(drawn, encoding="utf-8")
    if problem := _problem(args, qualities, ends):
        why = f"A policy would learn from wrong rewards, so no {FILE} is written; {out / FIGURES} has all figures."
        cure = "--least_precision 0 --least_recall 0 --least_area 0"
        raise DataError(f"{problem} {why} To write it nevertheless: {cure}.")
    write_classifier(out / FILE, model, about)
    print(
        f"reward model: {out / FILE}, threshold {threshold.value:.3f} in the middle of {threshold.low:.3f} to"
        f" {threshold.high:.3f}; {out / FIGURES}, {out / PICTURE}"
    )
    for name, found in list(ends.items())[-1:]:  # where it will be paid
        print(
            f"It values a success above a failure in {100 * found.area_under_curve:.0f} of 100 pairs ({name}), where"
            f" chance gives 50, and at most {100 * found.chance:.0f}."
        )


_LIMITED_BY = (
    "True pictures are judged well, so the world model limits: train it longer, on recordings with failures, and with a"
    " tokenizer fitted to them."
)


def _problem(args: argparse.Namespace, qualities: Mapping[str, Any], ends: Mapping[str, Any]) -> str:
    """The first figure below its limit, in words, or ""; NaN is too low. Ends come first, of them true ones."""
    from cosmos_predict2.rl.rewards.success_training import OUTCOME, TRUE

    for kind, found in ends.items():
        least = found.chance if args.least_area is None else args.least_area
        if args.least_area != 0 and not found.area_under_curve > least:
            limit = "chance alone gives up to" if args.least_area is None else "--least_area is"
            cure = _LIMITED_BY if kind == OUTCOME else "Train longer (--steps), or record more episodes."
            if args.least_area is None and (rare := min(found.successes, found.episodes - found.successes)) < FEW_ENDS:
                which = "succeed" if rare == found.successes else "fail"
                cure += f" Only {rare} of these ends {which}: where more do, chance gives less."
            area = f"the area under the curve of {found.episodes} ends is {found.area_under_curve:.3f}"
            return f"{kind}: {area}, but {limit} {least:.3f}. {cure}"
    for kind, quality in qualities.items():
        for name in ("precision", "recall"):
            least, share = getattr(args, f"least_{name}"), getattr(quality, name)
            if least is None:
                least = LEAST_RECALL if kind == TRUE else 0
            if least and not share >= least:
                cure = "Train longer (--steps), on more episodes with success, or with another --precision."
                cure = _LIMITED_BY if kind == OUTCOME else cure
                return f"{kind}: {name} {share:.3f} on held-out pictures, but --least_{name} is {least:g}. {cure}"
    return ""


@dataclass(frozen=True)
class _Shown:
    """Labelled pictures: to learn from, and by their kind to calibrate with, held-out ones, and ends of episodes."""

    learnt: list[Any]
    calibrating: Mapping[str, Any]
    measured: Mapping[str, Any]
    ends: Mapping[str, Any] = field(default_factory=dict)
    num_setting: int = 0  # of them, the first ones, by which the threshold is set
    calibrating_ends: list[Any] = field(default_factory=list)
    about: Mapping[str, Any] = field(default_factory=dict)


def _pictures(args: argparse.Namespace, device: str) -> _Shown:
    from cosmos_predict2.checkpoints.card import read_card
    from cosmos_predict2.configs.rl.imagination import fit_of, imagination_of
    from cosmos_predict2.data.lerobot.reader import LeRobotSource
    from cosmos_predict2.data.split import require_usable
    from cosmos_predict2.data.views import require_same, views_of
    from cosmos_predict2.rl.envs.replays import with_actions_of
    from cosmos_predict2.rl.imagined.labelled_recordings import LabelledRecordings, parts_of
    from cosmos_predict2.rl.rewards.success_training import OUTCOME, TRUE, LabelledPictures

    if not 0 < args.val_fraction < 1:
        raise ConfigError(f"--val_fraction {args.val_fraction}: above 0 and below 1.")
    source = LeRobotSource.open(Path(args.data))
    parts = parts_of(source, args.split, args.val_fraction)
    imagination, fit = None, None
    if args.world_model:
        imagination = imagination_of(args.world_model, device=device)
        card = read_card(args.world_model)
        if card.frame_rate is not None and abs(card.frame_rate / source.info.fps - 1) > 0.01:
            rates = f"{source.info.fps:g} pictures a second, but {args.world_model} was trained on {card.frame_rate:g}"
            raise DataError(f"{args.data} has {rates} (a stride). Give recordings of that rate, or another model.")
        if int(source.episodes.lengths.min()) < 2:
            raise DataError(f"{args.data} has an episode of one picture: nothing can be imagined of it. Remove it.")
        source = with_actions_of(source, imagination)
        require_usable(source, args.camera)
        require_same(imagination.views, views_of(args.camera), "The world model", "--camera", "give its cameras.")
        fit = fit_of(args.world_model)
    recordings = LabelledRecordings(source, args.success_column, args.camera, parts[0], near_misses=args.near, fit=fit)
    learnt, calibrating, measured = (recordings.labelled(part, imagination, args.seed) for part in parts)
    judged = [TRUE] if imagination is None else [TRUE, OUTCOME]

    def ends(kind: str, *parts: Mapping[str, list[Any]]) -> Any:
        return LabelledPictures.joined([one.rows(slice(-1, None)) for part in parts for one in part[kind]])

    return _Shown(
        [one for kind in learnt.values() for one in kind],
        {kind: LabelledPictures.joined(calibrating[kind]) for kind in judged},
        {kind: LabelledPictures.joined(episodes) for kind, episodes in measured.items()},
        {kind: ends(kind, calibrating, measured) for kind in judged},
        len(calibrating[TRUE]),
        [] if imagination is None else [ends(kind, calibrating) for kind in judged],
        dict(split=args.split, discount=recordings.discount, views=list(views_of(args.camera))),
    )


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
