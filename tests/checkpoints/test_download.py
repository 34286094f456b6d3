# SPDX-License-Identifier: Apache-2.0
"""The download command: its plan, a hub on this machine, and the check of what lies here."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2 import released
from cosmos_predict2.checkpoints import download
from cosmos_predict2.checkpoints.dit_weights import open_dit
from cosmos_predict2.checkpoints.download import DownloadFlags, DownloadPlan, check, make_plan
from imaginaire.command_line import values_of
from imaginaire.errors import ConfigError
from scripts import download_checkpoints
from tests.checkpoints.hub_server import Hub, serve
from tests.checkpoints.nets import SMALL, random_net, released_state, save
from tests.programs import finished, warm_python

VIDEO_2B = "nvidia/Cosmos-Predict2-2B-Video2World"
VIDEO = ("--model_types", "video2world", "--model_sizes", "2B")
ACTION = "nvidia/Cosmos-Predict2-2B-Sample-Action-Conditioned"


def _plan(*words: str) -> DownloadPlan:
    return make_plan(values_of(DownloadFlags, download_checkpoints.parser.parse_args(list(words))))


def _files(plan: DownloadPlan) -> dict[str, list[str]]:
    return {part.folder: part.allowed or ["*"] for part in plan.parts}


# The plan -------------------------------------------------------------------------------------------------------------


def test_video2world_is_its_files_the_text_encoder_and_the_blocklist() -> None:
    plan = _plan("--model_types", "video2world", "--model_sizes", "2B")
    assert _files(plan) == {
        VIDEO_2B: ["tokenizer/tokenizer.pth", "model-720p-16fps.pt"],
        "google-t5/t5-11b": ["*"],
        "nvidia/Cosmos-Guardrail1": ["blocklist/*"],
    }
    assert all(part.revision == released.REPOSITORIES[part.repository].revision for part in plan.parts)
    assert plan.parts[1].ignored == ("tf_model.h5",)


def test_variants_multiply_and_every_model_brings_its_tokenizer() -> None:
    plan = _plan(
        "--model_types", "video2world", "--model_sizes", "14B", "--fps", "10", "16", "--resolution", "480", "720",
        "--natten", "--no_text_encoder", "--no-guardrail",
    )  # fmt: skip
    (part,) = plan.parts
    assert [file.name for file in part.files][1:] == [
        "model-480p-10fps.pt", "model-480p-16fps.pt", "model-720p-10fps.pt", "model-720p-16fps.pt",
        "model-720p-10fps-natten.pt", "model-720p-16fps-natten.pt",
    ]  # fmt: skip
    plan = _plan("--model_types", "sample_action_conditioned", "--no-text-encoder", "--no_guardrail")
    assert _files(plan) == {VIDEO_2B: ["tokenizer/tokenizer.pth"], ACTION: ["model-480p-4fps.pt"]}
    for model_type in ("sample_gr00t_dreams_gr1", "sample_gr00t_dreams_droid", "multiview", "video2world"):
        files = _files(_plan("--model_types", model_type))
        assert any("tokenizer/tokenizer.pth" in names for folder, names in files.items() if "Video2World" in folder)


def test_the_files_of_the_plan_are_where_the_path_functions_say() -> None:
    plan = _plan("--fps", "10", "16", "--resolution", "480", "720", "--natten", "--predict2_5", *released.PREDICT25,
                 "--model_types", *released.MODEL_TYPES)  # fmt: skip
    there = {f"checkpoints/{part.folder}/{file.name}" for part in plan.parts for file in part.files}
    expected = {
        released.get_cosmos_predict2_video2world_checkpoint(
            model_size=size, resolution=resolution, fps=fps, natten=natten
        )
        for size in released.VIDEO_SIZES
        for resolution in released.RESOLUTIONS
        for fps in released.FPS
        for natten in ((False, True) if resolution == "720" else (False,))
    }
    expected |= {released.get_cosmos_predict2_text2image_checkpoint(model_size=s) for s in ("2B", "14B")}
    expected |= {released.get_cosmos_predict2_gr00t_checkpoint(gr00t_variant=v) for v in released.GROOT_VARIANTS}
    expected |= {released.get_cosmos_predict25_checkpoint(name) for name in released.PREDICT25}
    expected |= {released.get_cosmos_predict2_action_conditioned_checkpoint()}
    expected |= {released.get_cosmos_predict2_multiview_checkpoint()}
    expected |= {released.get_tokenizer_checkpoint(model_size=size) for size in released.VIDEO_SIZES}
    assert expected <= there
    folders = {f"checkpoints/{part.folder}" for part in plan.parts}
    assert {released.get_t5_model_dir(), released.get_guardrail_dir(), released.get_reason1_encoder_dir()} <= folders


@pytest.mark.parametrize("path", [
    "checkpoints/nvidia/Cosmos-Predict2-2B-Video2World/model-480p-10fps.pt",
    "checkpoints/nvidia/Cosmos-Predict2-14B-Video2World/model-720p-16fps-natten.pt",
    "checkpoints/nvidia/Cosmos-Predict2-2B-Video2World/tokenizer/tokenizer.pth",
    "checkpoints/nvidia/Cosmos-Predict2-2B-Sample-Action-Conditioned/model-480p-4fps.pt",
    "/data/all weights/nvidia/Cosmos-Predict2-14B-Sample-GR00T-Dreams-DROID/model-480p-16fps.pt",
    "checkpoints/nvidia/Cosmos-Predict2-2B-Text2Image/model.pt",
    "checkpoints/nvidia/Cosmos-Predict2.5-2B/robot/action-cond/38c6c645-7d41-4560-8eeb-6f4ddc0e6574_ema_bf16.pt",
])  # fmt: skip
def test_the_command_in_an_error_message_fetches_that_very_file(path: str) -> None:
    words = shlex.split(released.download_command(path) or "")
    assert words[:3] == ["python", "-m", "scripts.download_checkpoints"]
    args = download_checkpoints.parser.parse_args(words[3:])
    root = released.checkpoint_dir(args.checkpoint_dir)
    plan = make_plan(values_of(DownloadFlags, args))
    assert path in {f"{root}/{part.folder}/{file.name}" for part in plan.parts for file in part.files}


def test_sizes_that_do_not_exist_are_an_error_when_asked_for_and_a_note_else() -> None:
    with pytest.raises(ConfigError, match="multiview exists as 2B, not as 14B"):
        _plan("--model_types", "multiview", "--model_sizes", "14B")
    plan = _plan("--model_sizes", "2B")
    assert not any("GR00T" in part.repository for part in plan.parts)
    assert any(note.startswith("sample_gr00t_dreams_gr1: left out") for note in plan.notes)


def test_a_dry_run_prints_the_plan_and_asks_nobody(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(download_checkpoints, "fetch", lambda *_: pytest.fail("fetched"))
    args = download_checkpoints.parser.parse_args(["--dry-run", "--checkpoint_dir", str(tmp_path / "here")])
    assert download_checkpoints.run(args) == 0
    printed = capsys.readouterr().out
    assert VIDEO_2B in printed and "GB in all" in printed and not (tmp_path / "here").exists()


def test_a_world_model_for_policies_goes_into_the_folders_of_its_guide(capsys: Any) -> None:
    plan = _plan("--embodied", "cosmos_libero_spatial", "openvla_oft")
    assert _files(plan) == {
        "Cosmos-Predict2.5-LIBERO-Spatial": [
            "libero-spatial-2b-19k.pt", "resnet_rm.pth", "tokenizer/tokenizer.pth", "dataset_statistics.json",
            "dataset/*.npy",
        ],
        "RLinf-OpenVLAOFT-LIBERO-130-Base-Lora": ["*"],
    }  # fmt: skip
    assert not any("not yet here" in note for note in plan.notes)
    args = download_checkpoints.parser.parse_args(["--embodied", "cosmos_libero_spatial", "--dry_run"])
    assert download_checkpoints.run(args) == 0 and "plan, into models:" in capsys.readouterr().out
    assert released.download_command("models/Cosmos-Predict2.5-LIBERO-Spatial/resnet_rm.pth") == (
        "python -m scripts.download_checkpoints --embodied cosmos_libero_spatial"
    )
    with pytest.raises(ConfigError, match="--embodied goes into models/"):
        _plan("--embodied", "openvla_oft", "--model_types", "video2world")


# The check ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 2B network as a small one, so that a whole file of it can be written."""
    monkeypatch.setitem(released.NETWORKS, "2B Video2World", SMALL)


