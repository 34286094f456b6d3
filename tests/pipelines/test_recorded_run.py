# SPDX-License-Identifier: Apache-2.0
"""Inference with a run's weights takes the run's own numbers, and says where the request differs."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cosmos_predict2.checkpoints.card import PIPELINE_KEY, card_of_config, card_tensors, text_tensor
from cosmos_predict2.configs.base.config_video2world import SIZES, get_cosmos_predict2_video2world_pipeline
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.pipelines.recorded_run import apply_card, recorded_run
from examples.video2world import main
from examples.video2world_choice import choose_model
from examples.video2world_flags import parse
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import instantiate, to_yaml
from imaginaire.errors import CheckpointError, ConfigError
from tests.data.video_files import write_clip

CONFIG = "cosmos_predict2/configs/base/config.py"
PREFIX = "experiment=predict2_video2world_training"


def _run(folder: Path, *overrides: str) -> str:
    """The folder of a run of an experiment, without its files of weights; where a checkpoint of it would be."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(compose(CONFIG, overrides)))
    (folder / "checkpoints/model").mkdir(parents=True)
    return str(folder / "checkpoints/model/iter_000000010.pt")


def _chosen(*flags: str) -> Any:
    return choose_model(parse(list(flags)))


@pytest.fixture(scope="module")
def agibot(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose positions, rate and size all differ from the defaults of its model."""
    experiment = f"{PREFIX}_2b_agibot_head_center_fisheye_color_480p_10fps"
    return _run(tmp_path_factory.mktemp("agibot") / "run", experiment)


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
    assert (
        _chosen("--dit_path", agibot, "--model_size", "2B", "--resolution", "480", "--fps", "10").config.state_t == 16
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_request_that_differs_is_a_warning_with_both_values(agibot: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--resolution", "720", "--fps", "16", "--aspect_ratio", "1:1"]
    choice = _chosen("--dit_path", agibot, *flags)
    assert (choice.config.resolution, choice.config.fps, choice.config.state_t) == ("720", 16, 24)
    assert choice.aspect_ratio == "1:1"
    for text in ("--resolution 720, but", "trained at 480", "--fps 16, but", "at 10", "--aspect_ratio 1:1", "at 16:9"):
        assert text in caplog.text
    assert choice.config.net.rope_h_extrapolation_ratio == 2.0  # what the weights are stays
    caplog.clear()
    assert _chosen("--dit_path", agibot, "--num_frames", "93").config.state_t == 24
    assert "--num_frames 93, but" in caplog.text and "was trained at 61: resolution 480 (768x432)" in caplog.text


def test_a_run_that_recorded_no_rate_has_that_of_the_clip_to_go_on_with(agibot: str, tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", 5, rate=15)
    flags = ["--dit_path", agibot, "--input_path", str(tmp_path / "clip.mp4")]
    assert (_chosen(*flags).config.fps, _chosen(*flags, "--fps", "12").config.fps) == (15, 12)
    assert _chosen("--random_weights", *flags[2:]).config.fps == 16  # released weights have theirs


def test_a_size_that_no_flags_name_is_compared_in_pixels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the flags are, a run of 64x64 is not followed: they name 48x64 at least."""
    pipe = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    tree = {"model": {"config": {"pipe_config": pipe}}, "dataloader_train": {"dataset": {"video_size": [64, 64]}}}
    (tmp_path / "config.yaml").write_text(to_yaml(tree))
    (tmp_path / "checkpoints/model").mkdir(parents=True)
    path = str(tmp_path / "checkpoints/model/iter_000000010.pt")
    _chosen("--dit_path", path, "--aspect_ratio", "3:4", "--num_frames", "61")
    assert f"frames of 48x64 (--resolution 48, --aspect_ratio 3:4), but {tmp_path} was trained at 64x64" in caplog.text
    assert f"--num_frames 61, but {tmp_path} was trained at 13" in caplog.text
    caplog.clear()
    _chosen("--dit_path", path)
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "frames of 48x48 (--resolution 48, --aspect_ratio 1:1)" in record.message


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
        path = _run(tmp_path / name, f"{PREFIX}_tiny_groot_gr1_480", *overrides)
        model = compose(CONFIG, [f"{PREFIX}_tiny_groot_gr1_480", *overrides]).model["config"]
        torch.save({"net.x": torch.zeros(1), **card_tensors(card_of_config(model))}, path)
        assert _chosen("--dit_path", path).config.input_crop == name.partition(",")[0], name
    assert _chosen("--random_weights").config.input_crop == "center"


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--dit_path", "RUN", "--model_size", "14B"], "--model_size 14B"),
        (["--random_weights", "--dit_path", "x.pt"], "--random_weights"),
    ],
)
def test_flags_that_contradict_the_weights_are_refused(flags: list[str], cause: str, agibot: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        _chosen(*(agibot if word == "RUN" else word for word in flags))


def test_the_size_of_the_clips_and_a_length_of_its_own_are_kept(tmp_path: Path) -> None:
    path = _run(tmp_path / "large", f"{PREFIX}_2b_groot_gr1_480")  # trains the model of 720p on clips of 480p
    card = recorded_run(path)
    assert card is not None and card.pipeline["resolution"] == "720"
    assert _chosen("--dit_path", path).config.resolution == "480"
    path = _run(tmp_path / "run", f"{PREFIX}_tiny_groot_gr1_480", "model.config.pipe_config.state_t=3")
    choice = _chosen("--dit_path", path)
    assert (choice.model_size, choice.config.state_t, choice.aspect_ratio) == ("tiny", 3, "1:1")
    assert choice.config.timestamps.t_min == 1.0


def test_text_and_width_of_another_network_are_followed(tmp_path: Path) -> None:
    net = "model.config.pipe_config.net"
    overrides = [f"{net}.model_channels=64", f"{net}.num_blocks=1", f"{net}.crossattn_emb_channels=32"]
    path = _run(tmp_path / "run", f"{PREFIX}_tiny_groot_gr1_480", *overrides)
    run = recorded_run(path)
    assert run is not None and run.model_size(SIZES) is None
    config = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    apply_card(run, config)
    assert config.text_encoder.width == 32
    with torch.device("meta"):
        assert instantiate(config.net).model_channels == 64


def test_adapters_of_a_run_say_the_base_and_its_numbers(tmp_path: Path) -> None:
    path = _run(tmp_path / "run", "experiment=predict2_video2world_lora_training_tiny_cosmos_nemo_assets")
    choice = _chosen("--lora", f"{path}:0.5")
    assert choice.model_size == "tiny" and choice.dit_path.endswith("tiny_video2world.safetensors")
    assert _chosen("--model_size", "tiny").dit_path == choice.dit_path
    assert _chosen("--model_size", "tiny", "--random_weights").dit_path == ""


def test_a_run_of_foreign_code_is_told_and_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _run(tmp_path / "run", f"{PREFIX}_tiny_groot_gr1_480")
    file = tmp_path / "run/config.yaml"
    file.write_text(file.read_text().replace("cosmos_predict2.nn.dit.Video2WorldDiT", "trap.Network"))
    choice = _chosen("--dit_path", path, "--model_size", "tiny")
    assert (choice.dit_path, choice.config.state_t) == (path, 4)
    assert "config.yaml is not read: its network is trap.Network" in caplog.text


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
    key: str, node: Any, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _run(tmp_path / "run", f"{PREFIX}_tiny_groot_gr1_480")
    file = tmp_path / "run/config.yaml"
    tree = yaml.safe_load(file.read_text())
    place = tree["model"]["config"]["pipe_config"]
    if key == "tokenizer.device":  # a known one, but not that of the model's size
        place["tokenizer"] = {"_target_": "cosmos_predict2.tokenizers.wan_vae.WanTokenizer"}
    *above, name = key.split(".")
    for part in above:
        place = place[part]
    place[name] = node
    file.write_text(yaml.safe_dump(tree))
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckpointError, match=error):
        _chosen("--dit_path", path)


