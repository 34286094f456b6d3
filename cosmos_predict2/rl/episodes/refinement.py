# SPDX-License-Identifier: Apache-2.0
"""A world model that a policy's experiment holds, and the data that refine it: windows of the policy's true episodes,
played here or recorded, beside older data.

Windows are kept as latents. They are state: a resumed run draws from the same ones. Every process keeps all of them.

Recorded are the episodes of a robot that plays the present policy while the run waits: phase 1 reads the LeRobot data
set FOLDER/phase_001, and so on. The run ends where one is not there yet, with its state saved and a message that names
what to play and where to write it; started again, it goes on from there.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.conditioner import ACTION_KEY, SHOWN_KEY, STATE_KEY
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.clip_dataset import TRANSFORM_KEY
from cosmos_predict2.data.dataset_latents import LATENTS_KEY, PROBE_KEY, probe
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.samples import frame_item, text_item
from cosmos_predict2.data.split import recorded_outcomes
from cosmos_predict2.data.views import AND, CAMERA_KEYS, require_same, views_of_data
from cosmos_predict2.evaluation.metrics.agreement import area_under_curve
from cosmos_predict2.models.config import model_config
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.envs.first_frames import whole_pictures
from cosmos_predict2.rl.envs.replays import action_keys_in, replayed
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.config import RefinementConfig, VLAGRPOConfig
from cosmos_predict2.rl.episodes.episodes import Starts, Trajectories
from cosmos_predict2.rl.episodes.policy_evaluation import Comparison
from cosmos_predict2.rl.interfaces import VecEnv
from cosmos_predict2.tokenizers.sizes import pixel_frames
from cosmos_predict2.world_model.assembly import other_parts
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire import distributed, random
from imaginaire.buildable import takes, target_of
from imaginaire.config import lazy_config
from imaginaire.config.nodes import as_config
from imaginaire.data.stream import POSITION_KEY
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import CheckpointError, ConfigError, DataError

log = logging.getLogger(__name__)

KEPT_DTYPE = torch.float16  # far finer than a tokenizer's own error
CLIPS_AT_ONCE = 64
DATA = "model.config.refinement.data"
BUFFERS = {LATENTS_KEY: "latents", ACTION_KEY: "actions", STATE_KEY: "states"}  # their names, by the entries of a batch

Windows = dict[str, Tensor]  # a row for each window, by the entries of a batch

Outcome = tuple[bool, bool, float]  # of an episode: true success, imagined success, and the imagined value


def build_world_model(wanted: Any) -> Video2WorldModel:
    """The world model of ``model.config.world_model``, with the transform of actions of its weights."""
    if "dit_path" in wanted:  # a function that gives the node, of the run of these weights
        wanted = lazy_config.instantiate(wanted)
    typed = model_config(wanted.config)
    pipe, path = typed.pipe_config, typed.model_manager_config.dit_path
    if path and isinstance(pipe, Video2WorldActionPipelineConfig) and pipe.transform is None:
        transform = read_card(path).opened().action_transform
        pipe.action_transform = None if transform is None else transform.to_dict()
    model = lazy_config.instantiate(wanted, config=typed)
    if not isinstance(model, Video2WorldModel):
        raise ConfigError(f"model.config.world_model is a {type(model).__name__}, but it must be a Video2WorldModel.")
    for problem in other_parts(read_card(path), pipe, model.world.tokenizer) if path else ():
        raise CheckpointError(f"model.config.world_model: {problem}")
    return model


class WindowBuffer(nn.Module):
    """The windows of this phase and of earlier ones, as buffers of fixed size with counts. ``shapes`` has the shape of
    a window's row, by the entries of a batch."""

    earlier_latents: Tensor
    counts: Tensor

    def __init__(self, num_newest: int, num_earlier: int, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.num_kept, self.keys = num_newest, tuple(shapes)
        for kind, count in (("newest", num_newest), ("earlier", num_earlier)):
            for key, shape in shapes.items():
                dtype = KEPT_DTYPE if key == LATENTS_KEY else torch.float32
                self.register_buffer(f"{kind}_{BUFFERS[key]}", torch.zeros(count, *shape, dtype=dtype))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))  # newest; earlier, all that ever were

    def rows(self, kind: str) -> Windows:
        """The buffers of the newest or of the earlier windows."""
        return {key: self.get_buffer(f"{kind}_{BUFFERS[key]}") for key in self.keys}

    @property
    def num_newest(self) -> int:
        return int(self.counts[0])

    @property
    def num_earlier(self) -> int:
        return min(int(self.counts[1]), len(self.earlier_latents))

    @torch.no_grad()
    def begin_phase(self, found: Windows) -> None:
        """The newest windows become those of an earlier phase, in place of the oldest; these are the newest."""
        have, seen, earlier = self.num_newest, int(self.counts[1]), self.rows("earlier")
        for key, newest in self.rows("newest").items():
            earlier[key][torch.arange(seen, seen + have) % len(earlier[key])] = newest[:have]
            newest[: len(found[key])] = found[key][: len(newest)].to(newest)
        self.counts.copy_(torch.tensor([min(len(found[key]), self.num_kept), seen + have]))


