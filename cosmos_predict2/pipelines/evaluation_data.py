# SPDX-License-Identifier: Apache-2.0
"""Held-out data to measure a model on: recordings of the toy world, of a folder, or those of its own run.

    recordings = read_recordings("toy", transform, num=64, num_actions=24)
    recordings = read_recordings("datasets/bridge", transform, num=64, num_actions=24, size=(480, 640))

What a run's config.yaml names is built only where the class is one of those known here.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.actions.statistics import dataset_statistics, other_range, recorded_columns
from cosmos_predict2.actions.transforms import ActionTransform, controller
from cosmos_predict2.conditioner import STATE_KEY
from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.action_conditioned.dataset_libero import LiberoDataset
from cosmos_predict2.data.clip_dataset import TRANSFORM_KEY, ClipDataset
from cosmos_predict2.data.dataset_forms import ANNOTATIONS, SPLITS, TOY_STATES
from cosmos_predict2.data.samples import evenly
from cosmos_predict2.data.toy.videos import SPLITS as TOY_SPLITS
from cosmos_predict2.data.toy.videos import ToyWorldStates
from cosmos_predict2.pipelines.recorded_run import HELD_OUT, described_dataset, own_arguments
from cosmos_predict2.tokenizers.sizes import TOY_RESOLUTION, size_of
from cosmos_predict2.toy_world.episodes import Episodes, make_episodes
from cosmos_predict2.toy_world.physics import SETTINGS
from imaginaire.buildable import recorded, shipped, signature
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError, DataError, near

log = logging.getLogger(__name__)

TOY = "toy"
OF_EXPERIMENT = "The run's dataloader_val is the toy world"
OTHER = "Give --data with recordings of such actions (toy: the toy world), or weights that were trained on these."
DATASETS = shipped(
    "dataset", {cls.__name__: cls for cls in (ActionConditionedDataset, LeRobotActionDataset, LiberoDataset)}
)
TOY_CLASSES = "cosmos_predict2.data.toy"  # in the module of this name in runs of older versions, below it now
LIBERO = f"{LiberoDataset.__module__}.{LiberoDataset.__name__}"
TOY_DIM = 4  # numbers of an action of the toy world, unless a model was trained with more
ROWS_FOR_RANGES = 100_000  # of a data set's actions, that give their ranges
LEAST_RECORDINGS = 4  # in fewer, a number may hardly move by chance
NUM_FOR_PROBE = 64  # training episodes of the toy world


@dataclass(frozen=True)
class EvaluationClips:
    """Clips of 1 + L frames and the L actions between them, as the model sees those."""

    name: str
    video_B_C_F_H_W: Tensor  # uint8
    action_B_L_D: Tensor
    # True clips apart from these, for what is fitted; None: there are none but these.
    others: tuple[Tensor, Tensor] | None = None
    episodes: Episodes | None = None  # of the toy world: the simulator's record of them
    origins: tuple[str, ...] = ()  # of each clip the recording that it is a part of; empty: each of its own
    num_apart: int | None = None  # clips that there are without any that overlap; None: as many as wanted
    cautions: tuple[str, ...] = ()  # what makes figures of them doubtful
    state_B_F_S: Tensor | None = None  # of the robot, where the data set reads it

    def __len__(self) -> int:
        return len(self.video_B_C_F_H_W)

    @property
    def first_B_C_1_H_W(self) -> Tensor:
        return self.video_B_C_F_H_W[:, :, :1]

    @property
    def num_actions(self) -> int:
        return self.action_B_L_D.shape[1]

    @property
    def where_more_are(self) -> str:
        """Advice on how to get more clips than these, for messages."""
        if self.num_apart is None or len(self) < self.num_apart:
            return f"raise --num_clips above {len(self)}"
        return f"give --data with more recordings: of these, {self.num_apart} clips do not overlap"

    def halves(self) -> tuple[list[int], list[int]]:
        """The clips of every second recording, and those of the others: no recording is in both."""
        origins = self.origins or tuple(map(str, range(len(self))))
        first = set(list(dict.fromkeys(origins))[::2])
        rows = range(len(self))
        return [i for i in rows if origins[i] in first], [i for i in rows if origins[i] not in first]


def read_recordings(
    source: str,
    transform: ActionTransform,
    *,
    num: int,
    num_actions: int,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    trained: Mapping[str, Any] | None = None,
    split_file: str = "",
) -> EvaluationClips:
    """Recordings of ``toy`` (``toy:hard``: another setting) or of a folder, evenly spread over what it holds.

    ``size`` is (height, width) of the frames. A folder is read like ``trained``, the data set of the model's run as
    plain data, where that is of the same class: stride, keys, camera. ``split_file`` takes the part test of a split.
    """
    name, _, setting = source.partition(":")
    if name == TOY and not Path(source).exists():
        if split_file:
            raise ConfigError(f"--split {split_file} is of recordings: --data {source} has its own held-out episodes.")
        return toy_recordings(setting or "default", transform, num=num, num_actions=num_actions, seed=seed)
    dataset = _dataset_of_folder(Path(source), transform, num_actions + 1, size, trained or {}, split_file)
    return of_dataset(source, dataset, transform, num)


def recordings_of_run(
    node: Mapping[str, Any], transform: ActionTransform, *, num: int, num_actions: int, seed: int = 0
) -> EvaluationClips:
    """Held-out recordings of a run's ``dataloader_val.dataset``, as plain data; in the toy world ``seed`` is added to
    the run's."""
    target = str(node.get("_target_"))
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    is_toy = target.startswith(TOY_CLASSES)
    if is_toy and target.endswith(".ToyWorldStates"):
        folder = str(arguments["folder"])
        return of_dataset(folder, ToyWorldStates(folder, num_frames=num_actions + 1, start=0), transform, num)
    if is_toy:
        world = {"mix": "expert", "setting": "default", **arguments, **(arguments.get("world") or {})}
        own: dict[str, Any] = {key: world.get(key) for key in ("size", "mix", "ring_elsewhere", "num_steps")}
        tasks, seed = tuple(world.get("tasks") or ("push_puck",)), int(world.get("seed") or 0) + seed
        own |= dict(seed=seed, tasks=tasks, chosen_by=OF_EXPERIMENT)
        return toy_recordings(world["setting"], transform, num=num, num_actions=num_actions, **own)
    if (cls := recorded(target, "dataset")) is None:
        known = ", ".join(DATASETS)
        raise ConfigError(f"The run's validation data are a {target}, not built here ({known} are): give --data.")
    arguments.pop("num_action_per_chunk", None)
    arguments |= {"num_frames": num_actions + 1} if "num_frames" in signature(cls) else {}
    declared = facts_of({**arguments, "_target_": cls}).transform
    is_open = declared is None or (declared.proposed and declared.yields_to(transform))
    if is_open and "action_transform" in signature(cls):
        arguments["action_transform"] = transform  # in place of what they would propose
    return of_dataset(described_dataset(node), cls(**arguments), transform, num)


