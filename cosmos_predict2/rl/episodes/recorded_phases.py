# SPDX-License-Identifier: Apache-2.0
"""Phases of a refinement whose true episodes are recorded: a robot plays the present policy while the run waits.

Phase 1 reads the LeRobot data set FOLDER/phase_001, and so on. The run ends where one is not there yet, with its state
saved and a message that names what to play and where to write it; started again, it goes on from there.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import recorded_outcomes
from cosmos_predict2.evaluation.metrics.agreement import area_under_curve
from cosmos_predict2.rl.envs.replays import replayed
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.config import RefinementConfig
from cosmos_predict2.rl.episodes.policy_evaluation import Comparison
from imaginaire.config import lazy_config
from imaginaire.config.names import takes, target_of
from imaginaire.errors import DataError

Outcome = tuple[bool, bool, float]  # of an episode: true success, imagined success, and the imagined value


def open_phase(
    config: RefinementConfig,
    phase: int,
    policy: str,
    num_frames: int,
    picture: Sequence[int],
    transform: ActionTransform,
) -> LeRobotActionDataset:
    """The episodes of a phase, read as ``config.data`` reads those that the world model was trained on; raises where
    they were not played yet. ``policy`` is the run whose newest checkpoint plays them."""
    folder = Path(config.recordings) / f"phase_{phase:03d}"
    count = len(LeRobotSource.open(folder)) if (folder / "meta" / "info.json").is_file() else 0
    if count < config.episodes:
        raise DataError(
            f"Phase {phase} of the refinement waits for true episodes: {folder} has {count} of {config.episodes}"
            f" (model.config.refinement.episodes). Play the policy of {policy}, whose newest checkpoint is the present"
            " one, and record each episode there, a LeRobot data set with next.success; in a simulator: python -m"
            f" scripts.collect --suite SUITE --policy {policy} --episodes {config.episodes} --first"
            f" {phase * 10**5} --out {folder}. Then start this run again: it goes on from here."
        )
    own: dict[str, Any] = dict(root=str(folder), num_frames=num_frames, video_size=list(picture), text_width=1)
    own |= dict(data_split="full", split_file=None, action_transform=transform, load_t5_embeddings=False)
    if config.data is not None and "root" in takes(target_of(config.data))[0]:
        found: LeRobotActionDataset = lazy_config.instantiate(config.data, **own)
        return found
    return LeRobotActionDataset(**own)


def outcomes(
    data: LeRobotActionDataset, env: WorldModelEnv, column: str, seed: int, episodes: Sequence[int]
) -> Iterator[Outcome]:
    """The true outcome of each of these episodes where it is known, and the imagined one of its actions from the first
    picture."""
    source, true = data.source, recorded_outcomes(data.source.files, column)
    by_length: dict[int, list[int]] = {}
    for i in episodes:
        if true[i] is not None and (length := (int(source.lengths[i]) - 1) // data.stride):
            by_length.setdefault(length, []).append(i)
    for length, numbers in by_length.items():
        frames = data.stride * numpy.arange(length + 1)
        actions = torch.from_numpy(numpy.stack([source.actions(i, frames) for i in numbers])).float()
        with_first = [data.first_picture(i) for i in numbers]
        video = replayed(
            env.imagination,
            torch.stack(with_first),
            actions,
            seeds=[(seed + i) % 2**31 for i in numbers],
            num_steps=env.sampling.num_steps,
        )
        tasks = {"task_description": [source.files.caption(i) for i in numbers]}
        judged = env.reward.judge(video[:, -1:], tasks)
        values, successes = judged.value_E_F[:, -1].tolist(), judged.success_E_F[:, -1].tolist()
        yield from ((bool(true[i]), bool(one), value) for i, one, value in zip(numbers, successes, values, strict=True))


def figures(found: Sequence[Outcome]) -> dict[str, float]:
    """Imagined against true success, and how well imagined values separate the outcomes (0.5: not at all)."""
    if not found:
        return {}
    true, imagined, value = (Tensor(column) for column in zip(*found, strict=True))
    compared = Comparison.of(imagined, true, torch.ones(len(found), dtype=torch.bool))
    named = {
        "robot_success": compared.true_rate,
        "robot_imagined_success": compared.imagined_rate,
        "robot_agreement": compared.agreement,
        "robot_imagined_value": float(value.mean()),
        "robot_area": area_under_curve(value.double().numpy(), true.bool().numpy()).value,
    }
    return {name: one for name, one in named.items() if math.isfinite(one)}