class Refinement(nn.Module):
    """Collects windows, and makes the batches on which the world model is trained."""

    def __init__(self, config: RefinementConfig, model: Video2WorldModel, data: Any, picture: tuple[int, int]) -> None:
        super().__init__()
        self.config, self._data = config, data
        self._imagination = Imagination(model.world)  # no module: what is trained is not saved here
        if config.old and data is None:
            wrong = f"model.config.refinement.old={config.old} windows are of {DATA}, which is not set"
            raise ConfigError(f"{wrong}: name a data set that the world model was trained on, or set old=0.")
        pipe, tokenizer = model.world.config, model.world.tokenizer
        self.picture, self._probe, self._num_frames = picture, probe(tokenizer), pixel_frames(pipe.state_t)
        factor = tokenizer.spatial_compression_factor
        shapes: dict[str, Sequence[int]] = {
            LATENTS_KEY: (tokenizer.latent_ch, pipe.state_t, picture[0] // factor, picture[1] // factor),
            ACTION_KEY: (self._num_frames - 1, self._imagination.transform.dim),
        }
        if (head := model.world.net.state_head) is not None:
            shapes[STATE_KEY] = (self._num_frames, head.state_dim)
        self.windows = WindowBuffer(config.episodes * config.windows, config.keep, shapes)

    @classmethod
    def of(
        cls, whole: VLAGRPOConfig, model: Video2WorldModel | None, env: VecEnv, true_env: VecEnv | None
    ) -> "Refinement":
        """Build what ``model.config.refinement`` asks for, with windows of the size of an environment's pictures."""
        config = as_config(RefinementConfig, whole.refinement, "model.config.refinement")
        shown = true_env if config.recordings is None else env
        if model is None or shown is None:
            raise ConfigError(
                "model.config.refinement needs model.config.world_model and model.config.true_env: what it refines, and"
                " by. In place of the latter model.config.refinement.recordings is a folder of what a robot plays."
            )
        if config.recordings is not None and not isinstance(env, WorldModelEnv):
            raise ConfigError("model.config.refinement.recordings need a model.config.env that is a WorldModelEnv.")
        if config.optimizer is None:
            raise ConfigError("model.config.refinement.optimizer must be set, such as L(muon)(lr=0.015).")
        if (offload := env.offload_policy) != "never":
            wrong = f"model.config.env.offload={offload}, but model.config.refinement trains the world model"
            raise ConfigError(f"{wrong}, which stays on the GPU: set offload=never, or model.config.refinement=null.")
        if model.world.net.state_head is not None and config.recordings is None:
            raise ConfigError(
                "The world model predicts the robot's state, which model.config.true_env does not show after each"
                " action: set model.config.refinement.recordings to a folder of episodes of scripts.collect."
            )
        require_refinable(model, config, whole.rl.micro_batches)
        observed, _ = shown.reset(options=dict(env_ids=[0], task_ids=[0], trial_ids=[0], seeds=[0]))
        _, height, width, _ = whole_pictures(observed, len(env.views)).shape
        if true_env is not None:
            true_env.views = env.views  # its frames show them all
        if config.data is not None and any(key in config.data for key in CAMERA_KEYS):
            require_same(env.views, views_of_data(config.data), "The world model", DATA, "name its cameras there.")
        return cls(config, model, lazy_config.instantiate(config.data), (height, width))

    def due_phase(self, experiences: int) -> int | None:
        """The phase that is due after so many experiences of the policy; None where none is."""
        phase, rest = divmod(experiences, self.config.every)
        # a world model of recordings is refined when the policy has changed, by what the new one does
        return None if rest or (self.config.recordings is not None and phase == 0) else phase

    def true_starts(
        self, data: Any, phase: int, seed: int, dims: ParallelDims, size: int
    ) -> Iterator[tuple[Starts, float]]:
        """This rank's share of a phase's starts, which are drawn from those of training, ``size`` at a time, and the
        temperature that they are played at."""
        config = self.config
        numbers = range(phase * config.episodes, (phase + 1) * config.episodes)[dims.dp_rank :: dims.dp_size]
        seeds = [random.derive_seed(seed, number, "true") for number in numbers]
        items = [data[seed % len(data)] for seed in seeds]
        starts = Starts(
            task_ids=[int(item["task_id"]) for item in items],
            trial_ids=[int(item["trial_id"]) for item in items],
            seeds=[seed % 2**31 for seed in seeds],
            draws=seeds,
        )
        count = len(config.temperatures)
        for i, temperature in enumerate(config.temperatures):
            own = starts.part(slice(i * len(starts) // count, (i + 1) * len(starts) // count))
            for first in range(0, len(own), size):
                yield own.part(slice(first, first + size)), float(temperature)

    @torch.no_grad()
    def add(self, parts: Iterable[Trajectories], seed: int, phase: int) -> None:
        """Windows of true episodes, of all ranks: the newest from now on. Of each part only its windows are kept."""
        span = self._num_frames - 1
        generator = random.generator(seed, phase * distributed.world_size() + distributed.rank(), "windows")
        found, has_moved = list[Windows](), False
        for played in parts:
            moves, places = chosen_windows(played, span, self.config.window_stride, self.config.windows, generator)
            if moves and not has_moved:
                found, has_moved = [], True  # what was chosen before shows no motion
            if moves == has_moved:
                for first in range(0, len(places), CLIPS_AT_ONCE):
                    found.append(self._kept(played, places[first : first + CLIPS_AT_ONCE]))
        problem = f"None of the true episodes is valid and has the {span} executed actions of a window. See the log"
        _begin(self.windows, found, f"{problem}, and let episodes run on (terminate_on_success=False).")

    @torch.no_grad()
    def add_recorded(self, env: WorldModelEnv, phase: int, run: str, seed: int, dims: ParallelDims) -> dict[str, float]:
        """Windows of the episodes that the robot played with the policy of a run, evenly spread over them: the newest
        from now on. Before that the figures of what the world model imagines of their actions, which it gives."""
        config = self.config
        data = open_recorded_phase(config, phase, run, env, self._num_frames, self.picture)
        seed = random.derive_seed(seed, phase, "recorded") % 2**31
        own = range(dims.dp_rank, len(data.source), dims.dp_size)
        mine = [*outcomes(data, env, config.success_column, seed, own)]
        figures = figures_of([one for part in distributed.all_gather_object(mine) for one in part])
        listed = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        log.info("phase %d: %d episodes of the robot, %s", phase, len(data.source), listed)
        assert data.windows is not None
        chosen = data.windows.spread(self.windows.num_kept)[dims.dp_rank :: dims.dp_size]
        found = []
        for first in range(0, len(chosen), CLIPS_AT_ONCE):
            items = [data[i] for i in chosen[first : first + CLIPS_AT_ONCE]]
            found.append({LATENTS_KEY: self._encoded(torch.stack([item["video"] for item in items]))})
            found[-1] |= {key: torch.stack([item[key] for item in items]) for key in self.windows.keys[1:]}
        _begin(self.windows, found, f"{data.source} holds no window.")
        return figures

    def _kept(self, played: Trajectories, places: list[tuple[int, int]]) -> Windows:
        """Latents and scaled actions of some windows."""
        frames = played.frames_E_F_H_W_C
        assert frames is not None
        raw_E_L_D = _by_step(played.actions_M_E_A_D, frames.shape[1] - 1)
        video = torch.stack([frames[i, start : start + self._num_frames] for i, start in places])
        raw = torch.stack([raw_E_L_D[i, start : start + self._num_frames - 1] for i, start in places])
        actions = self._imagination.transformed(raw.cpu().numpy())
        return {LATENTS_KEY: self._encoded(video.permute(0, 4, 1, 2, 3)), ACTION_KEY: actions}

    def _encoded(self, video_B_C_F_H_W: Tensor) -> Tensor:
        """Latents in the scale of the network, as they are kept."""
        world = self._imagination.world
        return (world.encode(video_B_C_F_H_W) / world.config.sigma_data).to(KEPT_DTYPE).cpu()

    def batch(self, seed: int, position: int) -> dict[str, Any]:
        """A batch of supervised training; ``position`` is the place of its first window among all that are drawn."""
        config, windows = self.config, self.windows
        num_earlier = config.earlier if windows.num_earlier else 0
        num_newest = config.newest + config.earlier - num_earlier
        parts = [self._drawn("newest", windows.num_newest, num_newest, seed, position)]
        if num_earlier:
            parts.append(self._drawn("earlier", windows.num_earlier, num_earlier, seed, position))
        if config.old:
            parts.append(self._old(seed, position))
        if any(SHOWN_KEY in part for part in parts):  # old data of which some cameras were not filmed
            all_views = torch.ones_like(parts[-1][SHOWN_KEY][:1])
            parts = [{SHOWN_KEY: all_views.expand(len(part[ACTION_KEY]), -1), **part} for part in parts]
        own, world = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}, self._imagination.world
        size = len(own[LATENTS_KEY])
        one = {"fps": torch.tensor(float(world.config.fps)), **frame_item(self.picture)}
        one |= text_item(torch.zeros(1, world.net.text_channels), torch.ones(1))
        batch: dict[str, Any] = {key: value.expand(size, *value.shape).clone() for key, value in one.items()}
        batch |= {**own, PROBE_KEY: self._probe.expand(size, *self._probe.shape)}
        batch[TRANSFORM_KEY] = [self._imagination.transform.to_json()] * size
        batch[POSITION_KEY] = torch.arange(position, position + size)
        return batch

    def _drawn(self, kind: str, have: int, count: int, seed: int, position: int) -> Windows:
        rows = torch.randint(have, (count,), generator=random.generator(seed, position, f"refinement/{kind}"))
        return {key: kept[rows.to(kept.device)].float() for key, kept in self.windows.rows(kind).items()}

    def _old(self, seed: int, position: int) -> Windows:
        data, world = self._data, self._imagination.world
        items: list[Mapping[str, Any]] = []
        with random.preserved():
            for i in range(self.config.old):
                random.seed_host(seed, position + i, "refinement/old")
                items.append(data[int(numpy.random.randint(len(data)))])
        found = {key: torch.stack([item[key] for item in items]) for key in (*BUFFERS, SHOWN_KEY) if key in items[0]}
        if LATENTS_KEY not in found:
            video = torch.stack([item["video"] for item in items])
            found[LATENTS_KEY] = world.encode(video) / world.config.sigma_data
        for key, rows in self.windows.rows("newest").items():
            if key not in found or found[key].shape[1:] != rows.shape[1:]:
                shown = list(found[key].shape[1:]) if key in found else "none"
                raise DataError(
                    f"The world model learns from {BUFFERS[key]} {list(rows.shape[1:])}, but a sample of"
                    f" {DATA} has {shown}: give the data that it was trained on."
                )
        return {key: value.to(self.windows.counts.device).float() for key, value in found.items()}


def _begin(windows: WindowBuffer, found: Sequence[Windows], problem: str) -> None:
    """The windows that all ranks have found are the newest."""
    nothing = {key: rows[:0].cpu() for key, rows in windows.rows("newest").items()}
    own = {key: torch.cat([rows, *(part[key] for part in found)]) for key, rows in nothing.items()}
    of_ranks = distributed.all_gather_object(own)
    of_all = {key: torch.cat([part[key] for part in of_ranks]) for key in own}
    if not len(of_all[ACTION_KEY]):  # on all ranks
        raise DataError(problem)
    windows.begin_phase(of_all)


def require_refinable(model: Video2WorldModel, config: RefinementConfig, micro_batches: int) -> None:
    """Raise where a world model that learns from rewards does not make one update of each batch of windows."""
    if not isinstance(model, FlowGRPOModel):
        return
    rl, key = model.rl, "model.config.world_model.config.rl"
    keeps = rl.kl_beta or rl.weight_copy_decay_type or not rl.on_policy
    if rl.updates * rl.minibatches > 1 or rl.max_rollouts > 1 or keeps:
        cure = "minibatches=1, max_rollouts=1, kl_beta=0, weight_copy_decay_type=0 and on_policy=True"
        raise ConfigError(f"model.config.refinement takes one update of each batch: set {key}.updates=1, {cure}.")
    samples = (config.newest + config.earlier + config.old) * rl.num_rollout
    parts = -(-samples // rl.rollout_batch) * rl.num_trained
    if parts != micro_batches:
        of_world = f"{samples} clips by {key}.rollout_batch={rl.rollout_batch}, {rl.num_trained} trained steps"
        raise ConfigError(
            f"An update of the world model has {parts} micro-batches ({of_world}), but one of the policy"
            f" model.config.rl.micro_batches={micro_batches}: they must be equal."
        )


def chosen_windows(
    played: Trajectories, span: int, stride: int, count: int, generator: torch.Generator
) -> tuple[bool, list[tuple[int, int]]]:
    """Episode and first step of at most ``count`` windows of each valid episode, of which every action was executed.

    Something besides the robot moves in them, where it does so in any window, which comes first; if nobody knows, it
    may.
    """
    assert played.frames_E_F_H_W_C is not None
    num_steps = played.frames_E_F_H_W_C.shape[1] - 1
    executed_E_L, moved_E_L = _by_step(played.executed_M_E_A, num_steps), played.moved_E_L
    starts = range(0, num_steps + 1 - span, stride)
    orders = [torch.randperm(len(starts), generator=generator).tolist() for _ in range(len(played))]
    whole = [
        [starts[k] for k in order if played.is_valid_E[i] and executed_E_L[i, starts[k] : starts[k] + span].all()]
        for i, order in enumerate(orders)
    ]
    moving = [
        [start for start in some if moved_E_L is None or moved_E_L[i, start : start + span].any()]
        for i, some in enumerate(whole)
    ]
    chosen = moving if any(moving) else whole  # a policy that touches nothing yet: there is no more to learn from
    return any(moving), [(i, start) for i, some in enumerate(chosen) for start in some[:count]]


def _by_step(values_M_E_A: Tensor, num_steps: int) -> Tensor:
    """Values of each action of decisions, [M, E, A, ...], in the order of an episode's steps: [E, L, ...]."""
    per_decision = num_steps // len(values_M_E_A)
    return values_M_E_A[:, :, :per_decision].transpose(0, 1).flatten(1, 2)


# --- phases whose true episodes a robot played


def open_recorded_phase(
    config: RefinementConfig,
    phase: int,
    policy: str,
    env: WorldModelEnv,
    num_frames: int,
    picture: tuple[int, int],
) -> LeRobotActionDataset:
    """The episodes of a phase, read as ``config.data`` reads those that the world model was trained on; raises where
    they were not played yet. ``policy`` is the run whose newest checkpoint plays them."""
    folder = Path(config.recordings) / f"phase_{phase:03d}"
    source = LeRobotSource.open(folder) if (folder / "meta" / "info.json").is_file() else None
    count = 0 if source is None else len(source)
    if source is None or count < config.episodes:
        camera = "" if len(env.views) == 1 else f" --camera {AND.join(env.views)}"
        raise DataError(
            f"Phase {phase} of the refinement waits for true episodes: {folder} has {count} of {config.episodes}"
            f" (model.config.refinement.episodes). Play the policy of {policy}, whose newest checkpoint is the present"
            " one, and record each episode there, a LeRobot data set with next.success; in a simulator: python -m"
            f" scripts.collect --suite SUITE --policy {policy} --episodes {config.episodes} --first"
            f" {phase * 10**5}{camera} --out {folder}. Then start this run again: it goes on from here."
        )
    size = [picture[0] // len(env.views), picture[1]]  # of each view
    own: dict[str, Any] = dict(root=str(folder), num_frames=num_frames, video_size=size, text_width=1)
    own |= dict(data_split="full", split_file=None, load_t5_embeddings=False, missing_cameras="error")
    own["action_transform"] = env.imagination.transform
    if env.imagination.action_keys:
        keys = action_keys_in(source, env.imagination)
        own["action_keys"] = None if keys is None else list(keys)
    if env.head is not None:
        own["state"] = env.imagination.world.config.state
    if config.data is not None and "root" in takes(target_of(config.data))[0]:
        found: LeRobotActionDataset = lazy_config.instantiate(config.data, **own)
    else:
        found = LeRobotActionDataset(**own, camera=None if len(env.views) == 1 else AND.join(env.views))
    cure = "record the phase with the actions, the rate and the state that the world model learnt from."
    env.contract.require(found.action_transform.contract, "The world model", f"{folder} has", cure)
    return found


def outcomes(
    data: LeRobotActionDataset, env: WorldModelEnv, column: str, seed: int, episodes: Sequence[int]
) -> Iterator[Outcome]:
    """The true outcome of each of these episodes where it is known, and the imagined one of its actions from the first
    picture."""
    source, true = data.source, recorded_outcomes(data.source.files, column)
    by_length: dict[int, list[int]] = {}
    for i in episodes:
        if true[i] is not None and (length := (int(source.lengths[i]) - 1) // data.stride):
            by_length.setdefault(length, []).append(i)
    for length, numbers in by_length.items():
        frames = data.stride * numpy.arange(length + 1)
        actions = torch.from_numpy(numpy.stack([source.actions(i, frames) for i in numbers])).float()
        with_first = [data.first_picture(i) for i in numbers]
        seeds = [(seed + i) % 2**31 for i in numbers]
        given = (env.imagination, torch.stack(with_first), actions)
        video = replayed(*given, seeds=seeds, num_steps=env.sampling.num_steps)
        tasks = {"task_description": [source.files.caption(i) for i in numbers]}
        judged = env.reward.judge(video[:, -1:], tasks)
        values, successes = judged.value_E_F[:, -1].tolist(), judged.success_E_F[:, -1].tolist()
        yield from ((bool(true[i]), bool(one), value) for i, one, value in zip(numbers, successes, values, strict=True))


def figures_of(found: Sequence[Outcome]) -> dict[str, float]:
    """Imagined against true success, and how well imagined values separate the outcomes (0.5: not at all)."""
    if not found:
        return {}
    true, imagined, value = (Tensor(column) for column in zip(*found, strict=True))
    compared = Comparison.of(imagined, true, torch.ones(len(found), dtype=torch.bool))
    figures = {
        "success": compared.true_rate,
        "imagined_success": compared.imagined_rate,
        "agreement": compared.agreement,
        "imagined_value": float(value.mean()),
        "area": area_under_curve(value.double().numpy(), true.bool().numpy()).value,
    }
    return {f"robot_{name}": one for name, one in figures.items() if math.isfinite(one)}