def test_nothing_that_weights_bring_is_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An interpolation can make a call: ``_target_`` need not even stand in its text."""
    call = '${oc.decode:"{_tar${oc.decode:get_}: os.system, command: false}"}'
    folder = tmp_path / "run"
    path = _run(folder, f"{PREFIX}_tiny_groot_gr1_480")
    text = {"encoder": "bytes", "encoder_tokens": call, "num_tokens": 64, "width": 64}
    (folder / "runs.jsonl").write_text(json.dumps({"text": [text], "frame_rate": "many"}))
    assert _chosen("--dit_path", path).config.text_encoder.num_tokens != call
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["model"]["config"]["pipe_config"]["net"]["max_frames"] = call
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    assert recorded_run(path) is recorded_run("") is None
    assert caplog.text.count("holds an interpolation") >= 2
    torch.save({PIPELINE_KEY: text_tensor(json.dumps({"net": {"max_frames": call}}))}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"'action_pipeline' cannot be read: .* holds an interpolation"):
        recorded_run(str(tmp_path / "model.pt"))


@pytest.mark.slow
def test_a_video_by_a_run_needs_no_other_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["model.config.pipe_config.state_t=2", "model.config.pipe_config.net.num_blocks=1"]
    path = _run(tmp_path / "run", f"{PREFIX}_tiny_groot_gr1_480", *overrides)
    run = recorded_run(path)
    assert run is not None
    config = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    apply_card(run, config)
    net: Video2WorldDiT = instantiate(config.net)
    torch.save({f"net.{name}": value for name, value in net.state_dict().items()}, path)
    flags = ["--dit_path", path, "--prompt", "x", "--model_size", "tiny", "--num_steps", "1"]
    monkeypatch.setattr("sys.argv", ["video2world.py", *flags, "--save_path", str(tmp_path / "out.mp4")])
    assert main() == 0
    from cosmos_predict2.data.video import media

    assert media.probe_video(tmp_path / "out.mp4").num_frames == 5
