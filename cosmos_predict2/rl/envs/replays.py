# SPDX-License-Identifier: Apache-2.0
"""Recorded actions, imagined from the first pictures of their episodes: what a reward and a gate are measured on.

    video = replayed(imagination, first_pictures, actions, seeds=range(len(actions)))    # [E, L + 1, H, W, 3]

Pictures are those that a policy learns from with the same seeds and actions: `WorldModelEnv` imagines them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.rl.envs.first_frames import GivenStarts
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.interfaces import FrameRewardDefaults, Judgement
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire.errors import DataError
from imaginaire.log import Progress

BATCH = 32  # episodes that are imagined together


class ZeroReward(FrameRewardDefaults):
    """Pictures are wanted, and nothing is paid."""

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        nothing = torch.zeros(frames_E_F_H_W_C.shape[:2])
        return Judgement(nothing, nothing.bool())


def whole_chunks(
    num_actions: Sequence[int], chunk: int, together: Callable[[int], int] = lambda count: BATCH
) -> Iterator[tuple[int, list[int]]]:
    """Episodes of as many chunks: the number of their actions with a full last chunk, and so many that are imagined
    together, by their places in the list."""
    counts = [-(-number // chunk) * chunk for number in num_actions]
    for count in sorted(set(counts)):
        group, step = [i for i, other in enumerate(counts) if other == count], together(count)
        yield from ((count, group[k : k + step]) for k in range(0, len(group), step))


def held(actions_L_D: Tensor, count: int) -> Tensor:
    """The last action again behind the others, as `WorldModelEnv` fills a chunk."""
    return torch.cat([actions_L_D, actions_L_D[-1:].expand(count - len(actions_L_D), -1)])


def rested(actions_L_D: Tensor, count: int, has_motions: bool) -> Tensor:
    """Behind these actions no motion, but of four numbers or more the last, a gripper's; or the last place again."""
    longer = held(actions_L_D, count)
    if has_motions:
        longer[len(actions_L_D) :, : -1 if longer.shape[1] > 3 else None] = 0
    return longer


def recorded_actions(source: LeRobotSource, i: int) -> Tensor:
    """[F - 1, D], the raw actions of an episode that lead from one picture to the next."""
    rows = source.parts(i, source.action_parts())
    return torch.from_numpy(rows.astype(numpy.float32))[: int(source.episodes.lengths[i]) - 1]


def action_keys_in(source: LeRobotSource, imagination: Imagination) -> tuple[str, ...] | None:
    """The columns of recordings that make an action of the world model; None where they are one, as `scripts.collect`
    records them."""
    keys, known = tuple(imagination.action_keys or ()), {*source.info.features, *source.info.modality.action}
    return keys if keys and known.issuperset(keys) else None


def with_actions_of(source: LeRobotSource, imagination: Imagination) -> LeRobotSource:
    """The recordings with the columns that make an action of the world model. Raises where their actions are not its
    own, or a first picture is not enough for it."""
    source = replace(source, action_keys=action_keys_in(source, imagination))
    require_actions(source, imagination.config)
    return source


def require_actions(source: LeRobotSource, config: Video2WorldActionPipelineConfig) -> None:
    """Raise where the actions of recordings are not those of a world model, or a first picture is not enough for it."""
    parts, transform = source.action_parts(), config.require_transform()
    found, wanted = source.width(parts), transform.dim
    if found != wanted:
        wrong = f"{source.info.root}: its actions have {found} numbers, but those of the world model have {wanted}"
        raise DataError(f"{wrong}. Give a world model that was trained on these recordings (--world_model).")
    what, cure = f"{source.info.root} has", "give one that was trained on each row of these recordings, without stride."
    transform.contract.require(source.action_contract(parts), "The world model", what, cure)
    config.require_conditioning(1)


def replayed(
    imagination: Imagination,
    pictures_E_H_W_C: Tensor,
    actions_E_L_D: Tensor,
    *,
    seeds: Sequence[int],
    num_steps: int = 1,
    batch_size: int = BATCH,
) -> Tensor:
    """Whole episodes of raw actions imagined from their first pictures, uint8 [E, L + 1, H, W, 3], the first included.

    An episode's noise follows from its seed. ``num_steps`` evaluations of the network make a chunk; ``batch_size``
    episodes are imagined together. A last chunk that is short is filled as `WorldModelEnv` does it.
    """
    size, length = actions_E_L_D.shape[:2]
    if not len(pictures_E_H_W_C) == len(seeds) == size > 0 or not length:
        found = f"{len(pictures_E_H_W_C)} first pictures, {size} sequences of {length} actions and {len(seeds)} seeds"
        raise DataError(f"{found}: one of each is expected for every episode, of at least one action.")
    given = (imagination, GivenStarts(pictures_E_H_W_C), ZeroReward(), min(batch_size, size), length)
    sampling = replace(ONE_EVALUATION, num_steps=num_steps)
    env = WorldModelEnv(*given, sampling=sampling, clip_actions=False, keep_frames=True)  # in the recordings' units
    video_E_F_H_W_C = torch.empty(size, 1 + length, *pictures_E_H_W_C.shape[1:], dtype=torch.uint8)
    with Progress("recorded actions, imagined", size, unit="episode", leave=False) as progress:
        for numbers in torch.arange(size).split(env.num_envs):
            ids, trials = list(range(len(numbers))), numbers.tolist()
            options = dict(env_ids=ids, task_ids=[0] * len(ids), trial_ids=trials, seeds=[seeds[i] for i in trials])
            env.reset(options=options)
            video_E_F_H_W_C[numbers, 0] = pictures_E_H_W_C[numbers].cpu()
            done = 1
            for actions_E_A_D in actions_E_L_D[numbers].split(env.new_frames, dim=1):
                info = env.chunk_step(actions_E_A_D, ids)[-1]
                video_E_F_H_W_C[numbers, done : done + actions_E_A_D.shape[1]] = info["frames"].cpu()
                done += actions_E_A_D.shape[1]
            progress.update(len(numbers))
    return video_E_F_H_W_C


@torch.no_grad()
def round_trip(imagination: Imagination, pictures_E_F_H_W_C: Tensor) -> Tensor:
    """Pictures as the tokenizer leaves them, clip by clip as they are imagined: all but the first, on the host."""
    world, chunk = imagination.world, imagination.config.chunk_size
    count = pictures_E_F_H_W_C.shape[1] - 1
    coded_E_F_H_W_C = torch.empty_like(pictures_E_F_H_W_C[:, 1:], device="cpu")
    for rows in torch.arange(len(pictures_E_F_H_W_C)).split(BATCH):
        for k in range(0, count, chunk):
            clip = pictures_E_F_H_W_C[rows, k : k + chunk + 1].permute(0, 4, 1, 2, 3)
            rest = clip[:, :, -1:].expand(-1, -1, chunk + 1 - clip.shape[2], -1, -1)
            video = to_uint8(world.decode(world.encode(torch.cat([clip, rest], dim=2)))).cpu()
            coded_E_F_H_W_C[rows, k : k + chunk] = video.permute(0, 2, 3, 4, 1)[:, 1 : clip.shape[2]]
    return coded_E_F_H_W_C
