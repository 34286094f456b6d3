# SPDX-License-Identifier: Apache-2.0
"""A rollout leaves to train on what it did: its noise, its levels, its true clips; and what a loss adds up."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.diffusion.solvers import karras_sigmas
from cosmos_predict2.diffusion.transitions import Chain, ChurnChain, FlowChain, Normal
from cosmos_predict2.rl.clips import flow_grpo, rollout
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.rollout import (
    ChainPath,
    Conditions,
    Forward,
    Kept,
    Losses,
    RowDraws,
    Samples,
    joined,
    mapped,
    order,
    roll_out,
)
from cosmos_predict2.rl.config import RLConfig, passes_of
from cosmos_predict2.rl.learner import WeightCopy
from imaginaire import random
from imaginaire.data.stream import POSITION_KEY
from tests.rl.runs import NAME, RL, rl_options, run
from tests.training import run_dir

REFERENCE = [f"{RL}.kl_beta=0.1", "optimizer.lr=1e-2"]
LORA = ["model.config.train_architecture=lora", "model.config.lora_rank=4", "model.config.lora_alpha=4"]


@pytest.mark.slow
def test_the_reference_follows_after_so_many_iterations(tmp_path: Path) -> None:
    """It is where the weights were: the distance is 0 at first, grows, and is 0 again where it followed."""
    options = [*REFERENCE, *LORA, f"{RL}.update_ref_every_iter=2", "trainer.max_iter=4", "checkpoint.save_iter=4"]
    records = run(tmp_path, *rl_options("tiny_flow_grpo_toy_world", *options))
    assert [record["train/kl_loss"] > 0 for record in records] == [False, True, False, True]


STARTS: dict[str, tuple[list[str], list[list[str]]]] = {
    "file": (["ckpt_type=standard"], [[]]),
    "adapters": (["ckpt_type=standard", *LORA], [[]]),
    "shards": (["ckpt_type=dcp"], [[], ["checkpoint.load_training_state=true", "trainer.max_iter=2"]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", [pytest.param(s, marks=pytest.mark.long if s == "shards" else ()) for s in STARTS])
def test_the_reference_is_what_a_run_started_from(start: str, tmp_path: Path) -> None:
    """Weights of a run without one (supervised, say), in each layout: the distance of a first step is 0."""
    options, afterwards = STARTS[start]
    once = rl_options("tiny_flow_grpo_toy_world", *options, "trainer.max_iter=1", "checkpoint.save_iter=1")
    run(tmp_path / "first", *once, "optimizer.lr=1e-2")
    path = f"checkpoint.load_path={run_dir(tmp_path / 'first', NAME)}"
    for i, more in enumerate(afterwards):
        assert run(tmp_path / str(i), *once, *REFERENCE, path, *more)[0]["train/kl_loss"] == 0


KEPT: list[tuple[Chain, dict[str, Any], int]] = [
    (FlowChain(torch.linspace(0.9, 0.1, 11).tolist()), dict(transition="sde"), 9 + 8),
    (ChurnChain(karras_sigmas(10).tolist()), dict(transition="churn"), 9 + 8 + 7),
    (ChurnChain(karras_sigmas(10).tolist(), solver="1euler"), dict(transition="churn", solver_option="1euler"), 9 + 8),
]


@pytest.mark.parametrize(("chain", "options", "num"), KEPT)
def test_what_a_rollout_keeps_is_kept_once(chain: Chain, options: dict[str, Any], num: int) -> None:
    """A state that one step ends in and the next begins with, on the device and on the host; a plan knows how many."""
    rl = RLConfig(**options)
    path = ChainPath(chain, lambda x, level: 0.5 * x, lambda x: x)
    parts = [roll_out(path, torch.randn(1, 2), lambda k: torch.randn(1, 2), rl.train_on)[1] for _ in range(2)]
    kept = joined(parts)
    for found in (kept, mapped(kept, Tensor.clone)):
        tensors = [one for step in found.values() for one in vars(step).values() if isinstance(one, Tensor)]
        assert len({one.data_ptr() for one in tensors}) == num
        assert torch.equal(found[0].x_next_B_C_T_H_W, found[1].x_B_C_T_H_W) and len(tensors[0]) == 2
    assert passes_of(rl, 1, is_flow_model=False).kept_latents == num


def _losses(monkeypatch: pytest.MonkeyPatch, judged: Normal, **options: Any) -> Losses:
    path = SimpleNamespace(chain=SimpleNamespace(length=lambda k: 0.25))
    monkeypatch.setattr(rollout, "chain_path", lambda *arguments: path)
    monkeypatch.setattr(rollout, "judge", lambda path, kept: judged)
    world: Any = SimpleNamespace(context=SimpleNamespace(is_on=False))
    return Losses(world, RLConfig(**options))


def test_the_loss_adds_the_distance_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """(mean - reference mean)^2 / (2 std^2), times kl_beta; the clipped part has the advantage's sign reversed."""
    mean = torch.zeros(2, 1, 1, 1, 2)
    kept = Kept(0, mean, mean + 0.3, mean, None, mean + 0.2)
    experience: Any = SimpleNamespace(
        kept=kept, condition=None, unconditional=None, noise_B_C_T_H_W=mean, window=None, data=None, forward=None,
        advantage_B=torch.tensor([1.0, 3.0]), is_before_update=True, facts={},
    )  # fmt: skip
    output, loss = _losses(monkeypatch, Normal(mean, 0.5), kl_beta=10.0).of(experience)
    assert float(output["kl_loss"]) == pytest.approx(0.2**2 / (2 * 0.5**2))
    assert float(output["policy_loss"]) == -2
    assert float(loss) == pytest.approx(-2 + 10 * 0.08)
    output, _ = _losses(monkeypatch, Normal(mean, 0.5), objective="guard").of(experience)
    assert float(output["policy_loss"]) == -2 / 0.25, "guard divides by the length of the step"


