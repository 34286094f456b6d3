# SPDX-License-Identifier: Apache-2.0
"""Measuring a model on held-out clips: what counts, and against what."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.callbacks.draw_samples import GAP, HEADER
from cosmos_predict2.configs.base.config_video2world import get_cosmos_predict2_video2world_pipeline
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.data.video import media
from cosmos_predict2.evaluation.metrics import held_out
from cosmos_predict2.evaluation.metrics.held_out import HeldOutClips
from cosmos_predict2.models.text import TrainingText, TrainingTextConfig
from cosmos_predict2.released import TINY_VIDEO2WORLD
from cosmos_predict2.world_model.world_model import build_world_model
from imaginaire.config import lazy_config
from imaginaire.errors import ConfigError, DataError
from scripts import evaluate_world_model
from tests.programs import call

SIGMAS = (1.0, 10.0)


CONFIG = get_cosmos_predict2_video2world_pipeline(model_size="tiny")


def read_clips(dataset: Any, num: int, **more: Any) -> HeldOutClips:
    return held_out.read_clips(dataset, lazy_config.instantiate(CONFIG.tokenizer), CONFIG, num, **more)


@pytest.fixture(scope="module")
def clips() -> HeldOutClips:
    return read_clips(ToyWorldVideos(num_episodes=8, num_steps=16, split="val"), 8)


def test_clips_have_the_text_that_training_puts_in_place_of_theirs(tmp_path: Path) -> None:
    dataset = ToyWorldVideos(num_episodes=2, num_steps=16, split="val")
    constant = torch.randn(1, 5, 64)
    torch.save(constant, tmp_path / "text.pt")
    text = TrainingText(TrainingTextConfig(constant_path=str(tmp_path / "text.pt")))
    read = read_clips(dataset, 2, with_text=partial(text.added_to, device=torch.device("cpu")))
    assert torch.equal(read.condition.crossattn_emb_B_S_E, constant.expand(2, -1, -1))


def test_the_base_that_ships_beats_random_weights_and_every_linear_denoiser(clips: HeldOutClips) -> None:
    linear = held_out.linear_losses(clips, clips, SIGMAS)  # fitted to the very clips that it is measured on
    paths = ("", TINY_VIDEO2WORLD)
    worlds = (build_world_model(CONFIG, dtype=torch.float32).load(path) for path in paths)
    found = [held_out.losses(world, clips, SIGMAS) for world in worlds]
    assert sum(found[1]) < sum(found[0]) / 3
    assert all(found[1][i] < linear[name][i] for name in linear for i in range(len(SIGMAS)))


def test_a_linear_denoiser_is_the_best_of_its_kind(clips: HeldOutClips) -> None:
    x0 = clips.x0_B_C_T_H_W[:, :, 1:]
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    for sigma in SIGMAS:
        x = (x0 + sigma * noise).flatten().double()
        columns = torch.stack([x, torch.ones_like(x)], dim=1)
        wanted = x0.flatten().double()[:, None]
        left = columns @ torch.linalg.lstsq(columns, wanted).solution - wanted
        fitted = float(left.square().mean()) * ((1 + sigma) / sigma) ** 2
        found = held_out.linear_losses(clips, clips, [sigma])
        assert found["scalar"][0] == pytest.approx(fitted, rel=0.02)  # another noise
        assert found["scalar"][0] > found["per channel"][0] > found["per latent"][0]


def test_given_frames_and_still_pixels_count_nowhere(clips: HeldOutClips) -> None:
    still = held_out.repeated(clips)
    assert torch.equal(still[:, :, 0], clips.video_B_C_F_H_W[:, :, 0])
    moves = (clips.video_B_C_F_H_W.int() - still.int()).abs().amax(1, keepdim=True) > 32
    elsewhere = torch.where(moves, clips.video_B_C_F_H_W, 0)
    elsewhere[:, :, 0] = 7
    assert held_out.moving_psnr(elsewhere, clips) == float("inf")
    off_by_ten = (clips.video_B_C_F_H_W.int() + 10).clamp(max=255)  # no picture of the toy world is brighter than 245
    assert held_out.moving_psnr(off_by_ten, clips) == pytest.approx(20 * torch.log10(torch.tensor(25.5)).item())
    assert held_out.moving_psnr(still, clips) < 15
    assert max(held_out.movement(clips)) > 0.01


def test_one_clip_in_which_nothing_moves_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its figures were nan, and the verdict that of a model that is no better than a standstill."""
    read = ToyWorldVideos.__getitem__

    def still(self: ToyWorldVideos, index: int) -> dict[str, Any]:
        item = read(self, index)
        return {**item, "video": item["video"][:, :1].expand_as(item["video"]).contiguous()}

    monkeypatch.setattr(ToyWorldVideos, "__getitem__", still)
    words = ["--experiment", "tiny_supervised_toy_world", "--dit_path", TINY_VIDEO2WORLD, "--num_clips", "1"]
    assert call(evaluate_world_model, *words, "--num_steps", "1", "--out", str(tmp_path)) == 2
    assert "Nothing moves in this clip" in capsys.readouterr().err


