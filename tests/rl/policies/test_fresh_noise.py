# SPDX-License-Identifier: Apache-2.0
"""The objectives nft and awm of policies: the formula of clips, which way they lead, and runs of a tiny PI0.5."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.rl.clips.rollout import Forward, Losses
from cosmos_predict2.rl.config import RLConfig
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.decisions import (
    FreshDraws,
    forward_loss,
    fresh_draws,
    predicted,
    teaches_without_advantage,
    teaches_without_spread,
)
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.interfaces import ContractError, Decision, Observation, Velocities
from cosmos_predict2.rl.learner import rows_of
from cosmos_predict2.rl.objectives import AdvantageConfig, GroupAdvantageConfig
from cosmos_predict2.rl.policies.contract import check_policy
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from imaginaire.config import L
from imaginaire.errors import ConfigError
from tests.rl.vla_runs import NAME, RL, batch, model, run
from tests.training import difference, saved


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("objective", ["nft", "awm"])
def test_a_policy_learns_by_the_formula_of_clips(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions of 4 actions with 3 numbers, of which so many were executed, are clips of these, one for each time."""
    executed, advantage = (4, 2, 1), (1.5, -1.0, 0.5)
    times = torch.tensor([[0.3, 0.8], [0.1, 0.6], [0.5, 0.9]]).double()
    x0, noise, v = drawn(3, 4, 3), drawn(3, 2, 4, 3, seed=1), drawn(3, 2, 4, 3, seed=2).requires_grad_()
    old, reference = v.detach() + 0.1 * drawn(3, 2, 4, 3, seed=3), drawn(3, 2, 4, 3, seed=4)
    shared: dict[str, Any] = dict(
        objective=objective, nft_beta=0.5, kl_beta=0.3, clip_ratio=0.05, dual_clip=None if objective == "nft" else 1.5
    )
    whole: Any = SimpleNamespace(is_on=False, split_frames=lambda x: x)
    of_clips = RLConfig(**shared, advantage=AdvantageConfig(adv_clip_max=4.0))
    clips = Losses(SimpleNamespace(context=whole), of_clips)  # type: ignore[arg-type]
    expected = []
    for b, count in enumerate(executed):
        for k in range(2):
            clip = (x0[b], noise[b, k], times[b, k], old[b, k], reference[b, k])
            given = Forward(*(part[:count][None] if part.dim() else part[None] for part in clip))
            monkeypatch.setattr(clips, "velocity", lambda *_, part=v[b, k, :count][None]: part)
            alike: Any = SimpleNamespace(
                kept=None, forward=given, data=None, condition=None, advantage_B=torch.tensor([advantage[b]]),
                is_before_update=False,
            )  # fmt: skip
            expected.append(clips.of(alike)[1])
    valid = torch.arange(4) < torch.tensor(executed)[:, None]
    found = forward_loss(
        Velocities(x0, noise, v),
        FreshDraws(times, torch.zeros(3, dtype=torch.long), old, reference),
        torch.tensor(advantage),
        valid,
        VLARLConfig(clip_ratio_high=None, **shared, advantage=GroupAdvantageConfig(adv_clip_max=4.0)),
    )
    wanted = torch.stack(expected).mean()
    torch.testing.assert_close(found.loss, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(loss, v)[0] for loss in (found.loss, wanted)))


def test_a_rollout_without_spread_takes_no_step() -> None:
    """Decisions of other groups without an advantage still hold nft to the policy that sampled."""
    for objective, is_held in (("nft", True), ("awm", False)):
        rl = VLARLConfig(objective=objective)
        assert (teaches_without_advantage(rl), teaches_without_spread(rl)) == (is_held, False)


