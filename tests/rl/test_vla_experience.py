# SPDX-License-Identifier: Apache-2.0
"""Learning from an experience, and judging a policy: of whom, in which order, and what counts."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import pytest
import torch

from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.config import RLConfig
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes import draw_episodes
from cosmos_predict2.rl.episodes.config import PolicyLossConfig, RefinementConfig, VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episode_starts import EpisodeStarts
from cosmos_predict2.rl.episodes.episodes import validation_starts
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.episodes.imagination_gap import ImaginationGap
from cosmos_predict2.rl.episodes.policy_evaluation import Rate
from cosmos_predict2.rl.episodes.refinement import Refinement, require_refinable
from cosmos_predict2.rl.learner import Experience
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.config import L
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import ConfigError, TrainingError
from tests.rl.vla_runs import batch, collected, ended, experience, model, starts


def test_episodes_are_played_in_evaluation_mode() -> None:
    one, modes = model(), []
    one.net.train()
    act, log_prob = one.net.act, one.net.log_prob

    def watched(method: Any) -> Any:
        return lambda *arguments, **options: modes.append(one.net.training) or method(*arguments, **options)

    with mock.patch.multiple(one.net, act=watched(act), log_prob=watched(log_prob)):
        decisions = next(one.train_batches([batch()]))
        assert modes == [False] * len(modes) and len(modes) > 2
        one.training_step(decisions, 0)
    assert modes[-1] and one.net.training


def test_validation_is_greedy_where_it_counts_and_lost_episodes_do_not() -> None:
    places = dict(env=L(ToyEnv)(num_envs=8), true_env=L(ToyEnv)(num_envs=5), eval_env=L(ToyEnv)(num_envs=3))
    for names in (["env"], ["env", "true_env"], ["env", "true_env", "eval_env"]):
        given: dict[str, Any] = {name: places[name] for name in names}
        one = VLAGRPOModel(VLAGRPOConfig(policy=L(ToyPolicy)(width=16), rl=VLARLConfig(group_size=4), **given))
        assert one.eval_env.num_envs == places[names[-1]]["num_envs"]  # type: ignore[call-overload, index]
    played = ended(one.source.collect(starts(4)), "1010", "1110")
    one.env.imagination, one.config.compare = object(), 2  # type: ignore[attr-defined]
    with (
        mock.patch("cosmos_predict2.rl.episodes.grpo.LocalRollout") as rollout,
        mock.patch.object(one, "_compared", return_value={"gap": 0.5}) as compared,
    ):
        rollout.return_value.collect.return_value = played
        output, loss = one.validation_step(batch(size=4), 0)
    held_out = validation_starts([0] * 4, list(range(4)))  # whatever the seed of the run
    assert rollout.return_value.collect.call_args.args == (held_out, "greedy")
    compared.assert_called_once_with(one.true_env, held_out.part(slice(0, 2)))
    assert output["gap"] == 0.5
    assert rollout.call_args.args == (one.net, one.eval_env, None)
    assert float(output["greedy_success"]) == pytest.approx(2 / 3) == 1 - float(loss)
    assert float(output["greedy_return"]) == pytest.approx(float(played.return_E[:3].mean()))
    facts = one._facts(played)
    assert (facts["success"], facts["valid_rate"]) == pytest.approx((2 / 3, 3 / 4))
    assert facts["reward_mean"] == pytest.approx(float(played.return_E[:3].mean()))


class Imagining(ToyEnv):
    imagination = object()


def judged(**places: Any) -> VLAGRPOModel:
    torch.manual_seed(0)
    given = dict(policy=L(ToyPolicy)(width=16), env=L(Imagining)(num_envs=8), rl=VLARLConfig(group_size=4))
    return VLAGRPOModel(VLAGRPOConfig(**given, **places))


def test_imagined_success_stands_beside_that_of_eval_env() -> None:
    """Whose starts may be others, so that each has its own actions."""
    one = judged(eval_env=L(ToyEnv)(num_envs=3, tasks=["touch_puck"]), compare=5)
    with mock.patch.object(one, "_judged", wraps=one._judged) as plays:
        output, _ = one.validation_step(batch(size=8), 0)
    once = validation_starts([0] * 8, list(range(8)))
    assert [call.args for call in plays.call_args_list] == [
        (one.eval_env, once, "greedy"),
        (one.env, once.part(slice(0, 5)), "greedy"),
    ]
    imagined, true = float(output["imagined_success"]), float(output["true_success"])
    truly = one._judged(one.eval_env, once, "greedy").success_E.float()
    assert truly[:5].mean() != truly.mean(), "so that it shows which starts are compared"
    assert true == float(truly[:5].mean()) and float(output["gap"]) == pytest.approx(imagined - true)


def test_true_success_beside_imagined_is_of_the_same_starts_and_of_valid_episodes() -> None:
    """Two draws of each start; of the first two starts the last true episode was lost."""
    one = judged(eval_env=L(ToyEnv)(num_envs=8), compare=2, validation_draws=2)
    played = one._judged(one.eval_env, starts(8), "greedy")
    of_true = ended(played, "11010001", "11101111")
    imagined = ended(played.rows(torch.arange(2)), "01", "10")
    with mock.patch.object(one, "_judged", side_effect=[of_true, imagined]) as plays:
        output, loss = one.validation_step(batch(size=4), 0)
    once = validation_starts([0] * 4, list(range(4)))
    assert [call.args[1] for call in plays.call_args_list] == [once.repeated(2), once.part(slice(0, 2))]
    assert float(output["greedy_success"]) == pytest.approx(3 / 7) == 1 - float(loss)
    assert float(output["greedy_return"]) == pytest.approx(float(of_true.return_E[of_true.is_valid_E].mean()))
    assert float(output["imagined_success"]) == 0
    assert float(output["true_success"]) == pytest.approx(2 / 3) == -float(output["gap"])


def test_actions_that_were_drawn_in_imagination_are_played_again_truly() -> None:
    one = judged(true_env=L(ToyEnv)(num_envs=8))
    some = starts(4)
    played = ended(one._judged(one.env, some, "sample"), "1101", "1110")
    truly = torch.tensor([False, True, True, True]), torch.zeros(4), torch.tensor([True, True, False, True])
    with (
        mock.patch.object(one, "_judged", return_value=played) as plays,
        mock.patch("cosmos_predict2.rl.episodes.policy_evaluation.replayed", return_value=truly) as again,
    ):
        found = one._compared(one.true_env, some)
    plays.assert_called_once_with(one.env, some, "sample")
    assert again.call_args.args[:2] == (one.true_env, some) and again.call_args.args[2] is played.actions_M_E_A_D
    rates = dict(imagined_success=1.0, true_success=0.5, gap=0.5, agreement=0.5)
    assert found == pytest.approx({**rates, "true_positive_rate": 1.0, "false_positive_rate": 1.0})


def test_a_step_of_the_world_model_has_a_gradient_where_that_has_one() -> None:
    for has_gradient in (True, False):
        ours: Any = mock.MagicMock(_has_gradient=not has_gradient, progress_counts=torch.zeros(2))
        ours.rl, ours._figures_of_phase = VLARLConfig(), {}
        ours.world_model.training_step.return_value = ({"edm_loss": 3.0, "x": 1}, torch.ones(()))
        ours.world_model.has_gradient.return_value = has_gradient
        assert VLAGRPOModel.training_step(ours, {"video": 0}, 5)[0] == {"edm_loss": 3.0}
        assert ours._has_gradient is has_gradient


def test_a_world_model_that_is_only_held_is_not_trained_and_has_the_runs_seed() -> None:
    class Held(torch.nn.Linear):
        on_train_start = mock.Mock()

    for refinement, is_trained in ((None, False), (object(), True)):
        held = Held(1, 1)
        ours: Any = mock.MagicMock(net=torch.nn.Linear(1, 1), held_world_model=held, refinement=refinement, seed=17)
        ours.weight_dtype = torch.float32
        VLAGRPOModel.on_train_start(ours)
        assert held.seed == 17 and held.weight.requires_grad is held.training is is_trained


def test_the_schedule_of_a_refinement_begins_anew_with_each() -> None:
    config = RefinementConfig(steps=3, optimizer=L(torch.optim.SGD)(lr=1.0), scheduler=L(halved)())
    ours: Any = mock.MagicMock(refinement=SimpleNamespace(config=config))
    with (
        mock.patch("cosmos_predict2.rl.episodes.grpo.PartsScheduler") as scheduler,
        mock.patch("cosmos_predict2.rl.episodes.grpo.PartsOptimizer"),
        mock.patch("cosmos_predict2.rl.episodes.grpo.lazy_config.instantiate", lambda given, **_: halved()),
    ):
        VLAGRPOModel.init_optimizer_scheduler(ours, None, None)
    repeated = scheduler.call_args.args[1]["world_model"]
    assert [repeated(step) for step in range(7)] == [1.0, 0.5, 0.25, 1.0, 0.5, 0.25, 1.0]


def halved() -> Any:
    return lambda step: 0.5**step


def test_a_world_model_that_learns_from_rewards_makes_one_update_of_each_batch_of_windows() -> None:
    """(2 + 1 + 1) windows with two clips each, in batches of four, at two steps: four micro-batches."""
    rl = RLConfig(num_rollout=2, rollout_batch=4, train_on=[0, 1])
    learns: Any = mock.Mock(spec=FlowGRPOModel, rl=rl)
    config = RefinementConfig(newest=2, earlier=1, old=1)
    require_refinable(learns, config, 4)
    require_refinable(mock.Mock(), config, 1)
    learns.rl = attrs.evolve(rl, rollout_batch=2)
    require_refinable(learns, config, 8)
    for micro_batches, options in ((3, {}), (4, dict(updates=2)), (4, dict(kl_beta=0.1)), (4, dict(on_policy=False))):
        learns.rl = attrs.evolve(rl, **options)
        with pytest.raises(ConfigError):
            require_refinable(learns, config, micro_batches)


def test_batches_of_starts_are_the_policys_and_others_the_world_models() -> None:
    one, played = collected()
    (part,) = experience(one, played)
    kinds = [one.batch_kind(each) for each in (part, batch(), {"video": torch.zeros(1)})]
    assert kinds == ["policy", "policy", "world_model"]


def gap_of(*rates: tuple[float, float], others: Any = (), before: Any = (), **options: Any) -> str | None:
    """The error at the end of a validation with these (imagined, true) rates; ``others`` are another rank's."""
    gap = ImaginationGap(on_alarm="stop", **options)
    for some in (before, rates):
        gap.on_validation_start(None, None)
        for imagined, true in some:
            gap.on_validation_step_end(None, None, dict(imagined_success=imagined, true_success=true), torch.zeros(()))
    with mock.patch("imaginaire.distributed.all_gather_object", lambda mine: [mine, list(others)]):
        try:
            gap.on_validation_end(None)
        except TrainingError as error:
            return str(error)
    return None


