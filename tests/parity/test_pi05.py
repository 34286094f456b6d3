# SPDX-License-Identifier: Apache-2.0
"""PI0.5: the steps of its flow, its network, what it is given and its losses, against golden values."""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLARLConfig
from cosmos_predict2.rl.episodes.decisions import (
    Decisions,
    in_minibatches,
    policy_loss,
    rows_that_count,
    with_episodes,
)
from cosmos_predict2.rl.episodes.episodes import Trajectories
from cosmos_predict2.rl.interfaces import LogProb
from cosmos_predict2.rl.learner import rows_of
from cosmos_predict2.rl.policies.pi05 import flow, layout
from cosmos_predict2.rl.policies.pi05.config import read_config
from cosmos_predict2.rl.policies.pi05.inputs import Quantiles, prompt_text, prompt_tokens, resize_with_pad
from cosmos_predict2.rl.policies.pi05.network import NoiseHead, Pi05Network, PrefixCache, time_embedding
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from tests.goldens import Golden, Value

AREA = "vla"
STEPS, NETWORK, TIME, LOSSES = dict(atol=1e-5), dict(atol=2e-5), dict(atol=1e-9), dict(atol=1e-6)
TINY, DAPO = "pi05_tiny_{}", "dapo_pi05.safetensors"


def test_flow_steps(golden: Golden) -> None:
    for case in golden.json("flow_step_cases.json"):
        _compare_steps(case, golden)


def _compare_steps(case: Value, golden: Golden) -> None:
    of = {
        name.removeprefix(case["prefix"].use()): value
        for name, value in ((name, golden.tensors("flow_step.safetensors")[name]) for name in _names(golden, case))
    }
    x, v, following = (of[name].use() for name in ("x_t", "v_t", "x_next"))
    method, count = case["method"].use(), case["num_steps"].use()
    annealing = (case[name].use() for name in ("noise_level", "noise_anneal", "noise_params", "global_step"))
    level = torch.full((count,), flow.noise_level(*annealing))
    low, high = case["noise_logvar_range"].use()
    std = None
    if method == "flow_noise":
        weights = {name.removeprefix("noise_head."): each.use() for name, each in of.items() if "noise_head." in name}
        widths = [len(each) for name, each in sorted(weights.items()) if name.endswith("bias")]
        features = of["features"].use()
        head = NoiseHead(features.shape[-1], widths[-1], low, high, tuple(widths[:-1]))
        head.load_state_dict(weights)
        std = head(features)
    times, index = flow.step_times(count), torch.arange(count)
    mean, std = flow.flow_step(method, times, index, x, v, level, std)
    of["mean"].compare(mean, **STEPS)
    of["std"].compare(std, **STEPS)
    of["logprob"].compare(flow.step_log_prob(following, mean, std), **STEPS)
    of["entropy"].compare(flow.step_entropy(std), **STEPS)
    mean, std = flow.flow_step(flow.EVAL, times, index, x, v, level)
    of["eval_mean"].compare(mean, **STEPS)
    of["eval_std"].compare(std, **STEPS)
    if method == "flow_cps":
        assert not of["std"].expected()[-1].any()


def _names(golden: Golden, case: Value) -> list[str]:
    return [name for name in golden.tensors("flow_step.safetensors") if name.startswith(case["prefix"].use())]


@pytest.fixture
def network(golden: Golden) -> Pi05Network:
    for name in golden.tensors(TINY.format("weights.safetensors")):
        golden.tensors(TINY.format("weights.safetensors"))[name].use()
    content = golden.json(TINY.format("config.json")).use()
    for name, value in golden.metadata(TINY.format("io.safetensors")).use().items():
        assert content[name] == value
    network = Pi05Network(read_config(content, "the golden", {}))
    layout.load(network, str(golden.folder / TINY.format("weights.safetensors")))
    return network.requires_grad_(False)


@pytest.fixture
def prefix(network: Pi05Network, golden: Golden) -> PrefixCache:
    io = golden.tensors(TINY.format("io.safetensors"))
    inputs = [io[name].use() for name in ("images", "image_masks", "tokens", "token_mask")]
    embedded, is_there = network.embed(*inputs)
    io["prefix_embs"].compare(embedded, **NETWORK)
    io["prefix_pad"].compare(is_there.to(torch.uint8))
    io["state"].use()  # PI0.5 has no place for it
    return network.prefix(*inputs)


