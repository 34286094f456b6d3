# SPDX-License-Identifier: Apache-2.0
"""Post-training of Wan2.1 on clips with captions, in full and by adapters, and tiny twins on the toy world."""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.config_wan2pt1 import NETS
from cosmos_predict2.configs.base.defaults.wan2pt1 import group_name
from cosmos_predict2.configs.base.post_training import group_choices, job, lora, tiny_run, trainer
from imaginaire.config import register_experiment

CONTEXT_PARALLEL = {"1.3B": 1, "14B": 4}  # its heads, 40, are divisible; state_t is set to be
STATE_T = 20  # 77 pixel frames: divisible by 4 processes


def training(kind: str, size: str, *, by_lora: bool) -> dict[str, Any]:
    """Clips of 480p with captions, by the numbers of public trainers: rank 32, learning rate 1e-4 (in full 1e-5)."""
    config = dict(pipe_config=dict(state_t=STATE_T, ema=dict(enabled=False)))
    return dict(
        defaults=group_choices(group_name(kind, size), "gr1_captions", "gr1_captions"),
        job=job(f"{kind}_{size.lower()}{'_lora' if by_lora else ''}", group="wan2pt1"),
        model=dict(config={**config, **(lora(32) if by_lora else {})}),
        model_parallel=dict(context_parallel_size=CONTEXT_PARALLEL[size]),
        optimizer=dict(lr=1e-4 if by_lora else 1e-5, weight_decay=0.01),
        scheduler=dict(warm_up_steps=[100], cycle_lengths=[100_000], f_max=[1.0], f_min=[1.0]),
        trainer=trainer(2000, hit_thres=100),
        checkpoint=dict(save_iter=200),
    )


def tiny(kind: str) -> dict[str, Any]:
    """The twin on the toy world, with the numbers of the twins of other families."""
    return dict(
        defaults=group_choices(group_name(kind, "tiny"), "toy", "toy", optimizer="muon", ema="power"),
        job=job(f"tiny_wan2pt1_{kind}", group="wan2pt1"),
        **tiny_run(4000, lr=0.03, adam_lr=2e-3),
    )


for kind, size in NETS:
    name = group_name(kind, size)
    if size == "tiny":
        register_experiment(f"tiny_wan2pt1_{kind}", partial(tiny, kind))
        continue
    register_experiment(f"{name}_training", partial(training, kind, size, by_lora=False))
    register_experiment(f"{name}_lora_training", partial(training, kind, size, by_lora=True))
