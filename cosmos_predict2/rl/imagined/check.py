# SPDX-License-Identifier: Apache-2.0
"""Measurements of a world model and a reward on held-out recordings: does what is valued in imagination happen?

    episodes = read_episodes(source, camera, numbers, outcomes)
    figures, films = replays(imagination, reward, episodes)
    figures |= obedience(films, episodes, learnt, chunk) | policy_figures(policy, imagination, reward, episodes, learnt)

`rl.imagined.verdict` has their bounds. Nothing here knows a simulator. Letters: E episodes, L actions.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cosmos_predict2.actions.transforms import UNKNOWN, ActionContract
from cosmos_predict2.checkpoints.card import mappings, run_folder, run_tree, safetensors_header
from cosmos_predict2.data.lerobot.info import STATE
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import Split, read_split
from cosmos_predict2.data.video.clips import Fit
from cosmos_predict2.evaluation.metrics import agreement
from cosmos_predict2.evaluation.metrics.agreement import Estimate, area_under_curve, within_groups
from cosmos_predict2.evaluation.metrics.inverse_dynamics import Probe, fit_probe
from cosmos_predict2.rl.envs.first_frames import GivenStarts, RecordedFacts, SimulatedStarts
from cosmos_predict2.rl.envs.replays import BATCH, held, recorded_actions, replayed, rested, round_trip, whole_chunks
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.world_model import WorldModelEnv, require_inputs
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts, Trajectories
from cosmos_predict2.rl.episodes.policy_evaluation import held_out_starts
from cosmos_predict2.rl.interfaces import FrameReward, VecEnv
from cosmos_predict2.rl.policies.null import LEAST_RECORDINGS, NullPolicy, are_motions, doing_nothing
from cosmos_predict2.rl.rewards.resnet import KEY
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire import foreign_json
from imaginaire.checkpoint.weight_files import latest
from imaginaire.errors import DataError
from imaginaire.log import tracked
from imaginaire.random import derive_seed

log = logging.getLogger(__name__)

Values = NDArray[numpy.float64]
Figures = dict[str, Any]  # by name: an Estimate, a number or a list of numbers

AT_ONCE = 8  # places of a true environment
GROUPS, MEMBERS = 16, 8  # of a policy's imagined episodes: starts, and attempts from each
FIRST_ATTEMPT = 125_000  # number of the first true start: recordings may begin with 0 and the next ones
TRUE_GROUPS = 48  # starts of its true ones: the correlation inside a start of 64 scatters by .06, so of 16 by .12
GREEDY = 64  # greedy episodes at most
LEAST_VARIED = 4  # starts from which some attempts succeed and some fail: one gave .90 for a clone that stands still
HELD = 4  # actions that a random one is repeated for
READABLE = 0.1  # of R2: below it true pictures do not show the actions
LEAST_SPREAD = 0.05  # of a group's values, below which it teaches nothing
FILMED = 32  # episodes whose pictures are kept, for the probe
OUTSIDE = (0.5, 99.5)  # percentiles of the recorded actions that a policy may leave
SIDE = 16  # pixels of the pictures that are compared as a whole


@dataclass(frozen=True)
class OutcomeEpisodes:
    """Whole recordings with their outcomes. Row k of actions leads from picture k to picture k + 1."""

    first_E_H_W_C: Tensor  # uint8
    tails: list[Tensor]  # the last pictures of each, at most ``tail`` + 1
    films: list[Tensor]  # all pictures of the first `FILMED`
    actions: list[Tensor]  # raw [L, D]
    success_E: NDArray[numpy.bool_]
    tasks: list[str]
    states_E_S: Tensor | None = None  # of the robot at the first pictures, where recorded
    contract: ActionContract = UNKNOWN

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def actions_N_D(self) -> Tensor:
        return torch.cat(self.actions)

    @property
    def last_E_H_W_C(self) -> Tensor:
        return torch.stack([tail[-1] for tail in self.tails])


def read_episodes(
    source: LeRobotSource,
    camera: str | None,
    numbers: Sequence[int],
    outcomes: Sequence[bool | None],
    tail: int,
    fit: Fit | None = None,
) -> OutcomeEpisodes:
    """These episodes, but for those of an unknown outcome or without an action; ``fit`` brings their pictures to the
    size of a world model."""
    key = source.camera(camera)
    first, tails, films, actions, success, tasks = [], [], list[Tensor](), [], [], []
    states: list[Tensor] = []
    for i in tracked(numbers, "held-out recordings", unit="episode", leave=False):
        length, outcome = int(source.episodes.lengths[i]), outcomes[i]
        if outcome is None or length < 2:
            continue
        begin = 0 if len(films) < FILMED else max(1, length - 1 - tail)
        wanted = sorted({0, *range(begin, length)})
        pictures = source.frames(i, key, wanted, fit=fit).permute(1, 2, 3, 0).contiguous()
        if begin == 0:
            films.append(pictures)
        first.append(pictures[0])
        tails.append(pictures[-min(tail + 1, length) :].clone())
        actions.append(recorded_actions(source, i))
        success.append(outcome)
        tasks.append(source.caption(i))
        if STATE in source.info.features:
            states.append(torch.from_numpy(source.columns(i, [STATE])[STATE][0]).float().reshape(-1))
    if not first:
        raise DataError(f"{source.info.root}: none of {len(numbers)} episodes has a known outcome and two pictures.")
    known = torch.stack(states) if states else None
    contract = source.action_contract(source.action_parts(), state=source.state_parts)
    return OutcomeEpisodes(torch.stack(first), tails, films, actions, numpy.array(success), tasks, known, contract)


def chosen(numbers: Sequence[int], most: int, seed: int) -> list[int]:
    """At most so many of these numbers, in a random order."""
    order = numpy.random.default_rng(derive_seed(seed, 0, "chosen recordings")).permutation(len(numbers))
    return [numbers[i] for i in order[:most]]


def leaks(world_model: str, reward: str, split: Split) -> list[str]:
    """Sentences on a world model and a reward that were not trained by this split, and may know what is held out."""
    folder = run_folder(latest(world_model))
    nodes = mappings(run_tree(folder).get("dataloader_train") if folder else None)
    files = [("the world model", node.get("split_file")) for node in nodes if "root" in node]
    if ":" not in reward or Path(reward).exists():
        about = foreign_json.loads(safetensors_header(reward).get(KEY, "{}"))
        files += [("the reward", about.get("split"))] if "data" in about else []
    found = []
    for name, file in files:
        with suppress(DataError):  # a file that is gone proves nothing
            if not file or read_split(file).digest != split.digest:
                which = "another" if file else "no"
                found.append(f"{name} was trained by {which} split: it may know what is held out")
    return found


# Replays --------------------------------------------------------------------------------------------------------------


def replays(
    imagination: Imagination, reward: FrameReward, episodes: OutcomeEpisodes, seed: int = 0
) -> tuple[Figures, list[Tensor]]:
    """The reward's value at the ends of recordings, true, through the tokenizer and imagined, against what truly
    happened, and at the ends of other actions, where success is not there; and the first films."""
    truth = episodes.success_E
    figures: Figures = {"episodes": len(episodes), "successes": int(truth.sum())}
    ends = {"true": episodes.last_E_H_W_C, "coded": _coded_ends(imagination, episodes)}
    ends["imagined"], films = imagined_ends(imagination, episodes.first_E_H_W_C, episodes.actions, seed, FILMED)
    for name, pictures in ends.items():  # the imagined ones last
        value, judged = judge(reward, pictures, episodes.tasks)
        figures[f"ends_{name}"] = area_under_curve(value, truth, seed=seed)
        figures[f"recall_{name}"], figures[f"false_success_{name}"] = judged[truth].mean(), judged[~truth].mean()
    if len(set(episodes.tasks)) > 1:
        tasks = numpy.array(episodes.tasks)
        figures["ends_within_tasks"] = area_under_curve(value, truth, tasks[:, None] == tasks, seed)
    own = value
    figures["values_of_successes"] = own[truth].tolist()
    for name, actions in _other_actions(episodes, seed).items():
        pictures, _ = imagined_ends(imagination, episodes.first_E_H_W_C, actions, seed)
        value, judged = judge(reward, pictures, episodes.tasks)
        figures[f"{name}_success"] = judged.mean()
        figures[f"{name}_valued"] = agreement.mean(value >= numpy.median(own[truth]), seed)
    return figures, films


def judge(reward: FrameReward, pictures_E_H_W_C: Tensor, tasks: Sequence[str]) -> tuple[Values, NDArray[numpy.bool_]]:
    """Value and success of single pictures."""
    found = reward.judge(pictures_E_H_W_C[:, None], {"task_description": list(tasks)})
    return found.value_E_F[:, 0].double().cpu().numpy(), found.success_E_F[:, 0].bool().cpu().numpy()


def imagined_ends(
    imagination: Imagination, first_E_H_W_C: Tensor, actions: Sequence[Tensor], seed: int, num_films: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """The last pictures that these actions lead to, and all pictures of the first ``num_films`` episodes.

    Episodes of equally many chunks are imagined together; a last chunk is filled up as `WorldModelEnv` does it.
    """
    ends: dict[int, Tensor] = {}
    films: dict[int, Tensor] = {}
    for count, part in whole_chunks([len(rows) for rows in actions], imagination.config.chunk_size):
        filled = torch.stack([held(actions[i], count) for i in part])
        seeds = [derive_seed(seed, i, "replay") % 2**31 for i in part]
        for i, frames in zip(part, replayed(imagination, first_E_H_W_C[part], filled, seeds=seeds), strict=True):
            ends[i] = frames[len(actions[i])].clone()
            if i < num_films:
                films[i] = frames[: len(actions[i]) + 1].clone()
    return torch.stack([ends[i] for i in range(len(actions))]), [films[i] for i in sorted(films)]


def _other_actions(episodes: OutcomeEpisodes, seed: int) -> dict[str, list[Tensor]]:
    """Actions by which these starts do not succeed: those of the next episode, none, and random ones held for some."""
    count, random = len(episodes), torch.Generator().manual_seed(derive_seed(seed, 0, "random actions") % 2**63)
    others = [episodes.actions[(i + 1) % count] for i in range(count)]
    rows = episodes.actions_N_D
    low, high = rows.quantile(0.01, dim=0), rows.quantile(0.99, dim=0)
    drawn = [low + (high - low) * torch.rand(len(a), len(low), generator=random) for a in episodes.actions]
    hold = [torch.arange(len(a)) // HELD * HELD for a in episodes.actions]
    return {
        "swapped": others,
        "nothing": [doing_nothing(rows).expand_as(a) for a in episodes.actions],
        "random": [one[held] for one, held in zip(drawn, hold, strict=True)],
    }


def _coded_ends(imagination: Imagination, episodes: OutcomeEpisodes) -> Tensor:
    """The last pictures as the tokenizer leaves them: the most that a world model can show."""
    chunk = imagination.config.chunk_size
    tails = [torch.cat([tail[:1].expand(chunk + 1 - len(tail), -1, -1, -1), tail]) for tail in episodes.tails]
    parts = [round_trip(imagination, torch.stack(tails[k : k + BATCH]))[:, -1] for k in range(0, len(tails), BATCH)]
    return torch.cat(parts)


# Obedience ------------------------------------------------------------------------------------------------------------


def action_probe(learnt: OutcomeEpisodes, chunk: int) -> Probe | None:
    """A reader of actions that is fitted to true pictures of all whole chunks; None where they do not show the actions.

    One of the first chunks alone reads nothing of later ones, where the robot is elsewhere: of true pictures of a
    drawer's second chunk it had an R2 of -.75, where this one has .30.
    """
    try:
        longest = max(len(rows) for rows in learnt.actions[: len(learnt.films)])
        parts = [_windows(learnt.films, learnt.actions, chunk, k) for k in range(max(1, longest // chunk))]
        pictures, actions = (torch.cat(part) for part in zip(*parts, strict=True))
        return fit_probe(pictures, actions)
    except DataError as error:
        log.info("obedience is not measured: %s", error)
        return None


def actions_seen(
    probe: Probe | None, films: Sequence[Tensor], actions: Sequence[Tensor], chunk: int, k: int = 0
) -> float:
    """R2 of the actions that are read from the pictures of the k-th chunk; NaN without a reader."""
    return math.nan if probe is None else probe.score(*_windows(films, actions, chunk, k)).r2_of_sums


def obedience(films: Sequence[Tensor], episodes: OutcomeEpisodes, learnt: OutcomeEpisodes, chunk: int) -> Figures:
    """Agreement of the actions read from imagined pictures, and from true ones, chunk by chunk, by a probe of true
    pictures of ``learnt``; of the first and the last chunk imagined by true, where the true ones show the actions."""
    if (probe := action_probe(learnt, chunk)) is None:
        return {}
    counts = [len(rows) // chunk for rows in episodes.actions[: len(episodes.films)]]
    num_chunks = min((count for count in counts if count), default=0)  # that every film has, but for shorter ones
    chunks, actions = range(num_chunks), episodes.actions
    true, seen = ([actions_seen(probe, some, actions, chunk, k) for k in chunks] for some in (episodes.films, films))
    figures: Figures = {"actions_seen_true_by_chunk": true, "actions_seen_by_chunk": seen}
    for name, k in (("obedience", 0), ("obedience_last", num_chunks - 1)):
        if num_chunks and true[k] > READABLE:
            figures[name] = seen[k] / true[k]
    return figures


def _windows(films: Sequence[Tensor], actions: Sequence[Tensor], chunk: int, k: int) -> tuple[Tensor, Tensor]:
    """Pictures [B, C, F, H, W] and actions of the k-th chunk of each film that has it."""
    rows = [(film, a) for film, a in zip(films, actions) if len(a) >= (k + 1) * chunk]
    if not rows:
        raise DataError(f"no recording has {(k + 1) * chunk} actions")
    pictures = torch.stack([film[k * chunk : (k + 1) * chunk + 1] for film, _ in rows])
    return pictures.permute(0, 4, 1, 2, 3), torch.stack([a[k * chunk : (k + 1) * chunk] for _, a in rows])


# The policy -----------------------------------------------------------------------------------------------------------


def starts_of(episodes: OutcomeEpisodes, learnt: OutcomeEpisodes) -> GivenStarts:
    """The first pictures of recordings; lengths and the range of actions are those of what was learnt from."""
    recorded = RecordedFacts.of([rows.numpy() for rows in learnt.actions], episodes.contract)
    return GivenStarts(episodes.first_E_H_W_C, episodes.tasks, recorded, episodes.states_E_S)


def imagined_env(imagination: Imagination, reward: FrameReward, starts: Any) -> WorldModelEnv:
    """The environment of `configs.rl.experiment.policy_recordings`, of a batch of episodes."""
    scoring = Scoring(judge="last", reward_on="last")
    return WorldModelEnv(imagination, starts, reward, BATCH, None, scoring=scoring, clip_actions="recorded")


def attempts(policy: Any, env: VecEnv, starts: Starts, members: int = 0, **options: Any) -> Trajectories:
    """``members`` sampled episodes from each start, which share what the environment draws; without, a greedy one."""
    played = starts.repeated(members or 1)
    return LocalRollout(policy, env, keep_record=False, **options).collect(played, "sample" if members else "greedy")


def policy_figures(
    policy: Any,
    imagination: Imagination,
    reward: FrameReward,
    episodes: OutcomeEpisodes,
    learnt: OutcomeEpisodes,
    seed: int = 0,
    of_successes: Sequence[float] = (),
) -> Figures:
    """The value of the policy in imagination, from held-out starts, and how far it goes beyond the recordings.

    ``of_successes`` are the values of imagined recordings that succeeded.
    """
    env = imagined_env(imagination, reward, starts_of(episodes, learnt))
    require_inputs(env, policy)
    starts, groups = held_out_starts(min(GREEDY, len(episodes)), 1, seed), min(GROUPS, len(episodes))
    env.keep_frames = True
    greedy = attempts(policy, env, starts, keep_frames=True)
    env.keep_frames = False
    sampled = attempts(policy, env, starts.part(slice(0, groups)), MEMBERS)
    value_G_M = sampled.return_E.double().numpy().reshape(groups, MEMBERS)
    best = greedy.return_E.double().numpy()
    still = [doing_nothing(learnt.actions_N_D).expand(env.metadata["max_steps"], -1)] * len(best)
    ends, _ = imagined_ends(imagination, episodes.first_E_H_W_C[: len(best)], still, seed)
    idle, _ = judge(reward, ends, episodes.tasks[: len(best)])
    rows = learnt.actions_N_D.numpy()
    low, high = numpy.percentile(rows, OUTSIDE, axis=0)
    margin = 0.1 * (high - low) + 1e-6
    done = sampled.actions_M_E_A_D[sampled.executed_M_E_A].numpy()
    assert greedy.frames_E_F_H_W_C is not None
    familiar = PictureDistances(episodes, learnt)
    wins, known = (best > idle) + 0.5 * (best == idle), numpy.array(of_successes)
    above = ((best[:, None] > known) + 0.5 * (best[:, None] == known)).mean(axis=1) if len(known) else []
    return {
        "greedy_value": agreement.mean(best, seed),
        "greedy_imagined_success": agreement.mean(greedy.success_E.double().numpy(), seed),
        "sampled_value": agreement.mean(value_G_M.mean(axis=1), seed),
        "spread": float((numpy.ptp(value_G_M, axis=1) > LEAST_SPREAD).mean()),
        "above_nothing": agreement.mean(wins, seed),
        "like_success": agreement.mean(above, seed),
        "noise_is_paid": agreement.mean(value_G_M.mean(axis=1) - best[:groups], seed),
        "actions_outside": float(((done < low - margin) | (done > high + margin)).mean()),
        "pictures_outside": familiar.unlike(greedy.frames_E_F_H_W_C[:, -1]),
        "pictures_faded": familiar.faded(greedy.frames_E_F_H_W_C[:, -1]),
    }


def clone_figures(about: Mapping[str, Any]) -> Figures:
    """The share of what differs between held-out actions that a clone explains, where its card has it: its verdict was
    made without a simulator."""
    if not isinstance(value := about.get("explained"), (int, float)):
        return {}
    if about.get("recordings", 0) < LEAST_RECORDINGS:
        return {}
    low, high = (about.get(name, math.nan) for name in ("low", "high"))
    return {"explained": Estimate(value, low, high, about.get("recordings", 0))}


class PictureDistances:
    """Distances of pictures from all recordings, and how much they show: one in which things have faded may be near to
    recordings, too. 19 of 20 ends of held-out recordings lie within ``usual``, and show more than ``least``."""

    def __init__(self, episodes: OutcomeEpisodes, learnt: OutcomeEpisodes) -> None:
        self._known = _thumbs(torch.cat([*learnt.films, *learnt.tails]))
        self._common = self._known.median(dim=0).values  # what most recordings show at a place: no thing that moves
        self.usual = float(self.distances(episodes.last_E_H_W_C).quantile(0.95))
        self.least = float(self.contents(episodes.last_E_H_W_C).quantile(0.05))

    def distances(self, pictures_N_H_W_C: Tensor) -> Tensor:
        """[N], to the nearest recorded picture."""
        return torch.cdist(_thumbs(pictures_N_H_W_C), self._known).amin(dim=1)

    def unlike(self, pictures_N_H_W_C: Tensor) -> float:
        """The share of pictures that are further from all recorded ones than is usual."""
        return float((self.distances(pictures_N_H_W_C) > self.usual).float().mean())

    def contents(self, pictures_N_H_W_C: Tensor) -> Tensor:
        """[N], how far a picture is from what most recordings show at each place."""
        return (_thumbs(pictures_N_H_W_C) - self._common).abs().sum(dim=1)

    def faded(self, pictures_N_H_W_C: Tensor) -> float:
        """The share of pictures that show less than is usual."""
        return float((self.contents(pictures_N_H_W_C) < self.least).float().mean())


def _thumbs(pictures_N_H_W_C: Tensor) -> Tensor:
    """[N, d]: pictures so small that noise and blur do not count."""
    parts = (part.permute(0, 3, 1, 2).float() for part in pictures_N_H_W_C.split(256))
    return torch.cat([functional.adaptive_avg_pool2d(part, SIDE).flatten(1) for part in parts]) / 255


# Where the truth is known ---------------------------------------------------------------------------------------------


def played_figures(
    imagination: Imagination,
    reward: FrameReward,
    played: OutcomeEpisodes,
    seed: int = 0,
) -> Figures:
    """Episodes that the policy really played: their actions imagined, against what truly happened."""
    ends, _ = imagined_ends(imagination, played.first_E_H_W_C, played.actions, seed)
    value, judged = judge(reward, ends, played.tasks)
    figures: Figures = {"played_episodes": len(played), "played_success": agreement.mean(played.success_E, seed)}
    figures["played_imagined_success"] = judged.mean()
    if 0 < int(played.success_E.sum()) < len(played):
        figures["played_ends"] = area_under_curve(value, played.success_E, seed=seed)
        seen, _ = judge(reward, played.last_E_H_W_C, played.tasks)
        figures["played_ends_true"] = area_under_curve(seen, played.success_E, seed=seed)
    return figures


def true_attempts(
    policy: Any,
    env: VecEnv,
    imagination: Imagination,
    reward: FrameReward,
    learnt: OutcomeEpisodes,
    seed: int = 0,
    fit: Fit | None = None,
) -> Figures:
    """Sampled attempts of the policy in the true environment, their actions imagined from the same pictures: the
    correlation of imagined value with truth inside a start is what a group's advantage sees. Beside them doing nothing.

    They are played on after success where the environment can, as imagined episodes are. Starts of which an episode
    was lost do not count."""
    num_tasks = int(env.metadata.get("num_tasks", 1))
    starts = held_out_starts(TRUE_GROUPS, num_tasks, seed, FIRST_ATTEMPT)
    first = SimulatedStarts(env, num_tasks, fit, len(imagination.views)).starts(starts.task_ids, starts.trial_ids)
    env.terminate_on_success = False
    played = attempts(policy, env, starts, MEMBERS)
    still = NullPolicy("still", learnt.actions_N_D[:, None].expand(-1, played.actions_M_E_A_D.shape[2], -1))
    beside = [attempts(one, env, starts) for one in (still, policy)]  # the likeliest actions are what a robot plays
    env.terminate_on_success = True  # as a robot stops at success
    beside.append(attempts(policy, env, starts))
    whole = torch.stack([played.is_valid_E.reshape(-1, MEMBERS).all(dim=1), *(one.is_valid_E for one in beside)]).all(0)
    kept = whole.nonzero()[:, 0]
    if (num := len(kept)) < TRUE_GROUPS // 2:
        raise DataError(
            f"Of {TRUE_GROUPS - num} of {TRUE_GROUPS} starts an episode was lost with the environment: too few are left"
            " to judge by. What it raised stands above; python -m scripts.check_environment looks at it."
        )
    played = played.rows((kept[:, None] * MEMBERS + torch.arange(MEMBERS)).flatten())
    still_G, likeliest_G, ever_G = (one.success_E[kept].double().numpy() for one in beside)
    executed = played.executed_M_E_A.transpose(0, 1)
    actions = [rows[done] for rows, done in zip(played.actions_M_E_A_D.transpose(0, 1), executed, strict=True)]
    length = max(len(rows) for rows in actions)  # where the environment ends on success, the robot rests
    has_motions = are_motions(learnt.actions_N_D)
    actions = [rested(rows, length, has_motions) for rows in actions]
    rewards = [rows[done] for rows, done in zip(played.reward_M_E_A.transpose(0, 1), executed, strict=True)]
    pictures = first.pictures_E_F_H_W_C[kept, 0].repeat_interleave(MEMBERS, dim=0)
    tasks = [first.task_description[i] for i in kept.tolist() for _ in range(MEMBERS)]
    value, _ = judge(reward, imagined_ends(imagination, pictures, actions, seed)[0], tasks)
    truth = played.success_E.numpy()
    last = numpy.array([float(rows[-1]) for rows in rewards])  # dense ones say how near a failure was
    nearness = numpy.where(truth, last.max(), last) if len(numpy.unique(last)) > 2 else truth.astype(float)
    success_G = truth.reshape(num, MEMBERS).mean(axis=1)
    gap = agreement.mean(likeliest_G - success_G, seed)
    figures: Figures = {
        "true_success": agreement.mean(success_G, seed),
        "true_above_nothing": agreement.mean(success_G - still_G, seed),
        "greedy_success": agreement.mean(likeliest_G, seed),
        "greedy_above_sampled": gap,
        "greedy_success_once": agreement.mean(ever_G, seed),
        "success_lost": agreement.mean(ever_G - likeliest_G, seed),
        "true_ends": Estimate(math.nan),
        "within_starts": Estimate(math.nan),
    }
    if 0 < truth.sum() < len(truth):
        start_N = numpy.repeat(numpy.arange(num), MEMBERS)
        figures["true_ends"] = area_under_curve(value, truth, seed=seed, group_N=start_N)
    within = within_groups(value.reshape(num, MEMBERS), nearness.reshape(num, MEMBERS), seed)
    if within.count >= LEAST_VARIED:
        figures |= {"within_starts": within, "within_above_gap": within.less(gap)}
    return figures
