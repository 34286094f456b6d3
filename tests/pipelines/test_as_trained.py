# SPDX-License-Identifier: Apache-2.0
"""Every part of a world model comes back from its run as it was trained: its arguments, and its own weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor

from cosmos_predict2.checkpoints.card import KEY, read_card, register
from cosmos_predict2.checkpoints.dit_loading import part_differences
from cosmos_predict2.configs.base.config_video2world import choose_model, get_cosmos_predict2_video2world_pipeline
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.evaluation.reports import held_out_evaluation
from cosmos_predict2.evaluation.reports.held_out_evaluation import Figures
from cosmos_predict2.models.video2world_model import Predict2Video2WorldModelConfig, Video2WorldModel
from cosmos_predict2.pipelines.recorded_run import (
    composed_run,
    dataset_node,
    held_out_doubt,
    held_out_node,
    is_video2world,
)
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.config import Predict2RLConfig
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.text.trained_text import TrainedText, text_facts
from cosmos_predict2.tokenizers.tiny import SHIPPED, TinyTokenizer
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from cosmos_predict2.world_model.config import SolverConfig
from cosmos_predict2.world_model.objectives import EDM
from cosmos_predict2.world_model.options import VideoModel
from cosmos_predict2.world_model.world_model import WorldModel, build_world_model
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.config.lazy_config import save_yaml, to_yaml
from imaginaire.errors import CheckpointError, ConfigError
from scripts import evaluate_world_model
from tests.programs import call
from tests.text.folders import t5_folder

TINY_WAN = dict(dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True])


class Sharpened(EDM):
    """An objective with an argument of its own."""

    def __init__(self, config: Any, sharpness: float = 1.0) -> None:
        super().__init__(config)
        self.sharpness = sharpness


register(Sharpened)


def _tiny_weights(path: Path, change: float) -> str:
    tensors = safetensors.torch.load_file(SHIPPED)
    tensors["group.linear_in.weight"] += change
    tensors["group.linear_out.weight"] -= change
    safetensors.torch.save_file(tensors, path)
    return str(path)


def _wan_weights(path: Path, seed: int) -> str:
    torch.manual_seed(seed)
    torch.save(WanTokenizer(config=TINY_WAN, allow_random=True).net.state_dict(), path)
    return str(path)


def _own_tokenizer(pipe: Any, folder: Path) -> None:
    pipe.tokenizer = L(TinyTokenizer)(weights=_tiny_weights(folder / "tokenizer.safetensors", 0.01))


def _wan(pipe: Any, folder: Path) -> None:
    pipe.tokenizer = L(WanTokenizer)(
        vae_pth=_wan_weights(folder / "tokenizer.pth", 1),
        config=TINY_WAN,
        latents_mean=[0.25] * 16,
        latents_std=[2.0] * 16,
        temporal_window=8,
    )


def _network(pipe: Any, folder: Path) -> None:
    pipe.net.rope_h_extrapolation_ratio = 3.0  # no shape shows it


def _rest(pipe: Any, folder: Path) -> None:
    pipe.objective = L(Sharpened)(sharpness=2.0)
    pipe.precision, pipe.sigma_conditional, pipe.state_t = "float64", 0.01, 3
    pipe.timestamps = SolverConfig(t_min=2.0, t_max=70.0)
    pipe.conditioner.text.dropout_rate = 0.4


PARTS = {"tokenizer": _own_tokenizer, "wan": _wan, "network": _network, "rest": _rest}


def _run(folder: Path, change: Callable[[Any, Path], None], **starts: Any) -> tuple[str, Video2WorldModel]:
    """A run of one checkpoint, with its model."""
    pipe = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    pipe.text_encoder = None
    change(pipe, folder)
    config = Predict2Video2WorldModelConfig(pipe_config=pipe, precision="float32")
    (folder / "run/checkpoints/model").mkdir(parents=True)
    (folder / "run/config.yaml").write_text(to_yaml({"model": {"config": config}}))
    (folder / "run/runs.jsonl").write_text(json.dumps(starts))
    model = Video2WorldModel(config)
    path = folder / "run/checkpoints/model/iter_000000001.pt"
    torch.save(model.checkpoint_state(), path)
    return str(path), model


def _read(path: str, **asked: Any) -> WorldModel:
    choice = choose_model(VideoModel(dit_path=path, **asked))
    choice.config.guardrail_config.enabled = False
    return Video2WorldPipeline.from_config(choice.config, choice.dit_path, device="cpu").world


def _clip() -> Tensor:
    return torch.rand(1, 3, 9, 48, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("part", PARTS)
def test_a_part_comes_back_as_it_was_trained(part: str, tmp_path: Path) -> None:
    path, model = _run(tmp_path, PARTS[part])
    world, trained = _read(path), model.world
    latent = trained.encode(_clip())
    assert torch.equal(world.encode(_clip()), latent) and torch.equal(world.decode(latent), trained.decode(latent))
    for name in ("sigma_conditional", "precision", "state_t", "timestamps", "conditioner", "flow"):
        assert getattr(world.config, name) == getattr(trained.config, name), name
    assert type(world.objective) is type(trained.objective)
    assert getattr(world.objective, "sharpness", 0) == getattr(trained.objective, "sharpness", 0)
    assert [*part_differences(read_card(path), "net", world.config.net)] == []
    assert world.config.net.rope_h_extrapolation_ratio == trained.config.net.rope_h_extrapolation_ratio
    assert all(torch.equal(a, b) for a, b in zip(world.net.parameters(), trained.net.parameters(), strict=True))


@pytest.mark.parametrize("part", ["tokenizer", "wan"])
def test_other_weights_in_the_place_of_the_recorded_ones_are_refused(part: str, tmp_path: Path) -> None:
    path, model = _run(tmp_path, PARTS[part])
    file = model.pipe_config.tokenizer.get("weights") or model.pipe_config.tokenizer.vae_pth
    kept = shutil.copy(file, tmp_path / "kept")
    (_tiny_weights if part == "tokenizer" else _wan_weights)(Path(file), 2)
    with pytest.raises(CheckpointError, match=rf"{file}.*--tokenizer_path"):
        _read(path)
    with pytest.raises(
        CheckpointError, match=r"^The checkpoint was trained with other weights.*--tokenizer_path"
    ):  # a resumed run
        Video2WorldModel(model.config).load_checkpoint_state(model.checkpoint_state())
    assert torch.equal(_read(path, tokenizer_path=str(kept)).encode(_clip()), model.world.encode(_clip()))


def test_a_config_that_names_the_shipped_tokenizer_is_refused(tmp_path: Path) -> None:
    path, _ = _run(tmp_path, _own_tokenizer)
    config = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    config.guardrail_config.enabled = False
    with pytest.raises(CheckpointError, match="other weights of its tokenizer"):
        Video2WorldPipeline.from_config(config, path, device="cpu")
    build_world_model(config, dtype=torch.float32).load(path, is_baseline=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_network, "rope_h_extrapolation_ratio=3"),
        (_rest, "pipe_config.objective Sharpened, here None"),
        (_wan, "WanTok"),
    ],
)
def test_a_config_with_another_part_is_refused(change: Any, named: str, tmp_path: Path) -> None:
    path, _ = _run(tmp_path, change)
    config = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    config.guardrail_config.enabled = False
    with pytest.raises(CheckpointError, match=named):
        Video2WorldPipeline.from_config(config, path, device="cpu")


def test_training_from_weights_of_another_tokenizer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Supervised, it may be meant; rewards alone teach nobody new latents."""
    path, model = _run(tmp_path, _own_tokenizer)
    pipe = get_cosmos_predict2_video2world_pipeline(model_size="tiny")
    start = attrs.evolve(model.config.model_manager_config, dit_path=path)
    Video2WorldModel(attrs.evolve(model.config, pipe_config=pipe, model_manager_config=start))
    assert "must be learnt anew" in caplog.text
    with pytest.raises(CheckpointError, match="other weights of its tokenizer"):
        FlowGRPOModel(Predict2RLConfig(pipe_config=pipe, model_manager_config=start, precision="float32"))