def size_of_world(node: Mapping[str, Any], resolution: str) -> tuple[int, int] | None:
    """(height, width) of the frames of a run on the toy world, by its data set as plain data, or of a tiny model where
    nothing else gives it; else None."""
    if str(node.get("_target_")).startswith(TOY_CLASSES):
        world = {**node, **(node.get("world") or {})}
        side = world.get("size") or SETTINGS[world.get("setting", "default")].size
        return int(side), int(side)
    return size_of(resolution, "1:1") if resolution == TOY_RESOLUTION else None


def toy_recordings(
    setting: str,
    transform: ActionTransform,
    *,
    num: int,
    num_actions: int,
    seed: int = 0,
    num_steps: int | None = None,
    chosen_by: str = f"--data {TOY}",
    **world: Any,
) -> EvaluationClips:
    """Held-out episodes from their first step on. ``chosen_by`` names what chose the toy world, for messages; ``world``
    are further arguments of `make_episodes`."""
    world = {"ring_elsewhere": 0.0, **world}
    if setting not in SETTINGS:
        raise ConfigError(f"--data {TOY}:{setting}: the toy world has no such setting.{near(setting, SETTINGS)}")
    dim = transform.dim if transform.kind == "controller" else TOY_DIM
    if transform != (own := controller(dim, scale=1.0)):
        raise DataError(f"{chosen_by}: its actions are {own}, but the model was trained with {transform}. {OTHER}")

    def made(split: str, count: int) -> tuple[Episodes, Tensor, Tensor]:
        episodes = make_episodes(
            count,
            seed,
            setting=setting,
            action_dim=transform.dim,
            length=max(num_actions, num_steps or SETTINGS[setting].num_steps),
            first=TOY_SPLITS[split],
            **world,
        )
        frames = numpy.stack([episodes.render(i, 0, num_actions + 1) for i in range(count)])
        actions = torch.from_numpy(transform.apply(episodes.actions[:, :num_actions])).float()
        return episodes, torch.from_numpy(frames).permute(0, 4, 1, 2, 3).contiguous(), actions

    try:
        episodes, video, actions = made("val", num)
        _, others, their_actions = made("train", NUM_FOR_PROBE)
    except ValueError as error:
        raise ConfigError(f"{chosen_by}: {error} Give --data FOLDER with recordings of such actions.") from error
    return EvaluationClips(f"the toy world ({setting})", video, actions, (others, their_actions), episodes)


