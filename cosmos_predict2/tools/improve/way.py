# SPDX-License-Identifier: Apache-2.0
"""The way from recordings to a better policy: its programs in their order, with the arguments for these recordings."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cosmos_predict2.data.lerobot.info import STATE
from cosmos_predict2.data.lerobot.reader import LeRobotSource, choose_state
from cosmos_predict2.data.split import require_usable
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.tokenizers.sizes import small_size
from cosmos_predict2.tools.improve.steps import WayStep
from imaginaire import foreign_json
from imaginaire.buildable import find, path_of, resolve
from imaginaire.checkpoint.layout import set_name
from imaginaire.errors import DataError

USUAL_SIDE = 64
USUAL_AREA = USUAL_SIDE**2  # of pictures, for which the times below are
# Kinds of clones by the end of the name of the experiment that learns ...
POLICIES = {"conv": "_conv", "pi05": "_pi05", "openvla_oft": ""}
_CLONED = {"conv": "_conv", "openvla_oft": "_openvla_oft"}  # ... and of the one that clones
FIRST_HELD_OUT = 100_000  # number of the first start of the truth: none that recordings or gates begin with ...
FIRST_COLLECTED, COLLECTED = 200_000, 100  # ... or episodes of later phases; how many these are
FIRST_TRIED, FIRST_CHOICE = 150_000, 175_000  # ... or the trials of what was learnt, or the choice among several
SAVED_AT = (20, 40, 60, 80)  # iterations whose weights a policy saves while it learns: the last ones may be worse
REWARD = "reward_model.safetensors"
WATCH = "trainer.callbacks.imagination_watch"
GATE, GYM = "gate", "gym:"
# The steps by which a policy that became worse is not kept.
TRIAL_BEFORE, TRIAL_CLONE, TRIAL_AFTER = "trial_before", "trial_clone", "trial_after"
CHOICE, CHOSEN = "choice", "chosen"  # the steps that rank clones, and that measure the one that learns
RANKING = "ranking.json"
# True success of a clone, of so many episodes, behind which none learns: a gain would lie within its error.
FULL, FULL_OF = 0.97, 100
REINFORCED = "posttraining/reinforcement_learning/policy"
# Of a watched step of clones that draw narrowly, whose distances are larger: +.22 and +.01 followed .06 and .12.
LARGEST_KL = {"openvla_oft": 0.2}
CARD, CLONED = "card.json", "posttraining/cloning"
WORLD_MODEL = "posttraining/video2world/world_model"


@dataclass(frozen=True)
class Options:
    """A user's choices: nothing but names."""

    data: Path
    out: Path
    suite: str = ""
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
    source = LeRobotSource.open(options.data, options.action_keys)
    require_usable(source, options.camera or None, options.action_keys)
    key = source.camera(options.camera or None)
    height, width = source.frames(0, cameras_in(key)[0], [0]).shape[-2:]
    dim = source.width(source.action_parts())
    longest = int(source.episodes.lengths.max())
    sentences = tuple(sorted({source.caption(i) for i in range(len(source))}))
    size = small_size(height, width, options.picture_size)
    state_dim = source.width(choose_state(source.info, STATE)) if options.state else 0
    return RecordedSizes(size, (height, width), key, dim, longest - 1, source.info.fps, sentences, state_dim)


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