def test_the_gap_is_the_mean_of_a_validation_on_all_ranks_and_has_a_direction() -> None:
    assert gap_of((0.75, 0.5), limit=0.25) is None
    assert "100% of the episodes succeed in imagination and 50% truly" in str(gap_of((1.0, 0.5), limit=0.25))
    assert gap_of((0.0, 1.0), limit=0.25) is None, "where more succeeds than was imagined"
    assert gap_of((0.5, 0.5), before=[(1.0, 0.0)], limit=0.25) is None
    assert "75% of the episodes succeed in imagination and 25%" in str(
        gap_of((0.5, 0.5), others=[(1.0, 0.0)], limit=0.25)
    )


def test_imagined_validation_has_a_name_of_its_own() -> None:
    output, loss = judged().validation_step(batch(size=4), 0)
    assert set(output) == {"imagined_greedy_success", "imagined_greedy_success_margin", "imagined_greedy_return"}
    assert float(loss) == 1 - float(output["imagined_greedy_success"])
    one = judged()
    names = {name: one.published_name(name) for name in ("greedy_success", "imagined_greedy_success")}
    assert names == {"greedy_success": "eval/success_once", "imagined_greedy_success": "eval/imagined_success_once"}


def test_validation_plays_a_policy_that_draws_noise_several_times_and_says_how_sure_it_is() -> None:
    one = judged(eval_env=L(ToyEnv)(num_envs=8), compare=0)
    one.net.draws_when_greedy = True  # type: ignore[assignment]
    loader = SimpleNamespace(dataset=EpisodeStarts(num=16))
    one.on_data(SimpleNamespace(), loader)
    with mock.patch.object(one, "_judged", wraps=one._judged) as plays:
        output, _ = one.validation_step(batch(size=4), 0)
    starts_of_all = validation_starts([0] * 4, list(range(4))).repeated(4)
    assert plays.call_args.args[1] == starts_of_all and len(set(starts_of_all.draws)) == 16
    low, high = Rate(0, 4).interval  # a toy policy draws nothing, so that four draws are one
    assert not output["greedy_success"]
    assert output["greedy_success_margin"] == pytest.approx((high - low) / 2 * 0.5)  # 4 of 16 starts