def test_a_moved_file_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path, model = _run(Path("."), _own_tokenizer)
    latent = model.world.encode(_clip())
    monkeypatch.chdir(tmp_path)
    assert torch.equal(_read(f"there/{path}").encode(_clip()), latent), "as the run's own folder saw it"
    (folder / "tokenizer.safetensors").rename(folder / "run/tokenizer.safetensors")
    assert torch.equal(_read(f"there/{path}").encode(_clip()), latent), "beside the run's config.yaml"
    (folder / "run/tokenizer.safetensors").rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(CheckpointError, match=r"tokenizer\.safetensors, which is not there.*--tokenizer_path"):
        _read(f"there/{path}")
    moved = _read(f"there/{path}", tokenizer_path="elsewhere.safetensors")
    assert torch.equal(moved.encode(_clip()), latent)


def test_a_record_without_digests_is_read_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, model = _run(tmp_path, _own_tokenizer)
    torch.save({name: value for name, value in torch.load(path).items() if name != KEY}, path)
    assert not read_card(path).digests
    assert torch.equal(_read(path).encode(_clip()), model.world.encode(_clip()))
    assert caplog.text.count("records no digest of its tokenizer") == 1


def test_the_models_that_come_with_the_code_record_theirs(caplog: pytest.LogCaptureFixture) -> None:
    imagination_of()
    assert read_card(TINY_ACTION).digests and "no digest" not in caplog.text


