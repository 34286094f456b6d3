# SPDX-License-Identifier: Apache-2.0
import time

import pytest
import torch

from imaginaire.training.step import Timers


class Clock:
    """A clock that stands still but for `sleep`."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("imaginaire.training.step.time", clock)
    return clock


def test_phases_add_up_and_reading_resets_them(clock: Clock) -> None:
    timers = Timers(torch.device("cpu"))
    for _ in range(3):
        with timers("forward"):
            clock.sleep(1.0)
    with timers("data"):
        clock.sleep(0.5)
    read = timers.read_and_reset()
    assert list(read) == ["forward", "data"]
    assert read == {"forward": 3.0, "data": 0.5}
    assert timers.read_and_reset() == {"forward": 0.0, "data": 0.0}


def test_the_time_of_an_inner_phase_is_not_that_of_the_outer_one(clock: Clock) -> None:
    timers = Timers(torch.device("cpu"))
    with timers("train_batches"):
        clock.sleep(1.0)
        with timers("data"):
            clock.sleep(8.0)
        clock.sleep(2.0)
    assert timers.read_and_reset() == {"train_batches": 3.0, "data": 8.0}


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


def test_device_phases_count_every_pair(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timers = Timers(torch.device("cuda"))
    for _ in range(2000):
        with timers("forward"):
            pass
    assert timers.read_and_reset() == {"forward": pytest.approx(2.0)}  # 1 ms each
    with timers("data"):
        clock.sleep(0.5)
    assert timers.read_and_reset()["data"] == 0.5  # on the host, whatever the device


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
