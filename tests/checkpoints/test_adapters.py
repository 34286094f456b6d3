# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters from every form that they come in, added to a network's weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from cosmos_predict2.checkpoints.adapters import _our_layer, apply_lora, merge_lora_state, parse_lora, read_adapter
from cosmos_predict2.checkpoints.diffusers_names import to_diffusers_name
from cosmos_predict2.checkpoints.dit_loading import load_dit
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.optim import lora
from tests.checkpoints.nets import (
    ALPHA,
    RANK,
    SMALL,
    adapted,
    assert_same_parameters,
    call,
    parameters_of,
    random_net,
    save_run,
    write_adapter,
)

TARGETS = "q_proj,output_proj,mlp.layer1"


def _trained() -> Any:
    return adapted(random_net(seed=1), TARGETS)


def _state(net: Any, rename: Callable[[str], str] = str, has_alphas: bool = False) -> dict[str, Tensor]:
    """The factors with other names of the layers, and the alpha of each layer beside them."""
    state: dict[str, Tensor] = {}
    for layer, adapter in lora.adapters(net).items():
        name = rename(layer)
        state |= {f"{name}.lora_{part}.weight": factor.detach() for part, factor in zip("AB", adapter.factors)}
        state |= {f"{name}.alpha": torch.tensor(ALPHA)} if has_alphas else {}
    return state


def _their_name(layer: str) -> str:
    return f"transformer.{to_diffusers_name(f'{layer}.weight')}".removesuffix(".weight")


def _file(folder: Path, state: dict[str, Tensor], metadata: dict[str, str] | None = None, name: str = "lora") -> str:
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state, folder / f"{name}.safetensors", metadata)
    return str(folder / f"{name}.safetensors")


def _our_file(folder: Path, net: Any) -> str:
    return write_adapter(folder / "adapter.safetensors", net)


def _our_file_of_a_model(folder: Path, net: Any) -> str:
    return write_adapter(folder / "model_adapter.safetensors", torch.nn.ModuleDict({"net": net}))


def _peft(folder: Path, net: Any, **config: Any) -> str:
    _file(folder / "peft", _state(net, "base_model.model.{}".format), name="adapter_model")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS.split(","), **config}
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder / "peft")


def _peft_file(folder: Path, net: Any) -> str:
    return f"{_peft(folder, net)}/adapter_model.safetensors"


def _peft_named(folder: Path, net: Any) -> str:
    """As PEFT saves an adapter that is not called "default": in a folder of its own."""
    return str(Path(_peft(folder, net)).parent)


def _diffusers(folder: Path, net: Any, **config: Any) -> str:
    settings = {f"transformer.{key}": value for key, value in {"r": RANK, "lora_alpha": ALPHA, **config}.items()}
    metadata = {"lora_adapter_metadata": json.dumps(settings)}
    _file(folder / "diffusers", _state(net, _their_name), metadata, "pytorch_lora_weights")
    return str(folder / "diffusers")


def _diffusers_alphas(folder: Path, net: Any) -> str:
    return _file(folder, _state(net, _their_name, has_alphas=True))


def _comfyui(folder: Path, net: Any) -> str:
    return _file(folder, _state(net, "diffusion_model.{}".format, has_alphas=True))


def _kohya(folder: Path, net: Any) -> str:
    state = _state(net, lambda layer: f"lora_unet_{layer.replace('.', '_')}", has_alphas=True)
    names = {name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up") for name in state}
    return _file(folder, {names[name]: tensor for name, tensor in state.items()}, {"ss_network_dim": str(RANK)})


def _whole_checkpoint(folder: Path, net: Any) -> str:
    return save_run(folder, net, lora_alpha=ALPHA)


FORMS: list[Callable[[Path, Any], str]] = [
    _our_file, _our_file_of_a_model, _peft, _peft_file, _peft_named, _diffusers, _diffusers_alphas,
    _whole_checkpoint, _comfyui, _kohya,
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


def test_a_folder_of_several_adapters_names_them(tmp_path: Path) -> None:
    _peft(tmp_path, _trained())
    shutil.copytree(tmp_path / "peft", tmp_path / "second")
    with pytest.raises(CheckpointError, match=r"holds several adapters: peft, second\. Give the path of one"):
        apply_lora(random_net(seed=1), str(tmp_path))


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
    net = random_net(seed=1)
    start = parameters_of(net)
    with pytest.raises(CheckpointError, match=r"\[64, 64\].*\[32, 32\]"):
        apply_lora(net, [good, _file(tmp_path, _state(wide), name="wide")])
    assert_same_parameters(net, start)


def test_layers_that_the_network_lacks_are_named(tmp_path: Path) -> None:
    path = _file(tmp_path, {f"blocks.9.mlp.layer1.lora_{part}.weight": torch.ones(2, 2) for part in "AB"})
    with pytest.raises(CheckpointError, match=r"blocks\.9\.mlp\.layer1.*Did you mean blocks\.\d\.mlp\.layer1"):
        apply_lora(random_net(), path)


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
    path = _file(tmp_path, _state(_trained(), _their_name))
    layer = read_adapter(path).layers["blocks.0.mlp.layer1"]
    assert layer.scaling == 1 and "records no alpha" in caplog.text
    assert read_adapter(path, alpha=6.0).layers["blocks.0.mlp.layer1"].scaling == 2


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
    path = _file(tmp_path, {name: torch.ones(2, 2) for name in names})
    with pytest.raises(CheckpointError, match=f"adapter of another kind, {kind};.*Merge it"):
        read_adapter(path)


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
    factors = {name: value for name, value in _state(_trained()).items() if not lost or lost not in name}
    path = _file(tmp_path, {**factors, **change})
    with pytest.raises(CheckpointError, match=cause):
        read_adapter(path)


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
