# SPDX-License-Identifier: Apache-2.0
"""Train a success classifier: a reward model that looks at pictures and says whether the task is done.

Of the toy world, rollouts are made with success known: of drivers of all skills and of the policy that will be judged,
in the simulator and imagined by a world model. Of recordings (--data), a LeRobot data set with a column that says for
each frame whether the task is done. Half of the held-out episodes calibrate probabilities and threshold, the other
half measures.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

FILE, FIGURES, PICTURE = "reward_model.safetensors", "quality.json", "reliability.svg"
SIZES = {"tiny": (16, 16, 32, 32, 64), "published": (64, 64, 128, 256, 512)}
_TRAIN_FROM, _HELD_OUT_FROM = 2**20, 2**20  # numbers of the first episodes: none that policies learn or are measured on
_BETWEEN = 2**16  # numbers between the episodes of drivers and those of the policy

_EPILOG = """\
writes OUT/reward_model.safetensors (its header records the threshold), quality.json and reliability.svg. Use it as
L(ResnetReward)(path="OUT/reward_model.safetensors").

"imagined" pictures are labelled by what they show, "imagined, by the outcome" by how the simulator's episode of the
same actions stood: the second also counts what the world model imagines wrongly, which no judge of pictures sees.

examples:
  python -m scripts.train_reward_model --data toy --policy policy --out reward_model
  python -m scripts.train_reward_model --data datasets/my_robot --success_column next.success --size published \\
    --out reward_model
