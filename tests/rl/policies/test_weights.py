# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_predict2.released import EMBODIED
from cosmos_predict2.rl.policies.files import load_weights
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from imaginaire.errors import CheckpointError
from imaginaire.findings import CheckContext


@pytest.mark.parametrize(("policy", "name"), [(OpenVLAPolicy, "openvla_oft"), (Pi05Policy, "pi05")])
def test_a_policy_without_weights_is_refused_before_anything_is_built(policy: Any, name: str, tmp_path: Path) -> None:
    def found(path: str) -> str:
        (one,) = policy.check({"path": path}, CheckContext(key="model.config.policy"))
        assert one.level == "error"
        return str(one)

    told = found("")
    assert told.startswith("model.config.policy.path: the policy has no weights")
    assert f"model.config.policy.path=models/{EMBODIED[name][1]}" in told
    assert f"python -m scripts.download_checkpoints --embodied {name}" in told
    assert f"{tmp_path} has no config.json" in found(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert not [*policy.check({"path": str(tmp_path)}, CheckContext()), *policy.check({"path": "a/b"}, CheckContext())]
    with pytest.raises(CheckpointError, match=f"download_checkpoints --embodied {name}"):
        policy("")


class WithNet(nn.Module):
    """A policy's parameters, of which a part has the name that a run gives its whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_std = nn.Linear(2, 3), nn.Parameter(torch.randn(3))


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_part_of_a_policy_may_be_called_net(prefix: str, tmp_path: Path) -> None:
    """In the policy's own file, and in a run's, which has a world model besides."""
    written, read = WithNet(), WithNet()
    tensors = {f"{prefix}{name}": value for name, value in written.state_dict().items()}
    torch.save(tensors | ({"world_model.net.weight": torch.zeros(1)} if prefix else {}), tmp_path / "weights.pt")
    load_weights(read, str(tmp_path / "weights.pt"))
    assert all(torch.equal(value, written.state_dict()[name]) for name, value in read.state_dict().items())
