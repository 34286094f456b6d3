# SPDX-License-Identifier: Apache-2.0
"""The way from recordings to a better policy: its programs in their order, with the arguments for these recordings."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_predict2.data.lerobot.info import STATE
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.tools.improve.phases import (
    CHOICE,
    CHOSEN,
    GATE,
    GYM,
    RANKING,
    TRIAL_BEFORE,
    TRIAL_CLONE,
    USUAL_SIDE,
    Clone,
    Options,
    Phase,
    RecordedSizes,
    chosen,
    clones_of,
    num_tried,
    phases_of,
)
from cosmos_predict2.tools.improve.steps import WayStep
from imaginaire.buildable import find, path_of, resolve
from imaginaire.config.compose import quoted

USUAL_AREA = USUAL_SIDE**2  # of pictures, for which the times below are
# Kinds of clones by the end of the name of the experiment that learns ...
POLICIES = {"conv": "_conv", "pi05": "_pi05", "openvla_oft": ""}
_CLONED = {"conv": "_conv", "openvla_oft": "_openvla_oft"}  # ... and of the one that clones
FIRST_HELD_OUT = 100_000  # number of the first start of the truth: none that recordings or gates begin with ...
FIRST_COLLECTED, COLLECTED = 200_000, 100  # ... or episodes of later phases; how many these are
FIRST_TRIED, APART = 150_000, 1_000  # ... or the trials of what was learnt in the first phase, and how far others lie
FIRST_CHOICE = 175_000  # ... or the choice among several; those of the gate are `rl.imagined.check.FIRST_ATTEMPT`
REWARD = "reward_model.safetensors"
WATCH = "trainer.callbacks.imagination_watch"
# Of a watched step of clones that draw narrowly, whose distances are larger: +.22 and +.01 followed .06 and .12.
LARGEST_KL = {"openvla_oft": 0.2}


def steps_of(options: Options, recorded: RecordedSizes) -> list[WayStep]:
    """The programs, each with the paths of what those before it made; those behind the choice of a clone with the
    clone that is chosen by now."""
    way, (first, *others) = _Way(options, recorded), phases_of(options)
    steps, clones = [way.check(), way.split(first)], clones_of(options)
    if options.world_model is None:
        steps += [way.tokenizer(first), way.world_model(first)]
    steps += [way.imagined(first), way.reward(first), *(way.clone(first, clone) for clone in clones), way.starts(first)]
    if len(clones) > 1:
        steps.append(way.choice(first, clones))
    steps += [way.gate(first), *way.improved(first)]
    if options.suite:
        steps.append(way.truth("before", first, clones[0].folder(options.out) / "policy"))
        if len(clones) > 1:  # left out where the first is chosen
            steps.append(way.truth(CHOSEN, first, first.policy))
        steps.append(way.truth("after", first, first.result))
    for phase in others:
        steps += [way.collect(phase), way.split(phase)]
        steps += [] if options.world_model else [way.world_model(phase)]
        steps += [way.reward(phase), way.starts(phase), *way.cloned_anew(phase), way.gate(phase), *way.improved(phase)]
        steps.append(way.truth("after", phase, phase.result))
    return steps


Words = tuple[str, ...]


def _flags(**values: object) -> Words:
    """``--name value`` of each, but for empty ones."""
    return tuple(word for name, value in values.items() if value != "" for word in (f"--{name}", str(value)))


def _overrides(values: Mapping[str, object]) -> Words:
    """``key=value`` of each, but for empty ones; a path may need quotes."""
    given = {key: quoted(value) if isinstance(value, Path) else value for key, value in values.items()}
    return tuple(f"{key}={value}" for key, value in given.items() if value != "")


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
        codes = (0, 1) if self.options.allow_faults else (0,)  # 1: faults, which may be meant
        cure = " Mend the faults, or go on with --allow_faults."
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
        reads = [phase.weights_of_world]
        if phase.given:  # its run may have looked at other recordings
            words += _flags(data=phase.data, split=phase.split)
            reads += [phase.data, phase.split]
        words += (*self.seed, *_flags(out=out))
        return WayStep("imagined", title, words, tuple(reads), (out,), guess_s=30 * self.area)

    def reward(self, phase: Phase) -> WayStep:
        words = ("-m", "scripts.train_reward_model", *_flags(data=phase.data, split=phase.split))
        words += _flags(world_model=phase.world_model, success_column=self.options.success_column)
        words += (*self.camera, *self.seed, *_flags(out=phase.reward))
        reads = (phase.data, phase.split, phase.weights_of_world)
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
        reads = (phase.weights_of_world, phase.reward, phase.starts, *policies, *own)
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
        played = self.options.played
        words += _flags(played=played or "", success_column=self.options.success_column, out=phase.card)
        judged = (phase.weights_of_world, phase.reward, phase.policy)
        reads = (phase.data, phase.split, *judged, *self.playing(), *([played] if played else []))
        how: dict[str, Any] = dict(guess_s=60 * self.area, codes=(0, 1))  # 1 is its no
        return WayStep(f"{GATE}{phase.end}", f"gate{phase.title}", words, reads, (phase.card,), **how)

    def learning(self, phase: Phase) -> WayStep:
        given = {
            "experiment": f"vla_grpo_recordings{POLICIES.get(self.chosen.policy, '')}",
            "job.name": phase.run.name,
            "trainer.seed": self.options.seed,
            "model.config.env.imagination.dit_path": phase.world_model,
            "model.config.env.starts.path": phase.starts,
            "model.config.env.starts.size": "" if phase.given else self.size,  # empty: that of its training
            "model.config.env.reward.path": phase.reward / REWARD,
            **_policy(self.chosen.policy, phase.policy, self.recorded.action_dim),
            "model.config.card": phase.card,
            f"{WATCH}.data": phase.data,
            f"{WATCH}.split": phase.split,
            f"{WATCH}.camera": self.options.camera,
            # where iterations are played, truth decides on the last one
            f"{WATCH}.ends_full": "false" if phase.is_tried else "",
            f"{WATCH}.limits.approx_kl.most": LARGEST_KL.get(self.chosen.policy, ""),
            "model.config.allow_unchecked": "true" if self.options.allow_unchecked else "",
            # it has the bound of the gate, which was overruled
            f"{WATCH}.limits.spread.only_warns": "true" if self.options.allow_unchecked else "",
        }
        words = ("-m", "scripts.train", *self.imports, "--", *_overrides(given))
        learnt_in = (phase.weights_of_world, phase.starts, phase.reward, phase.policy, phase.card)
        reads = (*learnt_in, phase.data, phase.split, *self.modules(self.chosen.policy))
        title = f"learning in imagination{phase.title}"
        return WayStep(f"learning{phase.end}", title, words, reads, (phase.run,), guess_s=250 * self.area)

    def cloned_anew(self, phase: Phase) -> list[WayStep]:
        """A clone of all successes until then, tried beside the policy of the phase before."""
        if phase.clone is None:
            return []
        policy = phase.clone.folder(self.out) / "policy"
        trial = self.trial(phase, f"{TRIAL_CLONE}{phase.end}", f"trial of the new clone{phase.title}", policy)
        return [self.clone(phase, phase.clone), self.trial_before(phase), trial]

    def improved(self, phase: Phase) -> list[WayStep]:
        """Learning, and what it made; where that can be tried, the best of several iterations, beside the policy that
        learnt."""
        steps = [self.learning(phase)]
        if phase.is_tried:
            steps += [self.look(phase, iteration) for iteration in phase.saved_at]
        steps.append(self.export(phase))
        if phase.is_tried:
            steps += [] if phase.clone else [self.trial_before(phase)]
            steps.append(self.trial(phase, phase.trial_after, f"trial of the policy{phase.title}", phase.learnt))
        return steps

    def trial_before(self, phase: Phase) -> WayStep:
        what = "the policy before" if phase.clone else "the clone"
        return self.trial(phase, f"{TRIAL_BEFORE}{phase.end}", f"trial of {what}{phase.title}", phase.before)

    def look(self, phase: Phase, iteration: int) -> WayStep:
        title = f"truth after iteration {iteration} of {phase.saved_at[-1]}{phase.title}"
        return self.trial(phase, phase.look(iteration), title, phase.weights(iteration), FIRST_CHOICE)

    def export(self, phase: Phase) -> WayStep:
        made = phase.run if phase.best is None else phase.weights(phase.best)
        words = ("-m", "scripts.convert", *self.imports, str(made), str(phase.learnt))
        reads = (phase.run / "checkpoints" if phase.best is None else made, *self.modules(self.chosen.policy))
        return WayStep(f"export{phase.end}", f"policy as a folder{phase.title}", words, reads, (phase.learnt,))

    def trial(self, phase: Phase, name: str, title: str, policy: Path, first: int = 0) -> WayStep:
        """A policy on true starts that serve for one choice: those of the phase before decided that it was kept."""
        episodes, first = num_tried(self.options), first or FIRST_TRIED + APART * (phase.number - 1)
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
        reads = (policy, phase.weights_of_world, phase.reward, *self.playing())
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
    own = f"{{_target_:{target},path:{quoted(clone)},action_dim:{action_dim}}}"
    return {"model.config.policy": "null", "++model.config.policy": own}  # null first: else the arguments are merged


def _file_of(name: str) -> Path | None:
    """The file of a module that a name has before its colon (gym:MODULE:ID, MODULE:CLASS); None of what ships."""
    module = name.removeprefix("gym:").partition(":")[0].partition("?")[0]
    if not module.replace(".", "").isidentifier():
        return None
    spec = importlib.util.find_spec(module)
    origin = None if spec is None else spec.origin
    return None if origin is None or "site-packages" in origin else Path(origin)
