# SPDX-License-Identifier: Apache-2.0
import time

import pytest
import torch

from imaginaire.training.timers import Timers


def test_phases_add_up_and_reading_resets_them() -> None:
    timers = Timers(torch.device("cpu"))
    for _ in range(3):
        with timers("forward"):
            time.sleep(0.01)
    with timers("data"):
        pass
    read = timers.read_and_reset()
    assert list(read) == ["forward", "data"]
    assert 0.03 <= read["forward"] < 0.3
    assert 0 <= read["data"] < 0.01
    assert timers.read_and_reset() == {"forward": 0.0, "data": 0.0}


def test_the_time_of_an_inner_phase_is_not_that_of_the_outer_one() -> None:
    timers = Timers(torch.device("cpu"))
    with timers("train_batches"):
        time.sleep(0.01)
        with timers("data"):
            time.sleep(0.2)
        time.sleep(0.01)
    read = timers.read_and_reset()
    assert read["data"] >= 0.2 > read["train_batches"] >= 0.02


class FakeEvent:
    """A CUDA event whose clock is a counter."""

    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.synchronised = False

    def record(self) -> None:
        FakeEvent.clock += 1
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        self.synchronised = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.synchronised
        return end.at - self.at


def test_device_phases_count_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timers = Timers(torch.device("cuda"))
    for _ in range(2000):
        with timers("forward"):
            pass
    assert timers.read_and_reset() == {"forward": pytest.approx(2.0)}  # 1 ms each
    with timers("data"):
        time.sleep(0.01)
    assert timers.read_and_reset()["data"] >= 0.01  # on the host, whatever the device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_time_is_measured_on_the_device() -> None:
    timers = Timers(torch.device("cuda"))
    x = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with timers("forward"):
        for _ in range(20):
            x @ x
    launched = time.perf_counter()
    torch.cuda.synchronize()
    waited = time.perf_counter() - launched
    assert timers.read_and_reset()["forward"] >= 0.5 * waited  # of two clocks, however busy the machine
