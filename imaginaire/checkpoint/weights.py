# SPDX-License-Identifier: Apache-2.0
"""Reading weights from wherever they are, and loading them with an account of every name.

    source = weights.select(weights.read("model.pt"), "net")
    weights.load_into(model.state_dict(), source).require(source="model.pt")

Sources are mappings from names to tensors that stay on disk until they are copied; a sharded target takes its own
piece. Nothing is skipped in silence: what did not match is in the report, and ``require`` makes it an error.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from imaginaire.checkpoint.weight_files import LazyTensors, load_pt, open_address, shape_of
from imaginaire.distributed.parallel import local_part
from imaginaire.errors import CheckpointError

__all__ = ["load_pt"]  # used as weights.load_pt by other packages

log = logging.getLogger(__name__)

# What files hold besides weights: Transformer Engine's state, training statistics, buffers that are functions of the
# config, and the records of a run about its data, its pipeline and its adapters.
EXTRAS = (
    "*_extra_state",
    "*accum_video_sample_counter",
    "*accum_image_sample_counter",
    "*accum_iteration",
    "*accum_train_in_hours",
    "model_card",
    "action_transform",
    "action_pipeline",
    "lora_alpha",
    "*pos_embedder.seq",
    "*pos_embedder.dim_spatial_range",
    "*pos_embedder.dim_temporal_range",
)
LINES = {1: 10, 2: 7, 3: 5}  # names shown for each kind of difference, by how many kinds there are


@dataclass(frozen=True)
class LoadReport:
    """Which names matched. ``shapes`` has (found, expected) for each name of ``wrong_shape``."""

    matched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # in the model, not in the source
    unexpected: tuple[str, ...] = ()  # in the source, not in the model
    wrong_shape: tuple[str, ...] = ()
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()  # (source, model) for each of wrong_shape

    def summary(self) -> str:
        kinds = [("missing", self.missing), ("unexpected", self.unexpected), ("wrong shape", self.wrong_shape)]
        return ", ".join([f"{len(self.matched)} matched", *(f"{len(names)} {kind}" for kind, names in kinds if names)])

    def require(
        self,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        allow_wrong_shape: bool = False,
        source: str = "the weights",
    ) -> None:
        """Raise unless every difference is allowed: by patterns such as ``net.action_embedder.*``, by name."""
        missing = _not_allowed(self.missing, allow_missing)
        unexpected = _not_allowed(self.unexpected, allow_unexpected)
        wrong = () if allow_wrong_shape else self.wrong_shape
        nothing = not self.matched and bool(self.missing or self.wrong_shape)
        if not (missing or unexpected or wrong or nothing):
            return
        sections = []
        if missing or (nothing and self.missing):
            sections.append(("in the model, missing in the file", list(missing or self.missing)))
        if unexpected:
            sections.append(("in the file, unknown to the model", list(unexpected)))
        if wrong or (nothing and self.wrong_shape):
            details = dict(zip(self.wrong_shape, self.shapes))
            sections.append(
                ("of another shape", [_with_shapes(name, details.get(name)) for name in wrong or self.wrong_shape])
            )
        lines = [f"{source} does not fit the model ({self.summary()})."]
        limit = LINES[len(sections)]
        for title, names in sections:
            lines.append(f"{len(names)} {title}:")
            lines += [f"  {name}" for name in names[:limit]]
            if len(names) > limit:
                lines.append(f"  ... and {len(names) - limit} more")
        lines += self._hints()
        raise CheckpointError("\n".join(lines))

    def _hints(self) -> list[str]:
        hints = []
        different = [*self.missing, *self.unexpected]
        adapters = [name for name in different if ".lora_A." in name or ".lora_B." in name or ".base_layer." in name]
        if adapters:
            side = (
                "the model has LoRA adapters and the file has none"
                if adapters[0] in self.missing
                else ("the file has LoRA adapters and the model has none")
            )
            hints.append(
                f"LoRA mismatch: {side}. Run with the adapters as they were (model.config.train_architecture, where "
                "the model has it), or give this run its own folder with another job.name."
            )
        elif self.missing and all(name.startswith("net_ema.") for name in self.missing):
            hints.append(
                "The file was written without an average of the weights (EMA). Switch the average off "
                "(model.config.pipe_config.ema.enabled=False, where the model has it), or start another run from it: "
                "another job.name, and checkpoint.load_path."
            )
        elif self.unexpected and all(name.startswith("net_ema.") for name in self.unexpected):
            hints.append(
                "The file holds an average of the weights (EMA) and the model keeps none. Switch it on "
                "(model.config.pipe_config.ema.enabled=True, where the model has it), "
                "or allow it: checkpoint.allow_unexpected=['net_ema.*']."
            )
        elif self.missing and self.unexpected and (prefix := _constant_prefix(self.missing, self.unexpected)):
            hints.append(prefix)
        layers = _layers(different)
        is_depth = layers and not hints and layers.isdisjoint({"", *_layers(self.matched)})
        if is_depth or len(self.wrong_shape) > 3:
            hints.append(
                "These weights are of another model, or of another size of it (width or depth), which this one cannot "
                "take over. Set the sizes of the run that wrote them, as in its config.yaml, or begin anew under "
                "another job.name."
            )
        elif self.wrong_shape and not hints:
            hints.append(
                "Give another model its own folder with job.name. To leave out what does not fit: "
                "checkpoint.strict_resume=False, or checkpoint.dcp_allow_mismatched_size=True for other shapes alone."
            )
        return hints


def _layers(names: Iterable[str]) -> set[str]:
    """The numbered layers that names begin with, such as ``net.blocks.3.``; "" for a name without one."""
    return {found[0] if (found := re.match(r".*?\.\d+\.", name)) else "" for name in names}


def read(path_or_id: str, *, prefix: str | None = None) -> Mapping[str, Tensor]:
    """Tensors by name from a ``.pt``, safetensors, DCP or run folder, a hub id, local or remote; lazy, memory-mapped.

    With ``prefix`` only the names below it are given, without it.
    """
    source = open_address(str(path_or_id))
    if prefix is None:
        return source
    stripped = strip_prefix(source, prefix)
    if not stripped:
        starts = sorted({name.partition(".")[0] for name in source})
        raise CheckpointError(f"{path_or_id} has no names below '{prefix}'. They begin with: {', '.join(starts[:10])}.")
    return stripped


def strip_prefix(source: Mapping[str, Tensor], prefix: str) -> Mapping[str, Tensor]:
    """The entries below ``prefix``, named without it; still lazy."""
    start = prefix if prefix.endswith(".") else f"{prefix}."
    return renamed(source, lambda name: name.removeprefix(start) if name.startswith(start) else None)


def renamed(source: Mapping[str, Tensor], rename: Callable[[str], str | None]) -> Mapping[str, Tensor]:
    """The entries under their new names; those renamed to None are left out. Still lazy."""
    old: dict[str, str] = {}
    for name in source:
        new = rename(name)
        if new is None:
            continue
        if new in old:
            raise CheckpointError(f"'{old[new]}' and '{name}' would both be loaded as '{new}'.")
        old[new] = name
    return LazyTensors({new: (source, name) for new, name in old.items()})


def select(source: Mapping[str, Tensor], which: str = "auto") -> Mapping[str, Tensor]:
    """One network of a file that may hold two, named without ``net.`` or ``net_ema.``; extras are left out.

    ``auto`` is ``net``, or ``net_ema`` where that is all there is. Names with neither prefix are kept as they are, so a
    bare file passes through as ``net``.
    """
    assert which in ("net", "net_ema", "auto"), which
    counts = {kind: sum(name.startswith(f"{kind}.") for name in source) for kind in ("net", "net_ema")}
    bare = any(not name.startswith(("net.", "net_ema.")) and not is_extra(name) for name in source)
    if which == "auto":
        which = "net" if counts["net"] or bare or not counts["net_ema"] else "net_ema"
        if counts["net_ema"]:  # else there is nothing to choose
            held = " and ".join(kind for kind in counts if counts[kind])
            log.info("weights: %s; the file holds %s (asked: auto)", which, held)
    other = "net" if which == "net_ema" else "net_ema"
    if not counts[which] and ((counts[other] and not bare) or which == "net_ema"):
        raise CheckpointError(
            f"These weights have no names that begin with '{which}.'; {counts[other]} begin with '{other}.'. "
            + (
                "They hold no averaged copy: leave --load_ema out (in Python: ask for 'net')."
                if which == "net_ema"
                else "Ask for 'net_ema' (--load_ema)."
            )
        )

    def rename(name: str) -> str | None:
        return None if name.startswith(f"{other}.") or is_extra(name) else name.removeprefix(f"{which}.")

    return renamed(source, rename)


def is_extra(name: str) -> bool:
    """True for what released files hold besides weights."""
    return any(fnmatchcase(name, pattern) for pattern in EXTRAS)


def account(
    targets: Mapping[str, Tensor], source: Mapping[str, Tensor], *, rename: Callable[[str], str | None] | None = None
) -> LoadReport:
    """What ``load_into`` would report, without copying."""
    return _walk(targets, renamed(source, rename) if rename else source, copy=None)


def load_into(
    targets: Mapping[str, Tensor], source: Mapping[str, Tensor], *, rename: Callable[[str], str | None] | None = None
) -> LoadReport:
    """Copy each tensor of ``source`` into the target of its name, in place, and report what matched.

    A target of another dtype is cast to; a DTensor takes its local shard; targets that the source does not name are
    left alone. Released extras that the model does not have are not counted as unexpected.
    """
    return _walk(targets, renamed(source, rename) if rename else source, copy=_copy)


def _walk(
    targets: Mapping[str, Tensor],
    source: Mapping[str, Tensor],
    copy: Callable[[str, Tensor, Tensor], None] | None,
) -> LoadReport:
    matched, unexpected, wrong, shapes = [], [], [], []
    for name in source:
        if name not in targets:
            if not is_extra(name):
                unexpected.append(name)
            continue
        target = targets[name]
        if (found := shape_of(source, name)) != tuple(target.shape):
            wrong.append(name)
            shapes.append((found, tuple(target.shape)))
            continue
        if copy is not None:
            copy(name, target, source[name])
        matched.append(name)
    missing = [name for name in targets if name not in source]
    return LoadReport(tuple(matched), tuple(missing), tuple(unexpected), tuple(wrong), tuple(shapes))


@torch.no_grad()
def _copy(name: str, target: Tensor, source: Tensor) -> None:
    if target.is_meta:
        raise CheckpointError(
            f"'{name}' is on the meta device: give the model memory (to_empty) before loading weights."
        )
    if source.is_floating_point() and not target.is_floating_point():
        raise CheckpointError(f"'{name}' is {source.dtype} in the file and {target.dtype} in the model.")
    if isinstance(source, DTensor):
        source = source.full_tensor()
    if not isinstance(target, DTensor):
        target.copy_(source)
        return
    if any(placement.is_partial() for placement in target.placements):
        raise CheckpointError(f"'{name}' is a partial sum ({target.placements}); it cannot take weights.")
    local, part = local_part(target)
    if local.numel():
        local.copy_(source[part])


def _not_allowed(names: tuple[str, ...], patterns: Iterable[str]) -> tuple[str, ...]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    return tuple(name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns))


def _with_shapes(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]] | None) -> str:
    return f"{name}: file {list(shapes[0])}, model {list(shapes[1])}" if shapes else name


def _constant_prefix(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> str | None:
    """A hint if the names agree once one side's first parts are dropped."""
    wanted, there = set(missing), set(unexpected)
    for prefix in sorted({name[: i + 1] for name in unexpected[:1] for i, c in enumerate(name) if c == "."}, key=len):
        if sum(name.removeprefix(prefix) in wanted for name in there if name.startswith(prefix)) > len(there) / 2:
            return f"The file's names begin with '{prefix}', the model's do not: read it with prefix='{prefix}'."
    for prefix in sorted({name[: i + 1] for name in missing[:1] for i, c in enumerate(name) if c == "."}, key=len):
        if sum(name.removeprefix(prefix) in there for name in wanted if name.startswith(prefix)) > len(wanted) / 2:
            return f"The model's names begin with '{prefix}', the file's do not."
    return None
