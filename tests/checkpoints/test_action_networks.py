# SPDX-License-Identifier: Apache-2.0
"""Networks with actions are told from the weights, built from them and loaded whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.checkpoints import load_dit, open_dit
from cosmos_predict2.checkpoints.dit_loading import check_dit
from cosmos_predict2.checkpoints.dit_weights import ACTION_EMBEDDERS, action_network, describe
from cosmos_predict2.checkpoints.download import manifest_of
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from imaginaire.errors import CheckpointError
from tests.checkpoints.nets import SMALL, assert_same_parameters, parameters_of, random_net, released_state

FLAT: dict[str, Any] = dict(action_dim=7, num_action_per_chunk=12)
CHUNK: dict[str, Any] = dict(action_dim=7, temporal_compression_ratio=4)
PROJECTION: dict[str, Any] = dict(crossattn_proj_in_channels=24)
NETS: dict[str, tuple[type[ActionDiT], dict[str, Any]]] = {
    "flat-P2": (FlatActionDiT, FLAT),
    "flat-P2.5": (FlatActionDiT, {**FLAT, **PROJECTION}),
    "chunk-P2.5": (ChunkActionDiT, {**CHUNK, **PROJECTION}),
    "chunk, patches of one": (ChunkActionDiT, {**CHUNK, "patch_spatial": 1}),
    "chunk, toy": (ChunkActionDiT, {**CHUNK, "action_on_tokens": True, "hidden_dim_in_action_embedder": 24}),
}


def action_net(cls: type[ActionDiT] = FlatActionDiT, seed: int = 0, **changes: Any) -> ActionDiT:
    net = cls(**{**SMALL, **(FLAT if cls is FlatActionDiT else CHUNK), **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return net.eval()


def _save(folder: Path, state: dict[str, Any], name: str = "model.pt") -> str:
    torch.save(state, folder / name)
    return str(folder / name)


@pytest.mark.parametrize("kind", NETS)
def test_the_network_is_chosen_from_the_file(kind: str, tmp_path: Path) -> None:
    cls, options = NETS[kind]
    source = action_net(cls, seed=1, **options)
    path = _save(tmp_path, released_state(source))
    network, arguments = action_network(describe(open_dit(path)))
    net = network(**{**SMALL, **arguments})  # RoPE ratios of a size that was not released are no part of a file
    assert type(net) is cls
    report = load_dit(net, path)
    assert not (report.missing or report.unexpected or report.wrong_shape)
    assert_same_parameters(net, parameters_of(source))


@pytest.mark.parametrize(
    ("network", "cls", "fp32"),
    [("2B action-conditioned", FlatActionDiT, False), ("2B Predict2.5 action-conditioned", ChunkActionDiT, True)],
)
def test_released_files_say_all(network: str, cls: type[ActionDiT], fp32: bool) -> None:
    tensors = manifest_of(network)
    found, arguments = action_network(describe(tensors))
    with torch.device("meta"):
        net = found(**arguments)
    assert type(net) is cls and net.use_wan_fp32_strategy is fp32
    assert net.pos_embedder.thetas[1] > net.pos_embedder.thetas[0]  # ratios 1, 3, 3
    built = {name: tuple(p.shape) for name, p in net.named_parameters()}
    assert built == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_other_sizes_of_actions_and_of_chunks_are_asked_for() -> None:
    gr1 = describe(action_net(ChunkActionDiT, action_dim=29).state_dict())
    with pytest.raises(CheckpointError, match=r"reads 116 numbers.*84 in one vector.*4 actions of 29 numbers \(GR1\)"):
        action_network(gr1)
    assert action_network(gr1, 29)[0] is ChunkActionDiT
    eight = describe(action_net(action_dim=7, num_action_per_chunk=8).state_dict())
    assert action_network(eight, num_actions=8)[1]["num_action_per_chunk"] == 8
    with pytest.raises(CheckpointError, match="without actions"):
        action_network(describe(random_net().state_dict()), source="base.pt")


# Loading --------------------------------------------------------------------------------------------------------------


def _drop(state: dict[str, Any], *parts: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not any(part in name for part in parts)}


def test_embedders_begin_anew_only_where_that_is_allowed(tmp_path: Path) -> None:
    base = random_net(seed=1)
    path, net = _save(tmp_path, released_state(base)), action_net(seed=2)
    kept = {name: value for name, value in parameters_of(net).items() if name.startswith("action_embedder_")}
    with pytest.raises(CheckpointError, match=r"model\.pt is a Video2World.*without actions.*The network is an action"):
        load_dit(net, path)
    report = load_dit(net, path, allow_missing=[ACTION_EMBEDDERS])
    assert set(report.missing) == set(kept) and len(kept) == 8
    assert_same_parameters(net, {**parameters_of(base), **kept})


ODD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a part of the embedders": (
        {},
        {"drop": ("action_embedder_B_3D",)},
        r"has 4 of the 8 tensors of the network's action embedders.*lacks action_embedder_B_3D\.fc1\.weight",
    ),
    "without the tensor that tells": (
        {},
        {"drop": ("action_embedder_B_D.fc1.weight",)},
        r"has 7 of the 8 tensors.*lacks action_embedder_B_D\.fc1\.weight",
    ),
    "a network of chunks": ({"cls": ChunkActionDiT}, {}, "28 numbers of actions.*4 actions of 7.*net.action_dim"),
    "one of eight actions": ({"num_action_per_chunk": 8}, {}, "56 numbers.*8 actions of 7 numbers"),
    "actions on the tokens": ({"action_on_tokens": True}, {}, "has action tokens True in the file and False"),
    "another hidden width": ({"hidden_dim_in_action_embedder": 8}, {}, "action hidden 8 in the file and 128"),
    "with a projection": (PROJECTION, {}, "Predict2.5.*crossattn_proj_in_channels=24"),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("allow_missing", [(), (ACTION_EMBEDDERS,)])
def test_other_networks_with_actions_are_refused(case: str, allow_missing: tuple[str, ...], tmp_path: Path) -> None:
    options, change, message = ODD[case]
    state = _drop(released_state(action_net(**options)), *change.get("drop", ()))
    if case == "without the tensor that tells" and not allow_missing:
        message = "without actions"
    path = _save(tmp_path, state)
    with pytest.raises(CheckpointError, match=message):
        load_dit(action_net(), path, allow_missing=allow_missing)
    with pytest.raises(CheckpointError, match=message):
        check_dit(FlatActionDiT(**SMALL, **FLAT), path, allow_missing=allow_missing)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: action_net(action_on_tokens=True), r"has action tokens False in the file and True"),
        (random_net, r"The network is a Video2World.*without actions"),
    ],
)
def test_a_network_that_reads_actions_otherwise_refuses_the_weights(make: Any, message: str, tmp_path: Path) -> None:
    path = _save(tmp_path, released_state(action_net()))
    with pytest.raises(CheckpointError, match=message):
        load_dit(make(), path, allow_missing=[ACTION_EMBEDDERS])
