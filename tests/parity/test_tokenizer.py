# SPDX-License-Identifier: Apache-2.0
"""The Wan VAE against golden values: moments, latents, pixels, half precision, and the released names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.tokenizers.wan_network import WanConfig, WanVAE, to_diffusers_name
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from tests.goldens import Golden, Value

AREA = "tokenizer"
# The folder's README: largest differences; bfloat16 itself is about half of the last two away from float32.
LATENT = dict(atol=1e-5)
PIXELS = dict(atol=3e-5)
BF16_LATENT = dict(atol=0.03)
BF16_PIXELS = dict(atol=0.25)

Build = Callable[..., WanTokenizer]


@pytest.fixture
def build(golden: Golden, tmp_path: Path) -> Build:
    """The tokenizer of the folder's weights, with options."""
    if not (golden.folder / "vae_config.json").is_file():
        pytest.skip("the folder has no Wan VAE")
    config = golden.json("vae_config.json")
    save_file(golden.tensors("vae_tiny.safetensors").use(), tmp_path / "tokenizer.safetensors")

    def built(**options: Any) -> WanTokenizer:
        return WanTokenizer(
            str(tmp_path / "tokenizer.safetensors"),
            config=config["config"].use(),
            latents_mean=config["latents_mean"].use(),
            latents_std=config["latents_std"].use(),
            **options,
        )

    return built


@pytest.fixture
def io(golden: Golden) -> Value:
    return golden.tensors("vae_io.safetensors")


def _frames(golden: Golden) -> list[int]:
    return list(golden.json("vae_config.json")["frames"].use())


def _video(io: Value, num_frames: int) -> Tensor:
    return io[f"t{num_frames}.video_u8"].use().float() / 127.5 - 1


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temporal_window=8),
        dict(temporal_window=12),
        dict(temporal_window=16),
        dict(temporal_window=400),  # the whole clip but its first frame
        dict(channels_last=False),
        dict(dtype=torch.float64),
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()) or "default",
)
def test_encode_and_decode_match(build: Build, golden: Golden, io: Value, options: dict[str, Any]) -> None:
    tokenizer = build(**options)
    for t in _frames(golden):
        video = _video(io, t).to(tokenizer.dtype)
        mean, log_variance = tokenizer.encode_moments(video)
        io[f"t{t}.mu"].compare(mean, **LATENT)
        io[f"t{t}.logvar"].compare(log_variance, **LATENT)
        io[f"t{t}.latent"].compare(tokenizer.encode(video), **LATENT)
        latent, drawn = (io[f"t{t}.{name}"].use().to(tokenizer.dtype) for name in ("latent", "rand_latent"))
        io[f"t{t}.recon"].compare(tokenizer.decode(latent), **PIXELS)
        io[f"t{t}.rand_decoded"].compare(tokenizer.decode(drawn), **PIXELS)


def test_the_stored_sizes_are_those_of_the_contract(build: Build, golden: Golden, io: Value) -> None:
    tokenizer, config = build(), golden.json("vae_config.json")
    for t in _frames(golden):
        batch, _, frames, height, width = io[f"t{t}.video_u8"].use().shape
        config["batch"].compare(batch)
        config["height"].compare(height)
        config["width"].compare(width)
        assert frames == t
        step = tokenizer.spatial_compression_factor
        shape = (batch, tokenizer.latent_ch, tokenizer.get_latent_num_frames(t), height // step, width // step)
        assert io[f"t{t}.latent"].use().shape == shape
        assert tokenizer.get_pixel_num_frames(shape[2]) == t


def test_half_precision_matches(build: Build, golden: Golden, io: Value) -> None:
    tokenizer = build(dtype=torch.bfloat16, normalisation="module")
    mean, inverse_std = tokenizer.constants()
    io["bf16.scale_mean"].compare(mean.flatten().to(io["bf16.scale_mean"].use()))
    io["bf16.scale_inv_std"].compare(inverse_std.flatten().to(io["bf16.scale_inv_std"].use()))
    t = golden.json("vae_config.json")["bf16_frames"].use()
    io["bf16.latent"].compare(tokenizer.encode(_video(io, t).bfloat16()).float(), **BF16_LATENT)
    drawn = io[f"t{t}.rand_latent"].use().bfloat16()
    io["bf16.decoded_from_rand"].compare(tokenizer.decode(drawn).float(), **BF16_PIXELS)


def test_half_precision_with_float32_constants_is_within_its_noise(build: Build, golden: Golden, io: Value) -> None:
    t = golden.json("vae_config.json")["bf16_frames"].use()
    latent = build(dtype=torch.bfloat16).encode(_video(io, t))
    assert latent.dtype == torch.float32  # of the video
    io["bf16.latent"].compare(latent, **BF16_LATENT)
    io[f"t{t}.latent"].compare(latent, **BF16_LATENT)


def test_released_names_and_shapes(golden: Golden) -> None:
    if not (golden.folder / "wan_vae_keys.json").is_file():
        pytest.skip("the folder does not describe the released weights")
    rows = golden.json("wan_vae_keys.json")
    with torch.device("meta"):
        shapes = {name: list(tensor.shape) for name, tensor in WanVAE(WanConfig()).state_dict().items()}
    assert len(rows) == len(shapes)
    for row in rows:
        name = row["original"].use()
        row["shape"].compare(shapes[name])
        row["diffusers"].compare(to_diffusers_name(name))
