# SPDX-License-Identifier: Apache-2.0
"""Learning from rewards on own frames: the branches of a group have one imagined history; a run resumes bit by bit."""

from pathlib import Path

import pytest
import torch

from cosmos_predict2.models.own_frames import FRAMES_KEY
from cosmos_predict2.rl.clips.own_frames import OwnFramesRLModel
from imaginaire.config import lazy_config
from imaginaire.config.compose import compose
from imaginaire.errors import UserError
from tests.rl.runs import CONFIG, LEVELS, NAME, SHORT, STEPS
from tests.training import difference, losses, saved, train

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
    conditions = found.record.samples.conditions
    given = model.world.encode(second[FRAMES_KEY])
    assert conditions.rows_B.tolist() == [0, 0, 1, 1]
    assert torch.equal(conditions.condition.gt_frames_B_C_T_H_W[:, :, :1], given.to(torch.float32))
    true = model.world.encode(second["video"])
    assert torch.allclose(found.record.true_latents[:, :, 1:], true[:, :, 1:])
    assert torch.equal(found.record.samples.final[:, :, :1], given[conditions.rows_B])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nft", "flow_grpo"])
def test_a_run_by_rewards_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, [*options(name), "trainer.max_iter=4"], config=CONFIG) == 0
    assert train(parts, [*options(name), "trainer.max_iter=2"], config=CONFIG) == 0
    assert train(parts, [*options(name), "trainer.max_iter=4"], config=CONFIG) == 0
    assert difference(saved(whole, NAME), saved(parts, NAME)) is None
    assert losses(whole, NAME) == losses(parts, NAME)


def test_groups_that_are_no_minibatch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"own_frames\.minibatch: 1, but dataloader_train\.batch_size=2"):
        train(tmp_path, [*options("nft"), f"{OWN}.minibatch=1"], config=CONFIG)


def test_a_number_of_conditioning_frames_that_no_history_has_is_refused(tmp_path: Path) -> None:
    """The second latent frame would be the true one, behind an imagined first one."""
    found = r"rl\.max_num_conditional_frames: 2, but a history hands on 1 .*Set it to 1"
    with pytest.raises(UserError, match=found):
        train(tmp_path, [*options("nft"), "model.config.rl.max_num_conditional_frames=2"], config=CONFIG)
