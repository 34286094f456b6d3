# SPDX-License-Identifier: Apache-2.0
"""A small convolutional policy for recordings of any robot: pictures -> a chunk of actions, by regression.

Of one robot's recordings, of a small puck, the tiny twins of OpenVLA-OFT and PI0.5 learnt nothing, and this one does.

Letters: E environments or B decisions, V views, S numbers of the robot's state, K knots (each is held for A / K
actions), N numbers of an action.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_predict2.rl.interfaces import Decision, Generators, LogProb, Mode, Observation, PolicyDefaults
from cosmos_predict2.rl.policies.cloning import CloneStart
from cosmos_predict2.rl.policies.files import arguments_of, load_weights
from cosmos_predict2.rl.policies.network import correlated
from imaginaire.errors import ConfigError, near

CHANNELS = (16, 32, 32)  # of convolutions, each of half the side
NOISE = 0.1  # with .2 attempts of one clone (drawer, 2) succeeded .47 less than what it plays, with .1 .22
MOST = 1.0  # an action stays between the 1 % and 99 % quantiles of recorded ones


@dataclass(frozen=True)
class ConvConfig:
    """Sizes of a `ConvPolicy`. ``actions`` and ``state`` are the recordings' quantiles (``q01``, ``q99``), which are -1
    and 1 to the network; ``tasks`` are the recordings' sentences."""

    actions: Mapping[str, Sequence[float]]
    tasks: Sequence[str]
    chunk: int = 12
    num_knots: int = 12
    num_views: int = 1
    state: Mapping[str, Sequence[float]] | None = None
    size: int = 64
    width: int = 128
    noise: float = NOISE
    correlation: float = 0.0

    def __post_init__(self) -> None:
        if self.num_knots < 1 or self.chunk % self.num_knots:
            raise ConfigError(
                f"policy.chunk={self.chunk} is no multiple of policy.num_knots={self.num_knots}: choose another."
            )
        if self.noise <= 0:
            raise ConfigError(
                f"policy.noise={self.noise} must be above 0: it is the standard deviation of what is drawn."
            )