def test_the_reference_is_the_policy_that_the_run_began_with() -> None:
    one = model(kl_beta=0.1)
    one.parallelize(ParallelDims())
    begun = copy.deepcopy(one.net)
    with torch.no_grad():
        for weight in one.net.parameters():
            weight += 0.1
    decisions = next(one.train_batches([batch()]))
    of_begun = begun.log_prob(decisions.record).log_prob_B_K_N
    assert decisions.reference_log_prob_B_K_N is not None
    torch.testing.assert_close(decisions.reference_log_prob_B_K_N, of_begun)
    assert not torch.allclose(decisions.old_log_prob_B_K_N, of_begun, atol=1e-3)
    kept, weights = one.checkpoint_state(), dict(begun.named_parameters())
    assert all(torch.equal(kept[f"net_ref.{name}"], weight) for name, weight in weights.items())


def test_every_rollout_of_dynamic_sampling_may_have_what_is_missing() -> None:
    one = model(max_rollouts=5)
    parts = []
    for i in range(5):  # the i-th has spread in group i alone
        played = one.source.collect(one.starts(batch(first=100 * i)))
        rewards = torch.zeros_like(played.reward_M_E_A)
        rewards[-1, 4 * (i % 3) : 4 * (i % 3) + 4, -1] = torch.tensor([0.0, 1.0, 0.0, 0.0])
        parts.append(replace(played, reward_M_E_A=rewards))
    with mock.patch.object(one.source, "collect", side_effect=parts):
        found = one.experience(batch(), iter([batch()] * 4))
    played, advantage, facts = found.record, found.advantage_G_M, found.group_facts
    assert facts["rollouts"] == 3 and facts["groups_with_spread"] == 1
    assert played.return_E.tolist() == [0.0, 1.0, 0.0, 0.0] * 3 and (advantage.argmax(dim=1) == 1).all()
    for i in range(3):
        rows = slice(4 * i, 4 * i + 4)
        assert torch.equal(played.record["knots"][:, rows], parts[i].record["knots"][:, rows])
    with mock.patch.object(one.source, "collect", side_effect=parts):  # of too few, groups that are alike fill up
        one.rl.max_rollouts = 2
        found = one.experience(batch(), iter([batch()]))
    has_spread = found.record.return_E.unflatten(0, (3, 4)).any(dim=1)
    assert has_spread.sum() == 2 and torch.equal(found.advantage_G_M.any(dim=1), has_spread)


