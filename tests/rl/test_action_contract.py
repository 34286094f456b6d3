# SPDX-License-Identifier: Apache-2.0
"""Names and rate of recorded actions go with what learns from them, and another order or rate is refused by both."""

import functools
import importlib
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import numpy
import pytest
import torch

from cosmos_predict2.actions.transforms import UNKNOWN, ActionContract, ActionTransform, controller
from cosmos_predict2.checkpoints.card import _of_run, _typed, card_texts, read_card
from cosmos_predict2.configs.action_conditioned.networks import choose_action_model
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.data import split as splits
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.pipelines.action_inputs import LeRobotRecordings
from cosmos_predict2.pipelines.evaluation_data import read_recordings
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.rl.envs import replays
from cosmos_predict2.rl.envs.first_frames import GivenStarts
from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStarts
from cosmos_predict2.rl.envs.replays import recorded_actions, with_actions_of
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv, require_inputs
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.episodes.refinement import RefinementConfig, open_recorded_phase
from cosmos_predict2.rl.imagined import labelled_recordings
from cosmos_predict2.rl.imagined.check import read_episodes, starts_of
from cosmos_predict2.rl.interfaces import PolicyDefaults
from cosmos_predict2.rl.policies.files import about_of, write_policy
from cosmos_predict2.rl.policies.recorded_windows import RecordedWindows
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.tools.drive import session
from cosmos_predict2.world_model.options import ActionModel
from imaginaire.config import L
from imaginaire.errors import ConfigError
from scripts import make_reset_states
from tests.data.lerobot_files import write_random
from tests.data.sources_lerobot import change_json

NAMES, SIDE = ("x", "y", "z", "gripper"), 48
STATE_NAMES = ("height", "open")
OTHERS = {
    "order": (ActionContract(("gripper", "x", "y", "z"), 5.0), r"\(gripper, x, y, z\).*\(x, y, z, gripper\)"),
    "rate": (ActionContract(NAMES, 10.0), "takes 10 actions per second.* 5"),
    "state": (ActionContract(state_names=("open", "height")), r"state \(open, height\).*\(height, open\)"),
}
FITTING = (UNKNOWN, ActionContract(NAMES), ActionContract(rate=5.0), ActionContract(NAMES, 5.01))
FITTING += (ActionContract(state_names=STATE_NAMES),)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes at 5 frames per second, whose actions and states have names."""
    folder = write_random(tmp_path_factory.mktemp("recordings") / "my_data", 3, ["front"], SIDE, len(STATE_NAMES))
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    features["action"]["names"], features["observation.state"]["names"] = list(NAMES), list(STATE_NAMES)
    change_json(folder / "meta/info.json", features=features)
    return folder


@functools.cache
def released() -> Any:
    return imagination_of(device="cpu")


def imagination(contract: ActionContract) -> Any:
    """A world model of actions with this contract, as its weights would have it."""
    made = released()
    transform = ActionTransform.from_json(
        ActionTransform(kind="controller", scale=controller(4).scale, stats=contract.to_dict() or None).to_json()
    )
    head = SimpleNamespace(state_dim=len(STATE_NAMES)) if contract.state_names else None
    config = attrs.evolve(made.config, action_transform=transform.to_dict())
    parts = dict(config=config, views=("",), world=made.world, state_head=head, action_keys=None)
    return SimpleNamespace(transform=transform, **parts)


def test_a_data_set_records_them_with_its_transform(recordings: Path) -> None:
    for stride, rate in ((1, 5.0), (2, 2.5)):
        data = LeRobotActionDataset(
            str(recordings), num_frames=5, video_size=[48, 48], data_split="full", stride=stride, combine_actions="sum"
        )
        told = LeRobotActionDataset(
            str(recordings), num_frames=5, data_split="full", stride=stride, combine_actions="sum",
            state="observation.state",
            action_transform=controller(4).with_contract(ActionContract(OTHERS["order"][0].names, 99.0)),
        )  # fmt: skip
        for one, states in ((data, ()), (told, STATE_NAMES)):
            carried = ActionTransform.from_json(one.action_transform.to_json())
            assert carried.contract == ActionContract(NAMES, rate, states)


def test_numbers_without_names_have_none(recordings: Path) -> None:
    source = LeRobotSource.open(recordings)
    assert source.action_contract(source.action_parts()) == ActionContract(NAMES, 5.0)
    features = {**source.info.features, "action": {**source.info.features["action"], "names": None}}
    source.info.__dict__["features"] = features
    assert source.action_contract(source.action_parts()) == ActionContract((), 5.0)
    features["action"]["names"] = {name: place for place, name in reversed(list(enumerate(NAMES)))}  # by their places
    assert source.action_contract(source.action_parts()) == ActionContract(NAMES, 5.0)


def test_a_place_in_a_part_may_have_a_name_elsewhere() -> None:
    """Older versions recorded arm[0]; it has info.json's name now."""
    old, new = ActionContract(("arm[0]", "arm[1]", "hand")), ActionContract(("pan", "lift", "hand"))
    assert old.problem(new, "a", "b") is None and new.problem(old, "a", "b") is None
    for other in (("arm[1]", "arm[0]", "hand"), ("pan", "lift", "foot"), ("pan", "lift")):
        assert old.problem(ActionContract(other), "a", "b")