def _check(folder: Path, *words: str) -> dict[str, tuple[list[str], str]]:
    plan = _plan("--model_types", "video2world", "--model_sizes", "2B", "--no_guardrail", "--no_text_encoder", *words)
    return {Path(path).name: (faults, note) for path, faults, note in check(plan, str(folder))}


def test_a_whole_file_passes_with_a_note_of_its_dtype(tmp_path: Path, small_release: None) -> None:
    save(tmp_path / VIDEO_2B, released_state(random_net(), dtype=torch.bfloat16), "model-720p-16fps.pt")
    faults, note = _check(tmp_path)["model-720p-16fps.pt"]
    assert not faults and note == f"{len(list(random_net().parameters()))} tensors, bfloat16"


@pytest.mark.parametrize("fault", ["missing file", "missing key", "other shape", "other size", "cut short", "web page"])
def test_each_fault_of_a_file_is_found(fault: str, tmp_path: Path, small_release: None) -> None:
    state = released_state(random_net(**(dict(num_blocks=3) if fault == "other size" else {})))
    if fault == "missing key":
        del state["net.blocks.1.mlp.layer2.weight"]
    if fault == "other shape":
        state["net.t_embedding_norm.weight"] = torch.ones(31)
    path = Path(save(tmp_path / VIDEO_2B, state, "model-720p-16fps.pt"))
    if fault == "cut short":
        path.write_bytes(path.read_bytes()[:-1000])
    if fault == "web page":
        path.write_text("<!DOCTYPE html><html>")
    if fault == "missing file":
        path.unlink()
    expected = {"missing file": "is missing", "missing key": "layer2", "other shape": "31", "other size": "3 blocks"}
    (message,), _ = _check(tmp_path)["model-720p-16fps.pt"]
    assert expected.get(fault, fault if fault == "cut short" else "web page") in message


