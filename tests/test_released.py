# SPDX-License-Identifier: Apache-2.0
"""Paths of the released files, the folder setting, and the manifests."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2 import released
from cosmos_predict2.checkpoints.dit_weights import describe
from cosmos_predict2.checkpoints.download import dit_manifest, file_faults, manifest_of
from cosmos_predict2.released import NETWORKS, checkpoint_dir, environment_settings
from imaginaire.checkpoint.weights import is_extra
from imaginaire.errors import ConfigError
from tests.checkpoints.nets import random_net, released_state
from tests.programs import finished, python

# Where the folder is --------------------------------------------------------------------------------------------------


def test_an_argument_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(released.SETTINGS_VARIABLE, raising=False)
    assert checkpoint_dir() == "checkpoints"
    monkeypatch.setenv(released.SETTINGS_VARIABLE, "--checkpoints '/data/my weights' --text_encoder t5")
    assert checkpoint_dir() == "/data/my weights"
    assert environment_settings() == {"checkpoints": "/data/my weights", "text_encoder": "t5"}
    assert checkpoint_dir("/other") == "/other"
    assert released.get_t5_model_dir() == "/data/my weights/google-t5/t5-11b"
    monkeypatch.setenv(released.SETTINGS_VARIABLE, "--checkpoints=s3://bucket/weights")
    assert released.get_t5_model_dir() == "s3://bucket/weights/google-t5/t5-11b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--checkpoint /data", "Did you mean --checkpoints"),
        ("--checkpoints", "needs a value"),
        ("--checkpoints --text_encoder t5", "needs a value"),
        ("--checkpoints '/data", "cannot be split"),
        ("/data", "has '/data'"),
    ],
)
def test_a_wrong_environment_is_told_when_it_is_asked(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(released.SETTINGS_VARIABLE, text)
    with pytest.raises(ConfigError, match=message):
        checkpoint_dir()


@pytest.mark.slow
def test_importing_reads_no_environment() -> None:
    code = (
        "import os; os.environ['COSMOS_PREDICT2_ARGS'] = '--no-such-flag'\n"
        "import cosmos_predict2.checkpoints, cosmos_predict2.guardrail, sys\n"
        "print([m for m in ('huggingface_hub', 'diffusers', 'transformers') if m in sys.modules])"
    )
    run = finished(python(), "-c", code)
    assert run.returncode == 0 and run.stdout.strip() == "[]", run.stdout + run.stderr


# Paths ----------------------------------------------------------------------------------------------------------------


def test_paths_are_those_of_the_published_layout() -> None:
    video, image = (
        released.get_cosmos_predict2_video2world_checkpoint,
        released.get_cosmos_predict2_text2image_checkpoint,
    )
    assert [
        video(root="r"),
        video(model_size="14B", resolution=480, fps=10, root="r"),
        video(fps=10, natten=True, root="r"),
        image(model_size="0.6B", fast_tokenizer=True, distilled=True, root="r"),
        released.get_cosmos_predict2_action_conditioned_checkpoint(root="r"),
        released.get_cosmos_predict2_gr00t_checkpoint(gr00t_variant="droid", root="r"),
        released.get_cosmos_predict2_multiview_checkpoint(root="r"),
        released.get_tokenizer_checkpoint(model_size="14B", root="r"),
    ] == [
        "r/nvidia/Cosmos-Predict2-2B-Video2World/model-720p-16fps.pt",
        "r/nvidia/Cosmos-Predict2-14B-Video2World/model-480p-10fps.pt",
        "r/nvidia/Cosmos-Predict2-2B-Video2World/model-720p-10fps-natten.pt",
        "r/nvidia/Cosmos-Predict2-0.6B-Text2Image/model_fast_tokenizer_distilled.pt",
        "r/nvidia/Cosmos-Predict2-2B-Sample-Action-Conditioned/model-480p-4fps.pt",
        "r/nvidia/Cosmos-Predict2-14B-Sample-GR00T-Dreams-DROID/model-480p-16fps.pt",
        "r/nvidia/Cosmos-Predict2-2B-Multiview/model-720p-10fps-7views-29frames.pt",
        "r/nvidia/Cosmos-Predict2-14B-Video2World/tokenizer/tokenizer.pth",
    ]


@pytest.mark.parametrize(
    ("function", "options", "cause"),
    [
        ("video2world", dict(resolution="1080"), "resolution"),
        ("video2world", dict(resolution="480", natten=True), "NATTEN"),
        ("text2image", dict(distilled=True), "2B"),
        ("gr00t", dict(gr00t_variant="gr2"), "gr00t_variant"),
    ],
)
def test_variants_that_do_not_exist_are_errors(function: str, options: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        getattr(released, f"get_cosmos_predict2_{function}_checkpoint")(**options)


def test_the_tokenizer_is_taken_from_wherever_it_lies(tmp_path: Path) -> None:
    other = tmp_path / "nvidia/Cosmos-Predict2-2B-Video2World/tokenizer/tokenizer.pth"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"")
    assert released.get_tokenizer_checkpoint(model_size="14B", root=str(tmp_path)) == str(other)


# Manifests ------------------------------------------------------------------------------------------------------------


PARAMETERS = {  # published networks, counted
    "0.6B Text2Image": 597_536_000,
    "2B Text2Image": 1_956_405_248,
    "14B Text2Image": 14_265_265_152,
    "2B Video2World": 1_956_413_440,
    "14B Video2World": 14_265_285_632,
}


@pytest.mark.parametrize("network", PARAMETERS)
def test_the_manifests_hold_the_published_number_of_parameters(network: str) -> None:
    manifest = dit_manifest(network)
    weights = {name: tensor for name, tensor in manifest.items() if not is_extra(name)}
    assert sum(tensor.numel() for tensor in weights.values()) == PARAMETERS[network]
    blocks = NETWORKS[network]["num_blocks"]
    assert (len(manifest), len(weights)) == (14 + 20 * blocks, 7 + 20 * blocks)
    family = describe(manifest)
    assert family is not None and family.network == network


@pytest.mark.parametrize(
    ("network", "count"),
    [
        ("2B Predict2.5", 2_059_174_912),
        ("14B Predict2.5", 14_368_047_104),
        ("2B action-conditioned", 2_024_923_136),
        ("2B Predict2.5 action-conditioned", 2_126_767_104),
        ("2B Predict2.5 whole-chunk", 2_127_684_608),
    ],
)
def test_derived_networks_have_their_published_number_of_parameters(network: str, count: int) -> None:
    assert sum(tensor.numel() for tensor in manifest_of(network).values()) == count


def test_the_manifests_of_multiview_and_tokenizer() -> None:
    tensors = manifest_of("2B multiview")
    assert tuple(tensors["x_embedder.proj.1.weight"].shape) == (2048, 100)
    assert tuple(tensors["view_embeddings.weight"].shape) == (7, 7)
    assert str(describe(tensors)) == "2B multiview, width 2048, 28 blocks"
    assert describe(tensors).network == "2B multiview" and describe(tensors).net_arguments["in_channels"] == 16
    assert str(describe(manifest_of("2B action-conditioned"))).endswith("84 numbers of actions at once")
    assert len(manifest_of("tokenizer")) == 194


def test_a_tokenizer_in_place_of_a_network_is_a_fault_and_the_other_way_round(tmp_path: Path) -> None:
    torch.save({name: torch.zeros(1) for name in manifest_of("tokenizer")}, tmp_path / "tokenizer.pth")
    torch.save(released_state(random_net()), tmp_path / "model.pt")
    (fault,), _ = file_faults(tmp_path / "tokenizer.pth", "2B Video2World")
    assert "x_embedder.proj.1.weight" in fault
    (fault,), _ = file_faults(tmp_path / "model.pt", "tokenizer")
    assert "194 in the model, missing" in fault
    (fault,), _ = file_faults(tmp_path / "model.pt", "14B Video2World")
    assert "width 5120, 36 blocks" in fault


def test_the_embedding_of_no_text_is_fetched_with_the_weights_that_read_it() -> None:
    path = released.get_predict25_empty_text()
    assert released.download_command(path) == "python -m scripts.download_checkpoints --predict2_5 2B/robot/action-cond"


def test_the_file_of_the_default_negative_prompt_is_what_the_code_uses() -> None:
    path = Path(__file__).parents[1] / "prompts" / "video2world" / "negative" / "default.txt"
    assert path.read_text(encoding="utf-8") == released.DEFAULT_NEGATIVE_PROMPT + "\n"
