# SPDX-License-Identifier: Apache-2.0
"""Masks, scores, advantages and losses of a policy that decides on chunks, against golden values."""

import torch
from torch import Tensor

from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLARLConfig
from cosmos_predict2.rl.episodes.decisions import policy_loss
from cosmos_predict2.rl.interfaces import LogProb
from cosmos_predict2.rl.objectives import group_advantages, groups_within
from tests.goldens import Golden

AREA = "action"
FILE = "chunk_grpo.safetensors"
CLOSE = dict(rtol=1e-6, atol=1e-6)
PUBLISHED_EPSILON = 1e-6


def test_chunk_grpo(golden: Golden) -> None:
    tensors, config = golden.tensors(FILE), golden.metadata(FILE)["config"]
    members, dims, lower, upper = (config[name].use() for name in ("gs", "ad", "lo", "hi"))
    rewards_M_E_A, dones_M1_E_A = tensors["rewards"].use(), tensors["dones"].use()
    decisions, environments, actions = rewards_M_E_A.shape
    for name, size in {"nc": decisions, "ng": environments // members, "ch": actions}.items():
        config[name].compare(size)
    before_M_E_A = dones_M1_E_A.bool().transpose(1, 2).flatten(0, 1)[actions - 1 : -1].cumsum(dim=0)
    valid_M_E_A = (before_M_E_A == 0).unflatten(0, (-1, actions)).transpose(1, 2)  # no end before the action
    levels = sorted({name.rpartition(".")[0] for name in tensors if "." in name})
    assert levels
    for level in levels:
        of_reward, of_log_prob = level.split(".")
        rewards, valid = rewards_M_E_A, valid_M_E_A
        if of_reward == "chunk_level":
            rewards, valid = rewards.sum(dim=2, keepdim=True), valid.any(dim=2, keepdim=True)
        score_N_G = (rewards * valid).sum(dim=(0, 2)).unflatten(0, (-1, members))
        tensors[f"{level}.scores"].compare(score_N_G, **CLOSE)
        everyone = torch.ones_like(score_N_G, dtype=torch.bool)
        kept_E = groups_within(score_N_G, everyone, lower=lower, upper=upper).repeat_interleave(members)
        tensors[f"{level}.loss_mask"].compare((valid & kept_E[:, None]).to(torch.uint8))
        advantage_E = group_advantages(score_N_G, everyone, epsilon=PUBLISHED_EPSILON, correction=1).flatten()
        tensors[f"{level}.advantages"].compare(advantage_E[:, None] * (valid & kept_E[:, None]), **CLOSE)

        def of_rows(name: str, level: str = level) -> Tensor:
            return tensors[f"{level}.{name}"].use().unflatten(1, (actions, dims))

        found = policy_loss(
            LogProb(of_rows("logprobs")),
            of_rows("old_logprobs"),
            advantage_E.repeat(decisions),
            (valid_M_E_A & kept_E[:, None]).flatten(0, 1),
            VLARLConfig(
                clip_ratio=config["clip_low"].use(),
                clip_ratio_high=config["clip_high"].use(),
                dual_clip=config["clip_c"].use(),
                loss=PolicyLossConfig(ratio_level=of_log_prob, aggregation="token-mean", sums_unexecuted=True),
            ),
        )
        tensors[f"{level}.loss"].compare(found.loss.reshape(1), **CLOSE)
        tensors[f"{level}.clip_fraction"].compare(found.watched["clip_fraction"].reshape(1), **CLOSE)
