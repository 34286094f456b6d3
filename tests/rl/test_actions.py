# SPDX-License-Identifier: Apache-2.0
"""Models with actions that learn from rewards: what is read from a clip is what was commanded; two iterations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.models.own_frames import FRAMES_KEY, passes_of
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.own_frames import OwnFramesRLModel
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.action_following import ActionFollowing
from cosmos_predict2.rl.rewards.toy import CommandedPath
from imaginaire.config import lazy_config
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError, DataError, UserError
from tests.rl.runs import CONFIG, LEVELS, NAME, RL, SHORT, STEPS, run
from tests.training import difference, losses, saved, train

NUM = 16


def _world(seed: int, num_episodes: int) -> ToyWorldVideos:
    return ToyWorldVideos(num_episodes=num_episodes, mix="wander", start=2, captions=False, num_tokens=1, seed=seed)


@pytest.fixture(scope="module")
def true() -> tuple[Tensor, Tensor]:
    data = _world(1, NUM)
    return torch.stack([data[i]["video"] for i in range(NUM)]), torch.stack([data[i]["action"] for i in range(NUM)])


@pytest.fixture(scope="module")
def rewards() -> dict[str, Any]:
    return {"regression": ActionFollowing(_world(0, 64), num_clips=64), "detector": CommandedPath()}


def _score(reward: Any, video: Tensor, action: Tensor, given: int = 1) -> Tensor:
    context = dict(actions=action, num_conditional_frames=torch.full((len(video),), given))
    found = reward(Clips(None, video, [""] * len(video), 10.0), context)
    value: Tensor = found["value"] if isinstance(found, dict) else found
    assert value.shape == (len(video),) and value.isfinite().all()
    return value


@pytest.mark.parametrize("name", ["regression", "detector"])
def test_clips_that_follow_their_actions_are_better(
    name: str, rewards: dict[str, Any], true: tuple[Tensor, Tensor]
) -> None:
    video, action = true
    own = _score(rewards[name], video, action)
    still = video[:, :, :1].expand_as(video).contiguous()
    for other in (_score(rewards[name], video, action.roll(1, 0)), _score(rewards[name], still, action)):
        assert (own > other).float().mean() > 0.9 and own.mean() > other.mean() / 2


def test_the_gripper_of_a_true_clip_is_where_its_actions_lead(
    rewards: dict[str, Any], true: tuple[Tensor, Tensor]
) -> None:
    assert _score(rewards["detector"], *true).mean() > -0.2  # pixels, walls among them


@pytest.mark.parametrize("name", ["regression", "detector"])
def test_conditioning_frames_do_not_count(name: str, rewards: dict[str, Any], true: tuple[Tensor, Tensor]) -> None:
    video, action = true
    changed = action.clone()
    changed[:, :4] = -changed[:, :4]  # the actions of the second latent frame
    score = {given: _score(rewards[name], video, changed, given) for given in (1, 2)}
    assert torch.equal(score[2], _score(rewards[name], video, action, 2)) and score[1].mean() < score[2].mean()


def test_what_a_regression_cannot_be_fitted_to_is_refused() -> None:
    for data, num in ((_world(0, 4), 8), (_world(0, 16), 4)):
        with pytest.raises(ConfigError, match="num_clips"):
            ActionFollowing(data, num_clips=num)
    item = {"video": torch.zeros(3, 13, 48, 48, dtype=torch.uint8), "action": torch.zeros(12, 4)}
    wrong = {
        "the same": [item] * 8,
        "no 'action'": [{"video": item["video"]}] * 8,
        "one size": [*[item] * 7, {**item, "action": torch.zeros(8, 4)}],
    }
    for told, items in wrong.items():
        with pytest.raises(DataError, match=told):
            ActionFollowing(items, num_clips=8)
    with pytest.raises(DataError, match="actions"):
        CommandedPath()(Clips(None, torch.zeros(1, 3, 5, 48, 48), [""], 10.0), {"num_conditional_frames": [1]})


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "batches"), [("flow_grpo", 8), pytest.param("nft", 4, marks=pytest.mark.long)])
def test_a_model_with_actions_learns_from_first_frames_and_actions(
    objective: str, batches: int, tmp_path: Path
) -> None:
    options = [item for item in SHORT if "sample_steps" not in item]
    records = run(
        tmp_path, f"experiment=tiny_{objective}_action_toy_world", *options, f"trainer.grad_accum_iter={batches}",
        f"+{RL}.rewards.following.make={{_target_: tests.rl.test_actions.following}}",
    )  # fmt: skip
    first = records[0]
    assert first["train/path_valid_rate"] == first["train/following_valid_rate"] == 1 and first["train/grad_norm"] > 0
    assert objective == "nft" or (first["train/log_prob_ratio"], first["train/ratio_std"]) == (1.0, 0.0)


def following() -> ActionFollowing:
    return ActionFollowing(_world(0, 16), num_clips=16)


OWN = "model.config.own_frames"
SMALL = [*SHORT, f"{OWN}.minibatch=2", f"{OWN}.chunks=2", "dataloader_train.dataset.num_frames=25"]


def options(name: str) -> list[str]:
    return [f"experiment=tiny_{name}_long_horizon", *SMALL, *(LEVELS if name == "nft" else STEPS)]


def test_branches_share_an_imagined_history_and_compare_with_the_true_future() -> None:
    config = compose(CONFIG, [*options("nft"), f"{OWN}.share=1.0"])
    model = lazy_config.instantiate(config.model)
    assert isinstance(model, OwnFramesRLModel)
    loader = lazy_config.instantiate(config.dataloader_train)
    model.on_data(loader)
    model.on_train_start()
    first, second = list(model.own_frames.parts([next(iter(loader))]))
    assert FRAMES_KEY not in first
    found = model.collect(second)
    record, rows_B = found.record, found.record.samples.rows_B
    given = model.world.encode(second[FRAMES_KEY])
    assert rows_B.tolist() == [0, 0, 1, 1]
    assert torch.equal(record.conditions[0].gt_frames_B_C_T_H_W[:, :, :1], given.to(torch.float32))
    true = model.world.encode(second["video"])
    assert torch.allclose(found.record.true_latents[:, :, 1:], true[:, :, 1:])
    assert torch.equal(record.samples.final[:, :, :1], given[rows_B])
    model._is_open, model.own_frames.left = True, 0
    assert not model.at_boundary(), "batches of the experience are still to come"
    own, plain = (cls.passes(config.model.config, 2) for cls in (OwnFramesRLModel, FlowGRPOModel))
    assert (own.clips, own.batch_key) == (4, plain.batch_key)
    assert own.rollout - plain.rollout == passes_of(model.config.own_frames).rollout / 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["nft", "flow_grpo"])
def test_a_run_by_rewards_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, [*options(name), "trainer.max_iter=4"], config=CONFIG) == 0
    assert train(parts, [*options(name), "trainer.max_iter=2"], config=CONFIG) == 0
    assert train(parts, [*options(name), "trainer.max_iter=4"], config=CONFIG) == 0
    assert difference(saved(whole, NAME), saved(parts, NAME)) is None
    assert losses(whole, NAME) == losses(parts, NAME)


WRONG = {
    f"{OWN}.minibatch=1": r"own_frames\.minibatch: 1, but dataloader_train\.batch_size=2",
    # The second latent frame would be the true one, behind an imagined first one.
    f"{RL}.max_num_conditional_frames=2": r"rl\.max_num_conditional_frames: 2, but a history hands on 1 .*Set it to 1",
}


@pytest.mark.parametrize("override", WRONG)
def test_groups_and_conditioning_frames_that_no_history_has_are_refused(override: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=WRONG[override]):
        train(tmp_path, [*options("nft"), override], config=CONFIG)
