# SPDX-License-Identifier: Apache-2.0
"""Pictures of the toy world with success known: what a success classifier learns from, and is measured on.

Drivers of all skills, and the policy that will be judged, act in the simulator; the same actions are imagined. So there
are successes, failures and near misses, on true pictures, on those that passed the tokenizer, and on imagined ones.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.rl.envs.replays import round_trip
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.episodes import Starts
from cosmos_predict2.rl.episodes.policy_evaluation import evaluate, film, held_out_starts
from cosmos_predict2.rl.interfaces import Policy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.rl.rewards.success_training import OUTCOME, ROUND_TRIP, LabelledPictures
from cosmos_predict2.toy_world.episodes import Mix, make_episodes
from cosmos_predict2.toy_world.physics import REWARD_RANGE
from cosmos_predict2.world_model.imagination import Imagination

Played = tuple[Starts, Tensor]  # and the actions that were chosen there, [M, E, A, D]
_SKILLS = {"expert": (0.6, 1.0), "noisy": (0.1, 0.6), "push": (0.5, 1.0)}
DRIVERS = Mix({"expert": 0.4, "noisy": 0.35, "push": 0.25}, _SKILLS, ring_elsewhere=0.0)
TASK = "push_puck"
SIMULATOR, SHOWN = "simulator", "imagined"

_NEAR_PX = 8.0  # a puck this near to the goal that is not there is a near miss
_TOGETHER = 100  # episodes


def by_drivers(num: int, split: str, first: int, seed: int, setting: str = "default") -> Played:
    """Episodes of drivers of all skills."""
    starts = held_out_starts(num, 1, seed, first)
    episodes = make_episodes(num, 0, mix=DRIVERS, setting=setting, first=SPLITS[split] + first)
    env = ToyEnv(1, setting)
    actions_E_M_A_D = torch.from_numpy(episodes.actions).unflatten(1, (-1, env.metadata["chunk"]))
    return starts, actions_E_M_A_D.transpose(0, 1).contiguous()


def by_policy(policy: Policy, num: int, split: str, first: int, seed: int, setting: str = "default") -> Played:
    """Episodes of a policy that samples."""
    starts = held_out_starts(num, 1, seed, first)
    env = ToyEnv(min(num, _TOGETHER), setting, split=split)
    return starts, evaluate(policy, env, starts, [TASK], "sample").played.actions_M_E_A_D


def labelled(
    played: Played, split: str, imagination: Imagination | None, setting: str = "default"
) -> Mapping[str, LabelledPictures]:
    """The pictures after each action by their source, the simulator's rule having labelled them.

    Imagined pictures are there twice: labelled by what they show (the detector sees the puck, and the goal is known),
    and by how the simulator's episode of the same actions stood at this step.
    """
    starts, actions = played
    together = min(len(starts), _TOGETHER)
    env = ToyEnv(together, setting, split=split, reward_on="each")
    true, reward_E_F = film(env, starts, actions)
    found = {SIMULATOR: _pictures(true[:, :, 1:], reward_E_F)}
    if imagination is None:
        return found
    coded = round_trip(imagination, true.permute(0, 2, 3, 4, 1), batch_size=len(true))
    found[ROUND_TRIP] = _pictures(coded.permute(0, 4, 1, 2, 3), reward_E_F)
    judge, toy_starts = ToyDetectorReward(setting), ToyStarts(setting, split=split)
    given = (imagination, toy_starts, judge, together, env.metadata["max_steps"])
    imagined_env = WorldModelEnv(*given, scoring=Scoring(judge="last", reward_on="last"))
    imagined = film(imagined_env, starts, actions)[0][:, :, 1:]
    goal = toy_starts.starts(starts.task_ids, starts.trial_ids).context["goal"]
    shown = judge.judge(imagined.permute(0, 2, 3, 4, 1), {"goal": goal})
    found[SHOWN] = _pictures(imagined, shown.value_E_F)
    found[OUTCOME] = _pictures(imagined, reward_E_F)
    return found


def _pictures(video_E_C_F_H_W: Tensor, reward_E_F: Tensor) -> LabelledPictures:
    """The dense reward holds both: it is above 0 where the task is done, else minus the distance."""
    reward_N = reward_E_F.flatten()
    pictures_N_H_W_C = video_E_C_F_H_W.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous()
    return LabelledPictures(pictures_N_H_W_C, reward_N > 0, (reward_N <= 0) & (reward_N > -_NEAR_PX / REWARD_RANGE))