def steps_of(options: Options, recorded: RecordedSizes) -> list[WayStep]:
    """The programs, each with the paths of what those before it made; those behind the choice of a clone with the
    clone that is chosen by now."""
    way, (first, *others) = _Way(options, recorded), phases_of(options)
    steps = [way.check(), way.split(first), way.tokenizer(first), way.world_model(first), way.imagined(first)]
    clones = clones_of(options)
    steps += [way.reward(first), *(way.clone(first, clone) for clone in clones), way.starts(first)]
    if len(clones) > 1:
        steps.append(way.choice(first, clones))
    steps += [way.gate(first), *way.improved(first)]
    if options.suite:
        steps.append(way.truth("before", first, clones[0].folder(options.out) / "policy"))
        if len(clones) > 1:  # left out where the first is chosen
            steps.append(way.truth(CHOSEN, first, first.policy))
        steps.append(way.truth("after", first, first.result))
    for phase in others:
        steps += [way.collect(phase), way.split(phase), way.world_model(phase), way.reward(phase), way.starts(phase)]
        steps += [*way.cloned_anew(phase), way.gate(phase), *way.improved(phase)]
        steps.append(way.truth("after", phase, phase.result))
    return steps


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
    best: int | None = None  # the iteration of SAVED_AT whose weights are tried, as far as these were played

    def __post_init__(self) -> None:
        anew = None if self.clone is None or self.is_anew is False else self.clone.folder(self.out) / "policy"
        self.policy = anew or self.before  # it learns
        self.title = "" if self.number == 1 else f", phase {self.number}"
        self.world_model = self.out / f"{WORLD_MODEL}{self.end}"
        self.split, self.card = self.folder / "split.json", self.folder / CARD
        self.reward, self.starts = self.folder / "reward", self.folder / "starts"
        self.result = self.folder / "policy"  # as a folder that can be given away
        self.run, self.learnt = self.out / f"{REINFORCED}{self.end}", self.result
        if self.is_tried:
            self.learnt = self.folder / "learnt"

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
        phase = Phase(number, end, folder, data, before, options.out, is_tried)
        if found and is_tried:
            phase = replace(phase, clone=replace(chosen(options), name=f"clone_phase{end}"))
            paths = [options.out / name / "evaluation.json" for name in phase.trials_before]
            if all(path.exists() for path in paths):
                rate, anew = map(rate_of, paths)
                phase = replace(phase, is_anew=anew >= rate)
        saved = [i for i in SAVED_AT if is_tried and phase.weights(i).exists()]
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


Words = tuple[str, ...]


def _flags(**values: object) -> Words:
    """``--name value`` of each, but for empty ones."""
    return tuple(word for name, value in values.items() if value != "" for word in (f"--{name}", str(value)))


def _overrides(values: Mapping[str, object]) -> Words:
    """``key=value`` of each, but for empty ones."""
    return tuple(f"{key}={value}" for key, value in values.items() if value != "")


