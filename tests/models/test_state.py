# SPDX-License-Identifier: Apache-2.0
"""The robot's state beside the pictures: learnt from recordings, and shown to policies in imagination."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.action_conditioned.dataset_libero import LiberoDataset, read_proprio
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.nn.action_dit import FlatActionDiT
from cosmos_predict2.nn.state_head import StateHead, StateTrail
from cosmos_predict2.rl.envs.first_frames import GivenStarts
from cosmos_predict2.rl.envs.replays import ZeroReward
from cosmos_predict2.rl.envs.world_model import WorldModelEnv, require_inputs
from cosmos_predict2.rl.interfaces import PolicyDefaults
from cosmos_predict2.rl.policies.cloning import CloneStart, begin
from cosmos_predict2.rl.policies.recorded_windows import RecordedWindows
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.training.preflight import check_launch
from tests.data.sources_libero import libero_tree
from tests.models.parts import LIMITS, NET
from tests.models.test_action_model import action_batch, make_model

RANGE = [[-2.0, 2.0], [0.0, 10.0], [3.0, 3.0]]  # the last one never changed


def with_state(**more: Any) -> Any:
    return make_model(net=dict(action_dim=3, state_range=RANGE), **more)


def batch_of(size: int = 2) -> dict[str, Any]:
    """The first number of the state is half the sum of the first action's; the second goes down."""
    batch = action_batch(size)
    batch["action"] = batch["action"].clamp(-0.5, 0.5)
    moved = torch.nn.functional.pad(batch["action"][..., 0].cumsum(1), (1, 0)) / 2
    state = torch.stack([moved, 9 - torch.arange(9.0).expand(size, -1), torch.full((size, 9), 3.0)], dim=2)
    return {**batch, "state": state}


def test_a_head_begins_by_leaving_the_state_and_knows_the_range() -> None:
    head = StateHead(3, 16, RANGE)
    torch.nn.init.zeros_(head.leave.weight)
    torch.nn.init.zeros_(head.leave.bias)
    state = torch.tensor([[1.0, 2.5, 3.0]])
    found = head(torch.randn(1, 16, 3, 6, 8), state, torch.randn(1, 8, 3))
    assert torch.allclose(found, state[:, None].expand(-1, 8, -1), atol=1e-6)
    assert head.scaled(state).tolist() == [[0.5, -0.5, 0.0]]
    assert head.error(torch.tensor([2.0, 0.0, 3.0]), torch.tensor([-2.0, 5.0, 3.0])).tolist() == [1.0, 0.5, 0.0]


def test_the_range_keeps_its_precision_in_a_network_of_another() -> None:
    head = StateHead(3, 16, [[1000.0, 1001.0], [0.995, 1.0]]).to(torch.bfloat16)
    assert torch.allclose(head.scaled(torch.tensor([[1000.75, 0.9975]])), torch.tensor([[0.5, 0.0]]), atol=1e-3)
    found = head(torch.randn(1, 16, 2, 8, 8), torch.tensor([[1000.5, 0.9975]]), torch.randn(1, 4, 3))
    assert found.dtype == torch.float32 and float(found.detach()[..., 0].std()) > 0


def test_each_action_reaches_the_states_behind_it_alone() -> None:
    head = StateHead(3, 16, RANGE)
    latents, actions = torch.randn(1, 16, 3, 8, 8), torch.randn(1, 8, 3)
    other = actions.clone()
    other[:, 4:] += 1
    same, differs = (head(latents, torch.zeros(1, 3), rows) for rows in (actions, other))
    assert torch.equal(same[:, :4], differs[:, :4])
    assert not torch.allclose(same[:, 4:, :2], differs[:, 4:, :2])


