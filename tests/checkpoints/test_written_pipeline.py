# SPDX-License-Identifier: Apache-2.0
"""Weights with actions are used as they were trained, wherever their file lies."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.checkpoints.action_transforms import transform_tensor
from cosmos_predict2.checkpoints.runs import run_tree
from cosmos_predict2.checkpoints.tiny_base import tiny_action_path
from cosmos_predict2.checkpoints.written_pipeline import KEY, UNTOLD, recorded_pipeline, written_pipeline
from cosmos_predict2.configs.action_conditioned.networks import get_cosmos_predict2_action_conditioned_pipeline
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.world_model.assembly import build_net
from examples.video2world_action_choice import choose_action_model
from examples.video2world_action_flags import parse
from imaginaire.config.lazy_config import to_yaml
from imaginaire.errors import CheckpointError
from scripts import convert
from tests.checkpoints.nets import SMALL, assert_same_parameters

SAID = {"summed_action_dims": [1, 2], "summed_action_scale": 0.5, "reads_text": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose network has what no shape tells, and samples from where its training began."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    config.net.update(SAID)
    config.fps, config.timestamps.t_min, config.state_t = 7, 5.0, 3
    net = build_net(config.net, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    (folder / "checkpoints/model").mkdir(parents=True)
    torch.save({**state, "action_transform": transform_tensor(controller(4, 1.0))}, _checkpoint(folder))
    tree = {"model": {"config": {"pipe_config": config}}, "dataloader_train": {"dataset": {"video_size": [48, 64]}}}
    (folder / "config.yaml").write_text(to_yaml(tree))
    return folder


def _checkpoint(folder: Path) -> Path:
    return folder / "checkpoints/model/iter_000000010.pt"


def _exported(run: Path, folder: Path, suffix: str) -> str:
    path = str(folder / f"alone.{suffix}")
    convert.run(convert._parser().parse_args([str(_checkpoint(run)), path]))
    return path


def _pipeline(path: str) -> tuple[Any, Any]:
    choice = choose_action_model(parse(["--dit_path", path]))
    choice.config.guardrail_config.enabled = False
    pipe = Video2WorldActionConditionedPipeline.from_config(choice.config, path, use_text_encoder=False, device="cpu")
    return choice, pipe


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_an_exported_file_far_from_its_run_is_the_same_model(suffix: str, run: Path, tmp_path: Path) -> None:
    path = _exported(run, tmp_path, suffix)
    (choice, pipe), (own_choice, own) = _pipeline(path), _pipeline(str(_checkpoint(run)))
    assert {name: pipe.config.net[name] for name in SAID} == SAID
    assert choice.video_size == own_choice.video_size == (48, 64)
    for name in ("state_t", "fps", "timestamps", "chunk_size", "conditioner", "action_transform"):
        assert getattr(pipe.config, name) == getattr(own.config, name), name
    assert (pipe.config.fps, pipe.config.timestamps.t_min, pipe.config.chunk_size) == (7, 5.0, 8)
    assert_same_parameters(pipe.dit, dict(own.dit.named_parameters()))
    frames, actions = torch.zeros(1, 3, 1, 48, 48, dtype=torch.uint8), torch.rand(1, 8, 4)
    videos = [each.generate_actions(frames, actions, [0], num_steps=2) for each in (pipe, own)]
    assert torch.equal(*videos) and videos[0].float().std() > 0


def test_what_is_exported_again_says_the_same(run: Path, tmp_path: Path) -> None:
    first = _exported(run, tmp_path, "safetensors")
    convert.run(convert._parser().parse_args([first, str(tmp_path / "again.pt")]))
    assert written_pipeline(str(tmp_path / "again.pt")) == written_pipeline(first) == recorded_pipeline(str(run))
    assert written_pipeline(str(_checkpoint(run))) is None  # this one does not say it


def test_a_network_built_otherwise_is_refused(run: Path, tmp_path: Path) -> None:
    path = _exported(run, tmp_path, "safetensors")
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    config.guardrail_config.enabled = False
    with pytest.raises(CheckpointError, match=r"summed_action_dims=\[1, 2\], here \[\]; summed_action_scale=0\.5"):
        Video2WorldActionConditionedPipeline.from_config(config, path, use_text_encoder=False, device="cpu")


def test_every_argument_that_shapes_do_not_tell_has_its_default() -> None:
    net = ChunkActionDiT(**SMALL, action_dim=4)
    assert {name: getattr(net, name) for name in UNTOLD} == UNTOLD


def test_the_tiny_model_can_be_copied_without_its_config(tmp_path: Path) -> None:
    copy = shutil.copy(tiny_action_path(), tmp_path)
    choice, pipe = _pipeline(str(copy))
    assert pipe.dit.summed_action_dims == [0, 1] and not pipe.dit.reads_text
    assert (choice.config.timestamps.nfe, choice.config.timestamps.t_min) == (1, 10.0)
    _, own = _pipeline(tiny_action_path())
    assert yaml.safe_load(to_yaml(pipe.config)) == yaml.safe_load(to_yaml(own.config))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    for text in ("{", json.dumps({"fps": 3})):
        torch.save({KEY: torch.tensor(list(text.encode()), dtype=torch.uint8)}, tmp_path / "model.pt")
        with pytest.raises(CheckpointError, match=KEY):
            written_pipeline(str(tmp_path / "model.pt"))
    assert written_pipeline(str(tmp_path / "absent.pt")) is None


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (
            b"b0: &b0 [1, 1]" + b"".join(b"\nb%d: &b%d [*b%d, *b%d]" % (i, i, i - 1, i - 1) for i in range(1, 40)),
            "aliases",
        ),
        (b"\xff\xfe model", "should be text in UTF-8"),
        (b"model: [", "is not valid YAML"),
    ],
)
def test_a_config_beside_weights_that_cannot_be_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, cause: str
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    assert run_tree(str(tmp_path / "checkpoints" / "model" / "iter_000000001.pt")) is None
    assert cause in caplog.text and str(tmp_path / "config.yaml") in caplog.text