class _Way:
    """Steps with the arguments that all of them share."""

    def __init__(self, options: Options, recorded: RecordedSizes) -> None:
        self.options, self.recorded, self.out = options, recorded, options.out
        self.tokenizer_file = options.out / "tokenizer.safetensors"
        own = [path_of(find(kind, "policy")).partition(":")[0] for kind in options.policies if kind not in POLICIES]
        self.imports = tuple(word for name in dict.fromkeys((*options.imports, *own)) for word in ("--import", name))
        self.suite, self.camera = _flags(suite=options.suite), _flags(camera=options.camera)
        self.seed = _flags(seed=options.seed)
        self.actions = ("--action_keys", *options.action_keys) if options.action_keys else ()
        self.action_keys = f"[{','.join(options.action_keys)}]" if options.action_keys else ""
        self.suite_size = (*self.suite, *_flags(**suites.size_of_recordings(options.suite, recorded.recorded_size[0])))
        self.size = f"[{recorded.size[0]},{recorded.size[1]}]"
        self.area = len(cameras_in(recorded.camera)) * recorded.size[0] * recorded.size[1] / USUAL_AREA
        self.chosen = chosen(options)

    def modules(self, *policies: str, suite: str = "") -> tuple[Path, ...]:
        """The files of the user's own code that policies of these kinds and a suite need."""
        own = [kind for kind in policies if kind not in POLICIES]
        files = map(_file_of, (*(self.options.imports if own or suite else ()), *own, suite))
        return tuple(path for path in files if path is not None)

    def playing(self) -> tuple[Path, ...]:
        """Those of what plays in the suite."""
        return self.modules(*self.options.policies, suite=self.options.suite)

    def check(self) -> WayStep:
        found, data = self.out / "recordings.json", self.options.data
        words = ("-m", "scripts.check_dataset", str(data), *_flags(json=found))
        codes = (0, 1) if self.options.allow_unchecked else (0,)  # 1: faults, which may be meant
        cure = " Mend the faults, or go on with --allow_unchecked."
        title = "look through the recordings"
        return WayStep("check", title, words, (data,), (found,), guess_s=15, codes=codes, cure=cure)

    def split(self, phase: Phase) -> WayStep:
        before = () if phase.number == 1 else (phases_of(self.options)[phase.number - 2].split,)
        words: Words = ("-m", "scripts.split_recordings", str(phase.data))
        words += _flags(success_column=self.options.success_column)
        words += (*(word for path in before for word in _flags(extend=path)), *self.camera, *self.actions, *self.seed)
        words += _flags(out=phase.split)  # what was held out stays so
        return WayStep(f"split{phase.end}", f"split them{phase.title}", words, (phase.data, *before), (phase.split,))

    def tokenizer(self, phase: Phase) -> WayStep:
        words = ("-m", "scripts.fit_tiny_tokenizer", *_flags(data=phase.data, split=phase.split))
        words += (*self.camera, *self.seed, "--video_size", *map(str, self.recorded.size))
        words += _flags(out=self.tokenizer_file)
        makes = (self.tokenizer_file, self.tokenizer_file.with_suffix(".json"))
        return WayStep("tokenizer", "tokenizer", words, (phase.data, phase.split), makes, guess_s=70 * self.area)

    def world_model(self, phase: Phase) -> WayStep:
        name = phase.world_model.name
        given = {
            "dataloader_train.dataset.root": phase.data,
            "dataloader_train.dataset.split_file": phase.split,
            "dataloader_train.dataset.camera": self.options.camera,
            "dataloader_train.dataset.action_keys": self.action_keys,
            "dataloader_train.dataset.video_size": self.size,
            "model.config.pipe_config.tokenizer.weights": self.tokenizer_file,
            "model.config.pipe_config.state": STATE if self.options.state else "",
            "trainer.seed": self.options.seed,
        }
        words = ("-m", "scripts.train", "--", "experiment=world_model_recordings", f"job.name={name}")
        reads = (phase.data, phase.split, self.tokenizer_file)
        title, guess_s = f"world model{phase.title}", 400 * self.area
        return WayStep(name, title, (*words, *_overrides(given)), reads, (phase.world_model,), guess_s)

    def imagined(self, phase: Phase) -> WayStep:
        out, title = self.out / "imagined", "world model beside the recordings"
        words = ("-m", "scripts.evaluate_world_model", *_flags(dit_path=phase.world_model, num_clips=16))
        words += (*self.seed, *_flags(out=out))
        return WayStep("imagined", title, words, (phase.world_model / "checkpoints",), (out,), guess_s=30 * self.area)

    def reward(self, phase: Phase) -> WayStep:
        words = ("-m", "scripts.train_reward_model", *_flags(data=phase.data, split=phase.split))
        words += _flags(world_model=phase.world_model, success_column=self.options.success_column)
        words += (*self.camera, *self.seed, *_flags(out=phase.reward))
        reads = (phase.data, phase.split, phase.world_model / "checkpoints")
        return WayStep(f"reward{phase.end}", f"reward{phase.title}", words, reads, (phase.reward,), 60 * self.area)

    def clone(self, phase: Phase, clone: Clone) -> WayStep:
        is_resized = clone.policy == "conv" and self.options.picture_size != USUAL_SIDE
        given = {
            "experiment": f"clone_recordings{_CLONED.get(clone.policy, '')}",
            "job.name": clone.name,
            "model.config.policy": "" if clone.policy in POLICIES else clone.policy,
            "+model.config.arguments.size": max(self.recorded.size) if is_resized else "",
            "dataloader_train.dataset.path": phase.data,
            "dataloader_train.dataset.split_file": phase.split,
            "dataloader_train.dataset.camera": self.options.camera,
            "dataloader_train.dataset.action_keys": self.action_keys,
            "dataloader_train.dataset.state": "true" if self.options.state else "",
            "trainer.seed": clone.seed,
        }
        words = ("-m", "scripts.train", *self.imports, "--", *_overrides(given))
        reads = (phase.data, phase.split, *self.modules(clone.policy))
        return WayStep(clone.name, clone.title, words, reads, (clone.folder(self.out),), guess_s=130)

    def choice(self, phase: Phase, clones: Sequence[Clone]) -> WayStep:
        """Clones in the order of what is imagined of them, with what they truly do where that can be played at will."""
        policies, ranking = [clone.folder(self.out) / "policy" for clone in clones], self.out / RANKING
        words = ("-m", "scripts.rank_policies", *self.imports, *_flags(world_model=phase.world_model))
        words += _flags(reward=phase.reward, starts=phase.starts, out=ranking)
        is_played = self.options.suite.startswith(GYM)  # others may have too few starts
        if is_played:
            words += (*self.suite_size, *_flags(first=FIRST_CHOICE, episodes=num_tried(self.options)))
        words += (*self.seed, "--policies", *map(str, policies))
        own = self.playing() if is_played else self.modules(*self.options.policies)
        reads = (phase.world_model / "checkpoints", phase.reward, phase.starts, *policies, *own)
        guess_s = (45 if is_played else 20) * len(clones) * self.area
        codes = (0, 1) if is_played else (0,)  # 1: imagination's order is wrong, which then does not count
        return WayStep(CHOICE, "choice of a clone", words, reads, (ranking,), guess_s, codes=codes)

    def starts(self, phase: Phase) -> WayStep:
        words = ("-m", "scripts.make_reset_states", *_flags(dataset=phase.data, split=phase.split))
        words += (*self.camera, *self.actions, *_flags(out=phase.starts))
        reads = (phase.data, phase.split)
        return WayStep(f"starts{phase.end}", f"starts{phase.title}", words, reads, (phase.starts,), guess_s=15)

    def gate(self, phase: Phase) -> WayStep:
        words = ("-m", "scripts.check_imagination", *_flags(data=phase.data, split=phase.split))
        words += _flags(world_model=phase.world_model, reward=phase.reward, policy=phase.policy)
        words += (*self.imports, *self.suite, *self.camera, *self.seed)
        words += _flags(success_column=self.options.success_column, out=phase.card)
        judged = (phase.world_model / "checkpoints", phase.reward, phase.policy)
        reads = (phase.data, phase.split, *judged, *self.playing())
        how: dict[str, Any] = dict(guess_s=60 * self.area, codes=(0, 1))  # 1 is its no
        return WayStep(f"{GATE}{phase.end}", f"gate{phase.title}", words, reads, (phase.card,), **how)

    def learning(self, phase: Phase) -> WayStep:
        given = {
            "experiment": f"vla_grpo_recordings{POLICIES.get(self.chosen.policy, '')}",
            "job.name": phase.run.name,
            "trainer.seed": self.options.seed,
            "model.config.env.imagination.dit_path": phase.world_model,
            "model.config.env.starts.path": phase.starts,
            "model.config.env.starts.size": self.size,
            "model.config.env.reward.path": phase.reward / REWARD,
            **_policy(self.chosen.policy, phase.policy, self.recorded.action_dim),
            "model.config.card": phase.card,
            f"{WATCH}.data": phase.data,
            f"{WATCH}.split": phase.split,
            f"{WATCH}.camera": self.options.camera,
            f"{WATCH}.limits.approx_kl.most": LARGEST_KL.get(self.chosen.policy, ""),
            "model.config.allow_unchecked": "true" if self.options.allow_unchecked else "",
            # it has the bound of the gate, which was overruled
            f"{WATCH}.limits.spread.only_warns": "true" if self.options.allow_unchecked else "",
        }
        words = ("-m", "scripts.train", *self.imports, "--", *_overrides(given))
        learnt_in = (phase.world_model / "checkpoints", phase.starts, phase.reward, phase.policy, phase.card)
        reads = (*learnt_in, phase.data, phase.split, *self.modules(self.chosen.policy))
        title = f"learning in imagination{phase.title}"
        return WayStep(f"learning{phase.end}", title, words, reads, (phase.run,), guess_s=250 * self.area)

    def cloned_anew(self, phase: Phase) -> list[WayStep]:
        """A clone of all successes until then, tried beside the policy of the phase before."""
        if phase.clone is None:
            return []
        policy = phase.clone.folder(self.out) / "policy"
        trial = self.trial(f"{TRIAL_CLONE}{phase.end}", f"trial of the new clone{phase.title}", policy)
        return [self.clone(phase, phase.clone), self.trial_before(phase), trial]

    def improved(self, phase: Phase) -> list[WayStep]:
        """Learning, and what it made; where that can be tried, the best of several iterations, beside the policy that
        learnt."""
        steps = [self.learning(phase)]
        if phase.is_tried:
            steps += [self.look(phase, iteration) for iteration in SAVED_AT]
        steps.append(self.export(phase))
        if phase.is_tried:
            steps += [] if phase.clone else [self.trial_before(phase)]
            steps.append(self.trial(phase.trial_after, f"trial of the policy{phase.title}", phase.learnt))
        return steps

    def trial_before(self, phase: Phase) -> WayStep:
        what = "the policy before" if phase.clone else "the clone"
        return self.trial(f"{TRIAL_BEFORE}{phase.end}", f"trial of {what}{phase.title}", phase.before)

    def look(self, phase: Phase, iteration: int) -> WayStep:
        title = f"truth after iteration {iteration} of {SAVED_AT[-1]}{phase.title}"
        return self.trial(phase.look(iteration), title, phase.weights(iteration), FIRST_CHOICE)

    def export(self, phase: Phase) -> WayStep:
        made = phase.run if phase.best is None else phase.weights(phase.best)
        words = ("-m", "scripts.convert", *self.imports, str(made), str(phase.learnt))
        reads = (phase.run / "checkpoints" if phase.best is None else made, *self.modules(self.chosen.policy))
        return WayStep(f"export{phase.end}", f"policy as a folder{phase.title}", words, reads, (phase.learnt,))

    def trial(self, name: str, title: str, policy: Path, first: int = FIRST_TRIED) -> WayStep:
        """A policy on true starts that serve for nothing but to choose."""
        episodes = num_tried(self.options)
        words = ("-m", "scripts.evaluate_policy", *self.imports, *self.suite_size, *self.seed)
        words += _flags(policy=policy, first=first, episodes=episodes, draws=1, out=self.out / name)
        return WayStep(name, title, words, (policy, *self.playing()), (self.out / name,), guess_s=episodes * 0.25)

    def truth(self, when: str, phase: Phase, policy: Path) -> WayStep:
        """A policy on the held-out starts, and the same actions imagined."""
        name, episodes = f"{when}{phase.end}", self.options.episodes
        words = ("-m", "scripts.evaluate_policy", *self.imports, *self.suite_size, *self.seed)
        first = FIRST_HELD_OUT if ":" in self.options.suite else 0  # named ones have few starts
        words += _flags(policy=policy, first=first, episodes=episodes, draws=1, world_model=phase.world_model)
        words += _flags(reward=phase.reward / REWARD, videos=4, out=self.out / name)
        reads = (policy, phase.world_model / "checkpoints", phase.reward, *self.playing())
        return WayStep(name, f"truth {when}{phase.title}", words, reads, (self.out / name,), guess_s=episodes * 0.5)

    def collect(self, phase: Phase) -> WayStep:
        """Episodes of the policy of the phase before, behind all recordings until then."""
        before, first = phases_of(self.options)[phase.number - 2].data, FIRST_COLLECTED * (phase.number - 1)
        words = ("-m", "scripts.collect", *self.imports, *self.suite_size, *self.seed)
        # What a robot plays: more successes to clone than attempts have, and what imagination judges worst.
        words += ("--mode", "greedy", *_flags(policy=phase.before, episodes=COLLECTED, base=before, first=first))
        words += _flags(fps=f"{self.recorded.fps:g}", camera=self.recorded.camera, out=phase.data)
        title, reads = f"episodes of the policy{phase.title}", (phase.before, before, *self.playing())
        return WayStep(f"collect{phase.end}", title, words, reads, (phase.data,), guess_s=COLLECTED * 0.5)


def _policy(name: str, clone: Path, action_dim: int) -> dict[str, object]:
    """The overrides by which an experiment begins with a clone."""
    if name in POLICIES:
        return {"model.config.policy.path": clone}
    target = path_of(resolve(name, "policy")).replace(":", ".")
    own = f"{{_target_:{target},path:{clone},action_dim:{action_dim}}}"
    return {"model.config.policy": "null", "++model.config.policy": own}  # null first: else the arguments are merged


def _file_of(name: str) -> Path | None:
    """The file of a module that a name has before its colon (gym:MODULE:ID, MODULE:CLASS); None of what ships."""
    module = name.removeprefix("gym:").partition(":")[0].partition("?")[0]
    if not module.replace(".", "").isidentifier():
        return None
    spec = importlib.util.find_spec(module)
    origin = None if spec is None else spec.origin
    return None if origin is None or "site-packages" in origin else Path(origin)