@pytest.mark.parametrize("other", OTHERS)
def test_another_order_or_rate_is_refused_at_each_border(other: str, recordings: Path, tmp_path: Path) -> None:
    """Recordings that are replayed, imagined or measured on, starts whose facts are used, and clones; what fits or is
    not recorded passes."""
    source = LeRobotSource.open(recordings)
    make_reset_states.run(
        make_reset_states.parser.parse_args(["--dataset", str(recordings), "--out", str(tmp_path / "starts")])
    )
    starts = RecordedStarts(str(tmp_path / "starts" / FILE))
    policy, reads_actions, blind = PolicyDefaults(), other != "state", PolicyDefaults()
    policy.reads_state = True
    policy.contract = blind.contract = RecordedWindows(str(recordings), chunk=4, state=True).windows.contract
    assert policy.contract == ActionContract(NAMES, 5.0, STATE_NAMES)
    wrong, words = OTHERS[other]
    evaluated: Any = dict(num=1, num_actions=4, size=(SIDE, SIDE))
    for border in (
        lambda: with_actions_of(source, imagination(wrong)),
        lambda: read_recordings(str(recordings), imagination(wrong).transform, **evaluated),
        lambda: LeRobotRecordings.open(str(recordings), imagination(wrong).transform),
    ):
        with pytest.raises(ConfigError, match=words) if reads_actions else nullcontext():  # they read no state
            border()
    with pytest.raises(ConfigError, match=words + ".*make_reset_states"):
        WorldModelEnv(imagination(wrong), starts, ToyDetectorReward(), 3, None)
    alone = starts if reads_actions else GivenStarts(torch.zeros(3, SIDE, SIDE, 3, dtype=torch.uint8))
    env = WorldModelEnv(imagination(wrong), alone, ToyDetectorReward(), 3, 24)  # their pictures alone are used
    with pytest.raises(ConfigError, match=words + ".*clone it anew"):
        require_inputs(env, policy)
    with pytest.raises(ConfigError, match=words) if reads_actions else nullcontext():
        require_inputs(env, blind)
    for contract in FITTING:
        read_recordings(str(recordings), imagination(contract).transform, **evaluated)
        LeRobotRecordings.open(str(recordings), imagination(contract).transform)
        with_actions_of(source, imagination(contract))
        env = WorldModelEnv(imagination(contract), starts, ToyDetectorReward(), 3, None, state_size=2)
        require_inputs(env, policy)


def test_states_that_are_not_read_are_not_compared(recordings: Path, tmp_path: Path) -> None:
    assert RecordedWindows(str(recordings), chunk=4).windows.contract == ActionContract(NAMES, 5.0)
    world = imagination(OTHERS["state"][0])
    world.state_head = None
    make_reset_states.run(make_reset_states.parser.parse_args(["--dataset", str(recordings), "--out", str(tmp_path)]))
    starts = RecordedStarts(str(tmp_path / FILE))
    assert ActionContract.read(starts.recorded.contract).state_names == STATE_NAMES  # type: ignore[union-attr]
    env = WorldModelEnv(world, starts, ToyDetectorReward(), 3, None, clip_actions="recorded")
    assert env.contract == ActionContract(clip_actions="recorded")


def test_the_gate_and_a_phase_of_the_robot_compare_the_state_that_they_read(recordings: Path) -> None:
    source, (wrong, words) = LeRobotSource.open(recordings), OTHERS["state"]
    episodes = read_episodes(source, None, range(3), [True] * 3, 1)
    world = imagination(wrong)
    world.world = SimpleNamespace(config=SimpleNamespace(state="observation.state"))
    with pytest.raises(ConfigError, match=words):
        WorldModelEnv(world, starts_of(episodes, episodes), ToyDetectorReward(), 3, 24)
    env: Any = SimpleNamespace(imagination=world, views=("",), head=world.state_head, contract=wrong)
    phase = RefinementConfig(recordings=str(recordings.parent), episodes=1)
    (recordings.parent / "phase_001").symlink_to(recordings)
    with pytest.raises(ConfigError, match=words + ".*record the phase"):
        open_recorded_phase(phase, 1, "RUN", env, 5, (SIDE, SIDE))