def test_the_text_encoder_comes_back_with_its_own_folder_and_weights(tmp_path: Path) -> None:
    t5_folder(tmp_path / "own")
    t5_folder(tmp_path / "other", seed=1)
    encoder = T5Encoder(str(tmp_path / "own"), max_length=16)

    def change(pipe: Any, folder: Path) -> None:
        pipe.text_encoder = L(T5Encoder)(path=str(tmp_path / "own"), max_length=16, batch_size=3)
        pipe.net.crossattn_emb_channels = encoder.width

    path, _ = _run(tmp_path, change, **text_facts([TrainedText(encoder.name, 16, 16, encoder.width)]))
    found = choose_model(VideoModel(dit_path=path)).config.text_encoder
    assert (found.path, found.batch_size) == (str(tmp_path / "own"), 3)
    assert torch.equal(_read(path).encode_text(["push"]), encoder.encode(["push"]))
    shutil.rmtree(tmp_path / "own")
    shutil.move(tmp_path / "other", tmp_path / "own")
    with pytest.raises(ConfigError, match="text encoder"):
        _read(path)


# The whole configuration ----------------------------------------------------------------------------------------------

CONFIG = "cosmos_predict2/configs/base/config.py"
EXPERIMENT = "predict2_video2world_training_tiny_video2world_data"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config.yaml of a run on a user's folders."""
    loaders = [
        word
        for loader, split in (("dataloader_train", "train"), ("dataloader_val", "val"))
        for word in (f"{loader}=folder", f"{loader}.dataset.dataset_dir=own/{split}")
    ]
    path = tmp_path_factory.mktemp("text") / "config.yaml"
    save_yaml(compose(CONFIG, [f"experiment={EXPERIMENT}", *loaders]), path)
    return path.read_text()


@pytest.fixture
def run(tmp_path: Path, text: str) -> Path:
    (tmp_path / "run" / "checkpoints" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(text)
    return tmp_path / "run"


def test_a_run_is_measured_on_its_own_data(run: Path) -> None:
    model = str(run / "checkpoints" / "model" / "iter_000000001.pt")
    assert is_video2world(read_card(str(run))) and is_video2world(read_card(model))
    config = composed_run(read_card(str(run)), ["dataloader_train.dataset.stride=2"])
    assert held_out_node(config, "")["dataset_dir"] == "own/val"
    other = held_out_node(config, str(run))
    assert other["dataset_dir"] == str(run) and other["stride"] == 2, "read as the training data are"
    (run / "val" / "videos").mkdir(parents=True)
    assert held_out_node(config, str(run))["dataset_dir"] == str(run / "val"), "the held-out one of its splits"
    training = dataset_node(config, "dataloader_train")
    assert held_out_doubt(training, held_out_node(config, "")) == ""
    assert "the clips are those of training (own/train)" in held_out_doubt(
        training, {**training, "dataset_dir": "./own/train"}
    )
    toy = {"_target_": "cosmos_predict2.data.toy.videos.ToyWorldVideos"}
    assert "the clips are of ToyWorldVideos, those of training of Dataset (own/train)" in held_out_doubt(training, toy)
    with pytest.raises(ConfigError, match=r"--data nowhere"):
        held_out_node(config, "nowhere")


def test_the_command_takes_the_run_without_an_experiment(
    run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(evaluate_world_model, "--dit_path", str(run)) == 2
    assert "own/val" in capsys.readouterr().err  # which is not there
    assert call(evaluate_world_model, "--dit_path", str(run), "--num_chunks", "3") == 2
    assert "--num_chunks goes with models with actions" in capsys.readouterr().err
    (run / "config.yaml").write_text(text.replace("model_channels: 128", "model_channels: 2048"))
    assert call(evaluate_world_model, "--dit_path", str(run)) == 2
    assert "The network is 2048 wide" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "which"), [((), "auto"), (("--load_ema",), "net_ema")])
