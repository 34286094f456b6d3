# SPDX-License-Identifier: Apache-2.0
"""A world model in place of a simulator: a policy's chunk of actions is imagined, and a reward judges the pictures.

    env = WorldModelEnv(imagination, ToyStarts(), ToyDetectorReward(), num_envs=64, max_steps=24)
    observation, info = env.reset(options={"trial_ids": [...], "seeds": [...]})
    observation, reward, terminated, truncated, info = env.chunk_step(actions)

The loop is closed: the policy sees the end of what was imagined before it acts again. The noise of an environment's
chunk is that of its seed plus the number of the chunk's first action, so that a result does not depend on which
environments are imagined together, and environments of equal seeds share their noise. Episodes that are over leave the
batch, and only pictures that policy and reward need are decoded.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionContract
from cosmos_predict2.conditioner import STATE_KEY
from cosmos_predict2.data.views import require_same, split
from cosmos_predict2.nn.state_head import StateTrail
from cosmos_predict2.rl.envs.first_frames import NUM_TRIALS, FirstFrames, RecordedFacts, StartPictures, StartsDefaults
from cosmos_predict2.rl.envs.remote import RemoteEnv
from cosmos_predict2.rl.envs.scoring import Book, Bounds, Chunk, Ids, Scored, Scoring, merged, score
from cosmos_predict2.rl.interfaces import (
    EnvDefaults,
    FrameReward,
    FrameRewardDefaults,
    Info,
    Observation,
    Policy,
    completed,
    observation_of,
)
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.options import UNGUIDED, SamplingOptions
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire.errors import CheckpointError, ConfigError, DataError, near, raised_as

log = logging.getLogger(__name__)

PADDING = ("hold", "zeros")
TEXTS = ("none", "task")
HAND_OVER = ("uint8", "float")
OFFLOAD = ("never", "phase")
ONE_EVALUATION = replace(UNGUIDED, num_steps=1, final_evaluation=False)

_NOISE_STRIDE = 2**31  # between the seeds of an environment's noises
_DESCRIPTION = "task_description"


def require_inputs(env: Any, policy: Policy) -> None:
    """Raise for a policy that was cloned on other views, actions or states than a world model has, or that reads the
    robot's state where it shows none; warn where zeros stand for it."""
    if not isinstance(env, WorldModelEnv | RemoteEnv):
        return
    name = type(policy).__name__
    if policy.views:
        cure = "clone it anew on the cameras of the world model, --camera or dataset.camera, in their order."
        require_same(env.views, policy.views, "The world model", f"{name} was cloned on", cure)
    cure = "clone it anew on recordings with the actions, the rate and the state of the world model."
    contract = policy.contract if policy.reads_state else policy.contract.without_state()
    env.contract.require(contract, "The world model", f"{name} was cloned on", cure)
    if not policy.reads_state:
        return
    if not env.state_size:
        raise ConfigError(
            f"{name} reads the robot's state, which this world model does not show: train one that predicts it"
            " (model.config.pipe_config.state), set policy.use_proprio=False of OpenVLA or"
            " policy.discrete_state_input=False of PI0.5, or choose N zeros in its place, env.state_size=N"
            " (--options zero_state=true of a server's policy)."
        )
    env.state_reader = name  # starts may lack it
    if env.head is None:
        log.warning(
            "%s reads the robot's state: in imagination it is shown %d zeros (state_size)", name, env.state_size
        )


