# SPDX-License-Identifier: Apache-2.0
"""Policies that are recomputed and sharded learn what whole ones do; in half precision frequencies are not rounded."""

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.episodes.ray_rollout import RayRollout
from cosmos_predict2.rl.episodes.weight_shards import CHANGING, FROZEN, fill, shards_of, without_weights
from cosmos_predict2.rl.policies.network import cast, network_of, parallelize_policy
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire import distributed
from imaginaire.config import L, lazy_config
from imaginaire.distributed.parallel import GradientAverager, full_tensor, init_dims
from imaginaire.errors import ConfigError
from imaginaire.optim.adamw import FusedAdamW
from tests.multiprocess import run_distributed
from tests.rl.policies.seen import generators, observation

GROUPS = 2
SHARDED = ("openvla", "pi05", "expert")


def policies(folders: dict[str, str]) -> dict[str, Any]:
    return {
        "openvla": L(OpenVLAPolicy)(path=folders["openvla"], temperature=1.6),
        "pi05": L(Pi05Policy)(path=folders["pi05"], noise_method="flow_noise", joint_logprob=True),
        "expert": L(Pi05Policy)(path=folders["pi05"], train_expert_only=True, lora_rank=3),
        "adapters": L(OpenVLAPolicy)(path=folders["openvla"], lora_rank=2),
        "toy": L(ToyPolicy)(),
    }


def trained(policy: Any, **options: Any) -> dict[str, Tensor]:
    """The weights after two steps on this rank's share of two groups."""
    torch.manual_seed(0)
    rl = VLARLConfig(group_size=2, updates=2, kl_beta=0.1)
    model = VLAGRPOModel(VLAGRPOConfig(policy=policy, env=L(ToyEnv)(num_envs=4), rl=rl, **options))
    model.parallelize(init_dims())
    size = GROUPS // distributed.world_size()
    first = distributed.rank() * size
    trials = torch.arange(first, first + size)
    starts = {"task_id": torch.zeros_like(trials), "trial_id": trials, "sample_position": trials}
    learnt = [weight for weight in model.net.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(learnt, lr=1e-3)
    average = GradientAverager(model, static_graph=False, find_unused_parameters=False)
    for decisions in model.train_batches([starts]):
        _, loss = model.training_step(decisions, 0)
        loss.backward()
        average()
        optimizer.step()
        optimizer.zero_grad()
    model.validation_step(starts, 0)
    return {name: full_tensor(weight) for name, weight in model.net.state_dict().items()}


def of_ranks(folders: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    for shard_size in (1, 2):
        assembled(folders, shard_size)
    return {name: trained(policies(folders)[name], fsdp_shard_size=-1, recompute=True) for name in SHARDED}


def assembled(folders: dict[str, str], shard_size: int) -> None:
    """Workers assemble the whole policy from all ranks' shards, to the bit; of replicas the first one sends."""
    torch.manual_seed(1)
    policy = lazy_config.instantiate(policies(folders)["expert"]).to(torch.bfloat16)
    whole = {name: tensor.clone() for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]}
    with without_weights(policy):
        copied = copy.deepcopy(policy)
    assert not sum(weight.numel() for weight in copied.parameters())
    assert not {name for name, weight in policy.named_parameters() if not torch.equal(weight, whole[name])}
    parallelize_policy(policy, init_dims(), shard_size, recompute=True)
    policy.on_trainer_step(7)
    ours: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"world_model\.config\.fsdp_shard_size=0"):
        RayRollout._require_playable(ours, policy.network)  # as if it were a world model
    of_ranks = distributed.all_gather_object({which: shards_of(policy, which) for which in (CHANGING, FROZEN)})
    first, second = ({**shards[CHANGING], **shards[FROZEN]} for shards in of_ranks)
    assert bool(second) == (shard_size == 2)
    assert any(weight.shape[0] % 2 for weight in policy.parameters())  # whose shards are not of one size
    adapters = {name for name in first if "lora_" in name}
    buffers = {name for name, _ in policy.named_buffers()}
    assert adapters and set(of_ranks[0][CHANGING]) == adapters | buffers
    for which in (FROZEN, CHANGING):
        fill(copied, [shards[which] for shards in of_ranks])
    found = dict([*copied.named_parameters(), *copied.named_buffers()])
    assert {name for name in whole if not torch.equal(found[name], whole[name])} == {"trainer_step"}
    assert int(copied.trainer_step) == 7


