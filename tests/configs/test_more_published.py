# SPDX-License-Identifier: Apache-2.0
"""Published experiments of pictures and of several cameras have their published values."""

import pytest

from imaginaire.config.compose import compose

BASE = "cosmos_predict2/configs/base/config.py"
WAYMO = "10fps_7views_29frames_waymo5views"
MULTIVIEW = "Cosmos-Predict2-2B-Multiview/model-720p-10fps-7views-29frames.pt"


@pytest.mark.parametrize(
    ("name", "size", "sac_mode", "lora_rank"),
    [
        (f"predict2_multiview_training_2b_480p_{WAYMO}", [480, 848], "none", None),
        (f"predict2_multiview_training_2b_720p_{WAYMO}", [704, 1280], "predict2_2b_720", None),
        (f"predict2_multiview_lora_training_2b_720p_{WAYMO}", [704, 1280], "none", 16),
    ],
)
def test_several_cameras(name: str, size: list[int], sac_mode: str, lora_rank: int | None) -> None:
    config = compose(BASE, [f"experiment={name}"])
    model, pipe, data = config.model.config, config.model.config.pipe_config, config.dataloader_train.dataset
    assert model.model_manager_config.dit_path.endswith(MULTIVIEW) and model.high_sigma_ratio == 0.05
    assert (pipe.state_t, pipe.fps, pipe.ema.enabled, pipe.net.sac_config.mode) == (8, 10, True, sac_mode)
    assert (pipe.min_num_conditional_frames, pipe.max_num_conditional_frames) == (0, 1)
    assert list(pipe.condition_locations) == ["first_random_n"] and pipe.conditioner.text.dropout_rate == 0.2
    assert [pipe.net[f"rope_{axis}_extrapolation_ratio"] for axis in "thw"] == [8 / 24, 3.0, 3.0]
    assert (model.fsdp_shard_size, config.model_parallel.context_parallel_size) == (8, 8)
    assert (model.train_architecture == "lora") is (lora_rank is not None)
    assert model.lora_rank == model.lora_alpha == 16
    assert (data.dataset_dir, data.num_frames, list(data.video_size)) == ("datasets/waymo", 29, size)
    assert list(pipe.net.view_ids) == [data.camera_to_view_id[key] for key in data.camera_keys] == [4, 5, 0, 1, 2]
    assert data.front_camera_key == "pinhole_front" and data.front_view_caption_only and data.is_train
    assert not config.dataloader_val.dataset.is_train and config.dataloader_train.num_workers == 6
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2**-14.5, 0.1)
    cycle = [list(config.scheduler[key]) for key in ("warm_up_steps", "cycle_lengths", "f_max", "f_min")]
    assert cycle == [[2000], [40_000], [0.25], [0.1]]
    assert (config.trainer.max_iter, config.checkpoint.save_iter, config.trainer.logging_iter) == (100_000, 500, 100)
    start = "lora_2b" if lora_rank else "2b"
    assert (config.job.project, config.job.group) == ("posttraining", "multiview")
    assert config.job.name == f"{start}_{'480' if size[0] == 480 else '720'}p_{WAYMO}"
    drawn = config.trainer.callbacks.every_n_sample_ema
    assert (drawn.every_n, list(drawn.guidance), drawn.num_sampling_step) == (500, [0, 2, 7], 35)


@pytest.mark.parametrize(
    ("size", "shard", "exponent", "weight_decay", "f_max"), [("2b", 1, -15, 0.1, 0.17), ("14b", 8, -14.5, 0.2, 0.4)]
)
def test_pictures(size: str, shard: int, exponent: float, weight_decay: float, f_max: float) -> None:
    config = compose(BASE, [f"experiment=predict2_text2image_training_{size}_cosmos_nemo_assets"])
    model, pipe, data = config.model.config, config.model.config.pipe_config, config.dataloader_train.dataset
    assert model.model_manager_config.dit_path.endswith(f"Cosmos-Predict2-{size.upper()}-Text2Image/model.pt")
    assert (model.fsdp_shard_size, model.high_sigma_ratio, pipe.ema.enabled, pipe.state_t) == (shard, 0.0, True, 1)
    assert (data.dataset_dir, list(data.image_size)) == ("datasets/cosmos_nemo_assets_images", [768, 1360])
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2**exponent, weight_decay)
    cycle = [list(config.scheduler[key]) for key in ("warm_up_steps", "cycle_lengths", "f_max", "f_min")]
    assert cycle == [[0], [1000], [f_max], [0.0]]
    assert (config.trainer.max_iter, config.checkpoint.save_iter, config.trainer.logging_iter) == (1000, 500, 10)
    assert (config.job.group, config.job.name) == ("text2image", f"{size}_cosmos_nemo_assets")
    assert config.dataloader_val.dataset._target_.__name__ == "MockImages" and config.dataloader_train.num_workers == 8
