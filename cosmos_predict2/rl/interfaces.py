# SPDX-License-Identifier: Apache-2.0
"""The contracts of reinforcement learning.

A world model that is trained by rewards makes `Clips`, and a `Reward` scores them. A policy decides in a `VecEnv`: a
simulator, or a world model whose pictures a `FrameReward` judges.

Optional members of a protocol have their values in a class of defaults beside it. Classes here derive from it; objects
of yours may lack them, and get them by `completed` where they come in.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import UNKNOWN, ActionContract
from imaginaire import buildable

completed = buildable.completed


@dataclass(frozen=True)
class Clips:
    """Generated clips. Rewards with ``needs_pixels`` get ``video``, others may find it None."""

    latents_B_C_T_H_W: Tensor | None
    video_B_C_F_H_W: Tensor | None  # uint8
    prompts: list[str]
    fps: float


@dataclass(frozen=True)
class Ticket:
    """The promise of scores; a reward may derive one that holds what it needs to keep it."""

    request_id: str


@dataclass(frozen=True)
class Scores:
    """One number for each clip. Of an invalid one the value is 0 and never used."""

    value_B: Tensor
    is_valid_B: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)


class Reward(Protocol):
    """Scores clips, now or later. ``context`` holds what the clips were conditioned on, and the true clips if known.

    Optional: ``needs_pixels`` (true: the clips are decoded for it), and of one that asks elsewhere
    ``probe(clips, context, deadline)``, which raises where it could not score them: it is called before the first
    rollout. A reward's class may be one that `Compares`.
    """

    needs_pixels: bool

    @property
    def probe(self) -> Callable[[Clips, Mapping[str, Any], float], None] | None: ...

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket: ...

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        """The scores, at most ``deadline`` seconds from now; what is not there by then is invalid.

        A deadline of 0 or below is over: scores that are there already count.
        """


@runtime_checkable
class SeesPixels(Protocol):
    """A reward, also a plain function of (clips, context), for which clips are decoded where this is true."""

    needs_pixels: bool


@runtime_checkable
class Compares(Protocol):
    """A reward's class, or a plain function, that needs more than the clip: true_video, true_latents or actions."""

    requires: Sequence[str]  # what of the context it compares with


class RewardDefaults:
    needs_pixels: bool = False
    probe: Callable[[Clips, Mapping[str, Any], float], None] | None = None


# --- policies and the environments that they act in

# full_image uint8 [E, H, W, 3]; wrist_image uint8 [E, V, H, W, 3], V >= 0; state float32 [E, S]; and task_description,
# a list of E sentences. Pictures are upright.
Observation = Mapping[str, Any]
Info = Mapping[str, Any]
Mode = Literal["sample", "greedy"]
Generators = Sequence[torch.Generator]  # one for each environment, or row


def observation_of(views: Sequence[Tensor], state_E_S: Tensor | None, sentences: list[str]) -> Observation:
    """The observation of pictures [E, H, W, 3] of each view, of which the first is the full image."""
    full, *wrists = views
    return {
        "full_image": full,
        "wrist_image": torch.stack(wrists, dim=1) if wrists else full.new_zeros(len(full), 0, *full.shape[1:]),
        "state": torch.zeros(len(full), 0) if state_E_S is None else state_E_S,
        "task_description": sentences,
    }


def rows_of(observation: Observation, rows: Sequence[int]) -> dict[str, Any]:
    """The observation of some of the environments."""
    return {
        name: value[list(rows)] if isinstance(value, Tensor) else [value[i] for i in rows]
        for name, value in observation.items()
    }


@dataclass(frozen=True)
class Decision:
    """The actions of a chunk, as the environment takes them, and all that is needed to compute their probability.

    ``log_prob`` is that of the draw itself, taken where it is drawn and not by `Policy.log_prob`, with which it is
    compared before anything is learnt; None where nothing is drawn. Its rows and elements are those of `LogProb`.
    ``is_lost_E`` marks rows that no decision could be had for: their episodes are over, and do not count.
    """

    actions_E_A_D: Tensor
    record: Mapping[str, Tensor]  # one row for each environment
    log_prob_E_K_N: Tensor | None = None
    is_lost_E: Tensor | None = None


@dataclass(frozen=True)
class DrawnStep:
    """The step of a sampler that a decision was drawn by, with gradients: normal, by a deviation that is not learnt."""

    mean_B_K_N: Tensor
    std_B: Tensor
    dt_B: Tensor  # how far its flow time falls


