# SPDX-License-Identifier: Apache-2.0
"""Adapters written alone: read back exactly, by PEFT and diffusers themselves too, with the base that they are of."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from cosmos_predict2.checkpoints.adapters import apply_lora, base_fingerprint
from cosmos_predict2.checkpoints.export import Export
from cosmos_predict2.checkpoints.export_adapters import export_adapter, shortest_targets
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.nn.dit import Video2WorldDiT
from imaginaire.errors import CheckpointError
from imaginaire.optim import lora
from scripts.convert import parser, run
from tests.checkpoints.nets import ALPHA, adapted, call, parameters_of, random_net, released_state, save, save_run
from tests.models.parts import LIMITS, NET

TARGETS = "q_proj,k_proj,v_proj,output_proj,mlp.layer1,mlp.layer2"


def _run(folder: Path, net: Any = None, targets: str = TARGETS, base: str = "base.pt") -> str:
    """A run that adapted a network of random weights, or the one that is given."""
    net = net or adapted(random_net(seed=1), targets)
    start = {"dit_path": base}
    return save_run(folder, net, lora_alpha=ALPHA, lora_target_modules=targets, model_manager_config=start)


def _export(source: str, folder: Path, form: str, **options: Any) -> str:
    destination = str(folder / form)
    export_adapter(Export(source, destination, form, **options))
    return destination


def _header(path: str) -> dict[str, str]:
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata()


FILES = {"peft": "adapter_model.safetensors", "diffusers-lora": "pytorch_lora_weights.safetensors"}


@pytest.mark.parametrize("form", FILES)
def test_an_exported_adapter_gives_what_was_trained_and_says_what_it_is(form: str, tmp_path: Path) -> None:
    trained = adapted(random_net(seed=1), TARGETS)
    folder = _export(_run(tmp_path / "run", trained), tmp_path, form)
    net = random_net(seed=1)
    assert len(apply_lora(net, folder)) == 20
    torch.testing.assert_close(call(net), call(trained), rtol=1e-4, atol=1e-5)
    header = _header(f"{folder}/{FILES[form]}")
    assert (header["rank"], header["alpha"], header["base"]) == ("3", "12", "base.pt")
    matrices = {name.removesuffix(".weight"): tensor for name, tensor in parameters_of(random_net(seed=1)).items()}
    assert header["base_fingerprint"] == base_fingerprint([*lora.adapters(trained)], matrices)
    assert len(header["commit"]) in (0, 40)
    if form == "peft":
        config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
        assert config["target_modules"] == TARGETS.split(",") and config["base_model_name_or_path"] == "base.pt"


@pytest.mark.parametrize("form", FILES)
def test_the_average_is_chosen_by_name(form: str, tmp_path: Path) -> None:
    source = _run(tmp_path / "run")
    once, twice = random_net(seed=1), random_net(seed=1)
    apply_lora(once, f"{_export(source, tmp_path, form)}:2")
    apply_lora(twice, _export(source, tmp_path / "ema", form, which="net_ema"))
    for name, tensor in parameters_of(once).items():
        torch.testing.assert_close(parameters_of(twice)[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changed", [False, True])
def test_another_base_is_told_by_both_names(changed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = _run(tmp_path / "run")
    for path in (source, _export(source, tmp_path, "peft"), _export(source, tmp_path, "diffusers-lora")):
        caplog.clear()
        net = random_net(seed=2 if changed else 1).to(torch.bfloat16)
        apply_lora(net, path, base="here.pt")
        said = "was trained on base.pt" in caplog.text and "added to here.pt" in caplog.text
        assert said == changed, path
    caplog.clear()
    apply_lora(random_net(seed=1).half(), source)
    assert "was trained on" not in caplog.text, "float16 does not give the bfloat16 of the base"


def test_targets_are_the_shortest_names_that_select_the_layers_and_no_others(tmp_path: Path) -> None:
    modules = ["blocks", "blocks.0", "blocks.0.a.q", "blocks.0.b.q", "blocks.0.a.out.0", "blocks.0.net.2", "q2"]
    assert shortest_targets(["blocks.0.a.q", "blocks.0.b.q"], modules) == ["q"]
    assert shortest_targets(["blocks.0.a.q"], modules) == ["a.q"]
    assert shortest_targets(["blocks.0.a.out.0", "blocks.0.net.2"], modules) == ["out.0", "net.2"]
    targets = "self_attn.q_proj,mlp.layer1"
    folder = _export(_run(tmp_path / "run", targets=targets), tmp_path, "diffusers-lora")
    header = _header(f"{folder}/{FILES['diffusers-lora']}")
    assert sorted(json.loads(header["target_modules"])) == ["attn1.to_q", "net.0.proj"]
    recorded = json.loads(header["lora_adapter_metadata"])
    assert (recorded["transformer.r"], recorded["transformer.lora_alpha"]) == (3, 12)


def test_the_command_writes_both_layouts(tmp_path: Path) -> None:
    source = _run(tmp_path / "run")
    for form, file in FILES.items():
        words = [source, str(tmp_path / form), "--to", form, "--weights", "ema", "--dtype", "bf16"]
        run(parser.parse_args(words))
        with safetensors.safe_open(tmp_path / form / file, framework="pt") as opened:
            name = next(iter(opened.keys()))
            assert opened.get_tensor(name).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="--merge-lora"):
        run(parser.parse_args([source, str(tmp_path / "x"), "--to", "peft", "--merge-lora"]))


def test_embedders_that_were_trained_beside_adapters_are_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = ChunkActionDiT(action_dim=3, **NET, **LIMITS)
    for name, net in (("deaf", Video2WorldDiT(**NET, **LIMITS)), ("told", told)):
        save(tmp_path, released_state(net), f"{name}.pt")
    adapted(told, TARGETS)
    with pytest.raises(CheckpointError, match=r"learnt its embedders of actions.*--to safetensors --merge-lora"):
        _export(_run(tmp_path / "a", told, base=str(tmp_path / "deaf.pt")), tmp_path, "peft")
    _export(_run(tmp_path / "b", told, base=str(tmp_path / "told.pt")), tmp_path, "peft")
    assert "is not here" not in caplog.text
    _export(_run(tmp_path / "c", told, base="nowhere.pt"), tmp_path, "peft", overwrite=True)
    assert "its base nowhere.pt is not here" in caplog.text
