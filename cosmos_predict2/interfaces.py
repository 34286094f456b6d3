# SPDX-License-Identifier: Apache-2.0
"""The seams of inference and training: what a tokenizer, a text encoder, a guardrail and a refiner must offer.

Optional members have their defaults in a class of their own, or in the protocol where it has no other methods: a class
of yours may lack them, and gets them by `imaginaire.buildable.completed` where it comes in.
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
    `TokenizerDefaults` has what is optional. Where its class is `imaginaire.findings.Checked`, findings are errors
    before anything is built.
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

    Its class may declare its width (`DeclaresWidth`) and, as that of a tokenizer, be `imaginaire.findings.Checked`.
    """

    name: str  # identifies embeddings that may be mixed: encoder, weights and whatever changes the result
    num_tokens: int
    width: int

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """[len(prompts), num_tokens, width], float32 on the encoder's device."""

    def to(self, device: torch.device | str) -> Any:
        """Move the weights; gives itself."""


@runtime_checkable
class DeclaresWidth(Protocol):
    """A class of text encoders whose width is known (``@classmethod``) before one is built."""

    def declared_width(self, **arguments: Any) -> int | None:
        """The width with these arguments of a lazy node, which is compared with the network's; None: not known."""


@dataclass(frozen=True)
class Verdict:
    """A guardrail's verdict on a prompt or a video; the message names the rule."""

    is_safe: bool
    message: str = ""


class Guardrail(Protocol):
    """A check that may stop a generation, or hide what a video must not show. An error inside it counts as unsafe.

    One of yours needs a name and at least one of the three methods. Frames are uint8 [F, H, W, C].
    """

    name: str
    source: str = ""  # of its weights or lists, for the log
    check_prompt: Callable[[str], Verdict] | None = None
    check_video: Callable[[Tensor], Verdict] | None = None
    postprocess: Callable[[Tensor], Tensor] | None = None  # gives the frames that may be shown


class PromptRefiner(Protocol):
    """Rewrites a prompt, given the frames that the video begins with, uint8 [3, F, H, W], and the video's seed."""

    def refine(self, prompt: str, frames_C_F_H_W: Tensor, seed: int) -> str: ...
