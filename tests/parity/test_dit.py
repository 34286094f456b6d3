# SPDX-License-Identifier: Apache-2.0
"""The network against golden values: outputs, what lies between, half precision, rotary tables, names and shapes."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.layers import RotaryPositions, Timesteps
from cosmos_predict2.released import NETWORKS
from tests.goldens import Golden, Value, parametrize, parts_of
from tests.nn.networks import outputs_of
from tests.parity.networks import network

AREA = "video2world"
TIMES = {"shared_t.": "timesteps_B_1", "per_frame_t.": "timesteps_B_T", "": "timesteps_B_1"}  # by the entry's prefix
INPUTS = ("x", "crossattn_emb", "condition_mask", "padding_mask", "fps")
AXES = ("t", "h", "w")
ROPE_OPTIONS = {"head_dim", "rope_enable_fps_modulation", "fps", "patch_temporal", "patch_spatial"}
ROPE_OPTIONS |= {"max_frames", "max_img_h", "max_img_w", *(f"rope_{axis}_extrapolation_ratio" for axis in AXES)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per network (``dit``), half-precision file (``half``), rotary table (``table``) and manifest."""
    folder, meta = parts_of(metafunc)
    found = {
        "dit": [key for key in meta if key.startswith("dit_")],
        "half": sorted(path.name for path in folder.glob("dit_*.bf16.safetensors")),
        "table": [key for key in meta if key.startswith("rope_")],
        "manifest": list(meta.get("manifests", {})),
    }
    parametrize(metafunc, found)


# ---- the networks ----------------------------------------------------------------------------------------------------


def test_names_shapes_and_number_of_parameters(dit: str, golden: Golden) -> None:
    net = network(golden, dit)
    weights = golden.tensors(f"{dit}.weights.safetensors")
    expected = {name.removeprefix("net."): weights[name].use() for name in weights}
    found = net.state_dict()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()
    }
    meta = golden.json("meta.json")[dit]
    if "params" in meta:
        meta["params"].compare(sum(p.numel() for p in net.parameters()))


def test_outputs_and_what_lies_between(dit: str, golden: Golden) -> None:
    net = network(golden, dit)
    file = golden.tensors(f"{dit}.forward.safetensors")
    inputs = {name: file[name].use() for name in file if name in INPUTS or name.startswith("timesteps_B_")}
    calls: dict[str, list[str]] = {}
    for name in file:
        prefix = next((p for p in ("shared_t.", "per_frame_t.", "image.") if name.startswith(p)), "")
        if name not in inputs:
            calls.setdefault(prefix, []).append(name)
    is_text2image = type(net) is DiT
    for prefix, names in calls.items():
        if prefix == "image.":
            frames = file["image.out"].use().shape[2]
            found = _call(net, {**inputs, "x": inputs["x"][:, :, :frames]}, "timesteps_B_1", is_image=True)
        else:
            found = _call(net, inputs, TIMES[prefix], is_image=is_text2image)
        for name in names:
            key = name.removeprefix(prefix)
            assert key in found, f"{dit}.forward: no part of the network gives '{key}'"
            kind = "network_fp32"
            if re.fullmatch(r"block\d+", key):
                kind = "block_fp32"
            elif key == "rope_angles":
                kind = "rope_fp32"
            # extra_pos_emb is the same for every sample, and stored for each
            actual = found[key].expand_as(file[name].use()) if key == "extra_pos_emb" else found[key]
            file[name].compare(actual, **golden.tolerance(kind))


@pytest.mark.parametrize("rope_precision", ["module", "float32"])
def test_half_precision(half: str, rope_precision: str, golden: Golden) -> None:
    tolerance, rounded = golden.json("meta.json")["tolerances"]["network_bf16"], "rope_angles_bf16_model"
    bound = tolerance["relative_l2_same_mode" if rope_precision == "module" else "relative_l2"].use()
    errors = _errors_on(golden, half, torch.device("cpu"), torch.bfloat16, rope_precision=rope_precision)
    assert max(errors.values()) <= bound, errors
    file = golden.tensors(half)
    if rope_precision == "module" and rounded in file:
        net, inputs = _net_and_inputs(golden, half, torch.device("cpu"), torch.bfloat16, rope_precision="module")
        found = _call(net, inputs, "timesteps_B_1", is_image=type(net) is DiT)
        _compare_rounded(golden, file[rounded], found["rope_angles"])


@pytest.mark.gpu
def test_half_precision_on_a_gpu(half: str, golden: Golden) -> None:
    bound = golden.json("meta.json")["tolerances"]["network_bf16"]["relative_l2"].use()
    for entry, error in _errors_on(golden, half, torch.device("cuda"), torch.bfloat16).items():
        assert error <= bound, f"{entry}: {error:.1e}"


@pytest.mark.gpu
def test_single_precision_on_a_gpu(half: str, golden: Golden) -> None:
    for entry, error in _errors_on(golden, half, torch.device("cuda"), torch.float32).items():
        assert error <= 1e-4, f"{entry}: {error:.1e}"  # other orders of sums