def test_the_command_lists_faults_and_fails(tmp_path: Path, capsys: Any) -> None:
    words = ["--model_types", "video2world", "--model_sizes", "2B", "--check", "--checkpoint_dir", str(tmp_path)]
    assert download_checkpoints.run(download_checkpoints.parser.parse_args(words)) == 1
    printed = capsys.readouterr()
    assert printed.out.count("FAULT") == 4
    assert "4 faults" in printed.err and f"{tmp_path}/{VIDEO_2B}/model-720p-16fps.pt is missing" in printed.err


def test_a_text_encoder_with_a_lost_shard_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "google-t5" / "t5-11b"
    save(folder, {"shared.weight": torch.ones(2)}, "pytorch_model-00001-of-00002.bin")
    for name in ("config.json", "spiece.model"):
        (folder / name).write_text("{}")
    plan = make_plan(DownloadFlags(model_types=("video2world",), model_sizes=("2B",), no_guardrail=True))
    results = {Path(path).name: faults for path, faults, _ in check(plan, str(tmp_path))}
    assert "00002-of-00002" in results["t5-11b"][0]


# A hub ----------------------------------------------------------------------------------------------------------------


def _hub(tmp_path: Path) -> Hub:
    weights = Path(save(tmp_path, released_state(random_net(seed=1), dtype=torch.bfloat16))).read_bytes()
    return Hub(
        {
            VIDEO_2B: {
                "model-720p-16fps.pt": weights,
                "model-480p-16fps.pt": b"not asked for",
                "transformer/diffusion_pytorch_model.safetensors": b"not asked for",
                "tokenizer/tokenizer.pth": b"tokenizer",
                "tokenizer/spiece.model": b"not asked for",
            },
            "nvidia/Cosmos-Guardrail1": {"blocklist/custom/words": b"blocked\n", "face_blur_filter/x.pth": b"no"},
            "google-t5/t5-11b": {"config.json": b"{}", "spiece.model": b"s", "tf_model.h5": b"no"},
        }
    )


def _command(
    hub: Hub, folder: Path, *words: str, asked: Sequence[str] = VIDEO, **environment: str
) -> subprocess.CompletedProcess[str]:
    # The client reads the endpoint when it is imported, so each call is a process of its own.
    code = "import runpy; runpy.run_module('scripts.download_checkpoints', run_name='__main__')"
    if environment.pop("FULL_DISK", ""):
        code = "from imaginaire import storage; storage.free_bytes = lambda path: 10**6; " + code
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", **environment}
    return finished(warm_python(), "-c", code, *asked, "--checkpoint_dir", folder / "here", *words, **settings)


