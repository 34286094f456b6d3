# SPDX-License-Identifier: Apache-2.0
"""The Wan video tokenizer against diffusers' AutoencoderKLWan: same weights, same clip, taking turns in one run.

    python -m benchmarks.tokenizer [--frames 17] [--height 128] [--width 128] [--dim 96] [--threads N] [--device cuda]

Prints seconds of each (the best of the turns), how many times faster ours is, and the largest difference between their
outputs, which must be rounding. Weights are random: the time does not depend on them.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from cosmos_predict2.tokenizers.wan_network import LATENTS_MEAN, LATENTS_STD, to_diffusers_name
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer

TOLERANCE = {torch.float32: (1e-5, 3e-5), torch.bfloat16: (0.05, 0.3)}  # latents, pixels; largest difference


def main() -> None:
    parser = machine.parser(__doc__, "threads", "device")
    machine.add_numbers(parser, frames=17, height=128, width=128, turns=3, temporal_window=4, dim=96)  # 96 is released
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = machine.parse(parser)
    dtype = getattr(torch, arguments.dtype)

    torch.manual_seed(0)
    how = dict(device=arguments.device, dtype=dtype, temporal_window=arguments.temporal_window)
    tokenizer = WanTokenizer(config=dict(dim=arguments.dim), allow_random=True, **how)
    peer = diffusers_twin(tokenizer)
    video = torch.rand(1, 3, arguments.frames, arguments.height, arguments.width, device=arguments.device) * 2 - 1
    video = video.to(dtype)
    latent = torch.randn_like(tokenizer.encode(video))
    mean = torch.tensor(LATENTS_MEAN, device=arguments.device).view(1, -1, 1, 1, 1)
    std = torch.tensor(LATENTS_STD, device=arguments.device).view(1, -1, 1, 1, 1)

    @torch.no_grad()
    def peer_encode() -> Tensor:
        latent: Tensor = peer.encode(video).latent_dist.mode()
        return (latent.float() - mean) / std

    @torch.no_grad()
    def peer_decode() -> Tensor:
        decoded: Tensor = peer.decode((latent.float() * std + mean).to(dtype)).sample
        return decoded

    size = f"{arguments.frames} frames of {arguments.height}x{arguments.width}, dim {arguments.dim}, {arguments.dtype}"
    print(f"{size}; {machine.described(torch.device(arguments.device))}")
    limits = TOLERANCE[dtype]
    pairs = [
        ("encode", lambda: tokenizer.encode(video), peer_encode, limits[0]),
        ("decode", lambda: tokenizer.decode(latent).clamp(-1, 1), peer_decode, limits[1]),
    ]
    for name, ours, theirs, limit in pairs:
        difference = (ours().float() - theirs().float()).abs().max().item()
        if not difference <= limit:  # NaN, too
            raise SystemExit(f"{name}: outputs differ by {difference:.1e}, more than {limit:.0e}")
        turns = machine.in_turns({"ours": ours, "theirs": theirs}, arguments.turns, warm_up=0)
        own, other = (min(turns.wall[which]) for which in ("ours", "theirs"))
        own_cpu, other_cpu = (min(turns.core[which]) for which in ("ours", "theirs"))
        faster = f"{other / own:.2f} times faster ({other_cpu / own_cpu:.2f} in processor time)"
        print(f"{name}: ours {own:.3f} s, diffusers {other:.3f} s, {faster}; largest difference {difference:.1e}")


def diffusers_twin(tokenizer: WanTokenizer) -> Any:
    """diffusers' network with the same weights, as it comes."""
    from diffusers import AutoencoderKLWan

    config = tokenizer.config
    sizes = dict(base_dim=config.dim, z_dim=config.z_dim, num_res_blocks=config.num_res_blocks)
    lists = dict(dim_mult=list(config.dim_mult), temperal_downsample=list(config.temperal_downsample))
    peer = AutoencoderKLWan(**sizes, **lists)
    weights = tokenizer.net.state_dict()
    named = {to_diffusers_name(name, config.num_res_blocks): w.contiguous() for name, w in weights.items()}
    peer.load_state_dict(named)
    return peer.to(device=tokenizer.device, dtype=tokenizer.dtype).eval().requires_grad_(False)


if __name__ == "__main__":
    main()
