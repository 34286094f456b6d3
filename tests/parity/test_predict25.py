# SPDX-License-Identifier: Apache-2.0
"""Training loss and sampling of the action-conditioned Predict2.5 networks against golden values."""

from dataclasses import replace

import pytest
import torch

from cosmos_predict2.diffusion import rectified_flow
from cosmos_predict2.diffusion.rectified_flow import noise_level
from cosmos_predict2.models.config import Predict2p5Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel
from imaginaire.config.lazy_config import LazyCall as L
from tests.goldens import Golden
from tests.models.parts import PooledPixels
from tests.parity.action_files import ActionFile, open_action_file
from tests.parity.networks import noted_velocities

AREA = "action"
LOSS, SAMPLING = 2e-5, 5e-4
FILES = ["predict25_action_chunk", "predict25_action_flat"]


def _config(file: ActionFile, shift: str) -> Video2WorldPipelineConfig:
    given = file.settings["num_conditional_latents"].use()
    return Video2WorldPipelineConfig(
        net=L(file.network)(**file.arguments),
        tokenizer=L(PooledPixels)(),
        state_t=file.tensors["train.x0"].use().shape[2],
        min_num_conditional_frames=given,
        max_num_conditional_frames=given,
        flow=FlowConfig(shift=float(file.settings[shift].use()), timestep_scale=file.settings["timestep_scale"].use()),
    )


@pytest.mark.parametrize("name", FILES)
def test_times_of_training(name: str, golden: Golden) -> None:
    file = open_action_file(golden, name)
    stored, shift = file.tensors, float(file.settings["train_shift"].use())
    u = torch.sigmoid(stored["train.u_normal"].use())
    stored["train.u"].compare(u, of_largest=LOSS)
    stored["train.timesteps"].compare(rectified_flow.training_timesteps(u, shift), of_largest=LOSS)
    uniform = torch.special.ndtr(stored["train.u_normal"].use().double())
    drawn = rectified_flow.draw_timesteps(uniform, distribution="logitnormal", shift=shift)
    stored["train.timesteps"].compare(drawn, of_largest=LOSS)
    stored["train.sigmas"].compare(drawn / rectified_flow.NUM_TIMESTEPS, of_largest=LOSS)


@pytest.mark.parametrize("name", FILES)
def test_loss(name: str, golden: Golden) -> None:
    file = open_action_file(golden, name)
    stored = file.tensors
    model = Video2WorldModel(
        Predict2p5Video2WorldModelConfig(precision="float32", pipe_config=_config(file, "train_shift"))
    )
    model.net.load_state_dict(file.build().state_dict())
    x0, epsilon = stored["train.x0"].use(), stored["train.eps"].use()
    sigma_B_1 = noise_level(stored["train.timesteps"].use().double() / rectified_flow.NUM_TIMESTEPS)[:, None].float()
    condition = file.condition(stored["fwd.text"].use(), x0, stored["fwd.mask"].use())
    output, loss = model.loss(x0, epsilon, sigma_B_1, condition)
    stored["train.xt"].compare(output["xt"], of_largest=LOSS)
    stored["train.v_target"].compare(output["target"], of_largest=LOSS)
    stored["train.v_pred"].compare(output["velocity"], of_largest=LOSS)
    stored["train.per_instance_loss"].compare(output["edm_loss_per_frame"].mean(dim=1), of_largest=LOSS)
    stored["train.loss"].compare(loss.detach().reshape(1), of_largest=LOSS)


@torch.no_grad()
@pytest.mark.parametrize("name", FILES)
def test_sampling(name: str, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_action_file(golden, name)
    stored, config = file.tensors, _config(file, "sampler_shift")
    assert config.flow is not None
    num_steps, guidance = file.settings["num_steps"].use(), file.settings["guidance"].use()
    schedule = config.flow.levels(num_steps)
    stored["smp.timesteps"].compare(schedule.timesteps)
    stored["smp.sigmas"].compare(schedule.sigmas, of_largest=SAMPLING)

    conditional = file.condition(stored["fwd.text"].use(), stored["train.x0"].use(), stored["fwd.mask"].use())
    other = replace(conditional, crossattn_emb_B_S_E=stored["smp.neg_text"].use())
    velocities, states = noted_velocities(monkeypatch), []
    final = WorldModel(config, file.build(), PooledPixels()).sample(
        conditional,
        other,
        stored["smp.noise"].use(),
        on_step=lambda i, step: states.append(step.x_next_B_C_T_H_W),
        options=SamplingOptions(guidance=guidance, num_steps=num_steps),
    )
    stored["smp.velocities"].compare(torch.stack(velocities), of_largest=SAMPLING)
    stored["smp.traj"].compare(torch.stack(states), of_largest=SAMPLING)
    stored["smp.traj"].compare(torch.stack([*states[:-1], final]), of_largest=SAMPLING)
    given = stored["fwd.mask"].use().bool().expand_as(final)
    assert torch.equal(final[given], stored["train.x0"].use()[given])
