# SPDX-License-Identifier: Apache-2.0
"""Weights of a network from every form that they come in, and errors that say what does not fit."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.checkpoints.diffusers_names import to_diffusers_name
from cosmos_predict2.checkpoints.dit_loading import check_dit, load_dit
from cosmos_predict2.checkpoints.dit_weights import ACTION_EMBEDDERS, action_network, describe, open_dit, problem_with
from cosmos_predict2.checkpoints.download import manifest_of
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.released import describe_missing
from imaginaire.errors import CheckpointError
from imaginaire.optim import lora
from tests.checkpoints.hub_server import Hub, serve
from tests.checkpoints.nets import (
    ALPHA,
    RANK,
    SMALL,
    adapted,
    assert_same_parameters,
    call,
    filled,
    parameters_of,
    random_net,
    released_state,
    save,
    save_run,
    write_adapter,
)
from tests.programs import finished, warm_python

EMA = random_net(seed=9)


def _released(folder: Path, net: Any) -> str:
    state = released_state(net)
    state["net.t_embedding_norm._extra_state"] = io.BytesIO(b"x")
    return save(folder, state)


def _bare(folder: Path, net: Any) -> str:
    return save(folder, released_state(net, prefix=""), "bare.pt")


def _wrapped(folder: Path, net: Any) -> str:
    def name_in_file(name: str) -> str:
        return "net." + name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module.").replace(
            "blocks.1.", "blocks.1._orig_mod."
        )

    return save(folder, {name_in_file(name): tensor for name, tensor in parameters_of(net).items()})


def _training_file(folder: Path, net: Any) -> str:
    state = {**released_state(net), **released_state(EMA, "net_ema.")}
    return save(folder / "model", state, "iter_000000100.pt")


def _run_folder(folder: Path, net: Any) -> str:
    _training_file(folder / "checkpoints", net)
    (folder / "checkpoints" / "latest_checkpoint.txt").write_text("iter_000000100.pt\n")
    return str(folder)


def _dcp_folder(folder: Path, net: Any) -> str:
    tensors = {name: value for name, value in released_state(net).items() if isinstance(value, Tensor)}
    dcp.save(tensors, checkpoint_id=str(folder / "iter_000000100" / "model"), no_dist=True)
    return str(folder / "iter_000000100" / "model")


def _transformer_folder(folder: Path, net: Any) -> str:
    folder = folder / "transformer"
    folder.mkdir(parents=True)
    state = {to_diffusers_name(name): tensor for name, tensor in parameters_of(net).items()}
    safetensors.torch.save_file(state, folder / "diffusion_pytorch_model.safetensors")
    return str(folder)


def _pipeline_folder(folder: Path, net: Any) -> str:
    _transformer_folder(folder, net)
    (folder / "vae").mkdir()
    safetensors.torch.save_file({"x": torch.ones(1)}, folder / "vae" / "diffusion_pytorch_model.safetensors")
    (folder / "model_index.json").write_text("{}")
    return str(folder)


FORMS: list[Callable[[Path, Any], str]] = [
    _released, _bare, _wrapped, _training_file, _run_folder, _dcp_folder, _transformer_folder, _pipeline_folder,
]  # fmt: skip


@pytest.mark.parametrize("write", FORMS, ids=lambda write: write.__name__.strip("_"))
def test_every_form_loads_exactly(write: Callable[[Path, Any], str], tmp_path: Path) -> None:
    source = random_net(seed=1)
    net = random_net(seed=2)
    report = load_dit(net, write(tmp_path, source))
    assert_same_parameters(net, parameters_of(source))
    assert not (report.missing or report.unexpected or report.wrong_shape)


@pytest.mark.parametrize(
    "prefix", ["model.diffusion_model.", "diffusion_model.", "model.", "module.", "model.net.", "module._orig_mod.net."]
)
def test_what_other_programs_put_before_all_names_is_stripped(prefix: str, tmp_path: Path) -> None:
    source, net = random_net(seed=1), random_net(seed=2)
    state = {f"{prefix}{name}": value for name, value in parameters_of(source).items()}
    beside = {"first_stage_model.conv1.weight": torch.ones(1), "lora_alpha": torch.tensor(4.0)}
    path = save(tmp_path, {**state, **beside})
    report = load_dit(net, path)
    assert_same_parameters(net, parameters_of(source))
    assert not (report.missing or report.unexpected)
    card = read_card(path)
    assert card.family is not None and card.family.width == SMALL["model_channels"] and card.lora_alpha == 4


def test_the_averaged_copy_is_taken_when_asked_for_or_alone(tmp_path: Path) -> None:
    alone = save(tmp_path, released_state(EMA, "net_ema."), "ema.pt")
    for path, which in ((_training_file(tmp_path, random_net(seed=1)), "net_ema"), (alone, "auto")):
        net = random_net(seed=2)
        load_dit(net, path, which)
        assert_same_parameters(net, parameters_of(EMA))
    with pytest.raises(CheckpointError, match=r"model\.pt.*net_ema"):
        load_dit(random_net(), _released(tmp_path, random_net()), "net_ema")


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_every_difference_is_named(fault: str, tmp_path: Path) -> None:
    state = released_state(random_net())
    name = "blocks.1.mlp.layer2.weight"
    if fault == "missing":
        del state[f"net.{name}"]
    elif fault == "unexpected":
        name = "blocks.1.mlp.layer3.weight"
        state[f"net.{name}"] = torch.ones(2)
    else:
        state[f"net.{name}"] = torch.ones(2, 2)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_dit(random_net(), save(tmp_path, state))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_channels=64), "width 64, 2 blocks.*The network is a Video2World, width 32, 2 blocks"),
        (dict(num_blocks=3), "width 32, 3 blocks"),
        (dict(is_image=True), "Text2Image.*first layer"),
        (dict(crossattn_proj_in_channels=24), "Predict2.5.*crossattn_proj_in_channels=24"),
        (dict(num_heads=1), "head dim 32 in the file and 16 in the network"),
        (dict(crossattn_emb_channels=8), "text width 8 in the file and 16"),
        (dict(use_adaln_lora=False), "adaln rank None in the file and 8"),
    ],
)
def test_another_network_is_told_in_one_sentence(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = _released(tmp_path, random_net(**changes))
    for attempt in (lambda: load_dit(random_net(), path), lambda: check_dit(Video2WorldDiT(**SMALL), path)):
        with pytest.raises(CheckpointError, match=message) as failure:
            attempt()
        assert len(str(failure.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["blocks.0.mlp.layer1.lora_A.weight", "blocks.0.mlp.layer1.lora_B.weight"], "LoRA adapter.*--lora"),
        (["something.weight"], "something.weight"),
    ],
)
def test_files_of_other_things_are_named(names: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_dit(random_net(), save(tmp_path, {name: torch.ones(2, 2) for name in names}))


def test_foreign_names_of_a_diffusers_transformer_are_refused(tmp_path: Path) -> None:
    folder = Path(_transformer_folder(tmp_path, random_net()))
    state = safetensors.torch.load_file(folder / "diffusion_pytorch_model.safetensors")
    state["img_context_proj.0.weight"] = torch.ones(1)
    safetensors.torch.save_file(state, folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match="img_context_proj"):
        open_dit(str(folder))


# LoRA in a training checkpoint ----------------------------------------------------------------------------------------


TARGETS = "q_proj,mlp.layer1"


@pytest.mark.parametrize("is_recorded", [True, False])
def test_adapters_in_a_checkpoint_are_merged_with_a_recorded_or_given_alpha(is_recorded: bool, tmp_path: Path) -> None:
    trained, net = adapted(random_net(seed=1), TARGETS), random_net(seed=2)
    path = save_run(tmp_path, trained, **(dict(lora_alpha=ALPHA, lora_rank=RANK) if is_recorded else {}))
    if is_recorded:
        check_dit(Video2WorldDiT(**SMALL), path)
    else:
        with pytest.raises(CheckpointError, match="lora_alpha"):
            load_dit(net, path)
    load_dit(net, path, lora_alpha=None if is_recorded else ALPHA)
    torch.testing.assert_close(call(net), call(trained), rtol=1e-4, atol=1e-5)


def test_a_network_with_adapters_takes_theirs_and_plain_weights(tmp_path: Path) -> None:
    trained = adapted(random_net(seed=1), TARGETS)
    net, fresh = (lora.inject(random_net(seed=2), RANK, ALPHA, TARGETS) for _ in range(2))
    load_dit(net, save_run(tmp_path, trained, lora_alpha=ALPHA))
    torch.testing.assert_close(call(net), call(trained), rtol=0, atol=0)
    plain = random_net(seed=5)
    load_dit(fresh, _bare(tmp_path, plain))
    torch.testing.assert_close(call(fresh), call(plain), rtol=0, atol=0)  # their B starts at zero


# Paths ----------------------------------------------------------------------------------------------------------------


def test_a_released_file_that_is_not_there_names_its_download(tmp_path: Path) -> None:
    path = f"{tmp_path}/nvidia/Cosmos-Predict2-14B-Video2World/model-480p-10fps.pt"
    expected = (
        f"python -m scripts.download_checkpoints --model_types video2world --model_sizes 14B --resolution 480 --fps 10"
        f" --checkpoint_dir {tmp_path}"
    )
    assert expected in describe_missing(path)
    assert expected in (problem_with(path) or "")


_FROM_A_HUB = """
import sys, torch
from cosmos_predict2.checkpoints.adapters import apply_lora
from cosmos_predict2.checkpoints.dit_loading import load_dit
from tests.checkpoints.nets import assert_same_parameters, parameters_of, random_net
expected = parameters_of(random_net(seed=1))
for address in ("org/pipeline", "hf://org/pipeline/transformer", "hf://org/pipeline@some%2Fbranch", "hf://org/files/model.pt"):
    net = random_net(seed=2)
    load_dit(net, address)
    assert_same_parameters(net, expected)
