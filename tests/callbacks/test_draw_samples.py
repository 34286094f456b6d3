# SPDX-License-Identifier: Apache-2.0
"""Samples in training: always of the same clips, beside the truth, and without a trace in training itself."""

import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.callbacks import draw_samples, fixed_clips
from cosmos_predict2.callbacks.draw_samples import GAP, HEADER, DrawSamples, side_by_side
from cosmos_predict2.callbacks.fixed_clips import first_clips
from cosmos_predict2.data.mock import MockVideos
from cosmos_predict2.data.video import media
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.world_model.config import EMAConfig
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire import distributed, random
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import ConfigError, DataError
from imaginaire.training.callbacks import base
from tests.imaginaire.training.callbacks.fakes import Trainer, lazy, make_config
from tests.models.parts import make_batch, make_model, part
from tests.multiprocess import run_distributed
from tests.training import records

CHEAP = dict(every_n=1, num_sampling_step=1, n_x0_level=2, n_viz_sample=2)


def make_trainer(folder: Path, model: Any, batches: list[Any], **options: Any) -> Any:
    config = make_config({"draw_samples": lazy(DrawSamples, **{**CHEAP, **options})}, seed=0)
    config.dataloader_val = config.dataloader_train = None
    trainer: Any = Trainer(config, folder, model)
    trainer.dataloader_val = batches
    return trainer


def draw(trainer: Any, iteration: int = 1) -> dict[str, Any]:
    """The metrics of one drawing."""
    trainer.start()
    trainer.callbacks.on_training_step_end(trainer.model, {}, {}, torch.zeros(()), iteration)
    trainer.metrics.close()
    return records(trainer.run_dir)[-1]


def averaged_model(**options: Any) -> Any:
    """A model whose average is another than its weights."""
    model = make_model(ema=EMAConfig(enabled=True), **options)
    model.parallelize(ParallelDims())
    with torch.no_grad():
        for shadow in model.ema.shadows.values():
            shadow.mul_(0.9)
    return model


def test_files_and_metrics_of_a_drawing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, averaged_model(), [make_batch(positions=[0, 1])], guidance=[0.0, 3.0])
    trainer.config.dataloader_val = lazy(MockVideos, fps=15.0)  # the batch is labelled as 10
    trainer.images = {}
    trainer.metrics.log_image = lambda name, image, iteration: trainer.images.update({name: image.shape})
    trainer.metrics.log_video = lambda name, video, iteration, fps: trainer.images.update({name: (*video.shape, fps)})
    record = draw(trainer, 500)
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == [
        f"iter_000000500_{name}"
        for name in ("guidance_0.mp4", "guidance_0.png", "guidance_3.mp4", "guidance_3.png", "x0.png")
    ]
    video, fps = media.read_video(tmp_path / "samples/iter_000000500_guidance_0.mp4")
    assert video.shape[1] == 9 and fps == 15.0  # columns: truth, ema, reg
    assert video.shape[3] > 3 * 192 and video.shape[2] > 2 * 192
    for kind in ("ema", "reg"):
        for guidance in (0, 3):
            assert record[f"samples/psnr_{kind}_guidance_{guidance}"] > 0
            assert record[f"samples/moving_psnr_{kind}_guidance_{guidance}"] > 0
        assert {f"samples/x0_mse_{kind}_sigma_{sigma}" for sigma in ("0.5", "80")} <= record.keys()
    assert record["samples/moving_psnr_repeat"] > 0
    assert record["samples/x0_mse_ema_sigma_80"] != record["samples/x0_mse_reg_sigma_80"]
    assert set(trainer.images) == {
        "samples/guidance_0", "samples/guidance_0_video", "samples/guidance_3", "samples/guidance_3_video", "samples/x0"
    }  # fmt: skip
    assert trainer.images["samples/guidance_0_video"][:2] == (9, 3)
    assert trainer.images["samples/guidance_0_video"][-1] == 15


def test_what_is_measured_is_the_distance_to_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that gives back the clip's own latents gets what the tokenizer loses; with the truth of it, no error."""
    monkeypatch.setattr(WorldModel, "generate_latents", lambda self, batch, given, num, **_: given)
    model = make_model()
    model.world.tokenizer = TinyTokenizer()
    record = draw(make_trainer(tmp_path, model, [make_batch(positions=[0, 1])], is_x0=False))
    x0 = model.clean_clips(make_batch(positions=[0, 1]))[1]
    decoded = draw_samples.to_uint8(model.world.tokenizer.decode(x0)).float()
    lost = (decoded - make_batch()["video"].float())[:, :, 1:].square().mean(dim=(1, 2, 3, 4))
    expected = float((10 * torch.log10(255**2 / lost)).mean())
    assert record["samples/psnr_reg"] == pytest.approx(expected, rel=1e-5)
    assert not any("x0" in name for name in record)


