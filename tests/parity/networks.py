# SPDX-License-Identifier: Apache-2.0
"""Networks of the golden folders, and what is seen of them while they run."""

from typing import Any

import pytest
from torch import Tensor

from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.world_model.objectives import Flow
from tests.goldens import Golden

CLASSES = {"v2w": Video2WorldDiT, "t2i": DiT}


def network(golden: Golden, name: str = "dit_a", **options: Any) -> DiT:
    """The network that meta.json has under a name."""
    meta = golden.json("meta.json")[name]
    net = CLASSES[meta["cls"].use()](**meta["cfg"].use() | options)
    return with_weights(net, golden, f"{name}.weights.safetensors")


def with_weights(net: DiT, golden: Golden, file: str) -> DiT:
    """The network with a file's weights, every name accounted for; its positions are functions of the config."""
    stored = golden.tensors(file)
    for name, value in net.pos_embedder.named_buffers():
        stored[f"net.pos_embedder.{name}"].compare(value, **golden.tolerance("rope_fp32"))
    net.load_state_dict({name.removeprefix("net."): stored[name].use() for name in stored})
    return net.eval()


def noted_velocities(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A list that sampling fills with the velocity of each call of the network."""
    velocities: list[Tensor] = []
    with_true_velocity = Flow.with_true_velocity

    def noted(self: Flow, *arguments: Any) -> Tensor:
        velocities.append(with_true_velocity(self, *arguments))
        return velocities[-1]

    monkeypatch.setattr(Flow, "with_true_velocity", noted)
    return velocities
