# SPDX-License-Identifier: Apache-2.0
"""Advantages, losses and schedules of reinforcement learning against golden values."""

import base64
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_predict2.rl import objectives
from cosmos_predict2.rl.clips.rollout import Forward, Losses
from cosmos_predict2.rl.config import AdvantageConfig, RLConfig
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.objectives import OBJECTIVES, FreshNoise, RatioStep
from cosmos_predict2.rl.rewards import wire
from imaginaire.errors import DataError
from imaginaire.optim.schedules import lambda_linear
from imaginaire.training.model import PowerEMA
from tests.goldens import Golden, Value

AREA = "rl"
LOSS = dict(rtol=1e-5, atol=1e-7)
SAME_FORMULA = dict(rtol=1e-9, atol=1e-12)
BY_PROMPT = {
    "per_prompt_group_std": "group",
    "per_prompt_global_std": "global",
    "no_tracking": "group",  # of all prompts together
    "type_dpo": "dpo",
    "type_sft": "sft",
}


@pytest.mark.parametrize("name", BY_PROMPT)
def test_advantages_by_prompt(golden: Golden, name: str) -> None:
    """Published groups that are all alike, or of one alone, have advantages by sft and dpo; here they teach nothing."""
    content = golden.json("advantages.json")
    prompts, rewards = content["prompts"].use(), torch.tensor(content["rewards"].use(), dtype=torch.float64)
    if name == "no_tracking":
        prompts = [""] * len(prompts)
    is_of_N_B = torch.tensor([[other == prompt for other in prompts] for prompt in dict.fromkeys(prompts)])
    rewards_N_B = rewards.expand_as(is_of_N_B)
    found = objectives.group_advantages(rewards_N_B, is_of_N_B, norm=BY_PROMPT[name]).sum(dim=0)
    teaches_B = (is_of_N_B & objectives.has_spread(rewards_N_B, is_of_N_B)[:, None]).any(dim=0)
    expected = torch.tensor(content[name].expected(), dtype=torch.float64)
    torch.testing.assert_close(found[teaches_B], expected[teaches_B], rtol=0, atol=1e-6)
    assert teaches_B.any() and not found[~teaches_B].any()