def _net_and_inputs(golden: Golden, half: str, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    dit = half.removesuffix(".bf16.safetensors")
    given = golden.tensors(f"{dit}.forward.safetensors")
    names = [name for name in given if name in INPUTS or name.startswith("timesteps_B_")]
    inputs = {name: given[name].use().to(device) for name in names}
    inputs = {name: x if name == "fps" else x.to(dtype) for name, x in inputs.items()}
    return network(golden, dit, **options).to(device, dtype), inputs


def _errors_on(golden: Golden, half: str, device: torch.device, dtype: torch.dtype, **options: Any) -> dict[str, float]:
    """Relative L2 differences of the outputs on a device from those of the files, by their names in half precision."""
    net, inputs = _net_and_inputs(golden, half, device, dtype, **options)
    file, given = golden.tensors(half), golden.tensors(half.replace(".bf16.", ".forward."))
    errors = {}
    for name in file:
        if name.endswith("out_bf16"):
            out = _call(net, inputs, TIMES[name.removesuffix("out_bf16")], is_image=type(net) is DiT)["out"]
            assert out.dtype == dtype
            value = file[name] if dtype == torch.bfloat16 else given[name.removesuffix("_bf16")]
            expected = value.expected().float()  # a norm over the whole output, which compare() does not have
            errors[name] = float((out.float().cpu() - expected).norm() / expected.norm())
    assert errors
    return errors


# ---- tables and names at real size -----------------------------------------------------------------------------------


def test_rotary_tables(table: str, golden: Golden) -> None:
    meta, file = golden.json("meta.json")[table], golden.tensors(f"{table}.safetensors")
    options = meta.use()
    unknown = set(options) - ROPE_OPTIONS
    assert not unknown, f"{table}: what is {unknown}?"
    patches = (options.get("patch_temporal", 1), options.get("patch_spatial", 2), options.get("patch_spatial", 2))
    limits = [options["max_frames"], options["max_img_h"], options["max_img_w"]]
    fps = None
    if options["rope_enable_fps_modulation"]:
        fps = torch.as_tensor(options["fps"], dtype=torch.float32).reshape(-1)
    for kind in ("fp32", "bf16_module"):
        positions = RotaryPositions(
            options["head_dim"],
            max_size=tuple(limit // patch for limit, patch in zip(limits, patches)),
            ratios=tuple(options[f"rope_{axis}_extrapolation_ratio"] for axis in AXES),
            enable_fps_modulation=options["rope_enable_fps_modulation"],
            precision="float32" if kind == "fp32" else "module",
        )
        if kind == "bf16_module":
            positions.to(torch.bfloat16)
        size = tuple(file[f"{kind}.{axis}"].use().shape[0] for axis in AXES)
        for axis, angles in zip(AXES, positions.axis_angles(size, fps)):
            if kind == "fp32":
                file[f"{kind}.{axis}"].compare(angles, **golden.tolerance("rope_fp32"))
            else:
                _compare_rounded(golden, file[f"{kind}.{axis}"], angles)


def test_sinusoids(table: str, golden: Golden) -> None:
    file = golden.tensors(f"{table}.safetensors")
    for name in file:
        if match := re.fullmatch(r"timesteps_sinusoid_(fp32|bf16)_dim(\d+)", name):
            timesteps, features = file["timesteps_in"].use(), Timesteps(int(match[2]))
            if match[1] == "fp32":
                file[name].compare(features(timesteps), **golden.tolerance("network_fp32"))
            else:
                _compare_rounded(golden, file[name], features(timesteps.to(torch.bfloat16)).float())


def test_manifest(manifest: str, golden: Golden) -> None:
    column = golden.json("meta.json")["manifests"][manifest].use()
    size = next(word for word in column.split() if word.endswith("B"))  # "2B", "V2W 14B", "T2I 0.6B"
    kind = "Text2Image" if "T2I" in column or "Text2Image" in column else "Video2World"
    with torch.device("meta"):
        net = (DiT if kind == "Text2Image" else Video2WorldDiT)(**NETWORKS[f"{size} {kind}"])
    found = {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in net.state_dict().items()
    }
    file = golden.json(f"{manifest}.json")
    for name in file:
        file[name].compare(found)


# ---- helpers ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _call(net: DiT, inputs: dict[str, Tensor], timesteps: str, is_image: bool) -> dict[str, Tensor]:
    """The output as ``out``, and by its golden name whatever a part of the network gave on the way."""
    outputs = outputs_of(net)
    out = net(
        inputs["x"],
        inputs[timesteps],
        inputs["crossattn_emb"],
        condition_mask_B_1_T_H_W=inputs["condition_mask"],
        padding_mask_B_1_H_W=inputs["padding_mask"],
        fps_B=inputs["fps"],
        is_image=is_image,
    )
    found = {re.sub(r"^blocks\.(\d+)", r"block\1", name): output for name, output in outputs.items()}
    found["rope_angles"] = torch.cat(2 * [found["pos_embedder"]], dim=-1)[:, None, None]
    found["timesteps_sinusoid"] = found["t_embedder.0"]
    found["t_embedder.0"], found["t_embedder.1"] = found["t_embedder"]
    found["extra_pos_emb"] = found.get("extra_pos_embedder")
    return {**found, "out": out}


def _compare_rounded(golden: Golden, value: Value, actual: Tensor) -> None:
    """Within one step of bfloat16 everywhere, and nearly everywhere equal."""
    tolerance = golden.json("meta.json")["tolerances"]["rope_bf16"]
    value.compare(actual, rtol=tolerance["relative_to_entry"].use())
    equal = (actual == value.expected()).float().mean()
    assert float(equal) >= tolerance["share_equal"].use(), f"{value.entry}: only {float(equal):.1%} are equal"