@pytest.mark.slow
def test_two_processes_that_share_the_weights_learn_what_one_does(folders: dict[str, str]) -> None:
    alone = {name: trained(policies(folders)[name]) for name in SHARDED}
    for found in run_distributed(of_ranks, world_size=2, args=(folders,)):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_what_is_recomputed_passes_twice_and_gives_the_same_gradient(folders: dict[str, str]) -> None:
    seen = ToyEnv(2).reset()[0]
    gradients, passes = [], []
    for recompute in (False, True):
        policy, counts = Pi05Policy(folders["pi05"]), [0, 0]  # of blocks of the prefix and of the expert

        def count(i: int, counts: list[int] = counts) -> Any:
            return lambda *_: counts.__setitem__(i, counts[i] + 1)

        parallelize_policy(policy, init_dims(), 0, recompute=recompute)
        for i, part in enumerate((policy.network.paligemma["language_model"], policy.network.expert)):
            part.layers[0].input_layernorm.register_forward_hook(count(i))  # type: ignore[index, union-attr]
        record = policy.record_of(seen, torch.zeros(2, 12, 4))
        policy.cloning_loss(record, torch.Generator().manual_seed(0)).backward()
        gradients.append({name: value.grad for name, value in policy.named_parameters() if value.grad is not None})
        passes.append(list(counts))
        with torch.no_grad():
            policy.cloning_loss(record, torch.Generator().manual_seed(0))
        assert counts == [number + 1 for number in passes[-1]]  # without gradients nothing is computed anew
    assert passes == [[1, 1], [2, 2]]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_what_has_no_blocks_is_refused_by_name() -> None:
    config = VLAGRPOConfig(policy=L(ToyPolicy)(), env=L(ToyEnv)(num_envs=8), recompute=True)
    with pytest.raises(ConfigError, match=r"model\.config\.recompute=true.*ToyPolicy has none"):
        VLAGRPOModel(config).parallelize(init_dims())


@pytest.mark.parametrize("name", ["openvla", "adapters", "pi05", "expert", "toy"])
def test_it_is_trained_in_bfloat16(name: str, folders: dict[str, str]) -> None:
    torch.manual_seed(0)
    apart = lazy_config.instantiate(policies(folders)[name])
    torch.manual_seed(0)
    rl = VLARLConfig(group_size=2, updates=2)
    options: dict[str, Any] = dict(policy=policies(folders)[name], env=L(ToyEnv)(num_envs=8), rl=rl)
    model = VLAGRPOModel(VLAGRPOConfig(**options, precision="bfloat16"))
    buffers = {key: value.clone() for key, value in apart.named_buffers() if "inv_freq" in key}
    cast(apart, torch.bfloat16)
    for key, value in model.net.named_buffers():
        if "inv_freq" in key or "logvar" in key:
            assert value.dtype == torch.float32 and torch.equal(value, buffers.get(key, value)), key
    assert (name == "toy") == (not buffers)
    kinds = {key: weight.dtype for key, weight in model.net.named_parameters()}
    wide = {key for key, kind in kinds.items() if kind == torch.float32}
    for key, weight in apart.named_parameters():  # already, so that no wider ones are moved to a device
        assert weight.dtype == kinds[key] and torch.equal(weight, model.net.get_parameter(key)), key
    model.on_train_start()
    assert wide != kinds.keys() and bool(wide) == (name in ("pi05", "expert"))
    learnt = [weight for weight in model.net.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in learnt]
    optimizer = FusedAdamW(learnt, lr=1e-2)
    trials = torch.arange(4)
    starts = {"task_id": torch.zeros_like(trials), "trial_id": trials}
    for decisions in model.train_batches([starts]):
        _, loss = model.training_step(decisions, 0)  # raises unless the first ratio is 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(not torch.equal(*pair) for pair in zip(before, learnt))


def test_what_a_policy_has_beside_its_network_is_cast_too() -> None:
    policy: Any = nn.Module()
    policy.network, policy.head = nn.Linear(2, 2), nn.Linear(2, 2)
    cast(policy, torch.bfloat16)
    assert {weight.dtype for weight in policy.parameters()} == {torch.bfloat16}


def test_a_network_is_found_as_newer_pythons_look_for_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.12 on isinstance of a protocol asks neither properties nor the parts of a module."""
    policy: Any = nn.Module()
    policy.network = nn.Linear(2, 2)
    seen = lambda thing, name: inspect.getattr_static(thing, name, None) is not None  # noqa: E731
    monkeypatch.setattr("typing.hasattr", seen, raising=False)
    assert network_of(policy) is policy.network and network_of(nn.Module()) is None


def test_what_pi05_keeps_in_float32_makes_its_decisions_more_exact(folders: dict[str, str]) -> None:
    """Against all of it in bfloat16, as sharding needs it."""
    args = {key: value for key, value in policies(folders)["pi05"].items() if key != "_target_"}
    seen = observation(4, views=0)
    actions = []
    for uniform in (None, False, True):
        torch.manual_seed(0)
        policy = Pi05Policy(**args)
        if uniform is not None:
            cast(policy, torch.bfloat16, is_uniform=uniform)
        actions.append(policy.act(seen, mode="greedy", generators=generators(4)).actions_E_A_D)
    exact, mixed, rounded = actions
    assert (mixed - exact).abs().mean() < (rounded - exact).abs().mean() < 0.05
