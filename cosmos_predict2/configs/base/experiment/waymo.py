# SPDX-License-Identifier: Apache-2.0
"""Post-training of the multi-view model on five cameras of Waymo's cars, in full and by adapters, and tiny twins on two
cameras around the toy world."""

from functools import partial
from typing import Any

from cosmos_predict2.callbacks.draw_samples import DrawSamples
from cosmos_predict2.configs.base.defaults.data import WAYMO_CAMERAS
from cosmos_predict2.configs.base.post_training import (
    group_choices,
    job,
    linear,
    lora,
    model_config,
    tiny_run,
    tiny_twin,
    trainer,
)
from cosmos_predict2.released import TINY_MULTIVIEW
from imaginaire.config import L, register_experiment

GROUP, PREFIX = "multiview", "predict2_multiview"


def waymo(resolution: str, sac_mode: str, **config: Any) -> dict[str, Any]:
    """Clips of 29 frames; none or one latent frame of each view is given."""
    name = f"{'lora_' if config else ''}2b_{resolution}p_10fps_7views_29frames_waymo5views"
    data = f"waymo5views_{resolution}p"
    made = model_config(
        ema=True,
        resolution=resolution,
        prompt_refiner_config=dict(enabled=False),
        conditioner=dict(text=dict(dropout_rate=0.2)),
        net=dict(view_ids=list(WAYMO_CAMERAS.values()), sac_config=dict(mode=sac_mode)),
    )
    made["config"] |= config
    run, drawn = (
        trainer(100_000, hit_thres=10),
        dict(every_n=500, num_sampling_step=35, is_x0=False, guidance=[0, 2, 7]),
    )
    run["callbacks"] |= dict(
        device_monitor=dict(every_n=100),
        every_n_sample_reg=L(DrawSamples)(**drawn, is_ema=False),
        every_n_sample_ema=L(DrawSamples)(**drawn, is_ema=True),
    )
    return dict(
        defaults=group_choices(f"{PREFIX}_fsdp_2b_720p_10fps_7views_29frames", data, data),
        job=job(name, GROUP),
        model=made,
        model_parallel=dict(context_parallel_size=8),
        optimizer=dict(lr=2**-14.5, weight_decay=0.1),
        scheduler=linear(2000, 40_000, 0.25, 0.1),
        trainer=dict(logging_iter=100, **run),
        checkpoint=dict(save_iter=500),
    )


for name, made in {
    "training_2b_720p": partial(waymo, "720", "predict2_2b_720"),
    "training_2b_480p": partial(waymo, "480", "none"),
    "lora_training_2b_720p": partial(waymo, "720", "none", **lora(16)),
}.items():
    register_experiment(f"{PREFIX}_{name}_10fps_7views_29frames_waymo5views", made)
TINY = partial(tiny_twin, data="toy_waymo", group=GROUP, model="multiview")
numbers, of_adapters = tiny_run(2000, 8, lr=0.03, adam_lr=2e-3), tiny_run(750, 8, lr=0.02)
adapters = dict(model_manager_config=dict(dit_path=TINY_MULTIVIEW), **lora(16))
for name, made in {
    "training": partial(TINY, "tiny_waymo5views", numbers=numbers),
    "lora_training": partial(TINY, "lora_tiny_waymo5views", numbers=of_adapters, **adapters),
}.items():
    register_experiment(f"{PREFIX}_{name}_tiny_waymo5views", made)
