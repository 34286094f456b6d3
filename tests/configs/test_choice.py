# SPDX-License-Identifier: Apache-2.0
"""The choice of a model: by flags, by the run that weights come from, or by the weights alone."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from cosmos_predict2.actions.transforms import controller, relative_pose
from cosmos_predict2.checkpoints.card import (
    KNOWN,
    PIPELINE_KEY,
    card_of_config,
    card_tensors,
    name_of,
    read_card,
    text_tensor,
)
from cosmos_predict2.configs.action_conditioned.networks import (
    choose_action_model,
    get_cosmos_predict2_action_conditioned_pipeline,
    get_cosmos_predict2p5_action_conditioned_pipeline,
)
from cosmos_predict2.configs.base.config_text2image import choose_text2image
from cosmos_predict2.configs.base.config_video2world import (
    SIZES,
    choose_model,
    get_cosmos_predict2_video2world_pipeline,
    get_cosmos_predict2p5_video2world_pipeline,
)
from cosmos_predict2.models.model_checks import check_family
from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from cosmos_predict2.pipelines.recorded_run import apply_card
from cosmos_predict2.released import released_but_absent
from cosmos_predict2.world_model.assembly import check_parts, network_of
from cosmos_predict2.world_model.config import FlowConfig
from cosmos_predict2.world_model.objectives import EDM, Student, objective_of
from cosmos_predict2.world_model.options import ActionModel, VideoModel
from examples.video2world import parse
from imaginaire.command_line import values_of
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import instantiate, to_yaml
from imaginaire.config.schema import Config
from imaginaire.errors import CheckpointError, ConfigError
from tests.checkpoints.nets import transform_tensor
from tests.data.video_files import write_clip

CONFIG = "cosmos_predict2/configs/base/config.py"
PREFIX = "experiment=predict2_video2world_training"
TINY = f"{PREFIX}_tiny_groot_gr1_480"
TWIN = "experiment=predict2p5_video2world_training_tiny_groot_gr1_480"


def _run(folder: Path, *overrides: str) -> str:
    """The folder of a run of an experiment, without its files of weights; where a checkpoint of it would be."""
    return _written(folder, to_yaml(_composed(*overrides)))


@functools.cache
def _composed(*overrides: str) -> Config:
    return compose(CONFIG, overrides)


def _written(folder: Path, text: str) -> str:
    (folder / "checkpoints/model").mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    return str(folder / "checkpoints/model/iter_000000010.pt")


def _chosen(*flags: str) -> Any:
    args = parse(list(flags))
    return choose_model(values_of(VideoModel, args), args.input_path)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture(scope="module")
def agibot(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose positions, rate and size all differ from the defaults of its model."""
    experiment = f"{PREFIX}_2b_agibot_head_center_fisheye_color_480p_10fps"
    return _run(tmp_path_factory.mktemp("agibot") / "run", experiment)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config.yaml of a tiny run."""
    return (Path(_run(tmp_path_factory.mktemp("tiny") / "run", TINY)).parents[2] / "config.yaml").read_text()


# By names and shapes --------------------------------------------------------------------------------------------------


def test_a_model_by_its_name_or_size() -> None:
    choice = _chosen("--model", "14B/pre-trained")
    assert choice.model_size == "14B" and choice.config.flow is not None and choice.config.state_t == 20
    assert choice.dit_path.endswith("54937b8c-29de-4f04-862c-e67b04ec41e8_ema_bf16.pt")
    assert "Reason1Encoder" in str(choice.config.text_encoder["_target_"])
    assert _chosen("--model", "2B/post-trained", "--num_frames", "93").config.state_t == 24
    assert _chosen("--model_size", "2B").config.state_t == 24
    assert _chosen("--model_size", "tiny", "--num_frames", "9").config.state_t == 3


def test_a_refiner_is_asked_of_the_models_that_were_published_with_one() -> None:
    asked = {"2B": True, "14B": True, "tiny": False}
    for size, is_asked in asked.items():
        assert _chosen("--model_size", size).config.prompt_refiner_config.enabled == is_asked
        assert not choose_text2image(VideoModel(model_size=size)).config.prompt_refiner_config.enabled
    assert not _chosen("--model", "2B/post-trained").config.prompt_refiner_config.enabled


def test_weights_are_recognised_by_their_shapes_or_their_place(tmp_path: Path) -> None:
    net = instantiate(get_cosmos_predict2p5_video2world_pipeline(model_size="tiny").net)
    torch.save(net.state_dict(), tmp_path / "model.pt")
    choice = _chosen("--dit_path", str(tmp_path / "model.pt"))
    assert choice.model_size == "tiny" and choice.config.flow.shift == 8.0
    assert choice.config.net.crossattn_proj_in_channels == 64 and choice.config.state_t == 4
    path = "checkpoints/nvidia/Cosmos-Predict2.5-2B/base/post-trained/81edfebe-bd6a-4039-8c1d-737df1a790bf_ema_bf16.pt"
    assert _chosen("--dit_path", path).config.flow is not None


def test_the_released_student_is_sampled_in_four_steps() -> None:
    path = "checkpoints/nvidia/Cosmos-Predict2.5-2B/base/distilled/575edf0f-d973-4c74-b52c-69929a08d0a5_ema_bf16.pt"
    for flags in (["--model", "2B/distilled"], ["--dit_path", path]):
        choice = _chosen(*flags)
        config, objective = choice.config, objective_of(choice.config)
        assert isinstance(objective, Student) and choice.dit_path == path and choice.num_steps == 4
        assert objective.times.tolist() == pytest.approx([1, 15 / 16, 5 / 6, 5 / 8, 0]) and config.state_t == 24
        assert objective.flow.conditional_frame_timestep == 0.1 and not config.net.use_wan_fp32_strategy
        assert config.net.crossattn_proj_in_channels == 100352
    assert _chosen("--model", "2B/post-trained").num_steps == 35


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "2B/post-trained", "--dit_path", "x.pt"], "both name weights"),
        (["--random_weights", "--dit_path", "x.pt"], "--random_weights"),
        (["--model", "2B/post-trained", "--model_size", "14B"], "are of a 2B model"),
        (["--dit_path", "RUN", "--model_size", "14B"], "--model_size 14B"),
        (["--model", "2B/post-trained", "--natten"], "natten"),
        (["--model", "2B/post-trained", "--resolution", "48"], "no variant"),
        (["--model_size", "tiny", "--num_frames", "8"], "1 \\+ 4k"),
        (["--dit_path", "nvidia/Cosmos-Predict2-2B-Text2Image"], "no Text2Image models; its pictures are made by"),
        (["--dit_path", "x/nvidia/Cosmos-Predict2-0.6B-Text2Image/model.pt"], "no Text2Image"),
        (["--dit_path", "model-720p-10fps-7views-29frames.pt"], "no multiview models; use examples/multiview.py"),
        (["--dit_path", "auto/multiview/524af350-2e43-496c-8590-3646ae1325da_ema_bf16.pt"], "no multi-view Predict2.5"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], named: str, agibot: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _chosen(*(agibot if word == "RUN" else word for word in flags))


def test_any_rate_can_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for flags in (["--model_size", "tiny"], ["--model_size", "2B", "--random_weights"]):
        caplog.clear()
        config = _chosen(*flags).config
        (state_t, fps), other = (config.state_t, config.fps), _chosen(*flags, "--fps", "15").config
        assert (other.state_t, other.fps) == (state_t, 15)
        assert f"--fps 15 is the rate of the mp4: the weights make {fps:g} frames per second" in caplog.text
    assert _chosen("--random_weights", "--fps", "10").config.state_t == 16  # the released model of this rate


# By a run -------------------------------------------------------------------------------------------------------------


def test_no_flag_means_as_in_the_run(agibot: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        choice = _chosen("--dit_path", agibot)
    assert (choice.model_size, choice.aspect_ratio, choice.dit_path) == ("2B", "16:9", agibot)
    config = choice.config
    assert (config.resolution, config.fps, config.state_t) == ("480", 10, 16)
    ratios = [config.net[f"rope_{axis}_extrapolation_ratio"] for axis in "thw"]
    assert ratios == [1.0, 2.0, 2.0]  # of this family; released: 1, 3, 3
    assert config.net.atten_backend == "minimal_a2a"
    assert "480 (768x432), 10 frames per second, 16 latent frames" in caplog.text
    same = _chosen("--dit_path", agibot, "--model_size", "2B", "--resolution", "480", "--fps", "10")
    assert same.config.state_t == 16 and not _warnings(caplog)


def test_a_request_that_differs_is_a_warning_with_both_values(agibot: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--resolution", "720", "--fps", "16", "--aspect_ratio", "1:1"]
    choice = _chosen("--dit_path", agibot, *flags)
    assert (choice.config.resolution, choice.config.fps, choice.config.state_t) == ("720", 16, 24)
    assert choice.aspect_ratio == "1:1" and len(_warnings(caplog)) == 3
    assert choice.config.net.rope_h_extrapolation_ratio == 2.0  # what the weights are stays
    assert _chosen("--dit_path", agibot, "--num_frames", "93").config.state_t == 24
    assert "--num_frames 93, but" in caplog.text and "was trained at 61: resolution 480 (768x432)" in caplog.text


def test_a_run_that_recorded_no_rate_has_that_of_the_clip_to_go_on_with(agibot: str, tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", 5, rate=15)
    flags = ["--dit_path", agibot, "--input_path", str(tmp_path / "clip.mp4")]
    assert (_chosen(*flags).config.fps, _chosen(*flags, "--fps", "12").config.fps) == (15, 12)
    assert _chosen("--random_weights", *flags[2:]).config.fps == 16  # released weights have theirs


def test_a_size_that_no_flags_name_is_compared_in_pixels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    tree = {"model": {"config": {"pipe_config": pipe}}, "dataloader_train": {"dataset": {"video_size": [64, 64]}}}
    _chosen("--dit_path", _written(tmp_path / "run", to_yaml(tree)), "--aspect_ratio", "3:4")
    assert f"frames of 64,48 (height, width), but {tmp_path}/run was trained at 64,64" in caplog.text


def test_an_input_is_brought_to_size_as_the_clips_of_the_run_were(tmp_path: Path) -> None:
    place = f"dataloader_train.dataset.dataset_dir={tmp_path}"
    record = dict(tokenizer="T", probe=[], num_frames=5, size=[48, 48], windows_per_clip=1, fps=None, stride=1)
    (tmp_path / "latents").mkdir()
    (tmp_path / "latents/latents.json").write_text(json.dumps({**record, "crop": "stretch", "dtype": "float16"}))
    runs: dict[str, tuple[str, ...]] = {
        "stretch": ("dataloader_train=folder", place),
        "center": ("dataloader_train=folder", place, "dataloader_train.dataset.crop=center"),
        "stretch, by its latents": ("dataloader_train=latents", place),
        "center, unknown": ("dataloader_train=toy",),
    }
    for name, overrides in runs.items():
        path = _run(tmp_path / name, TINY, *overrides)
        model = _composed(TINY, *overrides).model["config"]
        torch.save({"net.x": torch.zeros(1), **card_tensors(card_of_config(model))}, path)
        assert _chosen("--dit_path", path).config.input_crop == name.partition(",")[0], name


def test_the_numbers_of_another_network_are_followed(tmp_path: Path) -> None:
    path = _run(tmp_path / "large", f"{PREFIX}_2b_groot_gr1_480")  # trains the model of 720p on clips of 480p
    assert read_card(path).pipeline["resolution"] == "720" and _chosen("--dit_path", path).config.resolution == "480"
    net = "model.config.pipe_config.net"
    overrides = [f"{net}.model_channels=64", f"{net}.num_blocks=1", f"{net}.crossattn_emb_channels=32"]
    numbers = dict(state_t=3, sigma_conditional=0.002, rectified_flow_t_scaling_factor=500.0)
    overrides += [f"model.config.pipe_config.{key}={value}" for key, value in numbers.items()]
    overrides.append("model.config.pipe_config.conditioner.padding_mask.dropout_rate=0.5")
    path = _run(tmp_path / "run", TINY, *overrides)
    assert read_card(path).model_size(SIZES) is None
    config = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    apply_card(read_card(path), config)
    assert (config.text_encoder.width, config.timestamps.t_min) == (32, 1.0)
    assert {key: getattr(config, key) for key in numbers} == numbers
    assert config.conditioner.padding_mask.dropout_rate == 0.5
    with torch.device("meta"):
        assert instantiate(config.net).model_channels == 64


def test_a_run_of_predict2p5_records_how_its_network_is_asked(tmp_path: Path) -> None:
    choice = _chosen("--dit_path", _run(tmp_path / "run", TWIN, "model.config.pipe_config.flow.shift=3.0"))
    assert choice.model_size == "tiny" and choice.config.flow.shift == 3.0
    assert choice.config.min_num_conditional_frames == 0 and choice.config.text_encoder["width"] == 64


def test_adapters_of_a_run_name_the_base_and_its_numbers(tmp_path: Path) -> None:
    path = _run(tmp_path / "run", "experiment=predict2_video2world_lora_training_tiny_cosmos_nemo_assets")
    choice = _chosen("--lora", f"{path}:0.5")
    assert choice.model_size == "tiny" and choice.dit_path.endswith("tiny_video2world.safetensors")
    assert _chosen("--model_size", "tiny").dit_path == choice.dit_path
    assert _chosen("--model_size", "tiny", "--random_weights").dit_path == ""


# What a file beside weights may name ----------------------------------------------------------------------------------


def test_a_run_of_foreign_code_is_left_aside(tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _written(tmp_path / "run", tiny.replace("cosmos_predict2.nn.dit.Video2WorldDiT", "trap.Network"))
    choice = _chosen("--dit_path", path, "--model_size", "tiny")
    assert (choice.dit_path, choice.config.state_t) == (path, 4)
    assert "pipe_config.net is trap.Network, which is not registered" in caplog.text


class Scaled(EDM):
    def __init__(self, config: Any, *, share: float = 1.0) -> None:
        super().__init__(config)
        self.share = share


def test_the_objective_of_training_is_that_of_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"model.config.pipe_config.objective={{_target_: {name_of(Scaled)}, share: 0.25}}"
    path = _run(tmp_path / "run", TINY, own)
    with pytest.raises(CheckpointError, match=f"buildable.*--import {__name__}"):
        _chosen("--dit_path", path)
    monkeypatch.setitem(KNOWN, name_of(Scaled), Scaled)
    objective = objective_of(_chosen("--dit_path", path).config)
    assert type(objective) is Scaled and objective.share == 0.25


@pytest.mark.parametrize("node", ["nope", "{_target_: torch.nn.Linear}"])
def test_what_is_no_objective_is_an_error_with_the_known_ones(node: str) -> None:
    config = compose(CONFIG, [TINY, f"model.config.pipe_config.objective={node}"]).model.config
    (finding,) = check_family(config)
    assert finding.key == "model.config.pipe_config.objective" and "objectives.EDM" in finding.text
    with pytest.raises(ConfigError, match=r"pipe_config\.objective: .* is no objective"):
        objective_of(config.pipe_config)


def test_weights_that_do_not_fit_without_their_own_class_name_the_cure(tmp_path: Path) -> None:
    net = _chosen("--model_size", "tiny").config.net
    names = network_of(net).state_dict()
    card = card_of_config({"pipe_config": {"net": {"_target_": "my_project.network.OwnNet"}}})
    path = str(tmp_path / "own.pt")
    own = {f"net.{name}": torch.zeros(value.shape) for name, value in names.items()} | {"net.own": torch.zeros(1)}
    torch.save(own | card_tensors(card), path)
    with pytest.raises(CheckpointError, match=r"buildable.*--import my_project\.network"):
        check_parts(net, path, [])


@pytest.mark.parametrize(
    ("key", "node", "error"),
    [
        ("tokenizer", {"_target_": "trap.Tokenizer", "command": "x"}, "pipe_config.tokenizer is trap.Tokenizer, which"),
        ("tokenizer", {"_target_": "os.system", "command": "exit 1"}, "pipe_config.tokenizer is os.system, which"),
        ("tokenizer.device", {"_target_": "trap.f"}, "tokenizer.device names something to build"),
        ("net.max_frames", {"_target_": "trap.f"}, "net.max_frames names something to build"),
        ("net.max_frames", [[{"_target_": "trap.f"}]], "net.max_frames names something to build"),
    ],
)
def test_nothing_that_a_file_beside_weights_names_is_imported(
    key: str, node: Any, error: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = yaml.safe_load(tiny)
    place = tree["model"]["config"]["pipe_config"]
    if key == "tokenizer.device":  # a known one, but not that of the model's size
        place["tokenizer"] = {"_target_": "cosmos_predict2.tokenizers.wan_vae.WanTokenizer"}
    *above, name = key.split(".")
    for part in above:
        place = place[part]
    place[name] = node
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckpointError, match=error):
        _chosen("--dit_path", _written(tmp_path / "run", yaml.safe_dump(tree)))


def test_nothing_that_weights_bring_is_computed(tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An interpolation can make a call: ``_target_`` need not even stand in its text."""
    call = '${oc.decode:"{_tar${oc.decode:get_}: os.system, command: false}"}'
    folder = tmp_path / "run"
    path = _written(folder, tiny)
    text = {"encoder": "bytes", "encoder_tokens": call, "num_tokens": 64, "width": 64}
    (folder / "runs.jsonl").write_text(json.dumps({"text": [text], "frame_rate": "many"}))
    assert _chosen("--dit_path", path).config.text_encoder.num_tokens != call
    tree = yaml.safe_load(tiny)
    tree["model"]["config"]["pipe_config"]["net"]["max_frames"] = call
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    assert not read_card(path).has_pipeline and caplog.text.count("holds an interpolation") >= 2
    torch.save({PIPELINE_KEY: text_tensor(json.dumps({"net": {"max_frames": call}}))}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"'action_pipeline' cannot be read: .* holds an interpolation"):
        read_card(str(tmp_path / "model.pt"))


