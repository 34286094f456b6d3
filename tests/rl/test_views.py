# SPDX-License-Identifier: Apache-2.0
"""Two views of a world model: what policies see in imagination, what they were cloned on, and what does not fit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.envs.contract import check_environment
from cosmos_predict2.rl.envs.first_frames import GivenStarts, SimulatedStarts
from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStarts
from cosmos_predict2.rl.envs.replays import replayed
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv, require_inputs
from cosmos_predict2.rl.episodes.config import RefinementConfig
from cosmos_predict2.rl.episodes.episodes import LocalRollout, require_views
from cosmos_predict2.rl.episodes.policy_evaluation import film, held_out_starts
from cosmos_predict2.rl.episodes.refinement import Refinement, open_recorded_phase
from cosmos_predict2.rl.interfaces import PolicyDefaults
from cosmos_predict2.rl.policies.cloning import CloneStart, begin
from cosmos_predict2.rl.policies.files import read_policy, write_policy
from cosmos_predict2.rl.policies.null import NullPolicy
from cosmos_predict2.rl.policies.recorded_windows import RecordedWindows
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import ConfigError, DataError
from scripts import make_reset_states
from tests.data.lerobot_files import write_random
from tests.rl.vla_runs import Brightness, run
from tests.training import run_dir, saved, train

SIDE, VIEWS = 32, ("front", "wrist")
BOTH = "+".join(VIEWS)


@pytest.fixture(scope="module")
def world() -> Imagination:
    return Imagination(imagination_of(device="cpu").world, VIEWS)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of two cameras, the second of other pictures."""
    return write_random(tmp_path_factory.mktemp("recordings") / "my_data", 4, VIEWS, SIDE)


def environment(world: Imagination, starts: Any, num_envs: int = 3) -> WorldModelEnv:
    return WorldModelEnv(world, starts, Brightness(), num_envs, 24, keep_frames=True)


def test_policies_see_the_rows_of_each_view_and_the_reward_all(world: Imagination) -> None:
    pictures = torch.randint(0, 255, (12, 2 * SIDE, SIDE, 3), dtype=torch.uint8)
    env = environment(world, GivenStarts(pictures))
    observed, _ = env.reset(options={"trial_ids": range(3), "seeds": range(3)})
    assert torch.equal(observed["full_image"], pictures[:3, :SIDE])
    assert observed["wrist_image"].shape == (3, 1, SIDE, SIDE, 3)
    assert torch.equal(observed["wrist_image"][:, 0], pictures[:3, SIDE:])
    chunk = torch.rand(3, 12, 4)
    observed, *_, info = env.chunk_step(chunk)
    last = info["frames"][:, -1]
    assert torch.equal(observed["full_image"], last[:, :SIDE])
    assert torch.equal(observed["wrist_image"][:, 0], last[:, SIDE:])
    assert env.reward.shown[-1].shape[2:] == (2 * SIDE, SIDE, 3)
    actions = chunk.clamp(-1, 1)
    assert torch.equal(replayed(world, pictures[:3], actions, seeds=range(3))[:, -1], last)
    shown = film(env, held_out_starts(3, 1, 0), torch.rand(2, 3, 12, 4))
    assert shown.shape == (3, 3, 25, 2 * SIDE, SIDE)
    check_environment(environment(world, GivenStarts(pictures, ["go"] * 12)), picture_levels=1)


