# SPDX-License-Identifier: Apache-2.0
"""Training loss and sampling of the action-conditioned Predict2 network against golden values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition, conditioning_frames_mask
from cosmos_predict2.diffusion.solvers import karras_sigmas, sample
from cosmos_predict2.models.config import Predict2Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import clean_latents
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel
from imaginaire.config.lazy_config import LazyCall as L
from tests.goldens import Golden
from tests.models.parts import PooledPixels
from tests.parity.action_files import ActionFile, compare_close, open_action_file

AREA = "action"
LOSS, SAMPLING, LEVELS = 2e-5, 2e-4, 1e-12
FILE = "predict2_action_dit"


def _condition(file: ActionFile, text: Tensor | None = None) -> Condition:
    """The first latent frame given; a text of zeros by default."""
    given = file.tensors["smp.gt_latents"].use()
    mask = conditioning_frames_mask(torch.ones(len(given)), given)
    no_text = torch.zeros_like(file.tensors["fwd.text"].use())
    return file.condition(no_text if text is None else text, given, mask)


def test_loss(golden: Golden) -> None:
    file = open_action_file(golden, FILE)
    stored = file.tensors
    pipe = Video2WorldPipelineConfig(
        net=L(file.network)(**file.arguments),
        tokenizer=L(PooledPixels)(),
        sigma_conditional=file.settings["sigma_conditional"].use(),
        state_t=file.settings["state_t"].use(),
    )
    model = Video2WorldModel(Predict2Video2WorldModelConfig(precision="float32", pipe_config=pipe))
    model.net.load_state_dict(file.build().state_dict())
    x0, sigma = stored["smp.gt_latents"].use(), stored["loss.sigma_B_1"].use()
    output, loss = model.loss(x0, stored["loss.eps"].use(), sigma, _condition(file))
    found = {
        "xt": output["xt"],
        "x0_pred": output["x0_pred"],
        "weights": output["weights_per_sigma"],
        "mse": output["mse_loss"],
        "edm": output["edm_loss"],
        "edm_per_frame": output["edm_loss_per_frame"],
        "scaled": loss,
    }
    for name, value in found.items():
        compare_close(stored[f"loss.{name}"], value.reshape(stored[f"loss.{name}"].expected().shape), LOSS)


def _denoise(file: ActionFile, guidance: float = 0.0, *texts: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The world model's estimate, for no text, or guided from the second text to the first."""
    level = file.settings["sigma_conditional"].use()
    world = WorldModel(Video2WorldPipelineConfig(sigma_conditional=level), file.build(), PooledPixels())
    conditional, unconditional = (_condition(file, text) for text in (texts or (None, None)))
    other = unconditional if guidance else None
    return world.guided(clean_latents, conditional, other, SamplingOptions(guidance=guidance, is_repeatable=True))


@torch.no_grad()
def test_sampling(golden: Golden) -> None:
    file = open_action_file(golden, FILE)
    stored, settings = file.tensors, file.settings
    sigma_max, guidance = settings["sigma_max"].use(), settings["guidance"].use()
    sigmas = karras_sigmas(settings["num_steps"].use(), settings["sigma_min"].use(), sigma_max, settings["order"].use())
    compare_close(stored["smp.sigmas"], sigmas, LEVELS)
    noise = stored["smp.unit_noise"].use() * sigma_max
    steps: list[Any] = []
    final = sample(_denoise(file), noise, sigmas, "2ab", lambda i, step: steps.append(step))
    compare_close(stored["smp.x0_preds"], torch.stack([step.x0_B_C_T_H_W for step in steps]), SAMPLING)
    compare_close(stored["smp.traj"], torch.stack([step.x_next_B_C_T_H_W for step in steps]), SAMPLING)
    compare_close(stored["smp.final"], final, SAMPLING)

    no_text = torch.zeros_like(stored["fwd.text"].use())
    assert torch.equal(sample(_denoise(file, guidance, no_text, no_text), noise, sigmas), final)
    texts = (stored["fwd.text"].use(), stored["smp.neg_text"].use())
    guided = sample(_denoise(file, guidance, *texts), noise, sigmas)
    compare_close(stored["smp.final_text_neg"], guided, SAMPLING)
