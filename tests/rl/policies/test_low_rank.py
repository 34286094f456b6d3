# SPDX-License-Identifier: Apache-2.0
"""Policies with adapters: trained alone, kept in runs, added to the weights in the public layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from cosmos_predict2.rl.policies import cloning
from cosmos_predict2.rl.policies.files import read_policy
from cosmos_predict2.rl.policies.network import merged_state
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from imaginaire.errors import CheckpointError, TrainingError
from scripts import convert, train_policy
from tests.programs import call
from tests.rl.policies.seen import generators, observation

WEIGHTS = "model.safetensors"
KINDS = {"openvla": OpenVLAPolicy, "pi05": Pi05Policy}


def acts(policy: Any) -> torch.Tensor:
    seen = observation(2, views=0, size=(32, 40), state=0)
    actions: torch.Tensor = policy.act(seen, mode="greedy", generators=generators(2)).actions_E_A_D
    return actions


def written(policy: Any, arguments: dict[str, Any], run: Path) -> str:
    """The policy as the checkpoint of a run."""
    target = f"{type(policy).__module__}.{type(policy).__name__}"
    tree = {"model": {"config": {"policy": {"_target_": target, **arguments}}}}
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    save_file({f"net.{name}": value for name, value in policy.state_dict().items()}, run / "model.safetensors")
    return str(run / "model.safetensors")


def to_public(source: str, folder: Path) -> dict[str, torch.Tensor]:
    assert call(convert, "--from", source, "--to", f"{folder}/") == 0
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_trained_alone_and_added_where_the_policy_is_written(
    kind: str, folders: dict[str, str], tmp_path: Path
) -> None:
    arguments = dict(path=folders[kind], lora_rank=2)
    policy = KINDS[kind](**arguments)
    before = acts(policy)
    assert torch.equal(before, acts(KINDS[kind](folders[kind])))
    learnt = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    assert learnt and all(".lora_" in name for name in learnt)
    for name, weight in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.3)
    public = to_public(written(policy, arguments, tmp_path / "run"), tmp_path / "out")
    again, card = read_policy(str(tmp_path / "out"))
    assert public.keys() == load_file(Path(folders[kind]) / "model.safetensors").keys() and "run" in card.about
    assert not card.arguments.get("lora_rank")
    assert not torch.equal(acts(policy), before)
    torch.testing.assert_close(acts(again), acts(policy), rtol=1e-4, atol=1e-5)


def test_adapters_count_as_they_are_and_those_of_a_folder_once(folders: dict[str, str], tmp_path: Path) -> None:
    layer = "language_model.model.layers.0.self_attn.q_proj"
    plain = OpenVLAPolicy(folders["openvla"]).model.get_submodule(layer).weight
    a, b = torch.randn(2, 64), torch.randn(64, 2)
    factors = {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4, "peft_type": "LORA"}')
    policy = OpenVLAPolicy(folders["openvla"], lora_rank=2, lora_path=str(tmp_path))
    trained: Any = policy.model.get_submodule(layer)
    torch.testing.assert_close(trained.weight, plain + 2 * b @ a)  # alpha / rank
    with torch.no_grad():
        trained.lora_B["default"].weight.copy_(b)
    own = b @ trained.lora_A["default"].weight  # of which alpha is the rank
    torch.testing.assert_close(merged_state(policy.model)[f"{layer}.weight"], plain + 2 * b @ a + own)
    x = torch.randn(3, 64)
    torch.testing.assert_close(trained(x), x @ (plain + 2 * b @ a + own).T, rtol=1e-4, atol=1e-4)


def test_heads_are_trained_whole_beside_adapters(folders: dict[str, str]) -> None:
    l1 = OpenVLAPolicy(folders["openvla"], "l1", lora_rank=2)
    noisy = Pi05Policy(folders["pi05"], noise_method="flow_noise", lora_rank=2, train_expert_only=True)
    for policy, head in ((l1, l1.model.action_head), (noisy, noisy.network.noise_head)):
        assert all(weight.requires_grad for weight in head.parameters())
        assert not any(".lora_" in name for name, _ in head.named_parameters())
        others = {id(weight) for weight in policy.parameters()} - {id(weight) for weight in head.parameters()}
        names = [name for name, weight in policy.named_parameters() if id(weight) in others and weight.requires_grad]
        assert names and all(".lora_" in name for name in names)
    assert not any("paligemma.model" in name for name in names)


@pytest.mark.parametrize(
    ("kind", "options"), [("openvla", {}), ("pi05", {}), ("pi05", dict(train_expert_only=True))], ids=str
)
def test_adapters_are_written_alone_as_peft_reads_them(
    kind: str, options: dict[str, Any], folders: dict[str, str], tmp_path: Path
) -> None:
    import peft

    arguments = dict(path=folders[kind], lora_rank=2, **options)
    policy = KINDS[kind](**arguments)
    for name, weight in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.3)
    source, folder = written(policy, arguments, tmp_path / "run"), tmp_path / "peft"
    words = [source, str(folder), "--to", "peft"]
    assert call(convert, *words) == 0
    stored = load_file(folder / "adapter_model.safetensors")
    state = {name.partition(".")[2]: value for name, value in policy.state_dict().items() if ".lora_" in name}
    names = {name.replace(".default.", ".").removeprefix("base_model.model.") for name in state}
    assert {name.removeprefix("base_model.model.") for name in stored} == names
    for name, value in state.items():
        assert torch.equal(stored[f"base_model.model.{name.replace('.default.', '.')}"], value), name
    merged = merged_state(policy.network)
    again = KINDS[kind](folders[kind], lora_path=str(folder), **options)
    assert torch.equal(acts(again), acts(KINDS[kind](folders[kind], lora_path=str(folder))))
    assert not torch.equal(acts(again), acts(KINDS[kind](folders[kind])))
    for name, value in again.network.state_dict().items():
        assert torch.equal(value, merged[name]), name
    theirs = peft.PeftModel.from_pretrained(KINDS[kind](folders[kind]).network, str(folder)).merge_and_unload()
    assert theirs.state_dict().keys() == merged.keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(value, merged[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words", "named"),
    [
        ({}, [], "without adapters"),
        (dict(lora_rank=2), ["--lora_alpha", "4"], "records alpha 2"),
        (dict(lora_rank=2), ["--merge-lora"], "writes adapters alone"),
        (dict(lora_rank=2, noise_method="flow_noise"), [], "trained noise_head whole"),
    ],
)
def test_adapters_that_are_not_all_of_a_policy_are_refused(
    options: dict[str, Any], words: list[str], named: str, folders: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    arguments = dict(path=folders["pi05"], **options)
    source = written(Pi05Policy(**arguments), arguments, tmp_path / "run")
    words = [source, str(tmp_path / "out"), "--to", "peft", *words]
    assert call(convert, *words) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_public_layout_is_read_and_written_again_exactly(
    kind: str, folders: dict[str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = dict(temperature=1.6) if kind == "openvla" else dict(num_steps=3)
    arguments = dict(path=folders[kind], **options)
    policy = KINDS[kind](**arguments)
    draws = torch.Generator().manual_seed(5)
    for weight in policy.parameters():
        if weight.requires_grad:  # as of what is trained
            weight.data += 0.05 * torch.randn(weight.shape, generator=draws)
    run = written(policy, arguments, tmp_path / "run")
    public = to_public(run, tmp_path / "out")
    folded = ("mask_token", "cls_token", "position_embeddings")  # of OpenVLA: timm has no position of that token
    for address in (run, str(tmp_path / "out")):
        again, _ = read_policy(address)
        assert again.arguments.items() >= options.items()
        for name, value in policy.state_dict().items():
            assert torch.equal(again.state_dict()[name], value) or name.endswith(folded), name
        assert torch.equal(acts(again), acts(policy))
    assert call(convert, run, str(tmp_path / "by_position"), "--to", "public") == 0
    for other in (to_public(str(tmp_path / "out"), tmp_path / "twice"), load_file(tmp_path / "by_position" / WEIGHTS)):
        assert other.keys() == public.keys()
        for name, value in other.items():
            assert torch.equal(value, public[name]), name


def test_what_is_replaced_leaves_nothing_behind(folders: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    index = out / "model.safetensors.index.json"  # of a policy in several files, which readers would follow
    index.write_text('{"weight_map": {}}')
    assert call(convert, "--from", folders["pi05"], "--to", str(out)) == 2 and index.exists()
    assert call(convert, "--from", folders["pi05"], "--to", str(out), "--overwrite") == 0
    assert not index.exists() and sorted(tmp_path.iterdir()) == [out]
    assert call(convert, "--from", str(out), "--to", str(out), "--overwrite") == 0
    read_policy(str(out))


MIXED = [  # words of scripts.convert, RUN a policy; and what the error names
    ("--from RUN", "--from RUN needs --to DESTINATION"),
    ("--from RUN --to public", "--to ./public"),
    ("--from RUN OUT --to peft", "--from RUN and OUT"),
    ("--from RUN RUN OUT", "--from RUN and RUN OUT"),
    ("RUN --to OUT", "Give both SOURCE and DESTINATION"),
    ("--to OUT", "Give both SOURCE and DESTINATION"),
    ("RUN OUT --to pubic", "Did you mean public?"),
    ("RUN OUT --to OUT", "destination is the second word"),
    ("--from RUNN --to OUT", "RUNN"),
    ("WEIGHTS OUT", "is no policy"),
    ("--from WEIGHTS --to OUT", "does not hold the weights of a video network"),
    ("--from RUN --to s3://bucket/out", "s3://bucket/out: a policy is written to a folder of this machine"),
]


@pytest.mark.parametrize(("words", "named"), MIXED, ids=lambda text: text)
def test_words_that_do_not_go_together_are_refused(
    words: str, named: str, folders: dict[str, str], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").symlink_to(folders["pi05"])
    save_file({"weight": torch.zeros(2)}, tmp_path / "WEIGHTS")
    assert call(convert, *words.split()) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "OUT").exists()


def test_the_command_trains_adapters_of_the_expert(folders: dict[str, str], tmp_path: Path) -> None:
    words = ["--policy", "pi05", "--base", folders["pi05"], "--lora_rank", "2", "--expert_only", "--steps", "2"]
    words += ["--demonstrations", "2", "--batch_size", "2", "--out", str(tmp_path / "a")]
    assert call(train_policy, *words) == 0
    before, after = (load_file(Path(path) / "model.safetensors") for path in (folders["pi05"], tmp_path / "a"))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed and not any(".paligemma." in name for name in changed)


@pytest.mark.parametrize("kind", ["openvla_oft", "pi05"])
def test_a_clone_that_is_interrupted_leaves_no_random_policy(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise TrainingError("lower --lr")

    monkeypatch.setattr(cloning, "clone", interrupted)
    words = ["--policy", kind, "--demonstrations", "2", "--out", str(tmp_path / "a")]
    assert call(train_policy, *words) != 0
    assert not (tmp_path / "a").exists()


def test_adapters_of_another_network_are_refused(folders: dict[str, str], tmp_path: Path) -> None:
    layer = "base_model.model.language_model.model.layers.9.self_attn.q_proj"
    factors = {f"{layer}.lora_{part}.weight": torch.zeros(2, 2) for part in "AB"}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2, "peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match="layers that this network does not have"):
        OpenVLAPolicy(folders["openvla"], lora_path=str(tmp_path))
