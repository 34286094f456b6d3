# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters from every form that they come in, added to a network's weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor

from cosmos_predict2.checkpoints import apply_lora, load_dit, merge_lora_state, parse_lora, to_diffusers_name
from cosmos_predict2.checkpoints.adapters import _our_layer, read_adapter
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.optim import lora
from tests.checkpoints.nets import SMALL, assert_same_parameters, call, parameters_of, random_net, write_adapter

TARGETS = "q_proj,output_proj,mlp.layer1"
RANK, ALPHA = 3, 12.0


def _trained() -> Any:
    net = random_net(seed=1)
    lora.init_adapters(lora.inject(net, RANK, ALPHA, TARGETS), seed=4, init=False)
    return net


def _factors(net: Any) -> dict[str, Tensor]:
    return {name.replace(".default.", "."): tensor.clone() for name, tensor in lora.adapter_state(net).items()}


def _our_file(folder: Path, net: Any) -> str:
    return write_adapter(folder / "adapter.safetensors", net)


def _our_file_of_a_model(folder: Path, net: Any) -> str:
    return write_adapter(folder / "model_adapter.safetensors", torch.nn.ModuleDict({"net": net}))


def _peft(folder: Path, net: Any, **config: Any) -> str:
    (folder / "peft").mkdir()
    state = {f"base_model.model.{name}": tensor for name, tensor in _factors(net).items()}
    safetensors.torch.save_file(state, folder / "peft" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS.split(","), **config}
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder / "peft")


def _diffusers_state(net: Any) -> dict[str, Tensor]:
    state = {}
    for name, tensor in _factors(net).items():
        layer, part = name.split(".lora_")
        theirs = to_diffusers_name(f"{layer}.weight")
        assert theirs is not None
        state[f"transformer.{theirs.removesuffix('.weight')}.lora_{part}"] = tensor
    return state


def _diffusers_metadata(folder: Path, net: Any) -> str:
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})}
    (folder / "diffusers").mkdir()
    safetensors.torch.save_file(
        _diffusers_state(net), folder / "diffusers" / "pytorch_lora_weights.safetensors", metadata
    )
    return str(folder / "diffusers")


def _diffusers_alphas(folder: Path, net: Any) -> str:
    state = _diffusers_state(net)
    layers = {name.split(".lora_")[0] for name in state}
    state |= {f"{layer}.alpha": torch.tensor(ALPHA) for layer in layers}
    safetensors.torch.save_file(state, folder / "alphas.safetensors")
    return str(folder / "alphas.safetensors")


def _comfyui(folder: Path, net: Any) -> str:
    state = {f"diffusion_model.{name}": tensor for name, tensor in _factors(net).items()}
    layers = {name.split(".lora_")[0] for name in state}
    state |= {f"{layer}.alpha": torch.tensor(ALPHA) for layer in layers}
    safetensors.torch.save_file(state, folder / "comfyui.safetensors")
    return str(folder / "comfyui.safetensors")


def _kohya_state(net: Any) -> dict[str, Tensor]:
    state = {}
    for name, tensor in _factors(net).items():
        layer, part = name.split(".lora_")
        layer = f"lora_unet_{layer.replace('.', '_')}"
        state[f"{layer}.lora_{'down' if part.startswith('A') else 'up'}.weight"] = tensor
        state[f"{layer}.alpha"] = torch.tensor(ALPHA)
    return state


def _kohya(folder: Path, net: Any) -> str:
    safetensors.torch.save_file(_kohya_state(net), folder / "kohya.safetensors", {"ss_network_dim": str(RANK)})
    return str(folder / "kohya.safetensors")


def _whole_checkpoint(folder: Path, net: Any) -> str:
    (folder / "checkpoints" / "model").mkdir(parents=True)
    path = folder / "checkpoints" / "model" / "iter_000000010.pt"
    state = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    torch.save({**state, **{name.replace("net.", "net_ema."): 2 * tensor for name, tensor in state.items()}}, path)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"config": {"lora_alpha": ALPHA}}}))
    return str(path)


FORMS: list[Callable[[Path, Any], str]] = [
    _our_file, _our_file_of_a_model, _peft, _diffusers_metadata, _diffusers_alphas, _whole_checkpoint,
    _comfyui, _kohya,
]  # fmt: skip


@pytest.mark.parametrize("write", FORMS, ids=lambda write: write.__name__.strip("_"))
def test_every_form_gives_the_output_that_it_was_trained_to(write: Callable[[Path, Any], str], tmp_path: Path) -> None:
    trained = _trained()
    net = random_net(seed=1)
    before = call(net)
    layers = apply_lora(net, write(tmp_path, trained))
    assert len(layers) == SMALL["num_blocks"] * 5  # q and output of two attentions, and the MLP
    torch.testing.assert_close(call(net), call(trained), rtol=1e-4, atol=1e-5)
    assert (call(net) - before).abs().max() > 1e-2