def test_the_command_measures_the_weights_that_are_asked_for(
    flags: tuple[str, ...], which: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = mock.create_autospec(held_out_evaluation.evaluate, side_effect=ConfigError("this is enough"))
    monkeypatch.setattr(held_out_evaluation, "evaluate", asked)
    words = ["--dit_path", str(run), "--num_clips", "3", "--num_steps", "5", "--data", "mine", *flags]
    assert call(evaluate_world_model, *words) == 2
    assert asked.call_args.kwargs == dict(which=which, num_clips=3, num_steps=5, data="mine")


def test_a_run_that_starts_from_good_weights_has_to_improve_on_them() -> None:
    losses = dict(sigmas=[1.0], before=[0.5], linear={"scalar": [1.0]}, psnr_before=9.0, psnr_repeat=8.0)
    told = dict(num_clips=1, data="x", training_data="x")
    doubtful = Figures(after=[0.4], psnr=10.0, **losses, **told, cautions=("the clips are ...",))  # type: ignore[arg-type]
    assert doubtful.as_text().splitlines()[:2] == [doubtful.verdict, "caution: the clips are ..."]
    learned = [
        Figures(after=[after], psnr=psnr, **losses, **told).verdict.partition(":")[0]  # type: ignore[arg-type]
        for after, psnr in ((0.499, 10.0), (0.4, 9.0), (0.4, 10.0))
    ]
    assert learned == [
        "has learned next to nothing",
        "has learned something, but its frames are no nearer to the truth than before the training",
        "has learned these clips",
    ]


NOT_OURS = "which is not of this code"
NOT_BUILT = "which is none of the classes for that"


@pytest.mark.parametrize(
    ("keys", "value", "cause"),
    [
        (("dataloader_val", "dataset", "_target_"), "os.system", NOT_OURS),
        (("dataloader_val", "dataset", "_target_"), "cosmos_predict2.checkpoints.card.logging.os.system", NOT_OURS),
        (("dataloader_val", "dataset", "_target_"), "torch.load", NOT_OURS),
        (("_import_from_",), ["/elsewhere"], "elsewhere"),
        (("trainer", "type"), "checkpoints.run.payload.Trainer", NOT_OURS),
        (("checkpoint", "type"), "checkpoints.run.payload.Trainer", NOT_OURS),
        (("dataloader_val", "dataset", "fps"), "${oc.create:{_target_:os.system,command:false}}", "cannot be read"),
        *(
            ((*place, "extra"), {"_target_": name}, NOT_BUILT)
            for place in (("dataloader_val", "dataset"), ("model", "config"))
            for name in ("imaginaire.storage.remove", "cosmos_predict2.data.video.media.write_video", "torch.nn.Linear")
        ),
    ],
)
def test_nothing_else_is_imported_built_or_computed_for_a_run(
    run: Path, text: str, keys: tuple[str, ...], value: Any, cause: str
) -> None:
    tree: dict[str, Any] = yaml.safe_load(text)
    *places, last = keys
    section = tree
    for key in places:
        section = section[key]
    section[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=cause):
        composed_run(read_card(str(run)), [])