def test_decisions_of_a_group_may_share_their_draws() -> None:
    times = (1.0, 0.75, 0.5, 0.25)
    own, shared = (
        fresh_draws(times, VLARLConfig(group_size=4, num_timesteps=2, use_same_forward_noise=is_same), 2, 8, 0, 7)
        for is_same in (False, True)
    )
    assert len({*own.seed_B.tolist()}) == 16 and len({*shared.seed_B.tolist()}) == 4
    for draws in (own, shared):
        assert draws.time_B_L.shape == (16, 2) and (draws.time_B_L[:, 0] > draws.time_B_L[:, 1]).all()
        assert draws.time_B_L.unique().tolist() == pytest.approx([0.25, 0.5, 0.75, 0.999])
    assert (shared.seed_B.unflatten(0, (2, 2, 4)).diff(dim=2) == 0).all()
    assert (shared.time_B_L.unflatten(0, (2, 2, 4)).diff(dim=2) == 0).all()


# --- PI0.5


def pi05(folders: Mapping[str, str], **rl: Any) -> VLAGRPOModel:
    return model(L(Pi05Policy)(path=folders["pi05"]), **rl)


def error_of(policy: Pi05Policy, record: Mapping[str, Tensor]) -> Tensor:
    """The mean squared error of the velocity at 64 times and noises, [B]: how unlikely the flow makes these actions."""
    time = torch.linspace(0.05, 0.95, 64).expand(len(record["chains"]), -1)
    with torch.no_grad():
        found = predicted(policy, record, FreshDraws(time, torch.arange(len(time)) + 9))
    return (found.velocity_B_L_K_N - found.noise_B_L_K_N + found.x0_B_K_N[:, None]).square().mean(dim=(1, 2, 3))


