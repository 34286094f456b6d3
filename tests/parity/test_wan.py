# SPDX-License-Identifier: Apache-2.0
"""Wan2.1 against golden values: network, gradients, samplers, the condition of image to video, adapters, names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.checkpoints import wan_names
from cosmos_predict2.checkpoints.adapters import apply_lora
from cosmos_predict2.checkpoints.dit_loading import load_dit
from cosmos_predict2.conditioner import Condition, image_channels
from cosmos_predict2.diffusion.rectified_flow import NUM_TIMESTEPS, draw_timesteps, flow_sigmas, noise_level
from cosmos_predict2.models.config import Predict2p5Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.blocks import modulated_norm
from cosmos_predict2.nn.layers import RotaryPositions, Timesteps
from cosmos_predict2.nn.wan_dit import WanBlock, WanDiT
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.errors import CheckpointError
from imaginaire.optim import lora
from tests.goldens import Golden, Value, parametrize, parts_of
from tests.models.parts import PooledPixels
from tests.nn.networks import outputs_of
from tests.parity.networks import noted_velocities

AREA = "wan"
KINDS = {"unipc": ("diffusers", "unipc"), "unipc_original": ("shift", "unipc"), "euler": ("even", "flow_euler")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per network, per network with training, sampling or adapters, and per list of names at real size."""
    folder, meta = parts_of(metafunc)
    found = {"net": list(meta.get("nets", {}))}
    for name, part in {"trained": "train", "sampled": "sampler", "adapted": "lora"}.items():
        found[name] = sorted(path.name.partition(".")[0] for path in folder.glob(f"*.{part}.safetensors"))
    found["manifest"] = sorted(path.name for path in folder.glob("manifest_*.json"))
    parametrize(metafunc, found)


# ---- the networks ----------------------------------------------------------------------------------------------------


