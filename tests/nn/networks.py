# SPDX-License-Identifier: Apache-2.0
"""Small networks and inputs for the tests of the network."""

from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.nn.dit import DiT, Video2WorldDiT

TEXT = (2, 5, 16)  # samples, tokens, width
LATENT = (4, 6, 8)  # T, H, W


SIZES = dict(
    model_channels=48,
    num_blocks=2,
    num_heads=2,
    adaln_lora_dim=8,
    crossattn_emb_channels=16,
    max_img_h=16,
    max_img_w=16,
    max_frames=8,
)


def small_net(cls: type[DiT] = Video2WorldDiT, *, random_everywhere: bool = True, **options: Any) -> DiT:
    """Two blocks, 48 wide; with ``random_everywhere`` no part of it adds nothing, as zero modulation would."""
    torch.manual_seed(0)
    net = cls(**{**SIZES, **options})
    if random_everywhere:
        for name, parameter in net.named_parameters():
            if "adaln_modulation" in name:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif name.endswith("norm.weight"):
                nn.init.uniform_(parameter, 0.5, 1.5)
    return net


def inputs(dtype: torch.dtype = torch.float32, batch: int = 2, **changes: Any) -> dict[str, Any]:
    """Arguments of forward, one time per latent frame."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    t, h, w = LATENT
    mask = torch.zeros(batch, 1, t, h, w, dtype=dtype)
    mask[:, :, 0] = 1
    given = dict(
        x_B_C_T_H_W=draw(batch, 16, t, h, w),
        timesteps_B_T=draw(batch, t).sigmoid(),
        crossattn_emb_B_S_E=draw(batch, *TEXT[1:]),
        condition_mask_B_1_T_H_W=mask,
        padding_mask_B_1_H_W=(draw(batch, 1, 8 * h, 8 * w) > 0).to(dtype),
        fps_B=torch.full((batch,), 10),
    )
    return {**given, **changes}


def outputs_of(net: nn.Module) -> dict[str, Any]:
    """A dictionary that each call of the network fills with what its modules give, by their names."""
    found: dict[str, Any] = {}
    for name, module in net.named_modules():
        module.register_forward_hook(lambda _, inputs, output, name=name: found.__setitem__(name, output))
    return found
