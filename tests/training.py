# SPDX-License-Identifier: Apache-2.0
"""Runs of the trainer in this process, and what is left of them."""

import copy
import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.layout import KINDS, CheckpointSet, all_sets, write_pointer
from imaginaire.config import Config
from imaginaire.config.compose import compose
from imaginaire.training.trainer import ImaginaireTrainer, launch

CONFIG = "tests/project/config.py"
Edit = Callable[[str, Any], Any]  # (kind, tree as read) -> tree that the run gets


def train(root: Path, overrides: Sequence[str] = (), edit: Edit | None = None, config: str = CONFIG) -> int:
    """Train below ``root``; the exit code. ``edit`` changes what a resumed run reads from its checkpoint."""
    read = CheckpointSet.read

    def edited(self: CheckpointSet, kind: str, *args: Any) -> Any:
        tree = read(self, kind, *args)
        return tree if edit is None else edit(kind, tree)

    environment = {"IMAGINAIRE_OUTPUT_ROOT": str(root), "WANDB_MODE": "disabled"}
    with mock.patch.dict(os.environ, environment), mock.patch.object(CheckpointSet, "read", edited):
        choice = [] if any(item.startswith("experiment=") for item in overrides) else ["experiment=restless"]
        return launch(_composed(config, *choice, *overrides))


@functools.lru_cache(maxsize=4)
def _composed(config: str, *overrides: str) -> Config:
    """Composed once for a run and for the one that goes on with it: it is frozen, and takes as long as iterations."""
    return compose(config, overrides)


def run_dir(root: Path, name: str = "restless") -> Path:
    return root / "tests/engine" / name


def saved(root: Path, name: str = "restless") -> dict[str, Any]:
    """The four trees of the newest checkpoint."""
    found = checkpoint_layout.read_pointer(str(run_dir(root, name) / "checkpoints"))
    assert found is not None
    assert found.faults() == []
    trees = {kind: found.read(kind) for kind in KINDS}
    trees["trainer"].pop("files")
    return trees


def rewind(whole: Path, parts: Path, iteration: int) -> None:
    """Copy a run's folder to ``parts``, as a run leaves it that is killed when this iteration is saved."""
    shutil.copytree(whole, parts)
    for one in all_sets(str(parts / "checkpoints")):
        if one.iteration == iteration:
            write_pointer(one)
        for kind in KINDS if one.iteration > iteration else ():
            one.remove(kind)


def assert_resumes(root: Path, overrides: Sequence[str], saves: int, end: int, name: str, config: str) -> None:
    """A run that goes on from its first save, in ``parts``, ends bit for bit as the one in ``whole`` that did not stop.

    A run that ends, and is given more iterations: tests/imaginaire/training/test_resume.py.
    """
    overrides = [*overrides, f"checkpoint.save_iter={saves}", f"trainer.max_iter={end}"]
    assert train(root / "whole", overrides, config=config) == 0
    rewind(run_dir(root / "whole", name), run_dir(root / "parts", name), saves)
    assert train(root / "parts", overrides, config=config) == 0
    assert difference(saved(root / "whole", name), saved(root / "parts", name)) is None
    assert losses(root / "whole", name) == losses(root / "parts", name)


def records(folder: Path | str) -> list[dict[str, Any]]:
    """The records of metrics.jsonl of the run that lies in this folder or below it."""
    (path,) = Path(folder).rglob("metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(
    root: Path, name: str = "restless", keys: Sequence[str] = ("train/loss", "val/loss")
) -> list[tuple[int, float]]:
    """(iteration, value) of every logged training and validation loss."""
    return [(r["iteration"], r[key]) for r in records(run_dir(root, name)) for key in keys if key in r]


def difference(a: Any, b: Any, place: str = "") -> str | None:
    """The first place where two trees differ, bit by bit; None when they are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or not torch.equal(a, b):
            return f"{place}: tensors differ"
        return None
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{place}: keys {sorted(set(map(str, a)) ^ set(map(str, b)))}"
        return next((d for key in a if (d := difference(a[key], b[key], f"{place}/{key}"))), None)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return f"{place}: lengths {len(a)} and {len(b)}"
        return next(
            (d for i, (x, y) in enumerate(zip(a, b, strict=True)) if (d := difference(x, y, f"{place}/{i}"))), None
        )
    return None if a == b else f"{place}: {a!r} and {b!r}"


@contextmanager
def states() -> Iterator[list[dict[str, Any]]]:
    """Weights and moments after each iteration of the runs inside."""
    found: list[dict[str, Any]] = []
    step = ImaginaireTrainer._optimizer_step

    def noted(self: ImaginaireTrainer, model: Any, loss: Tensor) -> None:
        step(self, model, loss)
        state = {"weights": dict(model.net.named_parameters()), "moments": self.optimizer.state_dict()["state"]}
        found.append(copy.deepcopy({**state, "rate": self.optimizer.param_groups[0]["lr"]}))

    with mock.patch.object(ImaginaireTrainer, "_optimizer_step", noted):
        yield found


def steps(found: list[dict[str, Any]]) -> list[bool]:
    """For each iteration but the first: True where it changed weights, and moments alike."""
    pairs = list(itertools.pairwise(found))
    of_each = [
        [difference(before[name], after[name]) is not None for before, after in pairs]
        for name in ("weights", "moments")
    ]
    assert of_each[0] == of_each[1]
    return of_each[0]