def test_recordings_are_imagined_by_the_columns_that_the_world_model_learnt_from(tmp_path: Path) -> None:
    """A run names them; what scripts.collect recorded has them as one."""
    rows, writer = numpy.arange(52, dtype=numpy.float32).reshape(13, 4), Writer(tmp_path / "mine", fps=5)
    video = {"observation.images.top": torch.zeros(3, 13, 32, 32, dtype=torch.uint8)}
    writer.add(Recording({"action": rows, "target.arm": rows[:, :3], "target.hand": 100 + rows[:, 3:]}, video, "go"))
    writer.finish()
    writer = Writer(tmp_path / "played", fps=5)
    writer.add(Recording({"action": rows}, video, "go"))
    writer.finish()
    world, card = imagination(UNKNOWN), read_card(TINY_ACTION)
    assert card.action_keys is None
    run = {"dataloader_train": {"dataset": {"action_keys": ["target.arm", "target.hand"]}}}
    world.action_keys = _typed(_of_run(run, {}), "a run")["action_keys"]
    for name, hand in (("mine", 103), ("played", 3)):
        source = with_actions_of(LeRobotSource.open(tmp_path / name), world)
        assert recorded_actions(source, 0)[0].tolist() == [0, 1, 2, hand]
    alone = {"dataloader_train": {"dataset": {"action_keys": "target.arm"}}}
    assert _typed(_of_run(alone, {}), "a run")["action_keys"] == ("target.arm",)
    world.action_keys = ("action", "target.hand")  # of which what was played has one
    assert recorded_actions(with_actions_of(LeRobotSource.open(tmp_path / "played"), world), 0)[0, -1] == 3
    choice = choose_action_model(ActionModel(dit_path=TINY_ACTION))
    choice = replace(choice, card=replace(choice.card, action_keys=("target.arm", "target.hand")))
    assert '"action_keys":["target.arm","target.hand"]' in "".join(card_texts(choice.card).values())  # of a file
    with mock.patch("cosmos_predict2.configs.rl.imagination.choose_action_model", return_value=choice):
        assert imagination_of(device="cpu").action_keys == ("target.arm", "target.hand")


class FarEnough(Exception):
    pass


@pytest.mark.parametrize("program", ["check_imagination", "train_reward_model", "drive"])
def test_programs_read_the_recordings_by_those_columns(
    program: str, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_columns, read = LeRobotSource.open(recordings), list[Any]()

    def stop(source: Any, *_: Any) -> None:
        read.append(source)
        raise FarEnough

    for place in (replays, session):
        monkeypatch.setattr(place, "with_actions_of", lambda source, imagination: by_columns)
    for place, name in ((splits, "require_usable"), (session, "FirstPictures")):
        monkeypatch.setattr(place, name, stop)
    monkeypatch.setattr(splits, "make_split", lambda *_, **__: SimpleNamespace(digest=""))
    monkeypatch.setattr(labelled_recordings, "parts_of", lambda *_: ([], [], []))
    script = importlib.import_module(f"scripts.{program}")
    words = ["--data", str(recordings), "--world_model", TINY_ACTION, "--out", str(recordings / "out")]
    words += ["--reward", f"{__name__}:FarEnough"] if program == "check_imagination" else []
    args = script.parser.parse_args(words)
    with pytest.raises(FarEnough):
        if program == "drive":
            with session.drive_of(args, imagination_of(device="cpu"), None):
                pass
        else:
            script.run(args)
    assert read[0] is by_columns


def test_a_clone_that_learns_from_rewards_keeps_what_it_was_cloned_on(tmp_path: Path) -> None:
    about = {"sentences": ["go"], "views": ["top"], "contract": ActionContract(NAMES, 5.0).to_dict()}
    write_policy(tmp_path / "policy", ToyPolicy(width=16), about)
    begun = L(ToyPolicy)(width=16, path=str(tmp_path / "policy"))
    learns = VLAGRPOModel(VLAGRPOConfig(policy=begun, env=L(ToyEnv)(num_envs=2), rl=VLARLConfig(group_size=2))).policy
    assert (learns.sentences, learns.views) == (("go",), ("top",))
    assert learns.contract == ActionContract(NAMES, 5.0)
    assert about.items() <= about_of(str(tmp_path / "policy")).items()


def test_the_card_of_a_policy_records_how_its_environment_clipped_actions(tmp_path: Path) -> None:
    write_policy(tmp_path / "begun", ToyPolicy(width=16), {"contract": ActionContract(NAMES, 5.0).to_dict()})
    policy = {"_target_": "cosmos_predict2.rl.policies.toy.ToyPolicy", "path": str(tmp_path / "begun")}
    for clips, known in (("recorded", {"clip_actions": "recorded"}), (True, {"clip_actions": True}), (False, {})):
        config = {"model": {"config": {"policy": policy, "env": {"clip_actions": clips}}}}
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        contract = about_of(str(tmp_path))["contract"]
        assert contract == ActionContract(NAMES, 5.0).to_dict() | known
        assert ActionContract.read(contract).clip_actions == clips
