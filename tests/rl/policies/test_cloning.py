# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.policies import cloning
from cosmos_predict2.rl.policies.cloning import CloneWindows, clone, recorded_demonstrations, toy_demonstrations
from cosmos_predict2.rl.policies.files import KEY, read_policy, write_policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from cosmos_predict2.toy_world.episodes import make_episodes
from imaginaire.errors import CheckpointError, ConfigError, DataError
from imaginaire.training import provenance
from scripts import train_policy
from tests.programs import call


def test_windows_begin_where_they_are_asked_for() -> None:
    demonstrations = toy_demonstrations(3, seed=4)
    some, every = demonstrations.windows(12, [0, 12]), demonstrations.windows(12)
    assert (len(some), len(every)) == (6, 39)
    for of_all, of_some in ((0, 0), (12, 1), (13, 2)):
        assert torch.equal(every.pictures_B_H_W_C[of_all], some.pictures_B_H_W_C[of_some])
        assert torch.equal(every.actions_B_A_D[of_all], some.actions_B_A_D[of_some])
    assert torch.equal(every.actions_B_A_D[1], torch.from_numpy(demonstrations.actions[0][1:13]).float())
    with pytest.raises(DataError, match=r"window of 12 actions .*24"):
        demonstrations.windows(12, [12, 13])  # of 24 actions none begins at 13


def test_a_record_of_a_demonstrator_has_the_means_of_what_knots_hold() -> None:
    policy, windows = ToyPolicy(), toy_demonstrations(2, seed=0).windows(12, [0])
    knots = policy.record_of(windows.observation, windows.actions_B_A_D)["knots"]
    torch.testing.assert_close(knots[:, 1], windows.actions_B_A_D[:, 3:6, :2].mean(1))


def test_cloning_learns_what_was_demonstrated_and_follows_from_the_seed() -> None:
    windows = toy_demonstrations(8, seed=1).windows(12, [0, 12])
    cloned = []
    for seed in (0, 0, 1):
        torch.manual_seed(5)
        policy = ToyPolicy(width=64)
        losses = clone(policy, windows, steps=150, lr=1e-3, batch_size=16, seed=seed)
        cloned.append(policy)
    assert numpy.mean(losses[-10:]) < numpy.mean(losses[:10]) - 1
    record = policy.record_of(windows.observation, windows.actions_B_A_D)
    assert (policy.means(record["features"]) - record["knots"]).abs().mean() < 0.25
    first, again, other = (torch.cat([p.flatten() for p in policy.parameters()]) for policy in cloned)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_statistics_are_those_of_every_action_of_the_windows() -> None:
    actions = torch.stack([torch.arange(202.0).clamp(max=200), torch.zeros(202)], dim=1)[:-1]  # 0 to 200
    found = CloneWindows(torch.zeros(67, 4, 4, 3), actions.unflatten(0, (67, 3)), ["go"] * 67).statistics()
    known = dict(q01=2, q99=198, min=0, max=200, mean=100, std=float(actions[:, 0].double().std(correction=0)))
    assert {name: found[name][0] for name in known} == pytest.approx(known)
    assert found["mask"] == [True] * 2 and found["max"][1] == 0


def test_the_rate_falls_to_zero_in_a_line() -> None:
    windows, rates, step = toy_demonstrations(1, seed=0).windows(12, [0]), [], torch.optim.Adam.step

    def watched(optimizer: torch.optim.Adam, *arguments: object) -> object:
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *arguments)

    with mock.patch.object(torch.optim.Adam, "step", watched):
        clone(ToyPolicy(width=8), windows, steps=4, lr=1e-3, batch_size=2, seed=0)
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4], rel=1e-4)


@pytest.mark.parametrize("form", ["states", "lerobot"])
def test_recordings_demonstrate_like_the_episodes_they_were_made_of(tmp_path: Path, form: str) -> None:
    write_folder(str(tmp_path / "toy"), ToyFolder(episodes=4, frames=13, val_fraction=0.25, form=form, mix="expert"))
    folder = tmp_path / "toy" / "train" if form == "states" else tmp_path / "toy"
    windows = recorded_demonstrations(folder, 2).windows(12)
    truth = toy_demonstrations(2, seed=0)
    assert len(windows) == 2 and windows.pictures_B_H_W_C.shape == (2, 48, 48, 3)
    recorded = make_episodes(2, 0, mix="expert", first=SPLITS["train"]).captions
    assert windows.observation["task_description"] == recorded and recorded[0] != recorded[1]
    for i in range(2):
        numpy.testing.assert_array_equal(windows.actions_B_A_D[i].numpy(), truth.actions[i][:12])
        difference = windows.pictures_B_H_W_C[i].int() - truth.picture(i, [0])[0].int()
        assert difference.abs().float().mean() < (0.5 if form == "states" else 8)  # a video is compressed


