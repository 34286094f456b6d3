# SPDX-License-Identifier: Apache-2.0
"""Evaluating a Video2World run on its own data, as its config.yaml has them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cosmos_predict2.checkpoints import read_card
from cosmos_predict2.evaluation.reports.held_out_evaluation import Figures
from cosmos_predict2.pipelines.recorded_run import (
    composed_run,
    dataset_node,
    held_out_doubt,
    held_out_node,
    is_video2world,
)
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import save_yaml
from imaginaire.errors import ConfigError
from scripts import evaluate_world_model
from tests.programs import call

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
