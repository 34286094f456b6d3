# SPDX-License-Identifier: Apache-2.0
"""Settings of a folder of the toy world: number of episodes, frames, size, tasks, layout and splits."""

from collections.abc import Iterator

import attrs

from cosmos_predict2.toy_world.episodes import Episodes, make_episodes
from cosmos_predict2.toy_world.scene import STATE_SIZE
from imaginaire.errors import ConfigError

FORM_NAMES = ("video", "bridge", "lerobot", "states")  # the layouts that `forms` writes
EPISODES_AT_ONCE = 256


def name_of(index: int) -> str:
    """The file name of an episode."""
    return f"episode_{index:06d}"


@attrs.define(kw_only=True, frozen=True)
class ToyFolder:
    """Settings of a folder; two folders of equal settings hold equal episodes."""

    episodes: int = attrs.field(default=200, validator=[attrs.validators.ge(1), attrs.validators.le(10**7)])
    frames: int = attrs.field(default=25, validator=[attrs.validators.ge(2), attrs.validators.le(10**5)])
    size: int = 48
    fps: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))
    seed: int = attrs.field(default=0, validator=[attrs.validators.ge(0), attrs.validators.lt(2**63)])
    mix: str = "mixed"
    setting: str = "default"
    tasks: tuple[str, ...] = ("push_puck",)
    action_dim: int = 4
    val_fraction: float = attrs.field(default=0.1, validator=[attrs.validators.ge(0), attrs.validators.le(1)])
    form: str = attrs.field(default="video", validator=attrs.validators.in_(FORM_NAMES))
    text_encoder: str | None = attrs.field(default=None, validator=attrs.validators.in_((None, "bytes")))
    num_tokens: int = 512
    text_width: int = 1024

    def __attrs_post_init__(self) -> None:
        if self.text_encoder and self.form == "states":
            raise ConfigError("The form 'states' keeps no embeddings. Leave text_encoder out.")

    @property
    def num_val(self) -> int:
        """Number of episodes for validation, the last ones: at least one if val_fraction is above 0."""
        if self.val_fraction == 0:
            return 0
        return min(self.episodes, max(1, round(self.episodes * self.val_fraction)))

    def split(self, index: int) -> str:
        return "val" if index >= self.episodes - self.num_val else "train"

    def make(self, first: int, num: int) -> Episodes:
        try:
            return make_episodes(
                num,
                self.seed,
                mix=self.mix,
                length=self.frames - 1,
                size=self.size,
                setting=self.setting,
                tasks=self.tasks,
                action_dim=self.action_dim,
                first=first,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def batches(self) -> Iterator[Episodes]:
        """All episodes in order, simulated many at a time."""
        for first in range(0, self.episodes, EPISODES_AT_ONCE):
            yield self.make(first, min(EPISODES_AT_ONCE, self.episodes - first))

    def bytes_needed(self) -> int:
        """Bytes that the folder takes, estimated generously."""
        if self.form == "states":
            return int(self.episodes * self.frames * (8 * (STATE_SIZE + 1) + 4 * self.action_dim)) + 100_000
        video = 6_000 + 0.15 * self.size**2 * self.frames
        annotation = 130 * self.frames + 1_000
        text = 2 * 64 * self.text_width + 300 if self.text_encoder else 0
        return int(self.episodes * (video + annotation + text + 3 * 4096))
