# SPDX-License-Identifier: Apache-2.0
"""Cards: a policy learns in an imagination that was measured, in no other one."""

import logging
from pathlib import Path

import pytest
import torch

from cosmos_predict2.configs.rl.experiment.policy_recordings import recordings
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, write_classifier
from cosmos_predict2.rl.trust import Card, digest, learning_inputs, read_card, require_card, write_card
from imaginaire.config.nodes import as_config
from imaginaire.errors import CheckpointError, ConfigError


def run_of(folder: Path, weights: bytes = b"weights", lr: float = 1.0, channels: int = 8) -> str:
    (folder / "checkpoints" / "model").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / "model" / "iter_000000100.pt").write_bytes(weights)
    (folder / "checkpoints" / "latest_checkpoint.txt").write_text("iter_000000100.pt")
    model = f"model: {{config: {{net: {{model_channels: {channels}}}}}}}\n"
    (folder / "config.yaml").write_text(f"optimizer: {{lr: {lr}}}\n{model}")
    return str(folder)


def policy_of(folder: Path) -> str:
    (folder / "assets").mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    (folder / "assets" / "norm_stats.json").write_text("{}")
    return str(folder)


def test_a_digest_is_of_what_is_loaded_and_of_how_it_is_used(tmp_path: Path) -> None:
    world, policy = run_of(tmp_path / "world"), policy_of(tmp_path / "policy")
    assert digest(run_of(tmp_path / "elsewhere", lr=2.0)) == digest(world), "neither its place nor the optimizer count"
    different = {digest(run_of(tmp_path / "a", b"others")), digest(run_of(tmp_path / "b", channels=4))}
    different |= {digest(world, load_ema=True), digest(world, tokenizer_path="mine"), digest(world)}
    assert len(different) == 5
    assert digest(world, load_ema=False, tokenizer_path="") == digest(world)
    assert digest(f"{world}/checkpoints/model/iter_000000100.pt") == digest(world)

    before = digest(policy)
    (tmp_path / "policy" / "figures.json").write_text('{"success": 0.5}')
    (tmp_path / "policy" / "README.md").write_text("mine")
    assert digest(policy) == before, "what is written beside does not change how it decides"
    (tmp_path / "policy" / "assets" / "norm_stats.json").write_text('{"mean": 1}')
    assert digest(policy) != before

    reward = tmp_path / "reward"
    write_classifier(reward / "reward_model.safetensors", SuccessClassifier((4, 4, 4, 4, 4)), {"threshold": 0.5})
    of_file = digest(str(reward / "reward_model.safetensors"))
    (reward / "quality.json").write_text("{}")
    assert digest(str(reward)) == of_file
    for path, text in (
        (str(tmp_path / "worlds"), "Did you mean world"),
        (str(tmp_path / "policy" / "assets"), "no wei"),
    ):
        with pytest.raises(CheckpointError, match=text):
            digest(path)


def card(verdict: str = "go", **inputs: str) -> Card:
    known = {"world_model": "aa", "tokenizer": "bb", "reward": "cc", "policy/first": "dd", "policy/other": "ee"}
    return Card(verdict, ("AUC .80",), {"auc": 0.8}, {**known, **inputs}, "go on", {"reward": "old_reward"})  # type: ignore[arg-type]


def test_a_card_is_read_as_it_was_written_and_demanded_of_its_own_inputs(tmp_path: Path) -> None:
    path, inputs = tmp_path / "card.json", {"world_model": "aa", "reward": "cc", "policy": "ee"}
    write_card(path, card())
    assert require_card(str(path), inputs) == read_card(str(path)) == card()
    refused = [
        (
            card(reward="ff"),
            inputs,
            "another reward, .* of it: digest ff .old_reward., but this run's is cc",
        ),
        (card(), {**inputs, "policy": "ff"}, "another policy, .*: digest dd or ee"),
        (card(), {**inputs, "split": "gg"}, "has no split"),
        (card("no"), inputs, 'the verdict "no": AUC .80. Next: go on'),
    ]
    for written, asked, text in refused:
        write_card(path, written)
        with pytest.raises(ConfigError, match=text) as raised:
            require_card(str(path), asked, key="model.config.card", made_by="python -m make_it")
        assert "python -m make_it" in str(raised.value) and "model.config.allow_unchecked=true" in str(raised.value)
        assert require_card(str(path), asked, allow_unchecked=True) is None
    with pytest.raises(ConfigError, match="is no file"):
        require_card(str(tmp_path / "none.json"), inputs)
    path.write_text('{"verdict": "fine"}')
    with pytest.raises(CheckpointError, match="verdict is 'fine'"):
        read_card(str(path))


def test_the_experiment_of_recordings_demands_the_card_of_its_own_inputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = tmp_path / "reward.safetensors"
    torch.manual_seed(0)
    write_classifier(reward, SuccessClassifier((4, 4, 4, 4, 4)), {"threshold": 0.5})
    tree = recordings("mine", "openvla_oft")["model"]["config"]
    tree.env.imagination.dit_path, tree.env.reward.path = run_of(tmp_path / "world"), str(reward)
    tree.policy.path, tree.card = policy_of(tmp_path / "policy"), str(tmp_path / "card.json")
    inputs, places = learning_inputs(tree)
    assert set(inputs) == {"world_model", "reward", "policy"} and places["reward"] == str(reward)
    with pytest.raises(ConfigError, match=f"check_imagination --data my_data --world_model {places['world_model']}"):
        VLAGRPOModel(tree)
    write_card(tmp_path / "card.json", card("go", **{**inputs, "reward": "of another file"}))
    with pytest.raises(ConfigError, match="another reward"):
        VLAGRPOModel(tree)
    tree.policy.temperature = 0.5
    write_card(tmp_path / "card.json", card("go", **inputs))
    with pytest.raises(ConfigError, match="another policy, or for other settings of it"):
        VLAGRPOModel(tree)
    inputs["policy"] = digest(places["policy"], temperature=0.5)
    write_card(tmp_path / "card.json", card("doubtful", **inputs))
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError):  # no longer of the card: no weights
        VLAGRPOModel(as_config(type(tree), tree, "model.config"))
    assert "doubtful" in caplog.text