@dataclass(frozen=True)
class LogProb:
    """Log-probabilities of what a record holds, with gradients.

    Row k of the K rows of a decision stands for A / K successive actions, so that actions that were never executed can
    be left out; N are the elements of a row. One action each is K = A. ``step`` is what the objective guard needs.
    """

    log_prob_B_K_N: Tensor
    entropy_B_K_N: Tensor | None = None
    step: DrawnStep | None = None


@dataclass(frozen=True)
class Velocities:
    """Predictions of a flow for what a record holds, with fresh noise at L times: x_t = (1 - t) x0 + t noise.

    The velocity has gradients; it is right where it is noise - x0, in units of the policy's own. Rows and elements are
    those of `LogProb`: of the actions that are executed.
    """

    x0_B_K_N: Tensor
    noise_B_L_K_N: Tensor
    velocity_B_L_K_N: Tensor


class ContractError(AssertionError):
    """A policy or an environment that does not keep its contract: which rule, and what was found."""


def require(is_kept: bool, found: str) -> None:
    """Raise `ContractError` where a rule is not kept."""
    if not is_kept:
        raise ContractError(found)


def require_rules(rules: Iterable[Callable[..., None]], *case: Any) -> None:
    """Raise `ContractError` with the name of the first of these functions that refuses the case, and its docstring."""
    for rule in rules:
        try:
            rule(*case)
        except ContractError as error:
            stated = " ".join((rule.__doc__ or "").split())
            raise ContractError(f"{rule.__name__}: {str(error).rstrip('.')}. {stated}".rstrip()) from None
        except Exception as error:  # of the policy's or the environment's own code
            raise ContractError(f"{rule.__name__}: {type(error).__name__}: {error}") from error