def test_the_weight_scales_the_change_and_zero_changes_nothing(tmp_path: Path) -> None:
    path = _our_file(tmp_path, _trained())
    start = parameters_of(random_net(seed=1))
    full, half, none = (random_net(seed=1) for _ in range(3))
    for net, weight in ((full, 1), (half, 0.5), (none, 0)):
        apply_lora(net, f"{path}:{weight}")
    name = "blocks.0.self_attn.q_proj.weight"
    change = parameters_of(full)[name] - start[name]
    torch.testing.assert_close(parameters_of(half)[name] - start[name], change / 2, rtol=1e-4, atol=1e-6)
    assert_same_parameters(none, start)


def test_several_adapters_are_summed_and_rounded_once(tmp_path: Path) -> None:
    path = _our_file(tmp_path, _trained())
    name = "blocks.0.self_attn.q_proj.weight"
    exact = random_net(seed=1).double()
    apply_lora(exact, [f"{path}:0.3"] * 3)
    net = random_net(seed=1).to(torch.bfloat16)
    start = net.state_dict()[name].double()
    change = exact.state_dict()[name] - random_net(seed=1).double().state_dict()[name]
    apply_lora(net, [f"{path}:0.3"] * 3)
    assert torch.equal(net.state_dict()[name], (start + change).to(torch.bfloat16))


def test_nothing_changes_when_one_adapter_does_not_fit(tmp_path: Path) -> None:
    good = _our_file(tmp_path, _trained())
    wide = lora.inject(random_net(model_channels=64), RANK, ALPHA, TARGETS)
    (tmp_path / "wide").mkdir()
    net = random_net(seed=1)
    start = parameters_of(net)
    with pytest.raises(CheckpointError, match=r"\[64, 64\].*\[32, 32\]"):
        apply_lora(net, [good, _our_file(tmp_path / "wide", wide)])
    assert_same_parameters(net, start)


def test_layers_that_the_network_lacks_are_named(tmp_path: Path) -> None:
    state = {f"blocks.9.mlp.layer1.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    safetensors.torch.save_file(state, tmp_path / "deep.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.9\.mlp\.layer1.*Did you mean blocks\.\d\.mlp\.layer1"):
        apply_lora(random_net(), str(tmp_path / "deep.safetensors"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(use_dora=True), "use_dora=True"),
        (dict(peft_type="LOHA"), "LOHA"),
        (dict(r=5), "rank 3.*say 5"),
        (dict(init_lora_weights="pissa_niter_16"), "init_lora_weights=pissa_niter_16"),
        (dict(a_setting_of_tomorrow=2), "a_setting_of_tomorrow=2"),
        (dict(alpha_pattern={"(": 1}), "not a PEFT configuration"),
        (dict(lora_alpha=None), "not a PEFT configuration"),
    ],
)
def test_peft_settings_that_are_not_plain_lora_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        apply_lora(random_net(), _peft(tmp_path, _trained(), **config))


def _diffusers(folder: Path, net: Any, **config: Any) -> str:
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **config}
    metadata = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})}
    safetensors.torch.save_file(_diffusers_state(net), folder / "lora.safetensors", metadata)
    return str(folder / "lora.safetensors")


@pytest.mark.parametrize(
    ("write", "mlp", "first"),
    [(_peft, "mlp.layer1", "^blocks.0"), (_diffusers, "ff.net.0.proj", "^transformer_blocks.0")],
    ids=["peft", "diffusers"],
)
def test_patterns_and_rank_stabilisation_are_followed(write: Any, mlp: str, first: str, tmp_path: Path) -> None:
    """The first pattern that fits counts: the name of a layer, its end from a word on, or an expression."""
    alphas = {mlp[1:]: 9.0, mlp: 6.0, f"{first}.*": 2.0, "t1.to_q": 1.0, "attn.q": 1.0}
    layers = read_adapter(write(tmp_path, _trained(), alpha_pattern=alphas, use_rslora=True)).layers
    assert layers["blocks.0.mlp.layer1"].scaling == pytest.approx(6 / 3**0.5)
    assert layers["blocks.0.self_attn.q_proj"].scaling == pytest.approx(2 / 3**0.5)
    assert layers["blocks.1.self_attn.q_proj"].scaling == pytest.approx(12 / 3**0.5)


@pytest.mark.parametrize("write", FORMS, ids=lambda write: write.__name__.strip("_"))
def test_an_alpha_that_is_given_never_overrides_a_recorded_one(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path, _trained())
    with pytest.raises(CheckpointError, match=r"alpha 12, but --lora_alpha .* 6"):
        read_adapter(path, alpha=6.0)
    assert read_adapter(path, alpha=ALPHA).layers["blocks.0.mlp.layer1"].scaling == ALPHA / RANK


def test_without_a_recorded_alpha_b_a_is_added_as_it_is_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    safetensors.torch.save_file(_diffusers_state(_trained()), tmp_path / "old.safetensors")
    layer = read_adapter(str(tmp_path / "old.safetensors")).layers["blocks.0.mlp.layer1"]
    assert layer.scaling == 1 and "records no alpha" in caplog.text
    assert read_adapter(str(tmp_path / "old.safetensors"), alpha=6.0).layers["blocks.0.mlp.layer1"].scaling == 2