SHAPE = (2, 1, 3, 3)


def _model(monkeypatch: pytest.MonkeyPatch, rl: RLConfig, weights: list[float]) -> Any:
    """The part of a `FlowGRPOModel` that rolls out and predicts; its network scales states by the last of the weights.

    Its reference and its sampling policy have the first.
    """

    def path(world: Any, rl: RLConfig, condition: Any, other: Any, noise: Tensor, window: Any = None) -> ChainPath:
        churn = ChurnChain(karras_sigmas(5).tolist(), window=window)
        chain: Chain = churn if rl.transition == "churn" else FlowChain([0.9, 0.7, 0.5, 0.3, 0.1], window=window)
        return ChainPath(chain, lambda x, level: weights[-1] * x, lambda x: x)

    @contextmanager
    def with_first() -> Iterator[None]:
        weights.append(weights[0])
        yield
        weights.pop()

    monkeypatch.setattr(flow_grpo, "chain_path", path)
    ours: Any = mock.MagicMock(rl=rl, reference=with_first, sampling_policy=with_first, _old=None)
    ours.world.context.split_frames = ours.world.context.gather_frames = ours._kept_at = lambda x: x
    ours.world.device = torch.device("cpu")
    ours._velocities = lambda samples, forward: torch.full((len(samples),), weights[-1])
    ours._with_reference_means = partial(FlowGRPOModel._with_reference_means, ours)
    ours._chunks = partial(FlowGRPOModel._chunks, ours)
    return ours


def _rolled_out(ours: Any) -> Samples:
    draws = RowDraws({"fps": torch.ones(1), POSITION_KEY: torch.tensor([3])}, 0, range(2))
    condition: Any = mock.Mock(gt_frames_B_C_T_H_W=torch.zeros(1, *SHAPE))
    rows = draws.rows
    conditions = Conditions(condition, None, rows)
    return FlowGRPOModel._roll_out(ours, conditions, slice(0, len(rows)), ours.rl.train_on, draws)


