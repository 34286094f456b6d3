# SPDX-License-Identifier: Apache-2.0
"""Model cards of exported weights, and their way to the hub."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from cosmos_predict2.checkpoints import publishing
from cosmos_predict2.checkpoints.publishing import CARD, Push, model_card
from cosmos_predict2.released import TINY_POLICY, TINY_VIDEO2WORLD
from imaginaire import command_line
from imaginaire.errors import CheckpointError, ConfigError
from scripts.convert import parser, run


def convert(*words: str) -> int:
    return command_line.main(parser, run, words)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub's client, whose calls are held against the real signatures."""
    import huggingface_hub

    made = create_autospec(huggingface_hub.HfApi, instance=True)
    tokens: list[str] = []
    client = SimpleNamespace(HfApi=lambda token: tokens.append(token) or made)
    monkeypatch.setattr(publishing.hub, "client", lambda: client)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for name in publishing.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    made.tokens = tokens
    return made


def test_a_folder_gets_a_card_with_what_the_weights_record(tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    assert convert(TINY_VIDEO2WORLD, str(folder), "--to", "diffusers") == 0
    text = (folder / CARD).read_text()
    assert text.startswith("---\ntags:\n- world-model") and "\n---\n# transformer\n" in text
    assert "| network | Video2World" in text and "## Frame rate" in text and "bytes-v1" in text
    assert str(tmp_path) not in text and "/" not in text.split("```")[1].split("torch_dtype")[0].partition("(")[2]


@pytest.mark.parametrize("base", ["hf://some/base", "/home/me/secret/base.pt"])
def test_of_a_base_the_card_has_its_hub_name_or_its_last_name_alone(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = publishing.read_card(TINY_VIDEO2WORLD)
    changed = replace(card, base=base, lora_rank=4, lora_alpha=8.0)
    monkeypatch.setattr(publishing, "read_card", lambda *_, **__: changed)
    text = model_card("weights.pt", "source")
    assert "secret" not in text and "LoRA, rank 4, alpha 8.0" in text and "- lora" in text
    assert ("base_model: some/base" in text) == base.startswith("hf://")
    assert ("| base | base.pt |" in text) == (not base.startswith("hf://"))


def test_a_dry_run_logs_all_files_and_the_card_and_sends_nothing(
    tmp_path: Path, api: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN")
    words = (TINY_VIDEO2WORLD, str(tmp_path / "all.safetensors"), "--push", "me/mine", "--dry_run")
    assert convert(*words) == 0
    assert not api.method_calls and not api.tokens
    assert "me/mine: all.safetensors, " in caplog.text and f"me/mine: {CARD}, " in caplog.text
    assert "# all.safetensors" in caplog.text and not (tmp_path / CARD).exists()


def test_a_file_is_sent_with_its_card_and_a_folder_as_it_is(tmp_path: Path, api: Any) -> None:
    assert convert(TINY_VIDEO2WORLD, str(tmp_path / "all.pt"), "--push", "me/mine") == 0
    api.create_repo.assert_called_once_with("me/mine", private=True, exist_ok=True)
    assert [call.kwargs["path_in_repo"] for call in api.upload_file.call_args_list] == ["all.pt", CARD]
    assert api.tokens == ["hf_secret"]
    folder = str(tmp_path / "transformer")
    assert convert(TINY_VIDEO2WORLD, folder, "--to", "diffusers", "--push", "me/other", "--public") == 0
    assert api.create_repo.call_args.kwargs["private"] is False
    api.upload_folder.assert_called_once_with(repo_id="me/other", folder_path=Path(folder))
    policy = str(tmp_path / "policy")
    assert convert("--from", TINY_POLICY, "--to", policy, "--push", "me/policy") == 0
    assert (Path(policy) / CARD).read_text().startswith("---\n")


def test_an_error_of_the_hub_names_the_repository(tmp_path: Path, api: Any) -> None:
    api.create_repo.side_effect = ConnectionError("no route")
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="me/mine: ConnectionError: no route"):
        Push("me/mine").send(str(tmp_path / "x.pt"), TINY_VIDEO2WORLD)


@pytest.mark.parametrize(
    ("words", "setting", "message"),
    [
        (["--push", "mine"], {}, "--push mine: expected a repository as ORGANISATION/NAME"),
        (["--push", "me/mine"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (["--push", "me/mine"], {"TRANSFORMERS_OFFLINE": "true"}, "TRANSFORMERS_OFFLINE is set"),
        (["--push", "me/mine"], {"HF_TOKEN": ""}, "token with write access in HF_TOKEN"),
        (["--push", "me/mine", "--to", "dcp-weights"], {}, "--to dcp-weights"),
        (["--dry_run"], {}, "--dry_run and --public go with --push"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is_written(
    words: list[str], setting: dict[str, str], message: str, tmp_path: Path, api: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert convert(TINY_VIDEO2WORLD, str(tmp_path / "all.pt"), *words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir()) and not api.method_calls
    with pytest.raises(ConfigError, match="elsewhere"):
        Push("me/mine").check("s3://bucket/file.pt")