class Policy(Protocol):
    """Decides on chunks of actions. A policy that is trained is a module besides.

    ``action_dim`` is the number of an action's numbers, ``chunk`` that of a decision's actions.

    Optional: ``sentences``, ``views``, ``recorded_size`` and ``contract`` (of the recordings that it was cloned from,
    given by who reads it), ``reads_state`` (decisions need ``state``) and ``state_size`` (of so many numbers; None: not
    recorded), ``draws_when_greedy`` (greedy decisions draw noise, too), ``to(device)`` and
    ``on_trainer_step(iteration)``, called after each optimizer step. For nft and awm a flow has ``velocities``, and
    ``flow_times``: the times at which its sampler asks the network, from 1, where all is noise, towards 0. For
    best_of_n and random_of_n it may have a ``cloning_loss`` of its own, as `policies.cloning.Cloneable` has, and
    ``demonstrated(record)``, a decision's record as that takes it. One that is sharded, cast in part or adapted has
    a ``network``: `policies.network.PolicyNetwork`.
    `cosmos_predict2.rl.policies.contract` checks a policy against what is written here.
    """

    action_dim: int
    chunk: int
    sentences: Sequence[str]
    views: Sequence[str]
    recorded_size: Sequence[int]
    contract: ActionContract
    reads_state: bool
    state_size: int | None
    draws_when_greedy: bool
    flow_times: Sequence[float]

    @property
    def velocities(self) -> Callable[[Mapping[str, Tensor], Tensor, Generators], Velocities] | None:
        """Called with a record, times [B, L] and generators, ``generators[b]`` of all noise of row b."""

    cloning_loss: Callable[[Mapping[str, Tensor], torch.Generator], Tensor] | None

    on_trainer_step: Callable[[int], None] | None

    def demonstrated(self, record: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...

    def to(self, *args: Any, **kwargs: Any) -> Any: ...

    def act(
        self, observation: Observation, *, mode: Mode, generators: Generators, temperature: float = 1.0
    ) -> Decision:
        """One chunk of actions for each environment; a draw of environment i comes from ``generators[i]`` alone.

        Another ``temperature`` than 1 draws more or less widely than what `log_prob` speaks of: to explore, not to
        learn from.
        """

    def log_prob(self, record: Mapping[str, Tensor]) -> LogProb: ...


# Fields of a policy that record what it was cloned on.
OF_RECORDINGS = ("sentences", "views", "recorded_size", "contract")


class PolicyDefaults:
    reads_state: bool = False
    state_size: int | None = None
    draws_when_greedy: bool = False
    flow_times: Sequence[float] = ()
    sentences: Sequence[str] = ()  # the task descriptions of the recordings it was cloned from; none: it takes any
    views: Sequence[str] = ()  # of these recordings, full_image first (`data.views`); none: not recorded
    recorded_size: Sequence[int] = ()  # height and width of full_image in these recordings; none: not recorded
    contract: ActionContract = UNKNOWN  # of these recordings' actions, and of their state where it reads that
    velocities: Callable[[Mapping[str, Tensor], Tensor, Generators], Velocities] | None = None
    cloning_loss: Callable[[Mapping[str, Tensor], torch.Generator], Tensor] | None = None
    on_trainer_step: Callable[[int], None] | None = None

    def demonstrated(self, record: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return record

    def to(self, *args: Any, **kwargs: Any) -> Any: ...


class VecEnv(Protocol):
    """Environments that are stepped together, each with a task, a start and a length of its own.

    Optional:
    - ``keep_frames``: see `chunk_step`; None: there are no frames.
    - ``release()`` ends simulators. They start again with the next episodes.
    - ``offload()`` leaves the GPU to others until the next episodes; ``offload_policy`` is "phase" where it does.
    - ``imagination``: the world model that imagines the episodes, or the address of its server.
    - ``num_noises`` of each imagined episode; of 2, info has ``disagrees`` [E] bool: only one of them shows success.
    - ``views`` of its frames: full_image, below it as many of wrist_image as have a name there.
    - ``terminate_on_success``: episodes end with success; set to False, they are played on. None: it cannot be set.

    `cosmos_predict2.rl.envs.contract` checks an environment against what is written here.
    """

    num_envs: int
    keep_frames: bool | None
    offload_policy: str
    imagination: Any
    num_noises: int
    views: Sequence[str]
    terminate_on_success: bool | None

    @property
    def release(self) -> Callable[[], None] | None: ...

    def offload(self) -> None: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """suite, action_dim, chunk (actions of a decision), max_steps (of an episode, at most).

        Where there are several tasks, num_tasks. Where actions are not in [-1, 1], action_low and action_high, a number
        for each of an action's. Where a reset of some environments keeps the others waiting, reset_chunks: the number
        of their chunks that it lasts, about.
        """

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Observation, Info]:
        """Begin episodes in the environments ``env_ids`` (all), and observe these.

        ``task_ids`` and ``trial_ids`` choose task and start of each, both modulo their number; without them ``seed``
        chooses. ``seeds`` decide the draws inside each environment, such as the noise of a world model. The other
        environments are untouched, and may be in the midst of their episodes.
        """

    def chunk_step(
        self, actions_E_A_D: Tensor, env_ids: Sequence[int] | None = None, execute: int | None = None
    ) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Execute the first ``execute`` actions (all). Observation after the last of them; reward, terminated,
        truncated, each [E, A].

        info: ``success`` (at the last executed step) and ``active`` [E] bool, ``finish_step`` [E] (executed steps of an
        episode that is over, else -1), ``executed`` [E, A] bool. An episode that is over is not stepped: it keeps its
        last observation, and its rewards are 0. Actions that are not finite raise `DataError`; others are clipped to
        their bounds. Where a simulator can be lost in mid-episode, ``valid`` [E] is false for such an episode, which is
        over. Where ``keep_frames`` is true, ``frames`` are the pictures after each action, uint8 [E, A, H, W, 3], of
        which the last executed one stays.
        """

    def get_state(self) -> bytes: ...

    def load_state(self, state: bytes) -> None: ...

    def close(self) -> None: ...


class EnvDefaults:
    keep_frames: bool | None = None
    offload_policy: str = "never"
    imagination: Any = None
    num_noises: int = 1
    views: Sequence[str] = ("",)
    terminate_on_success: bool | None = None
    release: Callable[[], None] | None = None

    def offload(self) -> None: ...


@dataclass(frozen=True)
class Judgement:
    """A value of each picture, and whether it shows the task done."""

    value_E_F: Tensor
    success_E_F: Tensor  # bool


class FrameReward(Protocol):
    """Judges pictures that a world model imagined, uint8 [E, F, H, W, 3]. ``context`` has what is known of each start:
    ``task_description``, and what a reward needs besides, such as ``goal`` [E, 2].

    Optional: ``to(device)``, ``takes_floats`` (true: it sees pictures of RLinf's environment before they become
    bytes, in [-1, 1]), and ``views`` (of the pictures that it was trained on, `data.views`; none: not recorded).
    """

    takes_floats: bool
    views: Sequence[str]

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement: ...

    def to(self, device: torch.device | str) -> Any: ...


class FrameRewardDefaults:
    takes_floats: bool = False
    views: Sequence[str] = ()

    def to(self, device: torch.device | str) -> Any: ...
