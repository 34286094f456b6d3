# SPDX-License-Identifier: Apache-2.0
"""Parts of the sampling of a world model: options, first noise, batches that fit into memory, and pixels as bytes.

Memory is that of a GPU. On a CPU there is no limit: what is swapped out is only slow.
"""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.world_model.options import GUIDED, UNGUIDED, SamplingOptions
from imaginaire.errors import ConfigError

__all__ = ["GUIDED", "UNGUIDED", "SamplingOptions", "initial_noise", "to_uint8"]

CLIPS_AT_ONCE = 16  # of a tokenizer on a CPU
SHARE_OF_TOKENIZER = 0.25  # of the free memory: what it fills is kept by PyTorch, and the network comes next
# Of the published tokenizer: activations 96 wide, 5.3 for each of 4 frames in work, and 31 for the frames before them.
VALUES_PER_PIXEL = 96 * (4 * 5.3 + 31)
VALUES_PER_COLOUR = 3  # the clip as it is given, as it was made, and clamped


def initial_noise(shape: tuple[int, ...], seed: int | Sequence[int]) -> Tensor:
    """Standard normal float32 from NumPy's RandomState: the same on every device and number of processes.

    With a seed for each sample, each is what a batch of it alone gets.
    """
    if not isinstance(seed, int):
        if len(seed) != shape[0]:
            raise ConfigError(f"There are {len(seed)} seeds for a batch of {shape[0]}: one for each sample.")
        return torch.cat([initial_noise((1, *shape[1:]), int(one)) for one in seed])
    return torch.from_numpy(numpy.random.RandomState(seed).standard_normal(shape).astype(numpy.float32))


def free_memory(device: torch.device, *, has_graphs: bool = False) -> int:
    """Bytes that can be had, those that PyTorch holds unused among them, unless captured graphs may hold them."""
    free, _ = torch.cuda.mem_get_info(device)
    if not has_graphs:
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free


def activation_bytes(net: DiT, num_values: int) -> int:
    """An estimate of the bytes that a forward pass takes, for so many positions of latents."""
    tokens = num_values // (net.patch_spatial**2 * net.patch_temporal)
    return tokens * net.model_channels * 24 * torch.finfo(net.dtype).bits // 8


def clips_at_once(
    device: torch.device, dtype: torch.dtype, num_frames: int, height: int, width: int, *, has_graphs: bool = False
) -> int:
    """The number of clips of so many pixel frames that a tokenizer of this precision encodes or decodes together."""
    if device.type != "cuda":
        return CLIPS_AT_ONCE
    pixels = height * width
    needed = pixels * VALUES_PER_PIXEL * torch.finfo(dtype).bits // 8
    needed += VALUES_PER_COLOUR * 3 * num_frames * pixels * 4
    return max(1, int(SHARE_OF_TOKENIZER * free_memory(device, has_graphs=has_graphs) / needed))


def to_uint8(video: Tensor) -> Tensor:
    """[-1, 1] to 0 ... 255, rounded."""
    return video.float().clamp(-1, 1).add_(1).mul_(127.5).round_().to(torch.uint8)
