# SPDX-License-Identifier: Apache-2.0
"""A policy that learns in an environment: exact ratios and resumption, groups, what is left out, several processes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cosmos_predict2.conditioner import ACTION_KEY, SHOWN_KEY, STATE_KEY
from cosmos_predict2.data.dataset_latents import LATENTS_KEY
from cosmos_predict2.data.video.media import read_video
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.rl.envs.first_frames import RecordedFacts
from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStart, write_starts
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.config import PolicyLossConfig, RefinementConfig, VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts, Trajectories, validation_starts
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.episodes.refinement import Refinement, WindowBuffer, chosen_windows, outcomes
from cosmos_predict2.rl.interfaces import Judgement
from cosmos_predict2.rl.objectives import GroupAdvantageConfig
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, write_classifier
from cosmos_predict2.rl.trust import Card, digest, write_card
from cosmos_predict2.tokenizers.tiny import SHIPPED
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire import distributed
from imaginaire.errors import CheckpointError, ConfigError, DataError, TrainingError
from tests.multiprocess import run_distributed
from tests.rl.vla_runs import IMAGINED, RL, SMALL, batch, collected, experience, model, run, starts
from tests.training import difference, rewind, run_dir, saved

# --- episodes


@pytest.mark.parametrize("chunk", [8, 10, 16])
def test_episodes_end_whatever_a_policy_decides_at_once(chunk: int) -> None:
    played = LocalRollout(ToyPolicy(width=16, chunk=chunk, num_knots=2), ToyEnv(num_envs=2)).collect(starts(2))
    assert played.finish_step_E.tolist() == [24, 24]
    assert len(played.reward_M_E_A) == -(-24 // chunk)


def test_frames_of_an_environment_that_keeps_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep_frames"):
        LocalRollout(ToyPolicy(width=16), ToyEnv(num_envs=2), keep_frames=True).collect(starts(2))


# --- experiences


def test_groups_share_their_start_and_the_world_but_not_the_policys_draws() -> None:
    one = model().starts(batch())
    assert one.trial_ids == [0] * 4 + [1] * 4 + [2] * 4
    assert len(set(one.seeds)) == 3
    assert len(set(one.draws)) == 12
    assert len(set(model(shared_noise=False).starts(batch()).seeds)) == 12


def test_micro_batches_give_the_gradient_of_the_whole() -> None:
    gradients = []
    for count in (1, 3):
        one, played = collected(micro_batches=count)
        for decisions in experience(one, played):
            loss = one.training_step(decisions, 0)[1]
            (loss / count).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in one.net.parameters() if p.grad is not None]))
    assert gradients[0].abs().max() > 0
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_a_rank_shares_an_update_by_the_mean_of_what_counts_on_all() -> None:
    """Their gradients are averaged. The other one of two has three times as many decisions."""
    one, played = collected(micro_batches=3)
    alone = [part.share for part in experience(one, played)]
    of_both = lambda value, how="sum": 4 * value if how == "sum" else value  # noqa: E731
    with mock.patch.multiple(distributed, world_size=lambda: 2, all_reduce_=of_both):
        shares = [part.share for part in experience(one, played)]
    assert shares == pytest.approx([share / 2 for share in alone])


ADVANTAGE = torch.arange(12.0).reshape(3, 4) ** 2


def of_four_parts(**loss: Any) -> tuple[VLAGRPOModel, Trajectories]:
    """A model of two minibatches with two micro-batches each, and episodes of one decision among others of two."""
    one, played = collected(minibatches=2, micro_batches=2, loss=PolicyLossConfig(**loss))
    played.executed_M_E_A[1, ::3] = False
    return one, played


def added_up(one: VLAGRPOModel, played: Trajectories) -> float:
    """The loss of the parts, as the trainer adds them up; ratios are 1."""
    parts = experience(one, played, ADVANTAGE)
    assert parts[0].old_log_prob_B_K_N.shape[1:].numel() > 1
    return sum(one.training_step(part, 0)[1].item() for part in parts) / 4


def test_each_episode_counts_alike_in_an_episode_mean() -> None:
    """The mean of the episodes' own means, as published."""
    one, played = of_four_parts(aggregation="episode-mean", ratio_level="element")
    played.is_valid_E[[1, 3]] = False  # two were lost
    assert added_up(one, played) == pytest.approx(-float(ADVANTAGE.flatten()[played.is_valid_E].mean()), rel=1e-5)


