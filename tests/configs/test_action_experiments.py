# SPDX-License-Identifier: Apache-2.0
"""Experiments with actions: published names and values, data of other robots and of one's own, and the commands of
published guides."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.configs.action_conditioned import config as public
from cosmos_predict2.configs.action_conditioned.defaults.data import ROBOT_SIZES
from cosmos_predict2.configs.action_conditioned.experiment.recordings import moving_numbers
from cosmos_predict2.data.lerobot.robots import ROBOTS
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import to_yaml
from imaginaire.errors import ConfigError
from imaginaire.training import preflight
from scripts import train as program
from tests.configs.test_experiments import ALL, composed
from tests.data.sources_robots import write_robot
from tests.training import run_dir, train

BASE = "cosmos_predict2/configs/base/config.py"
PREFIX = "cosmos_predict2p5_2B_"
BRIDGE = f"{PREFIX}reason_embeddings_action_conditioned_rectified_flow_bridge_13frame"
GR1 = f"{PREFIX}action_conditioned_gr00t_gr1_customized_13frame"
TINY = "experiment=predict2_video2world_tiny_action_conditioned_training"
FLAT, CHUNK = (FlatActionDiT, 84), (ChunkActionDiT, 7)
# name -> network and its action_dim, data, size, batch of a rank, lr
VALUES: dict[str, Any] = {
    "predict2_video2world_2b_action_conditioned_training": (FLAT, "bridge", [480, 640], 2, 1e-4),
    "predict2_video2world_2b_libero_action_conditioned": (FLAT, "libero", [256, 320], 8, 3.2e-4),
    "predict2p5_video2world_2b_libero_action_conditioned": (CHUNK, "libero", [256, 320], 8, 3.2e-4),
    "ac_reason_embeddings_rectified_flow_2b_256_320": (CHUNK, "bridge", [256, 320], 8, 32e-5),
    f"{BRIDGE}_480_640_": (FLAT, "bridge", [480, 640], 2, 2**-14.5),
    f"{BRIDGE}_256x320": (CHUNK, "bridge", [256, 320], 8, 32e-5),
    GR1: ((ChunkActionDiT, 29), "gr1", [480, 832], 4, 2**-14.5),
    f"{GR1}_full": ((ChunkActionDiT, 29), "gr1", [480, 832], 4, 2**-14.5),
    f"{GR1}_full_16nodes_release": ((ChunkActionDiT, 29), "gr1", [480, 832], 4, 16e-5),
    f"{GR1}_oss": ((ChunkActionDiT, 29), "gr1", [480, 832], 4, 16e-5),
}


def test_the_published_names_are_there_with_their_variants() -> None:
    assert set(VALUES) <= set(ALL)
    published = [name for name in VALUES if not name.startswith("predict2")]
    assert {f"{name}{mock}_wo_resume" for name in published for mock in ("", "_mock")} <= set(ALL)


@pytest.mark.parametrize("name", VALUES)
def test_an_experiment_has_its_published_values(name: str) -> None:
    (network, action_dim), folder, size, batch_size, lr = VALUES[name]
    config = composed(name)
    model, loader = config.model.config, config.dataloader_train
    pipe, dataset = model.pipe_config, loader.dataset
    assert network.__name__ in str(pipe.net["_target_"]) and pipe.net.action_dim == action_dim
    assert (pipe.state_t, pipe.min_num_conditional_frames, pipe.max_num_conditional_frames) == (4, 1, 1)
    assert (pipe.fps, pipe.conditioner.text.dropout_rate, model.high_sigma_ratio) == (4, 0.2, 0.0)
    rope = [pipe.net[f"rope_{axis}_extrapolation_ratio"] for axis in "hwt"]
    assert rope == [3.0, 3.0, 1.0] and pipe.net.model_channels == 2048
    assert (dataset.num_frames, list(dataset.video_size), loader.batch_size) == (13, size, batch_size)
    assert folder in str(dataset.get("root") or dataset.get("video_path"))
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (lr, 0.1)
    assert config.model_parallel.context_parallel_size == 1 and config.trainer.distributed_parallelism == "fsdp"
    if name.startswith("predict2_"):
        assert (model.fsdp_shard_size, model.loss_scale, pipe.flow) == (-1, 10.0, None)
        assert model.model_manager_config.dit_path.endswith("Sample-Action-Conditioned/model-480p-4fps.pt")
        return
    assert (model.fsdp_shard_size, model.loss_scale, pipe.flow.shift, model.train_time_shift) == (8, 1.0, 5.0, 5.0)
    assert pipe.flow.conditional_frame_timestep < 0 and model.conditional_frames_probs is None
    assert model.text.encoder is None and model.text.constant_path.endswith("cr1_empty_string_text_embeddings.pt")
    assert config.optimizer.master_weights, "of weights in bfloat16"
    assert list(config.optimizer.betas) == [0.9, 0.999] and config.trainer.callbacks.grad_clip.clip_norm == 0.1


def test_published_runs_of_predict2p5_share_schedule_and_place() -> None:
    for name in ("ac_reason_embeddings_rectified_flow_2b_256_320", f"{BRIDGE}_256x320"):
        config = composed(name)
        cycle = [next(iter(config.scheduler[key])) for key in ("warm_up_steps", "cycle_lengths", "f_max", "f_min")]
        assert cycle == [100, 400_000, 0.99, 0.4]
        assert (config.trainer.max_iter, config.checkpoint.save_iter) == (150_000, 2000)
        drawn = config.trainer.callbacks.draw_samples
        assert (drawn.every_n, list(drawn.guidance), drawn.fps) == (500, [0.0], 16.0)
        assert config.model.config.model_manager_config.dit_path.endswith(
            "d20b7120-df3e-4911-919d-db6e08bad31c_ema_bf16.pt"
        )
    project = "cosmos_predict2_action_conditioned"
    first = composed("ac_reason_embeddings_rectified_flow_2b_256_320")
    assert first.job.path == f"{project}/cosmos_predict_v2p5/2b_bridge_action_conditioned"
    assert config.job.path == f"{project}/official_runs_vid2vid/{BRIDGE}_256x320"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), [("lerobot_train", "root"), ("bridge_json_train", "video_path")])
def test_the_tiny_experiment_takes_other_data_with_a_text_of_its_width(name: str, place: str) -> None:
    config = compose(BASE, [TINY, f"dataloader_train={name}", f"dataloader_train.dataset.{place}=here"])
    assert not [one for one in preflight.findings(config) if "texts have width" in one.text]
    assert config.dataloader_train["dataset"].get("text_width", 64) == 64
    (other,) = [one for one in preflight.findings(config) if one.key == "dataloader_val"]
    assert other.level == "warning" and other.text.startswith("validation is on the toy world (ToyWorldVideos), but")


def test_actions_are_hidden_in_the_blind_experiment_alone() -> None:
    for name, is_hidden in (("blind", True), ("conditioned", False)):
        config = composed(f"predict2_video2world_tiny_action_{name}_training")
        for loader in (config.dataloader_train, config.dataloader_val):
            assert bool(loader["dataset"].get("hide_actions")) == is_hidden


WRONG = {
    "dataloader_train=gr00t_customiezed_gr1_train": "its actions have 29 numbers, but the network reads 7",
    "dataloader_train.dataset.num_frames=9": "num_frames=9, but the model takes 13",
    "model.config.pipe_config.action_transform={kind: controller, scale: [20,20,20,20,20,20,20]}": (
        "its actions are relative_pose of 7 numbers, scale [20, 20, 20, 20, 20, 20, 1], but those of"
        " model.config.pipe_config.action_transform controller of 7 numbers, scale 20"
    ),
    "net=cosmos_v1_2B_action_conditioned": ("its texts have width 1024 (text_width), but the network takes 100352"),
    "net=cosmos_v1_2B_action_chunk_conditioned": "with a model of theirs (model=predict2p5_...)",
}

LONG = ("scale: [20,20,20,20,20,20,20]}", "chunk_conditioned")  # each is composed


@pytest.mark.parametrize(
    "override", [pytest.param(o, marks=pytest.mark.long if o.endswith(LONG) else pytest.mark.slow) for o in WRONG]
)
def test_actions_that_do_not_fit_are_found_before_anything_is_built(override: str) -> None:
    config = compose(BASE, ["experiment=predict2_video2world_2b_action_conditioned_training", override])
    assert WRONG[override] in "\n".join(preflight.notes(config))


def test_the_public_functions_give_their_pipelines() -> None:
    flat = public.get_cosmos_predict2_action_conditioned_pipeline(model_size="2B")
    chunk = public.get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    later = public.get_cosmos_predict2p5_action_conditioned_pipeline()
    assert (flat.net.action_dim, chunk.net.action_dim, later.net.action_dim) == (84, 4, 7)
    assert (flat.chunk_size, flat.state_t, flat.fps, chunk.fps) == (12, 4, 4, 10)
    assert flat.flow is None and later.flow is not None and later.net.crossattn_proj_in_channels == 100352
    assert flat.text_encoder is not None, "for a prompt, at inference"
    assert not any(made.prompt_refiner_config.enabled for made in (flat, chunk, later)), "as published"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(resolution="720"), "480 and 4"),
        (dict(model_size="14B"), "2B, tiny"),
        (dict(network="chunks"), "mean chunk"),
    ],
)
def test_pipelines_that_do_not_exist(arguments: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        public.get_cosmos_predict2_action_conditioned_pipeline(**arguments)


@pytest.mark.slow
def test_the_published_commands_compose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path))
    other = "--config=cosmos_predict2/_src/predict2/action/configs/action_conditioned/config.py"
    name = "experiment=ac_reason_embeddings_rectified_flow_2b_256_320"
    assert program.main([other, "--dryrun", "--", name, "~dataloader_train.dataloaders"]) == 0
    shown = capsys.readouterr()
    assert "Video2WorldModel" in shown.out and "its experiments are in cosmos_predict2" in shown.err
    own = "--config=cosmos_predict2/configs/action_conditioned/config.py"
    flat = "net=cosmos_v1_2B_action_conditioned"
    name = "experiment=predict2p5_video2world_2b_libero_action_conditioned"
    assert program.main([own, "--dryrun", "--", name, flat]) == 0
    assert "FlatActionDiT" in capsys.readouterr().out


def test_a_world_model_of_recordings_takes_its_numbers_from_them(tmp_path: Path) -> None:
    draws = numpy.random.default_rng(0)
    writer = Writer(tmp_path, fps=5, robot="own")
    for _ in range(4):
        video = torch.zeros(3, 20, 60, 80, dtype=torch.uint8)
        switch = numpy.where(draws.random((20, 1)) < 0.5, -1, 1)
        rows = numpy.concatenate([draws.normal(0, 0.3, (20, 2)), switch, 5 + draws.random((20, 1))], axis=1)
        writer.add(Recording({"action": rows.astype(numpy.float32)}, {"observation.images.top": video}, "go"))
    writer.finish()
    name = "experiment=world_model_recordings"
    config = compose(BASE, [name, f"dataloader_train.dataset.root={tmp_path}"])
    net = config.model.config.pipe_config.net
    assert (net.action_dim, list(net.summed_action_dims)) == (4, [0, 1])
    for loader in (config.dataloader_train, config.dataloader_val):
        assert loader.dataset.root == str(tmp_path) and list(loader.dataset.video_size) == [48, 64]
    assert (config.dataloader_train.dataset.data_split, config.dataloader_val.dataset.data_split) == ("train", "val")
    assert list(config.scheduler.cycle_lengths) == [900, 300] and "${" not in to_yaml(config)
    own = compose(
        BASE, [name, f"dataloader_train.dataset.root={tmp_path}", "model.config.pipe_config.net.summed_action_dims=[1]"]
    )
    assert list(own.model.config.pipe_config.net.summed_action_dims) == [1]
    absent = compose(BASE, [name, "trainer.max_iter=2"])  # the check of the data set says what is missing
    assert absent.model.config.pipe_config.net.action_dim == 4 and list(absent.scheduler.cycle_lengths) == [1, 1]


OF_ROBOT = "predict2_video2world_tiny_{}_action_conditioned"
ROOT, UNITS = "dataloader_train.dataset.root", "dataloader_train.dataset.units"
FOLDERS = {"droid": "droid_lerobot", "agibot_world": "agibot_world", "so100": "so100_degrees"}


def test_every_robot_has_its_sections() -> None:
    assert set(ROBOTS) == set(ROBOT_SIZES) == set(FOLDERS)
    for robot in ROBOTS.values():
        for form in robot.forms.values():
            assert sum((part.end or 0) - part.start for part in form.action) == robot.action_dim
            assert all(part.absolute is not None for part in form.action)


@pytest.mark.parametrize("robot", FOLDERS)
def test_a_recipe_takes_all_but_the_folder_from_the_robot(robot: str, tmp_path: Path) -> None:
    root = write_robot(tmp_path / "data", FOLDERS[robot], "v3.0", episodes=3, length=48)
    own = [f"experiment={OF_ROBOT.format(robot)}", f"{ROOT}={root}"]
    with_units = [*own, f"{UNITS}=degrees"] if robot == "so100" else own
    config = compose(BASE, with_units)
    assert [str(one) for one in preflight.findings(config) if one.key.startswith("dataloader")] == []
    train_data, val = config.dataloader_train.dataset, config.dataloader_val.dataset
    assert (train_data.embodiment, train_data.stride, train_data.skip_idle) == (robot, 3, robot == "droid")
    assert (val.embodiment, val.root, val.units) == (robot, str(root), train_data.units)
    assert (train_data.data_split, val.data_split) == ("train", "val")
    assert config.model.config.pipe_config.net.action_dim == ROBOTS[robot].action_dim
    if robot == "so100":
        found = [one for one in preflight.findings(compose(BASE, own)) if one.key == "dataloader_train.dataset"]
        assert len(found) == 1 and "units is required" in found[0].text and found[0].level == "error"


def options(robot: str, root: Path, *more: str) -> list[str]:
    """An iteration of the tiny model."""
    short = ["trainer.max_iter=1", "checkpoint.save_iter=1", "trainer.run_validation=false"]
    short += ["dataloader_train.num_workers=0", "dataloader_train.batch_size=1", "trainer.callbacks.draw_samples=null"]
    name = ["job.project=tests", "job.group=engine", f"job.name={robot}"]
    return [f"experiment={OF_ROBOT.format(robot)}", f"{ROOT}={root}", *short, *name, *more]


def test_positions_are_not_summed_and_velocities_are(tmp_path: Path) -> None:
    for name, moves in (("droid_cosmos3", []), ("droid_openpi", [*range(7)])):
        root = write_robot(tmp_path / name, name, episodes=3, length=48)
        config = compose(BASE, [f"experiment={OF_ROBOT.format('droid')}", f"{ROOT}={root}"])
        assert list(config.model.config.pipe_config.net.summed_action_dims) == moves


@pytest.mark.slow
def test_weights_keep_quantiles_and_refuse_other_units(tmp_path: Path) -> None:
    root = write_robot(tmp_path / "droid", "droid_lerobot", "v3.0", episodes=3, length=48)
    quantiles = "dataloader_train.dataset.action_transform=quantiles"
    assert train(tmp_path, options("droid", root, quantiles), config=BASE) == 0
    kept = read_card(str(run_dir(tmp_path, "droid"))).action_transform
    assert kept is not None and kept.stats is not None and kept.scale[7] == 1
    ends = kept.apply([kept.stats["q01"], kept.stats["q99"]])
    assert numpy.allclose(ends[:, :7], [[-1.0] * 7, [1.0] * 7])
    root = write_robot(tmp_path / "so100", "so100_m100", episodes=2, length=48)
    camera = "dataloader_train.dataset.camera=front"
    assert train(tmp_path, options("so100", root, camera, f"{UNITS}=m100"), config=BASE) == 0
    with pytest.raises(ConfigError, match=r"The run takes .* in m100, but the data have degrees"):
        train(tmp_path, options("so100", root, camera, f"{UNITS}=degrees", "trainer.max_iter=2"), config=BASE)


def _recordings(num: int = 12, length: int = 48) -> tuple[list[numpy.ndarray], list[numpy.ndarray]]:
    """Moves of a hand in x and y, a gripper, a constant; and the places of the hand and a joint that follows them."""
    draws = numpy.random.default_rng(0)
    actions, states = [], []
    for _ in range(num):
        moves = draws.normal(0, 0.3, (length, 2))
        gripper = numpy.where(numpy.arange(length) < draws.integers(5, length), -1.0, 1.0)
        target = numpy.cumsum(draws.normal(0, 0.2, length))  # of a joint, about zero
        place = numpy.concatenate([numpy.zeros((1, 2)), moves.cumsum(axis=0)])
        joint = numpy.concatenate([target[:1], target])
        actions.append(numpy.stack([*moves.T, gripper, numpy.full(length, 0.5), target], axis=1))
        states.append(numpy.stack([*place.T, joint], axis=1))
    return actions, states


def test_moves_are_summed_and_targets_are_told_by_the_state() -> None:
    actions, states = _recordings()
    assert moving_numbers(actions, states) == [0, 1]
    assert moving_numbers([rows[:, :4] for rows in actions]) == [0, 1]


@pytest.mark.parametrize("offset", [3.0, -200.0])
def test_targets_apart_from_zero_need_no_state(offset: float) -> None:
    actions, _ = _recordings()
    apart = [numpy.concatenate([rows[:, :2], offset + rows[:, 4:]], axis=1) for rows in actions]
    assert moving_numbers(apart) == [0, 1]


def test_a_driver_that_is_often_at_its_limit_is_no_switch() -> None:
    actions, _ = _recordings()
    clipped = [numpy.clip(8 * rows[:, :2], -1, 1) for rows in actions]
    assert (numpy.abs(numpy.concatenate(clipped)) == 1).mean() > 0.5
    assert moving_numbers(clipped) == [0, 1]