# With actions ---------------------------------------------------------------------------------------------------------


def _action_run(folder: Path, config: Any, **data: Any) -> str:
    run = {"model": {"config": {"pipe_config": config}}, "dataloader_train": {"dataset": data}}
    path = _written(folder, to_yaml(run))
    torch.save({"action_transform": transform_tensor(relative_pose())}, path)
    return path


@pytest.mark.parametrize("is_flow", [False, True])
def test_a_run_records_what_network_with_actions_it_trained(is_flow: bool, tmp_path: Path) -> None:
    getters = get_cosmos_predict2_action_conditioned_pipeline, get_cosmos_predict2p5_action_conditioned_pipeline
    config = getters[is_flow](model_size="2B", network="chunk" if is_flow else "flat")
    config.timestamps.nfe = 7
    config.chunk_size, config.state_t = (24, 7) if is_flow else (12, 4)
    choice = choose_action_model(ActionModel(dit_path=_action_run(tmp_path / "run", config, video_size=[256, 320])))
    assert choice.config.net["_target_"] is (ChunkActionDiT if is_flow else FlatActionDiT)
    assert choice.run is not None and (choice.run.video_size, choice.config.flow is not None) == ((256, 320), is_flow)
    assert (choice.config.chunk_size, choice.config.state_t) == (config.chunk_size, config.state_t)
    assert choice.config.timestamps.nfe == 7
    assert choice.config.transform == relative_pose()
    with torch.device("meta"):
        net = instantiate(choice.config.net)
    assert net.action_inputs == (28 if is_flow else 84) and net.text_channels == (100352 if is_flow else 1024)


