# SPDX-License-Identifier: Apache-2.0
"""Pictures of MuJoCo without a screen: by EGL (a GPU, or Mesa in software) or by OSMesa (in software).

MuJoCo reads MUJOCO_GL when it is first imported, so what works is tried in a process of its own before that.
"""

import functools
import os
import subprocess
import sys

from imaginaire.errors import ConfigError, missing_package, near

BACKENDS = {  # by preference, with the Debian packages that they need
    "egl": "libegl1 libegl-mesa0 libgl1-mesa-dri (without an NVIDIA driver)",
    "osmesa": "libosmesa6",
    "glx": "libgl1 libgl1-mesa-dri, and a display",
}
CHOICES = ("auto", *BACKENDS)
_TIMEOUT = 120  # seconds

_PROBE = """
import os, mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3'/><geom type='plane' size='1 1 .1' rgba='1 0 0 1'/></worldbody></mujoco>"
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    brightest = renderer.render().max()
devices = 1
if os.environ["MUJOCO_GL"] == "egl":
    from mujoco.egl import egl_ext
    devices = len(egl_ext.eglQueryDevicesEXT())
print("drawn", devices if brightest else 0)
"""


def variables(render: str, number: int = 0) -> dict[str, str]:
    """The environment variables of worker ``number``; the workers of a process take its GPUs in turn."""
    backend, num_devices = works(render)
    found = _selection(backend)
    is_chosen = "MUJOCO_EGL_DEVICE_ID" in os.environ
    if backend == "egl" and not is_chosen and (gpus := [one for one in _gpus() if int(one) < num_devices]):
        gpu = gpus[number % len(gpus)]
        found |= {"MUJOCO_EGL_DEVICE_ID": gpu, "CUDA_VISIBLE_DEVICES": gpu}  # robosuite wants the one in the other
    return found


def prepare() -> None:
    """Let this process draw, where nothing has chosen how; to be called before MuJoCo is imported."""
    if not os.environ.get("MUJOCO_GL"):
        os.environ.update(_selection(works("auto")[0]))


@functools.cache
def works(render: str) -> tuple[str, int]:
    """The way to draw that works here, and on how many devices it can.

    "auto" is MUJOCO_GL where it is set, else the first way that draws a picture.
    """
    if render not in CHOICES:
        raise ConfigError(f"render is '{render}'.{near(render, CHOICES)}")
    asked = os.environ.get("MUJOCO_GL", "").lower() if render == "auto" else render
    faults = {}
    for backend in [asked] if asked in BACKENDS else ["egl", "osmesa"]:
        found = _probed(backend)
        if isinstance(found, int):
            return backend, found
        faults[backend] = found
    lines = [f"  {backend}: {fault}. apt-get install {BACKENDS[backend]}" for backend, fault in faults.items()]
    raise ConfigError("\n".join([f"MuJoCo draws no picture here (render={render}). One of these is needed:", *lines]))


def _selection(backend: str) -> dict[str, str]:
    if backend == "egl":  # robosuite takes CUDA_VISIBLE_DEVICES where there is no number, even an empty one
        device = os.environ.get("MUJOCO_EGL_DEVICE_ID", "0")
        return {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend, "MUJOCO_EGL_DEVICE_ID": device}
    return {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}


def _probed(backend: str) -> int | str:
    """Number of devices that a process can draw on this way, or the reason that it cannot."""
    command, env = [sys.executable, "-c", _PROBE], {**os.environ, **_selection(backend)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"no picture within {_TIMEOUT} seconds"
    if "No module named 'mujoco'" in done.stderr:
        raise missing_package("mujoco", "vla")
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].rstrip(".")
    return int(done.stdout.split()[-1]) or "the picture is black"


def _gpus() -> list[str]:
    """The GPUs to draw on, by number: of one process among several its own, else all that it sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    named = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    gpus = named or [str(i) for i in range(torch.cuda.device_count())]
    if not all(one.isdigit() for one in gpus):  # by UUID
        return []
    return [gpus[torch.cuda.current_device()]] if int(os.environ.get("WORLD_SIZE", "1")) > 1 else gpus
