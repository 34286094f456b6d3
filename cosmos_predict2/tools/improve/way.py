# SPDX-License-Identifier: Apache-2.0
"""The way from recordings to a better policy: its programs in their order, with the arguments for these recordings."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.sizes import small_size
from cosmos_predict2.tools.improve.steps import Step
from imaginaire.buildable import path_of, resolve
from imaginaire.errors import DataError

USUAL_AREA = 64 * 64  # of pictures, for which the times below are
POLICIES = {"pi05": "_pi05", "openvla_oft": ""}  # name -> the end of the name of the experiment that learns ...
_CLONED = {"openvla_oft": "_openvla_oft"}  # ... and of the one that clones
FIRST_HELD_OUT = 100_000  # number of the first start of the truth: none that recordings or gates begin with ...
FIRST_COLLECTED, COLLECTED = 200_000, 100  # ... or episodes of later phases; how many these are
REWARD = "reward_model.safetensors"
WATCH = "trainer.callbacks.imagination_watch"
GATE, GYM = "gate", "gym:"
REINFORCED = "posttraining/reinforcement_learning/policy"
CARD, CLONED = "card.json", "posttraining/cloning/clone"
WORLD_MODEL = "posttraining/video2world/world_model"


@dataclass(frozen=True)
class Options:
    """A user's choices: nothing but names."""

    data: Path
    out: Path
    suite: str = ""
    imports: tuple[str, ...] = ()
    policy: str = "pi05"
    success_column: str = "next.success"
    camera: str = ""
    episodes: int = 200
    phases: int = 0  # besides the one of the recordings
    seed: int = 0
    allow_unchecked: bool = False


@dataclass(frozen=True)
class Recorded:
    """Values that the recordings decide: sizes of pictures as the models see them, numbers of an action, lengths."""

    size: tuple[int, int]
    height: int  # of the pictures as they were recorded
    camera: str
    action_dim: int
    num_actions: int  # of the longest episode
    fps: float


def look(options: Options) -> Recorded:
    """Read the index of the recordings."""
    source = LeRobotSource.open(options.data)
    key = source.camera(options.camera or None)
    if len(source) == 0:
        raise DataError(f"{options.data} has no episode: record some first.")
    height, width = source.frames(0, key, [0]).shape[-2:]
    dim = source.width(source.action_parts())
    longest = int(source.episodes.lengths.max())
    return Recorded(small_size(height, width), height, key, dim, longest - 1, source.info.fps)


def steps_of(options: Options, recorded: Recorded) -> list[Step]:
    """The programs, each with the paths of what those before it made."""
    way, (first, *others) = _Way(options, recorded), phases_of(options)
    steps = [way.check(), way.split(first), way.tokenizer(first), way.world_model(first), way.imagined(first)]
    steps += [way.reward(first), way.clone(first), way.starts(first), way.gate(first), way.learning(first)]
    steps += [way.export(first)]
    if options.suite:
        steps += [way.truth("before", "truth before", first, first.policy), way.after(first)]
    for phase in others:
        steps += [way.collect(phase), way.split(phase), way.world_model(phase), way.reward(phase), way.starts(phase)]
        steps += [way.gate(phase), way.learning(phase), way.export(phase), way.after(phase)]
    return steps


@dataclass(frozen=True)
class Phase:
    """The paths of a phase: the first is of the recordings, each later one also of the policy's own episodes."""

    number: int  # from 1
    folder: Path
    data: Path
    policy: Path  # that learns
    world_model: Path
    learnt: Path  # the run in which it does

    @property
    def end(self) -> str:
        """The ending of the names of steps and runs."""
        return "" if self.number == 1 else f"_{self.number}"

    @property
    def title(self) -> str:
        return "" if self.number == 1 else f", phase {self.number}"

    @property
    def split(self) -> Path:
        return self.folder / "split.json"

    @property
    def reward(self) -> Path:
        return self.folder / "reward"

    @property
    def starts(self) -> Path:
        return self.folder / "starts"

    @property
    def card(self) -> Path:
        return self.folder / CARD

    @property
    def result(self) -> Path:
        """The policy as a folder that can be given away."""
        return self.folder / "policy"


def phases_of(options: Options) -> list[Phase]:
    """The phase of the recordings, and with a suite as many more as are asked for."""
    found: list[Phase] = []
    for number in range(1, 2 + (options.phases if options.suite else 0)):
        end = f"_{number}" if found else ""
        folder = options.out / f"phase{end}" if found else options.out
        found.append(
            Phase(
                number=number,
                folder=folder,
                data=folder / "data" if found else options.data,
                policy=found[-1].result if found else options.out / CLONED / "policy",
                world_model=options.out / f"{WORLD_MODEL}{end}",
                learnt=options.out / f"{REINFORCED}{end}",
            )
        )
    return found


