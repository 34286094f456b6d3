# SPDX-License-Identifier: Apache-2.0
"""Published runs on one card of 24 GB: ``one_card_24gb_NAME`` is the run with rungs of memory that `scripts.plan` finds
to fit (documentations/small_cards.md). None has run on such a card yet.
"""

from functools import partial
from typing import Any

from imaginaire.config import register_experiment

GROOT = "predict2_video2world_training_{}_groot_gr1_480"
RECOMPUTE = dict(pipe_config=dict(net=dict(sac_config=dict(mode="block_wise", every_n_blocks=1))))
LORA = dict(train_architecture="lora", **RECOMPUTE)
# name: the experiment, and what differs; the frozen base of 14B lies on the host, and clips have 45 frames
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "2b": (GROOT.format("2b"), dict(model=dict(config=RECOMPUTE), optimizer=dict(offload=True))),
    "2b_lora": (GROOT.format("2b"), dict(model=dict(config=LORA))),
    "14b_lora": (
        GROOT.format("14b"),
        dict(
            model=dict(
                config=dict(
                    train_architecture="lora",
                    swap_blocks=36,
                    fsdp_shard_size=0,
                    pipe_config=dict(**RECOMPUTE["pipe_config"], state_t=12),
                )
            ),
            model_parallel=dict(context_parallel_size=1),
        ),
    ),
    "action_flow_grpo_lora": ("predict2_2b_action_flow_grpo", dict(model=dict(config=LORA))),
    "pi05_libero": ("vla_grpo_pi05_libero_10", {}),
    "openvla_oft_libero_lora": (
        "vla_grpo_openvla_oft_libero_10",
        dict(model=dict(config=dict(policy=dict(lora_rank=32)))),
    ),
}


def on_one_card(name: str, experiment: str, changes: dict[str, Any]) -> dict[str, Any]:
    return dict(defaults=[f"/experiment/{experiment}", "_self_"], job=dict(name=name), **changes)


for label, (experiment, changes) in RUNS.items():
    register_experiment(f"one_card_24gb_{label}", partial(on_one_card, f"one_card_24gb_{label}", experiment, changes))