@pytest.mark.parametrize("kind", ["pi05", "openvla_oft"])
def test_a_clone_of_two_views_plays_in_the_imagination_of_both(
    kind: str, world: Imagination, recordings: Path, tmp_path: Path
) -> None:
    pytest.importorskip("sentencepiece" if kind == "pi05" else "transformers", reason="needs pip install -e '.[vla]'")
    data = RecordedWindows(str(recordings), camera=BOTH, chunk=4)
    windows = data.windows
    assert data[0]["full_image"].shape == (2 * SIDE, SIDE, 3) and windows.views == VIEWS
    start = CloneStart(windows, tmp_path / "drawn", 0, 4, 2)
    start.folder.mkdir()
    policy = begin(kind, start, {}, "")
    items = [data[k] for k in range(2)]
    some = type(windows)(
        torch.stack([one["full_image"] for one in items]),
        torch.stack([one["actions"] for one in items]),
        ["go", "go"],
        VIEWS,
    )
    record = policy.record_of(some.observation, some.actions_B_A_D)
    shown = record["images" if kind == "pi05" else "pixels"]
    assert shown.shape[1] == 2 and not torch.equal(shown[:, 0], shown[:, 1])
    assert policy.cloning_loss(record, torch.Generator().manual_seed(0)).isfinite()
    write_policy(tmp_path / "policy", policy, {"sentences": ["go"], "views": list(windows.views)})
    found, _ = read_policy(str(tmp_path / "policy"))
    assert found.views == VIEWS

    path = tmp_path / "starts"
    make_reset_states.run(make_reset_states.parser.parse_args(
        ["--dataset", str(recordings), "--camera", BOTH, "--out", str(path)]
    ))  # fmt: skip
    starts = RecordedStarts(str(path / FILE), size=(SIDE, SIDE))
    env = environment(world, starts)
    require_inputs(env, found)
    played = LocalRollout(found, env, keep_frames=True).collect(held_out_starts(3, 1, 0), "greedy")
    assert played.frames_E_F_H_W_C is not None and played.frames_E_F_H_W_C.shape[2:] == (2 * SIDE, SIDE, 3)
    observed, _ = env.reset(options={"trial_ids": range(3), "seeds": range(3)})
    with pytest.raises(ConfigError, match=r"P has 2 views \(front\+wrist\), but the environment shows 1"):
        require_views("P", found.views, {**observed, "wrist_image": observed["wrist_image"][:, :0]})


def test_a_policy_that_sees_nothing_needs_no_camera(recordings: Path) -> None:
    assert read_policy(f"null:still:{recordings}")[0].chunk == 12


def test_frames_of_other_views_and_a_state_that_nobody_shows_are_refused(world: Imagination) -> None:
    class OfOneView(ToyEnv):
        def _film(self, *given: Any) -> Any:
            return super()._film(*given)[:, :, :48]

    env, wanders = OfOneView(2, "covered", ["reach_ring"], keep_frames=True), NullPolicy("mean", torch.zeros(1, 12, 4))
    env.views = VIEWS
    found = r'OfOneView: info\["frames"\] has pictures \[48, 48, 3\], but \[96, 48, 3\] are those of 2 views'
    with pytest.raises(ConfigError, match=found):
        LocalRollout(wanders, env, keep_frames=True).collect(held_out_starts(2, 1, 0))
    whole: Any = SimpleNamespace(refinement=RefinementConfig(optimizer={}), rl=None)
    predicts: Any = SimpleNamespace(world=SimpleNamespace(net=SimpleNamespace(state_head=object())))
    with pytest.raises(ConfigError, match=r"predicts the robot's state.*true_env.*refinement.recordings"):
        Refinement.of(whole, predicts, environment(world, GivenStarts(torch.zeros(3, 64, 32, 3).byte())), env)


def test_a_phase_of_the_robot_is_read_in_the_views_of_the_world_model(world: Imagination, tmp_path: Path) -> None:
    write_random(tmp_path / "phase_002", 4, VIEWS, SIDE)
    env = environment(world, GivenStarts(torch.zeros(3, 2 * SIDE, SIDE, 3, dtype=torch.uint8)))
    given: Any = ("RUN", env, 5, (2 * SIDE, SIDE))
    four, five = (RefinementConfig(recordings=str(tmp_path), episodes=count) for count in (4, 5))
    video = open_recorded_phase(four, 2, *given)[0]["video"]
    assert video.shape == (3, 5, 2 * SIDE, SIDE) and not torch.equal(*video.chunk(2, dim=2))
    with pytest.raises(DataError, match=r"phase_002 has 4 of 5 .*--first 200000"):
        open_recorded_phase(five, 2, *given)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["observation.state", pytest.param("", marks=pytest.mark.long)])