@pytest.mark.parametrize("objective", ["nft", "awm"])
def test_a_rewarded_chunk_becomes_likelier_and_a_punished_one_less(objective: str, folders: Mapping[str, str]) -> None:
    for sign in (1, -1):
        learner = pi05(folders, objective=objective)
        whole = next(learner.train_batches([batch(size=1)]))
        one = replace(rows_of(whole, torch.arange(1)), advantage_B=torch.tensor([2.0 * sign]), share=1.0)
        assert one.old_log_prob_B_K_N is None and "draw_difference" not in one.facts
        policy = learner.net
        before, optimizer = error_of(policy, one.record), torch.optim.SGD(policy.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            learner.training_step(replace(one, is_before_update=False), 0)[1].backward()
            optimizer.step()
        assert (error_of(policy, one.record) - before) * sign < 0


def test_a_policy_that_samples_apart_follows_slowly_and_is_saved(folders: Mapping[str, str]) -> None:
    one = pi05(folders, objective="nft", weight_copy_decay_type=1, minibatches=2, kl_beta=0.1)
    one.parallelize(one._dims)
    name = "network.action_out_proj.bias"
    weight = dict(one.net.named_parameters())[name]
    began = weight.detach().clone()
    with torch.no_grad():
        weight += 1
    part = next(one.train_batches([batch(size=1)]))
    output, _ = one.training_step(part, 0)
    assert output["kl_to_reference"] > 0.5  # the reference, too, has the weights that the run began with
    v = predicted(one.policy, part.record, part.fresh).velocity_B_L_K_N
    torch.testing.assert_close(v - part.fresh.v_old_B_L_K_N, torch.ones_like(v), rtol=0, atol=1e-4)
    one.on_before_zero_grad(None, None, 99)  # decay 0.1
    torch.testing.assert_close(one.checkpoint_state()[f"net_old.{name}"], began + 0.9)
    assert torch.equal(weight, began + 1)


@pytest.mark.parametrize("of", [OpenVLAPolicy, Pi05Policy])
def test_policies_without_velocities_are_refused(of: type, folders: Mapping[str, str]) -> None:
    """The policy of tokens is refused before it is built: its folder is never looked for."""
    node = L(of)(path="nowhere") if of is OpenVLAPolicy else L(of)(path=folders["pi05"], noise_method="flow_noise")
    config = VLAGRPOConfig(policy=node, env=L(ToyEnv)(num_envs=8), rl=VLARLConfig(objective="nft"))
    with pytest.raises(ConfigError, match=rf"rl\.objective: nft learns from velocities .*{of.__name__}.*flow_noise"):
        VLAGRPOModel(config)
    found = VLAGRPOModel.check({"config": config}, SimpleNamespace(config=None))  # type: ignore[arg-type]
    assert [one.key for one in found] == ["model.config.rl.objective"] * (of is OpenVLAPolicy)


def test_more_times_than_the_policy_has_are_refused(folders: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"rl\.num_timesteps: 5, but the policy decides in 4 steps"):
        pi05(folders, objective="nft", num_timesteps=5)


@pytest.mark.slow
def test_a_resumed_run_of_fresh_noise_equals_one_that_never_stopped(tmp_path: Path, folders: Mapping[str, str]) -> None:
    options = [
        f"model.config.policy.path={folders['pi05']}",
        *(f"{RL}.{one}" for one in ("objective=nft", "updates=1", "minibatches=1", "group_size=2", "num_timesteps=2")),
        f"{RL}.weight_copy_decay_type=1",
        "dataloader_train.batch_size=2",
        "trainer.run_validation=false",
    ]
    records = run(tmp_path / "whole", *options, "trainer.max_iter=2", name="pi05_policy")
    run(tmp_path / "parts", *options, "trainer.max_iter=1", "checkpoint.save_iter=1", name="pi05_policy")
    run(tmp_path / "parts", *options, "trainer.max_iter=2", name="pi05_policy")
    assert difference(saved(tmp_path / "whole", NAME), saved(tmp_path / "parts", NAME)) is None
    assert all(0 < record["train/good_share"] < 1 for record in records)


# --- a flow of one's own


class Flow(nn.Module):
    """Two linear layers, and the start's noise is all that is drawn; it has no log-probability."""

    flow_times = (1.0, 0.5)

    def __init__(self) -> None:
        super().__init__()
        self.see, self.net = nn.Linear(3, 8), nn.Linear(4 + 1, 4)

    def act(
        self, observation: Observation, *, mode: str, generators: Sequence[torch.Generator], temperature: float = 1.0
    ) -> Decision:
        with torch.no_grad():
            seen = observation["full_image"].float().mean(dim=(1, 2)) / 255
            x = torch.stack([torch.randn(12, 4, generator=each) for each in generators])
            for t in self.flow_times:
                x = x - 0.5 * self.velocity(seen[:, None], x, torch.full((len(x),), t))
            return Decision(x.clamp(-1, 1), {"seen": seen, "actions": x})

    def velocity(self, seen: Tensor, x: Tensor, t: Tensor) -> Tensor:
        with_time = torch.cat([x, t[..., None, None].expand(*x.shape[:-1], 1)], dim=-1)
        return self.net(with_time) + self.see(seen)[..., :4]

    def velocities(self, record: Any, time_B_L: Tensor, generators: Sequence[torch.Generator]) -> Velocities:
        x0, t = record["actions"], time_B_L[..., None, None]
        noise = torch.stack([torch.randn(t.shape[1], *x0.shape[1:], generator=each) for each in generators])
        x_t = (1 - t) * x0[:, None] + t * noise
        return Velocities(x0, noise, self.velocity(record["seen"][:, None, None], x_t, time_B_L))


def test_a_flow_without_log_probabilities_learns() -> None:
    one = model(L(Flow)(), objective="nft", minibatches=2)
    parts = list(one.train_batches([batch(size=2)]))
    for part in parts:
        one.training_step(part, 0)[1].backward()
    assert sum(len(part.advantage_B) for part in parts) == 16
    assert one.net.net.weight.grad.any()


class Wrong(Pi05Policy):
    def velocities(self, *given: Any) -> Velocities:
        found = super().velocities(*given)
        return replace(found, noise_B_L_K_N=torch.randn_like(found.noise_B_L_K_N))


def test_the_checker_finds_noise_from_elsewhere(folders: Mapping[str, str]) -> None:
    with pytest.raises(ContractError, match="check_velocities: the same generators gave other noise"):
        check_policy(Wrong(folders["pi05"]), ToyEnv(8).reset(seed=0)[0], unreached=["*.language_model.*"])
