# SPDX-License-Identifier: Apache-2.0
"""Actions as tokens: the last 256 ids of a vocabulary stand for bins of [-1, 1], and statistics give these a unit.

A larger action has a smaller id. The round trip is not the identity at the top: 1 and the bin below it share a centre.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.statistics import refuse_impossible
from imaginaire.errors import CheckpointError, ConfigError, near

BOUNDS = {"q99": ("q01", "q99"), "minmax": ("min", "max")}
GRIPPERS = ("as_is", "libero")
EPSILON = 1e-8
_TOO_LONG = 1.5  # some checkpoints store the statistics of two chunks side by side
Floats = NDArray[numpy.float64]


@dataclass(frozen=True)
class ActionTokens:
    """``size`` is the vocabulary without its padding."""

    size: int
    bins: int = 256

    @property
    def ids(self) -> slice:
        """Where actions are in the vocabulary."""
        return slice(self.size - self.bins, self.size)

    @property
    def centres(self) -> Tensor:
        edges = torch.from_numpy(numpy.linspace(-1, 1, self.bins))
        return (edges[1:] + edges[:-1]) / 2

    def encode(self, actions: Tensor) -> Tensor:
        """The id of each number, which is clipped to [-1, 1]."""
        edges = numpy.linspace(-1, 1, self.bins)
        found = numpy.digitize(actions.double().clamp(-1, 1).cpu().numpy(), edges)
        return torch.from_numpy(self.size - found)

    def decode(self, ids: Tensor) -> Tensor:
        """float64 in (-1, 1); an id that is no action is the nearest one."""
        centres = self.centres.to(ids.device)
        return centres[(self.size - ids.long() - 1).clamp(0, self.bins - 2)]


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and the entropy, of the logits [..., bins] of actions alone; ``tokens`` counts from
    the first of them."""
    log_probs = F.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, tokens.long()[..., None])[..., 0], entropy


@dataclass(frozen=True)
class Statistics:
    """The range of each dimension; numbers that ``mask`` leaves out have none."""

    low: Floats
    high: Floats
    mask: NDArray[numpy.bool_]

    @classmethod
    def of(cls, values: Mapping[str, Any], bounds: str, dim: int | None = None) -> "Statistics":
        """Of a file's entry, by quantiles ("q99") or extremes ("minmax"), cut to ``dim`` where it is longer."""
        if bounds not in BOUNDS:
            raise ConfigError(f"bounds='{bounds}' of a policy's statistics.{near(bounds, BOUNDS)}")
        low_name, high_name = BOUNDS[bounds]
        missing = [name for name in (low_name, high_name) if name not in values]
        if missing:
            raise CheckpointError(f"The statistics have no {' and '.join(missing)}; they have {', '.join(values)}.")
        refuse_impossible(values, "The policy's statistics", CheckpointError)
        low, high = (numpy.asarray(values[name], dtype=numpy.float64) for name in (low_name, high_name))
        mask = numpy.asarray(values.get("mask", numpy.ones(len(low))), dtype=bool)
        dim = len(low) if dim is None else dim
        if len(low) > _TOO_LONG * dim:
            low, high, mask = low[:dim], high[:dim], mask[:dim]
        if not len(low) == len(high) == len(mask) == dim:
            raise CheckpointError(
                f"The statistics are of {len(low)} numbers, but the policy has {dim}: set policy.action_dim or"
                " policy.unnorm_key."
            )
        return cls(low, high, mask)

    def unnormalized(self, values: Tensor) -> Tensor:
        """From [-1, 1] to the unit of the data, float64."""
        low, high, mask = self._like(values)
        scaled = 0.5 * (values.double() + 1) * (high - low + EPSILON) + low
        return torch.where(mask, scaled, values.double())

    def normalized(self, values: Tensor) -> Tensor:
        """From the unit of the data to [-1, 1], clipped, float64; numbers without a range stay as they are."""
        low, high, mask = self._like(values)
        scaled = (2 * (values.double() - low) / (high - low + EPSILON) - 1).clamp(-1, 1)
        return torch.where(mask, scaled, values.double())

    def is_outside(self, values: Tensor) -> Tensor:
        """Whether `normalized` and tokens clip a number; those without a range reach from -1 to 1."""
        low, high, mask = self._like(values)
        low, high = torch.where(mask, low, -1.0), torch.where(mask, high, 1.0)
        margin = 1e-3 * (high - low) + EPSILON
        return (values.double() < low - margin) | (values.double() > high + margin)

    def _like(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high, mask = (torch.from_numpy(part).to(values.device) for part in (self.low, self.high, self.mask))
        return low, high, mask


def with_gripper(actions: Tensor, gripper: str, index: int = -1) -> Tensor:
    """Actions as the environment takes them: "libero" turns 1 = open into -1 = open; 0.5 exactly becomes 0."""
    if gripper not in GRIPPERS:
        raise ConfigError(f"gripper='{gripper}' of a policy.{near(gripper, GRIPPERS)}")
    if gripper == "as_is":
        return actions
    turned = actions.clone()
    turned[..., index] = -torch.sign(2 * actions[..., index] - 1)
    return turned


def without_gripper(actions: Tensor, gripper: str, index: int = -1) -> Tensor:
    """Actions of an environment as those of the data: what `with_gripper` turns into them again. Of "libero" -1 becomes
    1 = open."""
    if gripper == "as_is":
        return actions
    turned = actions.clone()
    turned[..., index] = (1 - actions[..., index].clamp(-1, 1)) / 2
    return turned


def default_gripper(config: Mapping[str, Any], key: str) -> str:
    """What a folder's last number is, by its config.json, or else by the name of its data: published folders of LIBERO
    say nothing of it, and the last number of another robot is its own."""
    return str(config.get("gripper", "libero" if "libero" in key else "as_is"))


def statistics_for(
    norm_stats: Mapping[str, Any], key: str, source: str, suite: str = "libero_10"
) -> tuple[str, Mapping[str, Any]]:
    """The entry of a data set: ``key``, or without one the only one or that of the suite; and its name."""
    wanted = [key, f"{key}_no_noops"] if key else [f"{suite}_no_noops", suite]
    if not key and len(norm_stats) == 1:
        wanted = list(norm_stats)
    for name in wanted:
        if name in norm_stats:
            return name, norm_stats[name]
    if not norm_stats:
        raise CheckpointError(
            f"{source} has no dataset_statistics.json, and no norm_stats in its config.json: how its actions are scaled"
            " is unknown. Copy the file of the data that the weights were trained on there."
        )
    raise CheckpointError(
        f"{source} has no statistics of '{key or wanted[0]}': set policy.unnorm_key to one of its"
        f" {', '.join(sorted(norm_stats))}."
    )