def test_each_update_has_minibatches_of_its_own() -> None:
    one, played = collected(updates=2, minibatches=2)
    played.record["number"] = torch.arange(24).reshape(2, 12)
    halves = []
    for position in (0, 3):
        whole = Experience(played, torch.ones(3, 4), torch.ones(3, dtype=torch.bool), {})
        _, found = one.minibatches(whole, {"sample_position": torch.tensor([position])})
        halves += [frozenset(part.record["number"].tolist()) for part in found]
    assert all(halves[i] | halves[i + 1] == set(range(24)) for i in range(0, 8, 2))
    assert len(set(halves)) == 8


def test_the_first_micro_batch_has_the_figures_and_the_first_minibatch_ratios_of_one() -> None:
    one, played = collected(minibatches=2, micro_batches=2, updates=2)
    parts = experience(one, played)
    assert [bool(part.facts) for part in parts] == [True] + [False] * 7
    assert [part.is_before_update for part in parts] == [True] * 2 + [False] * 6


def test_what_was_not_executed_is_not_compared_with_what_was_drawn() -> None:
    one = model(minibatches=24)  # so many that decisions of which nothing counts fill up
    played = one.source.collect(one.starts(batch()))
    assert played.log_prob_M_E_K_N is not None
    played.executed_M_E_A[1, 3] = False
    played.log_prob_M_E_K_N[1, 3] = torch.nan
    parts = experience(one, played, torch.ones(3, 4))
    assert len(parts) == 24 and parts[0].facts["draw_difference"] < 1e-5


