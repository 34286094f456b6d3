# SPDX-License-Identifier: Apache-2.0
"""Looks at whether actions are obeyed: the same in every validation and layout, a warning where they are not."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.callbacks.action_following import ActionFollowing
from cosmos_predict2.callbacks.fixed_clips import clips_of_step, stacked
from cosmos_predict2.data.clip_dataset import ClipDataset, Windows
from cosmos_predict2.evaluation.metrics.controllability import action_gap, partners
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.world_model.config import EMAConfig
from cosmos_predict2.world_model.parallelize import ContextParallel
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire import distributed, random
from imaginaire.data.stream import POSITION_KEY, ResumableLoader
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import ConfigError
from tests.imaginaire.training.callbacks.fakes import Trainer, lazy, make_config
from tests.models.parts import make_batch, make_model
from tests.multiprocess import run_distributed
from tests.training import records


def make_action_model(*, obeys: bool, **options: Any) -> Any:
    words = ["final_layer", "action_embedder"] if obeys else ["final_layer"]
    model = make_model(*words, std=0.3, network=ChunkActionDiT, net=dict(action_dim=2), **options)
    model.actions.transform = controller(2)
    return model


def make_action_batch(positions: list[int], frames: int = 9) -> dict[str, Any]:
    """Each clip's pixels and actions follow from its position."""
    batches = []
    for position in positions:
        generator = torch.Generator().manual_seed(position)
        batch = make_batch(size=1, frames=frames, positions=[position])
        batch["video"] = torch.randint(0, 256, batch["video"].shape, dtype=torch.uint8, generator=generator)
        batch["action"] = torch.randn(1, frames - 1, 2, generator=generator)
        batches.append(batch)
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def make_trainer(folder: Path, model: Any, batches: list[Any], **options: Any) -> Any:
    config = make_config({"action_following": lazy(ActionFollowing, **options)}, seed=0)
    trainer: Any = Trainer(config, folder, model)
    trainer.dataloader_val = batches
    return trainer


def validate(trainer: Any, *iterations: int) -> list[dict[str, Any]]:
    trainer.start()
    for iteration in iterations:
        trainer.callbacks.on_validation_end(trainer.model, iteration)
    trainer.metrics.close()
    return [{k: v for k, v in record.items() if k != "iteration"} for record in records(trainer.run_dir)]


def test_every_validation_finds_the_same_of_the_same_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "a", make_action_model(obeys=True), [make_action_batch([0, 1, 2])])
    first, second = validate(trainer, 100, 200)
    assert first == second
    assert first["val/action_gap"] != 1 and first["val/action_distance"] > 0
    assert {f"val/action_gap_sigma_{sigma}" for sigma in (5, 10, 20, 40)} <= first.keys()
    # batches of another size, in another order
    other = make_trainer(
        tmp_path / "b",
        make_action_model(obeys=True),
        [make_action_batch([2, 0]), make_action_batch([1, 7, 9])],
        num_clips=5,
    )
    same = make_trainer(
        tmp_path / "c", make_action_model(obeys=True), [make_action_batch([i]) for i in (0, 1, 2, 7, 9)], num_clips=5
    )
    found, expected = validate(other, 1)[0], validate(same, 1)[0]
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_clips_of_a_validation_are_of_many_recordings(tmp_path: Path) -> None:
    class TwoRecordings(ClipDataset):
        def __init__(self) -> None:
            self.windows: Windows = Windows([20, 20], 9, what="two")

        def __len__(self) -> int:
            return len(self.windows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            clip = {key: value[0] for key, value in make_action_batch([index]).items() if key != POSITION_KEY}
            return {**clip, "__key__": f"recording {self.windows[index][0]}"}

    trainer = make_trainer(tmp_path, make_action_model(obeys=True), [], num_clips=4)
    trainer.dataloader_val = ResumableLoader(TwoRecordings(), shuffle=False)
    assert "val/action_gap" in validate(trainer, 1)[0]
    clips = trainer.callbacks["action_following"]._clips
    origins = [clip.origin for clip in clips]
    assert origins == ["recording 0"] * 2 + ["recording 1"] * 2, "not the first windows, which overlap"
    actions = torch.cat([clip.condition.action_B_A_D for clip in clips])
    assert partners(actions, origins)[0].tolist() == [2, 3, 0, 1]


def test_ignored_actions_are_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_action_model(obeys=False)
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path, model, [make_action_batch([0, 1])], patience=2)
        found = validate(trainer, 100)
        assert found[0]["val/action_gap"] == 1.0 and found[0]["val/action_distance"] == 0.0
        assert not caplog.records
        resumed = make_trainer(tmp_path, model, [make_action_batch([0, 1])], patience=2)
        resumed.callbacks.load_state_dict({name: {} for name in trainer.callbacks.state_dict()})  # of older code
        resumed.callbacks.load_state_dict(trainer.callbacks.state_dict())
        validate(resumed, 200, 300)
    (record,) = caplog.records
    assert "ignores its actions so far" in record.message and "iteration 200" in record.message


