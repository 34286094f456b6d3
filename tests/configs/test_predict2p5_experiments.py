# SPDX-License-Identifier: Apache-2.0
"""The experiments of Predict2.5 have their published values; all experiments together are linted elsewhere."""

import csv
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.configs.base.config_predict2p5 import (
    get_cosmos_predict2p5_video2world_pipeline,
    get_predict2p5_dit_path,
)
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import save_yaml, to_yaml
from imaginaire.errors import ConfigError
from imaginaire.training import preflight
from tests.configs.test_experiments import composed

TWIN = "predict2p5_video2world_training_tiny_groot_gr1_480"
with (Path(__file__).parent / "experiments_predict2p5.csv").open(newline="") as file:
    PUBLISHED = {row["experiment"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_size_has_its_published_values(name: str) -> None:
    config, row = composed(name), PUBLISHED[name]
    model, data, scheduler = config.model.config, config.dataloader_train, config.scheduler
    pipe, trainer = model.pipe_config, config.trainer
    size = "14B" if "_14b_" in name else "2B"
    has_lora = row["lora_rank"] != ""
    assert model.model_manager_config.dit_path == (f"checkpoints/nvidia/Cosmos-Predict2.5-{size}/base/{row['weights']}")
    assert (data.dataset.dataset_dir, data.dataset.num_frames) == (row["data"], int(row["frames"]))
    assert list(data.dataset.video_size) == [int(row["height"]), int(row["width"])]
    assert (data.dataset.text_encoder, data.batch_size, data.num_workers) == ("none", 1, int(row["workers"]))
    assert pipe.state_t == int(row["state_t"]) and config.model_parallel.context_parallel_size == 1
    assert model.fsdp_shard_size == (32 if size == "14B" else 8) and pipe.ema.enabled
    rank = int(row["lora_rank"] or 16)
    assert (model.train_architecture, model.lora_rank, model.lora_alpha) == ("lora" if has_lora else "base", rank, rank)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2 ** float(row["lr_exponent"]), 1e-3)
    cycle = [list(scheduler[key]) for key in ("warm_up_steps", "cycle_lengths", "f_max", "f_min")]
    assert cycle == [[int(row["warm_up"])], [int(row["cycle"])], [float(row["f_max"])], [float(row["f_min"])]]
    assert (trainer.max_iter, trainer.logging_iter) == (int(row["max_iter"]), int(row["logging_iter"]))
    assert config.checkpoint.save_iter == int(row["save_iter"])
    assert trainer.callbacks.iter_speed.hit_thres == int(row["hit_thres"])
    assert trainer.callbacks.draw_samples.every_n == 200
    assert trainer.run_validation == has_lora
    assert trainer.validation_iter == int(row["validation_iter"] or 100)
    assert list(model.conditional_frames_probs.values()) == list(map(float, row["shares"].split()))
    assert config.job.path == row["run"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_size_has_what_all_of_them_share(name: str) -> None:
    model = composed(name).model.config
    pipe, net = model.pipe_config, model.pipe_config.net
    rope = (net.rope_h_extrapolation_ratio, net.rope_w_extrapolation_ratio, net.rope_t_extrapolation_ratio)
    assert rope == (3.0, 3.0, 1.0), "of both sizes"
    assert (net.crossattn_proj_in_channels, net.use_wan_fp32_strategy) == (100_352, True)
    assert (pipe.resolution, pipe.fps, pipe.precision) == ("720", 16, "bfloat16")
    assert (pipe.min_num_conditional_frames, pipe.max_num_conditional_frames) == (0, 2)
    flow = pipe.flow
    assert (flow.shift, flow.timestep_scale, flow.schedule) == (5.0, 0.001, "shift")
    assert (flow.conditional_frame_timestep, flow.replace_given_frames) == (-1.0, True)
    assert (model.train_time_distribution, model.train_time_shift, model.train_time_table) == (
        "logitnormal",
        5.0,
        False,
    )
    assert (model.loss_scale, model.loss_reduce, model.high_sigma_ratio) == (1.0, "mean", 0.0)
    assert pipe.conditioner.text.dropout_rate == 0.2 and pipe.text_encoder is None
    assert "Reason1Encoder" in str(model.text.encoder._target_)
    assert model.text.encoder.path == "checkpoints/nvidia/Cosmos-Reason1-7B-3210bec"


def test_json_captions_and_their_own_validation_clips() -> None:
    config = composed("predict2_lora_training_2b_cosmos_nemo_assets_json")
    assert config.dataloader_val.dataset.dataset_dir == "datasets/cosmos_nemo_assets_json/validation"
    for loader in (config.dataloader_train, config.dataloader_val):
        assert (loader.dataset.caption_format, loader.dataset.prompt_type) == ("json", "long")


@pytest.mark.slow
def test_the_twin_trains_without_files_and_is_read_back(tmp_path: Path) -> None:
    config = composed(TWIN)
    assert preflight.findings(config) == []
    assert config.model.config.model_manager_config.dit_path == "" and config.model.config.pipe_config.ema.enabled
    assert config.job.path == "cosmos_predict_v2p5/video2world/tiny_groot_gr1_480"
    save_yaml(config, tmp_path / "config.yaml")
    assert to_yaml(compose(str(tmp_path / "config.yaml"))) == (tmp_path / "config.yaml").read_text()


def test_pipelines_by_size() -> None:
    for size, heads, channels in (("2B", 16, 2048), ("14B", 40, 5120), ("tiny", 2, 128)):
        config = get_cosmos_predict2p5_video2world_pipeline(model_size=size)
        assert (config.net.num_heads, config.net.model_channels) == (heads, channels)
        assert config.flow is not None and config.text_encoder is not None
    assert get_predict2p5_dit_path(model_size="14B").endswith("e21d2a49-4747-44c8-ba44-9f6f9243715f_ema_bf16.pt")


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (get_cosmos_predict2p5_video2world_pipeline, dict(model_size="7B"), "2B, 14B, tiny"),
        (get_cosmos_predict2p5_video2world_pipeline, dict(model_size="2B", fps=10), "720 and 10"),
        (get_cosmos_predict2p5_video2world_pipeline, dict(model_size="2B", resolution="48"), "720, 480"),
        (get_predict2p5_dit_path, dict(model_size="tiny"), "predict2p5_video2world_training_tiny_groot_gr1_480"),
        (get_predict2p5_dit_path, dict(model_size="2B", release="distilled"), "'distilled'"),
    ],
)
def test_what_does_not_exist(function: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        function(**arguments)
