# SPDX-License-Identifier: Apache-2.0
"""Every experiment composes; the released sizes have their published values; all are free of what lint finds."""

import csv
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from cosmos_predict2.configs.base.config_video2world import (
    get_cosmos_predict2p5_video2world_pipeline,
    get_predict2p5_dit_path,
)
from cosmos_predict2.tokenizers.sizes import pixel_frames
from imaginaire.config import nodes as config_nodes
from imaginaire.config.compose import compose, experiment_names
from imaginaire.config.lazy_config import save_yaml, to_yaml
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError
from imaginaire.training import preflight

ROOT = Path(__file__).parent.parent.parent
BASE = "cosmos_predict2/configs/base/config.py"
V2W = "predict2_video2world_training"
VARIANTS = ("fps", "_320_wo_resume", "_320_mock_wo_resume")  # of an experiment that is looked at itself
# Made by the same functions as others, from tables whose rows are checked for themselves.
MORE_VARIANTS = re.compile(r"_wo_resume$|^vla_(?!grpo_openvla_libero).*_libero_(?!10$)")
FAMILIES = {  # a tiny experiment, and the released one that it stands for
    f"{V2W}_tiny_groot_gr1_480": f"{V2W}_2b_groot_gr1_480",
    f"{V2W}_tiny_agibot_head_center_fisheye_color": f"{V2W}_2b_agibot_head_center_fisheye_color",
    f"{V2W}_tiny_cosmos_nemo_assets": f"{V2W}_2b_cosmos_nemo_assets",
    "predict2_video2world_lora_training_tiny_cosmos_nemo_assets": (
        "predict2_video2world_lora_training_2b_cosmos_nemo_assets"
    ),
    f"{V2W}_tiny_video2world_data": f"{V2W}_2b_video2world_data",
}
with (Path(__file__).parent / "experiments.csv").open(newline="") as file:
    PUBLISHED = {row["experiment"]: row for row in csv.DictReader(file)}


ALL = experiment_names(str(ROOT / BASE))


def by_name(some: Iterable[str]) -> list[Any]:
    """Parameters for a test of each; variants of one experiment in slow, and most in long, since each is composed."""

    def tier(name: str) -> list[Any]:
        if name.endswith(VARIANTS):
            return [pytest.mark.slow]
        return [pytest.mark.long] if MORE_VARIANTS.search(name) else []

    return [pytest.param(name, marks=tier(name)) for name in some]


@functools.cache
def composed(name: str) -> Config:
    """One composition for all tests of this folder."""
    return compose(BASE, [f"experiment={name}"])


# --- the published values ---


def test_all_published_experiments_are_there() -> None:
    assert len(PUBLISHED) == 18
    assert set(PUBLISHED) | set(FAMILIES) <= set(ALL)


@pytest.mark.parametrize("name", by_name(PUBLISHED))
def test_a_released_size_has_its_published_values(name: str) -> None:
    config, row = composed(name), PUBLISHED[name]
    model, data = config.model.config, config.dataloader_train
    pipe = model.pipe_config
    lora_rank = int(row["lora_rank"] or 16)
    cycle = [list(config.scheduler[key]) for key in ("warm_up_steps", "cycle_lengths", "f_max", "f_min")]
    number = {key: int(value) for key, value in row.items() if value.isdecimal()}
    values = {  # found, published
        "weights": (model.model_manager_config.dit_path, f"checkpoints/nvidia/{row['weights']}"),
        "tokenizer": (
            pipe.tokenizer.vae_pth,
            f"checkpoints/nvidia/{row['weights'].split('/')[0]}/tokenizer/tokenizer.pth",
        ),
        "data": (data.dataset.dataset_dir, row["data"]),
        "frames": (data.dataset.num_frames, number["frames"]),
        "size": (list(data.dataset.video_size), [number["height"], number["width"]]),
        "state_t": (pipe.state_t, number["state_t"]),
        "context_parallel": (config.model_parallel.context_parallel_size, number["context_parallel"]),
        "shard": (model.fsdp_shard_size, number["shard"]),
        "lora": (
            (model.train_architecture, model.lora_rank, model.lora_alpha),
            ("lora" if row["lora_rank"] else "base", lora_rank, lora_rank),
        ),
        "ema": ((pipe.ema.enabled, pipe.ema.rate, pipe.ema.iteration_shift), (row["ema"] == "on", 0.1, 0)),
        "lr": (config.optimizer.lr, 2 ** float(row["lr_exponent"])),
        "weight_decay": (config.optimizer.weight_decay, float(row["weight_decay"])),
        "cycle": (cycle, [[float(row[key])] for key in ("warm_up", "cycle", "f_max", "f_min")]),
        "f_start": (list(config.scheduler.f_start), [1e-6]),
        "max_iter": (config.trainer.max_iter, number["max_iter"]),
        "save_iter": (config.checkpoint.save_iter, number["save_iter"]),
        "logging_iter": (config.trainer.logging_iter, number["logging_iter"]),
        "loader": (
            (data.batch_size, data.num_workers, data.pin_memory, data.shuffle),
            (number["batch"], number["workers"], True, True),
        ),
        "hit_thres": (config.trainer.callbacks.iter_speed.hit_thres, number["hit_thres"]),
        "given": (
            (pipe.min_num_conditional_frames, pipe.max_num_conditional_frames),
            (number["min_given"], number["max_given"]),
        ),
        "run": (config.job.path, row["run"]),
    }
    assert {key: found for key, (found, _) in values.items()} == {key: right for key, (_, right) in values.items()}


