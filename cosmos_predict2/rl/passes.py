# SPDX-License-Identifier: Apache-2.0
"""What the options of reinforcement learning cost: passes through the network, and latents that wait."""

from cosmos_predict2.models.passes import Passes
from cosmos_predict2.rl.config import RLConfig

STATES = 4  # of a trained step: its state, the next, the mean, the estimate before


def passes_of(rl: RLConfig, conditions: int, *, is_flow_model: bool, has_adapters: bool) -> Passes:
    """The passes of a rank whose batch has so many conditions."""
    clips = conditions * rl.num_rollout // rl.ranks_per_group
    steps, guided = rl.num_trained, 2 if rl.guidance else 1
    has_last = rl.transition == "churn" or not is_flow_model  # from the smallest noise level to clean latents
    has_old = not rl.is_ratio and (rl.updates * rl.minibatches > 1 or rl.weight_copy_decay_type > 0)
    per_step = guided if rl.is_ratio else 1
    has_reference, has_data = rl.kl_beta > 0, rl.data_beta > 0
    on_first = rl.rollout_batch / clips
    return Passes(
        rollout=guided * (rl.sample_steps + has_last),
        old=steps * has_old,
        reference=steps * per_step * has_reference,
        policy=rl.updates * steps * per_step,
        data=has_data * (on_first if rl.data_on_first_only else float(rl.updates * steps)),
        graphs=per_step + has_data,
        clips=clips,
        clips_at_once=rl.rollout_batch,
        updates=rl.updates * rl.minibatches,
        weight_copies=(not has_adapters) * (has_reference or not rl.on_policy) + (rl.weight_copy_decay_type > 0),
        kept_latents=0 if rl.offload_trajectories else steps * _of_step(rl, has_old),
    )


def _of_step(rl: RLConfig, has_old: bool) -> int:
    return (STATES if rl.is_ratio else 1 + has_old) + (rl.kl_beta > 0)