def test_each_kind_is_of_its_own_weights(tmp_path: Path) -> None:
    batches, averaged = [make_batch(positions=[0, 1])], make_model()
    with torch.no_grad():
        for parameter in averaged.net.parameters():
            parameter.mul_(0.9)
    both, plain, scaled = (
        draw(make_trainer(tmp_path / name, model, batches, is_sample=False))
        for name, model in (("both", averaged_model()), ("plain", make_model()), ("scaled", averaged))
    )
    name = "samples/x0_mse_{}_sigma_80"
    assert both[name.format("ema")] == pytest.approx(scaled[name.format("reg")], rel=1e-5)
    assert both[name.format("reg")] == pytest.approx(plain[name.format("reg")], rel=1e-5)


def test_training_does_not_notice(tmp_path: Path) -> None:
    model = averaged_model()
    model.net.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.checkpoint_state().items()}
    random.seed_all(3, 0, "test")
    before = torch.rand(4)
    random.seed_all(3, 0, "test")
    draw(make_trainer(tmp_path, model, [make_batch(positions=[0, 1])]))
    assert torch.equal(torch.rand(4), before)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.checkpoint_state().items())


def test_the_first_clips_of_all_ranks_are_taken_in_order() -> None:
    model = make_model()
    image = make_batch(size=1, positions=[0])
    image["images"] = image.pop("video")[:, :, 0] / 127.5 - 1
    one = make_batch(positions=[6, 2])
    read: list[int] = []

    def batches() -> Iterator[Any]:
        for i, batch in enumerate([image, part(one, 0), part(one, 1), make_batch(positions=[8, 9])]):
            read.append(i)
            yield batch

    clips = first_clips(batches(), model, 2)
    assert [clip.position for clip in clips] == [2, 6]
    assert read == [0, 1, 2], "no more is read than is needed"
    assert clips[1].video_1_C_F_H_W is not None and torch.equal(clips[1].video_1_C_F_H_W[0], one["video"][0])
    assert clips[0].num_given == 1 and clips[0].fps == 10.0
    with pytest.raises(DataError, match=r"no video clip to draw.*dataloader_val.*draw_samples=null"):
        first_clips([image], model, 1)


def test_cached_latents_are_drawn_beside_what_they_decode_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_predict2.models.video2world_model.check_tokenizer", lambda tokenizer, batch: None)
    monkeypatch.setattr(WorldModel, "generate_latents", lambda self, batch, given, num, **_: given)
    model = make_model()
    batch = make_batch(positions=[0, 1])
    batch["latents"] = model.world.tokenizer.encode(batch.pop("video") / 127.5 - 1)
    record = draw(make_trainer(tmp_path, model, [batch], is_x0=False))
    assert (tmp_path / "samples/iter_000000001_guidance_0.mp4").is_file()
    assert "samples/psnr_reg" not in record, "the same latents: no error, of which there is no PSNR"


def test_without_validation_data_the_clips_are_those_of_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model(), [], is_sample=False)
    trainer.dataloader_val = None
    trainer.config.dataloader_train = lazy(_batches)
    trainer.model.on_data = mock.Mock()
    record = draw(trainer)
    assert "samples/x0_mse_reg_sigma_80" in record
    assert len(trainer.model.on_data.call_args.args[0]) == 1, "its actions are the run's, as those of training are"
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["iter_000000001_x0.png"]


def _batches() -> list[Any]:
    return [make_batch(positions=[0, 1])]


def test_what_cannot_be_drawn_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draw_samples draws videos, which Model does not make.*draw_samples=null"):
        make_trainer(tmp_path, None, []).start()
    with pytest.raises(ConfigError, match=r"is_ema=True, but the run keeps no average"):
        make_trainer(tmp_path, make_model(), [], is_ema=True).start()
    for wrong in (dict(n_viz_sample=0), dict(num_sampling_step=0), dict(guidance=[])):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DrawSamples(**wrong)


