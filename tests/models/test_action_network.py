# SPDX-License-Identifier: Apache-2.0
"""The weights of a network with actions: drawn, from a network without actions, from a file of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.models.config import Predict2ModelManagerConfig
from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.world_model.assembly import add_trained_adapters, fill_network, network_of
from tests.models.parts import make_config

KINDS: dict[str, Any] = {
    "base": dict(),
    "flat": dict(network=FlatActionDiT, net=dict(action_dim=3, num_action_per_chunk=8)),
    "chunk": dict(network=ChunkActionDiT, net=dict(action_dim=3, action_on_tokens=True)),
}


@pytest.fixture(autouse=True)
def memory_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a network is given is full of NaN, so that a weight that nothing wrote is seen."""
    to_empty = DiT.to_empty

    def full_of_nan(self: DiT, **options: Any) -> DiT:
        net = to_empty(self, **options)
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        return net

    monkeypatch.setattr(DiT, "to_empty", full_of_nan)


def filled(kind: str, path: str = "", seed: int = 0, **options: Any) -> DiT:
    config = make_config(**KINDS[kind], model_manager_config=Predict2ModelManagerConfig(dit_path=path), **options)
    net = network_of(config.pipe_config.net).to(torch.float32)
    add_trained_adapters(net, config)
    fill_network(net, config, "cpu", seed)
    return net


def saved(folder: Path, state: dict[str, Tensor]) -> str:
    torch.save({f"net.{name}": tensor for name, tensor in state.items()}, folder / "start.pt")
    return str(folder / "start.pt")


def of_actions(net: DiT) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters() if name.startswith("action_embedder_")}


@pytest.mark.parametrize("kind", ["flat", "chunk"])
@pytest.mark.parametrize("start", ["nothing", "base", "own"])
def test_every_number_is_begun(kind: str, start: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    source = filled("base" if start == "base" else kind, seed=1)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.5)
    path = "" if start == "nothing" else saved(tmp_path, source.state_dict())
    net = filled(kind, path)
    assert [name for name, tensor in net.state_dict().items() if bool(tensor.isnan().any())] == []
    assert not any(int(tensor) for name, tensor in net.named_buffers() if name.startswith("accum_"))
    embedders = of_actions(net)
    assert len(embedders) == (12 if kind == "chunk" else 8)
    for name, tensor in embedders.items():
        if start == "own":
            assert torch.equal(tensor, source.state_dict()[name])
        else:
            assert bool(tensor.any()) == (".fc1." in name)  # the last layers begin at zero
    if start != "nothing":
        state = net.state_dict()
        assert all(torch.equal(state[name], p) for name, p in source.named_parameters())
    assert ("it knows no actions: their embedders begin anew" in caplog.text) == (start == "base")


def test_what_is_drawn_follows_from_the_seed(tmp_path: Path) -> None:
    path = saved(tmp_path, filled("base").state_dict())
    first, again, other = (of_actions(filled("flat", path, seed)) for seed in (1, 1, 2))
    name = "action_embedder_B_3D.fc1.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_adapters_go_on_a_network_with_actions(tmp_path: Path) -> None:
    path = saved(tmp_path, filled("base", seed=1).state_dict())
    net = filled("chunk", path, train_architecture="lora", lora_rank=2, lora_alpha=4)
    assert [name for name, tensor in net.state_dict().items() if bool(tensor.isnan().any())] == []
    assert sum(".lora_A." in name for name in net.state_dict()) == 2 * 10
