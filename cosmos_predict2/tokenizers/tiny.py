# SPDX-License-Identifier: Apache-2.0
"""A small video tokenizer for machines without a GPU, with the sizes and the contract of the large one.

The first frame and each group of four are coded alone, so latents of a prefix are a prefix of the latents and any
window of a clip can be coded by itself. A code is linear in the pixels of an 8x8 patch (the principal components, to
begin with) plus a correction by a few convolutions over neighbouring patches, and so is the way back. All channels are
scaled by one number: dividing each by its own deviation would spend a model's effort on channels that show little.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from cosmos_predict2.tokenizers.sizes import LatentGrid
from imaginaire import storage
from imaginaire.checkpoint import weights as weight_sources
from imaginaire.checkpoint.weight_files import is_hub
from imaginaire.findings import CheckContext, Finding, error

SHIPPED = Path(__file__).with_name("tiny.safetensors")
PATCH = 8
GROUP = 4
LATENT_CHANNELS = 16


class TinyTokenizer(LatentGrid):
    """`VideoTokenizer` that runs on a CPU in milliseconds; ``weights`` is the shipped file unless one is named."""

    name = "tiny_tokenizer"
    is_causal = True
    is_chunk_overlap = False

    def __init__(
        self, weights: str | None = None, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.net = load(str(weights or SHIPPED))
        self.net.requires_grad_(False).eval().to(device=device, dtype=dtype or torch.float32)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """A file that is not there, with its cure; loads nothing."""
        path = str(arguments.get("weights") or SHIPPED)
        if not (storage.is_remote(path) or is_hub(path) or storage.exists(path)):
            cure = f"Fit it to your recordings: python -m scripts.fit_tiny_tokenizer --data FOLDER --out {path}"
            yield error(context.key, f"the file of the tokenizer's weights, {path}, does not exist", cure)

    @property
    def dtype(self) -> torch.dtype:
        return self.net.scale.dtype

    @property
    def device(self) -> torch.device:
        return self.net.scale.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "TinyTokenizer":
        """Move the weights; gives itself."""
        self.net.to(device=device, dtype=dtype)
        return self

    @torch.no_grad()
    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        """Latents of RGB in [-1, 1], in the dtype of the video."""
        self.check_video(video_B_C_F_H_W)
        latent_B_C_T_H_W = self.net.encode(video_B_C_F_H_W.to(device=self.device, dtype=self.dtype))
        return latent_B_C_T_H_W.to(video_B_C_F_H_W.dtype)

    @torch.no_grad()
    def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        """RGB of latents, not clamped, in the dtype of the latents."""
        self.check_latent(latent_B_C_T_H_W)
        video_B_C_F_H_W = self.net.decode(latent_B_C_T_H_W.to(device=self.device, dtype=self.dtype))
        return video_B_C_F_H_W.to(latent_B_C_T_H_W.dtype)

    @torch.no_grad()
    def decode_groups(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        """RGB [B, 3, 4 T, H, W] of latent frames behind the first one: they need no others."""
        self.check_latent(latent_B_C_T_H_W)
        video_B_C_F_H_W = self.net.decode_groups(latent_B_C_T_H_W.to(device=self.device, dtype=self.dtype))
        return video_B_C_F_H_W.to(latent_B_C_T_H_W.dtype)


class TinyAutoencoder(nn.Module):
    """One coder for the first frame, another for groups of four; latents come out with about unit variance."""

    centre: Tensor
    scale: Tensor

    def __init__(self, width: int = 80, num_blocks: int = 2) -> None:
        super().__init__()
        self.frame = PatchCoder(1, width, num_blocks)
        self.group = PatchCoder(GROUP, width, num_blocks)
        # Of the coders' own codes: the mean of each channel (of frames, of groups), and one deviation for all of them.
        self.register_buffer("centre", torch.zeros(2, LATENT_CHANNELS))
        self.register_buffer("scale", torch.ones(()))

    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        batch = video_B_C_F_H_W.shape[0]
        codes = [self.frame.encode(rearrange(video_B_C_F_H_W[:, :, :1], "b c f h w -> b (f c) h w")).unsqueeze(2)]
        if video_B_C_F_H_W.shape[2] > 1:
            groups = rearrange(video_B_C_F_H_W[:, :, 1:], "b c (t f) h w -> (b t) (f c) h w", f=GROUP)
            codes.append(rearrange(self.group.encode(groups), "(b t) c h w -> b c t h w", b=batch))
        codes_B_C_T_H_W = torch.cat(codes, dim=2)
        of_groups = self.centre[1:].expand(codes_B_C_T_H_W.shape[2] - 1, -1)
        centre_C_T_1_1 = torch.cat([self.centre[:1], of_groups]).T[:, :, None, None]  # the first frame has its own
        return (codes_B_C_T_H_W - centre_C_T_1_1) / self.scale

    def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        codes_B_C_H_W = latent_B_C_T_H_W[:, :, 0] * self.scale + self.centre[0, :, None, None]
        frames = [rearrange(self.frame.decode(codes_B_C_H_W), "b (f c) h w -> b c f h w", f=1)]
        if latent_B_C_T_H_W.shape[2] > 1:
            frames.append(self.decode_groups(latent_B_C_T_H_W[:, :, 1:]))
        return torch.cat(frames, dim=2)

    def decode_groups(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        """Pixels of latent frames that each stand for four."""
        codes_B_C_T_H_W = latent_B_C_T_H_W * self.scale + self.centre[1, :, None, None, None]
        groups = self.group.decode(rearrange(codes_B_C_T_H_W, "b c t h w -> (b t) c h w"))
        return rearrange(groups, "(b t) (f c) h w -> b c (t f) h w", b=latent_B_C_T_H_W.shape[0], f=GROUP)


class PatchCoder(nn.Module):
    """Codes [N, 16, H/8, W/8] of pictures [N, frames * 3, H, W]: a linear part and what convolutions add to it."""

    def __init__(self, num_frames: int, width: int, num_blocks: int) -> None:
        super().__init__()
        patch = num_frames * 3 * PATCH * PATCH
        self.linear_in = nn.Conv2d(patch, LATENT_CHANNELS, 1)
        self.residual_in = nn.Sequential(
            nn.Conv2d(patch, width, 1), *_blocks(width, num_blocks), nn.Conv2d(width, LATENT_CHANNELS, 3, padding=1)
        )
        self.linear_out = nn.Conv2d(LATENT_CHANNELS, patch, 1)
        self.residual_out = nn.Sequential(
            nn.Conv2d(LATENT_CHANNELS, width, 3, padding=1), *_blocks(width, num_blocks), nn.Conv2d(width, patch, 1)
        )
        for last in (self.residual_in[-1], self.residual_out[-1]):  # linear alone, until trained
            for parameter in last.parameters():
                nn.init.zeros_(parameter)

    def encode(self, pictures_N_C_H_W: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(pictures_N_C_H_W, PATCH)
        return self.linear_in(patches) + self.residual_in(patches)

    def decode(self, codes_N_C_H_W: Tensor) -> Tensor:
        patches = self.linear_out(codes_N_C_H_W) + self.residual_out(codes_N_C_H_W)
        return F.pixel_shuffle(patches, PATCH)

    @torch.no_grad()
    def set_linear(self, mean: Tensor, components: Tensor, gain: float) -> None:
        """Code by orthonormal ``components`` [16, patch] about ``mean`` [patch], times ``gain``."""
        rows, columns = components * gain, (components / gain).T
        self.linear_in.load_state_dict({"weight": rows[:, :, None, None], "bias": -rows @ mean})
        self.linear_out.load_state_dict({"weight": columns[:, :, None, None], "bias": mean})


class Block(nn.Module):
    """A look at the neighbouring patches, then a small network for each patch, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.widen = nn.Conv2d(width, 2 * width, 1)
        self.narrow = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(self.near(x))))


def _blocks(width: int, num_blocks: int) -> list[nn.Module]:
    return [Block(width) for _ in range(num_blocks)]


def load(path: str) -> TinyAutoencoder:
    """The network of saved weights, as wide and with as many blocks as they have."""
    source, first = weight_sources.read(path), "frame.residual_in.0.weight"
    blocks = {name.split(".")[2] for name in source if name.startswith("frame.residual_in.") and ".near." in name}
    net = TinyAutoencoder(source[first].shape[0], len(blocks)) if first in source else TinyAutoencoder()
    weight_sources.load_into(net.state_dict(), source).require(source=path)
    return net
