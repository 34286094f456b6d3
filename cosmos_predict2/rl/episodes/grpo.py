# SPDX-License-Identifier: Apache-2.0
"""A policy learns from rewards: in a simulator, or in what a world model imagines.

`collect` plays groups of episodes that share their start and compares each with its group, `minibatches` yields their
decisions, and `part_loss` computes their probabilities anew, with gradients. With a refinement, the world model is
trained in turn on what the policy really does: supervised, or from rewards where it is a `FlowGRPOModel`. The policy
is ``net``; a world model that is trained is ``world_model``, one that is only held is in no checkpoint.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.envs.suites import environment
from cosmos_predict2.rl.envs.world_model import WorldModelEnv, require_inputs
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.decisions import (
    Decisions,
    FreshDraws,
    cloning_loss,
    forward_loss,
    fresh_draws,
    in_minibatches,
    log_probs,
    misfits,
    policy_loss,
    predicted,
    require_drawn,
    rows_that_count,
    velocities,
    with_episodes,
)
from cosmos_predict2.rl.episodes.episode_starts import EpisodeStarts, settle_num_tasks
from cosmos_predict2.rl.episodes.episodes import (
    LocalRollout,
    RolloutDefaults,
    RolloutSource,
    Starts,
    Trajectories,
    release,
    validation_starts,
    without_unreliable,
)
from cosmos_predict2.rl.episodes.policy_evaluation import Rate, draws_of, played_along
from cosmos_predict2.rl.episodes.refinement import Refinement, build_world_model
from cosmos_predict2.rl.interfaces import Mode, Policy, PolicyDefaults, VecEnv, completed
from cosmos_predict2.rl.learner import Experience, Facts, RLModel, require_ratio_one
from cosmos_predict2.rl.objectives import chosen, groups_within, objective_of
from cosmos_predict2.rl.policies.files import about_of, remember
from cosmos_predict2.rl.policies.network import (
    cast,
    check_sharding,
    deciding,
    gathered,
    parallelize_policy,
    tolerance_of,
)
from cosmos_predict2.rl.trust import LEARNT_IN, LearntIn
from cosmos_predict2.world_model.config import PRECISIONS
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire import random
from imaginaire.buildable import target_of
from imaginaire.config import lazy_config
from imaginaire.config.nodes import as_config
from imaginaire.data.stream import POSITION_KEY, data_sets
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import ConfigError
from imaginaire.findings import CheckContext, Finding, error
from imaginaire.optim import schedules
from imaginaire.optim.schedules import PartsOptimizer, PartsScheduler

log = logging.getLogger(__name__)

KEY = "model.config"
PUBLISHED_METRICS = {  # as RLinf's runs show them, where eval/success_once is a simulator's
    "success": "env/success_once",
    "reward_mean": "env/return",
    "episode_len": "env/episode_len",
    "advantage_max": "rollout/advantages_max",
    "advantage_min": "rollout/advantages_min",
    "policy_loss": "actor/policy_loss",
    "ratio_mean": "actor/ratio",
    "clip_fraction": "actor/clip_fraction",
    "dual_clip_fraction": "actor/dual_cliped_ratio",
    "approx_kl": "actor/approx_kl",
    "entropy": "actor/entropy_loss",
    "greedy_success": "eval/success_once",
    "imagined_greedy_success": "eval/imagined_success_once",
}
POLICY, WORLD_MODEL = "policy", "world_model"
IMAGINED = ("imagined_greedy_success", "imagined_success")  # of a validation
WAVES = 4  # of a refinement's episodes whose pictures are kept together: fewer let environments wait at the ends


class VLAGRPOModel(RLModel):
    """Group-relative policy optimization of a policy in an environment."""

    batch_kinds = (POLICY, WORLD_MODEL)
    memory_advice = (
        "Try model.config.env.offload=phase (a world model without refinement leaves the GPU while the policy is"
        " trained; RLinf's enable_offload), a smaller model.config.env.batch_size (environments imagined at once) or"
        " model.config.env.num_envs, more model.config.rl.micro_batches with as many in trainer.grad_accum_iter"
        " (actor.micro_batch_size), and see by nvidia-smi that no other process holds the GPU."
    )
    rl: VLARLConfig
    rl_key = f"{KEY}.rl"
    progress_counts: Tensor
    _draws: torch.Generator  # of `cloning_loss`, anew for each experience

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config = as_config(VLAGRPOConfig, config, KEY)
        self.rl = config.rl
        if config.policy is None:
            raise ConfigError(f"{KEY}.policy is not set: it is what decides and learns.")
        if config.env is None:
            raise ConfigError(
                f"{KEY}.env is not set: it is where the policy learns. Give a simulator, {KEY}.env=gym:ID or"
                f" gym:MODULE:ID, such as {KEY}.env=gym:gym_pusht:gym_pusht/PushT-v0, or the name of another suite."
            )
        for field_name, text in _problems(config):
            raise ConfigError(f"{KEY}.rl.{field_name}: {text}.")
        self.learnt_in = LearntIn(config)
        self.precision = PRECISIONS[config.precision]
        self.net: nn.Module = completed(lazy_config.instantiate(config.policy), PolicyDefaults)
        if begun := config.policy.get("path") if isinstance(config.policy, Mapping) else None:
            remember(self.policy, about_of(str(begun)))
        for field_name, text in misfits(self.policy, self.rl):
            raise ConfigError(f"{KEY}.rl.{field_name}: {text}.")
        # before it is moved: no device needs memory for weights that are wider than trained ones
        cast(self.net, self.weight_dtype, is_uniform=bool(config.fsdp_shard_size))
        self._held: dict[str, Any] = {}  # no modules of this one: what is only held is in no checkpoint
        self.refinement: Refinement | None = None
        env_arguments = {}
        if config.world_model is not None:
            self._held[WORLD_MODEL] = model = build_world_model(config.world_model)
            card = read_card(str(model.config.model_manager_config.dit_path or ""))
            env_arguments["imagination"] = Imagination(model.world, card.views, card.action_keys)
        self.env: VecEnv = environment(config.env, self.policy, **env_arguments)
        require_inputs(self.env, self.policy)
        if self.rl.mask_unreliable and self.env.num_noises < 2:
            found = f"{KEY}.env.num_noises={self.env.num_noises}"
            raise ConfigError(f"{KEY}.rl.mask_unreliable=true compares two noises, but {found}: set it to 2.")
        self.true_env: VecEnv | None = environment(config.true_env, self.policy)
        eval_env: VecEnv | None = environment(config.eval_env, self.policy)
        self.eval_env = eval_env or self.true_env or self.env
        self.validation_metric = "greedy_success" if self.eval_env.imagination is None else "imagined_greedy_success"
        is_imagined = self.eval_env is self.env and self.env.imagination is not None
        self.validation_note = self.learnt_in.note(self.validation_metric, is_imagined)
        if is_imagined:
            log.warning("there is neither eval_env nor true_env: validation is imagined, too (imagined_greedy_success)")
        if config.refinement is not None:
            self.world_model: Any = self.held_world_model  # now a part of this module, trained and saved
            self.refinement = Refinement.of(config, self.world_model, self.env, self.true_env)
        rollout: dict[str, Any] = dict(policy=self.net, env=self.env, execute=self.rl.execute)
        self.source: RolloutSource = (
            LocalRollout(**rollout) if config.rollout is None else lazy_config.instantiate(config.rollout, **rollout)
        )
        completed(self.source, RolloutDefaults)
        if self.source.is_elsewhere and self.refinement is None and self.env.imagination is not None:
            self.env.offload_policy = "phase"  # the workers have their own world models
        # experiences of the policy that are over; steps of the present refinement
        self.register_buffer("progress_counts", torch.zeros(2, dtype=torch.int64))
        self._train_starts: Any = None  # the data set of training, from `on_data`
        self._num_held_out = 0  # starts of validation, likewise
        self._figures_of_phase: dict[str, float] = {}
        self._dims = ParallelDims()

    # --- parts

    def data_facts(self, data_sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The digests of what the policy learns in, so that nobody lets it be judged by the same."""
        return {LEARNT_IN: {name: value for name, value in self.learnt_in.inputs.items() if name != POLICY}}

    @property
    def held_world_model(self) -> Video2WorldModel | None:
        return self._held.get(WORLD_MODEL)

    @property
    def policy(self) -> Policy:
        return self.net  # type: ignore[return-value]

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        config = as_config(VLAGRPOConfig, arguments["config"], KEY)
        for field_name, text in _problems(config):
            yield error(f"{KEY}.rl.{field_name}", text)
        if (run := context.config) is not None and run.trainer.grad_accum_iter != config.rl.micro_batches:
            wanted = config.rl.micro_batches
            text = f"{run.trainer.grad_accum_iter}, but a minibatch has {KEY}.rl.micro_batches={wanted} parts"
            yield error("trainer.grad_accum_iter", text, f"Set trainer.grad_accum_iter={wanted}")
        yield from check_sharding(config.fsdp_shard_size, context)

    # --- set-up

    def on_train_start(self, memory_format: torch.memory_format = torch.preserve_format) -> None:
        device = next(self.net.parameters()).device
        if (model := self.held_world_model) is not None:
            model.seed = self.seed
            model.to(device)
            model.on_train_start(memory_format)
            if self.refinement is None:
                model.requires_grad_(False).eval()

    def parallelize(self, dims: ParallelDims) -> None:
        self._dims = dims
        parallelize_policy(self.net, dims, self.config.fsdp_shard_size, recompute=self.config.recompute)
        if (model := self.held_world_model) is not None:
            model.parallelize(dims)
        if self.refinement is not None and self.refinement.config.episodes < dims.dp_size:
            found = f"{KEY}.refinement.episodes={self.refinement.config.episodes}"
            raise ConfigError(f"{found}: each of the {dims.dp_size} data-parallel ranks plays some: set more.")
        if self.rl.kl_beta:
            self.keep_reference()
        self.keep_old(self.rl.weight_copy_decay_type)

    def on_data(self, *loaders: Any) -> None:
        if self.refinement is not None:
            self._train_starts = data_sets(loaders[0])[0]  # the outermost
        if len(loaders) > 1:
            self._num_held_out = sum(len(data) for data in data_sets(loaders[1]) if isinstance(data, EpisodeStarts))
        settle_num_tasks(loaders, (self.env, self.eval_env), is_remote=self.config.rollout is not None)

    def init_optimizer_scheduler(self, optimizer_cfg: Any, scheduler_cfg: Any) -> Any:
        optimizer = lazy_config.instantiate(optimizer_cfg, model=self.net)
        schedule = lazy_config.instantiate(scheduler_cfg)
        if self.refinement is None:
            return optimizer, schedules.ConfiguredLR(optimizer, schedule)
        config = self.refinement.config
        other = lazy_config.instantiate(config.optimizer, model=self.world_model)
        once = schedules.constant() if config.scheduler is None else lazy_config.instantiate(config.scheduler)
        optimizers = PartsOptimizer({POLICY: optimizer, WORLD_MODEL: other})
        repeated = schedules.Repeated(once, config.steps)
        return optimizers, PartsScheduler(optimizers, {POLICY: schedule, WORLD_MODEL: repeated})

    def checkpoint_state(self) -> dict[str, Tensor]:
        return {**super().checkpoint_state(), **self.copied_weights()}

    def published_name(self, name: str) -> str | None:
        return PUBLISHED_METRICS.get(name)

    # --- experience

    def at_boundary(self) -> bool:
        return super().at_boundary() and (self.refinement is None or self.world_model.at_boundary())

    def on_before_zero_grad(self, optimizer: Any, scheduler: Any, iteration: int) -> None:
        super().on_before_zero_grad(optimizer, scheduler, iteration)
        if self.policy.on_trainer_step is not None:
            self.policy.on_trainer_step(iteration)
        if self.refinement is not None:
            self.world_model.on_before_zero_grad(optimizer, scheduler, iteration)

    def batch_kind(self, batch: Any) -> str:
        is_of_policy = isinstance(batch, Decisions) or (isinstance(batch, Mapping) and "trial_id" in batch)
        return POLICY if is_of_policy else WORLD_MODEL

    def experience(self, batch: Mapping[str, Any], batches: Iterator[Mapping[str, Any]]) -> Experience:
        if self.env.release is not None:  # simulators of two kinds at once may not fit into the host's memory
            release(*(one for one in (self.eval_env, self.true_env) if one is not self.env))
        if self.source.is_elsewhere:
            self.env.offload()
        with self.phase("rollout"), self.sampling_policy():
            self.source.sync(self.policy)
        found = super().experience(batch, batches)
        self.env.offload()  # leaves the GPU to the policy, where it is asked to
        return found

    def collect(self, batch: Mapping[str, Any], first: Trajectories | None = None) -> Experience:
        is_elsewhere = self.source.is_elsewhere
        with self.phase("rollout"), self.sampling_policy(), nullcontext() if is_elsewhere else deciding(self.net):
            played = self.source.collect(starts := self.starts(batch), "sample", self.progress)
        facts = self._facts(played)
        if self.rl.mask_unreliable:
            assert played.disagrees_M_E is not None
            facts["unreliable_rate"] = float(played.disagrees_M_E[played.executed_M_E_A.any(dim=2)].float().mean())
            played = without_unreliable(played, is_paid_last=self.env.scoring.reward_on == "last")  # type: ignore[attr-defined]
        advantage = self._advantages(played, starts)
        return Experience(played, advantage, (advantage != 0).any(dim=1), facts)

    def starts(self, batch: Mapping[str, Any]) -> Starts:
        """The episodes of a batch of starts, those of a group one after the other."""
        size = self.rl.group_size
        positions = batch[POSITION_KEY].tolist() if POSITION_KEY in batch else list(range(len(batch["trial_id"])))
        rows = [(i, positions[i], member) for i in range(len(positions)) for member in range(size)]
        of_world = "world" if self.rl.shared_noise else "world/{}"
        return Starts(
            task_ids=[int(batch["task_id"][i]) for i, _, _ in rows],
            trial_ids=[int(batch["trial_id"][i]) for i, _, _ in rows],
            seeds=[random.derive_seed(self.seed, place, of_world.format(m)) % 2**31 for _, place, m in rows],
            draws=[random.derive_seed(self.seed, place, f"policy/{m}") for _, place, m in rows],
        )

    def _advantages(self, played: Trajectories, starts: Starts) -> Tensor:
        """[G, M]; zeros of groups that teach nothing. Where episodes are imitated, 1 for the cloned one of a group,
        whatever their actions are worth."""
        rl, groups = self.rl, self._by_group(played)
        if kind := objective_of(rl.objective).imitates:
            draws = [random.generator(first, 0, "imitated") for first in starts.draws[:: rl.group_size]]
            advantage = chosen(kind, *groups, draws, rl.advantage.min_std)
        else:
            advantage = rl.advantage.limited(rl.advantage.of(*groups))
        is_kept_G = groups_within(*groups, lower=rl.lower_bound, upper=rl.upper_bound)
        return torch.where(is_kept_G[:, None], advantage, 0.0)

    def _by_group(self, played: Trajectories) -> tuple[Tensor, Tensor]:
        """Returns and whether they are valid, a group in each row."""
        size = self.rl.group_size
        return played.return_E.cpu().unflatten(0, (-1, size)), played.is_valid_E.cpu().unflatten(0, (-1, size))

    def _facts(self, played: Trajectories) -> Facts:
        valid = played.is_valid_E
        returns = played.return_E[valid]
        steps = played.executed_M_E_A[:, valid].sum(dim=(0, 2)).float()
        success = float(played.success_E[valid].float().mean())
        return {
            "reward_mean": float(returns.mean()),
            "reward_std": float(returns.std()),
            "success": success,
            **(self.learnt_in.corrected({"success": success}) if self.learnt_in.figures else {}),
            "episode_len": float(steps.mean()),
            "valid_rate": float(valid.float().mean()),
        }

    def minibatches(self, experience: Experience, batch: Mapping[str, Any]) -> tuple[int, Iterator[Decisions]]:
        """Every decision that teaches something ``updates`` times, in ``minibatches`` of chance."""
        rl, played = self.rl, experience.record
        self.count_failure(not played.is_valid_E.any(), "episode")
        is_kept_G = groups_within(*self._by_group(played), lower=rl.lower_bound, upper=rl.upper_bound)
        is_kept_E = is_kept_G.repeat_interleave(rl.group_size)
        played = replace(played, is_valid_E=played.is_valid_E & is_kept_E)  # out of bounds, as if they were lost
        whole = Decisions(
            record={key: value.flatten(0, 1) for key, value in played.record.items()},
            old_log_prob_B_K_N=None,
            advantage_B=experience.advantage_G_M.flatten().repeat(len(played.reward_M_E_A)),
            mask_B_A=(played.executed_M_E_A & played.is_valid_E[None, :, None]).flatten(0, 1),
            facts={**experience.facts, **experience.group_facts},
        )
        rows = rows_that_count(whole, rl)
        first = int(batch[POSITION_KEY][0]) if POSITION_KEY in batch else 0
        part = (rows, -(-len(rows) // (rl.minibatches * rl.micro_batches)), next(self.net.parameters()).device)
        if rl.is_ratio:
            whole = self._with_log_probs(whole, played, *part)
        else:
            fresh = fresh_draws(self.policy.flow_times, rl, len(played.reward_M_E_A), len(played), self.seed, first)
            whole = replace(whole, fresh=self._with_velocities(whole.record, fresh, *part))
        whole = with_episodes(whole, played, rl)
        self._draws = random.generator(self.seed, first, "cloning")
        return rl.updates * rl.minibatches * rl.micro_batches, in_minibatches(whole, rows, rl, self.seed, first)

    def _with_log_probs(
        self, whole: Decisions, played: Trajectories, rows: Tensor, size: int, device: torch.device
    ) -> Decisions:
        """The decisions with what they were drawn with, and the log-probabilities of a reference."""
        part = (whole.record, rows, size, device)
        with deciding(self.net):
            old, mean = log_probs(self.policy, *part)
            whole = replace(whole, old_log_prob_B_K_N=old, old_mean_B_K_N=mean)
        tolerance = tolerance_of(self.net) if self.rl.draw_tolerance is None else self.rl.draw_tolerance
        away = require_drawn(played.log_prob_M_E_K_N, whole, rows, tolerance)
        whole = replace(whole, facts={**whole.facts, "draw_difference": away})
        if self._reference is not None:
            with self.reference(), deciding(self.net):
                whole = replace(whole, reference_log_prob_B_K_N=log_probs(self.policy, *part)[0])
        return whole

    def _with_velocities(self, record: Mapping[str, Tensor], fresh: FreshDraws, *part: Any) -> FreshDraws:
        """The draws with the velocities of the weights that decided, and of a reference."""
        given = (self.policy, record, fresh, *part)
        if self.rl.updates * self.rl.minibatches > 1 or self._old is not None:
            with self.sampling_policy(), deciding(self.net):
                fresh = replace(fresh, v_old_B_L_K_N=velocities(*given))
        if self._reference is not None:
            with self.reference(), deciding(self.net):
                fresh = replace(fresh, v_reference_B_L_K_N=velocities(*given))
        return fresh

    def at_end_of_experience(self) -> None:
        self.progress_counts.copy_(torch.tensor([int(self.progress_counts[0]) + 1, 0]))

    # --- refinement of the world model

    def between_experiences(self) -> Iterator[Mapping[str, Any]]:
        """The batches that are left of a refinement, where one is due."""
        if (refinement := self.refinement) is None:
            return
        config = refinement.config
        experiences, steps = self.progress_counts.tolist()
        if (phase := refinement.due_phase(experiences)) is None:
            return
        if steps == 0:
            with self.phase("true_rollout"):
                if self.true_env is not None and config.recordings is None:
                    at_once = WAVES * self.true_env.num_envs
                    starts = refinement.true_starts(self._train_starts, phase, self.seed, self._dims, at_once)
                    refinement.add((self._played_truly(self.true_env, *some) for some in starts), self.seed, phase)
                else:
                    assert isinstance(self.env, WorldModelEnv)
                    run = self.run_dir or "this run"
                    self._figures_of_phase = refinement.add_recorded(self.env, phase, run, self.seed, self._dims)
        size = config.newest + config.earlier + config.old
        for step in range(steps, config.steps):
            self._is_open, self._left = True, 0
            self.progress_counts[1] = step + 1
            number = (phase * config.steps + step) * self._dims.dp_size + self._dims.dp_rank
            yield from self.world_model.train_batches([refinement.batch(self.seed, number * size)])

    def _played_truly(self, env: VecEnv, starts: Starts, temperature: float) -> Trajectories:
        source = LocalRollout(self.policy, env, self.rl.execute, True, temperature, False)
        with deciding(self.net):
            return source.collect(starts, "sample", self.progress)

    # --- one micro-batch

    def training_step(self, batch: Any, iteration: int) -> tuple[dict[str, Any], Tensor]:
        if isinstance(batch, Decisions):
            return super().training_step(batch, iteration)
        output, loss = self.world_model.training_step(batch, iteration)
        self._has_gradient = self.world_model.has_gradient()
        is_first = int(self.progress_counts[1]) <= self.rl.micro_batches
        figures = self._figures_of_phase if is_first else {}  # logged once a phase
        if isinstance(self.world_model, FlowGRPOModel):
            return {**{f"refinement_{name}": value for name, value in output.items()}, **figures}, loss
        return {"edm_loss": output["edm_loss"], **figures}, loss

    def part_loss(self, part: Decisions) -> tuple[dict[str, Any], Tensor]:
        given = (part.advantage_B, part.mask_B_A, self.rl)
        options: Any = dict(episode_sum_B=part.episode_sum_B, num_episodes=part.num_episodes)
        if part.fresh is not None:
            found = forward_loss(predicted(self.policy, part.record, part.fresh), part.fresh, *given, **options)
        else:
            assert part.old_log_prob_B_K_N is not None
            is_cloned = bool(objective_of(self.rl.objective).imitates) and self.policy.cloning_loss is not None
            cloning = cloning_loss(self.policy, part, self._draws) if is_cloned else None
            options |= dict(old_mean_B_K_N=part.old_mean_B_K_N, reference_B_K_N=part.reference_log_prob_B_K_N)
            log_prob, old_B_K_N = self.policy.log_prob(part.record), part.old_log_prob_B_K_N
            found = policy_loss(log_prob, old_B_K_N, *given, cloning=cloning, **options)
        if part.is_before_update and "ratio_min" in found.watched:
            away = torch.stack([1 - found.watched["ratio_min"], found.watched["ratio_max"] - 1]).max()
            why = "log_prob does not compute what the policy decided by. Look for dropout, for state that act changes"
            require_ratio_one(float(away), self.rl.ratio_tolerance, f"{why}, or for a record that lacks something.")
        return found.watched, found.loss * part.share

    # --- the policy as it counts

    @torch.no_grad()
    def validation_step(self, batch: Mapping[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        """Greedy success where the policy is judged, with half of its 95 % interval; and imagined beside true success
        of the first starts: of the same actions, drawn as in training, where ``true_env`` has the same starts, else
        greedy, each with actions of its own."""
        tasks, trials = ([int(i) for i in batch[key]] for key in ("task_id", "trial_id"))
        once = validation_starts(tasks, trials)
        draws = draws_of(self.policy, "greedy", self.config.validation_draws)
        starts = once.repeated(draws)
        if self.eval_env is not self.env:
            release(self.env, self.source)
        greedy = self._judged(self.eval_env, starts, "greedy")
        valid = greedy.is_valid_E
        success = greedy.success_E[valid].float().mean()
        low, high = Rate.of(greedy.success_E, valid, starts).interval
        share = len(once) / max(self._num_held_out, len(once))  # of all that the mean over batches is of
        kind = self.validation_metric.removesuffix("_success")
        output: dict[str, Any] = {
            f"{kind}_success": success,
            f"{kind}_success_margin": (high - low) / 2 * share**0.5,
            f"{kind}_return": greedy.return_E[valid].mean(),
        }
        if self.env.imagination is not None and self.config.compare:
            first = once.part(slice(0, self.config.compare))
            if self.true_env is not None:
                output |= self._compared(self.true_env, first)
            elif kind == "greedy":
                played, rows = self._judged(self.env, first, "greedy"), slice(0, len(first) * draws)
                imagined = played.success_E[played.is_valid_E].float().mean()
                true = greedy.success_E[rows][valid[rows]].float().mean()
                output |= {"imagined_success": imagined, "true_success": true, "gap": imagined - true}
        self.env.offload()
        if self.learnt_in.figures:
            output |= self.learnt_in.corrected({name: float(output[name]) for name in IMAGINED if name in output})
        return output, 1 - success

    def _judged(self, env: VecEnv, starts: Starts, mode: Mode) -> Trajectories:
        with gathered(self.net):
            return LocalRollout(self.policy, env, self.rl.execute, keep_record=False).collect(starts, mode)

    def _compared(self, true_env: VecEnv, starts: Starts) -> dict[str, float]:
        imagined = self._judged(self.env, starts, "sample")
        found = played_along(imagined, starts, true_env, self.rl.execute)
        gap = found.imagined_rate - found.true_rate
        shares = {name: getattr(found, name) for name in ("agreement", "true_positive_rate", "false_positive_rate")}
        return {"imagined_success": found.imagined_rate, "true_success": found.true_rate, "gap": gap, **shares}


def _problems(config: VLAGRPOConfig) -> Iterator[tuple[str, str]]:
    """(field of ``rl``, sentence) of what does not fit together, as far as it is known before anything is built."""
    yield from config.rl.problems()
    if not config.rl.is_ratio and isinstance(policy := target_of(config.policy, f"{KEY}.policy"), type):
        yield from misfits(policy, config.rl)
