# SPDX-License-Identifier: Apache-2.0
"""Which actions weights were trained with: written, found again, asked for."""

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import yaml

from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.checkpoints.action_transforms import (
    KEY,
    parse_transform,
    recorded_transform,
    released_transform,
    require_transform,
    tensor_transform,
    transform_tensor,
)
from cosmos_predict2.checkpoints.dit_weights import load_dit, open_dit
from cosmos_predict2.checkpoints.export import Export, export
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.released import (
    get_cosmos_predict2_action_conditioned_checkpoint,
    get_cosmos_predict25_checkpoint,
)
from imaginaire.errors import CheckpointError, ConfigError

NET = dict(model_channels=32, num_blocks=2, num_heads=2, adaln_lora_dim=8, crossattn_emb_channels=8)
OWN = ActionTransform(kind="controller", scale=(1.0, 2.5, 1e-3), offset=(0.0, 0.1, -1 / 3))


@pytest.fixture
def net() -> ChunkActionDiT:
    torch.manual_seed(0)
    return ChunkActionDiT(action_dim=3, max_img_h=8, max_img_w=8, max_frames=4, **NET)


def _checkpoint(folder: Path, net: torch.nn.Module, transform: ActionTransform | None = OWN) -> str:
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    if transform is not None:
        state[KEY] = transform_tensor(transform)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "iter_000000010.pt")
    return str(folder / "iter_000000010.pt")


@pytest.mark.parametrize("transform", [OWN, relative_pose(accumulate=4, quaternion=True), controller(29, 1.0)])
def test_a_tensor_keeps_every_number(transform: ActionTransform) -> None:
    assert tensor_transform(transform_tensor(transform)) == transform


def test_a_tensor_of_something_else_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        tensor_transform(torch.full((5,), 200, dtype=torch.uint8))


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_checkpoint_says_it_and_so_does_what_is_exported(form: str, tmp_path: Path, net: ChunkActionDiT) -> None:
    path = _checkpoint(tmp_path, net)
    assert recorded_transform(path) == OWN
    exported = str(tmp_path / f"exported.{form}")
    export(Export(path, exported, form, dtype=torch.bfloat16))
    assert recorded_transform(exported) == OWN
    assert KEY not in open_dit(exported), "it is none of the network's weights"
    again = ChunkActionDiT(action_dim=3, max_img_h=8, max_img_w=8, max_frames=4, **NET)
    load_dit(again, exported)


def test_a_run_says_it_in_its_config(tmp_path: Path, net: ChunkActionDiT) -> None:
    path = _checkpoint(tmp_path / "checkpoints" / "model", net, transform=None)
    assert recorded_transform(path) is None
    tree = {"model": {"config": {"pipe_config": {KEY: OWN.to_dict()}}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert recorded_transform(path) == OWN


def test_released_files_are_known_by_name() -> None:
    assert released_transform(get_cosmos_predict2_action_conditioned_checkpoint(root="x")) == relative_pose(20)
    assert released_transform(get_cosmos_predict25_checkpoint("2B/robot/action-cond", root="x")) == relative_pose(20)
    assert released_transform("weights/libero-spatial-2b-19k.pt") == controller(7, 20)
    assert released_transform(get_cosmos_predict25_checkpoint("2B/post-trained")) is None
    assert released_transform("mine/model-480p-4fps.pt") is None


def test_a_released_file_that_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(CheckpointError, match=r"Download it: python -m scripts\.download_checkpoints"):
        recorded_transform(get_cosmos_predict2_action_conditioned_checkpoint(root="no/such/folder"))


def test_weights_without_a_transform_are_refused(tmp_path: Path, net: ChunkActionDiT) -> None:
    path = _checkpoint(tmp_path, net, transform=None)
    with pytest.raises(CheckpointError) as error:
        require_transform(path)
    assert "--action_transform" in str(error.value) and "pipe_config.action_transform" in str(error.value)
    assert require_transform(path, "controller:1x3") == controller(3, 1.0)
    assert require_transform(path, OWN.to_dict()) == require_transform(path, OWN.to_json()) == OWN


def test_another_transform_than_the_written_one_is_refused(tmp_path: Path, net: ChunkActionDiT) -> None:
    path = _checkpoint(tmp_path, net)
    assert require_transform(path) == require_transform(path, OWN) == OWN
    with pytest.raises(CheckpointError, match=r"scale \[1, 2.5, 0.001\].*--action_transform .*scale 20"):
        require_transform(path, "controller:20x3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("relative_pose", relative_pose(20)),
        ("relative_pose:10", relative_pose(10)),
        ("controller", controller(7, 20)),
        ("controller:20x7", controller(7, 20)),
        ("controller:0.5x29", controller(29, 0.5)),
    ],
)
def test_a_transform_has_a_short_name(text: str, expected: ActionTransform) -> None:
    assert parse_transform(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("relative_poses", "Did you mean relative_pose"),
        ("controller:x7", "controller:20x7"),
        ("controller:--x7", "controller:20x7"),
        ("relative_pose:20x7", "relative_pose:20"),
        ('{"kind": "controller"}', "lacks scale"),
        ("{kind", "is no JSON"),
        ('{"kind": "controller", "scale": 5}', "5 is no list of numbers"),
        ('{"kind": "controller", "scale": ["a"]}', "is no list of numbers"),
    ],
)
def test_what_is_no_transform_is_explained(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_transform(text)


def test_the_header_of_safetensors_holds_it_as_json(tmp_path: Path, net: ChunkActionDiT) -> None:
    export(Export(_checkpoint(tmp_path, net), str(tmp_path / "a.safetensors"), "safetensors"))
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert ActionTransform.from_json(file.metadata()[KEY]) == OWN
        assert KEY not in set(file.keys())
