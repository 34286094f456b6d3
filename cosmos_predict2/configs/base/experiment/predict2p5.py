# SPDX-License-Identifier: Apache-2.0
"""Post-training of Predict2.5 on GR00T-Dreams GR1 clips and on Cosmos-NeMo-Assets, and a tiny twin on the toy world.

Where Predict2 has an experiment of the same name, this one begins with predict2p5_.
"""

from functools import partial
from typing import Any

from cosmos_predict2.callbacks.draw_samples import DrawSamples
from cosmos_predict2.configs.base.post_training import group_choices, linear, lora, tiny_run
from imaginaire.config import L, register_experiment

TINY = tiny_run(4000, lr=0.03, adam_lr=2e-3)


def post_training(
    name: str,
    data: str,
    *,
    size: str = "2B",
    group: str = "video2world",
    lr_exponent: float = -14.5,
    warm_up: int = 2000,
    hit_thres: int = 200,
    save_iter: int = 200,
    config: dict[str, Any] | None = None,
    pipe_config: dict[str, Any] | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    """A thousand steps on few clips, whose captions are encoded on the way. Samples are drawn every 200."""
    return dict(
        defaults=group_choices(f"predict2p5_video2world_fsdp_{size.lower()}", data, data, ema="power"),
        job=dict(project="cosmos_predict_v2p5", group=group, name=name),
        model=dict(config=dict(**(config or {}), pipe_config=pipe_config or {})),
        optimizer=dict(lr=2**lr_exponent, weight_decay=1e-3),
        scheduler=linear(warm_up, 100_000, 0.5, 0.2),
        trainer=dict(
            max_iter=1000,
            logging_iter=100,
            callbacks=dict(iter_speed=dict(hit_thres=hit_thres), draw_samples=L(DrawSamples)(every_n=200)),
            **trainer,
        ),
        checkpoint=dict(save_iter=save_iter),
    )


GROOT = dict(data="gr1_captions", warm_up=1000, hit_thres=100)
EVENLY = {0: 0.333, 1: 0.333, 2: 0.334}  # from text, from a picture, and from a clip
ADAPTERS = dict(
    group="lora", config=dict(conditional_frames_probs=EVENLY, **lora(32)), run_validation=True, validation_iter=5
)

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "predict2p5_video2world_training_2b_groot_gr1_480": dict(name="2b_groot_gr1_480", **GROOT),
    "predict2p5_video2world_training_14b_groot_gr1_480": dict(
        name="14b_groot_gr1_480", size="14B", lr_exponent=-15.5, pipe_config=dict(state_t=12), **GROOT
    ),
    "predict2p5_video2world_training_2b_cosmos_nemo_assets": dict(
        name="2b_cosmos_nemo_assets", data="cosmos_nemo_assets_captions"
    ),
    "predict2_lora_training_2b_cosmos_nemo_assets_txt": dict(
        name="2b_cosmos_nemo_assets_lora", data="cosmos_nemo_assets_captions", **ADAPTERS
    ),
    "predict2_lora_training_2b_cosmos_nemo_assets_json": dict(
        name="2b_cosmos_nemo_assets_json_lora", data="cosmos_nemo_assets_json", save_iter=30, **ADAPTERS
    ),
}

for experiment, row in EXPERIMENTS.items():
    register_experiment(experiment, partial(post_training, **row))
for size in ("tiny", "tiny_reason1"):  # the second by a random Reason1 of two layers, as the released ones are trained
    register_experiment(
        f"predict2p5_video2world_training_{size}_groot_gr1_480",
        dict(
            defaults=group_choices(f"predict2p5_video2world_fsdp_{size}", "toy", "toy", optimizer="muon", ema="power"),
            job=dict(project="cosmos_predict_v2p5", group="video2world", name=f"{size}_groot_gr1_480"),
            **TINY,
        ),
    )