def _fetched(folder: Path) -> set[str]:
    paths = {path.relative_to(folder / "here").as_posix() for path in (folder / "here").rglob("*") if path.is_file()}
    return {path for path in paths if ".cache" not in path}


@pytest.mark.slow
def test_files_come_from_a_hub_at_their_revision_and_once(tmp_path: Path) -> None:
    with serve(_hub(tmp_path)) as hub:
        made = _command(hub, tmp_path)
        assert made.returncode == 0, made.stdout + made.stderr
        revision = released.REPOSITORIES[VIDEO_2B].revision
        assert _fetched(tmp_path) == {
            f"{VIDEO_2B}/model-720p-16fps.pt", f"{VIDEO_2B}/tokenizer/tokenizer.pth",
            "nvidia/Cosmos-Guardrail1/blocklist/custom/words",
            "google-t5/t5-11b/config.json", "google-t5/t5-11b/spiece.model",
        }  # fmt: skip
        sent = [name for name in hub.asked if name.startswith(VIDEO_2B)]
        assert all(f"@{revision}/" in name or f"@{hub.commit(VIDEO_2B)}/" in name for name in sent)
        loaded = open_dit(str(tmp_path / "here" / VIDEO_2B / "model-720p-16fps.pt"))
        assert len(loaded) == len(list(random_net().parameters()))
        hub.asked.clear()
        again = _command(hub, tmp_path)
        assert again.returncode == 0 and not hub.asked, again.stderr


@pytest.mark.slow
def test_a_world_model_for_policies_comes_from_a_hub_and_is_checked(tmp_path: Path) -> None:
    files = {
        "libero-spatial-2b-19k.pt": b"<!DOCTYPE html>",
        "resnet_rm.pth": b"",
        "tokenizer/tokenizer.pth": b"",
        "dataset_statistics.json": b"{}",
        "dataset/seed_0_traj_0.npy": b"a",
        "dataset/seed_0_traj_1.npy": b"b",
        "README.md": b"not asked for",
    }
    asked = ("--embodied", "cosmos_libero_spatial", "openvla_oft")
    policy = {"config.json": b"{}", "model-00001.safetensors": b"p"}
    with serve(Hub({"tayalmanan/cosmos-robotics": files, released.EMBODIED["openvla_oft"][0]: policy})) as hub:
        made = _command(hub, tmp_path, asked=asked)
    assert made.returncode == 0, made.stdout + made.stderr
    assert _fetched(tmp_path) == {
        *(f"Cosmos-Predict2.5-LIBERO-Spatial/{name}" for name in files if name != "README.md"),
        *(f"RLinf-OpenVLAOFT-LIBERO-130-Base-Lora/{name}" for name in policy),
    }
    found = {Path(path).name: faults for path, faults, _ in check(_plan(*asked), str(tmp_path / "here"))}
    assert "web page" in found["libero-spatial-2b-19k.pt"][0]
    assert not found["*.npy"] and not found["dataset_statistics.json"] and found["resnet_rm.pth"]


@pytest.mark.slow
def test_a_gated_an_absent_and_an_incomplete_repository_are_told_apart_and_fail(tmp_path: Path) -> None:
    hub = _hub(tmp_path)
    hub.gated.add("meta-llama/Llama-Guard-3-8B")
    hub.repositories["meta-llama/Llama-Guard-3-8B"] = {"config.json": b"{}"}
    del hub.repositories["google-t5/t5-11b"]
    del hub.repositories[VIDEO_2B]["model-720p-16fps.pt"]
    with serve(hub):
        made = _command(hub, tmp_path, "--all_guardrails")
    assert made.returncode == 1
    assert "accept the Llama 3.1 Community License on https://huggingface.co/meta-llama/Llama-Guard-3-8B" in made.stderr
    assert "google-t5/t5-11b" in made.stderr and "not on the hub" in made.stderr
    assert "has no file that matches 'model-720p-16fps.pt'" in made.stderr
    assert (tmp_path / "here" / "nvidia/Cosmos-Guardrail1/face_blur_filter/x.pth").is_file()  # the rest is fetched


def test_without_the_client_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[weights\]'"):
        download.fetch(make_plan(DownloadFlags()), str(tmp_path))