def test_a_run_without_validation_looks_at_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, make_action_model(obeys=True), [], first=2, every_n=4)
    trainer.start()
    with caplog.at_level(logging.INFO):
        for iteration in range(1, 10):
            batch = make_action_batch([iteration, iteration + 1])
            trainer.callbacks.on_training_step_end(trainer.model, batch, {}, torch.zeros(()), iteration)
    trainer.metrics.close()
    assert [record["iteration"] for record in records(tmp_path)] == [2, 4, 8]
    assert all("train/action_gap" in record for record in records(tmp_path))
    assert "2 training clips" in caplog.text


@pytest.mark.parametrize(
    ("validates", "count", "words", "levels"),
    [(False, 1, "dataloader_train.batch_size=2", ["WARNING", "INFO"]), (True, 2, "the same actions", ["INFO"] * 2)],
)
def test_clips_that_cannot_show_obedience_are_a_warning_once(
    validates: bool, count: int, words: str, levels: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, make_action_model(obeys=True), [], first=1, every_n=2)
    trainer.config.trainer.run_validation = validates
    trainer.start()
    batch = make_action_batch([3, 4][:count])
    batch["action"] = batch["action"][:1].expand(count, -1, -1)
    with caplog.at_level(logging.INFO):
        for iteration in (1, 2):
            trainer.callbacks.on_training_step_end(trainer.model, batch, {}, torch.zeros(()), iteration)
    found = [record for record in caplog.records if "cannot be seen" in record.message]
    assert [record.levelname for record in found] == levels and words in found[0].message


def test_averaged_weights_are_looked_at_and_training_does_not_notice(tmp_path: Path) -> None:
    model = make_action_model(obeys=True, ema=EMAConfig(enabled=True))
    model.parallelize(ParallelDims())
    with torch.no_grad():
        for name, shadow in model.ema.shadows.items():
            shadow.mul_(0.0 if "action_embedder" in name else 1.0)
    modes = [module.training for module in model.modules()]
    random.seed_all(3, 0, "test")
    before = torch.rand(4)
    random.seed_all(3, 0, "test")
    found = validate(make_trainer(tmp_path, model, [make_action_batch([0, 1])]), 1)
    assert torch.equal(torch.rand(4), before)
    assert found[0]["val/action_gap"] == 1.0
    assert [module.training for module in model.modules()] == modes
    assert model.net.action_embedder_B_D.fc2.weight.abs().sum() > 0


def test_networks_without_actions_are_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model(), [make_batch(positions=[0, 1])], first=1)
    assert validate(trainer, 1) == []
    trainer.callbacks.on_training_step_end(trainer.model, {}, {}, torch.zeros(()), 1)


@pytest.mark.parametrize("wrong", [dict(num_clips=1), dict(patience=0), dict(sigmas=[]), dict(sigmas=[0.0])])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ActionFollowing(**wrong)


def _on_two_ranks() -> Any:
    """On each of two ranks: whose clips a step has, and the gap alone and with the latent frames of a clip spread."""
    model, rank = make_action_model(obeys=True, state_t=4), distributed.rank()
    mine = make_action_batch([[4, 6], [5, 7]][rank], frames=13)
    clips = clips_of_step(mine, model, 3)
    x0, epsilon, condition = stacked(clips, torch.device("cpu"))
    gaps = []
    for group in (None, torch.distributed.group.WORLD):
        world = WorldModel(model.pipe_config, model.net)
        world.context = ContextParallel(model.net, group)
        gap = action_gap(world, x0, epsilon, condition)
        assert gap is not None
        gaps.append(gap.ratios)
    return [clip.position for clip in clips], gaps


@pytest.mark.slow
def test_two_processes_look_at_the_same_clips_and_share_them() -> None:
    for positions, (alone, together) in run_distributed(_on_two_ranks, 2):
        assert positions == [4, 5, 6]
        assert together == pytest.approx(alone, rel=1e-5) and abs(alone[0] - 1) > 1e-3
