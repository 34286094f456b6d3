# SPDX-License-Identifier: Apache-2.0
"""Executing actions and recording a demonstrator's are inverses, for every transform of actions; and statistics and
gripper of a base do not change recordings of another robot. Weights are where a policy looks."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.released import EMBODIED
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.interfaces import Observation
from cosmos_predict2.rl.policies import cloning
from cosmos_predict2.rl.policies.files import load_weights, read_policy
from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.openvla.inputs import GRIPPERS, with_gripper, without_gripper
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy, recorded_settings
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.errors import CheckpointError
from imaginaire.findings import CheckContext
from scripts import train_policy
from tests.programs import call
from tests.rl.policies.seen import generators

DIM, NUM = 4, 3  # numbers of an action, and observations
RANGES = {  # q01 and q99, min and max of each number; the last is the gripper's
    "units": dict(q01=[-1.0] * DIM, q99=[1.0] * DIM, min=[-2.0] * DIM, max=[2.0] * DIM),
    "degrees": dict(
        q01=[-73.0, 0.0, 5.0, 0.0], q99=[73.0, 1e-3, 5.0, 1.0], min=[-90.0, -1.0, 4.0, 0.0], max=[90.0] * DIM
    ),
}


def seen(size: int = NUM) -> Observation:
    return ToyEnv(num_envs=size).reset(seed=0)[0]


def executed(policy: Any, record: dict[str, Tensor]) -> Tensor:
    """The actions that would be executed if the policy decided the recorded ones."""
    if isinstance(policy, ToyPolicy):
        return policy.actions(record["knots"])
    if isinstance(policy, Pi05Policy):
        return policy.action_stats.restored(record["actions"][..., :DIM]).repeat_interleave(policy.config.hold, dim=1)
    return policy._executed(record["actions"]) if policy.variant == "l1" else policy.actions(record["responses"])


def require_inverse(policy: Any, tolerance: float) -> None:
    """Also of actions far from what an untrained policy does: those of drawn records, executed."""
    decided = policy.act(seen(), mode="greedy", generators=generators(NUM))
    record = policy.record_of(seen(), decided.actions_E_A_D)
    if (
        getattr(policy, "variant", "") != "l1"
    ):  # whose numbers have no bounds, and whose targets are clipped as published
        torch.testing.assert_close(executed(policy, record), decided.actions_E_A_D, rtol=0, atol=tolerance)
    name = next(name for name in ("knots", "responses", "actions") if name in record)
    draws = torch.Generator().manual_seed(0)
    if name == "responses":
        record[name] = torch.randint(256, record[name].shape, generator=draws).short()
    else:
        record[name] = torch.rand(record[name].shape, generator=draws) * 2 - 1
    wanted = executed(policy, record)
    assert wanted.std() > 0
    torch.testing.assert_close(executed(policy, policy.record_of(seen(), wanted)), wanted, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("round_trips")
    for name, ranges in RANGES.items():
        statistics = {"action": {**ranges, "mask": [True] * 3 + [name == "units"]}}
        sizes = dict(image_size=28, text_tokens=200, action_chunk=2, action_dim=DIM, statistics=statistics)
        tiny_openvla.write_tiny(root / "openvla" / name, gripper="libero", **sizes)  # type: ignore[arg-type]
        norm_stats = {"state": {"q01": [-1.0], "q99": [1.0]}, "actions": ranges}
        tiny_pi05.write_tiny(root / "pi05" / name, action_horizon=2, norm_stats=norm_stats)  # type: ignore[arg-type]
    return root


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("variant", ["oft", "autoregressive", "l1"])
@pytest.mark.parametrize("gripper", GRIPPERS)
def test_openvla_records_what_it_executes(ranges: str, variant: str, gripper: str, root: Path) -> None:
    for bounds, hold in (("q99", 1), ("minmax", 3)):
        policy = OpenVLAPolicy(str(root / "openvla" / ranges), variant, gripper=gripper, bounds=bounds, hold=hold)
        require_inverse(policy, 1e-4)  # of float32 actions in degrees


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("hold", [1, 3])
def test_pi05_and_the_toy_policy_record_what_they_execute(ranges: str, hold: int, root: Path) -> None:
    require_inverse(Pi05Policy(str(root / "pi05" / ranges), hold=hold), 1e-4)
    require_inverse(ToyPolicy(action_dim=DIM, chunk=4 * hold, num_knots=4), 1e-6)


@pytest.mark.parametrize("gripper", GRIPPERS)
def test_every_form_of_a_gripper_has_its_inverse(gripper: str) -> None:
    actions = torch.tensor([[0.3, -1.0], [0.2, 1.0], [-0.7, 0.0]])
    assert torch.equal(with_gripper(without_gripper(actions, gripper), gripper), actions)


def test_a_recorded_open_gripper_of_libero_is_cloned_as_open(root: Path) -> None:
    policy = OpenVLAPolicy(str(root / "openvla" / "degrees"))
    actions = torch.zeros(NUM, policy.chunk, DIM)
    actions[:, :, 3] = torch.tensor([-1.0, 1.0])  # open, closed
    tokens = policy.record_of(seen(), actions)["responses"][..., 3]
    data = policy.tokens.decode(tokens.long() + policy.tokens.ids.start)
    assert (data[:, 0] > 0.9).all() and (data[:, 1].abs() < 0.1).all()  # 1 = open, as the weights were trained


# --- a base, and recordings of another robot


def base_of(root: Path, key: str, gripper: str | None) -> str:
    """The tiny base with statistics of another name, and with or without a word about its gripper."""
    path = root / f"{key}_{gripper}"
    if not path.exists():
        OpenVLAPolicy(str(root / "openvla" / "units")).save(path)
        statistics = json.loads((path / "dataset_statistics.json").read_text())
        (path / "dataset_statistics.json").write_text(json.dumps({key: statistics["tiny"]}))
        config = json.loads((path / "config.json").read_text())
        del config["gripper"]
        (path / "config.json").write_text(json.dumps(config | ({} if gripper is None else {"gripper": gripper})))
    return str(path)


@pytest.mark.parametrize(
    ("key", "of_config", "expected"),
    [
        ("libero_spatial_no_noops", None, "libero"),
        ("bridge_orig", None, "as_is"),
        ("bridge_orig", "libero", "libero"),
        ("libero_10", "as_is", "as_is"),
    ],
)
def test_the_last_number_is_two_values_in_libero_alone(
    key: str, of_config: str | None, expected: str, root: Path
) -> None:
    path = base_of(root, key, of_config)
    assert OpenVLAPolicy(path).gripper == expected
    draws = torch.rand(5, 2, DIM, generator=torch.Generator().manual_seed(0))
    binary = draws.round() * 2 - 1
    assert recorded_settings(path, binary, keep_statistics=True) == {"gripper": expected}
    for own in (draws, draws.round()):  # of 0 and 1 execution would make -1 and 1
        assert recorded_settings(path, own, keep_statistics=True) == {"gripper": "as_is"}
    found = recorded_settings(path, binary, keep_statistics=False)["statistics"]
    assert found["mask"] == [True] * 3 + [expected == "as_is"]
    assert found["min"][3] == (-1 if expected == "as_is" else 0)


def recordings(folder: Path, scale: float, last: float) -> Path:
    """Recordings of a robot in other units than the base: numbers up to ``scale``, the last up to ``last``."""
    writer, draws = Writer(folder, fps=5, robot="own"), numpy.random.default_rng(0)
    for _ in range(4):
        actions = draws.uniform(-1, 1, (13, DIM)).astype(numpy.float32) * [scale, scale, scale, last]
        video = torch.zeros(3, 13, 28, 28, dtype=torch.uint8)
        columns = {"action": actions.astype(numpy.float32)}
        writer.add(Recording(columns, {"observation.images.top": video}, "push the red disc"))
    writer.finish()
    return folder


@pytest.mark.parametrize("kind", ["openvla_oft", "pi05"])
def test_recordings_in_other_units_are_cloned_in_their_own(
    kind: str, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = recordings(tmp_path / "data", 73.0, 2.5)
    base = base_of(root, "libero_10", None) if kind == "openvla_oft" else str(root / "pi05" / "units")
    words = ["--policy", kind, "--base", base, "--data", str(data), "--windows", "all", "--chunk", "2", "--knots", "1"]
    words += ["--steps", "1", "--batch_size", "2"]
    windows = cloning.recorded_demonstrations(data).windows(2)
    held = windows.actions_B_A_D.mean(dim=1, keepdim=True).expand(-1, 2, -1)
    usual = windows.statistics()
    low, high = (torch.tensor(usual[name]).float() for name in ("q01", "q99"))
    expected, width = (held.clamp(low, high), (high - low) / 255) if kind == "openvla_oft" else (held, 1e-4)

    assert call(train_policy, *words, "--out", str(tmp_path / "own")) == 0
    assert "beyond the statistics" not in caplog.text
    card, _ = read_policy(str(tmp_path / "own"))
    by_path = (OpenVLAPolicy if kind == "openvla_oft" else Pi05Policy)(str(tmp_path / "own"))  # as experiments read it
    for policy in (card, by_path):
        assert policy.chunk == 2
        again = executed(policy, policy.record_of(windows.observation, windows.actions_B_A_D))
        assert ((again - expected).abs() <= width).all() and float(again.abs().max()) > 40

    assert call(train_policy, *words, "--keep_statistics", "--out", str(tmp_path / "kept")) == 0
    assert "% of number 0 of the actions" in caplog.text and "--keep_statistics" in caplog.text
    kept, _ = read_policy(str(tmp_path / "kept"))
    if kind == "openvla_oft":
        assert executed(kept, kept.record_of(windows.observation, windows.actions_B_A_D)).abs().max() <= 1
        assert (kept.gripper, by_path.gripper) == ("as_is", "as_is")  # 2.5 is no word to LIBERO's gripper


def test_a_number_that_hardly_ever_moves_keeps_its_rare_values() -> None:
    actions = torch.zeros(500, 2, 2)
    actions[3, :, 1] = 1.0
    found = cloning.CloneWindows(torch.zeros(500, 4, 4, 3), actions, ["go"] * 500).statistics()
    assert (found["q01"][1], found["q99"][1]) == (0.0, 1.0) and (found["q01"][0], found["q99"][0]) == (0.0, 0.0)


@pytest.mark.parametrize(("policy", "name"), [(OpenVLAPolicy, "openvla_oft"), (Pi05Policy, "pi05")])
def test_a_policy_without_weights_is_refused_before_anything_is_built(policy: Any, name: str, tmp_path: Path) -> None:
    def found(path: str) -> str:
        (one,) = policy.check({"path": path}, CheckContext(key="model.config.policy"))
        assert one.level == "error"
        return str(one)

    told = found("")
    assert told.startswith("model.config.policy.path: the policy has no weights")
    assert f"model.config.policy.path=models/{EMBODIED[name][1]}" in told
    assert f"python -m scripts.download_checkpoints --embodied {name}" in told
    assert f"{tmp_path} has no config.json" in found(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert not [*policy.check({"path": str(tmp_path)}, CheckContext()), *policy.check({"path": "a/b"}, CheckContext())]
    with pytest.raises(CheckpointError, match=f"download_checkpoints --embodied {name}"):
        policy("")


class WithNet(nn.Module):
    """A policy's parameters, of which a part has the name that a run gives its whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_std = nn.Linear(2, 3), nn.Parameter(torch.randn(3))


@pytest.mark.parametrize("prefix", ["", "net."])
def test_a_part_of_a_policy_may_be_called_net(prefix: str, tmp_path: Path) -> None:
    """In the policy's own file, and in a run's, which has a world model besides."""
    written, read = WithNet(), WithNet()
    tensors = {f"{prefix}{name}": value for name, value in written.state_dict().items()}
    torch.save(tensors | ({"world_model.net.weight": torch.zeros(1)} if prefix else {}), tmp_path / "weights.pt")
    load_weights(read, str(tmp_path / "weights.pt"))
    assert all(torch.equal(value, written.state_dict()[name]) for name, value in read.state_dict().items())
