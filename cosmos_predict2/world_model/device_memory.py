# SPDX-License-Identifier: Apache-2.0
"""Batch sizes that fit into the memory of a GPU. On a CPU there is no limit: what is swapped out is only slow."""

import torch

from cosmos_predict2.nn.dit import DiT

CLIPS_AT_ONCE = 16  # of a tokenizer on a CPU
SHARE_OF_TOKENIZER = 0.25  # of the free memory: what it fills is kept by PyTorch, and the network comes next
# Of the published tokenizer: activations 96 wide, 5.3 for each of 4 frames in work, and 31 for the frames before them.
VALUES_PER_PIXEL = 96 * (4 * 5.3 + 31)
VALUES_PER_COLOUR = 3  # the clip as it is given, as it was made, and clamped


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