@pytest.mark.parametrize("is_same", [True, False])
def test_each_step_of_each_member_draws_noise_of_its_own(is_same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a group start at one noise by ``use_same_seed``."""
    ours = _model(monkeypatch, RLConfig(train_on=[0, 1, 2], use_same_seed=is_same), [0.5])
    samples = _rolled_out(ours)
    path = flow_grpo.chain_path(ours.world, ours.rl, None, None, samples.noise)  # type: ignore[arg-type]
    stds = [flow_grpo.judge(path, one).std for one in samples.kept.values()]
    noises = [(one.x_next_B_C_T_H_W - one.mean_B_C_T_H_W) / std for one, std in zip(samples.kept.values(), stds)]
    drawn = [samples.noise[0], *torch.cat(noises)]
    assert torch.equal(*samples.noise) == is_same and len(drawn) == 1 + 3 * 2
    assert all((one - other).abs().max() > 0.1 for one, other in itertools.combinations(drawn, 2))


@pytest.mark.parametrize("transition", ["churn", "sde"])
def test_the_reference_judges_the_chain_that_was_rolled_out(transition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window decides at which levels churned states are: the reference of equal weights is at distance 0."""
    for weights, is_near in (([0.5], True), ([0.4, 0.5], False)):
        options: Any = dict(noise_on_trained_steps_only=True, kl_beta=0.1, rollout_batch=1)
        rl = RLConfig(transition=transition, train_on=[0, 2], **options)
        ours = _model(monkeypatch, rl, weights)
        samples = _rolled_out(ours)
        for one in FlowGRPOModel._predicted(ours, samples, None).kept.values():  # type: ignore[arg-type]
            assert one.reference_mean_B_C_T_H_W is not None
            assert torch.equal(one.reference_mean_B_C_T_H_W, one.mean_B_C_T_H_W) == is_near


PREDICTED = [
    (dict(), False, None),
    (dict(updates=2), False, 0.25),
    (dict(minibatches=2), False, 0.25),
    (dict(weight_copy_decay_type=1), True, 0.25),
]


@pytest.mark.parametrize(("options", "has_copy", "old"), PREDICTED)
def test_a_sampling_policy_of_other_weights_predicts_also_before_the_first_update(
    options: dict[str, int], has_copy: bool, old: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = _model(monkeypatch, RLConfig(objective="nft", transition="ode", **options), [0.25, 0.5])
    ours._old = object() if has_copy else None
    x0 = torch.zeros(2, *SHAPE)
    ours._noised = lambda samples, draws: {1: Forward(x0, x0, torch.full((2,), 0.5))}
    samples = Samples(None, x0, x0, None, [])  # type: ignore[arg-type]
    found = FlowGRPOModel._predicted(ours, samples, None).forwards[1].v_old_B_C_T_H_W  # type: ignore[arg-type]
    assert (None if found is None else found.tolist()) == (None if old is None else [old] * 2)


def _normal(seed: int = 0, position: int = 3, member: int = 0, purpose: str = "start") -> Tensor:
    draws = RowDraws({"fps": torch.ones(1), POSITION_KEY: torch.tensor([position])}, seed, range(4))
    return draws.normal((8,), torch.tensor([0]), torch.tensor([member]), purpose)


@pytest.mark.parametrize("change", [dict(seed=1), dict(position=4), dict(member=1), dict(purpose="step0")])
def test_noise_follows_from_seed_place_member_and_purpose(change: dict[str, Any]) -> None:
    assert torch.equal(_normal(), _normal())
    assert not torch.equal(_normal(), _normal(**change))


def test_the_data_terms_noise_and_its_level_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    purposes: list[str] = []
    generator = random.generator

    def noted(seed: int, place: int, purpose: str) -> torch.Generator:
        purposes.append(purpose)
        return generator(seed, place, purpose)

    monkeypatch.setattr(random, "generator", noted)
    draws = RowDraws({"fps": torch.ones(1), POSITION_KEY: torch.tensor([3])}, 0, range(2))
    latents = torch.zeros(1, *SHAPE)
    rollout: Any = SimpleNamespace(samples=None, draws=draws, true_latents=latents, data_condition=mock.Mock())
    config = SimpleNamespace(draw_sigma=lambda uniform, is_image: uniform[:, 0])
    ours: Any = SimpleNamespace(rl=RLConfig(data_beta=1.0, use_rl_sigma_and_noise=False), config=config)
    assert FlowGRPOModel._data(ours, rollout, slice(0, 2), 1, True) is not None
    assert len(set(purposes)) == len(purposes) == 4


def test_every_update_has_each_of_its_samples_at_every_step_once() -> None:
    chunks = [slice(i, i + 2) for i in (0, 2, 4, 6)]
    updates = order(chunks, 2, [1, 4], 3, lambda steps, update: steps[:: 1 - 2 * (update % 2)])
    assert len(updates) == 6
    for number, pairs in enumerate(updates):
        found = Counter((i, k) for rows, k in pairs for i in range(rows.start, rows.stop))
        part = range(4) if number % 2 == 0 else range(4, 8)
        assert found == Counter((i, k) for i in part for k in (1, 4))
        assert pairs[0][1] == (1 if number % 2 == 0 else 4)


def test_a_copy_follows_by_its_decay_and_gives_the_own_weights_back() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    module.register_parameter("frozen", nn.Parameter(torch.zeros(1), requires_grad=False))
    copy = WeightCopy(module)
    assert set(copy.weights) == {"weight"}
    nn.init.ones_(module.weight)
    copy.follow(module, 0.75)
    with pytest.raises(RuntimeError), copy.scope(module):
        assert module.weight.item() == 0.25
        raise RuntimeError
    assert module.weight.item() == 1
