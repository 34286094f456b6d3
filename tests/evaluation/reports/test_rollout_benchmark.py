# SPDX-License-Identifier: Apache-2.0
"""The benchmark of rollouts compares equals: every way gives the same videos, and one that does not is found."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import rollout

CPU = torch.device("cpu")


def test_every_way_gives_the_same_videos() -> None:
    assert rollout.check_equal("tiny", CPU) <= 1e-5


def test_a_way_that_gives_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    imagine = rollout.imagine

    def late(pipe: Any, way: rollout.Way, inputs: rollout.Inputs, *others: Any) -> torch.Tensor:
        return imagine(pipe, way, replace(inputs, actions=inputs.actions.roll(1, dims=1)), *others)

    monkeypatch.setattr(rollout, "imagine", late)
    with pytest.raises(SystemExit, match="gives other videos"):
        rollout.check_equal("tiny", CPU)


def test_the_large_network_is_refused_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout.machine, "device_and_dtype", lambda: (CPU, torch.float32))
    monkeypatch.setattr("sys.argv", ["rollout", "--model_size", "2B", "--quick"])
    with pytest.raises(SystemExit) as ended:
        rollout.main()
    assert ended.value.code == 2 and "--model_size 2B takes hours without a GPU" in capsys.readouterr().err