def test_a_world_model_of_two_views_is_refined_by_what_both_show(state: str, tmp_path: Path) -> None:
    """By recordings with the robot's state, or without it in a simulator; an earlier phase and old data stay."""
    side = SIDE if state else 48  # the smallest table
    data, robot = (tmp_path / name for name in ("data", "robot"))
    write_random(data, 4, VIEWS, side, 3 if state else 0)
    own = [f"root={data}", "split_file=null", "data_split=full", f"camera={BOTH}", f"video_size=[{side},{side}]"]
    words = ["experiment=world_model_recordings", "job.name=world", "trainer.max_iter=1"]
    words += ["trainer.callbacks.stop_rule=null", f"model.config.pipe_config.state={state}"]
    words += [f"dataloader_train.dataset.{one}" for one in own]
    words += ["trainer.run_validation=false", "trainer.callbacks.draw_samples=null"]
    words += ["model.config.pipe_config.tokenizer.weights=null", "model.config.pipe_config.net.num_blocks=1"]
    assert train(tmp_path, words, config="cosmos_predict2/configs/base/config.py") == 0
    words = ["--dataset", str(data), "--camera", BOTH, "--out", f"{tmp_path}/starts"]
    make_reset_states.run(make_reset_states.parser.parse_args(words))
    (world,) = tmp_path.glob("*/*/world")
    words = [f"model.config.world_model.dit_path={world}", f"model.config.env.starts.path={tmp_path}/starts"]
    words += [f"model.config.refinement.{word}" for word in ("every=1", "episodes=4", "steps=2", "keep=8", "newest=1")]
    words += ["model.config.refinement.earlier=1", "model.config.refinement.old=1", "dataloader_train.batch_size=2"]
    words += ["model.config.allow_unchecked=true", "trainer.run_validation=false", "trainer.logging_iter=1"]
    words += ["model.config.rl.group_size=2", "model.config.rl.minibatches=1", "trainer.max_iter=7"]
    if state:
        for phase in (1, 2):
            write_random(robot / f"phase_00{phase}", 4, VIEWS, side, 3)
        words.append(f"model.config.refinement.recordings={robot}")
    else:
        simulator = "_target_:cosmos_predict2.rl.envs.toy.ToyEnv,num_envs:2,setting:covered,tasks:[reach_ring]"
        words.append(f"++model.config.true_env={{{simulator},size:{side},num_steps:12,keep_frames:true}}")
        words.append("model.config.refinement.recordings=null")
    records = run(tmp_path, *words, name="of_views")
    of_world = [record for record in records if "train/world_model_loss" in record]
    assert len(of_world) >= 4
    card = read_card(str(run_dir(tmp_path, "vla")))  # of the world model in the policy's run
    assert card.views == VIEWS and card.video_size == (side, side)
    windows = saved(tmp_path, "vla")["model"]
    latents = windows["refinement.windows.newest_latents"]
    assert latents.shape[-2:] == (2 * side // 8, side // 8)
    assert not torch.equal(*latents.chunk(2, dim=-2))
    assert windows["refinement.windows.counts"].tolist() == [4, 4 if state else 8]  # a simulator plays phase 0, too
    assert ("refinement.windows.newest_states" in windows) == bool(state)


def test_other_views_of_world_model_policy_or_starts_are_refused_by_name(world: Imagination, recordings: Path) -> None:
    one, pictures = Imagination(world.world), torch.zeros(3, 2 * SIDE, SIDE, 3, dtype=torch.uint8)
    two_views, one_view = PolicyDefaults(), PolicyDefaults()
    two_views.views, one_view.views = VIEWS, ("front",)
    for env, policy in ((one, two_views), (world, one_view)):
        with pytest.raises(ConfigError, match=r"2 views \(front\+wrist\).*clone it anew"):
            require_inputs(environment(env, GivenStarts(pictures)), policy)
    require_inputs(environment(one, GivenStarts(pictures)), one_view)
    starts = SimpleNamespace(views=("",), history=1, num_tasks=1, recorded=None, size=None)
    with pytest.raises(ConfigError, match=r"The world model has 2 views .*the starts have 1 view.*make_reset_states"):
        environment(world, starts)
    shows_one = {"full_image": pictures, "wrist_image": pictures.new_zeros(3, 0, 2 * SIDE, SIDE, 3)}
    simulator = SimpleNamespace(num_envs=3, reset=lambda options: ({**shows_one, "task_description": ["go"] * 3}, {}))
    with pytest.raises(ConfigError, match=r"has 2 views, but the environment shows 1.*\?wrist=CAMERA"):
        SimulatedStarts(simulator, 1, num_views=2).starts([0], [0])