@pytest.mark.golden_cases("advantages.json", "cosmos_rank_groups")
def test_advantages_of_ranks(case: Value) -> None:
    """Rewards of the ranks of one group, each with a batch; a rank is valid or not."""
    rewards_G_B, valid_G = torch.tensor(case["rewards"].use()), torch.tensor(case["valid"].use())
    for b, rewards_G in enumerate(rewards_G_B.T):
        filled, found = objectives.filled_in(rewards_G, valid_G)
        for g, result in enumerate(case["result"]):
            for key, value in {"reward": filled[g], "advantage": found[g]}.items():
                wanted = result[key].expected()[b]
                torch.testing.assert_close(value, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
            if len(valid_G) > 1:
                torch.testing.assert_close(filled.mean(), torch.tensor(result["mean_reward"].expected()[b]))
                torch.testing.assert_close(filled.std(), torch.tensor(result["std_reward"].expected()[b]))


def test_clipped_losses(golden: Golden) -> None:
    tensors, options = golden.tensors("policy_losses.safetensors"), golden.json("options.json")["policy_losses"]
    largest = options["adv_clip"].use()
    advantage = tensors["advantage"].use().clamp(-largest, largest)
    old = tensors["log_prob_old"].use()
    tensors["approx_kl"].compare(objectives.approximate_kl(tensors["log_prob_new"].use() - old), **LOSS)
    for clip in options["clips"].use():
        new = tensors["log_prob_new"].use().clone().requires_grad_()
        found = objectives.clipped(new - old, advantage, clip)
        of = lambda name, clip=clip: tensors[f"clip_{clip}/{name}"]  # noqa: E731
        of("ratio").compare(found.ratio_B, atol=2e-7)
        of("loss").compare(found.loss_B.mean(), **LOSS)
        of("clipfrac").compare((found.is_above_B | found.is_below_B).float().mean(), **LOSS)
        of("clipfrac_gt_one").compare(found.is_above_B.float().mean(), **LOSS)
        of("clipfrac_lt_one").compare(found.is_below_B.float().mean(), **LOSS)
        (gradient,) = torch.autograd.grad(found.loss_B.mean(), new)
        of("grad").compare(gradient, of_largest=1e-4)


def test_guard(golden: Golden) -> None:
    tensors, options = golden.tensors("policy_losses.safetensors"), golden.json("options.json")["policy_losses"]
    largest, guard = options["adv_clip"].use(), options["guard"]
    of = lambda name: tensors[f"guard/{name}"]  # noqa: E731
    spread, root_dt, clip = (guard[name].use() for name in ("std_dev_t", "sqrt_dt", "clip"))
    for name, value in {"std_dev_t": spread, "sqrt_dt": root_dt, "clip": clip}.items():
        of(name).compare(torch.full_like(of(name).expected(), value), rtol=1e-6)
    drift = objectives.mean_drift(of("mean_new").use(), of("mean_old").use())
    std, dt = spread * root_dt, root_dt**2
    of("bias").compare(objectives.gaussian_kl(drift, std), **LOSS)
    log_ratio = tensors["log_prob_new"].use() - tensors["log_prob_old"].use()
    advantage = tensors["advantage"].use().clamp(-largest, largest)
    found = OBJECTIVES["guard"].function(RatioStep(log_ratio, advantage, drift, std, clip, dt))
    of("ratio").compare(found.ratio_B, atol=2e-7)
    of("loss").compare(found.loss_B.mean(), **LOSS)


def test_nft(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = golden.tensors("policy_losses.safetensors"), golden.json("options.json")["policy_losses"]
    of = lambda name: tensors[f"nft/{name}"]  # noqa: E731
    beta, kl_beta, largest = (options["nft"][name].use() for name in ("beta", "kl_beta", "adv_clip_max"))
    x0, noise, t_B, v_old, v_ref = (of(name).use() for name in ("x0", "noise", "t", "v_old", "v_ref"))
    v = of("v_new").use().clone().requires_grad_()
    numbers = dict(limit=0.0, beta=beta, largest_advantage=largest, of_clip=lambda mean_B: mean_B)
    given = FreshNoise(x0, noise, t_B, v, v_old, of("advantage").use(), **numbers)
    for sign, name in ((1, "positive_loss"), (-1, "negative_loss")):  # of a best and of a worst sample nothing else
        found = objectives.nft(replace(given, advantage_B=torch.full_like(given.advantage_B, sign * largest)))
        of(name).compare(found.loss_B * beta / largest, **LOSS)
    for i, share in enumerate(of("r").expected()):
        found = objectives.nft(replace(given, advantage_B=given.advantage_B[i : i + 1]))
        torch.testing.assert_close(found.watched["good_share"], share, **LOSS)
    rl = RLConfig(objective="nft", nft_beta=beta, kl_beta=kl_beta, advantage=AdvantageConfig(adv_clip_max=largest))
    whole: Any = SimpleNamespace(is_on=False, split_frames=lambda x: x)
    losses = Losses(SimpleNamespace(context=whole), rl)  # type: ignore[arg-type]
    monkeypatch.setattr(losses, "velocity", lambda condition, forward: v)
    experience: Any = SimpleNamespace(
        kept=None, forward=Forward(x0, noise, t_B, v_old, v_ref), data=None, condition=None, facts={},
        advantage_B=of("advantage").use(),
    )  # fmt: skip
    output, loss = losses.of(experience)
    of("policy_loss").compare(output["policy_loss"], **LOSS)
    of("kl_loss").compare(output["kl_loss"], **LOSS)
    of("loss").compare(loss, **LOSS)
    (gradient,) = torch.autograd.grad(loss, v)
    of("grad_v_new").compare(gradient, of_largest=1e-4)


def test_decays_by_update(golden: Golden) -> None:
    content = golden.json("schedules.json")
    for case in content["ema_power"]:
        average = PowerEMA(torch.nn.Linear(1, 1), rate=case["rate"].use())
        case["exponent"].compare(average.exponent, **SAME_FORMULA)
        case["beta"].compare({n: average.beta(int(n)) for n in case["beta"]}, **SAME_FORMULA)
    for kind in content["weight_copy_decay"]:
        decays = content["weight_copy_decay"][kind]
        decays.compare({n: objectives.old_policy_decay(int(kind), int(n)) for n in decays}, **SAME_FORMULA)


@pytest.mark.golden_cases("schedules.json", "lr_lambda_linear")
def test_the_published_learning_rates(case: Value) -> None:
    schedule, values = lambda_linear(**case["args"].use()), case["values"]
    values.compare({n: schedule(int(n)) for n in values}, **SAME_FORMULA)


def bodies(golden: Golden) -> list[tuple[str, Value]]:
    file = golden.json("reward_wire.json")
    return [(name, file[name]) for name in file if name not in ("pull_response", "reward_reading")]


def meta_of(body: bytes) -> Any:
    """The JSON before the array of a body."""
    return json.loads(body.partition(b"\n")[0])


def test_good_bodies_are_parsed_and_bad_ones_are_rejected(golden: Golden) -> None:
    for name, case in bodies(golden):
        body = base64.b64decode(case["body_b64"].use())
        if "meta" not in case:
            with pytest.raises(DataError):
                wire.parse(body)
            continue
        request = wire.parse(body)
        assert meta_of(body) == case["meta"].expected(), name  # whole objects: empty lists and numbers as they are
        assert request.prompts == case["meta"]["prompts"].expected(), name
        case["shape" if "shape" in case else "wire_shape"].compare(list(request.array.shape))
        if "dtype" in case:
            case["dtype"].compare(str(request.array.dtype))
        served = [k for k, weight in case["meta"]["reward_fn"].expected().items() if weight > 0]
        assert list(request.rewards) == (
            case["served_reward_fns"].expected() if "served_reward_fns" in case else served
        )
        if "latent_shape" in case:
            latents = request.latents()
            assert latents is not None
            assert latents.dtype == torch.bfloat16
            case["latent_shape"].compare(list(latents.shape))
            case["decoded_first8"].compare(latents.flatten()[:8].float())


def test_what_we_send_is_the_same_body(golden: Golden) -> None:
    """Our client's body differs from the published client's in the order of fields and in what we add, only."""
    for name, case in bodies(golden):
        if "meta" not in case or "video_infos" not in case["meta"]:
            continue
        body = base64.b64decode(case["body_b64"].use())
        request, meta = wire.parse(body), meta_of(body)
        clips = Clips(request.latents(), request.video(), request.prompts, request.fps[0])
        ours = wire.encode(clips, meta["reward_fn"], media=request.media)
        sent = wire.parse(ours)
        assert meta_of(ours) == {"media_type": "latent", **meta}, name
        assert sent.array.dtype == request.array.dtype
        assert (sent.array == request.array).all()


def test_scores_are_read_as_published(golden: Golden) -> None:
    file = golden.json("reward_wire.json")
    response: dict[str, Any] = file["pull_response"].use()
    for case in file["reward_reading"]:
        options = {name: case[name].use() for name in ("clip", "scale") if name in case}
        values, is_valid = wire.read_scores(response, case["score_key"].use(), **options)
        case["reward"].compare(values, atol=1e-9)
        assert all(is_valid)