def test_all_recordings_are_cloned_where_no_number_was_given(tmp_path: Path) -> None:
    for given, number in ([], None), (["--demonstrations", "3"], 3):
        with mock.patch.object(train_policy, "_clone_recordings") as cloned:
            assert call(train_policy, "--data", "recordings", "--out", str(tmp_path / "policy"), *given) == 0
        assert cloned.call_args.args[0].demonstrations == number


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has none of the forms"):
        recorded_demonstrations(tmp_path)
    windows = toy_demonstrations(1, seed=0, action_dim=7).windows(12)
    with pytest.raises(ConfigError, match="7 numbers per action, the policy 4: set --action_dim 7"):
        clone(ToyPolicy(), windows, steps=1, lr=1e-3, batch_size=64, seed=0)


def test_a_policy_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "version_of", lambda distribution: None)  # a folder that was not installed
    policy = ToyPolicy(action_dim=7, width=32, num_knots=3, noise=0.3)
    write_policy(tmp_path / "policy", policy, {"seed": 3})
    for address in (tmp_path / "policy", tmp_path / "policy" / "policy.safetensors"):
        found, card = read_policy(str(address))
        assert found.arguments == policy.arguments and card.about["seed"] == 3 and "torch" in card.about["versions"]
        assert not found.training
        for name, value in policy.state_dict().items():
            assert torch.equal(found.state_dict()[name], value)
    begun = ToyPolicy(action_dim=7, width=32, num_knots=3, noise=0.1, path=str(tmp_path / "policy"))
    assert torch.equal(begun.mlp[0].weight, policy.mlp[0].weight) and begun.noise == 0.1
    with pytest.raises(CheckpointError, match=r"policy does not fit the model"):
        ToyPolicy(width=64, path=str(tmp_path / "policy"))


def test_a_policy_is_read_from_a_run(tmp_path: Path) -> None:
    policy = ToyPolicy(width=32)
    target = "cosmos_predict2.rl.policies.toy.ToyPolicy"
    (tmp_path / "config.yaml").write_text(
        f"model:\n  config:\n    rl:\n      execute: 6\n    policy:\n      _target_: {target}\n      width: 32\n"
        "      path: gone/policy\n"
    )
    model = tmp_path / "checkpoints" / "model"
    model.mkdir(parents=True)
    state = {f"net.{name}": value for name, value in policy.state_dict().items()}
    state |= {f"net_ema.{name}": value + 1 for name, value in policy.state_dict().items()}
    state |= {"world_model.net.x": torch.zeros(2), "progress_counts": torch.zeros(2)}
    torch.save(state, model / "iter_000000005.pt")
    (tmp_path / "checkpoints" / "latest_checkpoint.txt").write_text("iter_000000005.pt\n")
    for address in (tmp_path, model / "iter_000000005.pt"):
        found, card = read_policy(str(address))
        assert torch.equal(found.mlp[0].weight, policy.mlp[0].weight)
        assert card.about == {"run": str(tmp_path), "execute": 6}
    averaged, _ = read_policy(str(tmp_path), "net_ema")
    assert torch.equal(averaged.mlp[0].weight, policy.mlp[0].weight + 1)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "records no policy"),
        ({KEY: "{"}, "policy_card cannot be read"),
        ({KEY: '{"policy": "os.system", "arguments": {}, "about": {}}'}, "class 'os.system', which is not registered"),
        (
            {KEY: '{"policy": "cosmos_predict2.rl.policies.toy.ToyPolicy", "arguments": {"depth": 3}, "about": {}}'},
            r"cannot be built.*'depth'",
        ),
    ],
)
def test_what_is_no_policy_is_refused_by_name(tmp_path: Path, header: dict[str, str], message: str) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "file.safetensors", metadata=header)
    with pytest.raises(CheckpointError, match=message):
        read_policy(str(tmp_path / "file.safetensors"))