"""


parser = command_line.parser("scripts.train_reward_model", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
add("--out", required=True, type=command_line.local_output, metavar="DIR", help="a new folder")
add("--data", default="toy", metavar="DATA", help="toy, or the folder of a LeRobot data set")
add("--overwrite", action="store_true", help="replace a reward model that is there")
add("--size", choices=tuple(SIZES), default="tiny", help="of the network: tiny, or that of the published weights")
add("--steps", type=count, default=800, help="of the optimizer")
add("--lr", type=command_line.above_zero, default=2e-3, help="learning rate, which falls to 0")
add(
    "--batch_size",
    type=command_line.at_least(2, 10**5),
    default=64,
    help="pictures of a step, half of them with success",
)
add("--precision", type=float, default=0.98, help="share of judged successes that must be true")
below = "below it on held-out pictures the reward model is not written (default: {}; 0: any is)"
add("--least_precision", type=float, default=0.8, help=below.format(0.8))
add("--least_recall", type=float, default=0.5, help=below.format(0.5))
add("--seed", type=command_line.at_least(0), default=0, help="of weights, batches and draws")
add("--device", default=None, help="cpu or cuda (default: a GPU where there is one)")
toy = parser.add_argument_group("the toy world").add_argument
toy("--policy", default="", metavar="PATH", help="also of this policy's rollouts, which the reward will judge")
toy("--episodes", type=count, default=200, help="of the drivers, and as many of the policy; a third more held out")
toy("--setting", default="default", help="difficulty")
toy("--world_model", default="", metavar="PATH", help="that imagines (default: the tiny one that ships)")
toy("--no_imagined", action="store_true", help="true pictures only")
own = parser.add_argument_group("recordings").add_argument
own("--success_column", default="next.success", help="1 on frames that show success")
own("--camera", default=None, help="of several, the one to look at")
own("--near", type=command_line.at_least(0), default=8, help="frames before a success that count as near misses")
own("--val_fraction", type=float, default=0.25, help="share of the episodes that is held out")


def run(args: argparse.Namespace) -> None:
    import torch

    from cosmos_predict2.evaluation.reports.evaluation_page import write_json
    from cosmos_predict2.rl.rewards.resnet import THRESHOLD, SuccessClassifier, write_classifier
    from cosmos_predict2.rl.rewards.success_training import (
        LabelledPictures,
        TrainingOptions,
        calibrated_threshold,
        measure,
        reliability_svg,
        scale_to,
        train,
    )
    from cosmos_predict2.world_model.assembly import device_of
    from imaginaire import random
    from imaginaire.training.provenance import run_record

    out = Path(args.out)
    if (out / FILE).exists() and not args.overwrite:
        raise ConfigError(f"--out {out} holds a reward model: give another folder, or --overwrite.")
    if not 0 < args.precision < 1:
        raise ConfigError(f"--precision {args.precision}: above 0 and below 1.")
    for flag in ("least_precision", "least_recall"):
        if not 0 <= getattr(args, flag) < 1:
            raise ConfigError(f"--{flag} {getattr(args, flag)}: 0 or more and below 1.")
    device = device_of(args.device)
    learnt, calibrating, measured = _toy_pictures(args, device) if args.data == "toy" else _recorded_pictures(args)
    with random.preserved():
        torch.manual_seed(random.derive_seed(args.seed, 0, "success classifier"))
        model = SuccessClassifier(SIZES[args.size])
    calibrating.require_both("of held-out episodes, by which probabilities are calibrated,")
    pictures = LabelledPictures.joined(learnt)
    log.info("%d pictures to learn from, %d with success", len(pictures), int(pictures.success_N.sum()))
    options = TrainingOptions(args.steps, args.lr, args.batch_size, mirror=args.data == "toy")
    losses = train(model, pictures, options, args.seed, device)
    scale, offset = scale_to(model, calibrating)
    threshold = calibrated_threshold(model, calibrating, args.precision)
    if threshold is None:
        log.warning("no threshold reaches --precision %g on held-out pictures: %g is taken", args.precision, THRESHOLD)
        threshold = THRESHOLD
    qualities = {name: measure(model, part, threshold) for name, part in measured.items()}
    for name, quality in qualities.items():
        print(f"{name}: {quality.as_text()}")
    about: dict[str, Any] = dict(
        threshold=threshold,
        precision_asked=args.precision,
        data=args.data,
        policy=args.policy,
        seed=args.seed,
        steps=args.steps,
        loss=sum(losses[-50:]) / len(losses[-50:]),
        scale=scale,
        offset=offset,
        command=shlex.join(["python", "-m", "scripts.train_reward_model", *sys.argv[1:]]),
    )
    content = {**about, "versions": run_record(), "quality": {name: q.as_dict() for name, q in qualities.items()}}
    write_json(out / FIGURES, content)
    (out / PICTURE).write_text(reliability_svg(qualities), encoding="utf-8")
    if problem := _below_limit(args, qualities):
        raise DataError(
            f"{problem}: a policy would learn from wrong rewards, so no {FILE} is written. {out / FIGURES} has all"
            " figures. Train longer (--steps), on more episodes with success, or with another --precision; to write"
            " it nevertheless: --least_precision 0 --least_recall 0."
        )
    write_classifier(out / FILE, model, about)
    print(f"reward model: {out / FILE}, threshold {threshold:.3f}; {out / FIGURES}, {out / PICTURE}")


def _below_limit(args: argparse.Namespace, qualities: Mapping[str, Any]) -> str:
    """The first figure below its limit, in words, or "": of pictures labelled by what they show. NaN is too low."""
    from cosmos_predict2.rl.episodes.labelled_rollouts import OUTCOME

    for kind, quality in qualities.items():
        for name in ("precision", "recall"):
            least, found = getattr(args, f"least_{name}"), getattr(quality, name)
            if kind != OUTCOME and least and not found >= least:
                return f"{kind}: {name} {found:.3f} on held-out pictures, but --least_{name} is {least:g}"
    return ""


def _toy_pictures(args: argparse.Namespace, device: str) -> tuple[list[Any], Any, Mapping[str, Any]]:
    """(Pictures to learn from, pictures for calibration, held-out pictures by their source) of the toy world."""
    from cosmos_predict2.configs.rl.imagination import imagination_of
    from cosmos_predict2.rl.episodes import labelled_rollouts
    from cosmos_predict2.rl.policies.files import read_policy
    from cosmos_predict2.rl.rewards.success_training import LabelledPictures
    from cosmos_predict2.toy_world.scene import SETTINGS
    from imaginaire.errors import near

    if args.setting not in SETTINGS:
        raise ConfigError(f"--setting {args.setting}: the toy world has none.{near(args.setting, SETTINGS)}")
    imagination = None if args.no_imagined else imagination_of(args.world_model, device=device)
    policy = read_policy(args.policy)[0] if args.policy else None

    def made(num: int, split: str, first: int, seed: int) -> list[Mapping[str, Any]]:
        played = [labelled_rollouts.by_drivers(num, split, first, seed, args.setting)]
        if policy is not None:
            others = (policy, num, split, first + _BETWEEN, seed, args.setting)
            played.append(labelled_rollouts.by_policy(*others))
        return [labelled_rollouts.labelled(one, split, imagination, args.setting) for one in played]

    num_held_out = max(2, 2 * args.episodes // 3)
    learnt = made(args.episodes, "train", _TRAIN_FROM, args.seed)
    halves = [made(num_held_out // 2, "val", _HELD_OUT_FROM + k * 2 * _BETWEEN, args.seed + 1 + k) for k in range(2)]
    names = [name for name in learnt[0] if name != labelled_rollouts.OUTCOME]
    judged = labelled_rollouts.SIMULATOR if imagination is None else labelled_rollouts.SHOWN
    measured = {name: LabelledPictures.joined([part[name] for part in halves[1]]) for name in learnt[0]}
    return (
        [part[name] for part in learnt for name in names],
        LabelledPictures.joined([part[judged] for part in halves[0]]),
        measured,
    )


def _recorded_pictures(args: argparse.Namespace) -> tuple[list[Any], Any, Mapping[str, Any]]:
    """The same three of a LeRobot data set, whose episodes are held out as its readers do."""
    from cosmos_predict2.rl.rewards.success_training import LabelledPictures, recorded_successes

    if not 0 < args.val_fraction < 1:
        raise ConfigError(f"--val_fraction {args.val_fraction}: above 0 and below 1.")
    learnt, held_out = recorded_successes(
        Path(args.data), args.success_column, args.camera, near=args.near, val_fraction=args.val_fraction
    )
    calibrating, measured = held_out[::2], held_out[1::2]
    return learnt, LabelledPictures.joined(calibrating), {"held out": LabelledPictures.joined(measured)}


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
