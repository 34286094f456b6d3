# SPDX-License-Identifier: Apache-2.0
"""How MuJoCo draws is found out by trying, and a machine that cannot is told what it lacks."""

import subprocess
from unittest import mock

import pytest
import torch

from cosmos_predict2.rl.envs.simulators import rendering
from imaginaire.errors import ConfigError


def test_the_first_way_that_draws_is_taken_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    faults = {"egl": "libEGL.so.1: cannot open shared object file", "osmesa": 1}
    with mock.patch.object(rendering, "_probed", faults.get):
        rendering.works.cache_clear()
        assert rendering.variables("auto") == {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}
        with pytest.raises(ConfigError, match=r"libEGL.so.1.*\n?.*apt-get install libegl1"):
            rendering.variables("egl")
        with mock.patch.dict(faults, egl=2):  # both draw
            rendering.works.cache_clear()
            assert (rendering.works("auto"), rendering.works("osmesa")) == (("egl", 2), ("osmesa", 1))
            rendering.works.cache_clear()
        monkeypatch.setenv("MUJOCO_GL", "egl")  # somebody's choice is not overruled
        rendering.works.cache_clear()
        with pytest.raises(ConfigError, match="render=auto"):
            rendering.variables("auto")
        with pytest.raises(ConfigError, match="Did you mean osmesa"):
            rendering.variables("mesa")
    rendering.works.cache_clear()


@pytest.mark.parametrize(
    ("code", "printed", "said", "found"),
    [
        (0, "drawn 3\n", "", 3),
        (0, "drawn 0\n", "", "the picture is black"),
        (1, "", "warning\nOSError: no libOSMesa.\n", "OSError: no libOSMesa"),
        (-11, "", "", "exit code -11"),
    ],
)
def test_a_way_draws_where_a_picture_is_seen(code: int, printed: str, said: str, found: int | str) -> None:
    done = subprocess.CompletedProcess([], code, printed, said)
    with mock.patch.object(subprocess, "run", return_value=done) as run:
        assert rendering._probed("osmesa") == found
    assert run.call_args.kwargs["env"]["MUJOCO_GL"] == "osmesa"


@pytest.mark.parametrize(
    ("visible", "world_size", "devices"),
    [("", "1", ["0", "1", "2", "0"]), ("4,6", "1", ["0", "0", "0", "0"]), ("2,1", "2", ["1", "1", "1", "1"])],
)
def test_workers_take_the_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, visible: str, world_size: str, devices: list[str]
) -> None:
    """Of several processes each has its own; what EGL does not know is left out, as in containers without graphics."""
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with mock.patch.object(rendering, "works", lambda render: ("egl", 3)):
        assert [rendering.variables("egl", i)["MUJOCO_EGL_DEVICE_ID"] for i in range(4)] == devices