def test_slices_are_divided_by_what_counts_in_them_whatever_the_order() -> None:
    """Slices of one decision each: a whole episode counts as often as it has some, as published."""
    one, played = of_four_parts(aggregation="slice-mean", slice_decisions=1, ratio_level="element")
    played.executed_M_E_A[1, 1::3, 1:] = False  # a second decision of which one action was executed, as heavy as whole
    slices = 1 + played.executed_M_E_A[1].any(dim=1).float()
    assert added_up(one, played) == pytest.approx(-float((ADVANTAGE.flatten() * slices).mean()), rel=1e-5)


def test_a_mean_of_steps_counts_an_episode_by_its_share_of_all_elements() -> None:
    one, played = of_four_parts(aggregation="token-mean-of-steps", max_episode_steps=24, ratio_level="action")
    rows = 2 * 4  # of an episode
    assert added_up(one, played) == pytest.approx(-float(ADVANTAGE.mean()) * 24 / rows, rel=1e-5)


def test_deviations_of_a_group_are_those_of_a_sample_or_of_all() -> None:
    played = model().source.collect(starts := model().starts(batch()))
    of_sample, of_all = (
        model(advantage=GroupAdvantageConfig(epsilon=1e-6, correction=n))._advantages(played, starts) for n in (1, 0)
    )
    torch.testing.assert_close(of_sample, of_all * 0.75**0.5)


def test_advantages_of_episodes_have_the_norms_and_limits_of_clips() -> None:
    played = model().source.collect(starts := model().starts(batch()))
    returns = played.return_E.unflatten(0, (-1, 4))
    differences = returns - returns.mean(dim=1, keepdim=True)
    limit = float(differences.abs().max()) / 2
    as_it_is, limited, none = (
        model(advantage=GroupAdvantageConfig(norm="none", **options))._advantages(played, starts)
        for options in (dict(), dict(adv_clip_max=limit), dict(min_std=1e3))
    )
    torch.testing.assert_close(as_it_is, differences)
    assert torch.equal(limited, as_it_is.clamp(-limit, limit)) and not none.any()


def test_episodes_that_were_lost_teach_nothing() -> None:
    one, played = collected()
    played.is_valid_E[:4] = False  # a whole group
    played.is_valid_E[4] = False
    advantage = one._advantages(played, one.starts(batch()))
    assert (advantage[0] == 0).all()
    assert advantage[1, 0] == 0
    assert advantage[1, 1:].abs().sum() > 0
    (decisions,) = experience(one, played)
    assert len(decisions.advantage_B) == 2 * 7  # two decisions of each other episode
    assert decisions.mask_B_A.all()


def test_decisions_after_the_end_of_an_episode_are_not_computed() -> None:
    one, played = collected(minibatches=2)
    played.executed_M_E_A[1, ::2] = False  # six of twelve episodes have one decision
    with mock.patch.object(one.net, "log_prob", wraps=one.net.log_prob) as computed:
        parts = experience(one, played, torch.ones(3, 4))
    assert [len(part.advantage_B) for part in parts] == [9, 9]
    assert sum(len(call.args[0]["knots"]) for call in computed.call_args_list) == 18
    assert all(part.mask_B_A.any(dim=1).all() for part in parts)
    played.executed_M_E_A[:] = False
    assert [len(part.advantage_B) for part in experience(one, played)] == [1, 1]  # no rank may wait for another


def test_groups_outside_the_bounds_and_without_spread_are_left_out() -> None:
    one, played = collected(lower_bound=-0.5, upper_bound=0.5)
    rewards = torch.zeros_like(played.reward_M_E_A)
    rewards[-1, :, -1] = torch.tensor([-1.0, -0.9, -1.0, -0.8, 0.1, 0.1, 0.1, 0.1, 0.0, 0.2, 0.0, 0.1])
    advantage = one._advantages(replace(played, reward_M_E_A=rewards), one.starts(batch()))
    assert (advantage[:2] == 0).all()
    scores = torch.tensor([0.0, 0.2, 0.0, 0.1])
    torch.testing.assert_close(advantage[2], (scores - scores.mean()) / (scores.std() + 1e-6))  # of a sample


