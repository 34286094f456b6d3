# SPDX-License-Identifier: Apache-2.0
"""Episodes of a policy in an environment as recordings, one at a time: what a world model, a reward and a clone learn
from.

    for recording, succeeded in recorded_episodes(policy, env, starts):
        writer.add(recording)

Only episodes that are being played are in memory. They are stepped action by action, so that every picture has its own
success, and come in the order in which they end.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot.writer import COUNTERS, Recording
from cosmos_predict2.data.split import SUCCESS_COLUMN
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.rl.episodes.episodes import Places, Starts, lost
from cosmos_predict2.rl.interfaces import EnvDefaults, Info, Mode, Observation, Policy, VecEnv, completed
from imaginaire import random
from imaginaire.errors import ConfigError, DataError

CAMERA, WRIST = "observation.images.front", "observation.images.wrist"
REWARD_COLUMN, DONE_COLUMN = "next.reward", "next.done"
_STATE_COLUMN, _IMAGES = "observation.state", "observation.images."
_PICTURES, _WRISTS, _STATE, _TASK = "full_image", "wrist_image", "state", "task_description"


@dataclass
class _PlayedEpisode:
    """An episode up to now: what was seen, before each action and after the last one, and what was done."""

    task: str
    seen: dict[str, list[Tensor]] = field(default_factory=lambda: {_PICTURES: [], _WRISTS: [], _STATE: []})
    actions: list[Tensor] = field(default_factory=list)
    success: list[bool] = field(default_factory=lambda: [False])  # of each picture
    rewards: list[float] = field(default_factory=list)  # of each action
    num_decisions: int = 0

    def see(self, observation: Observation, row: int) -> None:
        for name, values in self.seen.items():
            values.append(observation[name][row].cpu().clone())

    def recording(self, camera: str) -> Recording:
        """A row for each picture; row k's action leads from picture k to the next one, the last row repeats it. Success
        is of the picture, and the reward of the action, as lerobot has it: the last row has none."""
        actions = [*self.actions, self.actions[-1]]
        columns = {"action": torch.stack(actions).numpy(), SUCCESS_COLUMN: numpy.array(self.success)}
        columns[REWARD_COLUMN] = numpy.array([*self.rewards, 0.0], numpy.float32)
        columns[DONE_COLUMN] = numpy.arange(len(actions)) == len(self.actions)
        if self.seen[_STATE][0].numel():
            columns[_STATE_COLUMN] = torch.stack(self.seen[_STATE]).float().numpy()
        films = [torch.stack(self.seen[_PICTURES]), *torch.stack(self.seen[_WRISTS]).unbind(1)]
        names = _cameras(camera, len(films))
        cameras = dict(zip(names, films, strict=True))
        return Recording(columns, {name: film.permute(3, 0, 1, 2) for name, film in cameras.items()}, self.task)


def require_columns(names: Collection[str], observation: Observation, camera: str, where: str) -> None:
    """Refuse recordings whose columns or cameras episodes that are played in an environment do not have."""
    columns = {"action", SUCCESS_COLUMN, REWARD_COLUMN, DONE_COLUMN, *COUNTERS}
    shown = columns | {*_cameras(camera, 1 + observation[_WRISTS].shape[1])}
    if observation[_STATE].shape[1:].numel():
        shown.add(_STATE_COLUMN)
    if absent := [name for name in names if name not in shown]:
        cure = "--camera A+B, and gym:ID?wrist=CAMERA" if absent[0].startswith(_IMAGES) else ""
        cure = "gym:ID?state=ENTRY" if absent[0] == _STATE_COLUMN else cure
        raise DataError(
            f"{where} has '{absent[0]}', which episodes that are played in this suite do not have."
            f"{f' Let the suite show it ({cure}), or leave it out' if cure else ' Leave it out'} of the recordings"
            " (lerobot-edit-dataset has an operation for it, remove_feature)."
        )


def _cameras(camera: str, num_films: int) -> list[str]:
    """Names of the pictures that an environment shows; wrist views that are not named have one of their own."""
    names = cameras_in(camera)
    if len(names) > num_films:
        raise ConfigError(f"camera={camera}: the environment shows {num_films} of these {len(names)} cameras.")
    return names + [WRIST + (f"_{k}" if k > 1 else "") for k in range(len(names), num_films)]


@torch.no_grad()
def recorded_episodes(
    policy: Policy,
    env: VecEnv,
    starts: Starts,
    mode: Mode = "sample",
    execute: int | None = None,
    camera: str = CAMERA,
    *,
    is_last: bool = False,
) -> Iterator[tuple[Recording | None, bool]]:
    """The recording of each episode, and its success on any picture, or on the last one; None of one that was lost with
    its simulator or its policy's server."""
    completed(env, EnvDefaults)
    places, playing = Places(env, starts), dict[int, _PlayedEpisode]()
    bounds = {"action_low": -1.0, "action_high": 1.0}
    low, high = (torch.as_tensor(env.metadata.get(name, usual)) for name, usual in bounds.items())
    while not places.are_done:
        if places.are_due:
            begun, observation = places.begin()
            for row, number in enumerate(begun):
                playing[number] = _PlayedEpisode(observation[_TASK][row])
                playing[number].see(observation, row)
        episodes = [playing[number] for number in places.episodes]
        counts = [(starts.draws[number], playing[number].num_decisions) for number in places.episodes]
        generators = [random.generator(draw, count, "decision") for draw, count in counts]
        decision = policy.act(places.observation, mode=mode, generators=generators)
        decided, lost_E = decision.actions_E_A_D.cpu(), lost(decision)
        active_E, observation = ~lost_E, places.observation
        info: Info = {}
        for actions_E_D in decided[:, :execute].unbind(1):
            if not active_E.any():
                break
            observation, reward, _, _, info = env.chunk_step(actions_E_D[:, None], places.ids)
            for row in info["executed"][:, 0].nonzero().flatten().tolist():
                episodes[row].actions.append(actions_E_D[row].float().clamp(low, high))
                episodes[row].success.append(bool(info["success"][row]))
                episodes[row].rewards.append(float(reward[row, 0]))
                episodes[row].see(observation, row)
            active_E = info["active"].cpu()
        is_over_E, is_valid_E = ~active_E | lost_E, ~lost_E & info.get("valid", torch.tensor(True)).cpu()
        for row, (number, episode) in enumerate(zip(places.episodes, episodes, strict=True)):
            episode.num_decisions += 1
            if is_over_E[row]:
                del playing[number]
                is_whole = bool(is_valid_E[row])
                is_success = episode.success[-1] if is_last else any(episode.success)
                yield (episode.recording(camera) if is_whole else None), is_whole and is_success
        places.go_on(observation, is_over_E)