def _policy(network: Pi05Network, prefix: PrefixCache, **options: Any) -> Pi05Policy:
    """The policy of a network that has seen this, and whose actions need no statistics."""
    policy = Pi05Policy.__new__(Pi05Policy)
    nn.Module.__init__(policy)
    policy.network, policy.config = network, replace(network.config, **options)
    policy.action_stats = SimpleNamespace(restored=lambda actions: actions)  # type: ignore[assignment]
    policy.register_buffer("trainer_step", torch.zeros((), dtype=torch.int64))
    policy.seen = lambda observation: {}  # type: ignore[method-assign]
    policy._prefix = lambda record, pixels=None: prefix  # type: ignore[method-assign]
    return policy


def test_tiny_pi05_supervised(network: Pi05Network, prefix: PrefixCache, golden: Golden) -> None:
    io = golden.tensors(TINY.format("io.safetensors"))
    actions, noise, t = (io[name].use() for name in ("sft_actions", "noise", "time"))
    io["time_emb"].compare(time_embedding(t, network.config.expert.width), **TIME)
    io["sft_loss"].compare(_policy(network, prefix).flow_loss({}, actions, noise, t), **NETWORK)


def test_tiny_pi05_decisions(network: Pi05Network, prefix: PrefixCache, golden: Golden) -> None:
    io, config = golden.tensors(TINY.format("io.safetensors")), network.config
    policy, noise = _policy(network, prefix), io["noise"].use()
    policy._drawn = lambda generators, shape: noise  # type: ignore[method-assign]
    chains = policy.act({}, mode="greedy", generators=[torch.Generator()] * len(noise)).record["chains"]
    io["eval_chains"].compare(chains, **NETWORK)
    io["eval_actions"].compare(chains[:, -1, :, : config.env_dim], **NETWORK)

    drawn = io["train_denoise_inds"].use()
    assert (drawn == drawn[:, :1]).all()
    every = torch.arange(config.num_steps).expand(len(noise), -1)
    for name, indices in {"train": drawn, "joint": every}.items():
        policy = _policy(network, prefix, joint_logprob=name == "joint")
        level = torch.full((len(noise),), config.noise_level)
        record = {"chains": io[f"{name}_chains"].use(), "denoise_inds": indices, "noise_level": level}
        io[f"{name}_replay_log_probs"].compare(policy.replay(record)[0], **NETWORK)
        io[f"{name}_old_log_probs"].compare(policy.log_prob(record).log_prob_B_K_N, **NETWORK)


def test_pictures_in_a_frame(golden: Golden) -> None:
    file = "image_preprocess.safetensors"
    tensors, fill = golden.tensors(file), golden.metadata(file)["resize_pad_fill"].use()
    for name in tensors:
        if size := re.fullmatch(r"resize_pad_out_(\d+)x(\d+)", name):
            height, width = map(int, size.groups())
            tensors[name].compare(resize_with_pad(tensors["resize_pad_in"].use(), height, width, fill))


def test_statistics(golden: Golden) -> None:
    tensors, stats = golden.tensors("pi05_norm.safetensors"), golden.json("pi05_prompt_norm.json")["norm_stats"]
    of_state, of_actions = (Quantiles.of(stats[name].use()) for name in ("state", "actions"))
    tensors["state_normalized"].compare(of_state.normalised(tensors["state"].use()), **STEPS)
    actions = tensors["actions"].use()
    known = len(of_actions.q01)
    for name in tensors:
        if name.startswith("actions") and name != "actions":
            dims = int(name.removeprefix("actions").removesuffix("_unnormalized"))
            tensors[name].compare(of_actions.restored(actions[..., :dims]), **STEPS)
            assert dims >= known