def of_dataset(name: str, dataset: Any, transform: ActionTransform, num: int) -> EvaluationClips:
    """Items of a data set of clips with actions, evenly spread over its recordings."""
    windows = dataset.windows if isinstance(dataset, ClipDataset) else None
    chosen = evenly(len(dataset), num) if windows is None else windows.spread(num)
    items = [dataset[i] for i in chosen]
    for item in items:
        text = item.get(TRANSFORM_KEY)
        if text is not None and (own := ActionTransform.from_json(text)) != transform:
            raise DataError(f"The actions of {name} are {own}, but the model was trained with {transform}. {OTHER}")
    if items[0]["action"].shape[1] != transform.dim:
        raise DataError(
            f"The actions of {name} have {items[0]['action'].shape[1]} numbers, but the model takes {transform.dim}."
            f" {OTHER}"
        )
    require_same_actions(name, dataset, transform)
    doubt = warn_of_other_range(name, dataset, transform, [item["action"] for item in items])
    size = "x".join(str(side) for side in items[0]["video"].shape[-2:])
    log.info("data: %s, %d of %d clips, %s (height x width)", name, len(items), len(dataset), size)
    num_apart = len(dataset)
    if windows is not None:
        num_apart, used = windows.num_apart, len({windows[i][0] for i in chosen})
        total = len(dataset.source) if isinstance(dataset, LeRobotActionDataset) else 0
        held_out = f" held out of {total}" if total > windows.num_recordings else ""
        overlap = "; some clips overlap" if len(chosen) > num_apart else ""
        name = f"{name}, from {used} of {windows.num_recordings} recordings{held_out}{overlap}"
    origins = tuple(str(item.get("__key__", i)) for i, item in zip(chosen, items))
    alone = f"all clips are of one recording, {origins[0]}, whose actions may be alike"
    is_alone = len(items) > 1 and len(set(origins)) == 1
    return EvaluationClips(
        name,
        torch.stack([item["video"] for item in items]),
        torch.stack([item["action"] for item in items]),
        origins=origins,
        num_apart=num_apart,
        cautions=tuple(text for text in (doubt, alone if is_alone else "") if text),
        state_B_F_S=torch.stack([item[STATE_KEY] for item in items]) if STATE_KEY in items[0] else None,
    )


