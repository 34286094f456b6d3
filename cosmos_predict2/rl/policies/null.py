# SPDX-License-Identifier: Apache-2.0
"""Policies that see nothing, and whether a clone is better than they are.

    read_policy("null:still:my_data")    does nothing: no motion, or the mean of recorded places
    read_policy("null:mean:my_data")     the recordings' mean action at each step of a decision
    read_policy("null:random:my_data")   actions of the recordings, drawn anew for each decision

A clone that is no better has learnt nothing from pictures, and reinforcement learning nothing to begin with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.data.dataset_forms import form_of
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.rl.interfaces import Decision, Generators, LogProb, Mode, Observation, Policy, PolicyDefaults
from cosmos_predict2.rl.policies.cloning import CloneWindows, recorded_demonstrations
from imaginaire import random
from imaginaire.errors import ConfigError, DataError, near

ADDRESS = "null:"
KINDS = ("still", "mean", "random")
Z = 1.96  # of an interval that holds the truth in 95 of 100 cases
LEAST_RECORDINGS = 3  # held out, to measure what a clone has learnt
MUCH = 0.05  # of what differs between held-out actions
CURE = (
    "Clone another kind of policy, record more episodes that succeed, clone for longer"
    " (trainer.max_iter), or begin with published weights (model.config.base); then look at the figures again."
)


class NullPolicy(nn.Module, PolicyDefaults):
    """Decides without looking, by windows of recorded actions."""

    def __init__(self, kind: str, actions_N_A_D: Tensor) -> None:
        super().__init__()
        self.kind, self.draws_when_greedy = kind, kind == "random"
        self.chunk, self.action_dim = actions_N_A_D.shape[1:]
        self.arguments = {"kind": kind}
        self.register_buffer("recorded", actions_N_A_D)
        self.recorded: Tensor

    def act(
        self, observation: Observation, *, mode: Mode, generators: Generators, temperature: float = 1.0
    ) -> Decision:
        num = len(observation["full_image"])
        if self.kind == "random":
            count = len(self.recorded)
            rows = [int(torch.randint(count, (1,), generator=each, device=each.device)) for each in generators]
            return Decision(self.recorded[rows], {})
        once = self.recorded.mean(dim=0) if self.kind == "mean" else doing_nothing(self.recorded.flatten(0, 1))
        return Decision(once.expand(num, self.chunk, -1).clone(), {})

    def log_prob(self, record: Mapping[str, Tensor]) -> LogProb:
        raise ConfigError(f"The null policy '{self.kind}' sees nothing and learns nothing: give a clone to learn from.")


def are_motions(actions_N_D: Tensor) -> bool:
    """True where zeros lie among recorded actions: else these are places."""
    return bool(((actions_N_D.amin(dim=0) <= 0) & (actions_N_D.amax(dim=0) >= 0)).all())


def doing_nothing(actions_N_D: Tensor) -> Tensor:
    """[D]: no motion, or the mean of places."""
    mean_D = actions_N_D.mean(dim=0)
    return torch.zeros_like(mean_D) if are_motions(actions_N_D) else mean_D


def null_policy(address: str, chunk: int = 12, camera: str | None = None) -> NullPolicy:
    """The policy of null:KIND:FOLDER, whose actions are those of the recordings in the folder."""
    kind, _, folder = address.removeprefix(ADDRESS).partition(":")
    if kind not in KINDS or not folder:
        raise ConfigError(
            f"{address}: a null policy is {', '.join(f'{ADDRESS}{one}:FOLDER' for one in KINDS)}, with the recordings"
            f" of the robot.{near(kind, KINDS)}"
        )
    if camera is None and form_of(Path(folder)) == "lerobot":  # any will do: no picture is read
        camera = next(iter(LeRobotSource.open(folder).info.cameras), None)
    demonstrations = recorded_demonstrations(Path(folder), camera=camera)
    windows = demonstrations.without_pictures(chunk, demonstrations.places(chunk))
    return NullPolicy(kind, windows.actions_B_A_D)


# --- without a simulator: how far decisions are from held-out ones


@dataclass(frozen=True)
class Constant:
    """The mean of recorded windows, [A, D], and the deviation of each number [D]: what a clone has to beat."""

    mean_A_D: Tensor
    std_D: Tensor

    @classmethod
    def of(cls, windows: CloneWindows) -> "Constant":
        actions = windows.actions_B_A_D.double()
        std = actions.flatten(0, 1).std(dim=0, correction=0)
        if not bool((std > 0).any()):
            raise DataError("All recorded actions are the same: there is nothing to clone. See the action column.")
        return cls(actions.mean(dim=0), std)

    def errors(self, actions_B_A_D: Tensor) -> Tensor:
        """The squared error of the mean for each window [B], in variances of a number."""
        return self.product(actions_B_A_D, self.mean_A_D, self.mean_A_D)

    def product(self, actions_B_A_D: Tensor, one: Tensor, other: Tensor) -> Tensor:
        """(one - actions) (other - actions) in variances, the mean over steps and over numbers that vary."""
        moves = self.std_D > 0
        first, second = ((guess.double() - actions_B_A_D) / self.std_D for guess in (one, other))
        return (first * second)[..., moves].mean(dim=(1, 2))


def decision_errors(
    policy: Policy, windows: CloneWindows, constant: Constant, seed: int, places: Sequence[int]
) -> Tensor:
    """The squared error [B] of the mean decision in each window, in variances of a number.

    Decisions that are drawn differ. Of two, the product of their errors is on average the square of their mean's; of
    two that are the same it is the square itself. ``places`` say what is drawn.
    """
    drawn = []
    for k in range(2):
        generators = [random.generator(seed, place, f"held-out decision {k}") for place in places]
        drawn.append(_decided(policy, windows.observation, generators).cpu())
    return constant.product(windows.actions_B_A_D.cpu().double(), *drawn)


def _decided(policy: Policy, observation: Observation, generators: Generators) -> Tensor:
    if not policy.draws_when_greedy:
        try:
            return policy.act(observation, mode="sample", generators=generators).actions_E_A_D
        except ConfigError:  # it has no distribution, as OpenVLA's variant l1
            pass
    return policy.act(observation, mode="greedy", generators=generators).actions_E_A_D


# --- the verdict


@dataclass(frozen=True)
class CloneVerdict:
    """The verdict on a clone beside policies that see nothing: is it better? None where too little is known."""

    is_better: bool | None
    text: str
    next_step: str = ""


def by_errors(error_N: Tensor, constant_N: Tensor, episode_N: Tensor) -> tuple[dict[str, float], CloneVerdict]:
    """Figures and verdict by held-out windows, of which those of an episode are not independent.

    ``explained`` is 1 for a clone that is never wrong, 0 for one that is as wrong as the mean action.
    """
    gain_N, least = (constant_N - error_N).double(), float(constant_N.double().mean())
    sums = torch.stack(
        [gain_N[episode_N == i].sum() - gain_N.mean() * (episode_N == i).sum() for i in episode_N.unique()]
    )
    num, gain = len(sums), float(gain_N.mean())
    half = Z * math.sqrt(float(sums.square().sum()) * num / max(1, num - 1)) / len(gain_N)
    found = dict(error=float(error_N.double().mean()), constant_error=least, windows=len(gain_N), recordings=num)
    found |= dict(explained=gain / least, low=(gain - half) / least, high=(gain + half) / least)
    share = f"{found['explained']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
    of_what = f"of what differs between held-out actions ({num} recordings)"
    if num < LEAST_RECORDINGS:
        return found, CloneVerdict(
            None, f"Only {num} recordings are held out: too few to measure what the clone has learnt.", CURE
        )
    if found["low"] > 0:
        much, cure = ("something", "") if found["explained"] >= MUCH else ("hardly anything", CURE)
        text = f"The clone sees {much}: it explains {share} {of_what}; the mean action explains 0."
        return found, CloneVerdict(True, text, cure)
    return found, CloneVerdict(
        False, f"The clone is no better than the mean action: it explains {share} {of_what}.", CURE
    )


def by_success(clone: Any, nulls: Mapping[str, Any]) -> CloneVerdict:
    """The verdict by rates of success (``rate``, ``interval``) on the same starts, in a simulator or on the robot."""
    for name, null in nulls.items():
        gain = clone.rate - null.rate
        low = gain - math.hypot(clone.rate - clone.interval[0], null.interval[1] - null.rate)  # Newcombe's
        text = f"success {clone.as_text()}, of the null policy '{name}' {null.as_text()}"
        if not low > 0:
            return CloneVerdict(False, f"The clone is no better than a policy that sees nothing: {text}.", CURE)
    return CloneVerdict(True, f"The clone beats policies that see nothing: success {clone.as_text()}.")
