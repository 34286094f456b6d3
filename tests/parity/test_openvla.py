# SPDX-License-Identifier: Apache-2.0
"""OpenVLA-OFT: its codec, its pictures, its network and the losses of its training, against golden values."""

import torch
from torch import Tensor

from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLARLConfig
from cosmos_predict2.rl.episodes.decisions import policy_loss
from cosmos_predict2.rl.interfaces import LogProb
from cosmos_predict2.rl.objectives import group_advantages
from cosmos_predict2.rl.policies.openvla.inputs import (
    ActionTokens,
    Statistics,
    center_crop,
    token_log_probs,
    with_gripper,
)
from cosmos_predict2.rl.policies.openvla.layout import from_public, to_public
from cosmos_predict2.rl.policies.openvla.model import OpenVLAModel, OpenVLASizes
from tests.goldens import Golden

AREA = "vla"
STATISTICS, TINY = "openvla_stats.json", "openvla_oft_tiny_{}"
EXACT, LOG_PROBS, LOSSES = dict(atol=1e-12), dict(atol=1e-5), dict(atol=1e-6)
FEATURES, LOGITS = 5e-6, 5e-5  # of the largest


def test_codec(golden: Golden) -> None:
    tensors, stats = golden.tensors("openvla_action_codec.safetensors"), golden.json(STATISTICS)
    codec = ActionTokens(stats["vocab_size"].use(), stats["bins"].use())
    tensors["token_ids"].compare(codec.encode(tensors["actions"].use()))
    tensors["decoded"].compare(codec.decode(tensors["decode_ids"].use()), **EXACT)
    normalized, of_actions = tensors["normalized"].use(), stats["action_stats"].use()
    dim = normalized.shape[-1]
    for name, bounds in (("unnormalized_q99", "q99"), ("unnormalized_bounds", "minmax")):
        found = Statistics.of(of_actions, bounds, dim).unnormalized(normalized)
        tensors[name].compare(found, **EXACT)
        if bounds == "q99":
            tensors["env_actions"].compare(with_gripper(found, "libero", stats["gripper_index"].use()), **EXACT)
    proprio = tensors["proprio"].use()
    of_proprio = Statistics.of(stats["proprio_stats"].use(), "q99", proprio.shape[-1])
    tensors["proprio_normalized"].compare(of_proprio.normalized(proprio), **EXACT)
    stats["eps"].compare(1e-8)


def test_log_probabilities_of_tokens(golden: Golden) -> None:
    file = "openvla_logprob.safetensors"
    tensors, about = golden.tensors(file), golden.metadata(file)
    logits = tensors["logits"].use()
    codec = ActionTokens(logits.shape[-1] - about["pad_to_multiple_of"].use(), about["n_action_bins"].use())
    tokens = tensors["responses"].use() - codec.ids.start
    log_probs, entropy = token_log_probs(logits[..., codec.ids], tokens, about["temperature"].use())
    tensors["logprobs"].compare(log_probs, **LOG_PROBS)
    tensors["entropy"].compare(entropy, **LOG_PROBS)


def test_center_crop(golden: Golden) -> None:
    file = "image_preprocess.safetensors"
    tensors, about = golden.tensors(file), golden.metadata(file)
    expected = tensors["center_crop_out"].expected()
    cropped = center_crop(tensors["center_crop_in"].use().numpy(), expected.shape[0], about["center_crop_area"].use())
    assert torch.equal(torch.from_numpy(cropped.copy()), expected)
    about["resample"].compare("bilinear")