class ConvPolicy(nn.Module, PolicyDefaults):
    """``sizes`` are fields of `ConvConfig`. ``path`` is a clone, or a run that trained one: its sizes, of which these
    replace some, and its weights.

    Attempts are normal around what is played, with the deviation ``noise`` of the recorded range; draws of neighbouring
    actions correlate by ``correlation``.
    """

    cloning: ClassVar[dict[str, Any]] = dict(demonstrations=2000, windows="all", steps=2000, lr=1.5e-3, batch_size=32)

    def __init__(self, path: str = "", **sizes: Any) -> None:
        super().__init__()
        known = [field.name for field in fields(ConvConfig)]
        if wrong := sorted(sizes.keys() - set(known)):
            raise ConfigError(f"policy.{wrong[0]}: a convolutional policy takes no such size.{near(wrong[0], known)}")
        if not path and not {"actions", "tasks"} <= sizes.keys():
            cure = "give a clone (experiment=clone_recordings_conv makes one)"
            raise ConfigError(f"model.config.policy.path is empty: {cure}.")
        self.config = config = ConvConfig(**{**(sizes_at(path) if path else {}), **sizes})
        self.arguments = asdict(config)  # that build it again
        self.action_dim, self.chunk = len(config.actions["q01"]), config.chunk
        self._actions = Range.of(config.actions)
        self._state = Range.of(config.state) if config.state else None
        self.reads_state, self.state_size = config.state is not None, len(config.state["q01"]) if config.state else None
        pairs = itertools.pairwise((3, *CHANNELS))
        layers = [layer for n, m in pairs for layer in (nn.Conv2d(n, m, 5, stride=2, padding=2), nn.SiLU())]
        self.see = nn.Sequential(*layers, nn.Flatten())
        side = math.ceil(config.size / 2 ** len(CHANNELS))
        features = config.num_views * CHANNELS[-1] * side**2 + (self.state_size or 0)
        self.task = nn.Embedding(len(config.tasks) + 1, config.width)  # the last one of any other sentence
        self.body = nn.Linear(features, config.width)
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(config.width, config.width), nn.SiLU())
        self.out = nn.Linear(config.width, config.num_knots * self.action_dim)
        nn.init.zeros_(self.task.weight)
        if path:
            load_weights(self, path)

    @classmethod
    def to_clone(
        cls,
        start: CloneStart,
        base: str = "",
        noise: float | None = None,
        correlation: float | None = None,
        size: int = 64,
        width: int = 128,
    ) -> "ConvPolicy":
        """One with the sizes and weights of ``base``, or a random one for these recordings."""
        draws: dict[str, Any] = {"noise": noise, "correlation": correlation}
        draws = {name: value for name, value in draws.items() if value is not None}
        if base:
            return cls(base, **draws)
        windows = start.windows
        found: Any = windows.state_statistics()
        return cls(
            actions={name: windows.statistics()[name] for name in ("q01", "q99")},
            tasks=sorted(set(windows.tasks)),
            chunk=start.chunk,
            num_knots=start.num_knots,
            num_views=len(windows.views),
            state=None if found is None else {name: found[name] for name in ("q01", "q99")},
            size=size,
            width=width,
            **draws,
        )

    def act(
        self, observation: Observation, *, mode: Mode, generators: Generators, temperature: float = 1.0
    ) -> Decision:
        with torch.no_grad():
            record = self.seen(observation)
            knots_E_K_N, log_prob_E_K_N = self.means(record), None
            if mode == "sample" and temperature > 0:
                shape = knots_E_K_N.shape[1:]
                draws = [torch.randn(shape, generator=each, device=each.device) for each in generators]
                noise_E_K_N = correlated(torch.stack(draws).to(knots_E_K_N), self.config.correlation)
                std = self.config.noise * temperature
                knots_E_K_N = knots_E_K_N + std * noise_E_K_N
                log_prob_E_K_N = -0.5 * noise_E_K_N.square() - math.log(std * math.sqrt(2 * math.pi))
            return Decision(self.actions(knots_E_K_N), {**record, "knots": knots_E_K_N}, log_prob_E_K_N)

    def log_prob(self, record: Mapping[str, Tensor]) -> LogProb:
        off_B_K_N = (record["knots"] - self.means(record)) / self.config.noise
        log_std = math.log(self.config.noise) + 0.5 * math.log(2 * math.pi)
        log_prob_B_K_N = -0.5 * off_B_K_N.square() - log_std
        return LogProb(log_prob_B_K_N, torch.full_like(log_prob_B_K_N, 0.5 + log_std))

    def record_of(self, observation: Observation, actions_B_A_D: Tensor) -> dict[str, Tensor]:
        """The record of a demonstrator who saw this and did that: each knot the mean of what it holds."""
        seen = self.seen(observation, is_recorded=True)
        means_B_K_N = actions_B_A_D.unflatten(1, (self.config.num_knots, -1)).mean(dim=2).to(seen["pictures"].device)
        return {**seen, "knots": self._actions.scaled(means_B_K_N).clamp(-MOST, MOST)}

    def cloning_loss(self, record: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The mean square of what it is off by; nothing is drawn."""
        return (record["knots"] - self.means(record)).square().mean()

    def seen(self, observation: Observation, is_recorded: bool = False) -> dict[str, Tensor]:
        """Inputs of a decision: small pictures [E, V, 3, size, size], numbers of the tasks, and the state.

        Recordings may have sentences that no recording to learn from has.
        """
        full, wrists = observation["full_image"], observation["wrist_image"]
        if 1 + wrists.shape[1] < self.config.num_views:
            raise ConfigError(
                f"The policy was cloned on {self.config.num_views} cameras, but is shown {1 + wrists.shape[1]}."
            )
        views = [full, *(wrists[:, k] for k in range(self.config.num_views - 1))]  # of sizes of their own
        pictures = torch.stack([self._shrunk(view) for view in views], dim=1)
        texts = observation["task_description"]
        numbers = [self._number(text) if text in self.config.tasks or not is_recorded else -1 for text in texts]
        others = len(self.config.tasks)
        record = {"pictures": pictures, "task": torch.tensor(numbers, device=pictures.device) % (others + 1)}
        if self._state is not None:
            if (width := observation["state"].shape[1]) != self.state_size:
                raise ConfigError(
                    f"The policy was cloned on {self.state_size} numbers of the state, but is shown {width}"
                    " (gym:ID?state=ENTRY)."
                )
            record["state"] = self._state.scaled(observation["state"].to(pictures.device)).clamp(-2, 2)
        return record

    def means(self, record: Mapping[str, Tensor]) -> Tensor:
        """The knots [B, K, N] that it plays, -1 and 1 at the quantiles of what was recorded."""
        pictures = record["pictures"].to(self.body.weight) / 127.5 - 1
        features = self.see(pictures.flatten(0, 1)).unflatten(0, (-1, self.config.num_views)).flatten(1)
        if self.reads_state:
            features = torch.cat([features, record["state"].to(features)], dim=1)
        hidden = self.body(features) + self.task(record["task"])
        return self.out(self.head(hidden)).float().unflatten(1, (self.config.num_knots, self.action_dim))

    def actions(self, knots_E_K_N: Tensor) -> Tensor:
        """Actions [E, A, D] that hold each knot."""
        restored = self._actions.restored(knots_E_K_N.clamp(-MOST, MOST))
        return restored.repeat_interleave(self.chunk // self.config.num_knots, dim=1)

    def _shrunk(self, pictures_E_H_W_C: Tensor) -> Tensor:
        flat = pictures_E_H_W_C.permute(0, 3, 1, 2).float().to(self.body.weight.device)
        size = (self.config.size, self.config.size)
        return functional.interpolate(flat, size, mode="area").round().to(torch.uint8)

    def _number(self, task: str) -> int:
        if task not in self.config.tasks:
            raise ConfigError(f"The policy was not cloned on the task '{task}'.{near(task, self.config.tasks)}")
        return self.config.tasks.index(task)


def sizes_at(path: str) -> dict[str, Any]:
    """The sizes of a clone, or of the clone that a run began with and what it replaced of them."""
    found = dict(arguments_of(path, ConvPolicy))
    begun = found.pop("path", "")
    return {**sizes_at(begun), **found} if begun else found


@dataclass(frozen=True)
class Range:
    """Quantiles of recorded numbers, which are -1 and 1 to the network; one that never changes is 0."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, quantiles: Mapping[str, Sequence[float]]) -> "Range":
        return cls(*(torch.tensor(quantiles[name], dtype=torch.float32) for name in ("q01", "q99")))

    def scaled(self, values: Tensor) -> Tensor:
        low, width = self.low.to(values.device), (self.high - self.low).to(values.device)
        return torch.where(width > 0, 2 * (values.float() - low) / width.clamp(min=1e-8) - 1, 0.0)

    def restored(self, values: Tensor) -> Tensor:
        low, width = self.low.to(values.device), (self.high - self.low).to(values.device)
        return low + (values.float() + 1) / 2 * width