def test_two_alphas_in_one_file_and_a_damaged_header_are_errors(tmp_path: Path) -> None:
    path = _diffusers_alphas(tmp_path, _trained())
    state = safetensors.torch.load_file(path)
    for recorded, message in ((json.dumps({"r": RANK, "lora_alpha": 6.0}), "two scales"), ("{", "cannot be read")):
        safetensors.torch.save_file(state, path, {"lora_adapter_metadata": recorded})
        with pytest.raises(CheckpointError, match=message):
            read_adapter(path)


def test_adapters_that_go_on_with_another_alpha_are_refused(tmp_path: Path) -> None:
    path = _whole_checkpoint(tmp_path, _trained())
    other = lora.inject(random_net(seed=2), RANK, 2 * ALPHA, TARGETS)
    with pytest.raises(CheckpointError, match=r"alpha 12, the network's have 24.*lora_alpha=12"):
        load_dit(other, path)
    same = lora.inject(random_net(seed=2), RANK, ALPHA, TARGETS)
    load_dit(same, path)
    assert_same_parameters(same, parameters_of(_trained()))


def test_a_flat_name_is_that_of_one_layer_of_any_network() -> None:
    """kohya writes "_" for every "."; of each Linear, in our names and in diffusers', the layer is found again."""
    for net in (random_net(crossattn_proj_in_channels=8), ChunkActionDiT(**SMALL, action_dim=4, action_on_tokens=True)):
        for layer in (name for name, module in net.named_modules() if isinstance(module, torch.nn.Linear)):
            names = [layer]
            if "action" not in layer:
                names.append(str(to_diffusers_name(f"{layer}.weight")).removesuffix(".weight"))
            assert all(_our_layer(f"lora_unet_{name.replace('.', '_')}", "x") == layer for name in names), names


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["lora_unet_blocks_0_mlp_layer1.lokr_w1", "lora_unet_blocks_0_mlp_layer1.lokr_w2"], "LoKr"),
        (["lora_unet_blocks_0_mlp_layer1.hada_w1_a"], "LoHa"),
        (["lora_unet_blocks_0_mlp_layer1.lora_down.weight", "lora_unet_blocks_0_mlp_layer1.dora_scale"], "DoRA"),
        (["lora_te_encoder_block_0_layer_0.alpha"], "LoRA of a text encoder"),
    ],
)
def test_adapters_of_another_kind_are_named(names: list[str], kind: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=f"adapter of another kind, {kind};.*Merge it"):
        read_adapter(str(tmp_path / "adapter.safetensors"))


@pytest.mark.parametrize(
    ("change", "lost", "cause"),
    [
        ({"blocks.0.bias": torch.ones(1)}, "", r"blocks\.0\.bias"),
        ({}, "blocks.1.mlp.layer1.lora_B.weight", r"only lora_A of blocks\.1\.mlp\.layer1"),
        (parameters_of(random_net()), "lora_", "holds no LoRA adapter"),
    ],
)
def test_more_than_factors_or_half_a_pair_is_an_error(
    change: dict[str, Tensor], lost: str, cause: str, tmp_path: Path
) -> None:
    factors = {name: value for name, value in _factors(_trained()).items() if not lost or lost not in name}
    safetensors.torch.save_file({**factors, **change}, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=cause):
        read_adapter(str(tmp_path / "adapter.safetensors"))


# State ----------------------------------------------------------------------------------------------------------------


def test_a_merged_state_is_lazy_and_gives_the_same_output() -> None:
    trained = _trained()
    net = random_net(seed=2)
    merged = merge_lora_state(trained.state_dict(), alpha=ALPHA)
    assert set(merged) == set(net.state_dict())
    net.load_state_dict({name: merged[name] for name in merged})
    torch.testing.assert_close(call(net), call(trained), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lost", "options", "cause"),
    [("", dict(alpha=None), "lora_alpha"), ("blocks.0.mlp.layer1.lora_B.default.weight", dict(alpha=1.0), "lora_B")],
)
def test_a_state_that_cannot_be_merged_is_an_error(lost: str, options: dict[str, Any], cause: str) -> None:
    state = {name: value for name, value in _trained().state_dict().items() if name != lost}
    with pytest.raises(CheckpointError, match=cause):
        merge_lora_state(state, **options)
    plain = random_net().state_dict()
    assert merge_lora_state(plain, alpha=None) is plain


# The argument ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.safetensors", ("a.safetensors", 1.0)),
        ("a.safetensors:0.8", ("a.safetensors", 0.8)),
        ("a:-1e-1", ("a", -0.1)),
        ("s3://bucket/a", ("s3://bucket/a", 1.0)),
        ("s3://bucket/a:2", ("s3://bucket/a", 2.0)),
        ("hf://org/name@v1/file.safetensors:.5", ("hf://org/name@v1/file.safetensors", 0.5)),
        ("org/name", ("org/name", 1.0)),
    ],
)
def test_path_and_weight_are_told_apart(text: str, expected: tuple[str, float]) -> None:
    assert parse_lora(text) == expected


@pytest.mark.parametrize("text", ["a:strong", "a:nan", "a:inf", ":0.5", ""])
def test_weights_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora"):
        parse_lora(text)