def test_tiny_oft(golden: Golden) -> None:
    config, io = golden.json(TINY.format("config.json")).use(), golden.tensors(TINY.format("io.safetensors"))
    about, of_weights = golden.metadata(TINY.format("io.safetensors")), TINY.format("weights.safetensors")
    assert golden.metadata(of_weights)["text_config"].use() == config["text_config"]
    sizes = OpenVLASizes.of(config, "the golden configuration")
    uses_proprio = str(about["use_proprio"].use()).lower() in ("true", "1")
    assert uses_proprio == config["use_proprio"]
    for name, value in (("pad_token_id", sizes.pad_id), ("image_size", sizes.image_size)):
        about[name].compare(value)
    about["num_images"].compare(config["num_images_in_input"])
    about["unnorm_key"].use()
    stored = golden.tensors(of_weights)
    source = {name: stored[name].use() for name in stored}
    model = OpenVLAModel(sizes, config["proprio_dim"] if uses_proprio else 0).eval()
    aside = from_public(model, source, of_weights)
    written = to_public(model.state_dict(), aside)
    assert written.keys() == source.keys() and all(torch.equal(written[name], source[name]) for name in source)
    proprio = io["proprio"].use() if uses_proprio else None
    codec = ActionTokens(sizes.vocabulary, sizes.bins)
    shape = (config["action_chunk"], config["action_dim"])
    statistics = Statistics.of(golden.json(STATISTICS)["action_stats"].use(), "q99", shape[1])
    with torch.no_grad():
        pixels = io["pixel_values"].use()
        patches = model.vision_backbone(pixels)
        io["vision_patches"].compare(patches, of_largest=FEATURES)
        io["projected"].compare(model.projector(patches), of_largest=FEATURES)
        for before in ("", "padded_"):
            prompt, length = _to_the_left(io[f"{before}input_ids"].use(), io[f"{before}attention_mask"].use(), sizes)
            logits = model.parallel_logits(model.seen(pixels, proprio), prompt, length, shape[0] * shape[1])
            if not before:
                io["action_logits"].compare(logits, of_largest=LOGITS)
            ids = logits[..., codec.ids].argmax(dim=-1) + codec.ids.start
            io[f"{before}greedy_ids"].compare(ids)
            actions = statistics.unnormalized(codec.decode(ids).unflatten(1, shape))
            io[f"{before}greedy_actions"].compare(actions, **EXACT)


def _to_the_left(ids_B_S: Tensor, mask_B_S: Tensor, sizes: OpenVLASizes) -> tuple[Tensor, Tensor]:
    """Rows that begin with their first valid id, and how many are valid."""
    is_valid = mask_B_S.bool()
    rows = torch.full_like(ids_B_S, sizes.pad_id)
    for row, ids, valid in zip(rows, ids_B_S, is_valid):
        row[: int(valid.sum())] = ids[valid]
    return rows, is_valid.sum(dim=1)


def test_group_advantages_of_episodes(golden: Golden) -> None:
    for case in golden.json("grpo_advantage.json"):
        rewards = torch.tensor(case["rewards"].use(), dtype=torch.float32)[None]
        everyone, epsilon = torch.ones_like(rewards, dtype=torch.bool), case["eps"].use()
        case["advantage"].compare(group_advantages(rewards, everyone, epsilon=epsilon)[0], atol=1e-6)
        case["advantage_unbiased"].compare(group_advantages(rewards, everyone, norm="none")[0], atol=1e-6)


def test_dapo_of_tokens(golden: Golden) -> None:
    file = "dapo_openvla.safetensors"
    tensors, metadata = golden.tensors(file), golden.metadata(file)
    about = {name: metadata[name].use() for name in metadata}
    actions, dims, size = (about[name] for name in ("action_chunk", "action_dim", "training_chunk_size"))
    config = VLARLConfig(
        clip_ratio=about["epsilon_low"],
        clip_ratio_high=about["epsilon_high"],
        loss=PolicyLossConfig(ratio_level="element", aggregation=about["loss_agg"]),
    )
    losses = []
    for e in range(about["num_episodes"]):
        steps = torch.arange(about["max_chunks"] * actions).reshape(-1, actions)
        valid = steps < about["finish_steps"][e]
        tensors[f"mask_{e}"].compare(valid.repeat_interleave(dims, dim=1).to(tensors[f"mask_{e}"].use().dtype))
        new = tensors[f"log_probs_{e}"].use().clone().requires_grad_()
        old = torch.zeros_like(new)
        stored = tensors[f"old_log_probs_{e}"].use()
        old[: len(stored)] = stored
        for first in range(0, len(new), size):
            part = slice(first, first + size)
            shaped = [value[part].unflatten(1, (actions, dims)) for value in (new, old)]
            loss = policy_loss(
                LogProb(shaped[0]),
                shaped[1],
                torch.full((len(shaped[0]),), about["advantages"][e]),
                valid[part],
                config,
                episode_sum_B=(valid.sum() * dims).expand(len(shaped[0])),
                num_episodes=about["num_episodes"],
            ).loss
            loss.backward()
            losses.append(float(loss.detach()))
        tensors[f"grad_{e}"].compare(new.grad, **LOSSES)
    tensors["losses"].compare(torch.tensor(losses), **LOSSES)
