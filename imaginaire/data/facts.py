# SPDX-License-Identifier: Apache-2.0
"""Facts about the samples of a data set that are needed before it is built, from its arguments.

A data set that a lazy call of the configuration names may be one that `GivesFacts`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

from imaginaire.buildable import arguments_of, signature, target_of
from imaginaire.errors import UserError

Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """The facts of a data set with certain arguments; None where they are unknown."""

    kind: str  # in words; training on one kind and validating on another is a warning
    has_actions: bool | None = None
    transform: Any = None  # of its actions (ActionTransform); None too where it depends on the files
    action_dim: int | None = None
    num_true_frames: int | None = None  # where samples are no true clips: how many of their frames are true
    encoder: str | None = None  # name of the encoder of texts that the data set makes itself
    read_rate: Callable[[], float | None] = lambda: None  # may open a file
    # Lowest and highest value of each number of the robot's state that samples have; reads all of them.
    read_state_range: Callable[[], list[list[float]]] | None = None

    @property
    def rate(self) -> float | None:
        """Frames per second of a sample's frames, whatever its label ``fps`` is."""
        return known(self.read_rate)


@runtime_checkable
class GivesFacts(Protocol):
    """A class of data sets that has facts (``@classmethod``)."""

    def facts(self, arguments: Mapping[str, Any]) -> DataFacts:
        """The facts of a data set with these arguments, from headers and names, never from samples.

        It does not raise: what its arguments or files leave unknown is None, and its ``check`` reports why.
        """


def gives_facts(target: Any) -> TypeGuard[GivesFacts]:
    """``facts`` may also be a member of its own that is no method."""
    return isinstance(target, GivesFacts) and callable(target.facts)


def facts_of(node: Mapping[str, Any]) -> DataFacts:
    """The facts of a lazy node; of a class without ``facts`` its name as kind, and its argument ``fps`` as rate."""
    target = target_of(node)
    arguments = arguments_of(node)
    if gives_facts(target):
        return target.facts(arguments)
    parameters = signature(target)
    fps = arguments.get("fps", parameters["fps"].default if "fps" in parameters else None)
    rate = float(fps) if isinstance(fps, int | float) else None
    return DataFacts(kind=getattr(target, "__name__", str(target)), read_rate=lambda: rate)


def known(read: Callable[[], Fact]) -> Fact | None:
    """The facts that ``read`` finds; None where arguments or files are wrong or missing."""
    try:
        return read()
    except (UserError, TypeError, KeyError):  # the last two: without an argument that it must have
        return None


def with_defaults(target: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, and the default of every other parameter that has one."""
    defaults = {key: one.default for key, one in signature(target).items() if one.default is not one.empty}
    return {**defaults, **arguments}