def test_the_loss_of_given_frames_is_left_out(clips: HeldOutClips) -> None:
    wrong: Tensor = clips.x0_B_C_T_H_W.clone()
    wrong[:, :, 0] += 100  # a linear denoiser returns given frames as they are; their own error would be seen at once
    part = replace(clips, x0_B_C_T_H_W=wrong)
    assert held_out.linear_losses(part, part, [1.0]) == held_out.linear_losses(clips, clips, [1.0])


@pytest.mark.parametrize("item", [{"latents": torch.zeros(1)}, {"video": torch.zeros(1)}])
def test_data_without_frames_or_embeddings_are_told(item: dict[str, Tensor]) -> None:
    with pytest.raises(DataError, match=r"list gives no '(video|t5_text_embeddings)', .* --experiment NAME --"):
        read_clips([item], 1)


def test_training_clips_of_another_size_are_told(clips: HeldOutClips) -> None:
    wide = replace(clips, video_B_C_F_H_W=clips.video_B_C_F_H_W.repeat_interleave(2, dim=4))
    told = r"Training clips are 13x48x96, held-out clips 13x48x48 .*dataloader_val\.dataset\.video_size=\[48,96\]"
    with pytest.raises(ConfigError, match=told):
        held_out.linear_losses(wide, clips, [1.0])


@pytest.mark.slow
def test_the_command_writes_figures_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = "predict2_video2world_lora_training_tiny_cosmos_nemo_assets"
    words = ["--experiment", experiment, "--dit_path", TINY_VIDEO2WORLD, "--num_clips", "3", "--num_steps", "2"]
    words += ["--json", str(tmp_path / "out.json"), "--save_path", str(tmp_path / "out.mp4")]
    words += ["--out", str(tmp_path / "page"), "--", "dataloader_val.dataset.fps=5"]
    shutil.copy(TINY_VIDEO2WORLD, tmp_path / "start.safetensors")  # of which the training made its first step
    words += [f"checkpoint.load_path={tmp_path / 'start.safetensors'}"]
    assert call(evaluate_world_model, *words) == 0
    printed = capsys.readouterr().out
    assert printed.partition("\n")[0].endswith("measured on ToyWorldVideos")
    assert f"video: {tmp_path / 'out.mp4'} (truth" in printed and f"contact sheet: {tmp_path / 'out.png'}" in printed
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["before"] == figures["after"]  # the adapters of this experiment start from the base
    assert figures["ratio"] == 1 and figures["num_clips"] == 3 and len(figures["sigmas"]) == 8
    base, start = f"{TINY_VIDEO2WORLD} (regular weights)", f"{tmp_path}/start.safetensors (regular weights)"
    assert figures["weights"] == base and f"weights: {base}\nbefore the training: {start}\n" in printed
    assert json.loads((tmp_path / "page" / "figures.json").read_text()) == figures
    page = (tmp_path / "page" / "index.html").read_text()
    assert f"The model {figures['verdict']}." in page and f"before the training: {start}" in page
    assert 0 < page.index('<p class="verdict"') < page.index("<ul>") < page.index("<video ") < page.index("<table>")
    shown = re.findall(r'src="([^"]+)"', page)
    assert len(shown) == 3 * 3 and all((tmp_path / "page" / file).is_file() for file in shown)
    assert page.count("<table>") == 2 and page.count('class="note"') == 3
    video, fps = media.read_video(tmp_path / "out.mp4")
    assert fps == 5, "that of the clips"
    # Truth, before and after of three clips.
    assert video.shape == (3, 13, HEADER + 3 * (192 + GAP), GAP + 3 * (192 + GAP))
    assert (tmp_path / "out.png").is_file()
