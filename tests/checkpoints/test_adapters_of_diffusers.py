# SPDX-License-Identifier: Apache-2.0
"""LoRA files as diffusers itself saves them: the same output here, whatever their settings, or an error that names what
is not plain LoRA. And back: what we write from them, as the documentation loads it there."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.dit import diffusers_twin
from cosmos_predict2.checkpoints.adapters import apply_lora
from cosmos_predict2.checkpoints.export import Export
from cosmos_predict2.checkpoints.export_adapters import export_adapter
from imaginaire.errors import CheckpointError
from tests.checkpoints.nets import SMALL, call, inputs_of, random_net

pytestmark = pytest.mark.slow  # importing diffusers takes seconds

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
ADDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank stabilised": dict(use_rslora=True),
    "ranks by layer": dict(rank_pattern={"attn1.to_q": 2, "^transformer_blocks.1.ff.net.2": 6}),
    "alphas by layer": dict(alpha_pattern={r".*attn2.*to_v": 3, "to_q": 1}),
    "all of them": dict(
        use_rslora=True, rank_pattern={"to_k": 2}, alpha_pattern={r"transformer_blocks\.0\..*": 16}
    ),
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "use_dora": dict(use_dora=True),
    "lora_bias": dict(lora_bias=True),
    "modules_to_save": dict(modules_to_save=["proj_out"]),
    "init_lora_weights": dict(init_lora_weights="pissa"),
}


def _peft() -> Any:
    """Imported by a test and not beside them: it takes seconds, of every process that collects."""
    return pytest.importorskip("peft", reason="peft is in the extra dev")


def _adapted(**config: Any) -> Any:
    """diffusers' network with trained adapters over the weights of ``random_net(seed=1)``."""
    theirs: Any = diffusers_twin(random_net(seed=1), SMALL)
    theirs.add_adapter(_peft().LoraConfig(**{"target_modules": TARGETS, "r": 4, "lora_alpha": 8, **config}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name or "modules_to_save" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return theirs


@torch.no_grad()
def _output(theirs: nn.Module) -> Tensor:
    given = inputs_of(random_net())
    masks = dict(padding_mask=given.padding_mask, condition_mask=given.condition_mask)
    output: Tensor = theirs(given.x, given.timesteps, given.text, **masks, return_dict=False)[0]
    return output


def _save(theirs: Any, folder: Path) -> list[str]:
    """As a training script of diffusers saves it with its pipeline, and as the transformer saves it alone."""
    from diffusers.loaders.lora_pipeline import CosmosLoraLoaderMixin

    settings = theirs.peft_config["default"].to_dict()
    CosmosLoraLoaderMixin.save_lora_weights(
        folder / "pipeline",
        transformer_lora_layers=_peft().get_peft_model_state_dict(theirs),
        transformer_lora_adapter_metadata={k: list(v) if isinstance(v, set) else v for k, v in settings.items()},
    )
    theirs.save_lora_adapter(folder / "transformer")
    return [str(folder / "pipeline"), str(folder / "transformer")]


@pytest.mark.parametrize("config", ADDED.values(), ids=ADDED)
def test_what_diffusers_saves_has_the_same_output_here_and_again_there(config: dict[str, Any], tmp_path: Path) -> None:
    from diffusers.loaders.lora_pipeline import CosmosLoraLoaderMixin

    theirs = _adapted(**config)
    expected = _output(theirs)
    assert (expected - call(random_net(seed=1))).abs().max() > 1
    for path in _save(theirs, tmp_path):
        ours = random_net(seed=1)
        assert len(apply_lora(ours, path)) == 20
        torch.testing.assert_close(call(ours), expected, rtol=1e-4, atol=1e-4)
    for form in ("diffusers-lora", "peft"):
        export_adapter(Export(path, str(tmp_path / form), form))
    folder, transformer = str(tmp_path / "diffusers-lora"), diffusers_twin(random_net(seed=1), SMALL)
    documented = "transformer.load_lora_adapter(folder, use_safetensors=True)"
    assert documented in Path("documentations/weights.md").read_text()
    eval(documented, {"transformer": transformer, "folder": folder})
    torch.testing.assert_close(_output(transformer), expected, rtol=1e-4, atol=1e-4)
    of_pipeline = diffusers_twin(random_net(seed=1), SMALL)
    state, metadata = CosmosLoraLoaderMixin.lora_state_dict(folder, return_lora_metadata=True)
    CosmosLoraLoaderMixin.load_lora_into_transformer(state, of_pipeline, metadata=metadata)
    torch.testing.assert_close(_output(of_pipeline), expected, rtol=1e-4, atol=1e-4)
    in_peft = _peft().PeftModel.from_pretrained(random_net(seed=1), str(tmp_path / "peft")).base_model.model
    torch.testing.assert_close(call(in_peft), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("setting", "config"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_plain_lora_is_refused_by_its_name(setting: str, config: dict[str, Any], tmp_path: Path) -> None:
    for path in _save(_adapted(**config), tmp_path):
        with pytest.raises(CheckpointError, match=rf"{setting}=.*only plain LoRA.*merge_and_unload"):
            apply_lora(random_net(seed=1), path)
        file = Path(path, "pytorch_lora_weights.safetensors")
        state = safetensors.torch.load_file(file)
        safetensors.torch.save_file(state, file)  # as older versions write it: without settings
        if setting != "init_lora_weights":  # nothing but the settings tells it
            words = "another kind, DoRA" if setting == "use_dora" else "more than the factors A and B"
            with pytest.raises(CheckpointError, match=words):
                apply_lora(random_net(seed=1), path)