@pytest.mark.golden_cases("pi05_prompt_norm.json", "prompts")
def test_prompts(case: Value, golden: Golden) -> None:
    content = golden.json("pi05_prompt_norm.json")
    counts, length = content["dummy_encoder_ids"].use(), content["max_token_len"].use()
    content["note"].use()
    state = case["state"].use()
    state = None if state is None else torch.tensor(state)
    case["text"].compare(prompt_text(case["task"].use(), state))

    def encode(text: str, begins: bool) -> Sequence[int]:
        assert begins == (text != "\n")
        return [7] * counts["newline" if text == "\n" else "text"]

    ids, mask = prompt_tokens(encode, case["task"].use(), state, length)
    case["mask"].compare(mask.tolist())
    case["n_valid"].compare(int(mask.sum()))
    assert torch.equal(ids != 0, mask)


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["slices", "shuffled"])
def test_dapo_losses_and_gradients(is_shuffled: bool, golden: Golden) -> None:
    """In slices of an episode as published, and in micro-batches of decisions in any order: the same gradients."""
    tensors, settings = golden.tensors(DAPO), golden.metadata(DAPO)
    of = {name: settings[name].use() for name in settings}
    episodes, size, width, chunks = (
        of[name] for name in ("num_episodes", "training_chunk_size", "action_env_dim", "max_chunks")
    )
    for suffix, dual in (("", of["clip_ratio_c"]), ("_noclipc", None)):
        loss = PolicyLossConfig(
            ratio_level="element",
            aggregation=of["loss_agg"],
            slice_decisions=size,
            largest_log_ratio=of["log_ratio_clamp"],
        )
        rl = VLARLConfig(
            clip_ratio=of["epsilon_low"],
            clip_ratio_high=of["epsilon_high"],
            dual_clip=dual,
            micro_batches=5 if is_shuffled else 1,
            loss=loss,
        )
        given = [tensors[f"log_probs_{e}"].use().clone().requires_grad_() for e in range(episodes)]
        cut = torch.stack([one.mean(dim=1)[:chunks, : of["action_chunk"], :width] for one in given], dim=1)
        masks, old = [], torch.zeros_like(cut)
        for e in range(episodes):
            mask = tensors[f"mask_{e}"].use().bool().unflatten(1, (of["action_chunk"], width)).any(dim=2)
            executed = torch.arange(chunks * of["action_chunk"]) < of["finish_steps"][e]
            assert torch.equal(mask.flatten(), executed)
            masks.append(mask)
            drawn_with = tensors[f"old_log_probs_{e}"].use()
            old[: len(drawn_with), e] = drawn_with
        whole = Decisions(
            {"place": torch.arange(chunks * episodes)},
            old.flatten(0, 1).detach(),
            torch.tensor(of["advantages"]).repeat(chunks),
            torch.stack(masks, dim=1).flatten(0, 1),
        )
        whole = with_episodes(whole, _played(torch.stack(masks, dim=1)), rl)
        if is_shuffled:
            parts = list(in_minibatches(whole, rows_that_count(whole, rl), rl, seed=3, first=0))
        else:
            places = whole.record["place"].unflatten(0, (chunks, episodes))
            parts = [rows_of(whole, rows) for e in range(episodes) for rows in places[:, e].split(size)]
        losses = torch.stack([_loss_of(part, cut.flatten(0, 1), rl) for part in parts]) / rl.micro_batches
        for e, gradient in enumerate(torch.autograd.grad(losses.sum(), given)):
            tensors[f"grad{suffix}_{e}"].compare(gradient, **LOSSES)
        if is_shuffled:
            assert losses.sum().item() == pytest.approx(tensors[f"losses{suffix}"].use().sum().item(), abs=1e-5)
        else:
            tensors[f"losses{suffix}"].compare(losses, **LOSSES)


def _loss_of(part: Decisions, new_B_K_N: torch.Tensor, rl: VLARLConfig) -> torch.Tensor:
    terms = (LogProb(new_B_K_N[part.record["place"]]), part.old_log_prob_B_K_N, part.advantage_B, part.mask_B_A)
    return policy_loss(*terms, rl, episode_sum_B=part.episode_sum_B, num_episodes=part.num_episodes).loss


def _played(executed_M_E_A: torch.Tensor) -> Trajectories:
    executed = executed_M_E_A
    everyone = torch.ones(executed.shape[1], dtype=torch.bool)
    return Trajectories({}, executed[..., None], executed.float(), executed, everyone, everyone.long(), everyone)
