# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning by a reward service, with the published numbers of Cosmos-RL's recipes: of Predict2.5, of
Predict2 2B, and of 2B for one card of 24 GB, one of 80 GB, or 8 GPUs.

The judge is VideoAlign (``dance_grpo``), at WFM_REWARD_ENQUEUE_URL and WFM_REWARD_FETCH_URL. FlowGRPO and DDRL train
all weights with the published log-ratio; NFT trains adapters. Recipes by machine train two drawn steps of each rollout,
the only ones that draw noise; one card trains adapters, without averaged weights.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.post_training import group_choices, job, linear, lora
from cosmos_predict2.rl.config import RewardConfig
from cosmos_predict2.rl.rewards.remote import RemoteReward
from imaginaire.config import L, register_experiment

DATA = "cosmos_nemo_assets_captions"
CONTEXT_PARALLEL = {"flow_grpo": {"2B": 1, "14B": 8}, "ddrl": {"2B": 2, "14B": 8}, "nft": {"2B": 1, "14B": 8}}
PUBLISHED: dict[str, Any] = dict(
    transition="churn",
    ratio_normalisation="cosmos_rl",
    loss_scale=10.0,
    clip_ratio=1e-4,
    num_rollout=8,
    rollout_batch=1,
)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "flow_grpo": dict(
        PUBLISHED, sample_steps=10, train_on=list(range(8)), kl_beta=0.01, update_ref_every_iter=16, use_same_seed=True
    ),
    "ddrl": dict(
        PUBLISHED,
        sample_steps=20,
        train_on=list(range(0, 20, 2)),
        data_beta=0.01,
        use_same_seed=False,
        min_num_conditional_frames=0,
        max_num_conditional_frames=1,
    ),
    "nft": dict(
        objective="nft",
        transition="ode",
        sample_steps=10,
        num_rollout=12,
        rollout_batch=1,
        kl_beta=1.0,
        nft_beta=1.0,
        weight_copy_decay_type=1,
        use_same_seed=False,
    ),
}
NFT_RANK, NFT_ALPHA = 32, 64
CHURN_LEVELS = dict(t_min=0.01, t_max=200.0)
SERVICE = dict(dance_grpo=RewardConfig(make=L(RemoteReward)(reward="dance_grpo", clip=[-5.0, 5.0])))


def published(
    objective: str,
    size: str,
    *,
    family: str = "predict2p5",
    data_train: str = DATA,
    data_val: str = DATA,
    pipe_config: dict[str, Any] | None = None,
    **own: Any,
) -> dict[str, Any]:
    """The run of one objective, with options of its ``own``. A micro-batch is one trained step of one clip."""
    rl = OBJECTIVES[objective] | own
    is_nft = objective == "nft"
    trained = rl["sample_steps"] if is_nft else len(rl["train_on"])
    advantage = dict(norm="group" if is_nft else "cosmos_rl")
    adapters: dict[str, Any] = dict(lora(NFT_RANK), lora_alpha=NFT_ALPHA) if is_nft else {}
    pipe: dict[str, Any] = dict(net=dict(sac_config=dict(mode="block_wise")))
    if family == "predict2p5" and not is_nft:  # Predict2 generates by these levels, too: its own stay
        pipe["timestamps"] = CHURN_LEVELS
    pipe |= pipe_config or {}
    return dict(
        defaults=group_choices(f"{family}_video2world_rl_{size.lower()}", data_train, data_val, ema="power"),
        job=job(f"{family}_{size.lower()}_{objective}", group="reinforcement_learning"),
        model=dict(config=dict(rl=dict(rl, rewards=SERVICE, advantage=advantage), pipe_config=pipe, **adapters)),
        model_parallel=dict(context_parallel_size=CONTEXT_PARALLEL[objective][size]),
        optimizer=dict(lr=3e-4 if is_nft else 1e-5, weight_decay=1e-4),
        scheduler=linear(50, 10_000_000_000_000, 1.0, 1.0),
        trainer=dict(max_iter=2001, logging_iter=2, grad_accum_iter=trained * rl["num_rollout"]),
        checkpoint=dict(save_iter=32),
    )


for objective in OBJECTIVES:
    for size in ("2B", "14B"):
        register_experiment(f"predict2p5_{size.lower()}_{objective}", partial(published, objective, size))

# Random videos, texts of T5's width and random weights: tries out a run with no other file than the tokenizer's.
UNPROJECTED = dict(resolution="480", net=dict(sac_config=dict(mode="block_wise"), crossattn_proj_in_channels=None))


def on_mock_data(name: str) -> dict[str, Any]:
    run = published("flow_grpo", "2B", data_train="mock_video", data_val="mock_video", pipe_config=UNPROJECTED)
    run["job"]["name"] = name
    run["model"]["config"] |= dict(text=dict(encoder=None), model_manager_config=dict(dit_path=""))
    return run


register_experiment(name := "predict2p5_2b_flow_grpo_mock_data", partial(on_mock_data, name))


# Predict2, and by machine ---------------------------------------------------------------------------------------------

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
    run = published("flow_grpo", "2B", **choices, **TWO_STEPS)
    run["job"]["name"] = name
    run["dataloader_train"] = dict(dataset=data)
    run["optimizer"] = dict(lr=1e-4 if rank else 1e-5, weight_decay=0.0)
    run["trainer"]["max_iter"] = 200
    if rank:
        run["model"]["config"] |= dict(lora(rank), fsdp_shard_size=0)
        run["trainer"]["distributed_parallelism"] = "ddp"
    return run


for objective in ("flow_grpo", "ddrl"):
    predict2 = partial(published, objective, "2B", family="predict2", **T5_DATA, min_num_conditional_frames=1)
    register_experiment(f"predict2_2b_{objective}", predict2)

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