def test_conditioning_frames_may_have_a_timestep_of_their_own(tmp_path: Path) -> None:
    paths = {}
    for name, flow in (("p2", None), ("p25", FlowConfig())):
        config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
        config.flow, config.net.action_dim = flow, 7
        paths[name] = _action_run(tmp_path / name, config)

    def sigma(name: str, timestep: float | None = None) -> float | None:
        choice = choose_action_model(ActionModel(dit_path=paths[name], given_timestep=timestep))
        return objective_of(choice.config).denoiser(nn.Identity()).sigma_conditional  # type: ignore[arg-type]

    assert sigma("p25", 0.1) == pytest.approx(sigma("p2"), rel=1e-3) and sigma("p25") is None
    for name, timestep in (("p2", 0.1), ("p25", 1000)):
        with pytest.raises(ConfigError, match="--given_timestep"):
            sigma(name, timestep)


def test_a_broken_transform_in_a_run_is_an_error(tmp_path: Path) -> None:
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    config.action_transform = controller(4).to_dict() | {"kind": "contoller"}
    with pytest.raises(CheckpointError, match="action_transform"):
        choose_action_model(
            ActionModel(dit_path=_written(tmp_path / "run", to_yaml({"model": {"config": {"pipe_config": config}}})))
        )


def test_a_folder_with_a_tokenizer_names_the_runs_below_it(tmp_path: Path) -> None:
    """The folder of `improve_policy` has a tokenizer beside its runs."""
    save_file({"encoder.weight": torch.zeros(2)}, tmp_path / "tokenizer.safetensors")
    run = tmp_path / "posttraining/video2world/world_model"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"no weights of a video network. Give one of its runs: {run}"):
        choose_action_model(ActionModel(dit_path=str(tmp_path)))


def test_weights_of_ones_own_may_be_called_anything() -> None:
    for path in ("runs/multiview/model.pt", "waymo/text2image.pt", "nvidia/Cosmos-Predict2-2B-Video2World/model.pt"):
        assert released_but_absent(path) is None


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ("experiment=predict2_text2image_training_0.6b_cosmos_nemo_assets", "no Text2Image models; its pictures"),
        ("experiment=predict2_distill_dmd2_2b", "no DMD2 models"),
    ],
)
def test_published_names_of_what_is_not_here_are_answered(choice: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{choice}: .* is not yet here: .*{named}"):
        compose("cosmos_predict2/configs/base/config.py", [choice])
