# SPDX-License-Identifier: Apache-2.0
"""The Wan tokenizer: how clips are cut in time and space, where weights come from, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.interfaces import VideoTokenizer
from cosmos_predict2.tokenizers import wan_vae
from cosmos_predict2.tokenizers.wan_network import WanConfig, WanVAE, _conv_of_doubled, to_diffusers_name
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer, in_tiles
from imaginaire.errors import CheckpointError, ConfigError, DataError
from tests.findings import problems

TINY = dict(dim=4)


def _net(**config: object) -> WanVAE:
    """Random weights of which every part matters: no gain of one, no projection of zero."""
    torch.manual_seed(0)
    net = WanVAE(WanConfig(**{**TINY, **config}))  # type: ignore[arg-type]
    for name, parameter in net.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return net


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.pth"
    torch.save(_net().state_dict(), path)
    return str(path)


@pytest.fixture
def tokenizer(weights: str) -> WanTokenizer:
    return WanTokenizer(weights, config=TINY)


def _video(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_it_is_a_video_tokenizer(weights: str) -> None:
    tokenizer = WanTokenizer(weights, config=TINY, load_mean_std=True)
    assert isinstance(tokenizer, VideoTokenizer)
    factors = tokenizer.spatial_compression_factor, tokenizer.temporal_compression_factor
    assert (tokenizer.latent_ch, *factors) == (16, 8, 4)
    assert (tokenizer.pixel_chunk_duration, tokenizer.latent_chunk_duration) == (81, 21)
    assert tokenizer.is_causal and not tokenizer.is_chunk_overlap
    assert tokenizer.dtype == torch.float32
    assert tokenizer.to("cpu") is tokenizer


@pytest.mark.parametrize(("num_frames", "size"), [(1, (16, 24)), (17, (16, 24)), (201, (8, 8))])
def test_sizes_in_and_out(tokenizer: WanTokenizer, num_frames: int, size: tuple[int, int]) -> None:
    video = _video(2, 3, num_frames, *size)
    latent = tokenizer.encode(video)
    assert latent.shape == (2, 16, 1 + (num_frames - 1) // 4, size[0] // 8, size[1] // 8)
    assert tokenizer.decode(latent).shape == video.shape
    assert tokenizer.get_pixel_num_frames(tokenizer.get_latent_num_frames(num_frames)) == num_frames


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_have_the_dtype_of_what_was_given(tokenizer: WanTokenizer, dtype: torch.dtype) -> None:
    latent = tokenizer.encode(_video(1, 3, 5, 8, 8).to(dtype))
    assert latent.dtype == dtype and tokenizer.decode(latent).dtype == dtype


@pytest.mark.parametrize(
    ("num_res_blocks", "temperal_downsample"),
    [(1, (False, True, True)), (2, (True, False, True)), (3, (True, True, True)), (2, (False, True, True))],
)
def test_the_window_does_not_change_the_result(num_res_blocks: int, temperal_downsample: tuple[bool, ...]) -> None:
    config = dict(TINY, num_res_blocks=num_res_blocks, temperal_downsample=temperal_downsample)
    net = _net(**config)
    results = []
    for window in (8, 16, 24, 400):
        tokenizer = WanTokenizer(config=config, temporal_window=window, allow_random=True)
        tokenizer.net.load_state_dict(net.state_dict())
        latent = tokenizer.encode(_video(1, 3, 33, 16, 8))
        results.append((latent, tokenizer.decode(latent)))
    for latent, pixels in results[1:]:
        torch.testing.assert_close(latent, results[0][0], rtol=0, atol=2e-6)
        torch.testing.assert_close(pixels, results[0][1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [4, 8, 16])
def test_a_prefix_is_coded_alike(weights: str, window: int) -> None:
    tokenizer = WanTokenizer(weights, config=TINY, temporal_window=window)
    video = _video(1, 3, 21, 16, 16)
    whole = tokenizer.encode(video)
    pixels = tokenizer.decode(whole)
    same = torch.equal if window == 4 else lambda a, b: torch.allclose(a, b, rtol=0, atol=1e-5)
    for k in (1, 5, 9, 17):
        latent = tokenizer.encode(video[:, :, :k])
        assert same(latent, whole[:, :, : latent.shape[2]])
        assert same(tokenizer.decode(whole[:, :, : latent.shape[2]]), pixels[:, :, :k])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolution_of_a_doubled_picture_in_quarters(layout: torch.memory_format) -> None:
    conv = torch.nn.Conv2d(6, 4, 3, padding=1).double()
    frames = torch.randn(2, 6, 5, 7, dtype=torch.float64).contiguous(memory_format=layout)
    with torch.no_grad():
        expected = conv(torch.nn.functional.interpolate(frames, scale_factor=2, mode="nearest-exact"))
        torch.testing.assert_close(_conv_of_doubled(frames, conv), expected, rtol=1e-12, atol=1e-12)


# ---- tiles -----------------------------------------------------------------------------------------------------------


def test_tiles_meet_without_a_seam() -> None:
    latent = torch.randn(1, 4, 2, 13, 21, dtype=torch.float64)
    pixels = in_tiles(lambda z: z.repeat_interleave(8, -1).repeat_interleave(8, -2), latent, 5, 1, 8)
    torch.testing.assert_close(pixels, latent.repeat_interleave(8, -1).repeat_interleave(8, -2))
    torch.testing.assert_close(in_tiles(lambda x: x[..., ::8, ::8], pixels, 40, 8, 1), latent)


def test_automatic_tiles_only_where_memory_is_short(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = WanTokenizer(weights, config=TINY, tile_size="auto")
    monkeypatch.setattr(wan_vae, "AUTO_TILE", 32)
    calls = []
    monkeypatch.setattr(wan_vae, "in_tiles", lambda *arguments: calls.append(1) or torch.zeros(1, 32, 2, 8, 8))
    video = _video(1, 3, 5, 64, 64)
    tokenizer.encode(video)
    assert not calls
    monkeypatch.setattr(wan_vae, "free_memory", lambda _: tokenizer.estimate_memory(video.shape) // 4)
    tokenizer.encode(video)
    assert calls


def test_a_window_shrinks_before_pictures_are_cut(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = WanTokenizer(weights, config=TINY, tile_size="auto", temporal_window=8)
    monkeypatch.setattr(wan_vae, "AUTO_TILE", 32)
    shape = (1, 3, 17, 64, 64)
    monkeypatch.setattr(wan_vae, "free_memory", lambda _: tokenizer.estimate_memory(shape, "encode", 4))
    assert tokenizer._plan(shape, "encode") == (4, None)
    monkeypatch.setattr(wan_vae, "free_memory", lambda _: tokenizer.estimate_memory(shape, "encode"))
    assert tokenizer._plan(shape, "encode") == (8, None)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_frames", "nearest"), [(2, "1 or 5"), (92, "89 or 93")])
def test_other_lengths_name_the_nearest(tokenizer: WanTokenizer, num_frames: int, nearest: str) -> None:
    with pytest.raises(DataError, match=rf"{num_frames} frames .* 1 \+ 4k frames.*{nearest}"):
        tokenizer.encode(_video(1, 3, num_frames, 8, 8))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 1, 17, 16), "height 17 is not a multiple of 8"),
        ((1, 3, 1, 16, 4), "width 4 is not a multiple of 8"),
        ((3, 1, 16, 16), r"\[batch, 3, frames, height, width\]"),
        ((1, 4, 1, 16, 16), r"\[1, 4, 1, 16, 16\]"),
    ],
)
def test_other_shapes_are_refused(tokenizer: WanTokenizer, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokenizer.encode(_video(*shape))


def test_bytes_and_wrong_latents_are_refused(tokenizer: WanTokenizer) -> None:
    with pytest.raises(DataError, match=r"torch\.uint8"):
        tokenizer.encode(torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(DataError, match="16, frames"):
        tokenizer.decode(torch.zeros(1, 8, 1, 2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temporal_window=6), "temporal_window=6"),
        (dict(temporal_window=0), "temporal_window=0"),
        (dict(tile_size=100), "tile_size=100"),
        (dict(tile_size=16), "at least 32"),
        (dict(normalisation="bf16"), "'float32'"),
        (dict(latents_mean=[0.0]), "latents_mean"),
        (dict(config=dict(base_dim=4)), "'base_dim'"),
        (dict(config=dict(dim_mult=[1, 2])), "temperal_downsample="),
        (dict(config=dict(attn_scales=[0.25])), "attn_scales"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WanTokenizer(**{"config": TINY, "allow_random": True, **options})


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "checkpoints/none/tokenizer.pth"])
def test_absent_weights_name_path_and_download(path: str) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)tokenizer\.pth.*scripts\.download_checkpoints --model_types video"):
        WanTokenizer(path, config=TINY)


def test_weights_of_another_size_are_accounted_for(weights: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="of another shape"):
        WanTokenizer(weights, config=dict(dim=8))
    state = torch.load(weights)
    del state["conv2.bias"]
    torch.save(state | {"extra.weight": torch.zeros(1)}, tmp_path / "tokenizer.pth")
    with pytest.raises(CheckpointError, match=r"(?s)conv2\.bias.*extra\.weight"):
        WanTokenizer(str(tmp_path / "tokenizer.pth"), config=TINY)


@pytest.mark.parametrize("num_res_blocks", [1, 2])
def test_a_diffusers_folder_gives_the_same_latents(tmp_path: Path, num_res_blocks: int) -> None:
    config = dict(TINY, num_res_blocks=num_res_blocks)
    state = _net(**config).state_dict()
    folder = tmp_path / "vae"
    folder.mkdir()
    torch.save(state, tmp_path / "tokenizer.pth")
    save_file(
        {to_diffusers_name(name, num_res_blocks): tensor for name, tensor in state.items()},
        folder / "diffusion_pytorch_model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"base_dim": 4, "num_res_blocks": num_res_blocks}))
    ours, theirs = (
        WanTokenizer(str(path), config=config).encode(_video(1, 3, 5, 8, 8))
        for path in (tmp_path / "tokenizer.pth", folder)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_weights_become_bfloat16_on_a_gpu_by_default(weights: str, dtype: torch.dtype | None) -> None:
    tokenizer = WanTokenizer(weights, config=TINY, dtype=dtype)
    assert tokenizer.dtype == dtype or (dtype is None and tokenizer.dtype == torch.float32)
    tokenizer.to("meta")  # stands for a GPU, where there is none
    assert tokenizer.dtype == (dtype or torch.bfloat16)


@pytest.mark.gpu
def test_half_precision_on_a_gpu_is_near_float32_on_the_cpu(weights: str) -> None:
    video = _video(1, 3, 9, 32, 32)
    expected = WanTokenizer(weights, config=TINY).encode(video)
    tokenizer = WanTokenizer(weights, config=TINY, device="cuda")
    assert tokenizer.dtype == torch.bfloat16
    latent = tokenizer.encode(video.cuda())
    assert latent.is_cuda
    torch.testing.assert_close(latent.cpu(), expected, rtol=0, atol=0.1)
    assert tokenizer.decode(latent).shape == video.shape


def test_the_check_reports_what_a_constructor_would_raise(tmp_path: Path) -> None:
    assert "download_checkpoints" in problems(WanTokenizer, vae_pth=str(tmp_path / "tokenizer.pth"))[0]
    assert "vae_pth is empty" in problems(WanTokenizer)[0]
    assert problems(WanTokenizer, allow_random=True, temporal_window=4) == []
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    assert "does not fit" in problems(WanTokenizer, vae_pth=str(tmp_path / "other.pth"))[0]