def test_the_state_is_learnt_beside_the_pictures() -> None:
    model, batch = with_state(), batch_of(4)
    optimizer = torch.optim.Adam(model.net.state_head.parameters(), 3e-3)
    errors = []
    for _ in range(60):
        output, loss = model.training_step(batch, 0)
        errors.append(float(output["state_error"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert errors[-1] < 0.03 < errors[0], errors[:: len(errors) - 1]


def test_what_is_predicted_is_the_state_behind_each_action(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = with_state(), batch_of()
    seen: list[Tensor] = []

    def truth(latents: Tensor, state_B_S: Tensor, actions: Tensor) -> Tensor:
        seen.append(state_B_S)
        return batch["state"][:, 1:]

    monkeypatch.setattr(model.net.state_head, "forward", truth)
    output, _ = model.training_step(batch, 0)
    assert float(output["state_error"]) == 0 and torch.equal(seen[0], batch["state"][:, 0])


def test_the_state_is_cut_with_its_clip() -> None:
    model, batch = with_state(), batch_of()
    longer = {**action_batch(frames=13), "state": torch.arange(13.0)[None, :, None].expand(2, -1, 3)}
    longer["video"] = torch.arange(13, dtype=torch.uint8)[None, None, :, None, None].expand(2, 3, -1, 32, 32)
    cut = model._cut(longer, model._generators(longer, "train"))
    assert torch.equal(cut["state"][:, :, 0], cut["video"][:, 0, :, 0, 0].float())
    assert batch["state"].shape == cut["state"].shape == (2, 9, 3)


@pytest.mark.parametrize("state", [None, torch.zeros(2, 9, 2), torch.zeros(2, 8, 3)], ids=["none", "narrow", "short"])
def test_a_batch_without_the_state_is_refused(state: Tensor | None) -> None:
    batch = {key: value for key, value in batch_of().items() if key != "state"} | (
        {} if state is None else {"state": state}
    )
    with pytest.raises(DataError, match=r"predicts 3 numbers of the robot's state.*\[clips, 9, 3\].*dataset.state"):
        with_state().training_step(batch, 0)


def test_weights_without_a_head_are_a_start_and_all_else_is_theirs(tmp_path: Path) -> None:
    released = make_model("chunk")
    save_file({f"net.{name}": value for name, value in released.net.state_dict().items()}, tmp_path / "w.safetensors")
    model = with_state(dit_path=str(tmp_path / "w.safetensors"), action_transform=None)
    for name, value in released.net.named_parameters():
        assert torch.equal(value, model.net.get_parameter(name)), name
    assert not model.net.state_head.leave.bias.any()
    assert model.net.state_head.look.weight.any()


def test_a_flat_network_must_know_the_size_of_an_action() -> None:
    with pytest.raises(ValueError, match="state_range needs the size of one action: set num_action_per_chunk"):
        FlatActionDiT(action_dim=24, state_range=RANGE, **LIMITS, **NET)
    net = FlatActionDiT(action_dim=3, num_action_per_chunk=8, state_range=RANGE, **LIMITS, **NET)
    assert net.state_head is not None
    with pytest.raises(ValueError, match="the lowest and the highest"):
        StateHead(3, 16, [[1.0, 0.0]])


# Recordings -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    writer = Writer(folder, fps=10, robot="arm")
    for i in range(3):
        state = numpy.arange(20 * 2, dtype=numpy.float32).reshape(20, 2) + 100 * i
        columns = {"action": numpy.ones((20, 3), numpy.float32), "observation.state": state}
        pictures = torch.randint(0, 255, (3, 20, 48, 48), dtype=torch.uint8)
        writer.add(Recording(columns, {"observation.images.front": pictures}, "push"))
    writer.finish()
    return folder


def test_samples_have_the_state_at_their_frames(recordings: Path) -> None:
    data = LeRobotActionDataset(str(recordings), num_frames=5, video_size=(48, 48), data_split="full", stride=2,
                                combine_actions="last", state="observation.state", text_width=8)  # fmt: skip
    assert data[12]["state"].tolist() == [[100 + 2 * k, 101 + 2 * k] for k in (0, 2, 4, 6, 8)]
    assert "state" not in LeRobotActionDataset(str(recordings), num_frames=5, video_size=(48, 48), text_width=8)[0]
    facts = LeRobotActionDataset.facts(dict(root=str(recordings), state="observation.state"))
    assert facts.read_state_range is not None and facts.read_state_range() == [[0.0, 238.0], [1.0, 239.0]]
    with pytest.raises(ConfigError, match=r"there is no state 'observation.stat'.*observation.state"):
        LeRobotActionDataset(str(recordings), num_frames=5, video_size=(48, 48), text_width=8, state="observation.stat")


def test_a_state_whose_range_is_not_known_is_refused_before_a_network_without_a_head_learns(tmp_path: Path) -> None:
    writer = Writer(tmp_path, fps=10, robot="arm")
    for i in range(3):
        state = numpy.full((20, 2), numpy.nan if i == 1 else 0, dtype=numpy.float32)
        columns = {"action": numpy.ones((20, 3), numpy.float32), "observation.state": state}
        writer.add(Recording(columns, {"observation.images.front": torch.zeros(3, 20, 48, 48, dtype=torch.uint8)}, ""))
    writer.finish()
    base, wanted = "cosmos_predict2/configs/base/config.py", "model.config.pipe_config.state=observation.state"
    root = f"dataloader_train.dataset.root={tmp_path}"
    with pytest.raises(UserError, match=r"1 of 3 recordings have numbers that are not finite, first 1"):
        check_launch(compose(base, ["experiment=world_model_recordings", wanted, root]))
    with pytest.raises(UserError, match=r"the network's state_range is empty\. Set \+model\.config\.pipe_config\.net"):
        check_launch(compose(base, ["experiment=predict2_video2world_tiny_action_conditioned_training", wanted]))


def test_liberos_and_bridges_layouts_have_a_state_too(tmp_path: Path) -> None:
    root = str(libero_tree(tmp_path / "libero"))
    data = LiberoDataset(root, num_frames=5, video_size=(48, 48), stride=2, state="proprio", text_width=8)
    assert data[0]["state"].shape == (5, 8)
    assert torch.equal(data[0]["state"], torch.tensor(read_proprio(data.source.demo(0))[0:10:2], dtype=torch.float32))
    write_folder(
        str(tmp_path / "bridge"), ToyFolder(episodes=4, frames=15, val_fraction=0.25, form="bridge", action_dim=4)
    )
    place = dict(train_annotation_path=f"{tmp_path}/bridge/annotation/train", video_path=f"{tmp_path}/bridge")
    bridge = ActionConditionedDataset(**place, num_frames=5, video_size=(48, 48), state="pose", text_width=8)
    assert torch.equal(bridge[1]["state"], torch.tensor(bridge.source.recordings.poses(0)[1:6], dtype=torch.float32))
    for facts in (
        LiberoDataset.facts(dict(root=root, state="proprio")),
        ActionConditionedDataset.facts(dict(place, state="pose")),
    ):
        ends = torch.tensor(facts.read_state_range())
        assert bool((ends[:, 0] <= ends[:, 1]).all()) and len(ends) in (7, 8)
    own: Any = dict(num_frames=5, video_size=(48, 48))
    named = LiberoDataset(root, **own, stride=2, state="gripper_states+ee_pos", text_width=8)
    assert torch.equal(named[1]["state"], data[1]["state"][:, [6, 7, 0, 1, 2]])
    assert len(LiberoDataset.facts(dict(root=root, state="ee_ori")).read_state_range()) == 3
    with pytest.raises(DataError, match=r"demo_0 has no 'obs/grippers'.*gripper_states"):
        LiberoDataset(root, **own, state="ee_pos+grippers")
    with pytest.raises(DataError, match=r"has agentview_rgb \[.*tables \[T, S\]"):
        LiberoDataset(root, **own, state="agentview_rgb")


def test_validation_data_without_the_state_are_refused_before_training(tmp_path: Path) -> None:
    root, experiment = libero_tree(tmp_path), "predict2_video2world_tiny_action_conditioned_training"
    groups = ["dataloader_train", "dataloader_val"]
    data = [f"{key}=libero_hdf5_{key[11:]}" for key in groups] + [f"{key}.dataset.root={root}" for key in groups]
    pipe, state = "model.config.pipe_config", "dataloader_train.dataset.state=proprio"
    own = [f"{pipe}.state=proprio", f"{pipe}.net.action_dim=7", state]
    own += [f"+{pipe}.net.state_range=${{recorded_state_range:}}"]
    config = compose("cosmos_predict2/configs/base/config.py", [f"experiment={experiment}", *data, *own])
    with pytest.raises(UserError, match=r"dataloader_val\.dataset\.state: empty, but the model predicts proprio\. Set"):
        check_launch(config)


# Imagination ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imagination() -> Imagination:
    found = imagination_of(device="cpu")
    torch.manual_seed(0)
    found.world.net.state_head = StateHead(4, 16, RANGE[:2]).eval().requires_grad_(False)
    return found


def environment(imagination: Imagination, states: Tensor | None, **options: Any) -> WorldModelEnv:
    torch.manual_seed(1)
    starts = GivenStarts(torch.randint(0, 255, (3, 48, 48, 3), dtype=torch.uint8), states_E_S=states)
    return WorldModelEnv(imagination, starts, ZeroReward(), 3, 24, **options)


STATES = torch.tensor([[0.5, 1.0], [-1.0, 4.0], [1.5, 9.0]])


def test_policies_see_the_state_that_follows_from_the_one_of_the_start(imagination: Imagination) -> None:
    env = environment(imagination, STATES)
    begin = dict(trial_ids=range(3), seeds=range(3))
    observation, _ = env.reset(options=begin)
    assert torch.equal(observation["state"], STATES)
    actions = torch.rand(3, 12, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    first, *_ = env.chunk_step(actions)
    saved = env.get_state()
    second, *_ = env.chunk_step(actions)
    assert not torch.allclose(first["state"], STATES) and not torch.allclose(second["state"], first["state"])
    again = environment(imagination, STATES)
    again.load_state(saved)
    resumed, *_ = again.chunk_step(actions)
    assert torch.equal(resumed["state"], second["state"])

    alone = environment(imagination, STATES)
    alone.reset(options=begin)
    short, *_ = alone.chunk_step(actions[1:2], [1], execute=7)
    trail = StateTrail(imagination.state_head, STATES[1:2])
    imagination.generate_actions(
        alone.starts.starts([0], [1]).pictures_E_F_H_W_C.permute(0, 4, 1, 2, 3), imagination.transformed(actions[1:2]),
        [1], alone.sampling, trail=trail,
    )  # fmt: skip
    assert torch.allclose(short["state"], trail.step([7]), atol=1e-5)  # after the last action that was done


def test_two_noises_have_a_state_each_and_the_policy_sees_the_first(imagination: Imagination) -> None:
    actions = torch.rand(3, 12, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = []
    for num_noises in (1, 2):
        env = environment(imagination, STATES, num_noises=num_noises)
        env.reset(options=dict(trial_ids=range(3), seeds=range(3)))
        found.append(env.chunk_step(actions)[0]["state"])
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert env._states.shape == (2, 3, 2) and not torch.equal(*env._states)


def test_a_policy_that_reads_the_state_may_act_in_a_world_model_that_shows_it(imagination: Imagination) -> None:
    reads = PolicyDefaults()
    reads.reads_state = True
    require_inputs(environment(imagination, STATES), reads)
    with pytest.raises(DataError, match="predicts 2 numbers of the robot's state, but the starts have 3"):
        environment(imagination, torch.zeros(3, 3)).reset()
    env = environment(imagination, None, state_size=5)
    blind, _ = env.reset()
    assert blind["state"].shape == (3, 2)
    require_inputs(env, reads)
    with pytest.raises(DataError, match=r"PolicyDefaults reads the robot's state, .* but these starts have none"):
        env.reset()


# Clones ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["pi05.policy:Pi05Policy", "openvla.policy:OpenVLAPolicy"])
def test_a_clone_reads_the_state_of_recordings_and_of_imagination(
    policy: str, recordings: Path, imagination: Imagination, tmp_path: Path
) -> None:
    data = RecordedWindows(str(recordings), chunk=4, state=True)
    item = data[3]
    assert item["state"].tolist() == [6.0, 7.0]
    clone = begin(f"cosmos_predict2.rl.policies.{policy}", CloneStart(data.windows, tmp_path, 0, 4, 4), {}, "")
    assert clone.reads_state
    windows = data.demonstrations.windows(4, [0, 8])
    record = clone.record_of(windows.observation, windows.actions_B_A_D)
    assert float(clone.cloning_loss(record, torch.Generator().manual_seed(0))) > 0
    elsewhere = {**windows.observation, "state": windows.observation["state"] + 40}
    shown = (clone.record_of(seen, windows.actions_B_A_D) for seen in (windows.observation, elsewhere))
    first, second = ({name: value for name, value in one.items() if name in ("tokens", "proprio")} for one in shown)
    assert any(not torch.equal(value, second[name]) for name, value in first.items())

    env = environment(imagination, STATES)
    require_inputs(env, clone)
    observed, _ = env.reset()
    assert clone.act(observed, mode="greedy", generators=[torch.Generator()] * 3).actions_E_A_D.shape == (3, 4, 3)
    with pytest.raises(ConfigError, match="state"):
        clone.act({**observed, "state": torch.zeros(3, 0)}, mode="greedy", generators=[torch.Generator()] * 3)


@pytest.mark.parametrize("policy", ["pi05.policy:Pi05Policy", "openvla.policy:OpenVLAPolicy"])
def test_a_clone_reads_two_views_and_the_state_together(policy: str, imagination: Imagination, tmp_path: Path) -> None:
    writer, cameras = Writer(tmp_path / "both", fps=10, robot="arm"), ("front", "wrist")
    state = numpy.arange(18, dtype=numpy.float32).reshape(9, 2)
    columns = {"action": numpy.ones((9, 3), numpy.float32), "observation.state": state}
    pictures = torch.randint(0, 255, (2, 3, 9, 24, 48), dtype=torch.uint8)
    writer.add(Recording(columns, {f"observation.images.{name}": p for name, p in zip(cameras, pictures)}, "push"))
    writer.finish()
    data = RecordedWindows(str(tmp_path / "both"), camera="+".join(cameras), chunk=4, state=True, held_out_share=0)
    start = CloneStart(data.windows, tmp_path, 0, 4, 4)
    clone = begin(f"cosmos_predict2.rl.policies.{policy}", start, {}, "")
    env = environment(Imagination(imagination.world, cameras), STATES)
    require_inputs(env, clone)
    observed, _ = env.reset()
    assert observed["wrist_image"].shape == (3, 1, 24, 48, 3)
    decided = clone.act(observed, mode="greedy", generators=[torch.Generator()] * 3)
    assert decided.actions_E_A_D.shape == (3, 4, 3)
    for name, other in (("wrist_image", 255 - observed["wrist_image"]), ("state", observed["state"] + 40)):
        changed = clone.act({**observed, name: other}, mode="greedy", generators=[torch.Generator()] * 3)
        assert any(not torch.equal(value, changed.record[key]) for key, value in decided.record.items()), name


def test_recordings_without_a_state_cannot_give_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "blind", fps=10, robot="arm")
    pictures = torch.zeros(3, 9, 48, 48, dtype=torch.uint8)
    writer.add(Recording({"action": numpy.ones((9, 3), numpy.float32)}, {"observation.images.front": pictures}, "go"))
    writer.finish()
    with pytest.raises(DataError, match=r"no state of the robot: leave dataset\.state=False"):
        RecordedWindows(str(tmp_path / "blind"), chunk=4, state=True, held_out_share=0)
