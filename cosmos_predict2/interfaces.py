# SPDX-License-Identifier: Apache-2.0
"""The seams of inference and training: what a tokenizer, a text encoder, a guardrail and a refiner must offer.

Optional members have their defaults in a class of their own: a class of yours may lack them, and gets them by
`imaginaire.buildable.completed` where it comes in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class VideoTokenizer(Protocol):
    """Pixels to normalised latents and back: 1 + 4k frames become 1 + k latent frames, height and width an eighth.

    Not a module of the model that uses it: its weights are frozen and never part of a training checkpoint.
    `TokenizerDefaults` has what is optional. Its class may have ``check(arguments, context)``, whose findings are
    errors before anything is built.
    """

    is_causal: bool
    latent_ch: int
    spatial_compression_factor: int
    temporal_compression_factor: int

    @property
    def dtype(self) -> torch.dtype: ...

    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        """Latents of RGB in [-1, 1], in the dtype of the video; the posterior's mean, never a draw."""

    def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        """RGB of latents, not clamped, in the dtype of the latents."""

    @property
    def decode_groups(self) -> Callable[[Tensor], Tensor] | None: ...

    def get_latent_num_frames(self, num_pixel_frames: int) -> int: ...

    def get_pixel_num_frames(self, num_latent_frames: int) -> int: ...

    def to(self, device: torch.device | str) -> Any:
        """Move the weights; gives itself."""


class TokenizerDefaults:
    """``is_causal``: frames do not depend on latent frames behind theirs. ``decode_groups`` gives RGB [B, 3, 4 T, H, W]
    of latent frames without the first one, where they need none of those before them."""

    is_causal: bool = False
    decode_groups: Callable[[Tensor], Tensor] | None = None


@runtime_checkable
class TextEncoder(Protocol):
    """Prompts to embeddings of a fixed number of tokens; what lies past a prompt is part of the contract.

    Optional, of its class and given the arguments of its lazy node: ``declared_width``, the width that it will have,
    which is compared with the network's before anything is built, and as of a tokenizer ``check``, see `CheckContext`.
    """

    name: str  # identifies embeddings that may be mixed: encoder, weights and whatever changes the result
    num_tokens: int
    width: int

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """[len(prompts), num_tokens, width], float32 on the encoder's device."""

    def to(self, device: torch.device | str) -> Any:
        """Move the weights; gives itself."""


@dataclass(frozen=True)
class Verdict:
    """A guardrail's verdict on a prompt or a video; the message names the rule."""

    is_safe: bool
    message: str = ""


class Guardrail(Protocol):
    """A check that may stop a generation, or hide what a video must not show. An error inside it counts as unsafe.

    It has one or more of ``check_prompt(prompt) -> Verdict``, ``check_video(frames_F_H_W_C) -> Verdict`` and
    ``postprocess(frames_F_H_W_C) -> Tensor``; frames are uint8. A ``source``, if it has one, is named in the log.
    """

    name: str


class PromptRefiner(Protocol):
    """Rewrites a prompt, given the frames that the video begins with, uint8 [3, F, H, W], and the video's seed."""

    def refine(self, prompt: str, frames_C_F_H_W: Tensor, seed: int) -> str: ...
