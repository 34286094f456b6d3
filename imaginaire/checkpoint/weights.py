# SPDX-License-Identifier: Apache-2.0
"""Reading weights from wherever they are, and loading them with an account of every name.

    source = weights.select(weights.read("model.pt"), "net")
    weights.load_into(model.state_dict(), source).require(source="model.pt")

Sources are mappings from names to tensors that stay on disk until they are copied; a sharded target takes its own
piece. Nothing is skipped in silence: what did not match is in the report, and ``require`` makes it an error.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from imaginaire.checkpoint.layout import CheckpointSet, require_unchanged, set_of_weights
from imaginaire.checkpoint.weight_files import LazyTensors, latest, open_address, shape_of
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import copy_shard, is_dtensor
from imaginaire.errors import CheckpointError, ConfigError, listed, near

log = logging.getLogger(__name__)

# What files hold besides weights: Transformer Engine's state, training statistics, buffers that are functions of the
# config, and the records of a run about its data, its pipeline and its adapters.
EXTRAS = (
    *("*_extra_state", "*accum_video_sample_counter", "*accum_image_sample_counter", "*accum_iteration"),
    *("*accum_train_in_hours", "model_card", "action_transform", "action_pipeline", "lora_alpha"),
    *("*pos_embedder*.seq", "*pos_embedder*.dim_spatial_range", "*pos_embedder*.dim_temporal_range"),
)
NAMES = 5  # shown for each kind of difference
CURE = (
    "Set the model up as the run that wrote the weights had it (its config.yaml), or give this run its own folder with"
    " another job.name. To leave out what does not fit: checkpoint.strict_resume=False, or for other shapes alone"
    " checkpoint.dcp_allow_mismatched_size=True."
)


@dataclass(frozen=True)
class LoadReport:
    """The names that matched and those that did not."""

    matched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # in the model, not in the source
    unexpected: tuple[str, ...] = ()  # in the source, not in the model
    wrong_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)  # (source, model)
    not_finite: tuple[str, ...] = ()  # in the model now, with a NaN or an infinite number

    def summary(self) -> str:
        counts = {kind: len(getattr(self, kind)) for kind in ("matched", "missing", "unexpected", "wrong_shape")}
        shown = (f"{count} {kind}" for kind, count in counts.items() if count or kind == "matched")
        return ", ".join(shown).replace("_", " ")

    def require(
        self,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        allow_wrong_shape: bool = False,
        source: str = "the weights",
        cure: str = CURE,
    ) -> None:
        """Raise unless every difference is allowed: by patterns such as ``net.action_embedder.*``, by name.

        Numbers that are not finite never are: a network with one gives NaN for everything.
        """
        refuse_not_finite(self.not_finite, source)
        is_other_file = not self.matched and bool(self.missing or self.wrong_shape)  # of which nothing fits
        missing = self.missing if is_other_file else _not_allowed(self.missing, allow_missing)
        unexpected = _not_allowed(self.unexpected, allow_unexpected)
        wrong = {} if allow_wrong_shape and not is_other_file else self.wrong_shape
        if not (missing or unexpected or wrong):
            return
        sections = {
            "in the model, missing in the file": missing,
            "in the file, unknown to the model": unexpected,
            "of another shape": [
                f"{name}: file {list(found)}, model {list(own)}" for name, (found, own) in wrong.items()
            ],
        }
        lines = [f"{source} does not fit the model ({self.summary()})."]
        for title, names in sections.items():
            if names:
                lines.append(f"{len(names)} {title}:")
                lines += [f"  {name}" for name in names[:NAMES]]
                lines += [f"  ... and {len(names) - NAMES} more"] if len(names) > NAMES else []
        raise CheckpointError("\n".join([*lines, cure]))


def read(path_or_id: str) -> Mapping[str, Tensor]:
    """Tensors by name from a ``.pt``, safetensors, DCP or run folder, a hub id, local or remote; lazy, memory-mapped.

    Of a training checkpoint the first tensor is given once its bytes are those that were saved, as for a resumed run.
    """
    address = latest(str(path_or_id))
    source = open_address(address)
    if (saved := set_of_weights(address)) is not None:
        checked = _Checked(source, saved)
        source = LazyTensors({name: (checked, name) for name in source})
    return source


class _Checked:
    """``source[name]`` of a training checkpoint; records and shapes are read without a look at the rest."""

    def __init__(self, source: Mapping[str, Tensor], saved: CheckpointSet) -> None:
        self._source, self._saved, self._is_checked = source, saved, False

    def __getitem__(self, name: str) -> Tensor:
        if not self._is_checked and not is_extra(name):
            require_unchanged(self._saved, ["model"])
            self._is_checked = True
        return self._source[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return shape_of(self._source, name)


def renamed(source: Mapping[str, Tensor], rename: Callable[[str], str | None]) -> Mapping[str, Tensor]:
    """The entries under their new names; those renamed to None are left out. Still lazy."""
    return LazyTensors({new: (source, name) for new, name in new_names(source, rename).items()})


def new_names(names: Iterable[str], rename: Callable[[str], str | None]) -> dict[str, str]:
    """The old name of each new one."""
    old: dict[str, str] = {}
    for name in names:
        new = rename(name)
        if new is None:
            continue
        if new in old:
            raise CheckpointError(f"'{old[new]}' and '{name}' would both be loaded as '{new}'.")
        old[new] = name
    return old


WHICH = ("net", "net_ema", "auto")
COPIES = ("net_ref.", "net_old.")  # that a run keeps beside the network to compare with: never what one asks for


def select(source: Mapping[str, Tensor], which: str = "auto") -> Mapping[str, Tensor]:
    """One network of a file that may hold two, named without ``net.`` or ``net_ema.``; extras and copies are left out.

    ``auto`` is ``net``, or ``net_ema`` where that is all there is. Names with neither prefix are kept as they are, so a
    bare file passes through as ``net``.
    """
    if which not in WHICH:
        raise ConfigError(f"There are no weights '{which}' of a network.{near(which, WHICH)}")
    counts = {kind: sum(name.startswith(f"{kind}.") for name in source) for kind in ("net", "net_ema")}
    bare = any(not name.startswith(("net.", "net_ema.", *COPIES)) and not is_extra(name) for name in source)
    if which == "auto":
        which = "net" if counts["net"] or bare or not counts["net_ema"] else "net_ema"
        if counts["net_ema"]:  # else there is nothing to choose
            held = " and ".join(kind for kind in counts if counts[kind])
            log.info("weights: %s; the file holds %s (asked: auto)", which, held)
    other = "net" if which == "net_ema" else "net_ema"
    if not counts[which] and ((counts[other] and not bare) or which == "net_ema"):
        raise CheckpointError(
            f"These weights have no names that begin with '{which}.'; {counts[other]} begin with '{other}.'. "
            f"Ask for '{other}' ({'leave --load_ema out' if which == 'net_ema' else '--load_ema'})."
        )

    def rename(name: str) -> str | None:
        is_other = name.startswith((f"{other}.", *COPIES)) or is_extra(name)
        return None if is_other else name.removeprefix(f"{which}.")

    return renamed(source, rename)


def refuse_not_finite(names: tuple[str, ...], source: str) -> None:
    if names:
        raise CheckpointError(
            f"{source}: {len(names)} tensors hold NaN or infinite numbers ({listed(names, NAMES)}): the file is"
            " damaged, or was saved after its training diverged. Take an intact copy, or an earlier checkpoint."
        )


def is_extra(name: str) -> bool:
    """True for what released files hold besides weights."""
    return any(fnmatchcase(name, pattern) for pattern in EXTRAS)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits of all values by name, rounded to bfloat16: the same in float32 and in bfloat16, on any
    device and from any form of file."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach()
        value = value.to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
        found.update(f"{name} {list(value.shape)}".encode())
        found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def account(targets: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> LoadReport:
    """The report that ``load_into`` would give, without copying."""
    return load_into(targets, source, copies=False)


def load_into(targets: Mapping[str, Tensor], source: Mapping[str, Tensor], *, copies: bool = True) -> LoadReport:
    """Copy each tensor of ``source`` into the target of its name, in place, and report what matched.

    A target of another dtype is cast to; a DTensor takes its local shard; targets that the source does not name are
    left alone. Released extras that the model does not have are not counted as unexpected.
    """
    matched, unexpected, wrong = [], [], {}
    for name in source:
        if name not in targets:
            if not is_extra(name):
                unexpected.append(name)
            continue
        target = targets[name]
        if (found := shape_of(source, name)) != tuple(target.shape):
            wrong[name] = found, tuple(target.shape)
            continue
        if copies:
            _copy(name, target, source[name])
        matched.append(name)
    missing = [name for name in targets if name not in source]
    bad = parallel.not_finite({name: targets[name] for name in matched}) if copies else ()
    return LoadReport(tuple(matched), tuple(missing), tuple(unexpected), wrong, bad)


@torch.no_grad()
def _copy(name: str, target: Tensor, source: Tensor) -> None:
    if target.is_meta:
        raise CheckpointError(f"'{name}' is on the meta device: give the model memory (to_empty) before loading.")
    if source.is_floating_point() and not target.is_floating_point():
        raise CheckpointError(f"'{name}' is {source.dtype} in the file and {target.dtype} in the model.")
    if target.is_floating_point() and not source.is_floating_point():
        raise CheckpointError(
            f"'{name}' is {source.dtype} in the file, which is quantised, and {target.dtype} in the model. Give the"
            " weights in bfloat16 or float32."
        )
    if is_dtensor(target) and any(placement.is_partial() for placement in target.placements):
        raise CheckpointError(f"'{name}' is a partial sum ({target.placements}); it cannot take weights.")
    copy_shard(target, source)


def _not_allowed(names: tuple[str, ...], patterns: Iterable[str]) -> tuple[str, ...]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    return tuple(name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns))
