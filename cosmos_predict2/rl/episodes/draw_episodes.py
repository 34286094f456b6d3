# SPDX-License-Identifier: Apache-2.0
"""Videos of imagined episodes beside the true ones of the same actions, at every validation.

The run's folder gets ``samples/iter_000000492_episodes.mp4`` and a contact sheet of the same name, with a row for each
of the first starts of the validation data, which are the same every time.
"""

import logging
from typing import Any

from torch import Tensor

from cosmos_predict2.callbacks.draw_samples import side_by_side
from cosmos_predict2.callbacks.fixed_clips import apart
from cosmos_predict2.data.video import media
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts, release, validation_starts
from cosmos_predict2.rl.episodes.policy_evaluation import film
from cosmos_predict2.rl.interfaces import EnvDefaults, completed
from imaginaire import distributed, storage
from imaginaire.errors import ConfigError
from imaginaire.training.callbacks import Callback

log = logging.getLogger(__name__)

LABELS = ("imagined", "true")


class DrawEpisodes(Callback):
    """The policy plays greedily in imagination; ``true_env``, or else that of the model, repeats its actions.

    ``fps`` is that of the videos.
    """

    def __init__(self, num_episodes: int = 4, fps: float = 10.0, true_env: Any = None) -> None:
        super().__init__()
        if num_episodes < 1 or fps <= 0:
            raise ConfigError(f"draw_episodes: num_episodes={num_episodes} and fps={fps} must be above 0.")
        self.num_episodes, self.fps, self.true_env = num_episodes, fps, true_env
        self._starts: Starts | None = None

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self.true_env = completed(self.true_env, EnvDefaults) or model.true_env
        if model.env.imagination is None or self.true_env is None:
            raise ConfigError(
                f"trainer.callbacks.{self.name} needs an environment that imagines (model.config.world_model, or"
                f" env.imagination) and true_env, there or of its own: else set trainer.callbacks.{self.name}=null."
            )

    def on_validation_step_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
        if self._starts is None:
            num = self.num_episodes
            self._starts = validation_starts(batch["task_id"][:num].tolist(), batch["trial_id"][:num].tolist())

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        if self._starts is None:
            return
        with apart(self.trainer, model), model.ema_scope():  # on all ranks, as a sharded world model must
            rollout = LocalRollout(model.policy, model.env, model.rl.execute, keep_record=False)
            actions = rollout.collect(self._starts, "greedy").actions_M_E_A_D
            both = (model.env, self.true_env)
            films = [film(env, self._starts, actions, model.rl.execute) for env in both]
        model.env.offload()  # the policy may be trained next
        if self.true_env is not model.true_env:
            release(self.true_env)
        if distributed.is_rank0():
            self._write(list(zip(*films, strict=True)), iteration)

    def _write(self, rows: list[tuple[Tensor, ...]], iteration: int) -> None:
        start = storage.join(self.trainer.run_dir, "samples", f"iter_{iteration:09d}_episodes")
        video = side_by_side(rows, LABELS)
        media.write_video(f"{start}.mp4", video, self.fps)
        frames = video.transpose(0, 1).contiguous().numpy()
        self.trainer.metrics.log_video("samples/episodes_video", frames, iteration, max(1, round(self.fps)))
        labels = [f"start {i} {label}" for i in range(len(rows)) for label in LABELS]
        media.write_image(f"{start}.png", media.contact_sheet([clip for row in rows for clip in row], labels))
        log.info("episodes of iteration %d, imagined beside true: %s.mp4", iteration, start)
