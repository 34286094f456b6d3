# SPDX-License-Identifier: Apache-2.0
"""Training of Predict2.5: what it draws, what counts in its loss, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.data.mock import MockVideos
from cosmos_predict2.diffusion.rectified_flow import flow_time
from cosmos_predict2.models.config import Predict2p5Video2WorldModelConfig, Predict2Video2WorldModelConfig
from cosmos_predict2.models.text import TrainingTextConfig
from cosmos_predict2.models.video2world_model import Predict2p5Video2WorldModel, Video2WorldModel
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import EDM
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.errors import ConfigError
from imaginaire.findings import Finding
from tests.findings import checked_model
from tests.models.parts import NET, make_batch, make_config
from tests.models.parts import make_model as make_parts_model


def make_model(**options: Any) -> Video2WorldModel:
    flow = dict(family=Predict2p5Video2WorldModelConfig, flow=FlowConfig(), min_num_conditional_frames=0)
    return make_parts_model(**flow | options)


def times(model: Video2WorldModel, count: int, is_image: bool = False) -> Tensor:
    batch = {"video": torch.zeros(count), "sample_position": torch.arange(count)}
    x0 = torch.zeros(count, 16, 1, 1, 1)
    return flow_time(model.draw_noise(x0, is_image, model._generators(batch, "train"))[1])[:, 0]


def drawn(model: Video2WorldModel, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Condition]:
    generators = model._generators(batch, "train")
    x0, condition = model.data_and_condition(batch, generators)
    return x0, *model.draw_noise(x0, False, generators), condition


def test_the_loss_is_the_mean_error_of_the_velocity() -> None:
    model = make_model(conditional_frames_probs={0: 1.0})
    batch = make_batch(positions=[0, 1])
    x0, epsilon, sigma, condition = drawn(model, batch)
    output, loss = model.loss(x0, epsilon, sigma, condition)
    t = flow_time(sigma)[:, :, None, None, None]
    xt = t * epsilon + (1 - t) * x0
    velocity = model.net(
        xt,
        flow_time(sigma),
        condition.crossattn_emb_B_S_E,
        condition_mask_B_1_T_H_W=torch.zeros(2, 1, 3, 4, 4),
        padding_mask_B_1_H_W=condition.padding_mask_B_1_H_W,
    )
    torch.testing.assert_close(output["xt"], xt)
    torch.testing.assert_close(loss, (velocity - (epsilon - x0)).square().mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output["x0_pred"], (xt - t * velocity).detach(), rtol=1e-4, atol=1e-5)


def test_times_are_drawn_around_the_shift_and_for_videos_near_pure_noise_too() -> None:
    """logit(t) = ln(sigma) is normal around ln(shift)."""
    log_sigma = torch.logit(times(make_model(train_time_shift=7.0), 4000).double())
    assert float(log_sigma.mean()) == pytest.approx(1.946, abs=0.05)
    assert float(log_sigma.std()) == pytest.approx(1.0, abs=0.03)
    model = make_model(high_sigma_ratio=0.25, train_time_shift=1.0)
    shares = [float((times(model, 2000, is_image) >= 0.98).double().mean()) for is_image in (False, True)]
    assert shares == pytest.approx([0.25, 0.0], abs=0.04)


def test_pure_noise_trains_without_infinities() -> None:
    model = make_model()
    x0, epsilon, _, condition = drawn(model, make_batch(positions=[0, 1]))
    from cosmos_predict2.diffusion.rectified_flow import noise_level
    from cosmos_predict2.models.config import LATEST_TIME

    sigma = noise_level(torch.full((2, 1), LATEST_TIME, dtype=torch.float64)).float()
    output, loss = model.loss(x0, epsilon, sigma, condition)
    assert torch.isfinite(loss) and torch.allclose(output["xt"], epsilon, atol=1e-5)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [({0: 0.5, 1: 0.25, 2: 0.25}, [0.5, 0.25, 0.25]), ({2: 1.0}, [0, 0, 1]), ({"0": 3, "1": 1}, [0.75, 0.25, 0])],
)
def test_given_frames_are_drawn_by_their_shares(shares: dict[Any, float], expected: list[float]) -> None:
    model = make_model(conditional_frames_probs=shares)
    batch = {"video": torch.zeros(2000), "sample_position": torch.arange(2000)}
    given = model.config.draw_conditional_frames(model._generators(batch, "train"))
    found = [float((given == n).double().mean()) for n in range(3)]
    assert found == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("replaces", [True, False])
def test_given_frames_count_in_the_mean_and_only_without_the_replacement_in_the_sum(replaces: bool) -> None:
    model = make_model(flow=FlowConfig(replace_given_frames=replaces))
    output, loss = model.training_step({**make_batch(positions=[0, 1]), "num_conditional_frames": 2}, 0)
    by_frame = output["edm_loss_per_frame"]
    assert (by_frame[:, 2] > 0).all() and bool((by_frame[:, :2] == 0).all()) == replaces
    torch.testing.assert_close(loss.detach(), by_frame.mean())


def test_given_frames_enter_clean_and_may_have_a_timestep_of_their_own() -> None:
    seen: dict[float, Tensor] = {}
    for own in (-1.0, 0.1):
        model = make_model(flow=FlowConfig(conditional_frame_timestep=own))
        model.net.register_forward_pre_hook(lambda _, inputs, own=own: seen.__setitem__(own, inputs))
        output, _ = model.training_step({**make_batch(positions=[0, 1]), "num_conditional_frames": 1}, 0)
    x, timesteps = seen[-1.0][0], seen[-1.0][1]
    assert torch.equal(x[:, :, 0], output["x0"][:, :, 0]) and torch.equal(x[:, :, 1:], output["xt"][:, :, 1:])
    assert timesteps.shape == (2, 1)
    own_timesteps = seen[0.1][1]
    torch.testing.assert_close(own_timesteps, torch.cat([torch.full((2, 1), 1e-4), timesteps, timesteps], dim=1))


def test_validation_is_at_fixed_levels_with_a_frame_given_and_repeats_itself() -> None:
    model = make_model(validation_sigmas=[1.0, 9.0])
    batch = make_batch(positions=[0, 1])
    seen: list[Tensor] = []
    model.net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    first, loss = model.validation_step(batch, 0)
    assert torch.equal(loss, model.validation_step(batch, 5)[1])
    assert {"loss_sigma_1", "loss_sigma_9"} <= set(first)
    torch.testing.assert_close(torch.stack(seen)[:2, :, 0], torch.tensor([[0.5, 0.5], [0.9, 0.9]]))
    _, _, condition = model.clean_clips(batch)
    assert condition.condition_mask_B_1_T_H_W is not None
    assert condition.condition_mask_B_1_T_H_W[:, 0, :, 0, 0].sum(dim=1).tolist() == [1, 1]


def test_the_same_weights_have_the_same_loss_at_a_level_in_both_families() -> None:
    """But for the factor 10, and with the timestep of given frames that Predict2 has."""
    model = make_model(flow=FlowConfig(conditional_frame_timestep=0.1))
    other = make_parts_model(sigma_conditional=1e-4 / (1 - 1e-4))
    other.net.load_state_dict(model.net.state_dict())
    x0, epsilon, _, condition = drawn(model, {**make_batch(positions=[0, 1]), "num_conditional_frames": 1})
    sigma = torch.tensor([[0.7], [12.0]])
    for fixed in (sigma, sigma.flip(0)):
        of_flow, of_level = (m.loss(x0, epsilon, fixed, condition)[1] for m in (model, other))
        torch.testing.assert_close(10 * of_flow, of_level, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shares", [{}, {0: -1.0, 1: 2.0}, {-1: 1.0}, {0: 0.0}, {"one": 1.0}, 3])
def test_shares_that_are_none_are_refused(shares: Any) -> None:
    with pytest.raises(ConfigError, match="conditional_frames_probs"):
        Predict2p5Video2WorldModelConfig(conditional_frames_probs=shares)


def test_what_cannot_be_trained_is_said() -> None:
    for wrong in (dict(train_time_distribution="normal"), dict(train_time_shift=0.0)):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Predict2p5Video2WorldModelConfig(**wrong)
    with pytest.raises(ConfigError, match="flow: null, but a Predict2"):
        make_model(flow=None)


# --- what is told before anything is built ---


def _told(text: TrainingTextConfig | None = None, flow: FlowConfig | None = None, **net: Any) -> list[Finding]:
    of_text = dict(text=text or TrainingTextConfig(), flow=flow)
    return checked_model(Video2WorldModel, make_config(family=Predict2p5Video2WorldModelConfig, net=net, **of_text))


def test_the_two_families_are_not_mixed() -> None:
    (problem,) = _told()
    assert str(problem).startswith("model.config.pipe_config.flow: null, but a Predict2.5 network")
    data = dict(_target_=MockVideos, width=8, num_frames=9, num_tokens=4, text_width=16)
    projection = dict(crossattn_proj_in_channels=64)
    for pipe, message, is_note in [
        (dict(flow=FlowConfig()), "flow: it is set, as for Predict2.5", False),
        (dict(net=projection), "net.crossattn_proj_in_channels: 64, as networks of Predict2.5", True),
    ]:
        config = make_config(**pipe)
        (problem,) = checked_model(Video2WorldModel, config)
        assert str(problem).startswith(f"model.config.pipe_config.{message}") and "model=predict2p5_" in problem.cure
        assert (problem.level == "warning") == is_note
        if is_note:
            (problem,) = [one for one in checked_model(Video2WorldModel, config, [data]) if one.level == "error"]
            assert "the network takes 64" in problem.text


class WithOwnLoss(Video2WorldModel):
    def loss(self, *draws: Any) -> Any:
        return super().loss(*draws)


def halved_by_function(config: Any) -> "Halved":
    return Halved(config)


class Halved(EDM):
    def errors(self, *draws: Any) -> Any:
        error, parts = super().errors(*draws)
        return error / 2, parts


class Partless(EDM):
    def errors(self, *inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        return super().errors(*inputs)[0], {"mine": torch.zeros(())}


def test_a_loss_or_an_objective_of_ones_own_goes_with_any_noise() -> None:
    config = Predict2p5Video2WorldModelConfig(pipe_config=Video2WorldPipelineConfig(net=L(Video2WorldDiT)(**NET)))
    assert checked_model(WithOwnLoss, config) == [] and WithOwnLoss(config).world.objective is not None
    model = make_parts_model(objective=L(Halved)())
    batch = {**make_batch(positions=[0, 1])}
    _, loss = model.training_step(batch, 0)
    torch.testing.assert_close(2 * loss, make_parts_model().training_step(batch, 0)[1])
    assert isinstance(make_parts_model(objective=L(halved_by_function)()).world.objective, Halved)
    with pytest.raises(ConfigError, match=r"Partless.errors returned the parts \['mine'\], but 'x0_pred'"):
        make_parts_model(objective=L(Partless)()).training_step(batch, 0)
    with pytest.raises(ConfigError, match="objective made"):
        make_parts_model(objective=L(repr)())
    for target in (Halved, halved_by_function):
        config.pipe_config.objective = L(target)()
        assert checked_model(Video2WorldModel, config) == []


def test_texts_of_another_width_are_told_of_data_encoder_and_file(tmp_path: Path) -> None:
    def of_data(model: Any, config: Any, width: int) -> list[str]:
        data = dict(_target_=MockVideos, width=width, num_frames=9)
        found = checked_model(model, config, [data])
        return [str(one) for one in found if one.key.startswith("dataloader")]

    pipe = dict(net=L(Video2WorldDiT)(**NET), state_t=3)
    older = Predict2Video2WorldModelConfig(pipe_config=Video2WorldPipelineConfig(**pipe))
    (problem,) = of_data(Video2WorldModel, older, 1024)
    assert "texts have width 1024 (width), but the network takes 8: set width=8" in problem
    assert of_data(Video2WorldModel, older, 8) == []
    flow = Video2WorldPipelineConfig(**pipe, flow=FlowConfig())
    (problem,) = of_data(Video2WorldModel, Predict2p5Video2WorldModelConfig(pipe_config=flow), 1024)
    assert "width 1024" in problem and "model.config.text.encoder" in problem
    encoder = TrainingTextConfig(encoder=L(BytesEncoder)(num_tokens=4, width=64))
    encoded = Predict2p5Video2WorldModelConfig(pipe_config=flow, text=encoder)
    assert of_data(Video2WorldModel, encoded, 1024) == [], "they are not used"
    (problem,) = _told(encoder, FlowConfig())
    assert str(problem).startswith("model.config.text.encoder: its texts have width 64, but the network takes 8")
    assert _told(encoder, FlowConfig(), crossattn_proj_in_channels=64) == []
    torch.save(torch.zeros(4, 64), tmp_path / "empty.pt")
    constant = TrainingTextConfig(constant_path=str(tmp_path / "empty.pt"))
    (problem,) = _told(constant, FlowConfig())
    assert problem.key == "model.config.text.constant_path" and "have width 64" in problem.text
    assert _told(constant, FlowConfig(), crossattn_proj_in_channels=64) == []
    torch.save({"text": torch.zeros(4, 64)}, tmp_path / "empty.pt")
    assert "holds a dict, but an embedding is a tensor" in _told(constant, FlowConfig())[0].text
    assert any(
        "There is no embedding" in told.text
        for told in _told(TrainingTextConfig(constant_path=str(tmp_path)), FlowConfig())
    )


def test_the_published_name_makes_a_plain_mapping_a_config_of_its_family() -> None:
    """A mapping without a flow is an error for Predict2.5, not a model of Predict2."""
    with pytest.raises(ConfigError, match=r"pipe_config\.flow"):
        Predict2p5Video2WorldModel({"pipe_config": {"net": L(Video2WorldDiT)(**NET), "state_t": 3}})
