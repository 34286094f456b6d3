# SPDX-License-Identifier: Apache-2.0
"""The tiny tokenizer: the contract of the large one, and pictures that come back."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from cosmos_predict2.data.video.media import read_image, resize_and_crop
from cosmos_predict2.interfaces import VideoTokenizer
from cosmos_predict2.tokenizers import tiny_fit
from cosmos_predict2.tokenizers.tiny import SHIPPED, TinyAutoencoder, TinyTokenizer, load
from cosmos_predict2.tokenizers.tiny_fit import COMPONENTS, Length, coders, fit, write
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from cosmos_predict2.toy_world import make_episodes
from cosmos_predict2.toy_world.physics import TASKS
from imaginaire.errors import CheckpointError
from scripts import fit_tiny_tokenizer
from tests.programs import call

PHOTO = Path(__file__).parents[2] / "assets/photo/coffee.jpg"
HELD_OUT = 10**6  # the first episode of the series that no fit reaches


def _video(frames: np.ndarray) -> Tensor:
    """[B, 3, F, H, W] in [-1, 1] of uint8 [B, F, H, W, 3]."""
    return torch.from_numpy(frames).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


@torch.no_grad()
def _psnr(coder: TinyTokenizer | TinyAutoencoder, video: Tensor) -> float:
    """Mean decibels over clips, of pictures as they are shown."""
    back = coder.decode(coder.encode(video)).clamp(-1, 1)
    return (10 * torch.log10(4 / (back - video).square().mean((1, 2, 3, 4)))).mean().item()


@pytest.fixture(scope="module")
def tokenizer() -> TinyTokenizer:
    return TinyTokenizer()


@pytest.mark.parametrize(("size", "least"), [(48, 31.5), (64, 34.0)])
@pytest.mark.parametrize("mix", ["mixed", "expert"])
def test_held_out_toy_world_clips_come_back(tokenizer: TinyTokenizer, size: int, least: float, mix: str) -> None:
    episodes = make_episodes(16, 0, mix=mix, length=24, size=size, tasks=tuple(TASKS), first=HELD_OUT)
    assert _psnr(tokenizer, _video(np.stack([episodes.render(i, 4, 17) for i in range(16)]))) > least


def test_a_photograph_panned_and_zoomed_comes_back(tokenizer: TinyTokenizer) -> None:
    photo = read_image(PHOTO)
    pan = torch.stack([photo[:, 20 + i : 148 + i, 10 + 2 * i : 202 + 2 * i] for i in range(13)], dim=1)
    zoom = torch.stack(
        [resize_and_crop(photo[:, 2 * i : 192 - 2 * i, 2 * i : 288 - 2 * i], (128, 192)) for i in range(13)], dim=1
    )
    for clip in (pan, zoom):
        assert _psnr(tokenizer, clip.unsqueeze(0).float() / 127.5 - 1) > 22


def test_it_is_a_video_tokenizer(tokenizer: TinyTokenizer) -> None:
    assert isinstance(tokenizer, VideoTokenizer)
    factors = tokenizer.spatial_compression_factor, tokenizer.temporal_compression_factor
    assert (tokenizer.latent_ch, *factors) == (16, 8, 4)
    assert tokenizer.dtype == torch.float32 and tokenizer.to("cpu") is tokenizer
    assert not any(parameter.requires_grad for parameter in tokenizer.net.parameters())


@pytest.mark.parametrize("num_frames", [1, 5, 13, 17])
@pytest.mark.parametrize("size", [(48, 48), (64, 64), (8, 24)])
def test_sizes_in_and_out(tokenizer: TinyTokenizer, num_frames: int, size: tuple[int, int]) -> None:
    video = torch.rand(2, 3, num_frames, *size) * 2 - 1
    latent = tokenizer.encode(video)
    assert latent.shape == (2, 16, 1 + (num_frames - 1) // 4, size[0] // 8, size[1] // 8)
    assert tokenizer.decode(latent).shape == video.shape


def test_frames_are_coded_in_groups_that_know_nothing_of_each_other(tokenizer: TinyTokenizer) -> None:
    video = torch.rand(1, 3, 13, 16, 16) * 2 - 1
    changed = video.clone()
    changed[:, :, 5:9] *= -1
    before, after = tokenizer.encode(video), tokenizer.encode(changed)
    is_same = [torch.allclose(before[:, :, i], after[:, :, i], atol=1e-6) for i in range(4)]
    assert is_same == [True, True, False, True]
    torch.testing.assert_close(tokenizer.encode(video[:, :, :5]), before[:, :, :2], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        tokenizer.decode(before[:, :, :2]), tokenizer.decode(before)[:, :, :5], rtol=0, atol=1e-5
    )


def test_the_shipped_weights_are_small_and_record_how_they_were_made() -> None:
    assert SHIPPED.stat().st_size <= 2**20
    with safe_open(SHIPPED, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["command"].startswith("python -m scripts.fit_tiny_tokenizer --out cosmos_predict2/tokenizers/")
    assert metadata["seed"].isdigit() and len(metadata["commit"]) == 12


def test_weights_of_other_sizes_load_and_foreign_ones_are_named(tmp_path: Path) -> None:
    net = TinyAutoencoder(width=8, num_blocks=3)
    torch.save(net.state_dict(), tmp_path / "tiny.pt")
    loaded = TinyTokenizer(str(tmp_path / "tiny.pt"))
    assert len(loaded.net.frame.residual_in) == 5
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"(?s)other\.pt does not fit"):
        TinyTokenizer(str(tmp_path / "other.pt"))


def _other_pictures(num: int, seed: int) -> np.ndarray:
    """uint8 [num, 5, 32, 32, 3]: a bright bar moves over stripes; the shipped tokenizer has seen nothing like it."""
    draws = np.random.default_rng(seed)
    stripes = 20 + 15 * (np.arange(32) // 2 % 2)
    pictures = np.broadcast_to(stripes[:, None], (num, 5, 32, 32)).copy()
    for clip, start in zip(pictures, draws.integers(0, 20, num), strict=True):
        for k, frame in enumerate(clip):
            frame[:, start + 2 * k : start + 2 * k + 4] = 220
    return np.stack([pictures, pictures // 2, 90 + pictures // 3], axis=-1).astype(np.uint8)


def test_principal_components_are_the_best_linear_codes() -> None:
    net, steps = fit(_other_pictures(24, 0), Length(), seed=0, start=COMPONENTS)
    assert steps == 0
    for coder, num_frames in coders(net):
        basis = coder.linear_in.weight.flatten(1) * num_frames**0.5
        torch.testing.assert_close(basis @ basis.T, torch.eye(16), rtol=0, atol=1e-4)
    assert _psnr(net, _video(_other_pictures(8, 1))) > 23


def test_a_fit_to_other_pictures_is_nearer_centred_and_the_same_again(tmp_path: Path) -> None:
    learnt, fresh = _other_pictures(24, 0), _video(_other_pictures(8, 1))
    net, steps = fit(learnt, Length(steps=12), seed=0, start=COMPONENTS)
    write(str(tmp_path / "fitted.safetensors"), net, {"steps": str(steps)})
    tokenizer = TinyTokenizer(str(tmp_path / "fitted.safetensors"))
    latent = tokenizer.encode(fresh)
    assert steps == 12
    assert _psnr(tokenizer.net, fresh) > _psnr(load(str(SHIPPED)), fresh) + 3
    assert latent.mean((0, 2, 3, 4)).abs().max() < 1 and 0.7 < latent.std() < 1.4
    again, _ = fit(learnt, Length(steps=12), seed=0, start=COMPONENTS)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in net.state_dict().items())
    from_shipped, _ = fit(learnt, Length(steps=3), seed=0, start=str(SHIPPED))
    assert _psnr(from_shipped, fresh) > _psnr(load(str(SHIPPED)), fresh)


@pytest.mark.gpu
def test_a_fit_on_a_gpu_is_as_good() -> None:
    learnt, fresh = _other_pictures(24, 0), _video(_other_pictures(8, 1))
    on_cpu, on_gpu = (
        fit(learnt, Length(steps=12), seed=0, start=COMPONENTS, device=device)[0].cpu() for device in ("cpu", "cuda")
    )
    assert abs(_psnr(on_gpu, fresh) - _psnr(on_cpu, fresh)) < 0.5


def test_the_program_fits_to_what_is_not_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(str(tmp_path / "data"), ToyFolder(episodes=4, frames=13, val_fraction=0.0, form="lerobot"))
    split, asked = SimpleNamespace(train=(0, 2, 3), calibrate=(1,)), list[Any]()
    monkeypatch.setattr("cosmos_predict2.data.split.split_of", lambda *_: split)
    monkeypatch.setattr(tiny_fit, "fit", lambda *given, **how: asked.append((*given, how)) or fit(*given, **how))
    words = ("--data", tmp_path / "data", "--split", "x", "--out", tmp_path / "own.safetensors", "--start", COMPONENTS)
    assert call(fit_tiny_tokenizer, *words, "--minutes", 0) == 0
    found = json.loads((tmp_path / "own.json").read_text())
    assert found["steps"] == 0 and found["psnr"] != found["psnr_of_shipped"] > 30
    ((pictures, length, how),) = asked
    assert pictures.shape == (3, 13, 48, 48, 3)
    assert (length.clock, how["start"]) == (time.process_time, COMPONENTS)