def require_same_actions(name: str, dataset: Any, transform: ActionTransform) -> None:
    """Raise for recordings whose actions have another order or rate than those that the weights were trained with."""
    if isinstance(dataset, ClipDataset) and dataset.action_transform is not None:
        cure = "give recordings of such actions, or weights that were trained on these."
        transform.contract.require(dataset.action_transform.contract, "The model", f"{name} has", cure)


def warn_of_other_range(name: str, dataset: Any, transform: ActionTransform, shown: Sequence[Tensor] = ()) -> str:
    """A warning, also logged, of raw actions in other ranges than the weights' own; empty where there is none.

    The ranges are those of the whole data set where it has statistics, else of the actions ``shown``, as the model sees
    them.
    """
    if recorded_columns(transform) is None:
        return ""
    if isinstance(dataset, LeRobotActionDataset):
        try:
            found = dataset.action_statistics(skip_bad=True, most_rows=ROWS_FOR_RANGES)
        except DataError:  # none of the recordings that were chosen for it is here
            return ""
    else:
        found = dataset_statistics(transform.undo(action.numpy()) for action in shown)
    is_whole = isinstance(dataset, LeRobotActionDataset) and found.num_trajectories >= LEAST_RECORDINGS
    if (problem := other_range(found.action, transform, is_whole=is_whole)) is None:
        return ""
    warning = f"{name}: {problem}. What the model imagines of them shows little about the model."
    log.warning("%s", warning)
    return warning


def _dataset_of_folder(
    folder: Path,
    transform: ActionTransform,
    num_frames: int,
    size: tuple[int, int] | None,
    trained: Mapping[str, Any],
    split_file: str,
) -> Any:
    """The data set of clips with actions that lies in a folder: its held-out split where it has one."""
    if not folder.is_dir():
        raise ConfigError(f"--data {folder}: there is no such folder. Give one, or {TOY}, or {TOY}:hard.")
    shape: dict[str, Any] = {} if size is None else {"video_size": list(size)}
    if (folder / "meta" / "info.json").is_file():
        own = own_arguments(LeRobotActionDataset, trained, shape)
        held_out: dict[str, Any] = dict(data_split="test", split_file=split_file) if split_file else {}
        return LeRobotActionDataset(
            str(folder), num_frames=num_frames, action_transform=transform, **{"data_split": "val", **held_out, **own}
        )
    if split_file:
        raise ConfigError(f"--split {split_file} is of a LeRobot data set, but {folder} has no meta/info.json.")
    for part in (folder, *(folder / name for name in SPLITS)):
        if any(part.glob(TOY_STATES)) and part.name != "train":
            return ToyWorldStates(str(part), num_frames=num_frames, start=0)
    annotations = next((folder / name for name in ANNOTATIONS if (folder / name).is_dir()), None)
    if annotations is None and trained.get("_target_") == LIBERO:
        own = own_arguments(LiberoDataset, trained, shape)
        return LiberoDataset(str(folder), num_frames=num_frames, mode="val", action_transform=transform, **own)
    if annotations is None:
        raise DataError(
            f"--data {folder} is no folder of clips with actions: neither meta/info.json (LeRobot) nor"
            f" {ANNOTATIONS[0]}/ (Bridge's layout) nor val/{TOY_STATES} lies in it."
        )
    if transform.kind != "relative_pose":
        raise DataError(f"--data {folder} has pose differences, but the model was trained with {transform}. {OTHER}")
    split = next((name for name in HELD_OUT if (annotations / name).is_dir()), None)
    place = annotations / split if split is not None else annotations
    if split is None:
        log.warning("%s has no %s: what is measured on may have been trained on", annotations, " or ".join(HELD_OUT))
    return ActionConditionedDataset(
        val_annotation_path=str(place),
        video_path=str(folder),
        mode="val",
        num_frames=num_frames,
        accumulate_action=transform.accumulate,
        quaternion=transform.quaternion,
        rot6d=transform.rot6d,
        action_transform=transform,
        **own_arguments(ActionConditionedDataset, trained, shape),
    )