def test_chunks_share_a_minibatch_alike_however_much_of_them_was_executed() -> None:
    for level in ("chunk", "chunk_level"):
        one, played = collected(micro_batches=3, loss=PolicyLossConfig(ratio_level=level))
        played.executed_M_E_A[1, :5, 1:] = False
        assert [part.share for part in experience(one, played, torch.ones(3, 4))] == pytest.approx([1.0] * 3)


def test_the_parts_of_a_minibatch_share_it_by_what_counts() -> None:
    one, played = collected(minibatches=2, micro_batches=3, loss=PolicyLossConfig(ratio_level="action"))
    played.executed_M_E_A[1, :5, 4:] = False
    parts = experience(one, played, torch.ones(3, 4))
    counts = [int(part.mask_B_A.unflatten(1, (4, 3)).any(dim=2).sum()) for part in parts]
    assert sum(counts[:3]) != sum(counts[3:])
    for i, part in enumerate(parts):
        of_minibatch = counts[:3] if i < 3 else counts[3:]
        assert part.share == pytest.approx(3 * counts[i] / sum(of_minibatch))
        output, loss = one.training_step(part, 0)
        assert float(loss.detach()) == pytest.approx(part.share * float(output["policy_loss"]))


def test_rollouts_in_a_row_without_a_valid_episode_end_the_run() -> None:
    one, played = collected(max_failed_rollouts=2)
    lost = replace(played, is_valid_E=torch.zeros(12, dtype=torch.bool))
    for each in (lost, played, lost):
        experience(one, each)
    with pytest.raises(TrainingError, match="No episode was valid in 2 rollouts in a row"):
        experience(one, lost)
    experience(one, replace(played, is_valid_E=torch.arange(12) == 5))  # one is enough
    assert one._failed_rollouts == 0


def test_figures_of_a_rollout_are_of_valid_episodes_and_lengths_of_executed_actions() -> None:
    one = model()
    played = one.source.collect(starts(4))
    played.executed_M_E_A[1, 1, 5:] = False  # of 24 actions 17
    played.executed_M_E_A[1, 3] = False
    facts = one._facts(replace(played, is_valid_E=torch.tensor([True, True, True, False])))
    assert facts["episode_len"] == pytest.approx((24 + 17 + 24) / 3)
    assert facts["reward_std"] == pytest.approx(float(played.return_E[:3].std()))


