# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of Predict2 2B with the numbers of Predict2.5's recipes, and recipes by what there is: one
card of 24 GB, one of 80 GB, 8 GPUs.

The latter train two drawn steps of each rollout, the only ones that draw noise; one card trains adapters, without
averaged weights.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import lora
from cosmos_predict2.configs.rl.experiment.predict2p5 import published
from imaginaire.config import register_experiment

T5_DATA: dict[str, Any] = dict(data_train="cosmos_nemo_assets", data_val="mock")
TWO_STEPS: dict[str, Any] = dict(
    transition="sde",
    ratio_normalisation="gaussian",
    loss_scale=1.0,
    clip_ratio=1e-3,
    train_on=[-1, -1],
    noise_on_trained_steps_only=True,
    kl_beta=0.0,
    update_ref_every_iter=0,
    use_same_seed=False,
    offload_trajectories=True,
)


def at_480p(mode: str, *, ema: bool = False, state_t: int = 24) -> dict[str, Any]:
    """The pipeline's section: the size, what a backward pass recomputes, and whether weights are averaged."""
    return dict(resolution="480", state_t=state_t, net=dict(sac_config=dict(mode=mode)), ema=dict(enabled=ema))


def for_machine(name: str, choices: dict[str, Any], data: dict[str, Any], *, rank: int = 0) -> dict[str, Any]:
    """FlowGRPO with these choices, on two drawn steps; with a rank, of adapters on one card."""
    run = published("flow_grpo", "2B", **choices)
    config = dict(run["model"]["config"], rl=dict(run["model"]["config"]["rl"], **TWO_STEPS))
    adapters: dict[str, Any] = dict(lora(rank), fsdp_shard_size=0) if rank else {}
    one_card: dict[str, Any] = dict(distributed_parallelism="ddp") if rank else {}
    return dict(
        run,
        job=dict(run["job"], name=name),
        model=dict(config={**config, **adapters}),
        dataloader_train=dict(dataset=data),
        optimizer=dict(lr=1e-4 if rank else 1e-5, weight_decay=0.0),
        trainer=dict(run["trainer"], max_iter=200, grad_accum_iter=2 * config["rl"]["num_rollout"], **one_card),
    )


def predict2(objective: str) -> dict[str, Any]:
    run = published(objective, "2B", family="predict2", **T5_DATA)
    run["model"]["config"]["rl"]["min_num_conditional_frames"] = 1
    return run


for objective in ("flow_grpo", "ddrl"):
    register_experiment(f"predict2_2b_{objective}", partial(predict2, objective))

SIZE_480: dict[str, Any] = dict(video_size=[432, 768])
LATENTS: dict[str, Any] = dict(dataset_dir="datasets/cosmos_nemo_assets")
SHORTER = at_480p("predict2_2b_720_aggressive", state_t=16)
card_24: dict[str, Any] = dict(family="predict2", data_train="latents", data_val="mock", pipe_config=SHORTER)
card_80: dict[str, Any] = dict(pipe_config=at_480p("block_wise"))
gpus_8: dict[str, Any] = dict(pipe_config=at_480p("block_wise", ema=True))
for name, run, data, rank in [
    ("predict2_2b_flow_grpo_24gb", card_24, LATENTS, 16),
    ("predict2p5_2b_flow_grpo_80gb", card_80, SIZE_480, 32),
    ("predict2p5_2b_flow_grpo_8gpus", gpus_8, SIZE_480, 0),
]:
    register_experiment(name, partial(for_machine, name, run, data, rank=rank))
