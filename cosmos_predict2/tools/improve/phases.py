# SPDX-License-Identifier: Apache-2.0
"""The phases of a way: what a user chose, what the recordings decide, the clones, and the paths of each phase. What
learns and what is kept follows from the files that steps have made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cosmos_predict2.data.lerobot.info import STATE
from cosmos_predict2.data.lerobot.reader import LeRobotSource, choose_state
from cosmos_predict2.data.split import require_usable, success_of_frames
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.tokenizers.sizes import small_size
from imaginaire import foreign_json
from imaginaire.checkpoint.layout import all_sets, set_name
from imaginaire.errors import DataError

USUAL_SIDE = 64
SAVED_AT = (20, 40, 60, 80)  # iterations whose weights a policy saves while it learns: the last ones may be worse
GATE, GYM = "gate", "gym:"
# The steps by which a policy that became worse is not kept.
TRIAL_BEFORE, TRIAL_CLONE, TRIAL_AFTER = "trial_before", "trial_clone", "trial_after"
CHOICE, CHOSEN = "choice", "chosen"  # the steps that rank clones, and that measure the one that learns
RANKING = "ranking.json"
# True success of a clone, of so many episodes, behind which none learns: a gain would lie within its error.
FULL, FULL_OF = 0.97, 100
CARD, CLONED = "card.json", "posttraining/cloning"
WORLD_MODEL = "posttraining/video2world/world_model"
REINFORCED = "posttraining/reinforcement_learning/policy"


@dataclass(frozen=True)
class Options:
    """A user's choices: nothing but names."""

    data: Path
    out: Path
    suite: str = ""
    played: Path | None = None  # what the robot did by the clone, where there is no suite
    world_model: Path | None = None  # the user's own, a run or weights, in place of tiny ones of the recordings
    imports: tuple[str, ...] = ()
    policies: tuple[str, ...] = ("conv",)  # kinds of clones
    clones: int = 2  # of each kind
    success_column: str = "next.success"
    camera: str = ""
    action_keys: tuple[str, ...] = ()  # what makes an action, where it is not one column
    state: bool = False  # policies read the robot's state, and the world model predicts it
    picture_size: int = USUAL_SIDE  # of the longer side, as the models see the pictures
    episodes: int = 200
    phases: int = 0  # besides the one of the recordings
    seed: int = 0
    allow_faults: bool = False
    allow_unchecked: bool = False


@dataclass(frozen=True)
class RecordedSizes:
    """Values that the recordings decide: sizes of pictures as the models see them, numbers of an action, lengths."""

    size: tuple[int, int]  # of each view
    recorded_size: tuple[int, int]  # likewise, as they were recorded
    camera: str  # its key, of several with + between them
    action_dim: int
    num_actions: int  # of the longest episode
    fps: float
    sentences: tuple[str, ...] = ()  # by which its tasks are called
    state_dim: int = 0  # numbers of the robot's state, where policies read it


def look(options: Options) -> RecordedSizes:
    """Read the index and the actions of the recordings, and refuse those of which nothing can be learnt."""
    source = _usable(options, options.data)
    key = source.camera(options.camera or None)
    height, width = source.frames(0, cameras_in(key)[0], [0]).shape[-2:]
    dim = source.width(source.action_parts())
    if options.played is not None:
        played = _usable(options, options.played)
        if (found := played.width(played.action_parts())) != dim:
            raise DataError(f"--played {options.played} has actions of {found} numbers, {options.data} of {dim}.")
    longest = int(source.episodes.lengths.max())
    sentences = tuple(sorted({source.caption(i) for i in range(len(source))}))
    size = small_size(height, width, options.picture_size)
    state_dim = source.width(choose_state(source.info, STATE)) if options.state else 0
    return RecordedSizes(size, (height, width), key, dim, longest - 1, source.info.fps, sentences, state_dim)


def _usable(options: Options, folder: Path) -> LeRobotSource:
    """Recordings that have what the way reads of them."""
    source = LeRobotSource.open(folder, options.action_keys)
    require_usable(source, options.camera or None, options.action_keys)
    success_of_frames(source, 0, options.success_column)  # raises where there is no such column
    return source


@dataclass(frozen=True)
class Clone:
    """A policy that is cloned: its kind, its seed, and the name of its step and run."""

    policy: str
    seed: int
    name: str

    def folder(self, out: Path) -> Path:
        return out / CLONED / self.name

    @property
    def title(self) -> str:
        return f"{self.name.replace('_', ' ')}, {self.policy}, seed {self.seed}"


def clones_of(options: Options) -> list[Clone]:
    """Every kind with each seed in turn: more seeds come behind those that are there."""
    each = [(policy, options.seed + k) for k in range(options.clones) for policy in options.policies]
    return [Clone(*one, name=f"clone_{k + 1}" if k else "clone") for k, one in enumerate(each)]


def chosen(options: Options) -> Clone:
    """The clone that learns: that of most true success, where none is known that which imagination ranks first, and
    before there is a ranking the first that is trained."""
    clones, played = clones_of(options), played_clones(options)
    name = max(played, key=lambda one: _rate(played[one])) if played else ""  # of equals the first in the ranking
    return next((clone for clone in clones if clone.name == name), clones[0])  # of one that is not trained any more