def test_no_two_batches_of_starts_share_what_is_drawn() -> None:
    """Draws follow from the place of a start in the stream of the run, and not from its row."""
    one = model(shared_noise=False)
    found = [one.starts({**batch(), "sample_position": torch.arange(first, first + 3)}) for first in (0, 3)]
    shifted = one.starts({**batch(), "sample_position": torch.arange(2, 5)})
    for name in ("seeds", "draws"):
        values = [*getattr(found[0], name), *getattr(found[1], name)]
        assert len(set(values)) == len(values) == 24
        assert getattr(shifted, name) == values[8:20]


def test_an_experience_syncs_its_policy_once_and_before_it_is_asked_for_episodes() -> None:
    one, calls = model(max_rollouts=2, lower_bound=9.0), []
    collect = one.source.collect
    one.source = mock.Mock(
        sync=lambda policy: calls.append(policy),
        collect=lambda *arguments: calls.append("collect") or collect(*arguments),
        is_elsewhere=False,
    )
    one.experience(batch(), iter([batch(3)]))
    assert calls == [one.net, "collect", "collect"]


def test_a_policy_gets_the_trainers_step_and_has_no_reference_unless_one_is_asked_for() -> None:
    one = model()
    one.parallelize(ParallelDims())
    assert not any(name.startswith("net_ref") for name in one.checkpoint_state())
    one.net.on_trainer_step = mock.Mock()  # type: ignore[assignment]
    one.on_before_zero_grad(None, None, 7)
    one.net.on_trainer_step.assert_called_once_with(7)


def test_an_experience_is_open_from_its_rollout_to_its_last_update() -> None:
    """A run may stop between experiences alone."""
    one, seen = model(updates=2), list[Any]()
    collect = one.source.collect
    one.source.collect = lambda *arguments: seen.append(one.at_boundary()) or collect(*arguments)  # type: ignore
    for _ in one.train_batches([batch(), batch(3)]):
        seen.append(one.at_boundary())
        one.on_before_zero_grad(None, None, 1)
        seen.append((one.at_boundary(), int(one.progress_counts[0])))
    assert seen == [False, False, (False, 0), False, (True, 1), False, False, (False, 1), False, (True, 2)]


def refined(counts: torch.Tensor, stop_after: int, rank: int = 0, ranks: int = 1) -> tuple[list[Any], torch.Tensor]:
    """Plays and draws of a run of four experiences with a refinement before every other, up to its stop."""
    found: list[Any] = []
    config = RefinementConfig(every=2, steps=3, newest=2, earlier=1, old=1)
    refinement = mock.Mock(
        config=config,
        due_phase=partial(Refinement.due_phase, mock.Mock(config=config)),
        true_starts=lambda *_: [],
        batch=lambda seed, first: ("batch", first),
        add=lambda episodes, seed, phase: found.append(("episodes", phase)),
    )
    ours: Any = mock.MagicMock(refinement=refinement, progress_counts=counts.clone(), true_env=ToyEnv(num_envs=1))
    ours.world_model.train_batches, ours._dims = lambda batches: batches, SimpleNamespace(dp_rank=rank, dp_size=ranks)
    while len(found) < stop_after:
        for one in VLAGRPOModel.between_experiences(ours):
            found.append(one)
            if len(found) >= stop_after:
                return found, ours.progress_counts
        found.append("experience")
        VLAGRPOModel.at_end_of_experience(ours)
    return found, ours.progress_counts


def test_phases_begin_after_their_experiences() -> None:
    for recordings, phases in ((None, [0, None, 1, None, 2]), ("data", [None, None, 1, None, 2])):
        ours: Any = SimpleNamespace(config=SimpleNamespace(every=2, recordings=recordings))
        assert [Refinement.due_phase(ours, n) for n in range(5)] == phases


