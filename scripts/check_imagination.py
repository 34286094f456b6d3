# SPDX-License-Identifier: Apache-2.0
"""Ask whether a policy may learn in what a world model imagines and a reward values: go, doubtful or no.

Held-out recordings are imagined from their first pictures, by their own actions, by other ones, and by the policy, and
the reward's values are held against what truly happened. No simulator is needed. The card records what was measured of
which weights; experiments in imagination demand it.
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from imaginaire.errors import ConfigError

LEARNT = 100  # recordings of training that actions and pictures are compared with

_EPILOG = """\
exit code: 0 for go and doubtful, 1 for no. Every figure with its bound and the reason: documentations/trust.md

examples:
  python -m scripts.check_imagination --data my_data --split split.json --world_model RUN --reward outputs/my_reward \\
    --policy outputs/my_policy --out outputs/my_card.json
  python -m scripts.check_imagination --data my_data --split split.json --world_model RUN --reward outputs/my_reward \\
    --policy outputs/my_policy --played my_played --suite gym:MT1-reach --import metaworld_setup --out card.json
"""

parser = command_line.parser("scripts.check_imagination", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
add("--data", required=True, metavar="FOLDER", help="the recordings: a LeRobot data set")
add("--split", default="", metavar="FILE", help="of scripts.split_recordings (default: that which it would write)")
add("--world_model", required=True, metavar="W", help="a run or weights")
add("--reward", required=True, metavar="R", help="a file or folder of scripts.train_reward_model, or MODULE:CLASS")
add("--policy", nargs="+", default=[], metavar="P", help="files, folders or runs of policies that are to learn")
add("--played", default="", metavar="FOLDER", help="recordings of the policy's own true episodes, 20 or more")
add("--suite", default="", metavar="E", help="where it is true: gym:ID, or yours, MODULE:CLASS")
add("--out", required=True, type=command_line.file_to_write, metavar="CARD", help="the card, a JSON file")
add("--allow", nargs="+", default=[], metavar="FIGURE", help="names of figures that do not count; the card lists them")
add("--success_column", default="next.success", help="1 on frames that show success; of --played, too")
add("--camera", default=None, help="of several, the one that the world model sees")
add("--episodes", type=count, default=100, help="held-out recordings that are imagined, at most")
command_line.common(add, "options", "load_ema", "seed", "device")


def run(args: argparse.Namespace) -> int:
    from cosmos_predict2.configs.rl.imagination import fit_of, imagination_of
    from cosmos_predict2.data.lerobot.reader import LeRobotSource
    from cosmos_predict2.data.split import make_split, recorded_outcomes, require_usable, split_of
    from cosmos_predict2.data.views import require_same, views_of
    from cosmos_predict2.rl.envs import suites
    from cosmos_predict2.rl.envs.replays import with_actions_of
    from cosmos_predict2.rl.imagined import check
    from cosmos_predict2.rl.imagined.verdict import judge, require_known, table
    from cosmos_predict2.rl.policies.files import read_policy
    from cosmos_predict2.rl.rewards.resnet import read_reward
    from cosmos_predict2.rl.trust import Card, counting, digest, write_card
    from cosmos_predict2.world_model.assembly import device_of, part_digest

    require_known(args.allow)
    if args.suite and not args.policy:
        raise ConfigError("--suite needs --policy: whose attempts are to be played there.")
    device, seed = device_of(args.device), args.seed
    source = LeRobotSource.open(args.data)
    split = split_of(args.split, source) if args.split else make_split(args.data, success_column=args.success_column)
    names = ["policy"] if len(args.policy) == 1 else [f"policy/{i + 1}" for i in range(len(args.policy))]
    policies = dict(zip(names, args.policy, strict=True))
    options = command_line.key_values(args.options, "--options")
    inputs = {name: digest(path, **counting("policy", options)) for name, path in policies.items()}
    inputs["reward"] = digest(args.reward)
    inputs["world_model"] = digest(args.world_model, load_ema=args.load_ema)
    imagination = imagination_of(args.world_model, load_ema=args.load_ema, device=device)
    inputs |= {"tokenizer": part_digest(imagination.world.tokenizer)[:16], "split": split.digest[:16]}
    source = with_actions_of(source, imagination)
    require_usable(source, args.camera)
    require_same(imagination.views, views_of(args.camera), "The world model", "--camera", "give its cameras.")
    reward = read_reward(args.reward)
    chunk, fit = imagination.config.chunk_size, fit_of(args.world_model)

    has_column = args.success_column in source.info.features
    ends = recorded_outcomes(source, args.success_column, last=True) if has_column else split.outcomes
    learnt = check.read_episodes(source, args.camera, check.chosen(split.train, LEARNT, seed), split.outcomes, 0, fit)
    held_out = check.chosen(split.held_out, args.episodes, seed)
    episodes = check.read_episodes(source, args.camera, held_out, ends, chunk, fit)
    figures, films = check.replays(imagination, reward, episodes, seed)
    figures |= check.obedience(films, episodes, learnt, chunk)
    figures |= {"leaks": check.leaks(args.world_model, args.reward, split), "allowed": args.allow}
    by_policy: dict[str, dict[str, Any]] = {}
    for name, path in policies.items():
        found, policy_card = read_policy(path, options=options)
        policy = found.to(imagination.world.device)
        of_successes = figures["values_of_successes"]
        one = check.policy_figures(policy, imagination, reward, episodes, learnt, seed, of_successes)
        one |= check.clone_figures(policy_card.about)
        if args.suite:
            height = source.frames(0, source.camera(args.camera), [0]).shape[-2] // len(imagination.views)
            drawn = suites.size_of_recordings(args.suite, height)
            with closing(suites.find(args.suite, **drawn).env(check.AT_ONCE, policy)) as env:
                one |= check.true_attempts(policy, env, imagination, reward, learnt, seed, fit)
            one["imagined_above_true"] = one["greedy_imagined_success"].less(one["greedy_success_once"])
        by_policy[name] = one
    if args.played:
        played = with_actions_of(LeRobotSource.open(args.played), imagination)
        outcomes = recorded_outcomes(played, args.success_column, last=True)
        own = check.read_episodes(played, args.camera, range(len(played)), outcomes, 0, fit)
        figures |= check.played_figures(imagination, reward, own, seed)
        if len(policies) == 1 and not args.suite:  # else whose episodes these are is not known, or more is
            one = by_policy["policy"]
            one["imagined_above_true"] = one["greedy_imagined_success"].less(figures["played_success"])
    judged = judge(figures, by_policy, args.allow)

    places = {"world_model": args.world_model, "reward": args.reward, **policies}
    content = {**figures, **by_policy}
    card = Card(judged.verdict, judged.reasons, content, inputs, judged.next_step, places, parser.command())
    write_card(Path(args.out), card)
    print(f"{judged.verdict}: {judged.sentence}")
    print(table(judged.lines))
    for text in judged.warnings:
        print(f"note: {text}.")
    print(f"next: {judged.next_step}. Card: {args.out}")
    return int(judged.verdict == "no")


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