# --- runs


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    records = run(tmp_path / "whole", "trainer.max_iter=12")
    run(tmp_path / "parts", "trainer.max_iter=4", "checkpoint.save_iter=3")  # a save waits for the experience's end
    run(tmp_path / "parts", "trainer.max_iter=12")
    assert difference(saved(tmp_path / "whole", "vla"), saved(tmp_path / "parts", "vla")) is None
    assert records[0]["train/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert {record["train/kl_to_reference"] > 0 for record in records[1:]} == {True}


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        (model, dict(execute=0), "execute=0"),
        (model, dict(draw_tolerance=-1.0), "draw_tolerance"),
        (model, dict(draw_tolerance="small"), "draw_tolerance='small'"),
        (model, dict(lower_bound=1.0, upper_bound=0.0), f"{RL}.lower_bound"),
        (model, dict(objective="nft"), "objective: nft learns from velocities .* which ToyPolicy does not give"),
        (VLARLConfig, dict(weight_copy_decay_type=3), "weight_copy_decay_type"),
        (model, dict(weight_copy_decay_type=1), "weight_copy_decay_type: it belongs to nft, not to grpo"),
        (model, dict(objective="awm", loss=PolicyLossConfig(ratio_level="action")), "loss.ratio_level: action"),
        (model, dict(objective="nft", loss=PolicyLossConfig(entropy_bonus=0.1)), "loss.entropy_bonus: 0.1"),
        (model, dict(objective="nft", loss=PolicyLossConfig(sums_unexecuted=True)), "loss.sums_unexecuted: true"),
        (model, dict(objective="dppo", dual_clip=3.0), "dual_clip"),
        (VLAGRPOConfig, dict(validation_draws=-1), "validation_draws=-1"),
        (RefinementConfig, dict(temperatures=[]), r"refinement\.temperatures=\[\]: one number at least"),
        (RefinementConfig, dict(temperatures=[1.0, -0.5]), r"temperatures=\[1\.0, -0\.5\]: .*none below 0"),
        (RefinementConfig, dict(keep=7, episodes=4), r"refinement\.keep=7, .*episodes=4 times windows=2 .*keep=8"),
    ],
)
def test_options_that_contradict_each_other_are_refused(config: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config(**options)


def test_what_the_trainer_does_not_do_is_refused() -> None:
    trainer = SimpleNamespace(grad_accum_iter=1, distributed_parallelism="ddp")
    config = VLAGRPOConfig(fsdp_shard_size=2, rl=VLARLConfig(micro_batches=2))
    found = VLAGRPOModel.check({"config": config}, SimpleNamespace(config=SimpleNamespace(trainer=trainer)))  # type: ignore[arg-type]
    assert [one.key for one in found] == ["trainer.grad_accum_iter", "trainer.distributed_parallelism"]


DIT_PATH = "model.config.world_model.config.model_manager_config.dit_path"


@pytest.mark.parametrize(
    ("name", "option", "named"),
    [
        ("toy_policy", f"{RL}.micro_batches=2", "trainer.grad_accum_iter"),
        ("toy_policy", f"{RL}.execute=none", f"{RL}.*execute='none'"),
        (IMAGINED, "model.config.env.offload=phase", r"env\.offload=phase, .*refinement"),
        (IMAGINED, f"{DIT_PATH}=missing.pt", f"- {DIT_PATH}: missing.pt does not exist"),
    ],
)
def test_what_is_wrong_has_its_place_in_the_configuration(name: str, option: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        run(tmp_path, *(SMALL if name == IMAGINED else ()), option, "trainer.max_iter=1", name=name)


def test_more_micro_batches_than_decisions_are_refused() -> None:
    one, played = collected(minibatches=5, micro_batches=5)
    with pytest.raises(ConfigError, match=r"rl\.minibatches=5 times micro_batches=5 .*24 decisions"):
        experience(one, played)


def test_starts_of_validation_share_no_noise() -> None:
    some = validation_starts([0] * 40 + [1] * 40, [*range(40), *range(40)])
    of_chunks = {seed + step for seed in some.seeds for step in (0, 12)}  # as environments take them
    assert len(of_chunks) == 160 and len(set(some.draws)) == 80
    assert some == validation_starts([0] * 40 + [1] * 40, [*range(40), *range(40)])


def _returns(root: Path) -> tuple[list[float], str]:
    """The returns of this rank's episodes, and the error where those of rank 1 are all lost."""
    one, first = model(max_failed_rollouts=1), distributed.rank() * 2  # two groups for each rank, as the loader deals
    mine = {**batch(first, size=2), "sample_position": torch.arange(first, first + 2)}
    played = one.source.collect(one.starts(mine))
    returns = played.return_E.tolist()
    played.is_valid_E[:] = distributed.rank() != 1
    with pytest.raises(TrainingError) as raised:
        experience(one, played)
    return returns, str(raised.value)


@pytest.mark.slow
def test_two_processes_play_what_one_does_and_end_together(tmp_path: Path) -> None:
    one = model()
    alone = one.source.collect(one.starts({**batch(size=4), "sample_position": torch.arange(4)})).return_E.tolist()
    of_ranks = run_distributed(_returns, world_size=2, args=(tmp_path,))
    assert [value for values, _ in of_ranks for value in values] == alone
    for _, text in of_ranks:
        assert "No episode was valid in 1 rollouts in a row on a rank" in text


@pytest.mark.slow
def test_a_policy_learns_in_what_a_world_model_of_recordings_imagines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmos_predict2.rl.imagined import check as imagination_check
    from cosmos_predict2.rl.imagined import watch as imagination_watch
    from cosmos_predict2.rl.policies.openvla.tiny import write_tiny
    from tests.rl.test_imagination_check import write_recordings

    for name, value in (("GROUPS", 2), ("MEMBERS", 2), ("GREEDY", 2)):
        monkeypatch.setattr(imagination_check, name, value)
    for name, value in (("STARTS", 2), ("ATTEMPTS", 2), ("LEARNT", 8), ("HELD_OUT", 4)):
        monkeypatch.setattr(imagination_watch, name, value)
    write_recordings(tmp_path / "data")
    pictures = ToyStarts().starts([0] * 6, range(6)).pictures_E_F_H_W_C.numpy()
    cut = [RecordedStart(f"episode {i}", "go", one) for i, one in enumerate(pictures)]
    write_starts(tmp_path / "starts" / FILE, cut, recorded=RecordedFacts(4, [-0.1] * 4, [0.1] * 4))
    write_tiny(tmp_path / "policy", sentences=["go"], action_chunk=4, action_dim=4, hold=3)
    write_classifier(tmp_path / "reward.safetensors", SuccessClassifier((4, 4, 4, 4, 4)), {"threshold": 0.5})
    reward, policy = tmp_path / "reward.safetensors", tmp_path / "policy"
    paths = dict(world_model=TINY_ACTION, reward=reward, policy=policy)
    inputs = {name: digest(str(path)) for name, path in paths.items()}
    write_card(tmp_path / "card.json", Card("go", (), {}, inputs, "learn"))
    env = dict({"imagination.dit_path": "''", "starts.path": tmp_path / "starts", "reward.path": reward}, num_envs=4)
    words = [f"model.config.env.{key}={value}" for key, value in env.items()]
    words += [f"model.config.policy.path={policy}", f"model.config.card={tmp_path / 'card.json'}"]
    words += [f"{RL}.group_size=2", f"{RL}.minibatches=1", "dataloader_train.batch_size=2", "trainer.max_iter=1"]
    words += ["trainer.logging_iter=1", f"{RL}.actions_alone.data={tmp_path / 'data'}"]  # as the watch's was named
    words.append("trainer.callbacks.imagination_watch.limits.spread.least=0")  # of one iteration's world model
    records = run(tmp_path, *SMALL[:3], *words, name="vla_grpo_recordings")
    assert records[-1]["train/episode_len"] == 4, "as the recordings"
    watched = {name for record in records for name in record if name.startswith("watch/")}
    assert watched >= {f"watch/{name}" for name in ("greedy_value", "pictures_outside", "approx_kl")}
    assert "validation is imagined, too (imagined_greedy_success)" in caplog.text
    assert f"validation imagined greedy success {records[-1]['val/imagined_greedy_success']:.6g}" in caplog.text
    assert "val/loss" not in records[-1] and records[-1]["train/valid_rate"] == 1


# --- a world model that is refined in turn


def test_an_environment_leaves_the_gpu_again_after_a_rollout_and_after_validation() -> None:
    one = model()
    for play in (lambda: one.validation_step(batch(), 0), lambda: next(one.train_batches([batch()]))):
        with mock.patch.object(one.env, "offload", create=True) as offload:
            play()
        offload.assert_called_once()


def test_simulators_of_training_and_of_validation_are_not_alive_together() -> None:
    one, told = model(), []
    one.eval_env = ToyEnv(num_envs=8)
    for name, env in (("training", one.env), ("validation", one.eval_env)):
        env.release = lambda name=name: told.append(name)  # type: ignore[attr-defined]
    one.source.release = lambda: told.append("workers of Ray")  # type: ignore[attr-defined]
    one.on_data()
    one.validation_step(batch(), 0)
    assert told == ["training", "workers of Ray"]
    next(one.train_batches([batch()]))
    assert told[2:] == ["validation"]
    one.eval_env = one.env
    next(one.train_batches([batch()]))
    assert told[3:] == [], "those of training stay"


def windows_of(played: Trajectories, span: int, stride: int = 4, count: int = 9) -> list[tuple[int, int]]:
    return chosen_windows(played, span, stride, count, torch.Generator().manual_seed(0))[1]


def test_windows_are_of_valid_episodes_in_which_something_moves() -> None:
    env = ToyEnv(num_envs=3, keep_frames=True)
    played = LocalRollout(ToyPolicy(width=16), env, keep_frames=True).collect(starts(3))
    moved = torch.zeros(3, 24, dtype=torch.bool)
    moved[:2, 13] = True
    played = replace(played, is_valid_E=torch.tensor([True, False, True]), moved_E_L=moved)
    assert windows_of(played, 12, stride=12) == [(0, 12)]
    still = replace(played, moved_E_L=torch.zeros(3, 24, dtype=torch.bool))
    assert sorted(windows_of(still, 12, stride=12)) == [(0, 0), (0, 12), (2, 0), (2, 12)]
    assert len(windows_of(still, 12, stride=12, count=1)) == 2


def test_windows_hold_no_action_that_was_not_executed() -> None:
    env = ToyEnv(num_envs=3, keep_frames=True, num_steps=20)
    played = LocalRollout(ToyPolicy(width=16), env, keep_frames=True).collect(starts(3))
    played = replace(played, moved_E_L=None)
    played.executed_M_E_A[0, 2, 9:] = False  # an episode that ended early
    played.executed_M_E_A[1, 2] = False
    assert {start for i, start in windows_of(played, 12) if i < 2} == {0, 4, 8}
    assert [i for i, _ in windows_of(played, 12)].count(2) == 0
    assert windows_of(played, 9) and (2, 0) in windows_of(played, 9)


def test_a_refinement_plays_starts_of_training_and_keeps_pictures_of_few_at_a_time(tmp_path: Path) -> None:
    collect, true = LocalRollout.collect, []

    def noted(self: LocalRollout, some: Starts, *rest: Any) -> Trajectories:
        if self.keep_frames:
            true.append((self.keep_record, len(some), {*some.trial_ids}))
        return collect(self, some, *rest)

    of_run = ["dataloader_train.dataset.num=5", "model.config.true_env.num_envs=1", "trainer.max_iter=1"]
    many = ["model.config.refinement.episodes=24", "model.config.refinement.keep=48"]
    with mock.patch.object(LocalRollout, "collect", noted):
        run(tmp_path, *SMALL, *of_run, *many, name=IMAGINED)
    assert not any(keeps_record for keeps_record, _, _ in true)
    assert [count for _, count, _ in true] == [4, 2] * 4  # of each of four temperatures
    assert set.union(*(trials for _, _, trials in true)) == set(range(5))


def test_each_phase_of_a_refinement_plays_starts_of_its_own_on_each_rank() -> None:
    data = [{"task_id": 0, "trial_id": i} for i in range(5)]
    ours, found = SimpleNamespace(config=RefinementConfig(episodes=4, temperatures=[1.0, 0.5])), []
    for phase in range(2):
        for rank in range(2):
            dims: Any = SimpleNamespace(dp_rank=rank, dp_size=2)
            parts = [*Refinement.true_starts(ours, data, phase, 0, dims, size=1)]  # type: ignore[arg-type]
            assert [temperature for _, temperature in parts] == [1.0, 0.5]
            found += [draw for some, _ in parts for draw in some.draws]
    assert len(found) == len({*found}) == 8


def test_an_episode_of_the_robot_is_judged_by_the_last_picture_that_is_imagined_of_its_actions() -> None:
    files = SimpleNamespace(caption=lambda i: f"task {i}")
    source = SimpleNamespace(files=files, lengths=[4, 4, 4], actions=lambda i, frames: numpy.full((3, 1), i))
    data: Any = SimpleNamespace(source=source, stride=1, first_picture=lambda i: torch.full((1,), i))
    seen = []

    def judge(frames: Tensor, context: Any) -> Judgement:
        seen.append((frames.flatten().tolist(), context["task_description"]))
        return Judgement(frames.float() / 10, frames > 2)

    env: Any = SimpleNamespace(imagination=None, sampling=mock.Mock(), reward=SimpleNamespace(judge=judge))
    film, true = torch.arange(8).reshape(2, 4), [False, None, True]  # the second is not known
    place = "cosmos_predict2.rl.episodes.refinement"
    with (
        mock.patch(f"{place}.replayed", lambda *_, **__: film),
        mock.patch(f"{place}.recorded_outcomes", lambda *_: true),
    ):
        found = [*outcomes(data, env, "next.success", 0, range(3))]
    assert seen == [([3, 7], ["task 0", "task 2"])]
    assert found == [(False, True, pytest.approx(0.3)), (True, True, pytest.approx(0.7))]


def test_windows_of_earlier_phases_stay_until_there_is_no_room_and_the_oldest_go() -> None:
    """Phases of up to three windows, of which the fourth has one too many."""
    windows, seen = WindowBuffer(3, 5, {LATENTS_KEY: (1,), ACTION_KEY: (1, 1)}), []
    for phase, count in enumerate((2, 3, 1, 4, 3)):
        numbers = [10.0 * phase + i for i in range(count)]
        rows = torch.tensor(numbers)[:, None]
        windows.begin_phase({LATENTS_KEY: rows, ACTION_KEY: rows[:, None]})
        newest, earlier = numbers[:3], seen[-5:]
        assert (windows.num_newest, windows.num_earlier) == (len(newest), len(earlier))
        for name in ("latents", "actions"):
            of_name = [getattr(windows, f"{which}_{name}").flatten().tolist() for which in ("newest", "earlier")]
            assert of_name[0][: len(newest)] == newest and sorted(of_name[1][: len(earlier)]) == earlier
        seen += newest


def test_windows_are_kept_with_their_own_actions_however_many_are_encoded_at_once() -> None:
    """Latents in the scale of the network, in which sigma_data is 1."""
    frames = torch.arange(2 * 9.0).reshape(2, 9, 1, 1, 1).expand(-1, -1, 2, 2, 3)
    actions = torch.arange(2 * 8.0).reshape(2, 2, 4, 1).transpose(0, 1)  # [M, E, A, D]: in the order of steps
    played: Any = SimpleNamespace(frames_E_F_H_W_C=frames, actions_M_E_A_D=actions)
    ours: Any = mock.Mock(_num_frames=3, config=RefinementConfig())
    world = SimpleNamespace(encode=lambda video: video[:, :1, :, :1, :1], config=SimpleNamespace(sigma_data=0.5))
    ours._imagination = SimpleNamespace(world=world, transformed=lambda raw: 100 + torch.from_numpy(raw))
    ours.windows.rows.return_value = {LATENTS_KEY: torch.zeros(1, 1, 3, 1, 1), ACTION_KEY: torch.zeros(1, 2, 1)}
    ours._kept, ours._encoded = partial(Refinement._kept, ours), partial(Refinement._encoded, ours)
    places = [(1, 6), (0, 2), (1, 0)]
    for at_once in (2, 64):
        with (
            mock.patch("cosmos_predict2.rl.episodes.refinement.chosen_windows", return_value=(True, places)),
            mock.patch("cosmos_predict2.rl.episodes.refinement.CLIPS_AT_ONCE", at_once),
        ):
            Refinement.add(ours, [played], 0, 0)
        latents, actions = ours.windows.begin_phase.call_args.args[0].values()
        assert latents.flatten(1).tolist() == [[2 * (9 * i + start + k) for k in range(3)] for i, start in places]
        assert actions.flatten(1).tolist() == [[100 + 8 * i + start + k for k in range(2)] for i, start in places]


def test_a_batch_of_a_refinement_is_full_before_there_are_earlier_windows() -> None:
    windows = WindowBuffer(2, 4, {LATENTS_KEY: (1, 1, 1, 1), ACTION_KEY: (2, 1)})

    def full(count: int, value: float) -> dict[str, Tensor]:
        return {LATENTS_KEY: torch.full((count, 1, 1, 1, 1), value), ACTION_KEY: torch.full((count, 2, 1), value)}

    windows.begin_phase(full(2, 1.0))
    ours: Any = mock.Mock(config=RefinementConfig(newest=2, earlier=3, old=1), windows=windows, picture=(8, 8))
    ours._imagination.world = SimpleNamespace(net=SimpleNamespace(text_channels=4), config=SimpleNamespace(fps=10))
    ours._probe, ours._imagination.transform.to_json.return_value = torch.zeros(1), "{}"
    ours._drawn = partial(Refinement._drawn, ours)
    ours._old = lambda seed, position: full(1, 9.0) | {SHOWN_KEY: torch.tensor([[1.0, 0.0]])}
    first = Refinement.batch(ours, 0, 12)
    windows.begin_phase(full(2, 2.0))
    second = Refinement.batch(ours, 0, 12)
    for batch_, expected in ((first, [1.0] * 5 + [9.0]), (second, [2.0] * 2 + [1.0] * 3 + [9.0])):
        assert batch_[LATENTS_KEY].flatten().tolist() == expected
        assert batch_[ACTION_KEY].flatten(1)[:, 0].tolist() == expected
        assert batch_["sample_position"].tolist() == list(range(12, 18))
        assert batch_[SHOWN_KEY].tolist() == [[1.0, 1.0]] * 5 + [[1.0, 0.0]]  # one's own windows have all cameras


def test_draws_of_a_refinement_follow_from_the_place_of_its_batch() -> None:
    windows = WindowBuffer(400, 400, {LATENTS_KEY: (1, 1, 1, 1), ACTION_KEY: (1, 1)})
    for first in (0.0, 1000.0):
        numbers = torch.arange(400.0) + first
        windows.begin_phase({LATENTS_KEY: numbers[:, None, None, None, None], ACTION_KEY: numbers[:, None, None]})
    data = [{LATENTS_KEY: torch.full((1, 1, 1, 1), float(i)), ACTION_KEY: torch.zeros(1, 1)} for i in range(400)]
    ours: Any = mock.Mock(config=RefinementConfig(old=6), windows=windows, _data=data)

    def drawn(position: int) -> list[list[float]]:
        parts = [Refinement._drawn(ours, "newest", 400, 6, 0, position), Refinement._old(ours, 0, position)]
        parts.append(Refinement._drawn(ours, "earlier", 400, 6, 0, position))
        return [part[LATENTS_KEY].flatten().tolist() for part in parts]

    before = numpy.random.get_state()[1].tolist()  # type: ignore[index]
    first, again, other = drawn(0), drawn(0), drawn(6)
    assert numpy.random.get_state()[1].tolist() == before  # type: ignore[index]
    assert first == again and all(one != two for one, two in zip(first, other, strict=True))
    assert all(len(set(one)) > 4 for one in (*first, *other))
    newest, _, earlier = first
    assert [number - 1000 for number in newest] != earlier


def test_windows_without_motion_are_kept_only_where_no_part_of_the_episodes_has_any() -> None:
    ours: Any = mock.Mock(_num_frames=13)
    ours.windows.rows.return_value = dict.fromkeys((LATENTS_KEY, ACTION_KEY), torch.zeros(0, 1))
    ours._kept = lambda played, places: dict.fromkeys((LATENTS_KEY, ACTION_KEY), torch.tensor([places[0][:1]]).float())
    for moves, kept in (([False, False], [0, 1]), ([False, True, False, True], [1, 3])):
        chosen = [(has_moved, [(i, 0)]) for i, has_moved in enumerate(moves)]
        with mock.patch("cosmos_predict2.rl.episodes.refinement.chosen_windows", side_effect=chosen):
            Refinement.add(ours, chosen, 0, 0)  # type: ignore[arg-type]
        assert ours.windows.begin_phase.call_args.args[0][LATENTS_KEY].flatten().tolist() == kept


def test_old_data_is_the_same_to_a_refinement_as_video_and_as_latents() -> None:
    clips = torch.rand(3, 3, 5, 4, 4) * 2 - 1
    tokenizer = SimpleNamespace(to=lambda device: None, encode=lambda video: 3 * video)
    world: Any = SimpleNamespace(
        tokenizer=tokenizer,
        config=SimpleNamespace(sigma_data=0.5),
        net=SimpleNamespace(dtype=torch.float32),
        device=torch.device("cpu"),
        offload_tokenizer=False,
    )
    world.encode = partial(WorldModel.encode, world)
    found = []
    for key, values in (("video", clips), (LATENTS_KEY, 3 * clips)):
        data = [{key: value, ACTION_KEY: torch.full((4, 2), float(i))} for i, value in enumerate(values)]
        ours: Any = mock.Mock(_data=data, config=RefinementConfig(old=4), _imagination=mock.Mock(world=world))
        ours.windows = WindowBuffer(1, 1, {LATENTS_KEY: (3, 5, 4, 4), ACTION_KEY: (4, 2)})
        found.append(Refinement._old(ours, 0, 0))
        ours.windows = WindowBuffer(1, 1, {LATENTS_KEY: (3, 5, 4, 4), ACTION_KEY: (4, 2), STATE_KEY: (5, 1)})
        with pytest.raises(DataError, match=r"learns from states \[5, 1\], but a sample of .*refinement.data has none"):
            Refinement._old(ours, 0, 0)
        ours.windows = WindowBuffer(1, 1, {LATENTS_KEY: (3, 5, 8, 4), ACTION_KEY: (4, 2)})
        with pytest.raises(DataError, match=r"latents \[3, 5, 8, 4\], but .* has \[3, 5, 4, 4\]"):
            Refinement._old(ours, 0, 0)
    torch.testing.assert_close(*found)


def test_no_two_ranks_or_phases_choose_their_windows_by_the_same_draws() -> None:
    ours: Any = mock.Mock(_num_frames=13)
    ours.windows.rows.return_value = dict.fromkeys((LATENTS_KEY, ACTION_KEY), torch.zeros(0, 1))
    seeds = []

    def chosen(*arguments: Any) -> tuple[bool, list[Any]]:
        seeds.append(arguments[-1].initial_seed())
        return True, [(0, 0)]

    ours._kept.return_value = dict.fromkeys((LATENTS_KEY, ACTION_KEY), torch.zeros(1, 1))
    ranks = mock.patch.multiple(distributed, world_size=lambda: 2, all_gather_object=lambda value: [value])
    with ranks, mock.patch("cosmos_predict2.rl.episodes.refinement.chosen_windows", chosen):
        for phase in range(2):
            for rank in range(2):
                with mock.patch.object(distributed, "rank", lambda rank=rank: rank):
                    Refinement.add(ours, [None], 0, phase)  # type: ignore[list-item]
    assert len(set(seeds)) == len(seeds) == 4


def test_a_held_world_model_is_imagined_with_the_tokenizer_of_its_training_alone(tmp_path: Path) -> None:
    tensors = load_file(SHIPPED)
    save_file({name: value + 0.01 for name, value in tensors.items()}, tmp_path / "own.safetensors")
    own = f"+model.config.world_model.config.pipe_config.tokenizer.weights={tmp_path / 'own.safetensors'}"
    with pytest.raises(CheckpointError, match=r"world_model: .*other weights of its tokenizer.*own\.safetensors"):
        run(tmp_path, *SMALL, own, "trainer.max_iter=1", name=IMAGINED)


@pytest.mark.slow
@pytest.mark.parametrize("name", [IMAGINED, pytest.param(f"{IMAGINED}_nft", marks=pytest.mark.long)])
def test_a_run_that_refines_its_world_model_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    """It stops after an experience, and within a refinement, whose windows are then those of the checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    records = run(whole, *SMALL, "trainer.max_iter=8", "checkpoint.save_iter=4", name=name)
    rewind(run_dir(whole, "vla"), run_dir(parts, "vla"), 4)
    for last in (5, 8):
        run(parts, *SMALL, f"trainer.max_iter={last}", name=name)
    one, other = saved(whole, "vla"), saved(parts, "vla")
    assert difference(one, other) is None
    kinds = ["world_model" if "train/world_model_loss" in record else "policy" for record in records[:8]]
    assert kinds == (["world_model"] * 2 + ["policy"] * 2) * 2
    names = set(one["model"])
    assert {"net.mlp.0.weight", "world_model.net.x_embedder.proj.1.weight", "progress_counts"} <= names
    assert one["model"]["refinement.windows.counts"].tolist()[0] > 0


@pytest.mark.slow
def test_a_world_model_that_is_only_held_is_in_no_checkpoint_and_in_the_runs_page(tmp_path: Path) -> None:
    from cosmos_predict2.evaluation.reports.run_report import write_report

    frozen = [item for item in SMALL if "refinement" not in item and "draw_episodes" not in item]
    run(tmp_path, *frozen, "trainer.max_iter=2", "trainer.run_validation=true", name=f"{IMAGINED}_frozen")
    names = set(saved(tmp_path, "vla")["model"])
    assert names == {name for name in names if name.startswith("net.mlp") or name == "progress_counts"}
    folder = run_dir(tmp_path, "vla")
    videos = sorted((folder / "samples").glob("*.mp4"))
    assert [path.name[:14] for path in videos] == ["iter_000000000", "iter_000000002"]
    shown, _ = read_video(videos[0])
    _, _, height, width = shown.shape  # two episodes below each other, in columns: imagined, true
    first, last = shown[:, 0, :, : width // 2].int(), shown[:, 0, :, width // 2 :].int()
    assert height > width * 0.9 and float((first - last).abs().float().mean()) < 8  # they begin alike
    page = Path(write_report(str(folder))).read_text()
    assert "success, held out" in page and "groups of 2 episodes" in page and page.count("data:video/mp4") == 2


def _refined_runs(root: Path) -> None:
    """Runs of whose ranks two have windows, or the first alone."""
    for ranks in (2, 1):

        def chosen(*arguments: Any, ranks: int = ranks) -> tuple[bool, list[tuple[int, int]]]:
            return chosen_windows(*arguments) if distributed.rank() < ranks else (False, [])

        with mock.patch("cosmos_predict2.rl.episodes.refinement.chosen_windows", chosen):
            run(root / str(ranks), *SMALL, "dataloader_train.batch_size=1", "trainer.max_iter=4", name=IMAGINED)


@pytest.mark.slow
def test_two_processes_refine_on_the_windows_of_both(tmp_path: Path) -> None:
    run_distributed(_refined_runs, world_size=2, args=(tmp_path,))
    both, one = (int(saved(tmp_path / name, "vla")["model"]["refinement.windows.counts"][0]) for name in ("2", "1"))
    assert 2 < both <= 8  # more than one rank's share of four episodes with two windows each
    assert 0 < one <= 4  # a rank of which no episode has a window does not end the run


def test_a_phase_without_any_window_ends_the_run(tmp_path: Path) -> None:
    nothing = mock.patch("cosmos_predict2.rl.episodes.refinement.chosen_windows", return_value=(False, []))
    with nothing, pytest.raises(DataError, match="None of the true episodes is valid"):
        run(tmp_path, *SMALL, "trainer.max_iter=1", name=IMAGINED)