def test_a_refinement_that_stopped_after_any_step_goes_on_as_if_it_had_not() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    whole, _ = refined(nothing, 14)
    assert whole[:7] == [
        ("episodes", 0),
        *(("batch", 4 * k) for k in range(3)),
        "experience",
        "experience",
        ("episodes", 1),
    ]
    for stop in range(2, 12):
        before, counts = refined(nothing, stop)
        after, _ = refined(counts, 14 - len(before))
        assert [*before, *after] == whole


def test_no_two_batches_of_a_refinement_share_a_place_in_its_draws() -> None:
    """Two ranks have seven batches of four windows each, in three phases."""
    of_ranks = [refined(torch.zeros(2, dtype=torch.int64), 14, rank, 2)[0] for rank in range(2)]
    places = [one[1] for found in of_ranks for one in found if one[0] == "batch"]
    assert sorted(places) == list(range(0, 2 * 7 * 4, 4))


def test_ranks_share_the_true_episodes_of_a_phase_and_no_two_phases_have_the_same() -> None:
    ours: Any = mock.Mock(config=RefinementConfig(episodes=12, temperatures=[0.5, 1.0]))
    data = EpisodeStarts(num=50, num_tasks=1)

    def played(rank: int, ranks: int, phase: int) -> list[tuple[float, int, int]]:
        """(temperature, draw, trial) of each episode."""
        parts = Refinement.true_starts(ours, data, phase, 0, ParallelDims(ranks, rank), 4)
        return [(temperature, *pair) for some, temperature in parts for pair in zip(some.draws, some.trial_ids)]

    whole = [one for phase in range(2) for one in played(0, 1, phase)]
    shared = [one for phase in range(2) for rank in range(2) for one in played(rank, 2, phase)]
    assert {draw for _, draw, _ in shared} == {draw for _, draw, _ in whole} and len(whole) == len(shared) == 24
    assert len({draw for _, draw, _ in whole}) == 24 and len({trial for _, _, trial in whole}) > 12
    assert [temperature for temperature, _, _ in whole] == ([0.5] * 6 + [1.0] * 6) * 2


def test_films_are_of_the_greedy_policy_and_of_the_same_actions_in_both_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    one, calls = model(), []
    one.true_env, one.ema_scope = ToyEnv(4), nullcontext  # type: ignore[method-assign]
    callback = draw_episodes.DrawEpisodes(num_episodes=2, true_env=one.true_env)
    callback.trainer = mock.Mock()
    act = one.net.act
    monkeypatch.setattr(one.net, "act", lambda *args, mode, **rest: calls.append(mode) or act(*args, mode=mode, **rest))
    monkeypatch.setattr(draw_episodes, "apart", lambda *_: nullcontext())
    monkeypatch.setattr(callback, "_write", lambda rows, iteration: calls.append([torch.equal(*row) for row in rows]))
    callback.on_validation_end(one)  # before there were any starts
    for first in (5, 9):  # the first batch, ever after
        callback.on_validation_step_end(one, batch(first), {}, torch.zeros(()))
    with mock.patch.object(one.env, "reset", wraps=one.env.reset) as reset:
        callback.on_validation_end(one)
    assert calls == ["greedy", "greedy", [True, True]]
    named = {id(one.env): torch.zeros(2), id(one.true_env): torch.ones(2)}
    monkeypatch.setattr(draw_episodes, "film", lambda env, *_: named[id(env)])
    monkeypatch.setattr(
        callback, "_write", lambda rows, iteration: calls.append([tuple(map(float, row)) for row in rows])
    )
    callback.on_validation_end(one)
    assert calls[-1] == [(0.0, 1.0)] * 2, "imagined, true"
    assert reset.call_args.kwargs["options"]["trial_ids"] == validation_starts([0, 0], [5, 6]).trial_ids
