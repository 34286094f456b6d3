# SPDX-License-Identifier: Apache-2.0
"""Classic faults of robot recordings, found in a sample of their episodes: each a `Finding` with its cure.

Nothing here knows the robot. What the actions mean is learnt from most episodes, by regressions of what changes (the
states, or without them the picture's motion) on the actions; episodes that contradict it are named. What all episodes
have alike, such as one mirrored camera, cannot be found so. Letters: N rows of all episodes, d numbers of an action.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

import numpy
from numpy.typing import NDArray

from cosmos_predict2.actions.transforms import Floats
from cosmos_predict2.tools.check.clips import fault
from cosmos_predict2.tools.check.episodes import CheckedEpisode
from imaginaire.findings import Finding

LEAST_EPISODES, LEAST_ROWS = 8, 150  # below them a regression of 8 numbers says nothing
MOST_ROWS = 10_000  # more take time, and change no figure
SAME_RATE = 0.05  # clocks deviate by less; rates that are confused differ by a fifth and more
STILL = 1e-3  # of a number's usual range, as the idle rules of DROID (1e-3) and LIBERO (1e-4) have it
MOVED = 0.02  # of that range: what a picture of 32 cells shows
SAME_PICTURE = 4.0  # of 255, in the cell that changes most: repeated pictures had 0 to 2 by a codec, motions 8 to 190
IDLE_SECONDS, IDLE_SHARE = 0.5, 0.4  # DROID's filter: 7 frames at 15 Hz, 26 % of them; bad sets had 71 and 87 %
JUMP, JUMP_ROWS = 12.0, 8  # of 255
JUMP_RATIO, JUMP_SHARE = 2, 0.5  # of cells; of the episodes: bad sets had .60 to .86, others below .1, one .25
FROZEN_SHARE = 0.1  # of the moving frames; every second one is 50 %, a dropped one now and then below 5 %
CONSTANT_SHARE = 0.05  # of the episodes; one of a hundred may be a robot that is stuck
EARLY_SUCCESS = 0.2  # of the episodes succeed at their first frame: an easy task, or above it an inverted column
EFFECT, OTHERS = 0.05, (1, 2, 3)  # of the variance, explained beyond the actions of other episodes: chance gave .03
LATE_GAIN, LATE_RATIO = 0.1, 5.0  # explained by the next row beyond the present one, and against the reverse
SHOWN, CONTRADICTS, MENDED = 0.7, 1.0, 0.33  # of a change's variance, see `_odd_episodes`
TURNS_SHOWN = 0.35  # the same of a motion that is turned: mirrored sets had 0.07 to 0.26
LATE_LEFT = 0.05  # of an episode's changes: one whose actions leave less of them is not late
LEAST_ODD, MOST_ODD = 2, 0.5  # episodes: one fits some change by chance; the more frequent way is held to be right
FEW_ODD = 0.05  # of the episodes: fewer are only noted, as 2 of 100 clean ones fitted by chance
ALIEN, BETTER = 4.0, 4.0  # usual deviations of an episode's places from the others', and how many times fewer mended
OTHER_UNIT, ONE_UNIT = 10.0, 3.0  # degrees are 57 radians; numbers of an episode that share a factor differ by less
SAME_RANGE = 0.5  # common part of two ranges, of both together: the same unit
RIDGE, FOLDS, NAMED, TINY = 1e-6, 4, 3, 1e-9
_TURNS = {"mirrored": (-1, 1), "upside down": (1, -1), "turned by 180 degrees": (-1, -1)}
_IN_HAND = re.compile("wrist|hand|gripper", re.IGNORECASE)  # of a camera's name

ELSEWHERE = (
    "does it show things where they were before a reset placed them? A world model that begins with it is blind to"
    " them. Draw anew behind a reset (MuJoCo: mj_forward)"
)

Found = Iterator[tuple[str, str]]  # kind of a fault, empty for a note, and a sentence
Flags = NDArray[numpy.bool_]


def classic_faults(
    root: str, fps: float, episodes: Sequence[CheckedEpisode], action_names: Sequence[str], state_names: Sequence[str]
) -> Iterator[Finding]:
    """Findings on a data set, by the names of the numbers of its actions and states."""
    if not episodes:
        return
    if rates := [*_rate(episodes, fps)]:  # pictures are found by it: they would be those of other rows
        episodes = [replace(one, pictures={}) for one in episodes]
    looks: list[Iterable[tuple[str, str]]] = [rates, _success(episodes), _idle(episodes, fps)]
    looks += [look(episodes, camera) for camera in episodes[0].pictures for look in (_still_camera, _other_start)]
    if len(episodes) >= LEAST_EPISODES and sum(len(one.action) for one in episodes) >= LEAST_ROWS:
        values = [*_other_values([one.action for one in episodes], action_names, episodes)]
        values += _other_values([one.state for one in episodes], state_names, episodes)
        others = _opposite(episodes, action_names, state_names), _effects(episodes, action_names)
        looks += [values] if values else others  # regressions of mixed units say nothing
    for kind, text in (found for look in looks for found in look):
        yield fault(root, kind, f"{root}: {text}") if kind else Finding(root, text)


def _rate(episodes: Sequence[CheckedEpisode], fps: float) -> Found:
    steps = [float(numpy.median(numpy.diff(one.time))) for one in episodes if one.time is not None]
    if steps and abs((step := float(numpy.median(steps))) * fps - 1) > SAME_RATE:
        text = f"rows are {step:.4g} s apart by their timestamps, but {1 / fps:.4g} s by fps {fps:g} of meta/info.json"
        yield "rate", f"{text}. Set fps to the rate of the recording, or write timestamps as row / fps."


def _success(episodes: Sequence[CheckedEpisode]) -> Found:
    for name in episodes[0].success:
        known = (one.success[name][numpy.isfinite(one.success[name])] for one in episodes)
        tables = [table for table in known if len(table)]
        if wrong := [table for table in tables if table.min() < 0 or table.max() > 1]:
            reached = f"'{name}' lies in {wrong[0].min():g} to {wrong[0].max():g} in {len(wrong)} of {len(tables)}"
            yield "success", f"{reached} episodes; it is 0 or 1. Write so."
        early = sum(bool(table[0] > 0.5) for table in tables)
        is_of_frames = name.startswith("next.") or any(table.min() < table.max() for table in tables)
        if is_of_frames and early > EARLY_SUCCESS * len(tables):
            text = f"'{name}' is true on the first frame of {early} of {len(tables)} episodes, before anything was done"
            yield "success", f"{text}. Is it inverted, or of whole episodes? Write 1 on frames where the task is done."


def _idle(episodes: Sequence[CheckedEpisode], fps: float) -> Found:
    """Runs of rows in which neither the action nor what it is to change changes."""
    action, state = (_spread([getattr(one, what) for one in episodes]) for what in ("action", "state"))
    least, idle, total = max(3, round(IDLE_SECONDS * fps)), 0, 0
    for one in episodes:
        is_still = _is_within(one.action, STILL * action)
        if len(state):
            is_still &= _is_within(one.state, STILL * state)
        else:
            by_camera = [_change(pictures) <= SAME_PICTURE for pictures in one.pictures.values()]
            count = len(by_camera[0]) if by_camera else 0
            is_still = numpy.logical_and.reduce([is_still[one.first : one.first + count], *by_camera])
        runs = [(value, len([*rows])) for value, rows in groupby(is_still.tolist())]
        idle, total = idle + sum(n for value, n in runs if value and n >= least), total + len(is_still)
    if idle > IDLE_SHARE * total:
        what = f"neither the action nor the {'state' if len(state) else 'picture'} changes"
        text = f"in {idle / total:.0%} of the frames {what} for {least} frames and more ({IDLE_SHARE:.0%} are the most)"
        yield "idle", f"{text}. A policy learns to wait: cut these frames out, or set dataset.skip_idle."


def _still_camera(episodes: Sequence[CheckedEpisode], camera: str) -> Found:
    """Pictures that stand still while the robot moves: all of an episode, or single ones."""
    spread, is_constant = _spread([one.state for one in episodes]), numpy.zeros(len(episodes), bool)
    frozen = moving = 0
    for i, one in enumerate(episodes):
        change = _change(one.pictures[camera])
        is_same = change <= SAME_PICTURE
        if numpy.ptp(one.pictures[camera], axis=0).max() <= 2 * SAME_PICTURE:
            is_constant[i] = numpy.ptp(one.action, axis=0).any()
            continue
        is_large = change > max(SAME_PICTURE, change.max() / 8)
        has_moved = numpy.zeros(len(change), bool)
        has_moved[1:-1] = is_large[:-2] & is_large[2:]  # a picture again in the middle of a motion
        if len(spread):
            has_moved |= ~_is_within(one.state, MOVED * spread)[one.first : one.first + len(change)]
        frozen, moving = frozen + int((is_same & has_moved).sum()), moving + int((~is_same | has_moved).sum())
    if is_constant.mean() > CONSTANT_SHARE:
        text = f"'{camera}' shows one picture alone in {_some(is_constant, episodes)}, though the actions change"
        yield "constant_camera", f"{text}. Record it again, or leave the camera out (dataset.camera)."
    if frozen > FROZEN_SHARE * moving:
        text = f"'{camera}' repeats its last picture in {frozen / moving:.0%} of the frames in which the robot moves"
        cure = "Is it slower than the rows? Keep the rows with a new picture, and set fps to their rate."
        yield "frozen_frames", f"{text} ({FROZEN_SHARE:.0%} are the most). {cure}"


def _other_start(episodes: Sequence[CheckedEpisode], camera: str) -> Found:
    seen = [one for one in episodes if not one.first and len(one.pictures[camera]) >= JUMP_ROWS]
    films, spread = [one.pictures[camera] for one in seen], _spread([one.state for one in episodes]) + TINY
    ways = [(abs(numpy.diff(one.state[:JUMP_ROWS], axis=0)) / spread).sum(axis=1) for one in seen]
    moves = [way[0] > JUMP_RATIO * way[1:].mean() for way in ways]  # a robot that truly leaps to its first goal
    jumping = sum(begins_elsewhere(film) and not is_moved for film, is_moved in zip(films, moves))
    if len(films) >= LEAST_EPISODES and jumping > JUMP_SHARE * len(films):
        text = f"'{camera}' jumps behind the first picture of {jumping} of {len(films)} episodes, and stays so"
        yield "first_picture", f"{text}: {ELSEWHERE} and record again, or cut the first frames off."


def begins_elsewhere(pictures: Floats) -> bool:
    """True where the first picture [SIDE, SIDE] of some differs from the second as none of the next ones does: by cells
    that then stay as they are, unlike those that a moving robot covers."""
    pictures = pictures[:JUMP_ROWS]
    change, later = abs(numpy.diff(pictures, axis=0)), abs(pictures[3:] - pictures[1:-2])
    jumps = (change[:-2] > JUMP) & (change[1:-1] < JUMP / 2) & (later < JUMP / 2)
    first, *others = jumps.sum(axis=(1, 2))
    return bool(first > JUMP_RATIO * max(1, *others))


def _other_values(tables: Sequence[Floats], names: Sequence[str], episodes: Sequence[CheckedEpisode]) -> Found:
    """Episodes whose numbers are those of the others in another unit or order."""
    size_E_d = numpy.stack([abs(table).max(axis=0) for table in tables])
    usual_d = numpy.quantile(size_E_d, 0.5, axis=0, method="lower")
    times_E_d = numpy.log((size_E_d[:, usual_d > TINY] + TINY) / usual_d[usual_d > TINY])
    found: dict[tuple[str, str], Flags] = {}
    if times_E_d.shape[1]:
        low, times, high = numpy.quantile(times_E_d, (0.25, 0.5, 0.75), axis=1)
        is_other = (abs(times) >= numpy.log(OTHER_UNIT)) & (high - low <= numpy.log(ONE_UNIT))
        factor = numpy.exp(numpy.median(times[is_other])) if is_other.any() else 1.0
        found["units", f"about {factor:.2g} times as large, in another unit,"] = is_other
    low, place_E_d, high = numpy.stack([numpy.quantile(table, (0.1, 0.5, 0.9), axis=0) for table in tables], axis=1)
    middle_d = numpy.quantile(place_E_d, 0.5, axis=0, method="lower")
    width_d = numpy.quantile(high - low, 0.9, axis=0)  # of the episodes that use this number
    spread_d = numpy.median(abs(place_E_d - middle_d), axis=0) + width_d / 4 + TINY
    for key, order in _orders(numpy.concatenate(tables), names).items():
        moved = numpy.flatnonzero(numpy.array(order) != numpy.arange(len(order)))
        own, other = (abs(one - middle_d)[:, moved] / spread_d[moved] for one in (place_E_d, place_E_d[:, order]))
        found[key] = numpy.sort(own)[:, -2] >= numpy.maximum(ALIEN, BETTER * other.max(axis=1))  # two are alien
    for (kind, text), is_odd in found.items():
        if LEAST_ODD <= is_odd.sum() <= MOST_ODD * len(tables):
            what = f"{', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
            yield kind, f"{what} are {text} in {_some(is_odd, episodes)} beside the others. Convert these episodes."


def _orders(rows: Floats, names: Sequence[str]) -> dict[tuple[str, str], list[int]]:
    """Wrong orders that recordings are found in: two numbers for each other, and w of a quaternion first or last."""
    every, orders, turned = [*range(rows.shape[1])], {}, set[int]()
    for k in every[:-3]:
        length = numpy.quantile(numpy.linalg.norm(rows[:, k : k + 4], axis=1), (0.05, 0.95))
        if (abs(length - 1) < SAME_RATE).all():
            turned |= {*range(k, k + 4)}
            for by, place in ((1, "last for first"), (-1, "first for last")):
                order = [*every[:k], *numpy.roll(every[k : k + 4], -by).tolist(), *every[k + 4 :]]
                orders["quaternion_order", f"in another order (w {place} from {names[k]} on)"] = order
    for i, j in combinations(every, 2):
        if not {i, j} <= turned:
            orders["swapped_columns", f"swapped ({names[i]} for {names[j]})"] = [{i: j, j: i}.get(k, k) for k in every]
    return orders


def _opposite(episodes: Sequence[CheckedEpisode], action_names: Sequence[str], state_names: Sequence[str]) -> Found:
    """Commands that move the number of the same name, or of the same place, the other way."""
    actions, states = (numpy.concatenate([getattr(one, w)[:-1] for one in episodes]) for w in ("action", "state"))
    changes = numpy.concatenate([numpy.diff(one.state, axis=0) for one in episodes])
    for i, name in enumerate(action_names):
        for k, other in enumerate(state_names):
            is_gripper = "grip" in name.lower() and "grip" in other.lower()
            if not (is_gripper or _short(name) == _short(other) or (i == k and len(action_names) == len(state_names))):
                continue
            known = _with_one(states[:, [k]])
            rest = numpy.stack([actions[:, i], changes[:, k]], axis=1)
            rest -= known @ numpy.linalg.lstsq(known, rest, rcond=None)[0]
            agreement = (rest[:, 0] * rest[:, 1]).mean() / (rest.std(axis=0).prod() + TINY)
            if agreement >= 0 or agreement**2 < LATE_GAIN:
                continue
            low, high = numpy.quantile(numpy.stack([actions[:, i], states[:, k]]), (0.01, 0.99), axis=1)
            text = f"a larger command {name} ({low[0]:.3g} to {high[0]:.3g}) makes the state {other} ({low[1]:.3g} to"
            text += f" {high[1]:.3g}) smaller"
            if high.min() - low.max() >= SAME_RANGE * (high.max() - low.min()):
                yield "action_sign", f"{text}, in the same unit. Turn one of them (a gripper from 0 to 1: 1 - g)."
            elif is_gripper:
                yield "", f"{text}: what is open, and what closed?"


@dataclass(frozen=True)
class _Pairs:
    """Actions and what followed them, row by row of all episodes."""

    camera: str | None  # None: the states
    episode: NDArray[numpy.int64]  # [N], its number
    own_N_3_d: Floats  # the action of the row before, of this one, and of the next one
    others_N_3_d: Sequence[Floats]  # those of other episodes
    state_N_s: Floats
    change_N_k: Floats  # from this row to the next one

    def inputs(self, actions: Floats) -> Floats:
        return _with_one(numpy.concatenate([actions.reshape(len(actions), -1), self.state_N_s], axis=1))

    def explained(self, actions: Floats) -> Floats:
        """[k]: share of each change's variance that these explain in episodes that the fit has not seen."""
        x, left = self.inputs(actions), numpy.zeros_like(self.change_N_k)
        for fold in range(FOLDS):
            is_out = self.episode % FOLDS == fold
            left[is_out] = self.change_N_k[is_out] - x[is_out] @ _ridge(x[~is_out], self.change_N_k[~is_out])
        return 1 - (left**2).mean(axis=0) / self.change_N_k.var(axis=0).clip(TINY)

    @property
    def effect(self) -> float:
        chance = [self.explained(one) for one in (self.own_N_3_d[:, :0], *self.others_N_3_d)]
        return float((self.explained(self.own_N_3_d) - numpy.max(chance, axis=0).clip(0)).max())

    @property
    def what(self) -> str:
        return f"the motion in '{self.camera}'" if self.camera else "the state"

    def by_episode(self, left_N_k: Floats) -> Floats:
        """[E, k], sums of squares; rows are in the order of the episodes."""
        sums = numpy.concatenate([numpy.zeros((1, left_N_k.shape[1])), (left_N_k**2).cumsum(axis=0)])
        ends = numpy.searchsorted(self.episode, numpy.arange(-1, self.episode.max() + 1), side="right")
        return numpy.diff(sums[ends], axis=0)