@pytest.mark.parametrize("name", by_name(PUBLISHED))
def test_a_released_size_has_what_all_of_them_share(name: str) -> None:
    config = composed(name)
    model, trainer, optimizer = config.model.config, config.trainer, config.optimizer
    pipe = model.pipe_config
    is_14b, is_groot, is_agibot = "_14b_" in name, "groot" in name, "agibot" in name
    assert (trainer.distributed_parallelism, trainer.run_validation, trainer.validation_iter) == ("fsdp", False, 100)
    assert (trainer.grad_accum_iter, trainer.seed, dict(trainer.grad_scaler_args)) == (1, 0, {"enabled": False})
    assert list(trainer.callbacks)[:6] == [
        "low_prec", "iter_speed", "device_monitor", "manual_gc", "loss_log", "grad_clip"
    ]  # fmt: skip
    assert trainer.callbacks.grad_clip.clip_norm == 1.0
    assert "fused_adamw" in str(optimizer._target_) and "lambda_linear" in str(config.scheduler._target_)
    assert "StandardCheckpointer" in str(config.checkpoint.type["_target_"])
    assert (list(optimizer.betas), optimizer.eps, optimizer.master_weights) == ([0.9, 0.99], 1e-8, True)
    assert config.scheduler.verbosity_interval == 0
    assert not pipe.guardrail_config.enabled and pipe.prompt_refiner_config.enabled == is_groot
    assert (model.high_sigma_ratio, model.loss_scale, model.loss_reduce) == (0.05, 10.0, "mean")
    assert (model.adjust_video_noise, model.precision, pipe.state_ch) == (True, "bfloat16", 16)
    assert model.lora_target_modules == "q_proj,k_proj,v_proj,output_proj,mlp.layer1,mlp.layer2"
    rates = {key: embedder.dropout_rate for key, embedder in pipe.conditioner.items()}
    assert rates == {"text": 0.2, "fps": 0.0, "padding_mask": 0.0, "use_video_condition": 0.0}
    assert pipe.conditioning_strategy == "frame_replace" and pipe.sigma_conditional == 1e-4
    assert pipe.text_encoder is None and pipe.tokenizer.chunk_duration == 81 and pipe.tokenizer.temporal_window == 16
    net = pipe.net
    rope = (net.rope_h_extrapolation_ratio, net.rope_w_extrapolation_ratio, net.rope_t_extrapolation_ratio)
    assert rope == ((2.0, 2.0, 20 / 24) if is_14b else (2.0, 2.0, 1.0) if is_agibot else (3.0, 3.0, 1.0))
    numbers = (net.model_channels, net.num_blocks, net.num_heads)
    assert numbers == ((5120, 36, 40) if is_14b else (2048, 28, 16))
    assert dict(net.sac_config) == {"mode": f"predict2_{'14b' if is_14b else '2b'}_720", "every_n_blocks": 1}
    variant = re.search(r"_(480|720)p_(10|16)fps$", name)
    assert (pipe.resolution, pipe.fps) == ((variant[1], int(variant[2])) if variant else ("720", 16))
    val = config.dataloader_val
    if is_agibot:
        assert val.dataset.dataset_dir == "datasets/agibot_head_center_fisheye_color/val"
        assert list(val.dataset.video_size) == list(config.dataloader_train.dataset.video_size)
        assert (val.dataset.num_frames, val.num_workers, val.shuffle) == (93, 4, False)
    else:
        assert list(val.datasets) == ["image_data", "video_data"], "noise: nothing is kept back for validation"


@pytest.mark.parametrize("choice", ["~data_train", "data_train=toy"])
def test_the_data_of_an_experiment_come_from_their_group(choice: str) -> None:
    """Data that an experiment takes from a group can be cleared and replaced; its own could not."""
    data = compose(BASE, [f"experiment={V2W}_2b_agibot_head_center_fisheye_color_480p_10fps", choice]).dataloader_train
    if choice == "~data_train":
        assert data is None
        return
    assert "ToyWorldVideos" in str(data.dataset._target_) and "dataset_dir" not in data.dataset
    assert data.batch_size == 1 and data.num_workers == 0


# --- tiny twins ---