class WorldModelEnv(EnvDefaults):
    """``num_envs`` imagined episodes of at most ``max_steps`` actions; see `VecEnv`. None: as long as recorded ones.

    Actions are clipped to [-1, 1] with ``clip_actions``, or "recorded" to the range of the recordings that ``starts``
    are of. ``chunk`` of them are imagined at once, by default as many as the weights were trained for. A shorter chunk
    of a policy is filled up: with its last action again ("hold"), as a place or a motion that recordings have, or with
    zeros. With starts of five pictures the last five are handed over, with ``keep_first`` the episode's first picture
    and the last four. Of several views of the world model (`data.views`) policies see the first as full_image and the
    others as wrist_image, and the reward sees the whole pictures.
    ``batch_size`` are imagined together. With ``num_noises`` 2 each chunk is imagined twice, by two noises, each going
    on from its own end; the policy sees the first. Policies see the robot's state where the world model predicts it and
    the starts have it; else ``state_size`` zeros stand for it. info also has ``value`` [E] of the last judged picture,
    ``values`` [E, A] of all, and ``disagrees`` [E]. With ``keep_frames`` it has ``frames`` [E, A, H, W, 3]; actions
    that were not executed repeat the last picture.
    """

    def __init__(
        self,
        imagination: Imagination,
        starts: StartPictures,
        reward: FrameReward,
        num_envs: int,
        max_steps: int | None,
        *,
        scoring: Scoring | None = None,
        sampling: SamplingOptions = ONE_EVALUATION,
        batch_size: int | None = None,
        chunk: int | None = None,
        padding: str = "hold",
        clip_actions: bool | str = True,
        text: str = "none",
        hand_over: str = "uint8",
        keep_first: bool = False,
        num_noises: int = 1,
        offload: str = "never",
        keep_frames: bool = False,
        state_size: int = 0,
        seed: int = 0,
    ) -> None:
        for name, value, known in (
            ("padding", padding, PADDING),
            ("text", text, TEXTS),
            ("hand_over", hand_over, HAND_OVER),
            ("offload", offload, OFFLOAD),
        ):
            if value not in known:
                raise ConfigError(f"{name} is '{value}'.{near(value, known)}")
        if num_noises not in (1, 2):
            raise ConfigError(f"num_noises={num_noises}: 1, or 2 of which the worst one counts.")
        self.imagination, self.starts = imagination, completed(starts, StartsDefaults)
        self.reward = completed(reward, FrameRewardDefaults)
        self.sampling = replace(sampling, is_repeatable=True)
        self.scoring, self.batch_size = scoring or Scoring(), batch_size
        self.padding, self.text, self.hand_over = padding, text, hand_over
        self.keep_first, self.num_noises, self.keep_frames = keep_first, num_noises, keep_frames
        self.head, self.contract = imagination.state_head, imagination.transform.contract
        if self.head is None:
            self.contract = self.contract.without_state()
        if starts.recorded:
            cure = "write them of its recordings, with scripts.make_reset_states, or train it on theirs."
            of_starts = ActionContract.read(starts.recorded.contract)
            uses_actions = max_steps is None or clip_actions == "recorded" or starts.history > 1
            if not uses_actions:
                of_starts = ActionContract(state_names=of_starts.state_names)
            self.contract.require(of_starts, "The world model", "the recordings of the starts have", cure)
        self.contract = replace(self.contract, clip_actions=clip_actions)
        if max_steps is None:
            if starts.recorded is None:
                wrong = "env.max_steps=null is the length of recordings, which these starts do not record"
                cure = "set the number of actions, or write the starts anew: python -m scripts.make_reset_states"
                raise ConfigError(f"{wrong}: {cure}.")
            max_steps = starts.recorded.num_actions
        self.state_size, self.offload_policy = self.head.state_dim if self.head else state_size, offload
        self.views = imagination.views
        for what, shown, program in (
            ("the starts have", self.starts.views, "make_reset_states"),
            ("the reward knows", self.reward.views, "train_reward_model"),
        ):
            cure = f"python -m scripts.{program} with the --camera of the world model makes others."
            require_same(self.views, shown or self.views, "The world model", what, cure)
        imagination.config.require_conditioning(starts.history)
        self.chunk = chunk or imagination.config.chunk_size
        self.new_frames = self.chunk - (starts.history - 1)
        if self.new_frames < 1:
            raise ConfigError(f"starts.history={starts.history} pictures leave no new one of {self.chunk} actions.")
        if keep_first and starts.history == 1:
            raise ConfigError("keep_first keeps the first picture beside the last four: starts.history must be 5.")
        self.action_dim = imagination.transform.dim
        self.bounds: Bounds | None = (-1.0, 1.0) if clip_actions is True else None
        if clip_actions == "recorded":
            self.bounds = _recorded_bounds(starts.recorded, self.action_dim)
        elif not isinstance(clip_actions, bool):
            raise ConfigError(f"clip_actions={clip_actions!r}: true, false or 'recorded'.")
        self.num_envs = num_envs
        sizes = dict(action_dim=self.action_dim, chunk=min(self.new_frames, max_steps), max_steps=max_steps)
        self.metadata: dict[str, Any] = dict(suite="world_model", **sizes, num_tasks=starts.num_tasks)
        if clip_actions == "recorded" and self.bounds is not None:
            self.metadata |= {"action_low": self.bounds[0], "action_high": self.bounds[1]}
        self._book = Book(num_envs, num_tasks=starts.num_tasks, num_trials=NUM_TRIALS, max_steps=max_steps, seed=seed)
        self._previous = numpy.zeros(num_envs, dtype=numpy.float32)
        self._streak = numpy.zeros(num_envs, dtype=numpy.int64)
        # Where the next chunk begins [noises, E, C, F, H, W], the first picture [E, C, 1, H, W] of keep_first, and the
        # raw actions [E, F - 1, D] between those frames; all are empty before the first reset.
        self._frames = self._first = self._actions = torch.empty(0)
        self._states = torch.empty(0)  # [noises, E, S], of the robot at those frames; empty where it is not predicted
        self._trail: StateTrail | None = None
        self.state_reader = ""  # the name of a policy that reads the state
        self._context: dict[str, Any] = {}  # of all environments
        self._texts: dict[str, Tensor] = {}
        self._is_away = False

    @property
    def device(self) -> torch.device:
        return self.imagination.world.device

    # --- episodes

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Observation, Info]:
        """Begin episodes; see `VecEnv.reset`. ``seeds`` are those of the noise."""
        self.onload()
        book = self._book
        ids = book.begin(seed, options)
        self._begin(ids, self.starts.starts(book.task_ids[ids].tolist(), book.trial_ids[ids].tolist()))
        self._previous[ids], self._streak[ids] = 0.0, 0
        return self._observation(ids), book.info(ids)

    def chunk_step(
        self, actions_E_A_D: Tensor, env_ids: Sequence[int] | None = None, execute: int | None = None
    ) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Imagine what the actions lead to; see `VecEnv.chunk_step`. Terminations stand at a chunk's last action."""
        self.onload()
        book, ids = self._book, self._book.ids(env_ids)
        actions, count = book.check_actions(actions_E_A_D, ids, self.action_dim, execute, bounds=self.bounds)
        if count > self.new_frames:
            found = f"{count} actions are to be executed, but this world model imagines {self.new_frames} at once"
            raise DataError(f"{found}: give shorter chunks, or execute fewer.")
        chunk = Chunk.empty(len(ids), actions.shape[1])
        info: dict[str, Any] = {"value": torch.zeros(len(ids)), "values": torch.zeros(actions.shape[:2])}
        info["disagrees"] = torch.zeros(len(ids), dtype=torch.bool)
        if self.keep_frames:
            last = self._pictures(ids)
            info["frames"] = last[:, None].expand(-1, actions.shape[1], -1, -1, -1).clone()
        rows = numpy.flatnonzero(~book.is_over[ids])
        if rows.size:
            counts = numpy.minimum(count, book.max_steps - book.steps[ids[rows]])
            frames = self._imagine(ids[rows], actions[rows], counts)
            scored = self._judge(ids[rows], frames, counts, actions.shape[1])
            self._end(ids[rows], rows, counts, scored, chunk)
            info["value"][rows] = torch.from_numpy(scored.value_E)
            info["values"][rows] = torch.from_numpy(scored.value_E_A)
            info["disagrees"][rows] = torch.from_numpy(scored.disagrees_E)
            if self.keep_frames:
                self._keep(info["frames"], rows, frames, counts)
        info = {**book.info(ids, chunk), **info}
        return self._observation(ids), chunk.reward_E_A, chunk.terminated_E_A, chunk.truncated_E_A, info

    # --- parts of a chunk

    def _begin(self, ids: Ids, first: FirstFrames) -> None:
        pictures = first.pictures_E_F_H_W_C.to(self.device).permute(0, 4, 1, 2, 3)
        if self.hand_over == "float":
            pictures = pictures.float() / 127.5 - 1
        history = pictures.shape[2]
        if not len(self._frames):
            self._frames = pictures.new_zeros(self.num_noises, self.num_envs, *pictures.shape[1:])
            self._first = pictures.new_zeros(self.num_envs, *pictures[:, :, :1].shape[1:])
            self._actions = torch.zeros(self.num_envs, history - 1, self.action_dim)
        if pictures.shape[1:] != self._frames.shape[2:]:
            found, before = list(pictures.shape[3:]), list(self._frames.shape[4:])
            wrong = f"These starts have pictures {found}, but those before {before} (height, width)"
            raise DataError(f"{wrong}: give the size that they are stretched to (starts.size).")
        where = self._on_device(ids)
        self._frames[:, where], self._first[where] = pictures, pictures[:, :, :1]
        if history > 1:
            if (rows := first.actions_E_A_D) is not None and rows.shape[2] != self.action_dim:
                raise DataError(f"Starts' actions have {rows.shape[2]} numbers, the model's {self.action_dim}.")
            self._actions[ids] = 0.0 if rows is None else rows.float()
        if self.head is not None and STATE_KEY in first.context:
            self._begin_states(ids, first.context[STATE_KEY])
        elif self.head is not None and self.state_reader:
            raise DataError(
                f"{self.state_reader} reads the robot's state, which the world model predicts from that of the start,"
                " but these starts have none: make them anew of recordings that have it (make_reset_states)."
            )
        known = {*first.context, _DESCRIPTION}
        if differs := sorted(known ^ self._context.keys()) if self._context else []:
            wrong = f"Not all starts have the same context ({', '.join(differs)} is only in some)"
            raise DataError(f"{wrong}, which a reward would take from other episodes: give it to all, or to none.")
        self._context.setdefault(_DESCRIPTION, [""] * self.num_envs)
        for i, sentence in zip(ids, first.task_description, strict=True):
            self._context[_DESCRIPTION][i] = sentence
        for name, value in first.context.items():
            if name not in self._context:
                self._context[name] = value.new_zeros(self.num_envs, *value.shape[1:])
            self._context[name][ids] = value

    def _begin_states(self, ids: Ids, state_E_S: Tensor) -> None:
        assert self.head is not None
        size = self.head.state_dim
        if self.starts.history > 1:
            raise ConfigError("The robot's state is predicted from a single picture: set starts.history=1.")
        if state_E_S.shape[1] != size:
            raise DataError(
                f"The world model predicts {size} numbers of the robot's state, but the starts have"
                f" {state_E_S.shape[1]}: take starts of its recordings, or train it on the state that they have"
                " (model.config.pipe_config.state)."
            )
        if not len(self._states):
            self._states = torch.zeros(self.num_noises, self.num_envs, size)
        self._states[:, ids] = state_E_S.float().cpu()

    def _imagine(self, ids: Ids, actions_E_A_D: Tensor, counts: NDArray[numpy.int64]) -> Tensor:
        """Pictures [noises, E, C, F, H, W] that the actions lead to, the last after each environment's last action.

        Moves the environments on to where the next chunk begins.
        """
        given, size, most = self.starts.history, len(ids), int(counts.max())
        where = self._on_device(ids)
        before = self._actions[ids]
        filled = self._filled(actions_E_A_D)
        raw = torch.cat([before, filled], dim=1)
        seeds = self._book.seeds[ids] + self._book.steps[ids]
        all_seeds = [int(seed + k * _NOISE_STRIDE) % 2**32 for k in range(self.num_noises) for seed in seeds]
        # Numbers of frames in a whole clip: the first new one is `given`, the last executed one `given - 1 + most`.
        needed = given if self.scoring.judge == "all" or self.keep_frames else given - 1 + int(counts.min())
        low = min(needed, int(counts.min()))  # where the next chunk begins, too
        if self.head is not None and len(self._states):
            self._trail = StateTrail(self.head, self._states[:, ids].flatten(0, 1))
        video = self._generate(
            self._frames[:, where].flatten(0, 1),
            self.imagination.transformed(raw.numpy()).repeat(self.num_noises, 1, 1),
            all_seeds,
            self._text(ids),
            range(low, given + most),
        ).unflatten(0, (self.num_noises, size))
        if self._trail is not None:
            states = self._trail.step(counts.tolist() * self.num_noises)
            self._states[:, ids] = states.cpu().unflatten(0, (self.num_noises, size))
        ends = numpy.arange(given)[None] + counts[:, None] - low
        last = _picked(video, ends)
        if self.keep_first:
            last[:, :, :, 0] = self._first[where, :, 0]
        self._frames[:, where] = last if self._frames.is_floating_point() else self._to_bytes(last)
        if given > 1:
            joined = torch.cat([before, filled], dim=1)
            self._actions[ids] = torch.stack([row[n : n + given - 1] for row, n in zip(joined, counts, strict=True)])
        return video

    def _generate(
        self, first: Tensor, actions: Tensor, seeds: Sequence[int], text: Tensor | None, frames: range
    ) -> Tensor:
        """Some frames of the clips, [B, C, F, H, W]."""
        options: Any = dict(as_float=self.hand_over == "float", batch_size=self.batch_size, frames=frames)
        options |= {} if self._trail is None else {"trail": self._trail}
        return self.imagination.generate_actions(first, actions, seeds, self.sampling, text_B_S_E=text, **options)

    def _to_bytes(self, video: Tensor) -> Tensor:
        return video if video.dtype == torch.uint8 else to_uint8(video)

    def _as_judged(self, video: Tensor) -> Tensor:
        """The pictures as the reward sees them."""
        return self._to_bytes(video)

    def _filled(self, actions_E_A_D: Tensor) -> Tensor:
        """The actions, filled up or cut to the number that is imagined at once."""
        have = actions_E_A_D.shape[1]
        if have >= self.new_frames:
            return actions_E_A_D[:, : self.new_frames]
        rest = actions_E_A_D[:, -1:] if self.padding == "hold" else torch.zeros(1, 1, self.action_dim)
        return torch.cat([actions_E_A_D, rest.expand(len(actions_E_A_D), self.new_frames - have, -1)], dim=1)

    def _judge(self, ids: Ids, frames: Tensor, counts: NDArray[numpy.int64], num_actions: int) -> Scored:
        """``frames`` end with the picture after each environment's last action, and begin where `_imagine` begins."""
        most = int(counts.max())
        if self.scoring.judge == "last":
            shown = _picked(frames, counts[:, None] - most + frames.shape[3] - 1)
        else:
            shown = frames[:, :, :, frames.shape[3] - most :]
        rows = numpy.tile(ids, self.num_noises)
        context = {
            name: [value[i] for i in rows] if isinstance(value, list) else value[torch.from_numpy(rows)]
            for name, value in self._context.items()
        }
        judgement = self.reward.judge(self._as_judged(shown).flatten(0, 1).permute(0, 2, 3, 4, 1), context)
        judged = merged(judgement, self.num_noises)
        return score(self.scoring, judged, counts, num_actions, self._previous[ids], self._streak[ids])

    def _end(self, ids: Ids, rows: Ids, counts: NDArray[numpy.int64], scored: Scored, chunk: Chunk) -> None:
        book = self._book
        book.steps[ids] += counts
        terminated, truncated = book.end(ids, scored.is_success_E, self.scoring.terminate_on_success)
        reward = scored.reward_E_A
        if self.scoring.reward_on == "last":
            reward = reward * (terminated | truncated)[:, None]
        self._previous[ids], self._streak[ids] = scored.previous_E, scored.streak_E
        chunk.reward_E_A[rows] = torch.from_numpy(reward)
        chunk.executed_E_A[rows] = torch.from_numpy(numpy.arange(reward.shape[1])[None] < counts[:, None])
        chunk.terminated_E_A[rows, counts - 1] = torch.from_numpy(terminated)
        chunk.truncated_E_A[rows, counts - 1] = torch.from_numpy(truncated)

    def _keep(self, kept: Tensor, rows: Ids, frames: Tensor, counts: NDArray[numpy.int64]) -> None:
        most = int(counts.max())
        shown = self._to_bytes(frames[0, :, :, frames.shape[3] - most :]).permute(0, 2, 3, 4, 1)
        for row, number, pictures in zip(rows, counts, shown, strict=True):
            kept[row, :number] = pictures[:number]
            kept[row, number:] = pictures[number - 1]

    # --- what is seen and known

    def _pictures(self, ids: Ids) -> Tensor:
        """The present pictures, uint8 [E, H, W, 3]."""
        last = self._frames[0][self._on_device(ids)][:, :, -1].permute(0, 2, 3, 1)
        return self._to_bytes(last)

    def _on_device(self, ids: Ids) -> Tensor:
        """The numbers as an index into what lies on the device, for which the host does not wait."""
        return torch.from_numpy(ids).to(self.device, non_blocking=True)

    def _observation(self, ids: Ids) -> Observation:
        state = self._states[0, ids] if len(self._states) else torch.zeros(len(ids), self.state_size)
        sentences = [self._context[_DESCRIPTION][i] for i in ids]
        return observation_of(split(self._pictures(ids), max(1, len(self.views)), dim=1), state, sentences)

    def _text(self, ids: Ids) -> Tensor | None:
        if self.text == "none":
            return None
        sentences = [self._context[_DESCRIPTION][i] for i in ids]
        if missing := [text for text in dict.fromkeys(sentences) if text not in self._texts]:
            encoded = self.imagination.world.encode_text(missing)
            self._texts |= dict(zip(missing, encoded, strict=True))
        return torch.stack([self._texts[text] for text in sentences] * self.num_noises)

    # --- memory and state

    def offload(self) -> None:
        """Move world model, reward and pictures to the host, where ``offload`` is "phase"."""
        if self.offload_policy == "phase" and not self._is_away:
            self._move("cpu")
            self._is_away = True

    def onload(self) -> None:
        """Bring back what `offload` moved; the two calls need it not be called for."""
        if self._is_away:
            self._move(self.device)
            self._is_away = False

    def _move(self, device: torch.device | str) -> None:
        self.imagination.world.move(device)
        self.reward.to(device)
        self._frames, self._first = self._frames.to(device), self._first.to(device)
        self._texts = {text: value.to(device) for text, value in self._texts.items()}

    @property
    def _about(self) -> dict[str, Any]:
        own = dict(num_envs=self.num_envs, num_noises=self.num_noises, hand_over=self.hand_over)
        return {"kind": "world_model", "history": self.starts.history, **own, **self.metadata}

    def get_state(self) -> bytes:
        arrays: dict[str, Any] = {"previous": self._previous, "streak": self._streak}
        if len(self._frames):
            for name, tensor in (("frames", self._frames), ("first", self._first), ("actions", self._actions)):
                arrays[name] = tensor.cpu().numpy()
        if len(self._states):
            arrays["states"] = self._states.numpy()
        for name, value in self._context.items():
            arrays[f"context.{name}"] = numpy.asarray(value) if isinstance(value, list) else value.cpu().numpy()
        return self._book.to_bytes(self._about, arrays)

    def load_state(self, state: bytes) -> None:
        arrays = self._book.from_bytes(state, self._about)
        with raised_as(CheckpointError, "The state is not one of a world model's environment", KeyError, ValueError):
            self._previous[:], self._streak[:] = arrays["previous"], arrays["streak"]
            if "frames" in arrays:
                place = "cpu" if self._is_away else self.device
                self._frames, self._first = (torch.from_numpy(arrays[name]).to(place) for name in ("frames", "first"))
                self._actions = torch.from_numpy(arrays["actions"])
            if "states" in arrays:
                self._states = torch.from_numpy(arrays["states"])
        self._context = {
            name.removeprefix("context."): array.tolist() if array.dtype.kind == "U" else torch.from_numpy(array)
            for name, array in arrays.items()
            if name.startswith("context.")
        }

    def close(self) -> None:
        """Forget the pictures; the world model is not this environment's own."""
        self._frames = self._first = self._actions = self._states = torch.empty(0)
        self._trail = None


def _recorded_bounds(recorded: RecordedFacts | None, action_dim: int) -> Bounds | None:
    """Lowest and highest recorded value of each number; None with a warning where the starts do not record them."""
    if recorded is None:
        log.warning("the starts do not record the range of actions: none is clipped (clip_actions=recorded)")
        return None
    if len(recorded.low) != action_dim:
        raise DataError(f"The starts' actions have {len(recorded.low)} numbers, but the model's have {action_dim}.")
    return recorded.low, recorded.high


def _picked(video_N_E_C_F_H_W: Tensor, frames_E_F: NDArray[numpy.int64]) -> Tensor:
    """Some frames of each environment, [N, E, C, F, H, W]; a copy."""
    if (frames_E_F == frames_E_F[:1]).all():
        start = int(frames_E_F[0, 0])
        return video_N_E_C_F_H_W[:, :, :, start : start + frames_E_F.shape[1]].clone()
    rows = [video_N_E_C_F_H_W[:, i][:, :, row.tolist()] for i, row in enumerate(frames_E_F)]
    return torch.stack(rows, dim=1)