def test_the_command_writes_a_policy_that_acts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--demonstrations", "4", "--steps", "20", "--windows", "0,12", "--out", str(tmp_path / "policy"))
    assert call(train_policy, *words) == 0
    policy, card = read_policy(str(tmp_path / "policy"))
    assert card.about["windows"] == [0, 12] and card.about["demonstrations"] == 4
    env = ToyEnv(2, split="val")
    decision = policy.act(env.reset()[0], mode="greedy", generators=[])
    env.chunk_step(decision.actions_E_A_D)
    first = load_file(tmp_path / "policy" / "policy.safetensors")
    assert call(train_policy, *words) == 2
    assert "exists: give another path, or --overwrite" in capsys.readouterr().err
    assert call(train_policy, *words, "--overwrite") == 0
    again = load_file(tmp_path / "policy" / "policy.safetensors")
    assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("kind", ["openvla_oft", "pi05"])
def test_weights_to_begin_with_that_are_not_there_are_refused_before_demonstrations_are_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []
    for name in ("toy_demonstrations", "recorded_demonstrations"):
        monkeypatch.setattr(cloning, name, lambda *given: made.append(given))
    for more in ([], ["--data", str(tmp_path)]):
        assert call(train_policy, "--policy", kind, "--base", "/nowhere", "--out", str(tmp_path / "policy"), *more) == 2
        assert "/nowhere has no config.json" in capsys.readouterr().err
    assert not made and not (tmp_path / "policy").exists()


@pytest.mark.parametrize("kind", ["toy", "openvla_oft", "pi05"])
def test_the_command_clones_by_what_it_is_given(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(cloning, "clone", lambda *given, **options: calls.append((*given, options)) or [1.0, 0.5])
    words = ["--policy", kind, "--demonstrations", "2", "--windows", "0,12", "--steps", "7", "--lr", "0.002"]
    words += ["--batch_size", "5"]
    bases = {} if kind == "toy" else {2: ["--base", str(tmp_path / "0"), "--knots", "2"]}
    for i, seed in enumerate("010"[: 2 + len(bases)]):
        assert call(train_policy, *words, "--seed", seed, "--out", str(tmp_path / f"{i}"), *bases.get(i, [])) == 0
    policy, windows, options = calls[0]
    assert options == dict(steps=7, lr=0.002, batch_size=5, seed=0) and calls[1][2]["seed"] == 1 and len(windows) == 4
    assert torch.equal(windows.actions_B_A_D, toy_demonstrations(2, seed=0).windows(12, [0, 12]).actions_B_A_D)
    first, other = (torch.cat([weight.flatten() for weight in call[0].parameters()]) for call in calls[:2])
    assert not torch.equal(first, other)
    if bases:
        low = policy.statistics.low if kind == "openvla_oft" else policy.action_stats.q01
        numpy.testing.assert_allclose(low, windows.statistics()["q01"], rtol=1e-6)
        assert calls[2][0].chunk == 12  # two actions, each held for six steps


def test_the_toy_policy_takes_no_recordings_of_another_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(tmp_path / "own", fps=5, robot="own")
    for _ in range(2):
        video = torch.zeros(3, 13, 16, 16, dtype=torch.uint8)
        writer.add(Recording({"action": numpy.zeros((13, 2), numpy.float32)}, {"observation.images.top": video}, "go"))
    writer.finish()
    assert call(train_policy, "--data", str(tmp_path / "own"), "--windows", "0", "--out", str(tmp_path / "policy")) == 2
    assert "its actions have 2 numbers" in capsys.readouterr().err
    assert recorded_demonstrations(tmp_path / "own").windows(12).observation["task_description"] == ["go"] * 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--windows", "late"), "--windows"),
        (("--steps", "0"), "--steps"),
        (("--setting", "hart"), "--setting hart"),
        (("--chunk", "10"), "policy.chunk=10"),
        (("--data", "nowhere"), "nowhere does not exist"),
        (("--data", "nowhere", "--action_dim", "4"), "--action_dim 4 is of the toy world's expert"),
        (("--keep_statistics",), "--keep_statistics"),
        (("--lora_rank", "4"), "--lora_rank has no meaning"),
        (("--policy", "openvla_oft", "--expert_only"), "--expert_only has no meaning"),
        (("--policy", "openvla_oft", "--augment"), "--augment has no meaning"),
        (("--policy", "pi05", "--variant", "l1"), "--variant has no meaning"),
    ],
)
def test_wrong_flags_are_named(
    tmp_path: Path, words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(train_policy, "--out", tmp_path / "policy", "--demonstrations", "2", *words) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "policy").exists()
