# SPDX-License-Identifier: Apache-2.0
"""Conversion of one network's weights: exact round trips, and folders that diffusers itself loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor

from cosmos_predict2.checkpoints import export as exports
from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.checkpoints.diffusers_names import (
    diffusers_config,
    from_diffusers_name,
    net_kwargs,
    to_diffusers_name,
)
from cosmos_predict2.checkpoints.dit_loading import load_dit
from cosmos_predict2.checkpoints.dit_weights import is_diffusers, open_dit
from cosmos_predict2.checkpoints.download import dit_manifest
from cosmos_predict2.checkpoints.export import Export, export
from cosmos_predict2.released import NETWORKS, TINY_VIDEO2WORLD
from imaginaire.checkpoint.weights import is_extra
from imaginaire.errors import CheckpointError, ConfigError
from tests.checkpoints.nets import (
    ALPHA,
    SMALL,
    adapted,
    assert_same_parameters,
    call,
    parameters_of,
    random_net,
    released_state,
    save,
    save_run,
)
from tests.programs import finished, warm_python

ROPE = (20 / 24, 2.0, 3.0)


def _source(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    return save(folder, released_state(random_net(seed=1, **changes), dtype=dtype), "source.pt")


def _export(source: str, folder: Path, form: str, name: str = "", **options: Any) -> str:
    destination = str(folder / (name or {"diffusers": "transformer"}.get(form, f"exported.{form}")))
    export(Export(source, destination, form, rope_scale=ROPE, **options))
    return destination


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "gives fps=16 by default. Call it with fps=24"),
        (dict(rope_enable_fps_modulation=True), "with fps= that of the clip"),
        (dict(crossattn_proj_in_channels=24), "gives none"),
        (dict(crossattn_proj_in_channels=24, rope_enable_fps_modulation=True), "every clip counts as one of 24 frames"),
        (dict(is_image=True), "One frame has no frame rate"),
    ],
    ids=["ignored", "scales time", "Predict2.5", "Predict2.5 scales time", "Text2Image"],
)
def test_what_to_give_as_frame_rate_is_said_and_stands_beside_the_weights(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    recorded = {"model": {"config": {"pipe_config": {"net": {k: v for k, v in changes.items() if k != "is_image"}}}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded))
    folder = _export(_source(tmp_path, **changes), tmp_path, "diffusers")
    assert said in caplog.text and said in Path(folder, "README.md").read_text()
    again = _export(folder, tmp_path, "diffusers", "again")  # config.json has kept it
    assert said in Path(again, "README.md").read_text()


def test_shards_have_an_index_and_come_back_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "SHARD_BYTES", 40_000)
    source = _source(tmp_path)
    folder = Path(_export(source, tmp_path, "diffusers"))
    shards = sorted(folder.glob("diffusion_pytorch_model-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in parameters_of(random_net()).values())
    assert_same_parameters(_loaded(str(folder)), parameters_of(random_net(seed=1)))
    monkeypatch.setattr(exports, "SHARD_BYTES", 10**9)
    _export(source, tmp_path, "diffusers", overwrite=True)
    assert [path.name for path in folder.glob("diffusion*")] == ["diffusion_pytorch_model.safetensors"]
    assert_same_parameters(_loaded(str(folder)), parameters_of(random_net(seed=1)))


def test_the_average_is_cast_once_and_named_as_released(tmp_path: Path) -> None:
    ema = random_net(seed=3)
    state = {**released_state(random_net(seed=1), dtype=torch.bfloat16), **released_state(ema, "net_ema.")}
    path = _export(save(tmp_path, state), tmp_path, "pt", which="net_ema", dtype=torch.bfloat16)
    written = torch.load(path, weights_only=True)
    assert set(written) == {f"net.{name}" for name in parameters_of(ema)}
    for name, tensor in parameters_of(ema).items():
        assert torch.equal(written[f"net.{name}"], tensor.to(torch.bfloat16))


def test_a_pt_holds_its_tensors_and_nothing_else_of_the_source(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {**parameters_of(random_net(seed=1)), "net_ema.big": torch.zeros(10**6)}, tmp_path / "big.safetensors"
    )
    path = _export(str(tmp_path / "big.safetensors"), tmp_path, "pt", which="net")
    assert Path(path).stat().st_size < 10**6


def test_merged_adapters_are_rounded_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = adapted(random_net(seed=1), "q_proj")
    source = save_run(tmp_path / "run", net, lora_alpha=ALPHA)
    merged = _loaded(_export(source, tmp_path, "pt", merge_lora=True))
    torch.testing.assert_close(call(merged), call(net), rtol=1e-4, atol=1e-5)
    half = open_dit(_export(source, tmp_path, "safetensors", merge_lora=True, dtype=torch.bfloat16))
    for name, tensor in parameters_of(merged).items():
        assert torch.equal(half[name], tensor.to(torch.bfloat16)), name
    with pytest.raises(CheckpointError, match="--to diffusers-lora"):
        _export(source, tmp_path, "diffusers")
    kept = _export(source, tmp_path, "pt", "kept.pt")
    assert "blocks.0.self_attn.q_proj.lora_A.default.weight" in open_dit(kept)
    assert_same_parameters(_loaded(kept), parameters_of(merged))  # its alpha is in the file
    with pytest.raises(CheckpointError, match="records alpha 12, but --lora_alpha"):
        _export(kept, tmp_path, "pt", "other.pt", merge_lora=True, lora_alpha=4.0)
    assert "their alpha" not in caplog.text
    (tmp_path / "run" / "config.yaml").unlink()
    _export(source, tmp_path, "pt", "unknown.pt")
    assert "their alpha, which nothing records, is not" in caplog.text


def test_rope_comes_from_the_run_or_must_be_given(tmp_path: Path) -> None:
    source = _source(tmp_path)
    with pytest.raises(ConfigError, match="--rope_scale"):
        export(Export(source, str(tmp_path / "transformer"), "diffusers"))
    net = dict(_target_="cosmos_predict2.nn.dit.Video2WorldDiT", rope_t_extrapolation_ratio=0.5, max_frames=64)
    recorded = {"model": {"config": {"pipe_config": {"net": net}}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded))
    export(Export(source, str(tmp_path / "transformer"), "diffusers"))
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["rope_scale"] == [0.5, 1.0, 1.0] and config["max_size"] == [64, 240, 240]
    assert config["num_attention_heads"] == 2 and config["attention_head_dim"] == 16


def test_members_without_a_class_there_are_refused_by_name(tmp_path: Path) -> None:
    state = released_state(random_net())
    cases = {
        "action.pt": ({**state, "net.action_embedder_B_D.fc1.weight": torch.ones(8, 4)}, "action-conditioned"),
        "views.pt": ({**state, "net.x_embedder.proj.1.weight": torch.ones(32, 100)}, "multiview"),
        "model-720p-16fps-natten.pt": (state, "NATTEN"),
        "small.pt": (_image_06b(), "0.6B"),
    }
    for name, (content, message) in cases.items():
        with pytest.raises(CheckpointError, match=message):
            _export(save(tmp_path, content, name), tmp_path, "diffusers")


def _image_06b() -> dict[str, Tensor]:
    """Names and shapes that say 0.6B Text2Image, with next to nothing in them."""
    state = {
        "x_embedder.proj.1.weight": torch.zeros(1280, 68),
        "final_layer.linear.weight": torch.zeros(64, 1280),
        "blocks.0.cross_attn.k_proj.weight": torch.zeros(1, 1024),
        "blocks.0.mlp.layer1.weight": torch.zeros(5120, 1),
        "blocks.0.self_attn.q_norm.weight": torch.zeros(64),
    }
    return state | {f"blocks.{i}.mlp.layer2.weight": torch.zeros(1) for i in range(20)}


@pytest.mark.slow
def test_the_command_says_what_it_wrote_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    source, command = _source(tmp_path), (warm_python(), "-m", "scripts.convert")
    made = finished(*command, source, tmp_path / "out.safetensors", "--dtype", "bf16")
    assert made.returncode == 0, made.stderr
    assert open_dit(str(tmp_path / "out.safetensors"))["t_embedding_norm.weight"].dtype == torch.bfloat16
    refused = finished(*command, source, tmp_path / "run", "--to", "dcp", "--dtype", "bf16")
    assert refused.returncode == 2 and "--dtype" in refused.stderr
    unclear = finished(*command, source, tmp_path / "folder")
    assert unclear.returncode == 2 and "--to" in unclear.stderr


def _loaded(path: str) -> Any:
    net = random_net(seed=77)
    load_dit(net, path)
    return net


def test_the_tiny_base_becomes_a_folder_of_diffusers_without_further_flags(tmp_path: Path) -> None:
    export(Export(TINY_VIDEO2WORLD, str(tmp_path / "transformer"), "diffusers"))
    source, back = open_dit(TINY_VIDEO2WORLD), open_dit(str(tmp_path / "transformer"))
    assert set(back) == set(source) and all(torch.equal(back[name], source[name]) for name in source)
    recorded, card = read_card(TINY_VIDEO2WORLD), read_card(str(tmp_path / "transformer"))
    assert card.texts == recorded.texts and card.digests == recorded.digests and card.net == recorded.net


# Names of diffusers ---------------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {},
    dict(is_image=True),
    dict(crossattn_proj_in_channels=24),
    dict(extra_per_block_abs_pos_emb=True),
    dict(patch_temporal=2, concat_padding_mask=False, mlp_ratio=2.0),
    dict(rope_enable_fps_modulation=True),
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_names_and_shapes_are_those_of_diffusers_network(changes: dict[str, Any]) -> None:
    from diffusers import CosmosTransformer3DModel

    net = random_net(**changes)
    arguments = {**SMALL, **{key: value for key, value in changes.items() if key != "is_image"}}
    config = diffusers_config(arguments, has_condition_mask="is_image" not in changes)
    with torch.device("meta"):
        theirs = CosmosTransformer3DModel(**{key: config[key] for key in config if not key.startswith("_")})
    renamed = {to_diffusers_name(name): tuple(tensor.shape) for name, tensor in net.named_parameters()}
    assert renamed == {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}


@pytest.mark.parametrize("network", [name for name in NETWORKS if "multiview" not in name])
def test_the_map_is_a_bijection_on_the_parameters(network: str) -> None:
    manifest = dit_manifest(network)
    there = {name: to_diffusers_name(name) for name in manifest}
    assert {name for name, mapped in there.items() if mapped is None} == {n for n in manifest if is_extra(n)}
    mapped = [name for name in there.values() if name is not None]
    assert len(set(mapped)) == len(mapped)
    assert all(from_diffusers_name(mapped) == name for name, mapped in there.items() if mapped is not None)
    assert is_diffusers(mapped) and not is_diffusers(manifest)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("action_embedder_B_D.fc1.weight", "action-conditioned"),
        ("view_embeddings.weight", "multiview"),
        ("blocks.0.self_attn.q_proj.lora_A.default.weight", "merge"),
        ("t_embedder.1.linear_1.bias", "AdaLN-LoRA"),
        ("blocks.0.self_attn.x_embedder.proj.1.weight", "not a name"),
        ("my_blocks.0.self_attn.q_proj.weight", "not a name"),
    ],
)
def test_names_without_a_place_there_are_refused(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        to_diffusers_name(name)


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_configuration_comes_back_as_it_went(changes: dict[str, Any]) -> None:
    arguments = {**SMALL, **{key: value for key, value in changes.items() if key != "is_image"}}
    back = net_kwargs(diffusers_config(arguments, has_condition_mask="is_image" not in changes))
    assert {key: back[key] for key in arguments} == arguments


def test_the_published_configurations_are_these() -> None:
    config = diffusers_config(NETWORKS["14B Video2World"])
    expected = dict(in_channels=17, num_attention_heads=40, attention_head_dim=128, num_layers=36)
    expected |= dict(max_size=[128, 240, 240], patch_size=[1, 2, 2], text_embed_dim=1024, adaln_lora_dim=256)
    expected |= dict(out_channels=16, mlp_ratio=4.0, concat_padding_mask=True, extra_pos_embed_type=None)
    assert {key: config[key] for key in expected} == expected
    assert config["rope_scale"] == pytest.approx([20 / 24, 2.0, 2.0])
    newer = diffusers_config(NETWORKS["2B Predict2.5"])
    assert newer["use_crossattn_projection"] and newer["crossattn_proj_in_channels"] == 100352
