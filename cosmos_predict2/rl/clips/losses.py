# SPDX-License-Identifier: Apache-2.0
"""The loss of a micro-batch of clips: the objective, the distance to the reference, and the data term.

    output, loss = Losses(world, rl).of(part)

Under context parallelism a rank has its frames alone; ratios and errors are those of whole clips, alike on all ranks.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.rectified_flow import add_noise
from cosmos_predict2.diffusion.transitions import log_ratio
from cosmos_predict2.rl import objectives
from cosmos_predict2.rl.clips.rollout import ChainPath, chain_path, judge, of_whole_clip
from cosmos_predict2.rl.clips.samples import Data, Forward, MicroBatch
from cosmos_predict2.rl.config import RLConfig
from cosmos_predict2.rl.learner import require_ratio_one
from cosmos_predict2.rl.objectives import FreshNoise, RatioStep, WithoutRatio, objective_of
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire.errors import TrainingError


class Losses:
    """The losses of a run."""

    def __init__(self, world: WorldModel, rl: RLConfig) -> None:
        self.world = world
        self.rl = rl
        self.objective = objective_of(rl.objective)

    def of(self, part: MicroBatch) -> tuple[dict[str, Any], Tensor]:
        """Numbers to log, and the loss."""
        output, loss = self._forward_loss(part) if part.kept is None else self._ratio_loss(part)
        if part.data is not None:
            data_loss = self._data_loss(part.data)
            output["data_loss"] = data_loss.detach()
            loss = loss + self.rl.data_beta * data_loss
        return output, self.rl.loss_scale * loss

    def velocity(self, condition: Condition, forward: Forward) -> Tensor:
        """The network's velocity at the samples' times for this rank's frames, eps - x_0 where it is right."""
        t_B, x0, epsilon = forward.t_B, forward.x0_B_C_T_H_W, forward.epsilon_B_C_T_H_W
        predicted = self._clean(x0, epsilon, (t_B / (1 - t_B))[:, None], condition)
        t = t_B.reshape(-1, *[1] * (x0.dim() - 1)).to(x0)
        return (objectives.noised(self._part(x0), self._part(epsilon), t_B) - predicted) / t

    def _ratio_loss(self, part: MicroBatch) -> tuple[dict[str, Any], Tensor]:
        rl, kept = self.rl, part.kept
        assert kept is not None
        path = self._path(part)
        step, _ = judge(path, kept)
        mean, old = step.mean_B_C_T_H_W, kept.mean_B_C_T_H_W
        std = step.std if rl.ratio_normalisation == "gaussian" else None
        log_ratio_B = of_whole_clip(self.world, log_ratio(kept.x_next_B_C_T_H_W, mean, old, std))
        drift_B = of_whole_clip(self.world, objectives.mean_drift(mean, old))
        advantage_B = part.advantage_B.to(log_ratio_B)
        if rl.exp_reward:
            largest = rl.advantage.adv_clip_max
            advantage_B = objectives.exponential_advantage(advantage_B).clamp(-largest, largest)
        dt = path.chain.length(kept.k)
        limits = (rl.clip_ratio, dt, rl.clip_ratio_high, rl.dual_clip)
        policy = self.objective.function(RatioStep(log_ratio_B, advantage_B, drift_B, step.std, *limits))
        loss = policy.loss_B.mean()
        output = self._watched(part, policy, log_ratio_B, loss)
        if kept.reference_mean_B_C_T_H_W is not None:
            kl_B = of_whole_clip(self.world, objectives.mean_drift(mean, kept.reference_mean_B_C_T_H_W))
            kl = (kl_B if std is None else objectives.gaussian_kl(kl_B, std)).mean()
            output["kl_loss"] = kl.detach()
            loss = loss + rl.kl_beta * kl
        return output, loss

    def _watched(
        self, part: MicroBatch, policy: objectives.Clipped, log_ratio_B: Tensor, loss: Tensor
    ) -> dict[str, Any]:
        ratio_B, k = policy.ratio_B.detach(), None if part.kept is None else part.kept.k
        if part.is_before_update and self.rl.on_policy:
            off = float((log_ratio_B.detach()).abs().max())
            at = "" if k is None else f" at step {k}"
            if math.isnan(off):
                raise TrainingError(
                    f"A rollout's states are not finite{at}, nor is what training computes from them. In float16"
                    " numbers end at 65504: set model.config.precision=bfloat16; else lower optimizer.lr."
                )
            why = f"training does not compute what the rollout did{at}. Use the same precision and attention for both."
            require_ratio_one(off, self.rl.ratio_tolerance, why)
        std = ratio_B.std(correction=0)
        return {
            "policy_loss": loss.detach(),
            "log_prob_ratio": ratio_B.mean(),
            "ratio_std": std,
            **({} if k is None or part.is_before_update else {f"ratio_std_step{k}": std}),  # once ratios move
            "clip_fraction_above": policy.is_above_B.float().mean(),
            "clip_fraction_below": policy.is_below_B.float().mean(),
            "approx_kl": objectives.approximate_kl(log_ratio_B.detach()),
        }

    def _forward_loss(self, part: MicroBatch) -> tuple[dict[str, Any], Tensor]:
        rl, forward = self.rl, part.forward
        assert forward is not None
        v = self.velocity(part.condition, forward)
        v_old = v.detach() if forward.v_old_B_C_T_H_W is None else forward.v_old_B_C_T_H_W
        x0, epsilon, t_B = self._part(forward.x0_B_C_T_H_W), self._part(forward.epsilon_B_C_T_H_W), forward.t_B
        advantage_B = part.advantage_B.to(v)
        of_clip = partial(of_whole_clip, self.world)
        numbers = (rl.clip_ratio, rl.nft_beta, rl.advantage.adv_clip_max, of_clip, rl.clip_ratio_high, rl.dual_clip)
        found = self.objective.function(FreshNoise(x0, epsilon, t_B, v, v_old, advantage_B, *numbers))
        loss = found.loss_B.mean()
        if isinstance(found, WithoutRatio):
            output = {"policy_loss": loss.detach(), **found.watched}
        else:
            output = self._watched(part, found, found.ratio_B.log(), loss)
        if forward.v_reference_B_C_T_H_W is not None:
            kl = of_clip(objectives.mean_drift(v, forward.v_reference_B_C_T_H_W)).mean()
            output["kl_loss"] = kl.detach()
            loss = loss + rl.kl_beta * kl
        return output, loss

    def _data_loss(self, data: Data) -> Tensor:
        """The published form: the error of the clean clip, weighted by 1 + 1 / sigma^2."""
        predicted = self._clean(data.x0_B_C_T_H_W, data.epsilon_B_C_T_H_W, data.sigma_B_1, data.condition)
        weight_B = torch.as_tensor(objectives.data_weight(data.sigma_B_1[:, 0], self.world.config.sigma_data))
        error_B = objectives.mean_drift(predicted, self._part(data.x0_B_C_T_H_W))
        return (weight_B * of_whole_clip(self.world, error_B)).mean()

    def _clean(self, x0: Tensor, epsilon: Tensor, sigma_B_1: Tensor, condition: Condition) -> Tensor:
        """Clean latents of this rank's frames. Context parallelism stays on, as recomputation must meet it again."""
        context = self.world.context
        context.activate(True)
        xt = self._part(add_noise(x0, epsilon, sigma_B_1))
        return self.world.denoiser(xt, sigma_B_1, context.part_of(condition)).x0_B_C_T_H_W

    def _part(self, x: Tensor) -> Tensor:
        return self.world.context.split_frames(x)

    def _path(self, part: MicroBatch) -> ChainPath:
        return chain_path(self.world, self.rl, part.condition, part.unconditional, part.noise_B_C_T_H_W, part.window)