print(len(apply_lora(random_net(), "org/peft:0.5")), len(apply_lora(random_net(), "hf://org/ours:0.5")))
"""


@pytest.mark.slow
def test_addresses_on_a_hub_load_like_folders(tmp_path: Path) -> None:
    net = random_net(seed=1)
    folder, file = Path(_pipeline_folder(tmp_path, net)), Path(_released(tmp_path, net))
    small = lora.inject(random_net(), 2, 4.0, "q_proj")
    write_adapter(tmp_path / "adapter.safetensors", small)
    factors = {f"base_model.model.{n}".replace(".default", ""): t for n, t in lora.adapter_state(small).items()}
    config = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj"]})
    hub = Hub(
        {
            "org/pipeline": {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in folder.rglob("*")
                if path.is_file() and path.parent != folder
            }
            | {"model_index.json": b"{}"},
            "org/files": {"model.pt": file.read_bytes(), "model2.pt": b""},
            "org/peft": {
                "adapter_config.json": config.encode(),
                "adapter_model.safetensors": safetensors.torch.save(factors),
            },
            "org/ours": {"adapter.safetensors": (tmp_path / "adapter.safetensors").read_bytes()},
        }
    )
    with serve(hub):
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        run = finished(warm_python(), "-c", _FROM_A_HUB, **settings)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split() == ["4", "4"]
    assert {"org/pipeline@some/branch", "org/pipeline@main"} <= hub.revisions


# Networks with actions ------------------------------------------------------------------------------------------------

FLAT: dict[str, Any] = dict(action_dim=7, num_action_per_chunk=12)
CHUNK: dict[str, Any] = dict(action_dim=7, temporal_compression_ratio=4)
PROJECTION: dict[str, Any] = dict(crossattn_proj_in_channels=24)
NETS: dict[str, tuple[type[ActionDiT], dict[str, Any]]] = {
    "flat-P2": (FlatActionDiT, FLAT),
    "flat-P2.5": (FlatActionDiT, {**FLAT, **PROJECTION}),
    "chunk-P2.5": (ChunkActionDiT, {**CHUNK, **PROJECTION}),
    "chunk, patches of one": (ChunkActionDiT, {**CHUNK, "patch_spatial": 1}),
    "chunk, toy": (ChunkActionDiT, {**CHUNK, "action_on_tokens": True, "hidden_dim_in_action_embedder": 24}),
}


def action_net(cls: type[ActionDiT] = FlatActionDiT, seed: int = 0, **changes: Any) -> ActionDiT:
    return filled(cls(**{**SMALL, **(FLAT if cls is FlatActionDiT else CHUNK), **changes}), seed)


@pytest.mark.parametrize("kind", NETS)
def test_the_network_is_chosen_from_the_file(kind: str, tmp_path: Path) -> None:
    cls, options = NETS[kind]
    source = action_net(cls, seed=1, **options)
    path = save(tmp_path, released_state(source))
    network, arguments = action_network(describe(open_dit(path)))
    net = network(**{**SMALL, **arguments})  # RoPE ratios of a size that was not released are no part of a file
    assert type(net) is cls
    report = load_dit(net, path)
    assert not (report.missing or report.unexpected or report.wrong_shape)
    assert_same_parameters(net, parameters_of(source))


@pytest.mark.parametrize(
    ("network", "cls", "fp32"),
    [("2B action-conditioned", FlatActionDiT, False), ("2B Predict2.5 action-conditioned", ChunkActionDiT, True)],
)
def test_released_files_say_all(network: str, cls: type[ActionDiT], fp32: bool) -> None:
    tensors = manifest_of(network)
    found, arguments = action_network(describe(tensors))
    with torch.device("meta"):
        net = found(**arguments)
    assert type(net) is cls and net.use_wan_fp32_strategy is fp32
    assert net.pos_embedder.thetas[1] > net.pos_embedder.thetas[0]  # ratios 1, 3, 3
    built = {name: tuple(p.shape) for name, p in net.named_parameters()}
    assert built == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_other_sizes_of_actions_and_of_chunks_are_asked_for() -> None:
    gr1 = describe(action_net(ChunkActionDiT, action_dim=29).state_dict())
    with pytest.raises(CheckpointError, match=r"reads 116 numbers.*84 in one vector.*4 actions of 29 numbers \(GR1\)"):
        action_network(gr1)
    assert action_network(gr1, 29)[0] is ChunkActionDiT
    eight = describe(action_net(action_dim=7, num_action_per_chunk=8).state_dict())
    assert action_network(eight, num_actions=8)[1]["num_action_per_chunk"] == 8
    with pytest.raises(CheckpointError, match="without actions"):
        action_network(describe(random_net().state_dict()), source="base.pt")


# Loading --------------------------------------------------------------------------------------------------------------


def test_embedders_begin_anew_only_where_that_is_allowed(tmp_path: Path) -> None:
    base = random_net(seed=1)
    path, net = save(tmp_path, released_state(base)), action_net(seed=2)
    kept = {name: value for name, value in parameters_of(net).items() if name.startswith("action_embedder_")}
    with pytest.raises(CheckpointError, match=r"model\.pt is a Video2World.*without actions.*The network is an action"):
        load_dit(net, path)
    report = load_dit(net, path, allow_missing=[ACTION_EMBEDDERS])
    assert set(report.missing) == set(kept) and len(kept) == 8
    assert_same_parameters(net, {**parameters_of(base), **kept})


ODD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a part of the embedders": (
        {},
        {"drop": ("action_embedder_B_3D",)},
        r"has 4 of the 8 tensors of the network's action embedders.*lacks action_embedder_B_3D\.fc1\.weight",
    ),
    "without the tensor that tells": (
        {},
        {"drop": ("action_embedder_B_D.fc1.weight",)},
        r"has 7 of the 8 tensors.*lacks action_embedder_B_D\.fc1\.weight",
    ),
    "a network of chunks": ({"cls": ChunkActionDiT}, {}, "28 numbers of actions.*4 actions of 7.*net.action_dim"),
    "one of eight actions": ({"num_action_per_chunk": 8}, {}, "56 numbers.*8 actions of 7 numbers"),
    "actions on the tokens": ({"action_on_tokens": True}, {}, "has action tokens True in the file and False"),
    "another hidden width": ({"hidden_dim_in_action_embedder": 8}, {}, "action hidden 8 in the file and 128"),
    "with a projection": (PROJECTION, {}, "Predict2.5.*crossattn_proj_in_channels=24"),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("allow_missing", [(), (ACTION_EMBEDDERS,)])
def test_other_networks_with_actions_are_refused(case: str, allow_missing: tuple[str, ...], tmp_path: Path) -> None:
    options, change, message = ODD[case]
    state = released_state(action_net(**options))
    for name in [name for name in state if any(part in name for part in change.get("drop", ()))]:
        del state[name]
    if case == "without the tensor that tells" and not allow_missing:
        message = "without actions"
    path = save(tmp_path, state)
    with pytest.raises(CheckpointError, match=message):
        load_dit(action_net(), path, allow_missing=allow_missing)
    if not allow_missing:
        with pytest.raises(CheckpointError, match=message):
            check_dit(FlatActionDiT(**SMALL, **FLAT), path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: action_net(action_on_tokens=True), r"has action tokens False in the file and True"),
        (random_net, r"The network is a Video2World.*without actions"),
    ],
)
def test_a_network_that_reads_actions_otherwise_refuses_the_weights(make: Any, message: str, tmp_path: Path) -> None:
    path = save(tmp_path, released_state(action_net()))
    with pytest.raises(CheckpointError, match=message):
        load_dit(make(), path, allow_missing=[ACTION_EMBEDDERS])