def played_clones(options: Options) -> dict[str, Mapping[str, Any]]:
    """True success of clones by their names, as far as they were played, in the order of what is imagined of them;
    empty before they are ranked."""
    path = options.out / RANKING
    if len(clones_of(options)) == 1 or not path.exists():
        return {}
    try:  # the folder may have been moved
        rows = foreign_json.load_object(path)["policies"]
        if played := {Path(row["policy"]).parent.name: row.get("true_success") or {} for row in rows}:
            return played
        raise ValueError("it has none")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no ranking of clones ({error!r}). Remove it: it is made again.") from error


def is_full(true: Mapping[str, Any]) -> bool:
    """True where a clone was played often and succeeded (nearly) always."""
    return _rate(true) >= FULL and true.get("count", 0) >= FULL_OF


@dataclass
class Phase:
    """The paths of a phase: the first is of the recordings, each later one also of the policy's own episodes."""

    number: int  # from 1
    end: str  # of the names of steps and runs
    folder: Path
    data: Path
    before: Path  # the policy that it begins with
    out: Path  # of all phases
    is_tried: bool  # against the policy that learnt, before it is kept
    clone: Clone | None = None  # of all successes until then
    is_anew: bool | None = None  # the new clone truly succeeded as often as the policy or more; None: not tried yet
    given: Path | None = None  # the user's own world model
    best: int | None = None  # the iteration whose weights are tried, as far as they were played

    def __post_init__(self) -> None:
        anew = None if self.clone is None or self.is_anew is False else self.clone.folder(self.out) / "policy"
        self.policy = anew or self.before  # it learns
        self.title = "" if self.number == 1 else f", phase {self.number}"
        self.world_model = self.given or self.out / f"{WORLD_MODEL}{self.end}"
        weights = self.world_model / "checkpoints"
        self.weights_of_world = weights if self.given is None or weights.is_dir() else self.given
        self.split, self.card = self.folder / "split.json", self.folder / CARD
        self.reward, self.starts = self.folder / "reward", self.folder / "starts"
        self.result = self.folder / "policy"  # as a folder that can be given away
        self.run, self.learnt = self.out / f"{REINFORCED}{self.end}", self.folder / "learnt"

    @property
    def saved_at(self) -> list[int]:
        """Iterations whose weights are played: those of SAVED_AT, and later ones of a run that went on by hand."""
        saved = (one.iteration for one in all_sets(str(self.run / "checkpoints")))
        return [*SAVED_AT, *sorted(one for one in saved if one > SAVED_AT[-1])]

    def weights(self, iteration: int) -> Path:
        return self.run / f"checkpoints/model/{set_name(iteration, dcp=False)}"

    def look(self, iteration: int) -> str:
        """The name of the step that plays these weights."""
        return f"look{self.end}_{iteration}"

    @property
    def trial_after(self) -> str:
        return f"{TRIAL_AFTER}{self.end}"

    @property
    def trials_before(self) -> list[str]:
        """The trials of what could learn."""
        return [f"{name}{self.end}" for name in (TRIAL_BEFORE, *([TRIAL_CLONE] if self.clone else []))]


def phases_of(options: Options) -> list[Phase]:
    """The phase of the recordings, and with a suite as many more as are asked for."""
    found: list[Phase] = []
    for number in range(1, 2 + (options.phases if options.suite else 0)):
        end = f"_{number}" if found else ""
        folder = options.out / f"phase{end}" if found else options.out
        data = folder / "data" if found else options.data
        before = found[-1].result if found else chosen(options).folder(options.out) / "policy"
        is_tried = options.suite.startswith(GYM)  # others may have too few starts for one more set of them
        phase = Phase(number, end, folder, data, before, options.out, is_tried, given=options.world_model)
        if found and is_tried:
            phase = replace(phase, clone=replace(chosen(options), name=f"clone_phase{end}"))
            paths = [options.out / name / "evaluation.json" for name in phase.trials_before]
            if all(path.exists() for path in paths):
                rate, anew = map(rate_of, paths)
                phase = replace(phase, is_anew=anew >= rate)
        saved = [i for i in phase.saved_at if is_tried and phase.weights(i).exists()]
        played = {i: options.out / phase.look(i) / "evaluation.json" for i in saved}
        rates = {i: rate_of(path) for i, path in played.items() if path.exists()}
        found.append(replace(phase, best=last_of_best(rates, num_tried(options))))
    return found


def num_tried(options: Options) -> int:
    """Episodes of a trial."""
    return max(1, options.episodes // 2)


def last_of_best(rates: Mapping[int, float], episodes: int) -> int | None:
    """The last iteration whose rate is at most a standard error below the best one. Within that error the rates may be
    equal, and of equals the last has learnt most."""
    best = max(rates.values(), default=0.0)
    error = math.sqrt(best * (1 - best) / episodes)
    return max((i for i, rate in rates.items() if rate >= best - error), default=None)


def rate_of(path: Path) -> float:
    """True success of an evaluation."""
    try:
        return float(foreign_json.load_object(path)["success"]["rate"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is no evaluation ({error!r}). Remove {path.parent}: it is made again.") from error


def _rate(true: Mapping[str, Any]) -> float:
    """A rate that is known; 0 of a clone that was not played, or whose episodes were all lost."""
    value = true.get("value")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