def test_names_and_shapes_in_both_layouts(net: str, golden: Golden, tmp_path: Path) -> None:
    built, meta, rows = _build(golden, net), golden.json("meta.json")["nets"][net], golden.json("keys.json")[net]
    shapes = {name: list(parameter.shape) for name, parameter in built.named_parameters()}
    for row in rows:
        name = row["original"].use()
        row["diffusers"].compare(wan_names.to_diffusers_name(name))
        row["original"].compare(wan_names.from_diffusers_name(row["diffusers"].use()))
        row["shape"].compare(shapes.pop(name))
    assert not shapes
    meta["params"].compare(sum(p.numel() for p in built.parameters()))
    theirs = wan_names.diffusers_config(_arguments(golden, net)).items()
    meta["cfg"].compare(meta["cfg"].use() | {key: value for key, value in theirs if not key.startswith("_")})

    tensors = golden.tensors(f"{net}.weights.safetensors").use()
    file = str(tmp_path / "original.safetensors")
    save_file({str(wan_names.from_diffusers_name(name)): tensor for name, tensor in tensors.items()}, file)
    load_dit(built, file)
    other = _load(golden, net)
    assert all(torch.equal(p, q) for p, q in zip(built.parameters(), other.parameters(), strict=True))
    save_file({f"model.diffusion_model.{name}": p.detach() for name, p in other.named_parameters()}, file)
    load_dit(_build(golden, net), file)
    save_file({**dict(other.named_parameters()), "blocks.0.ffn.0.scale_weight": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match="scale_weight"):
        load_dit(built, file)


def test_outputs_and_what_lies_between(net: str, golden: Golden) -> None:
    built, file = _load(golden, net), golden.tensors(f"{net}.forward.safetensors")
    _check_inputs(golden, net, file)
    inputs = _inputs(file)
    outputs = outputs_of(built)
    with torch.no_grad():
        out = built(**inputs)
    found = _found(outputs)
    file["original.out"].compare(out, **golden.tolerance("network"))
    for name in file:
        if (key := name.removeprefix("scalar_t.")) == name:
            continue
        if key == "out":
            file[name].compare(out, **golden.tolerance("network_one_form"))
            continue
        actual = found[key][:, : file[name].use().shape[1]] if key == "text_embedding" else found[key]
        file[name].compare(actual, **golden.tolerance("sinusoid" if key == "sinusoid" else "intermediate"))


@torch.no_grad()
def test_other_calls(net: str, golden: Golden) -> None:
    """A time for each latent frame; values prepared once; and texts that are cut, which are other texts."""
    built, file = _load(golden, net), golden.tensors(f"{net}.forward.safetensors")
    inputs, close = _inputs(file), golden.tolerance("network_one_form")
    times = file["timestep_per_frame"].use()
    size = [length // 2 for length in file["latents"].use().shape[-2:]]
    file["timestep_per_token"].compare(times.repeat_interleave(size[0] * size[1], dim=1))
    file["per_token_t.out"].compare(built(**{**inputs, "timesteps_B_T": times}), **close)
    text, images = inputs["crossattn_emb_B_S_E"], {k: v for k, v in inputs.items() if k == "image_B_S_E"}
    prepared = built.prepare(text, latent_shape=tuple(inputs["x_B_C_T_H_W"].shape[2:]), **images)
    again = built(inputs["x_B_C_T_H_W"], inputs["timesteps_B_T"], None, prepared=prepared)
    file["original.out"].compare(again, **golden.tolerance("network"))
    if "unpadded_text.out" in file:
        cut = []
        for i, length in enumerate(file["text_lens"].use().tolist()):
            sample = {key: value[i : i + 1] for key, value in inputs.items()}
            cut.append(built(**{**sample, "crossattn_emb_B_S_E": text[i : i + 1, :length]}))
        file["unpadded_text.out"].compare(torch.cat(cut), **close)
        assert float((torch.cat(cut) - file["original.out"].expected()).abs().max()) > 100 * close["atol"]


@torch.no_grad()
def test_half_precision(net: str, golden: Golden) -> None:
    built, file = _load(golden, net).to(torch.bfloat16), golden.tensors(f"{net}.forward.safetensors")
    if "bf16.out" not in file:
        return
    inputs = {k: v if k == "timesteps_B_T" else v.to(torch.bfloat16) for k, v in _inputs(file).items()}
    expected = file["bf16.out"].expected()  # a norm over the whole output, which compare() does not have
    error = float((built(**inputs).float() - expected).norm() / expected.norm())
    assert error <= golden.json("meta.json")["tolerances"]["network_bf16"]["relative_l2"].use()


def test_rotary_tables_and_norms(net: str, golden: Golden) -> None:
    built, file = _load(golden, net), golden.tensors(f"{net}.forward.safetensors")
    t, h, w = file["latents"].use().shape[2:]
    (cos, sin), _ = built._positions((t, h // 2, w // 2), None)
    for name, table in {"rope_cos": cos, "rope_sin": sin}.items():  # each value twice there
        file[name].compare(table.repeat_interleave(2, dim=1)[None, :, None], **golden.tolerance("rope"))
    block = built.blocks[0]
    assert isinstance(block, WanBlock)

    def plain(x: Tensor) -> Tensor:
        return modulated_norm(x, torch.zeros(1), torch.zeros(1))

    norms: dict[str, Any] = {"norm1": plain, "norm2": block.norm3, "norm3": plain, "norm_out": plain}
    for theirs, attention in {"attn1": block.self_attn, "attn2": block.cross_attn}.items():
        norms |= {f"{theirs}.norm_q": attention.norm_q, f"{theirs}.norm_k": attention.norm_k}
    if built.img_emb is not None:
        norms["attn2.norm_added_k"] = block.cross_attn.norm_k_img
        norms |= {"image_norm1": built.img_emb.proj[0], "image_norm2": built.img_emb.proj[4]}
    for name in file:
        if name.startswith("probe.") and not name.endswith("in"):
            x = file["probe.image_in" if name.endswith("image_norm1") else "probe.in"].use()
            file[name].compare(norms[name.removeprefix("probe.")](x), **golden.tolerance("probe"))


def test_loss_and_gradients(trained: str, golden: Golden) -> None:
    file, meta = golden.tensors(f"{trained}.train.safetensors"), golden.json("meta.json")
    model = Video2WorldModel(
        Predict2p5Video2WorldModelConfig(precision="float32", pipe_config=_config(golden, trained, file["x0"].use()))
    )
    model.net.load_state_dict(_load(golden, trained).state_dict())
    meta["train"][trained]["sigma"].compare(file["sigma"].use())
    sigma_B, x0 = file["sigma"].use(), file["x0"].use()
    file["timestep"].compare(NUM_TIMESTEPS * sigma_B)
    condition = _condition(golden.tensors(f"{trained}.forward.safetensors"), x0)
    output, loss = model.loss(x0, file["noise"].use(), noise_level(sigma_B.double())[:, None].float(), condition)
    loss.backward()
    file["xt"].compare(output["xt"], **golden.tolerance("xt"))
    file["target"].compare(output["target"])
    file["prediction"].compare(output["velocity"], **golden.tolerance("network_one_form"))
    per_sample = output["edm_loss_per_frame"].mean(dim=1)
    file["per_sample_mse"].compare(per_sample, **golden.tolerance("network_one_form"))
    file["loss"].compare(loss, **golden.tolerance("loss"))

    norms = golden.json(f"{trained}.train.grad_norms.json")
    grads = {str(wan_names.to_diffusers_name(n)): p.grad for n, p in model.net.named_parameters()}
    assert {f"grad.{name}" for name in grads} >= {name for name in file if name.startswith("grad.")}
    assert set(grads) == {name for name in norms if name != "__total__"}
    for name, grad in grads.items():
        assert grad is not None
        norms[name].compare(grad.norm(), **golden.tolerance("grad_norm"))
        if f"grad.{name}" in file:
            file[f"grad.{name}"].compare(grad, **golden.tolerance("grad"))
    norms["__total__"].compare(model.clip_grad_norm_(1e9), **golden.tolerance("grad_norm"))


# ---- times and samplers ----------------------------------------------------------------------------------------------


def test_sinusoids(golden: Golden) -> None:
    meta, file = golden.json("meta.json"), golden.tensors("time.safetensors")
    meta["time"]["t"].compare(file["t"].use(), rtol=1e-7)
    for width in meta["time"]["widths"].use():
        found = Timesteps(width)(file["t"].use().double()).float()
        file[f"sinusoid_{width}_float64"].compare(found, atol=1e-6)  # the README: of the form that one chose
        file[f"sinusoid_{width}"].compare(found, **golden.tolerance("sinusoid"))


def test_rotary_tables_at_real_size(golden: Golden) -> None:
    meta, file = golden.json("meta.json")["rope_real"], golden.tensors("rope_real.safetensors")
    last = max(int(name.rpartition("_")[2]) for name in file if name[-1].isdigit())
    positions = RotaryPositions(
        meta["head_dim"].use(), max_size=(last + 1,) * 3, ratios=(1.0, 1.0, 1.0), precision="float64"
    )
    meta["grid"].compare([len(file[f"cos_{axis}"].use()) for axis in "thw"])
    for axis, angles in zip("thw", positions.axis_angles((last + 1,) * 3)):
        for name, table in {"cos": angles.cos().float(), "sin": angles.sin().float()}.items():
            table = table.repeat_interleave(2, dim=1)  # each value twice there
            rows = len(file[f"{name}_{axis}"].use())
            file[f"{name}_{axis}"].compare(table[:rows], **golden.tolerance("rope"))
            file[f"{name}_{axis}_{last}"].compare(table[last], **golden.tolerance("rope"))


def test_schedules(golden: Golden) -> None:
    file, close = golden.json("schedules.json"), golden.tolerance("sigmas")
    for row in file["lists"]:
        kind = row["kind"].use()
        found = flow_sigmas(row["steps"].use(), KINDS[kind][0], shift=row["shift"].use())
        row["sigmas"].compare(found.sigmas, **close)
        row["timesteps"].compare(found.timesteps, **close if kind == "euler" else {})
    drawn = file["shifted_sigmoid"]
    uniform = torch.special.ndtr(torch.tensor(drawn["normal"].use(), dtype=torch.float64))
    timesteps = draw_timesteps(uniform, distribution="logitnormal", shift=drawn["shift"].use())
    drawn["sigma"].compare(timesteps / NUM_TIMESTEPS, **close)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_sampling(sampled: str, kind: str, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    file, meta = golden.tensors(f"{sampled}.sampler.safetensors"), golden.json("meta.json")["sampler"][sampled]
    noise, (schedule, solver) = file["noise"].use(), KINDS[kind]
    meta["latent"].compare([len(noise), *noise.shape[2:]])
    for name, text in {"text_lens": "text", "neg_lens": "negative_text"}.items():
        meta[name].compare(_lengths(file[text].use()))
    config = _config(golden, sampled, noise, shift=float(meta["shift"].use()), schedule=schedule)
    assert config.flow is not None
    num_steps, close = meta["steps"].use(), golden.tolerance("sigmas")
    levels = config.flow.levels(num_steps)
    file[f"{kind}.sigmas"].compare(levels.sigmas, **close)
    file[f"{kind}.timesteps"].compare(levels.timesteps, **close if kind == "euler" else {})

    velocities, states = noted_velocities(monkeypatch), []
    final = WorldModel(config, _load(golden, sampled), PooledPixels()).sample(
        _condition(file, noise),
        _condition(file, noise, "negative_text"),
        noise,
        on_step=lambda i, step: states.append(step.x_next_B_C_T_H_W),
        # Their scale multiplies the difference that is added to the unconditional half, ours to the conditional one.
        options=SamplingOptions(guidance=meta["guidance"].use() - 1, num_steps=num_steps, solver=solver),
    )
    assert len(states) == num_steps
    for i, (velocity, state) in enumerate(zip(velocities, [*states[:-1], final], strict=True)):
        file[f"{kind}.step{i}.velocity"].compare(velocity.float(), **golden.tolerance("sampler"))
        file[f"{kind}.step{i}.sample"].compare(state.float(), **golden.tolerance("sampler"))


# ---- image to video --------------------------------------------------------------------------------------------------


def test_condition(golden: Golden, tmp_path: Path) -> None:
    meta, file = golden.json("meta.json"), golden.tensors("condition.safetensors")
    save_file(golden.tensors("condition.vae.safetensors").use(), tmp_path / "vae.safetensors")
    given = meta["condition"]
    assert given["vae_names"].use() == "original"
    tokenizer = WanTokenizer(
        str(tmp_path / "vae.safetensors"),
        config={"dim": given["base_dim"].use()},
        latents_mean=meta["latents_mean"].use(),
        latents_std=meta["latents_std"].use(),
    )
    frames, first = given["frames"].use(), file["image_u8"].use()
    video = torch.zeros(len(first), 3, frames, *first.shape[2:])
    video[:, :, 0] = first / 127.5 - 1
    given["batch"].compare(len(first))
    given["height"].compare(first.shape[2])
    given["width"].compare(first.shape[3])
    cases = {"first": [0]}
    if given["last_image"].use():
        video[:, :, -1] = file["last_image_u8"].use() / 127.5 - 1
        cases["first_last"] = [0, frames - 1]
    for case, numbers in cases.items():
        is_given = torch.zeros(frames, dtype=torch.bool)
        is_given[numbers] = True
        channels = image_channels(tokenizer.encode, video, is_given)
        file[f"{case}.mask"].compare(channels[:, :4])
        file[f"{case}.latent"].compare(channels[:, 4:], **golden.tolerance("condition_latent"))


# ---- adapters and names at real size ---------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("layout", ["peft", "diffusers_file", "original", "diffsynth", "musubi"])
def test_adapters(adapted: str, layout: str, golden: Golden, tmp_path: Path) -> None:
    file, keys = golden.tensors(f"{adapted}.lora.safetensors"), golden.json(f"{adapted}.lora.keys.json")
    rank, alpha, targets = keys["r"].use(), keys["alpha"].use(), keys["target_modules"].use()
    tensors = {}
    for row in keys["names"]:
        factor = file[row["peft"].use()].use()
        row["shape"].compare(list(factor.shape))
        tensors[row[layout].use()] = factor
    recorded = layout in ("peft", "musubi")  # the others have no place for alpha
    if layout == "musubi":
        tensors |= {f"{name.partition('.')[0]}.alpha": torch.tensor(float(alpha)) for name in list(tensors)}
    path = tmp_path / "adapter"
    if layout == "peft":
        path.mkdir()
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets}
        (path / "adapter_config.json").write_text(json.dumps(settings))
        save_file({f"base_model.model.{n}": t for n, t in tensors.items()}, path / "adapter_model.safetensors")
    else:
        path = path.with_suffix(".safetensors")
        save_file(tensors, path)
    built = _load(golden, adapted)
    layers = apply_lora(built, str(path), alpha=None if recorded else alpha)
    out = built(**_inputs(golden.tensors(f"{adapted}.forward.safetensors")))
    file["out"].compare(out, **golden.tolerance("network_one_form"))

    net = _build(golden, adapted)
    lora.inject(net, rank, alpha, ",".join(layers))
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    expected = {_our_factor(name) for name in keys["trainable"].expected()}  # in their names
    assert trained == expected


def _our_factor(name: str) -> str:
    layer, part, factor = name.partition(".lora_")
    return str(wan_names.from_diffusers_name(f"{layer}.weight")).removesuffix("weight") + part[1:] + factor


def test_manifest(manifest: str, golden: Golden) -> None:
    file = golden.json(manifest)
    with torch.device("meta"):
        net = WanDiT(**wan_names.net_kwargs(file["cfg"].use()))
    found = {n: [wan_names.to_diffusers_name(n), list(p.shape)] for n, p in net.named_parameters()}
    assert set(found) == set(file["keys"])
    for name in file["keys"]:
        file["keys"][name].compare(found[name])
    file["params"].compare(sum(p.numel() for p in net.parameters()))


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _arguments(golden: Golden, net: str) -> dict[str, Any]:
    return wan_names.net_kwargs(golden.json("meta.json")["nets"][net]["cfg"].use())


def _build(golden: Golden, net: str) -> WanDiT:
    return WanDiT(**_arguments(golden, net))


def _load(golden: Golden, net: str) -> WanDiT:
    built = _build(golden, net)
    golden.tensors(f"{net}.weights.safetensors").use()
    load_dit(built, str(golden.folder / f"{net}.weights.safetensors"))
    return built


def _config(golden: Golden, net: str, latents: Tensor, **flow: Any) -> Video2WorldPipelineConfig:
    return Video2WorldPipelineConfig(
        net=L(WanDiT)(**_arguments(golden, net)),
        tokenizer=L(PooledPixels)(),
        state_t=latents.shape[2],
        min_num_conditional_frames=0,
        max_num_conditional_frames=0,
        flow=FlowConfig(timestep_scale=1.0, replace_given_frames=False, **flow),
    )


def _condition(file: Value, latents: Tensor, text: str = "text") -> Condition:
    images = {"extra_B_C_T_H_W": "condition", "image_B_S_E": "image_states"}
    condition = Condition(file[text].use(), **{k: file[name].use() for k, name in images.items() if name in file})
    return condition.with_conditioning_frames(torch.zeros_like(latents), torch.zeros(len(latents)))


def _inputs(file: Value) -> dict[str, Tensor]:
    """The arguments of a network's call."""
    x, images = file["latents"].use(), {}
    if "condition" in file:
        x = torch.cat([x, file["condition"].use()], dim=1)
        images = {"image_B_S_E": file["image_states"].use()}
    return {
        "x_B_C_T_H_W": x,
        "timesteps_B_T": file["timestep"].use(),
        "crossattn_emb_B_S_E": file["text"].use(),
        **images,
    }


def _check_inputs(golden: Golden, net: str, file: Value) -> None:
    meta, latents = golden.json("meta.json")["nets"][net], file["latents"].use()
    meta["latent"].compare([len(latents), *latents.shape[2:]])
    meta["timestep"].compare(file["timestep"].use())
    meta["text_lens"].compare(file["text_lens"].use())
    meta["text_lens"].compare(_lengths(file["text"].use()))
    if "image_tokens" in meta:
        meta["image_tokens"].compare(file["image_states"].use().shape[1])


def _lengths(text_B_S_E: Tensor) -> list[int]:
    """Rows of each text before those of zeros."""
    return text_B_S_E.any(dim=2).sum(dim=1).tolist()


def _found(outputs: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs of modules, under the names of the goldens: tokens in a row, one time per sample."""
    names = {
        "patch_embedding": "patch_embedding",
        "timesteps": "sinusoid",
        "time_embedding": "time_embedding",
        "time_projection": "time_projection",
        "text_embedding": "text_embedding",
        "img_emb": "image_embedding",
        "blocks.0.self_attn": "block0.attn1",
        "blocks.0.cross_attn": "block0.attn2",
        "blocks.0.ffn": "block0.ffn",
        "head": "proj_out",
        **{name: name.replace("blocks.", "block") for name in outputs if re.fullmatch(r"blocks\.\d+", name)},
    }
    found = {}
    for name in names.keys() & outputs.keys():
        output = outputs[name]
        if name in ("timesteps", "time_embedding", "time_projection"):
            output = output[:, 0]
        found[names[name]] = (output.flatten(1, 3) if output.ndim == 5 else output).float()
    return found