def _pairs(episodes: Sequence[CheckedEpisode], camera: str | None) -> _Pairs | None:
    """None where too little changes."""
    parts, step = [], max(1, sum(len(one.action) for one in episodes) // MOST_ROWS)
    for i, one in enumerate(episodes):
        at, change = (values[::step] for values in one.changes(camera))
        tables = [one.action, *(episodes[i - by].action for by in OTHERS)]
        inside = (at >= 1) & (at < min(map(len, tables)) - 2)  # the last action is often a filler
        lags = at[inside, None] + numpy.array([-1, 0, 1])
        parts.append((numpy.full(len(lags), i), one.state[at[inside]], change[inside], *(t[lags] for t in tables)))
    episode, state, change, own, *others = (numpy.concatenate(part) for part in zip(*parts))
    if len(change) < LEAST_ROWS or not change.std(axis=0).any():
        return None
    change = change.clip(*numpy.quantile(change, (0.005, 0.995), axis=0))  # angles that wrap
    low, high = numpy.quantile(own[:, 1], (0.01, 0.99), axis=0)
    own, *others = ((one - (low + high) / 2) / (high - low + TINY) for one in (own, *others))
    state = (state - state.mean(axis=0)) / (state.std(axis=0) + TINY)
    return _Pairs(camera, episode, own, others, state, change / (change.std(axis=0) + TINY))


def _effects(episodes: Sequence[CheckedEpisode], names: Sequence[str]) -> Found:
    """Actions that change nothing, that are a row late, and episodes in which they mean something else."""
    has_state, cameras = episodes[0].state.shape[1] > 0, [*episodes[0].pictures]
    seen = [pairs for camera in cameras if (pairs := _pairs(episodes, camera)) is not None]
    known = [pairs for pairs in [_pairs(episodes, None)] if pairs is not None] if has_state else seen
    if not known:
        return
    best = max(known, key=lambda pairs: pairs.effect)
    odd = [*_odd_episodes(best, names, episodes)]
    has_fault = any(kind for kind, _ in odd)
    for pairs in seen if not (has_state and has_fault) else ():  # wrong actions explain no picture
        odd += _odd_episodes(pairs, (), episodes) if pairs is not best else ()
    yield from odd
    if any(kind for kind, _ in odd):
        return
    if best.effect < EFFECT:
        text = f"the actions explain {best.what} no better than those of other episodes do"
        yield "no_effect", f"{text}. Are they of other episodes, of another robot, or of another column?"
    else:
        yield from _late(best)


def _late(pairs: _Pairs) -> Found:
    """Changes that later rows explain, or earlier ones, and to which those that should explain them add nothing."""
    later = ([0, 1, 2], [0, 1], [1, 2]) if pairs.camera else ([1, 2], [1], [2])  # a place moves by two rows
    for (every, right, other), kind, text in (
        (later, "late_actions", "t + 1 says: actions are a row late. Move the column one row up"),
        (([0, 1], [1], [0]), "", "t - 1 says: actions are a row early, or the robot answers a row later"),
    ):
        together, *parts = (pairs.explained(pairs.own_N_3_d[:, rows]) for rows in (every, right, other))
        gain, back = ((together - part).clip(0).sum() for part in parts)
        if gain >= max(LATE_GAIN, LATE_RATIO * back):
            yield kind, f"{pairs.what} changes from row t to t + 1 as the action of row {text}."


def _odd_episodes(pairs: _Pairs, names: Sequence[str], episodes: Sequence[CheckedEpisode]) -> Found:
    """Episodes that contradict the others, and do not once their pictures are turned or numbers of actions changed.

    A change counts where the fit leaves less than `SHOWN` of it. Contradicted: the fit of the others leaves more of it
    (`CONTRADICTS`) than no fit at all. Mended: at most `MENDED` of that is left. Pictures are called turned only where
    the fit leaves less than `TURNS_SHOWN` of a motion that a turn changes, and never those of a camera in a hand: what
    it sees of a motion depends on how the hand is turned. Actions are a row late where the next rows leave at most
    `MENDED` of the episode's changes.
    """
    actions, change, count = pairs.own_N_3_d[:, :2], pairs.change_N_k, len(episodes)
    x, is_used = pairs.inputs(actions), numpy.ones(count, bool)
    for _ in range(4):  # the fit of the half of the episodes that it fits best
        inside = is_used[pairs.episode]
        fit = _ridge(x[inside], change[inside])
        left_E_k = pairs.by_episode(change - x @ fit)
        base_E_k = pairs.by_episode(change - change[inside].mean(axis=0))
        share = left_E_k.sum(axis=1) / base_E_k.sum(axis=1).clip(TINY)
        is_used = share <= numpy.median(share)
    unexplained_k = left_E_k[is_used].sum(axis=0) / base_E_k[is_used].sum(axis=0).clip(TINY)
    is_shown = unexplained_k < SHOWN
    least_E_k = numpy.bincount(pairs.episode, minlength=count)[:, None] / 2 * change.var(axis=0)  # where little moves
    is_odd = ((left_E_k >= CONTRADICTS * numpy.maximum(base_E_k, least_E_k)) & is_shown).any(axis=1)
    most, rest = MENDED * left_E_k[:, is_shown].sum(axis=1), change - x @ fit
    weights_2_d_k = fit[: actions[0].size].reshape(*actions.shape[1:], -1)
    after: dict[tuple[str, str], Floats] = {}
    for name, (right, down) in _TURNS.items() if pairs.camera and not _IN_HAND.search(pairs.camera) else ():
        turns = numpy.array([right - 1, down - 1, right - 1, down - 1])
        if (unexplained_k[turns < 0] < TURNS_SHOWN).any():
            after["turned_pictures", f"'{pairs.camera}' is {name}"] = pairs.by_episode(rest + change * turns)
    for kind, text, places, others in _changed(actions, names):
        gone = numpy.einsum("nlc,lck->nk", others - actions[..., places], weights_2_d_k[:, places])
        after[kind, text] = pairs.by_episode(rest - gone)
    fits = {key: is_odd & (left[:, is_shown].sum(axis=1) <= most) for key, left in after.items()}
    if names and is_shown.any():
        later = pairs.by_episode(change - pairs.inputs(pairs.own_N_3_d[:, 1:]) @ fit)[:, is_shown].sum(axis=1)
        is_left = most > LATE_LEFT * numpy.maximum(base_E_k, least_E_k)[:, is_shown].sum(axis=1)
        fits["late_actions", "actions are a row late"] = is_left & (later <= most)
    while fits and (best := max(fits.items(), key=lambda item: item[1].sum()))[1].sum() >= LEAST_ODD:
        (kind, text), is_mended = best
        fits = {key: one & ~is_mended for key, one in fits.items()}
        if is_mended.sum() <= MOST_ODD * count:
            is_late = kind == "late_actions"
            cure = "Move their actions one row up" if is_late else "Convert these episodes, or remove them"
            found = f"{text} in {_some(is_mended, episodes)} beside the others, by {pairs.what}"
            if is_mended.sum() < FEW_ODD * count:
                yield "", f"{found}. So few may fit by chance: look at them."
            else:
                yield kind, f"{found}. {cure}."


def _changed(actions: Floats, names: Sequence[str]) -> Iterator[tuple[str, str, list[int], Floats]]:
    """Numbers in place of others: of the other sign, around the middle of the range, or two in each other's place."""
    moving = [i for i in range(len(names)) if numpy.ptp(actions[..., i]) > 0]
    for i in moving:
        yield "action_sign", f"{names[i]} has the other sign", [i], -actions[..., [i]]
    for i, j in combinations(moving, 2):
        yield "swapped_columns", f"{names[i]} and {names[j]} are swapped", [i, j], actions[..., [j, i]]


def _ridge(x: Floats, y: Floats) -> Floats:
    weights: Floats = numpy.linalg.solve(x.T @ x + RIDGE * len(x) * numpy.eye(x.shape[1]), x.T @ y)
    return weights


def _with_one(x: Floats) -> Floats:
    return numpy.concatenate([x, numpy.ones((len(x), 1))], axis=1)


def _spread(tables: Sequence[Floats]) -> Floats:
    low, high = numpy.quantile(numpy.concatenate(tables), (0.01, 0.99), axis=0)
    return numpy.asarray(high - low)


def _is_within(rows: Floats, bound: Floats) -> Flags:
    return numpy.asarray((abs(numpy.diff(rows, axis=0)) <= bound).all(axis=1))


def _change(pictures: Floats) -> Floats:
    """[F - 1]: the change of the cell that changes most."""
    return numpy.asarray(abs(numpy.diff(pictures, axis=0)).max(axis=(1, 2)))


def _short(name: str) -> str:
    """A number's name without the words for actions and for states."""
    return re.sub(r"(^|\b)(observation|state|actions?|pos|position|goal|main)([._]|$)", "", name.lower()).strip("._")


def _some(is_odd: Flags, episodes: Sequence[CheckedEpisode]) -> str:
    odd = [one.name for one, is_one in zip(episodes, is_odd) if is_one]
    return f"{len(odd)} of {len(episodes)} episodes ({', '.join(odd[:NAMED])}{', ...' if len(odd) > NAMED else ''})"
