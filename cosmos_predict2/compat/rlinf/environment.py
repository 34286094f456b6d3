# SPDX-License-Identifier: Apache-2.0
"""The world-model environment as RLinf publishes it: its calls, its names, and its differences from ours.

    env = RLinfWorldModelEnv(imagination, RecordedStarts(dataset, by_task=False), reward, num_envs=64, group_size=8)
    obs, info = env.reset()
    obs, rewards, terminations, truncations, info = env.chunk_step(actions)    # [N, 8, 7], scaled by the model's card

The differences from `WorldModelEnv`: all episodes have one length, and none ends early. A success is flagged again in
every chunk that shows it. Starts are drawn by group from a generator of the environment, and the noise of an
environment depends on its micro-batch. A short chunk is filled up with zeros. Pixels are cut to bytes and not rounded;
a reward with ``takes_floats = True`` sees them before that, in [-1, 1].
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.first_frames import StartPictures
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.interfaces import FrameReward
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.options import SamplingOptions
from imaginaire.checkpoint.plain_pickle import FAULTS
from imaginaire.errors import CheckpointError, ConfigError, DataError, raised_as

STATE_SIZE = 16  # zeros


class RLinfWorldModelEnv:
    """Published calls over `WorldModelEnv`; arguments have their published names.

    ``condition_frame_length`` and ``ignore_terminations`` have no effect, as published. ``auto_reset`` resets all
    environments as soon as one is done. Only the first reset of a rollout (`is_start`) draws by group, and only with
    ``use_fixed_reset_state_ids``; any other draws different starts for all.
    """

    def __init__(
        self,
        imagination: Imagination,
        starts: StartPictures,
        reward: FrameReward,
        num_envs: int,
        *,
        group_size: int = 1,
        seed: int = 0,
        seed_offset: int = 0,
        chunk: int = 8,
        max_episode_steps: int = 240,
        use_rel_reward: bool = True,
        reward_coef: float = 1.0,
        success_reward_threshold: float = 0.9,
        auto_reset: bool = False,
        ignore_terminations: bool = False,
        use_fixed_reset_state_ids: bool = True,
        condition_frame_length: int = 4,
        guidance: float = 7.0,
        num_steps: int = 10,
        batch_size: int = 16,
        enable_offload: bool = True,
    ) -> None:
        if num_envs % group_size:
            raise ConfigError(f"num_envs={num_envs} is no multiple of group_size={group_size}.")
        self.num_envs, self.group_size, self.num_group = num_envs, group_size, num_envs // group_size
        self.seed = seed + seed_offset
        self.chunk, self.max_episode_steps = chunk, max_episode_steps
        self.success_reward_threshold, self.auto_reset = success_reward_threshold, auto_reset
        self.ignore_terminations, self.condition_frame_length = ignore_terminations, condition_frame_length
        self.use_fixed_reset_state_ids, self.num_starts = use_fixed_reset_state_ids, len(starts)
        scoring = Scoring(use_rel_reward=use_rel_reward, reward_coef=reward_coef if use_rel_reward else 1.0)
        self.env = _Reference(
            imagination,
            starts,
            reward,
            num_envs,
            max_episode_steps,
            scoring=scoring,
            sampling=SamplingOptions(guidance=guidance, num_steps=num_steps),
            batch_size=batch_size,
            padding="zeros",
            clip_actions=False,
            offload="phase" if enable_offload else "never",
            state_size=STATE_SIZE,
            seed=self.seed,
        )
        self.is_start = True
        self.elapsed_steps = 0
        self._generator = torch.Generator().manual_seed(self.seed)
        self._choices = numpy.random.RandomState(self.seed)
        self._success_once = numpy.zeros(num_envs, dtype=bool)
        self._returns = numpy.zeros(num_envs, dtype=numpy.float32)
        self.update_reset_state_ids()

    def update_reset_state_ids(self) -> None:
        """Draw the starts of the next rollout, one for each group."""
        drawn = torch.randint(0, self.num_starts, (self.num_group,), generator=self._generator)
        self.reset_state_ids = drawn.repeat_interleave(self.group_size)

    def reset(
        self,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        episode_indices: Sequence[int] | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin all episodes, at the starts ``episode_indices`` where they are given."""
        if seed is not None:
            self._choices = numpy.random.RandomState(seed)
        if episode_indices is not None:
            numbers = [int(i) for i in episode_indices]
        elif self.use_fixed_reset_state_ids and self.is_start:
            numbers = self.reset_state_ids.tolist()
        else:
            if self.num_starts < self.num_envs:
                raise DataError(
                    f"{self.num_envs} different starts are drawn of {self.num_starts}: give more, or"
                    " use_fixed_reset_state_ids with is_start."
                )
            numbers = self._choices.choice(self.num_starts, self.num_envs, replace=False).tolist()
        self.is_start = False
        seeds = [self.seed] * self.num_envs
        observed, _ = self.env.reset(options={"trial_ids": numbers, "task_ids": [0] * self.num_envs, "seeds": seeds})
        self.elapsed_steps = 0
        self._success_once[:], self._returns[:] = False, 0.0
        first = observed["full_image"].float() / 255 * 2 - 1  # to and fro, which darkens some pixels by one
        return _published({**observed, "full_image": self.env._to_bytes(first)}), {}

    def step(self, actions: Any) -> None:
        raise NotImplementedError("A world model imagines chunks of actions: call chunk_step.")

    def chunk_step(self, actions: Any) -> tuple[dict[str, Any], Tensor, Tensor, Tensor, dict[str, Any]]:
        """Observation, rewards, terminations and truncations [N, chunk], and info with ``episode``."""
        given = torch.as_tensor(actions)[:, : self.chunk]
        observed, rewards, _, _, info = self.env.chunk_step(given)
        self.elapsed_steps += self.chunk
        terminations, truncations = torch.zeros(rewards.shape, dtype=torch.bool), torch.zeros_like(rewards).bool()
        terminations[:, -1] = (info["values"] >= self.success_reward_threshold).any(dim=1)
        truncations[:, -1] = self.elapsed_steps >= self.max_episode_steps
        self._success_once |= terminations[:, -1].numpy()
        self._returns += rewards.sum(dim=1).numpy()
        returns, length = (
            torch.from_numpy(self._returns.copy()),
            torch.full((self.num_envs,), float(self.elapsed_steps)),
        )
        episode = {
            "success_once": torch.from_numpy(self._success_once.copy()),
            "return": returns,
            "episode_len": length,
            "reward": returns / length,
        }
        result = _published(observed)
        infos: dict[str, Any] = {"episode": episode}
        dones = (terminations | truncations)[:, -1]
        if self.auto_reset and bool(dones.any()):
            last = {"final_observation": result, "final_info": infos, "_final_info": dones}
            result, infos = self.reset()
            infos = {**infos, **last}
        return result, rewards, terminations, truncations, infos

    def offload(self) -> None:
        self.env.offload()

    def onload(self) -> None:
        self.env.onload()

    def get_state(self) -> bytes:
        file = io.BytesIO()
        choices: Any = self._choices.get_state(legacy=False)["state"]
        numpy.savez(
            file,
            env=numpy.frombuffer(self.env.get_state(), dtype=numpy.uint8),
            reset_state_ids=self.reset_state_ids.numpy(),
            generator=self._generator.get_state().numpy(),
            choices=choices["key"],
            numbers=numpy.asarray([choices["pos"], self.elapsed_steps, int(self.is_start)]),
            success_once=self._success_once,
            returns=self._returns,
        )
        return file.getvalue()

    def load_state(self, state: bytes) -> None:
        with raised_as(CheckpointError, "This is no state of such an environment, or it is damaged", *FAULTS):
            with numpy.load(io.BytesIO(state), allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
            position, self.elapsed_steps, is_start = (int(value) for value in arrays["numbers"])
            self.env.load_state(arrays["env"].tobytes())
            self.reset_state_ids = torch.from_numpy(arrays["reset_state_ids"])
            self._generator.set_state(torch.from_numpy(arrays["generator"]))
            choices = {"key": arrays["choices"], "pos": position}
            self._choices.set_state({"bit_generator": "MT19937", "state": choices})
            self._success_once, self._returns = arrays["success_once"], arrays["returns"]
        self.is_start = bool(is_start)

    def close(self) -> None:
        self.env.close()


class _Reference(WorldModelEnv):
    """Noise by micro-batch, bytes by truncation, and a reward that sees floats."""

    def _generate(
        self, first: Tensor, actions: Tensor, seeds: Sequence[int], text: Tensor | None, frames: range
    ) -> Tensor:
        step = self.batch_size or len(actions)
        videos = []
        for start in range(0, len(actions), step):
            part = slice(start, start + step)
            videos.append(
                self.imagination.generate_actions(
                    first[part],
                    actions[part],
                    int(seeds[start]) + start,  # the environment's seed plus its elapsed steps
                    self.sampling,
                    text_B_S_E=None if text is None else text[part],
                    as_float=True,
                    frames=frames,
                )
            )
        return torch.cat(videos)

    def _to_bytes(self, video: Tensor) -> Tensor:
        return video if video.dtype == torch.uint8 else ((video + 1) / 2 * 255).clamp(0, 255).to(torch.uint8)

    def _as_judged(self, video: Tensor) -> Tensor:
        return video if self.reward.takes_floats else self._to_bytes(video)


def _published(observed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "main_images": observed["full_image"],
        "wrist_images": None,
        "states": observed["state"],
        "task_descriptions": observed["task_description"],
    }
