# SPDX-License-Identifier: Apache-2.0
"""Obedience to actions: figures of a network that obeys, of one that does not, and of samples that are alike."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.evaluation.metrics import controllability
from cosmos_predict2.evaluation.metrics.controllability import (
    action_gap,
    lending_order,
    partners,
    prediction_distance,
    velocity_errors,
    video_distances,
)
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.world_model import WorldModel
from tests.models.parts import LIMITS, NET, awaken


def network(*, obeys: bool) -> ChunkActionDiT:
    torch.manual_seed(0)
    net = ChunkActionDiT(action_dim=2, **NET, **LIMITS)  # type: ignore[arg-type]
    awaken(net, "final_layer", *(["action_embedder"] if obeys else []), std=0.2)
    return net.eval()


def clips(size: int = 4) -> tuple[Tensor, Tensor, Condition]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(size, *shape, generator=generator)

    x0, epsilon = normal(16, 3, 4, 4), normal(16, 3, 4, 4)
    condition = Condition(
        crossattn_emb_B_S_E=torch.zeros(size, 2, 8),
        padding_mask_B_1_H_W=torch.zeros(size, 1, 32, 32),
        fps_B=torch.full((size,), 4.0),
        action_B_A_D=normal(8, 2),
    )
    return x0, epsilon, condition.with_conditioning_frames(x0, torch.ones(size))


def predictor(*, obeys: bool) -> WorldModel:
    return WorldModel(Video2WorldPipelineConfig(state_t=3), network(obeys=obeys))


def test_a_partner_has_other_actions() -> None:
    a, b = torch.zeros(2, 1), torch.ones(2, 1)
    index, differs = partners(torch.stack([a, a, b, a]))
    assert index.tolist() == [2, 2, 3, 2] and differs.all()
    index, differs = partners(torch.stack([a, a]))
    assert not differs.any()
    nearly = a + 1e-3
    assert partners(torch.stack([a, nearly, b]))[0].tolist() == [2, 2, 0]  # a hair is no difference


def test_a_partner_is_of_another_recording_or_far_away_in_time() -> None:
    action_B_A_D = torch.arange(6.0)[:, None, None].expand(6, 2, 1)
    assert partners(action_B_A_D)[0].tolist() == [1, 2, 3, 4, 5, 0], "each a recording of its own"
    assert partners(action_B_A_D, "aaabbb")[0].tolist() == [3, 4, 5, 0, 1, 2]
    assert partners(action_B_A_D, "aabbbc")[0].tolist() == [2, 3, 5, 1, 5, 0]
    assert partners(action_B_A_D, "aaaaaa")[0].tolist() == [5, 5, 5, 0, 0, 0], "the farthest of one recording"
    assert lending_order("aabbb", 5)[0].tolist() == [2, 3, 4, 1, 0]


def test_a_network_that_ignores_its_actions_has_a_gap_of_one_and_no_distance() -> None:
    x0, epsilon, condition = clips()
    gap = action_gap(predictor(obeys=False), x0, epsilon, condition, [1.0, 10.0])
    assert gap is not None and gap.true == gap.swapped and gap.mean == 1.0 and gap.num_samples == 4
    distance = prediction_distance(predictor(obeys=False), x0, epsilon, condition)
    assert distance is not None and distance.actions == 0 and distance.seeds > 0


def test_the_gap_is_that_of_a_loss_that_knows_the_true_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A predictor whose error is the distance of the actions from the true ones, squared."""
    x0, epsilon, condition = clips()
    assert condition.action_B_A_D is not None
    true = condition.action_B_A_D.clone()

    def errors(world: WorldModel, x0: Tensor, epsilon: Tensor, sigma: float, condition: Condition) -> Tensor:
        assert condition.action_B_A_D is not None
        wanted = x0[:, 0, 0, 0, :1].clone()
        rows = [int((x0_of_all[:, 0, 0, 0, 0] == value).nonzero()) for value in wanted[:, 0]]
        return 1 + sigma * (condition.action_B_A_D - true[rows]).square().mean(dim=(1, 2))

    x0_of_all = x0
    monkeypatch.setattr(controllability, "velocity_errors", errors)
    monkeypatch.setattr(controllability, "BATCH", 3)
    gap = action_gap(predictor(obeys=True), x0, epsilon, condition, [2.0, 4.0])
    assert gap is not None and gap.true == [1.0, 1.0]
    moved = (true - true.roll(-1, 0)).square().mean().item()
    assert gap.swapped == pytest.approx([1 + 2 * moved, 1 + 4 * moved])
    assert gap.mean == pytest.approx(1 + 3 * moved) and gap.share == 1


def test_distances_of_predictions_are_of_their_own_kind() -> None:
    x0, epsilon, condition = clips()
    found = prediction_distance(predictor(obeys=True), x0, epsilon[:1].expand_as(epsilon), condition)
    assert found is not None and found.actions > 1e-3 and found.seeds == 0


def test_samples_whose_actions_are_alike_give_no_figure() -> None:
    x0, epsilon, condition = clips()
    alike = replace(condition, action_B_A_D=torch.ones(4, 8, 2))
    assert action_gap(predictor(obeys=True), x0, epsilon, alike) is None
    assert prediction_distance(predictor(obeys=True), x0, epsilon, alike) is None


def test_given_frames_do_not_count() -> None:
    x0, epsilon, condition = clips()
    predict = predictor(obeys=True)
    errors = velocity_errors(predict, x0, epsilon, 4.0, condition)
    assert errors.shape == (4,)
    predicted = predict.predict_clean(x0, epsilon, torch.full((4, 1), 4.0), condition)
    assert torch.equal(predicted[:, :, :1], x0[:, :, :1])
    own = (predicted - x0)[:, :, 1:].square().mean(dim=(1, 2, 3, 4)) * (5 / 4) ** 2
    torch.testing.assert_close(errors, own)


def test_distances_of_videos_are_of_their_own_axis() -> None:
    def videos(of_action: float, of_seed: float) -> Tensor:
        k, r = torch.meshgrid(torch.arange(3.0), torch.arange(2.0), indexing="ij")
        value = of_action * k + of_seed * r
        frames = torch.tensor([0.0, 1.0, 1.0])  # the first is given
        return (value[:, :, None] * frames)[:, :, None, :, None, None].expand(3, 2, 3, 3, 1, 4)

    found = video_distances(videos(6.0, 2.0))
    assert found.actions == pytest.approx(8.0)  # pairs 1, 1 and 2 steps of 6 apart
    assert found.seeds == pytest.approx(2.0)
    assert found.ratio == pytest.approx(4.0)
    assert video_distances(videos(0.0, 2.0)).ratio == 0
