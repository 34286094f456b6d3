# SPDX-License-Identifier: Apache-2.0
"""A rollout leaves to train on what it did: its noise, its levels, its true clips; and what a loss adds up."""

import itertools
import math
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

from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.diffusion.schedules import karras_sigmas
from cosmos_predict2.diffusion.transitions import Chain, ChurnChain, FlowChain, Normal
from cosmos_predict2.rl.clips import flow_grpo, rollout
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.rollout import ChainPath, Losses, chain_path, roll_out
from cosmos_predict2.rl.clips.samples import (
    Conditions,
    Forward,
    Kept,
    MicroBatch,
    RowDraws,
    Samples,
    joined,
    mapped,
    order,
)
from cosmos_predict2.rl.clips.scoring import Scoring
from cosmos_predict2.rl.config import RLConfig, passes_of
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.learner import WeightCopy
from imaginaire import random
from imaginaire.data.stream import POSITION_KEY
from tests.rl.runs import NAME, RL, rl_options, run
from tests.training import run_dir

FLOW_GRPO, DDRL, NFT = (f"tiny_{name}_toy_world" for name in ("flow_grpo", "ddrl", "nft"))


def _seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FlowGRPOModel, MicroBatch]]:
    """Fills with what is trained on, and by which model."""
    found: list[tuple[FlowGRPOModel, MicroBatch]] = []
    step = FlowGRPOModel.training_step

    def noted(self: FlowGRPOModel, batch: Any, iteration: int) -> Any:
        found.append((self, batch))
        return step(self, batch, iteration)

    monkeypatch.setattr(FlowGRPOModel, "training_step", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_same", [True, False])
def test_the_data_term_and_the_rollout_share_clips_levels_and_noise(
    is_same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of a group start at one noise by ``use_same_seed``; the data term sees its own condition's true clip."""
    seen = _seen(monkeypatch)
    options = [f"{RL}.use_same_seed={is_same}", f"{RL}.noise_on_trained_steps_only=true", "trainer.max_iter=1"]
    run(tmp_path, *rl_options(DDRL, *options))
    steps = {batch.kept.k for _, batch in seen if batch.kept is not None}
    assert len(seen) == 4 and len(steps) == 2
    for model, batch in seen:
        assert batch.data is not None and batch.kept is not None
        assert torch.equal(*batch.noise_B_C_T_H_W) == is_same
        assert batch.window == tuple(sorted(steps))
        assert torch.equal(batch.data.x0_B_C_T_H_W, batch.condition.gt_frames_B_C_T_H_W)
        assert torch.equal(batch.data.epsilon_B_C_T_H_W, batch.noise_B_C_T_H_W)
        chain = chain_path(model.world, model.rl, batch.condition, None, batch.noise_B_C_T_H_W).chain
        time = chain.levels[batch.kept.k]
        level = time / (1 - time)
        assert batch.data.sigma_B_1.flatten().tolist() == pytest.approx([level, level])


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [2, 4])
def test_rewards_learn_the_frame_rate_of_their_own_clips(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where clips of two conditions pass the network together."""
    read, submit, found = ToyWorldVideos.__getitem__, Scoring.submit, []

    def noted(self: Scoring, clips: Clips, context: Any) -> Any:
        found.append(clips.fps)
        return submit(self, clips, context)

    monkeypatch.setattr(ToyWorldVideos, "__getitem__", lambda self, i: {**read(self, i), "fps": 5.0 + i})
    monkeypatch.setattr(Scoring, "submit", noted)
    batches = [f"{RL}.rollout_batch={at_once}", f"trainer.grad_accum_iter={8 // at_once}"]
    records = run(tmp_path, *rl_options(FLOW_GRPO, "trainer.max_iter=1", *batches))
    assert len(set(found)) == len(found) == 2  # of two conditions
    assert records[0]["train/agreement_valid_rate"] == 1


@pytest.mark.slow
def test_later_updates_compare_with_what_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _seen(monkeypatch)
    twice = [f"{RL}.updates=2", f"{RL}.num_timesteps=1", "trainer.grad_accum_iter=2", "optimizer.lr=1e-3"]
    records = run(tmp_path, *rl_options(NFT, f"{RL}.objective=awm", *twice))
    assert [batch.is_before_update for _, batch in seen] == [True, True, False, False]
    assert all(batch.forward is not None and batch.forward.v_old_B_C_T_H_W is not None for _, batch in seen)
    assert records[0]["train/ratio_std"] == 0 < records[1]["train/ratio_std"]


REFERENCE = [f"{RL}.kl_beta=0.1", "optimizer.lr=1e-2"]
LORA = ["model.config.train_architecture=lora", "model.config.lora_rank=4", "model.config.lora_alpha=4"]


@pytest.mark.slow
@pytest.mark.parametrize("trained", [[], LORA], ids=["weights", "adapters"])
def test_the_reference_follows_after_so_many_iterations(trained: list[str], tmp_path: Path) -> None:
    """It is where the weights were: the distance is 0 at first, grows, and is 0 again where it followed."""
    options = [*REFERENCE, *trained, f"{RL}.update_ref_every_iter=2", "trainer.max_iter=4", "checkpoint.save_iter=4"]
    records = run(tmp_path, *rl_options(FLOW_GRPO, *options))
    assert [record["train/kl_loss"] > 0 for record in records] == [False, True, False, True]


STARTS = {
    "file": ("standard", [], []),
    "adapters": ("standard", [], LORA),
    "shards": ("dcp", [], []),
    "training state": (
        "dcp",
        ["checkpoint.load_training_state=true", "trainer.max_iter=2"],
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_the_reference_is_what_a_run_started_from(start: str, tmp_path: Path) -> None:
    """Weights of a run without one (supervised, say), in each layout: the distance of a first step is 0."""
    kind, more, trained = STARTS[start]
    once = [*trained, f"ckpt_type={kind}", "trainer.max_iter=1", "checkpoint.save_iter=1"]
    run(tmp_path / "first", *rl_options(FLOW_GRPO, "optimizer.lr=1e-2", *once))
    path = run_dir(tmp_path / "first", NAME)
    records = run(tmp_path / "second", *rl_options(FLOW_GRPO, *REFERENCE, *once, f"checkpoint.load_path={path}", *more))
    assert records[0]["train/kl_loss"] == 0


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
    monkeypatch.setattr(rollout, "judge", lambda path, kept: (judged, None))
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [(dict(), [-1.1, 3.0]), (dict(clip_ratio_high=0.5), [-1.5, 3.0]), (dict(dual_clip=2.0), [-1.1, 2.0])],
)
def test_clips_are_clipped_higher_upwards_and_twice_as_policies_are(
    options: dict[str, float], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both clips are three times as likely as before; the second is a bad one."""
    mean = torch.zeros(1, 1, 1, 1, 1)
    for advantage, loss in zip((1.0, -1.0), expected, strict=True):
        kept = Kept(0, mean, mean + 0.5 + math.log(3), mean, None)  # of deviation 1: the ratio is exp(x' - 1/2)
        part: Any = SimpleNamespace(
            kept=kept, condition=None, unconditional=None, noise_B_C_T_H_W=mean, window=None, data=None, forward=None,
            advantage_B=torch.tensor([advantage]), is_before_update=False, facts={},
        )  # fmt: skip
        output, _ = _losses(monkeypatch, Normal(mean + 1.0, 1.0), clip_ratio=0.1, **options).of(part)
        assert float(output["policy_loss"]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_the_data_term_of_first_steps_sees_each_clip_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In however many batches the clips pass the network: the gradient is the same."""
    seen, norms = _seen(monkeypatch), []
    for size in (1, 4):
        seen.clear()
        options = [f"{RL}.rollout_batch={size}", f"trainer.grad_accum_iter={2 * 4 // size}", f"{RL}.data_beta=1"]
        options += [f"{RL}.data_on_first_only=true", "trainer.max_iter=1"]
        records = run(tmp_path / str(size), *rl_options(DDRL, *options))
        norms.append(records[0]["train/grad_norm"])
        having = [batch for _, batch in seen if batch.data is not None]
        assert sum(len(batch.advantage_B) for batch in having) == 4
        assert len({batch.noise_B_C_T_H_W[0].sum().item() for batch in having}) == 4 // size
    assert norms[0] == pytest.approx(norms[1], rel=0.01)  # 2.2 times apart when the first batch alone had it


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


def _rolled_out(ours: Any, window: tuple[int, ...] | None) -> Samples:
    draws = RowDraws({"fps": torch.ones(1), POSITION_KEY: torch.tensor([3])}, 0, range(2))
    condition: Any = mock.Mock(gt_frames_B_C_T_H_W=torch.zeros(1, *SHAPE))
    rows = draws.rows
    conditions = Conditions(condition, None, rows)
    return FlowGRPOModel._roll_out(ours, conditions, slice(0, len(rows)), (0, 1, 2), window, draws)


def test_each_step_of_each_member_draws_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _model(monkeypatch, RLConfig(train_on=[0, 1, 2], use_same_seed=True), [0.5])
    samples = _rolled_out(ours, None)
    path = flow_grpo.chain_path(ours.world, ours.rl, None, None, samples.noise)  # type: ignore[arg-type]
    stds = [flow_grpo.judge(path, one)[0].std for one in samples.kept.values()]
    noises = [(one.x_next_B_C_T_H_W - one.mean_B_C_T_H_W) / std for one, std in zip(samples.kept.values(), stds)]
    drawn = [samples.noise[0], *torch.cat(noises)]
    assert torch.equal(*samples.noise) and len(drawn) == 1 + 3 * 2
    assert all((one - other).abs().max() > 0.1 for one, other in itertools.combinations(drawn, 2))


@pytest.mark.parametrize("transition", ["churn", "sde"])
def test_the_reference_judges_the_chain_that_was_rolled_out(transition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window decides at which levels churned states are: the reference of equal weights is at distance 0."""
    for weights, is_near in (([0.5], True), ([0.4, 0.5], False)):
        rl = RLConfig(transition=transition, train_on=[0, 1, 2], kl_beta=0.1, rollout_batch=1)
        ours = _model(monkeypatch, rl, weights)
        samples = _rolled_out(ours, (0, 2))
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
    rollout: Any = SimpleNamespace(
        samples=None, draws=draws, true_latents=torch.zeros(1, *SHAPE), data_condition=mock.Mock()
    )
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


@pytest.mark.slow
def test_groups_of_further_batches_take_the_places_of_those_without_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios of 1 show that each clip kept its condition, noise and step; its true clip has its conditioning frames."""
    seen, rollouts = _seen(monkeypatch), itertools.count()

    def scored(self: FlowGRPOModel, tickets: Any) -> Any:
        advantage = torch.zeros(2, 2)
        advantage[next(rollouts) % 2] = torch.tensor([1.0, -1.0])  # of each rollout another group
        return advantage, advantage.any(dim=1), {}

    monkeypatch.setattr(FlowGRPOModel, "_score", scored)
    options = [f"{RL}.max_rollouts=4", f"{RL}.use_rl_sigma_and_noise=false", "trainer.max_iter=1"]
    (record,) = run(tmp_path, *rl_options(DDRL, *options))
    assert next(rollouts) == 2 and record["train/rollouts"] == 2 and record["train/groups_with_spread"] == 1
    assert (record["train/log_prob_ratio"], record["train/ratio_std"]) == (1.0, 0.0)
    conditions = set()
    for _, batch in seen:
        assert batch.data is not None and batch.advantage_B.tolist() == [1.0, -1.0]
        given = batch.condition.gt_frames_B_C_T_H_W
        assert given is not None
        torch.testing.assert_close(batch.data.x0_B_C_T_H_W[:, :, 0], given[:, :, 0])
        conditions.add(float(given[0].sum()))
    assert len(conditions) == 2
