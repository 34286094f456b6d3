# SPDX-License-Identifier: Apache-2.0
"""The tiny twin of the action-conditioned models: a world model of the toy world, in minutes on a CPU.

The noise is shifted far up, as at lower levels the noisy frames give away where things are, and dynamics are learnt
only near pure noise. Sampling ends where training ends: one step to noise level 10 and one from there. A token is one
latent, 8 pixels: tokens of 16 pixels, four times fewer, learn less in the same time.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import group_choices, job, tiny_run
from imaginaire.config import register_experiment

NET = dict(
    reads_text=False,
    patch_spatial=1,
    extra_per_block_abs_pos_emb=True,  # the walls are at places, not at distances
    action_on_tokens=True,
    summed_action_dims=[0, 1],  # dx and dy: places on the table
    summed_action_scale=0.3,
    atten_backend="math",  # faster than the fused kernel where there are so few tokens, on CPUs
)


def tiny_model(name: str, train: str, val: str, numbers: dict[str, Any], **pipe_config: Any) -> dict[str, Any]:
    """The run of the tiny model on these data, with the ``numbers`` of the run."""
    pipe_config = dict(net=NET, video_noise_factor=25.0, timestamps=dict(nfe=1, t_min=10.0)) | pipe_config
    model = "predict2_v2w_tiny_action_conditioned"
    return dict(
        defaults=group_choices(model, train, val, optimizer="muon", ema="power"),
        job=job(name),
        model=dict(config=dict(precision="bfloat16", pipe_config=pipe_config)),
        **numbers,
    )


def tiny(name: str, *, hide_actions: bool) -> dict[str, Any]:
    """``hide_actions``: the same model, which sees zeros in place of the actions."""
    numbers = tiny_run(3000, batch_size=8, lr=0.03, adam_lr=2e-3)
    if hide_actions:  # only here: data other than the toy world's have no such option
        for loader in ("dataloader_train", "dataloader_val"):
            numbers[loader]["dataset"] = dict(hide_actions=True)
    return tiny_model(name, "toy_action", "toy_action", numbers)


def long_horizon() -> dict[str, Any]:
    """The shipped weights, trained on to imagine 96 actions: half of the episodes have histories of one imagined chunk.

    A batch of the loader is 32 episodes of seven chunks, an update eight chunks.
    """
    run = tiny_model(
        "tiny_long_horizon", "toy_action_long", "toy_action_long", tiny_run(1512, 32, lr=0.015, adam_lr=1e-3)
    )
    run["defaults"][0] = {"override /model": "predict2_v2w_tiny_action_own_frames"}
    run["model"]["config"]["own_frames"] = dict(share=0.5, most_chunks=1)
    run["dataloader_val"] = dict(batch_size=8)
    return run


register_experiment("tiny_long_horizon", long_horizon)
for name, hide_actions in (("tiny_action_conditioned", False), ("tiny_action_blind", True)):
    register_experiment(f"predict2_video2world_{name}_training", partial(tiny, name, hide_actions=hide_actions))
