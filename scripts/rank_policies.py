# SPDX-License-Identifier: Apache-2.0
"""Rank policies by what a world model imagines of them and a reward values, and say how far to trust that.

Each policy plays greedily from the same starts. With --suite or --truth, of four policies or more, values are compared
with true success and calibrated by it. A policy that learnt in this world model or from this reward is not judged.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line, storage
from imaginaire.errors import ConfigError, UserError

log = logging.getLogger(__name__)

_EPILOG = """\
--truth FILE is JSON, {"POLICY": [successes, episodes], ...}, with the policies as --policies names them: what a robot
showed. Exit code: 1 where the order is not to be trusted, else 0.

examples:
  python -m scripts.rank_policies --world_model RUN --reward outputs/my_reward --starts outputs/my_starts \\
    --policies outputs/clone outputs/longer outputs/larger
  python -m scripts.rank_policies --world_model wfm://gpubox:8100 --policies outputs/clone outputs/longer
  python -m scripts.rank_policies --world_model RUN --reward outputs/my_reward --starts outputs/my_starts \\
    --policies outputs/* --suite gym:MT1-reach --import metaworld_setup --out outputs/ranking.json
"""

parser = command_line.parser("scripts.rank_policies", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
add("--world_model", required=True, metavar="W", help="a run or weights, or a server that has all: wfm://HOST:8100")
add("--reward", default="", metavar="R", help="a file or folder of scripts.train_reward_model, or MODULE:CLASS")
add("--starts", default="", metavar="S", help="of scripts.make_reset_states; those that are held out are played")
add("--policies", required=True, nargs="+", metavar="P", help="files, folders or runs, or MODULE:CLASS")
add("--suite", default="", metavar="E", help="where it is true, also of starts: gym:ID, or yours, MODULE:CLASS")
add("--truth", default="", metavar="FILE", help="true success that is known")
add("--image_size", type=count, default=None, help="of a simulator's pictures (default: the suite's)")
add("--episodes", type=count, default=100, help="starts of each policy, at most")
add("--first", type=command_line.at_least(0), default=0, help="the number of the first of them with --suite")
add("--out", type=command_line.file_to_write, default=None, metavar="FILE", help="write the figures there, as JSON")
command_line.common(add, "load_ema", "seed", "device")


def run(args: argparse.Namespace) -> int:
    from cosmos_predict2.configs.rl.imagination import imagination_of
    from cosmos_predict2.rl.envs.recorded_starts import RecordedStarts
    from cosmos_predict2.rl.envs.remote import address_of, of_address
    from cosmos_predict2.rl.imagined.ranking import Ranked, have_failures, ranked, refusal, table
    from cosmos_predict2.rl.policies.files import find_policy
    from cosmos_predict2.rl.rewards.resnet import read_reward
    from cosmos_predict2.rl.trust import digest
    from cosmos_predict2.world_model.assembly import device_of

    if len(set(args.policies)) < 2:
        raise ConfigError(f"--policies {' '.join(args.policies)}: two different ones at least can be ranked.")
    truth, device = _known(args.truth, args.policies), device_of(args.device)
    if address_of(args.world_model):
        if args.reward or args.starts or args.suite:
            raise ConfigError(f"{args.world_model} has its reward and starts: leave out --reward, --starts, --suite.")
        server = of_address(args.world_model, part="held_out")
        places, has_failures = server.facts["places"], server.facts["has_failures"]
        inputs = {name: {value} for name, value in server.facts["inputs"].items()}
        parts: Any = (server,)
    else:
        if not (args.reward and args.starts):
            raise ConfigError("--reward R and --starts S are needed: what judges, and what episodes begin with.")
        places, has_failures = dict(world_model=args.world_model, reward=args.reward), have_failures(args.world_model)
        inputs = {name: {digest(place), digest(place, load_ema=True)} for name, place in places.items()}
        imagination = imagination_of(args.world_model, load_ema=args.load_ema, device=device)
        parts = (imagination, read_reward(args.reward), RecordedStarts(args.starts, by_task=False))
    rows = []
    for path in dict.fromkeys(args.policies):
        policy, card = find_policy(path)
        policy.to(device)
        try:
            value, true = _played(args, policy, *parts)
        except UserError as error:  # of one among several
            raise type(error)(f"--policies {path}: {error}") from error
        rows.append(
            Ranked(path, value, true or truth.get(path), refusal(str(card.about.get("run") or path), inputs, places))
        )
        log.info("%s: imagined value %s", path, value.as_text())
    found = ranked(rows, has_failures)
    print(f"{'NOT to be trusted: ' + found.problem if found.problem else 'policies, the best first'}")
    print(table(found))
    for name, figure in found.figures.items():
        print(f"  {name.replace('_', ' ')}: {figure.as_text() if hasattr(figure, 'as_text') else figure}")
    if args.out:
        storage.write_json(Path(args.out), found.as_dict())
        print(f"figures: {args.out}")
    return int(bool(found.problem))


def _played(
    args: argparse.Namespace, policy: Any, world: Any, reward: Any = None, starts: Any = None
) -> tuple[Any, Any]:
    """The imagined value of a policy, and with --suite its true success from the same starts. ``world`` is an
    environment where there is no ``reward``."""
    from cosmos_predict2.configs.rl.imagination import fit_of
    from cosmos_predict2.evaluation.metrics.agreement import mean
    from cosmos_predict2.rl.envs import suites
    from cosmos_predict2.rl.envs.first_frames import SimulatedStarts
    from cosmos_predict2.rl.envs.world_model import require_inputs
    from cosmos_predict2.rl.episodes.episodes import LocalRollout
    from cosmos_predict2.rl.episodes.policy_evaluation import held_out_starts
    from cosmos_predict2.rl.imagined.check import AT_ONCE, imagined_env

    def played(env: Any, chosen: Any) -> Any:
        return LocalRollout(policy, env, keep_record=False).collect(chosen, "greedy")

    def value(shown: Any, chosen: Any) -> Any:
        imagined = world if reward is None else imagined_env(world, reward, shown)
        require_inputs(imagined, policy)
        found = played(imagined, chosen)
        return mean(found.return_E[found.is_valid_E].double().numpy(), args.seed)

    if reward is None:
        num = min(args.episodes, len(world.facts["parts"]["held_out"]))
        return value(None, held_out_starts(num, 1, args.seed)), None
    if not args.suite:
        numbers = starts.numbers("held_out")[: args.episodes]
        chosen = held_out_starts(len(numbers), 1, args.seed)
        return value(starts, replace(chosen, trial_ids=list(numbers))), None
    with closing(suites.find(args.suite, image_size=args.image_size).env(AT_ONCE, policy)) as env:
        num_tasks = int(env.metadata.get("num_tasks", 1))
        chosen = held_out_starts(args.episodes, num_tasks, args.seed, args.first)
        shown = SimulatedStarts(env, num_tasks, fit_of(args.world_model), len(world.views))
        shown.recorded = starts.recorded  # type: ignore[attr-defined]
        imagined = value(shown, chosen)  # first: a policy that does not fit is refused before it plays
        found = played(env, chosen)
        return imagined, mean(found.success_E[found.is_valid_E].double().numpy(), args.seed)


def _known(path: str, policies: Sequence[str]) -> Mapping[str, Any]:
    """True success of --truth by policy."""
    from cosmos_predict2.evaluation.metrics.agreement import Estimate
    from cosmos_predict2.rl.episodes.policy_evaluation import Rate
    from imaginaire import foreign_json
    from imaginaire.errors import DataError, near

    try:
        content = foreign_json.load_object(Path(path)) if path else {}
    except ValueError as error:
        raise DataError(f"--truth {path} cannot be read: {error}.") from error
    found = {}
    for name, numbers in content.items():
        if name not in policies:
            raise ConfigError(f"--truth {path} names {name}, which is none of --policies.{near(name, policies)}")
        are_counts = isinstance(numbers, list) and len(numbers) == 2 and all(type(one) is int for one in numbers)
        if not are_counts or not 0 <= numbers[0] <= numbers[1] or not numbers[1]:
            raise DataError(
                f"--truth {path}: {name} has {json.dumps(numbers)}; expected [successes, episodes], whole numbers of"
                " one episode or more, such as [12, 20]."
            )
        rate = Rate(*numbers)
        found[name] = Estimate(rate.rate, *rate.interval, rate.episodes)
    return found


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
