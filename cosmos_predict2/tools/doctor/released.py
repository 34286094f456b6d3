# SPDX-License-Identifier: Apache-2.0
"""Examination of a machine: attention, a small network and its gradients, videos, released weights."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2 import released
from cosmos_predict2.checkpoints.dit_weights import problem_with
from cosmos_predict2.data.video import media
from cosmos_predict2.nn.blocks import BACKENDS, check_attention, choose_attention
from cosmos_predict2.nn.dit import Video2WorldDiT
from imaginaire import storage
from imaginaire.errors import UserError, first_line
from imaginaire.findings import Finding

HEAD_DIMS = (128, 64)  # of the released networks, and of the tiny one
_NET: dict[str, Any] = dict(model_channels=128, num_blocks=2, num_heads=2, adaln_lora_dim=32, crossattn_emb_channels=64)
ON_ANY_DEVICE = ("math", "torch")
_ROUNDING = 3e-2  # relative, of a few blocks in bfloat16 against float32


def all_findings(device: torch.device) -> Iterator[Finding]:
    yield from attention(device)
    yield network(device)
    yield from videos()
    yield from weights()


def attention(device: torch.device) -> Iterator[Finding]:
    """The backend that ``auto`` takes here and why, and every backend compared with plain products."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    choice = choose_attention("auto", device, dtype, HEAD_DIMS[0])
    yield Finding("attention/auto", f"takes {choice.name} in {_name(dtype)} on {device}: {choice.reason}")
    names = sorted(set(BACKENDS.values()) - {"auto"})
    if device.type != "cuda":
        need_gpu = [name for name in names if name not in ON_ANY_DEVICE]
        names = [name for name in names if name in ON_ANY_DEVICE]
        yield Finding(f"attention/{', '.join(need_gpu)}", "need a GPU")
    for backend in names:
        yield _backend(backend, device, dtype)


def _backend(backend: str, device: torch.device, dtype: torch.dtype) -> Finding:
    try:
        ops = {head_dim: choose_attention(backend, device, dtype, head_dim).op for head_dim in HEAD_DIMS}
    except (ImportError, ValueError) as error:
        return Finding(f"attention/{backend}", f"cannot run here: {error}", "warning")
    try:
        for head_dim, op in ops.items():
            check_attention(op, head_dim, device, dtype)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        cure = "do not use it: leave atten_backend at auto"
        return Finding(f"attention/{backend}", first_line(error), "error", cure)
    widths = " and ".join(map(str, HEAD_DIMS))
    return Finding(f"attention/{backend}", f"agrees with plain products, head widths {widths}")


def network(device: torch.device) -> Finding:
    """A small network forward and backward on the device, in the precision of training, against float32 on the host."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = f"forward and backward on {device} in {_name(dtype)}"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = Video2WorldDiT(**_NET)
            with torch.no_grad():  # modulations begin at zero, where blocks add nothing
                for key, parameter in net.named_parameters():
                    if "adaln_modulation" in key:
                        parameter.normal_(std=0.1)
            inputs = _inputs()
        expected = net(**inputs).detach()
        net = net.to(device, dtype)
        net.attention = None  # chosen anew for the device
        out = net(**{key: value.to(device, dtype) for key, value in inputs.items()})
        error = float((out.detach().float().cpu() - expected).norm() / expected.norm())
        out.float().square().mean().backward()
        is_finite = all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)
    except (RuntimeError, ValueError) as problem:
        return Finding(f"network/{name}", first_line(problem), "error")
    if not error <= _ROUNDING or not is_finite:
        value = f"differs from float32 on the host by {error:.1e}" if is_finite else "a gradient is not finite"
        cure = "try net.atten_backend=math; if that is right, the attention kernel is wrong, else the device or driver"
        return Finding(f"network/{name}", value, "error", cure)
    return Finding(f"network/{name}", f"works, {error:.0e} from float32 on the host")


def _inputs() -> dict[str, torch.Tensor]:
    mask_B_1_T_H_W = torch.zeros(1, 1, 2, 8, 8)
    mask_B_1_T_H_W[:, :, 0] = 1
    return {
        "x_B_C_T_H_W": torch.randn(1, 16, 2, 8, 8),
        "timesteps_B_T": torch.rand(1, 1),
        "crossattn_emb_B_S_E": torch.randn(1, 16, 64),
        "condition_mask_B_1_T_H_W": mask_B_1_T_H_W,
        "padding_mask_B_1_H_W": torch.zeros(1, 1, 64, 64),
    }


def videos() -> Iterator[Finding]:
    """PyAV, and a clip written and read back."""
    try:
        import av

        yield Finding("videos/PyAV", f"{av.__version__} (brings its own FFmpeg)")
        yield Finding("videos/a clip written and read", _round_trip())
    except (ImportError, UserError, ValueError, OSError, RuntimeError) as error:
        yield Finding("videos/a clip written and read", first_line(error), "error", "pip install -c constraints.txt av")


def _round_trip() -> str:
    clip_C_F_H_W = torch.linspace(0, 255, 64).to(torch.uint8).expand(3, 5, 64, 64).contiguous()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        media.write_video(path, clip_C_F_H_W, 16)
        found_C_F_H_W, fps = media.read_video(path)
    error = float((found_C_F_H_W.float() - clip_C_F_H_W.float()).abs().mean())
    if found_C_F_H_W.shape != clip_C_F_H_W.shape or fps != 16 or error > 4:
        raise ValueError(f"{tuple(found_C_F_H_W.shape)} at {fps:g} fps came back, off by {error:.1f} of 255")
    return f"works, off by {error:.1f} of 255"


def weights() -> Iterator[Finding]:
    """Released weights that are here, each opened; one line for what is not."""
    missing: list[str] = []
    for what, path in _released():
        if not storage.exists(path):
            missing.append(what)
        elif path.endswith(".pt") and (problem := problem_with(path)) is not None:
            yield Finding(f"weights/{what}", problem, "error", "python -m scripts.download_checkpoints --check")
        else:
            yield Finding(f"weights/{what}", path)
    if missing:
        cure = "python -m scripts.download_checkpoints --model_types video2world --model_sizes 2B (tiny: nothing)"
        yield Finding(f"weights/not in {released.checkpoint_dir()}", ", ".join(missing), "warning", cure)


def _released() -> Iterator[tuple[str, str]]:
    find = released.get_cosmos_predict2_video2world_checkpoint
    for size, resolution, fps in itertools.product(released.VIDEO_SIZES, released.RESOLUTIONS, released.FPS):
        yield f"{size} Video2World {resolution}p {fps} fps", find(model_size=size, resolution=resolution, fps=fps)
    yield "video tokenizer", released.get_tokenizer_checkpoint()
    yield "T5 text encoder", released.get_t5_model_dir()
    yield "guardrail", released.get_guardrail_dir()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
