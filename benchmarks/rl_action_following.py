# SPDX-License-Identifier: Apache-2.0
"""Learning of the tiny model with actions by an action-following reward, compared with the simulator.

    python -m benchmarks.rl_action_following                          # seed 0
    python -m benchmarks.rl_action_following --seeds 0 1 -- trainer.max_iter=60

Windows of actions of chance that no training saw, imagined from their first frame; and the same with the actions of
another window, so that there are clips that do not follow. Figures: the mean distance in pixels of gripper and puck
from where the simulator has them, and a verdict, "the clip follows its actions", beside the simulator's, whose gripper
is less than a pixel away: how often they agree, and how often clips that do not follow get it. The verdict is that of a
regression that reads actions (`ActionFollowing`, which is no reward of these runs); it accepts 95 % of true clips as
the tokenizer leaves them.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.rl_learning import train
from cosmos_predict2.configs.action_conditioned.networks import choose_action_model
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.evaluation.metrics.imagined_episodes import (
    BATCH,
    EpisodeParts,
    coded,
    held_out_episodes,
    windows_of,
)
from cosmos_predict2.released import tiny_action_path
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.action_following import ActionFollowing
from cosmos_predict2.rl.rewards.toy import LOST_PX, seen
from cosmos_predict2.toy_world.physics import GRIPPER, object_position
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.options import ActionModel, SamplingOptions
from cosmos_predict2.world_model.world_model import WorldModel, build_world_model

EXPERIMENTS = ("tiny_flow_grpo_action_toy_world", "tiny_nft_action_toy_world")
GAIN_PX, RISE = 0.1, 0.02  # the least fall of the gripper's error, and the most that false positives may rise
FOLLOWS_PX = 1.0  # a clip follows where the simulator's gripper is not further away, in the mean over its frames
ACCEPTED = 0.95  # of true clips
NUM_WINDOWS, SEED_OF_WINDOWS = 200, 7
MIXES = ("wander", "mixed")  # what is trained, and what the base was trained on
STEPS = 1


def measure(world: WorldModel, windows: EpisodeParts, judge: "ActionJudge") -> dict[str, float]:
    """The figures of one set of weights."""
    own = windows.action_B_A_D
    video, other = (imagined(world, windows, actions) for actions in (own, own.roll(1, 0)))
    gripper = thing_px(video, windows, "gripper")
    follows = torch.from_numpy(numpy.concatenate([gripper, thing_px(other, windows, "gripper")]) < FOLLOWS_PX)
    accepted = torch.cat([judge.accepts(video, own), judge.accepts(other, own)])
    return {
        "gripper_px": float(gripper.mean()),
        "puck_px": float(thing_px(video, windows, "puck").mean()),
        "follows": float(follows[: len(windows)].float().mean()),
        "agreement": float((accepted == follows).float().mean()),
        "false_positives": float(accepted[~follows].float().mean()),
    }


class ActionJudge:
    """Accepts clips from which a regression reads their actions."""

    def __init__(self, world: WorldModel, windows: EpisodeParts) -> None:
        data = ToyWorldVideos(num_episodes=512, mix="mixed", captions=False, num_tokens=1, seed=11)
        self._reward = ActionFollowing(data, num_clips=len(data))
        true = self._score(coded(windows.video_B_C_F_H_W, world), windows.action_B_A_D)
        self._least = float(true.quantile(1 - ACCEPTED))

    def accepts(self, video: Tensor, actions: Tensor) -> Tensor:
        return self._score(video, actions) > self._least

    def _score(self, video: Tensor, actions: Tensor) -> Tensor:
        clips = Clips(None, video, [""] * len(video), 10.0)
        context = dict(actions=actions, num_conditional_frames=torch.ones(len(video), dtype=torch.long))
        return self._reward(clips, context)["value"]


def weights(path: str, which: str) -> WorldModel:
    config = choose_action_model(ActionModel(dit_path=tiny_action_path())).config  # whose network a run keeps
    return build_world_model(config, dtype=torch.float32).load(path, which)


def imagined(world: WorldModel, windows: EpisodeParts, actions: Tensor) -> Tensor:
    """uint8 videos from the windows' first frames."""
    first, seeds = windows.video_B_C_F_H_W[:, :, :1], range(len(windows))
    options = SamplingOptions(num_steps=STEPS)
    return Imagination(world).generate_actions(first, actions, seeds, options, batch_size=BATCH).cpu()


def thing_px(video: Tensor, windows: EpisodeParts, thing: str) -> Any:
    """The distance of a thing from the simulator's, the mean over the frames after the first; [B]."""
    true = windows.states[:, 2:, GRIPPER if thing == "gripper" else object_position(0)]
    found = seen(video[:, :, 1:].float()).position[thing]
    distance = numpy.linalg.norm(found - true, axis=-1)
    return numpy.nan_to_num(distance, nan=LOST_PX).mean(axis=1)


def missed(row: Mapping[str, float], base: Mapping[str, float]) -> list[str]:
    """The goals that were not reached."""
    found = {
        "gripper": base["gripper_px"] - row["gripper_px"] >= GAIN_PX,
        "agreement": row["agreement"] >= base["agreement"],
        "false positives": row["false_positives"] - base["false_positives"] <= RISE,
    }
    return [name for name, is_reached in found.items() if not is_reached]


def main() -> int:
    flags = ("experiment", "seeds", "output", "checkpoint", "overrides")
    arguments = machine.parse(machine.parser(__doc__, *flags, experiment=list(EXPERIMENTS), seeds=[0]))
    base = weights(tiny_action_path(), "auto")
    windows = {mix: windows_of(held_out_episodes(NUM_WINDOWS, seed=SEED_OF_WINDOWS, mix=mix)) for mix in MIXES}
    judges = {mix: ActionJudge(base, windows[mix]) for mix in MIXES}
    rows = {mix: measure(base, windows[mix], judges[mix]) for mix in MIXES}
    for mix in MIXES:
        machine.report_row(f"base, {mix}", 0.0, rows[mix], rows[mix], [])
    runs = [(path, path, 0.0) for path in arguments.checkpoint] or [
        (f"{experiment} seed {seed}", *train(experiment, seed, arguments.output, arguments.overrides))
        for experiment in arguments.experiment
        for seed in arguments.seeds
    ]
    for name, path, seconds in runs:
        world = weights(path, "net_ema")
        for mix in MIXES:
            row, base_row = measure(world, windows[mix], judges[mix]), rows[mix]
            machine.report_row(f"{name}, {mix}", seconds, row, base_row, missed(row, base_row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
