# SPDX-License-Identifier: Apache-2.0
"""Post-training of the released models with actions: on Bridge, whose motion follows from its poses, GR1 and LIBERO.

A world model of one suite of LIBERO is conditioned on the commands of the controller. Another suite:
``dataloader_train=libero_object_train dataloader_val=libero_object_val`` (also goal, 10).

The published experiments of Predict2.5 have variants that start from random weights (``_wo_resume``), on noise in place
of data too (``_mock_wo_resume``), to try a machine. Their AdamW is the one with float32 moments and masters: in
bfloat16, a second moment that keeps 0.999 of itself never falls, and steps of these learning rates are lost in the
weights.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from cosmos_predict2.callbacks.draw_samples import DrawSamples
from cosmos_predict2.configs.action_conditioned.defaults.data import GR1_DIM
from cosmos_predict2.configs.base.post_training import group_choices, job, linear, model_config, trainer
from cosmos_predict2.released import get_cosmos_predict25_checkpoint
from imaginaire.config import L, register_experiment

LIBERO_ITERATIONS = 20_000


def bridge_by_predict2() -> dict[str, Any]:
    """A run from the released action-conditioned weights, at a constant learning rate."""
    model, data = "predict2_v2w_2b_action_conditioned_fsdp", ("bridge_train", "bridge_val")
    return dict(
        defaults=group_choices(model, *data, scheduler="constant"),
        job=job("2b_action_conditioned"),
        model=model_config(ema=False),
        dataloader_train=dict(batch_size=2),
        optimizer=dict(lr=1e-4, weight_decay=0.1),
        trainer=trainer(400_000, hit_thres=5),
        checkpoint=dict(save_iter=500),
    )


def libero_by_predict2() -> dict[str, Any]:
    """The flat network from the weights of Bridge, which have seen robots and must learn these actions anew."""
    model, data = "predict2_v2w_2b_action_conditioned_fsdp", ("libero_spatial_train", "libero_spatial_val")
    return dict(
        defaults=group_choices(model, *data),
        job=job("2b_libero_action_conditioned"),
        model=model_config(ema=True),
        dataloader_train=dict(batch_size=8),
        optimizer=dict(lr=3.2e-4, weight_decay=0.1),
        scheduler=linear(1000, LIBERO_ITERATIONS, 1.0, 0.1),
        trainer=trainer(LIBERO_ITERATIONS, hit_thres=10),
        checkpoint=dict(save_iter=500),
    )


register_experiment("predict2_video2world_2b_action_conditioned_training", bridge_by_predict2)
register_experiment("predict2_video2world_2b_libero_action_conditioned", libero_by_predict2)


PROJECT, OFFICIAL = "cosmos_predict2_action_conditioned", "official_runs_vid2vid"
BRIDGE = "cosmos_predict2p5_2B_reason_embeddings_action_conditioned_rectified_flow_bridge_13frame"
GR1 = "cosmos_predict2p5_2B_action_conditioned_gr00t_gr1_customized_13frame"
CHUNK, FLAT = "predict2p5_v2w_2b_action_chunk_conditioned_fsdp", "predict2p5_v2w_2b_action_conditioned_fsdp"


@dataclass(frozen=True)
class ActionRun:
    """The settings in which one published experiment differs from others. ``data`` are those of training and of
    validation."""

    data: tuple[str, str]
    model: str = CHUNK
    batch_size: int = 8
    lr: float = 32e-5
    action_dim: int = 7
    group: str = OFFICIAL
    name: str = ""  # the experiment's where there is none


BRIDGE_256 = ("bridge_13frame_256_320_train", "bridge_13frame_256_320_val")
BRIDGE_480 = ("bridge_13frame_480_640_train", "bridge_13frame_480_640_val")
GR1_TRAIN = ("gr00t_customiezed_gr1_train", "gr00t_customiezed_gr1_val")
GR1_FULL = ("gr00t_customiezed_gr1_full", "gr00t_customiezed_gr1_val")
GR1_LR = 2**-14.5
RUNS = {
    "ac_reason_embeddings_rectified_flow_2b_256_320": ActionRun(
        BRIDGE_256, group="cosmos_predict_v2p5", name="2b_bridge_action_conditioned"
    ),
    f"{BRIDGE}_480_640_": ActionRun(BRIDGE_480, model=FLAT, batch_size=2, lr=2**-14.5),
    f"{BRIDGE}_256x320": ActionRun(BRIDGE_256),
    GR1: ActionRun(GR1_TRAIN, batch_size=4, lr=GR1_LR, action_dim=GR1_DIM),
    f"{GR1}_full": ActionRun(GR1_FULL, batch_size=4, lr=GR1_LR, action_dim=GR1_DIM),
    f"{GR1}_full_16nodes_release": ActionRun(GR1_FULL, batch_size=4, lr=16e-5, action_dim=GR1_DIM),
    f"{GR1}_oss": ActionRun(GR1_FULL, batch_size=4, lr=16e-5, action_dim=GR1_DIM),
}


def trained(experiment: str, run: ActionRun) -> dict[str, Any]:
    """A run from the pre-trained model; samples are drawn without guidance."""
    net = dict(action_dim=run.action_dim) if run.model == CHUNK else {}
    return dict(
        defaults=group_choices(run.model, *run.data, ema="power"),
        job=dict(project=PROJECT, group=run.group, name=run.name or experiment),
        model=dict(config=dict(pipe_config=dict(net=net))),
        dataloader_train=dict(batch_size=run.batch_size),
        optimizer=dict(lr=run.lr, weight_decay=0.1, betas=[0.9, 0.999]),
        scheduler=linear(100, 400_000, 0.99, 0.4),
        trainer=dict(
            max_iter=150_000,
            callbacks=dict(
                grad_clip=dict(clip_norm=0.1), draw_samples=L(DrawSamples)(every_n=500, guidance=[0.0], fps=16.0)
            ),
        ),
        checkpoint=dict(save_iter=2000),
    )


def without_weights(experiment: str, run: ActionRun, *, is_mock: bool) -> dict[str, Any]:
    """A thousand steps from random weights."""
    data = [{f"override /dataloader_{split}": "mock_action"} for split in ("train", "val")] if is_mock else []
    noise = dict(dataset=dict(action_shape=[12, run.action_dim])) if is_mock else {}
    return dict(
        defaults=[f"/experiment/{experiment}", *data, "_self_"],
        job=dict(group=OFFICIAL, name=f"{experiment}{'_mock' if is_mock else ''}_wo_resume"),
        model=dict(config=dict(model_manager_config=dict(dit_path=""))),
        **{f"dataloader_{split}": noise for split in ("train", "val") if is_mock},
        trainer=dict(max_iter=1000, logging_iter=50),
        checkpoint=dict(save_iter=10, strict_resume=False),
    )


def libero() -> dict[str, Any]:
    """One suite of LIBERO, from the weights of Bridge. Another: ``dataloader_train=libero_object_train`` and so on."""
    return dict(
        defaults=group_choices(CHUNK, "libero_spatial_train", "libero_spatial_val", ema="power"),
        job=job("2p5_2b_libero_action_conditioned"),
        model=dict(
            config=dict(model_manager_config=dict(dit_path=get_cosmos_predict25_checkpoint("2B/robot/action-cond")))
        ),
        dataloader_train=dict(batch_size=8),
        optimizer=dict(lr=3.2e-4, weight_decay=0.1, betas=[0.9, 0.999]),
        scheduler=linear(1000, LIBERO_ITERATIONS, 1.0, 0.1),
        trainer=dict(max_iter=LIBERO_ITERATIONS, callbacks=dict(grad_clip=dict(clip_norm=0.1))),
        checkpoint=dict(save_iter=500),
    )


for experiment, run in RUNS.items():
    register_experiment(experiment, partial(trained, experiment, run))
    for is_mock in (False, True):
        variant = f"{experiment}{'_mock' if is_mock else ''}_wo_resume"
        register_experiment(variant, partial(without_weights, experiment, run, is_mock=is_mock))
register_experiment("predict2p5_video2world_2b_libero_action_conditioned", libero)
