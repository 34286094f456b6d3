# SPDX-License-Identifier: Apache-2.0
"""Look at an environment before anything is recorded in it: what a policy sees and does there, and the rules that every
environment has to keep, such as that a seed decides the start, and that equal actions lead to equal pictures.
"""

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line

EPISODES = 3  # of random actions, each from a start of its own
PLACES = 3  # that the rules need

_EPILOG = """\
exit code: 1 where a rule is broken or all starts are the same, 2 where the environment cannot be played

examples:
  python -m scripts.check_environment --suite gym:dot_robot:Dot-v0 --save_path output/dot.png
  python -m scripts.check_environment --suite "gym:gym_pusht:gym_pusht/PushT-v0?image_size=96&actions=native"
"""

parser = command_line.parser("scripts.check_environment", __doc__, _EPILOG)
add = parser.add_argument
add("--suite", required=True, metavar="E", help="gym:ID, gym:MODULE:ID, MODULE:CLASS, ...")
add("--save_path", type=command_line.file_to_write, metavar="FILE", help="a .png with pictures of random episodes")


def run(args: argparse.Namespace) -> int:
    from cosmos_predict2.rl.envs.simulators.workers import WorkerError
    from cosmos_predict2.rl.interfaces import ContractError
    from imaginaire.errors import ConfigError

    try:
        return look(args)
    except (ContractError, WorkerError) as error:
        found = error if isinstance(error, WorkerError) else error.__cause__
        if not isinstance(found, WorkerError):
            print(f"broken rule: {error}")
            return 1
        cure = "Mend it"
        if found.is_in_episode:
            cure += ", or end the episode there (terminated): elsewhere such an episode is lost"
        raise ConfigError(f"{args.suite}: {found.what.rstrip('.')}. {cure}.\n{found.traceback.rstrip()}") from found


def look(args: argparse.Namespace) -> int:
    """The exit code after all that is printed; raises the first exception of the environment, or for a broken rule."""
    import torch

    from cosmos_predict2.data.video import media
    from cosmos_predict2.rl.envs import suites
    from cosmos_predict2.rl.envs.contract import RULES, check_environment
    from cosmos_predict2.tools.check.classic_faults import ELSEWHERE, JUMP_ROWS, begins_elsewhere
    from cosmos_predict2.tools.check.episodes import small_grey

    place = suites.find(args.suite)
    films, start_s, action_s, num_actions, successes = [], 0.0, 0.0, 0, 0
    with closing(built(place, 1, chunk=1)) as env:
        about = env.metadata
        low, high = (torch.as_tensor(about.get(f"action_{end}", one)) for end, one in (("low", -1.0), ("high", 1.0)))
        for trial in range(EPISODES):
            before = time.monotonic()
            observed, info = env.reset(options={"trial_ids": [trial]})
            start_s += time.monotonic() - before
            film = [observed["full_image"][0]]
            generator = torch.Generator().manual_seed(trial)
            before = time.monotonic()
            while bool(info["active"].any()):
                drawn = torch.rand(1, 1, about["action_dim"], generator=generator)
                observed, _, _, _, info = env.chunk_step(low + drawn * (high - low))
                film.append(observed["full_image"][0])
            action_s += time.monotonic() - before
            num_actions += len(film) - 1
            successes += int(info["success"].sum())
            films.append(torch.stack(film).permute(3, 0, 1, 2))
    different = len({film[:, 0].numpy().tobytes() for film in films})
    unit = f"from {low.min():.4g} to {high.max():.4g}"
    if (own := (min(about.get("scaled_low", [-1])), max(about.get("scaled_high", [1])))) != (-1, 1):
        unit += f", which are {own[0]:.4g} to {own[1]:.4g} of the environment"
    print(f"{args.suite}")
    print(f"  actions   {about['action_dim']} numbers {unit}; at most {about['max_steps']} in an episode")
    print(f"  pictures  height {films[0].shape[2]}, width {films[0].shape[3]}; {different} of {EPISODES} starts differ")
    cheap = ": does it ask for the task? By this a policy is measured" if successes == EPISODES else ""
    print(f"  success   {successes} of {EPISODES} episodes of random actions{cheap}")
    first = [small_grey(film) for film in films if film.shape[1] >= JUMP_ROWS]
    if len(first) == EPISODES and all(map(begins_elsewhere, first)):
        print(f"  start     the first picture is unlike all later ones: {ELSEWHERE}.")
    print(f"  time      {action_s / num_actions:.2g} s an action with its picture, {start_s / EPISODES:.2g} s a start")
    if args.save_path:
        media.write_image(args.save_path, media.contact_sheet(films, [f"start {i}" for i in range(EPISODES)]))
        print(f"  look      {args.save_path}")
    check_environment(built(place, PLACES, chunk=2))
    print(f"keeps all {len(RULES)} rules")
    return int(different == 1)


def built(place: Any, num_envs: int, chunk: int) -> Any:
    """An environment for actions of any width, whose first exception is raised here."""
    from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv

    env = place.env(num_envs, SimpleNamespace(action_dim=None, chunk=chunk, sentences=()))
    if isinstance(env, WorkerEnv):
        env.max_deaths = 0  # otherwise it goes on without an episode or two
    return env


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