@pytest.mark.parametrize(("name", "released"), FAMILIES.items())
def test_a_tiny_twin_runs_anywhere_and_conditions_as_its_family(name: str, released: str) -> None:
    config, other = composed(name), composed(released)
    pipe, its = config.model.config.pipe_config, other.model.config.pipe_config
    assert config.job.path == other.job.path.replace("/2b_", "/tiny_")
    assert (pipe.min_num_conditional_frames, pipe.max_num_conditional_frames) == (
        its.min_num_conditional_frames,
        its.max_num_conditional_frames,
    )
    assert config.model.config.train_architecture == other.model.config.train_architecture
    assert (pipe.net.num_blocks, pipe.net.model_channels, pipe.precision) == (4, 128, "float32")
    assert config.trainer.distributed_parallelism == "ddp" and config.trainer.run_validation
    assert config.dataloader_train.num_workers == 0 and preflight.findings(config) == []
    assert config.dataloader_train.dataset.split == "train" and config.dataloader_val.dataset.split == "val"


def test_only_adapters_start_from_the_tiny_base() -> None:
    paths = {name: composed(name).model.config.model_manager_config.dit_path for name in FAMILIES}
    assert [name for name, path in paths.items() if path] == [name for name in FAMILIES if "_lora_" in name]
    assert all(Path(path).is_file() for path in paths.values() if path)


# --- lint ---

ABSENT = re.compile(
    r"does not exist|There is no (folder|tokenizer)|not installed|Download it|GB free"
    r"|has no config\.json|the policy has no weights"
)


def found_wrong(config: Config) -> Iterator[str]:
    """The faults of an experiment itself, wherever it runs and whatever that machine lacks."""
    yield from (f"{key}: {text}" for key, text in config_nodes.faults(config))
    with_validation = attrs.evolve(config.trainer, run_validation=True)
    members = {field.name: getattr(config, field.name) for field in attrs.fields(Config)}
    for finding in preflight.findings(Config(**{**members, "trainer": with_validation}), world_size=32):
        is_of_mock = not config.trainer.run_validation and finding.text.startswith("validation is on mock data")
        if not ABSENT.search(str(finding)) and not is_of_mock:  # which stands in where nothing is validated
            yield str(finding)
    if "pipe_config" in config.model.config:  # a policy has none, and its data are numbers of starts
        frames = pixel_frames(config.model.config.pipe_config.state_t)
        for loader in (config.dataloader_train, config.dataloader_val):
            yield from _of_data(getattr(loader, "dataset", None) or {}, frames)


def _of_data(dataset: Any, frames: int) -> Iterator[str]:
    if "num_frames" in dataset and dataset["num_frames"] < frames:
        yield f"{dataset['num_frames']} frames for a model of {frames}"
    if any(side % 16 for side in dataset.get("video_size") or ()):
        yield f"video_size={dataset['video_size']}"


@pytest.mark.parametrize("name", by_name(ALL))
def test_an_experiment_is_free_of_faults(name: str) -> None:
    assert list(found_wrong(composed(name))) == []


MISTAKES = {
    "job.name=run_2026-01-31_10-00-00": "job.name: run_2026-01-31_10-00-00 has a time stamp",
    "checkpoint.save_iter=200000": "checkpoint.save_iter: 200000 is beyond trainer.max_iter=100000",
    "model_parallel.context_parallel_size=5": "does not divide the 32 processes",
    "model.config.pipe_config.state_t=25": "dataloader_train.dataset: num_frames=93, but the model takes 97",
    "dataloader_train.dataset.video_size=[430,768]": "video_size=[430, 768]: it is (height, width) in pixels, both",
    "dataloader_val.dataset.video_size=[2048,768]": "beyond the positions of the network",
    "dataloader_val.dataset.num_frames=9": "dataloader_val.dataset: num_frames=9, but the model takes 97",
    "model.config.pipe_config.min_num_conditional_frames=2": "must be in order",
}


def test_lint_finds_what_is_wrong() -> None:
    config = compose(BASE, [f"experiment={V2W}_2b_agibot_head_center_fisheye_color", *MISTAKES])
    found = "\n".join(found_wrong(config))
    for expected in MISTAKES.values():
        assert expected in found


def test_a_dry_run_reports_what_lint_finds() -> None:
    config = compose(
        BASE, [f"experiment={V2W}_tiny_groot_gr1_480", "checkpoint.save_iter=50000", "trainer.max_iter=40000"]
    )
    notes = "\n".join(preflight.notes(config))
    assert "checkpoint.save_iter: 50000 is beyond trainer.max_iter=40000" in notes


TWIN = "predict2p5_video2world_training_tiny_groot_gr1_480"
with (Path(__file__).parent / "experiments_predict2p5.csv").open(newline="") as file:
    OF_PREDICT2P5 = {row["experiment"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", OF_PREDICT2P5)
def test_a_size_of_predict2p5_has_its_published_values(name: str) -> None:
    config, row = composed(name), OF_PREDICT2P5[name]
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


@pytest.mark.parametrize("name", OF_PREDICT2P5)
def test_a_size_of_predict2p5_has_what_all_of_them_share(name: str) -> None:
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