@pytest.mark.parametrize("what", ["reading", "sampling", "writing"])
def test_what_fails_costs_the_samples_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    model = averaged_model()
    before = {name: value.clone() for name, value in model.checkpoint_state().items()}
    trainer = make_trainer(tmp_path, model, [make_batch(positions=[0, 1])])
    trainer.start()
    with monkeypatch.context() as broken:
        if what == "reading":
            broken.setattr(fixed_clips, "_read", _refuse)
        elif what == "sampling":
            broken.setattr(model.net.blocks[-1], "forward", _refuse)
        else:
            broken.setattr(media, "write_video", _refuse)
        for iteration in (1, 2):
            trainer.callbacks.on_training_step_end(model, {}, {}, torch.zeros(()), iteration)
    assert all(torch.equal(value, before[name]) for name, value in model.checkpoint_state().items())
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "samples failed" in warning and "OSError: it is gone" in warning
    trainer.callbacks.on_training_step_end(model, {}, {}, torch.zeros(()), 3)
    trainer.metrics.close()
    assert [record["iteration"] for record in records(tmp_path)] == [3], "and the next time they are drawn"


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError("it is gone")


def _fail_on_two_ranks(folder: Path) -> tuple[list[Any], str]:
    """On each of two ranks with a sharded network: what is logged, and how it ends when one rank alone fails."""
    dims, rank = parallel.init_dims(), distributed.rank()
    model = make_model(fsdp_shard_size=2)
    model.parallelize(dims)
    trainer = make_trainer(folder, model, [make_batch(size=1, positions=[rank])], n_viz_sample=2)
    trainer.dims = dims
    trainer.metrics.open(0)
    fails_here = mock.patch.object(fixed_clips, "_read", _refuse) if rank == 1 else nullcontext()
    with fails_here:  # the clips of one rank: the other must not wait for them
        trainer.callbacks.on_training_step_end(model, {}, {}, torch.zeros(()), 1)
    with mock.patch.object(model.net.blocks[-1], "forward", _refuse):  # in the middle of the network, on all ranks
        trainer.callbacks.on_training_step_end(model, {}, {}, torch.zeros(()), 2)
    trainer.callbacks.on_training_step_end(model, {}, {}, torch.zeros(()), 3)
    trainer.metrics.close()
    found = records(trainer.run_dir) if rank == 0 else []
    fails_here = mock.patch.object(model.net.blocks[-1], "forward", _refuse) if rank == 1 else nullcontext()
    with fails_here, mock.patch.object(base, "_IN_STEP_S", 1.0), pytest.raises((OSError, RuntimeError)) as error:
        trainer.callbacks.on_training_step_end(model, {}, {}, torch.zeros(()), 4)
    if rank == 1:
        os._exit(1)  # as a process does that an exception ends
    return found, str(error.value)


@pytest.mark.slow
def test_the_failure_of_one_rank_leaves_no_other_waiting(tmp_path: Path) -> None:
    (found, error), _ = run_distributed(_fail_on_two_ranks, 2, args=(tmp_path,), lost={1})
    assert [record["iteration"] for record in found] == [3]
    assert "onnection" in error


# Clips in rows and columns


def _clip(value: int, frames: int = 3, height: int = 4, width: int = 6) -> Tensor:
    return torch.full((3, frames, height, width), value, dtype=torch.uint8)


def test_clips_lie_under_their_names_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_samples, "LEAST", 6)
    video = side_by_side([[_clip(10), _clip(20)], [_clip(30), _clip(40)]], ["truth", "ema"])
    assert video.shape == (3, 3, HEADER + 2 * (4 + GAP), 3 * GAP + 12)
    for row, column, value in ((0, 0, 10), (0, 1, 20), (1, 0, 30), (1, 1, 40)):
        top, left = HEADER + row * (4 + GAP), GAP + column * (6 + GAP)
        assert (video[:, :, top : top + 4, left : left + 6] == value).all()
        assert (video[:, :, top + 4, left] == 255).all()
    assert (video[:, 0, :HEADER] < 128).any(), "the names are there"


def test_a_shorter_clip_holds_its_last_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_samples, "LEAST", 6)
    moving = torch.stack([_clip(value, frames=1)[:, 0] for value in (1, 2)], dim=1)
    video = side_by_side([[_clip(9, frames=4), moving]], ["a", "b"])
    assert video[0, :, HEADER, -GAP - 1].tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("size", "shown"), [((48, 48), (192, 192)), ((704, 1280), (281, 512)), ((200, 300), (200, 300))]
)
def test_small_clips_are_magnified_and_large_ones_reduced(size: tuple[int, int], shown: tuple[int, int]) -> None:
    video = side_by_side([[_clip(1, 1, *size)]], ["a"])
    assert video.shape[-2:] == (HEADER + GAP + shown[0], 2 * GAP + shown[1])