class _Way:
    """Steps with the arguments that all of them share."""

    def __init__(self, options: Options, recorded: Recorded) -> None:
        self.options, self.recorded, self.out = options, recorded, options.out
        self.tokenizer_file = options.out / "tokenizer.safetensors"
        self.imports = tuple(word for name in options.imports for word in ("--import", name))
        self.suite = ("--suite", options.suite) if options.suite else ()
        self.seed, self.seed_of_run = ("--seed", str(options.seed)), f"trainer.seed={options.seed}"
        self.camera = ("--camera", options.camera) if options.camera else ()
        self.camera_of_run = (f"dataloader_train.dataset.camera={options.camera}",) if options.camera else ()
        self.image_size: tuple[str, ...] = ()
        if options.suite.startswith(GYM) and "image_size=" not in options.suite:
            self.image_size = ("--image_size", str(recorded.height))
        self.area = recorded.size[0] * recorded.size[1] / USUAL_AREA
        own = (*map(_file_of, options.imports), _file_of(options.policy), _file_of(options.suite))
        self.modules = tuple(path for path in own if path is not None)

    def check(self) -> Step:
        found = self.out / "recordings.json"
        words = ("-m", "scripts.check_dataset", str(self.options.data), "--json", str(found))
        return Step("check", "look through the recordings", words, (self.options.data,), (found,), guess_s=15)

    def split(self, phase: Phase) -> Step:
        before = phases_of(self.options)[phase.number - 2].split
        extended = ("--extend", str(before)) if phase.number > 1 else ()  # what was held out stays so
        words = ("-m", "scripts.split_recordings", str(phase.data), "--success_column", self.options.success_column)
        words = (*words, *extended, *self.camera, *self.seed, "--out", str(phase.split))
        reads = (phase.data, *map(Path, extended[1:]))
        return Step(f"split{phase.end}", f"split them{phase.title}", words, reads, (phase.split,), guess_s=10)

    def tokenizer(self, phase: Phase) -> Step:
        size = map(str, self.recorded.size)
        return Step(
            "tokenizer",
            "tokenizer",
            (
                *("-m", "scripts.fit_tiny_tokenizer", "--data", str(phase.data), "--split", str(phase.split)),
                *(*self.camera, *self.seed, "--video_size", *size, "--out", str(self.tokenizer_file)),
            ),
            reads=(phase.data, phase.split),
            makes=(self.tokenizer_file, self.tokenizer_file.with_suffix(".json")),
            guess_s=70 * self.area,
        )

    def world_model(self, phase: Phase) -> Step:
        return Step(
            f"world_model{phase.end}",
            f"world model{phase.title}",
            (
                *(
                    "-m",
                    "scripts.train",
                    "--",
                    "experiment=world_model_recordings",
                    f"job.name={phase.world_model.name}",
                ),
                *(f"dataloader_train.dataset.root={phase.data}", f"dataloader_train.dataset.split_file={phase.split}"),
                *self.camera_of_run,
                *(f"model.config.pipe_config.tokenizer.weights={self.tokenizer_file}", self.seed_of_run),
            ),
            reads=(phase.data, phase.split, self.tokenizer_file),
            makes=(phase.world_model,),
            guess_s=400 * self.area,
        )

    def imagined(self, phase: Phase) -> Step:
        words = ("-m", "scripts.evaluate_world_model", "--dit_path", str(phase.world_model), "--num_clips", "16")
        return Step(
            "imagined",
            "world model beside the recordings",
            (*words, *self.seed, "--out", str(self.out / "imagined")),
            reads=(phase.world_model / "checkpoints",),
            makes=(self.out / "imagined",),
            guess_s=30 * self.area,
        )

    def reward(self, phase: Phase) -> Step:
        return Step(
            f"reward{phase.end}",
            f"reward{phase.title}",
            (
                *("-m", "scripts.train_reward_model", "--data", str(phase.data), "--split", str(phase.split)),
                *("--world_model", str(phase.world_model), "--success_column", self.options.success_column),
                *(*self.camera, *self.seed, "--out", str(phase.reward)),
            ),
            reads=(phase.data, phase.split, phase.world_model / "checkpoints"),
            makes=(phase.reward,),
            guess_s=60 * self.area,
        )

    def clone(self, phase: Phase) -> Step:
        name = self.options.policy
        own = () if name in POLICIES else (f"model.config.policy={name}",)
        return Step(
            "clone",
            "clone",
            (
                *("-m", "scripts.train", *self.imports, "--"),
                *(f"experiment=clone_recordings{_CLONED.get(name, '')}", "job.name=clone", *own),
                *(f"dataloader_train.dataset.path={phase.data}", f"dataloader_train.dataset.split_file={phase.split}"),
                *(*self.camera_of_run, self.seed_of_run),
            ),
            reads=(phase.data, phase.split, *self.modules),
            makes=(self.out / CLONED,),
            guess_s=130,
        )

    def starts(self, phase: Phase) -> Step:
        words = ("-m", "scripts.make_reset_states", "--dataset", str(phase.data), "--split", str(phase.split))
        return Step(
            f"starts{phase.end}",
            f"starts{phase.title}",
            (*words, *self.camera, "--out", str(phase.starts)),
            reads=(phase.data, phase.split),
            makes=(phase.starts,),
            guess_s=15,
        )

    def gate(self, phase: Phase) -> Step:
        return Step(
            f"{GATE}{phase.end}",
            f"gate{phase.title}",
            (
                *("-m", "scripts.check_imagination", "--data", str(phase.data), "--split", str(phase.split)),
                *("--world_model", str(phase.world_model), "--reward", str(phase.reward)),
                *("--policy", str(phase.policy), *self.imports, *self.suite, *self.camera, *self.seed),
                *("--success_column", self.options.success_column, "--out", str(phase.card)),
            ),
            reads=(
                phase.data,
                phase.split,
                phase.world_model / "checkpoints",
                phase.reward,
                phase.policy,
                *self.modules,
            ),
            makes=(phase.card,),
            guess_s=60 * self.area,
            codes=(0, 1),  # 1 is its no
        )

    def learning(self, phase: Phase) -> Step:
        height, width = self.recorded.size
        return Step(
            f"learning{phase.end}",
            f"learning in imagination{phase.title}",
            (
                *("-m", "scripts.train", *self.imports, "--"),
                f"experiment=vla_grpo_recordings{POLICIES.get(self.options.policy, '')}",
                *(f"job.name={phase.learnt.name}", self.seed_of_run),
                f"model.config.env.imagination.dit_path={phase.world_model}",
                *(f"model.config.env.starts.path={phase.starts}", f"model.config.env.starts.size=[{height},{width}]"),
                f"model.config.env.reward.path={phase.reward / REWARD}",
                *_policy(self.options.policy, phase.policy, self.recorded.action_dim),
                f"model.config.card={phase.card}",
                *(f"{WATCH}.data={phase.data}", f"{WATCH}.split={phase.split}"),
                *(f"{WATCH}.camera={name}" for name in self.camera[1:]),
                *(("model.config.allow_unchecked=true",) if self.options.allow_unchecked else ()),
            ),
            reads=(
                *(phase.world_model / "checkpoints", phase.starts, phase.reward, phase.policy, phase.card),
                *(phase.data, phase.split, *self.modules),
            ),
            makes=(phase.learnt,),
            guess_s=250 * self.area,
        )

    def export(self, phase: Phase) -> Step:
        words = ("-m", "scripts.convert", *self.imports, str(phase.learnt), str(phase.result))
        reads = (phase.learnt / "checkpoints", *self.modules)
        return Step(f"export{phase.end}", f"policy as a folder{phase.title}", words, reads, (phase.result,), guess_s=10)

    def after(self, phase: Phase) -> Step:
        return self.truth(f"after{phase.end}", f"truth after{phase.title}", phase, phase.result)

    def truth(self, name: str, title: str, phase: Phase, policy: Path) -> Step:
        """A policy on the held-out starts, and the same actions imagined."""
        first = FIRST_HELD_OUT if self.options.suite.startswith(GYM) else 0  # others may have 50 starts in all
        return Step(
            name,
            title,
            (
                *("-m", "scripts.evaluate_policy", *self.imports, *self.suite, *self.image_size, *self.seed),
                *("--policy", str(policy), "--first", str(first), "--episodes", str(self.options.episodes)),
                *("--draws", "1", "--world_model", str(phase.world_model), "--reward", str(phase.reward / REWARD)),
                *("--videos", "4", "--out", str(self.out / name)),
            ),
            reads=(policy, phase.world_model / "checkpoints", phase.reward, *self.modules),
            makes=(self.out / name,),
            guess_s=self.options.episodes * 0.5,
        )

    def collect(self, phase: Phase) -> Step:
        """Episodes of the policy of the phase before, behind all recordings until then."""
        before = phases_of(self.options)[phase.number - 2].data
        return Step(
            f"collect{phase.end}",
            f"episodes of the policy{phase.title}",
            (
                *("-m", "scripts.collect", *self.imports, *self.suite, *self.image_size, *self.seed),
                *("--policy", str(phase.policy), "--episodes", str(COLLECTED), "--base", str(before)),
                *("--first", str(FIRST_COLLECTED * (phase.number - 1)), "--fps", f"{self.recorded.fps:g}"),
                *("--camera", self.recorded.camera, "--out", str(phase.data)),
            ),
            reads=(phase.policy, before, *self.modules),
            makes=(phase.data,),
            guess_s=COLLECTED * 0.5,
        )


def _policy(name: str, clone: Path, action_dim: int) -> tuple[str, ...]:
    """The override by which an experiment begins with a clone."""
    if name in POLICIES:
        return (f"model.config.policy.path={clone}",)
    target = path_of(resolve(name, "policy")).replace(":", ".")
    return (f"model.config.policy={{_target_:{target},path:{clone},action_dim:{action_dim}}}",)


def _file_of(name: str) -> Path | None:
    """The file of a module that a name has before its colon (gym:MODULE:ID, MODULE:CLASS); None of what ships."""
    module = name.removeprefix("gym:").partition(":")[0].partition("?")[0]
    if not module.isidentifier():
        return None
    spec = importlib.util.find_spec(module)
    origin = None if spec is None else spec.origin
    return None if origin is None or "site-packages" in origin else Path(origin)
