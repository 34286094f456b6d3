# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of a world model: its sampler is the policy, a clip's reward its return.

`collect` turns a batch of the loader into groups of generated clips that share their conditions, and has them scored;
`minibatches` yields them a step at a time, and `part_loss` computes a step anew, with gradients. The trainer's
``grad_accum_iter`` is the number of micro-batches of one update.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.conditioner import NEGATIVE_TEXT_KEY
from cosmos_predict2.data.dataset_prompts import TRUE_FRAMES_KEY
from cosmos_predict2.models.config import LATEST_TIME, Passes, model_config
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.rl.clips.rollout import (
    ONE_MEMBER,
    Conditions,
    Data,
    Forward,
    Losses,
    MicroBatch,
    Rollout,
    RowDraws,
    Samples,
    chain_path,
    check_chain,
    conditions_of,
    judge,
    roll_out,
)
from cosmos_predict2.rl.clips.scoring import ClipRewards, Groups, check_data
from cosmos_predict2.rl.config import ANY, KEY, Predict2RLConfig, RLConfig, check_steps, passes_of, rl_of
from cosmos_predict2.rl.interfaces import Clips, Ticket
from cosmos_predict2.rl.learner import Experience, Facts, RLModel, joined, mapped, rows_of
from cosmos_predict2.rl.objectives import SMALLEST_TIME
from cosmos_predict2.text.trained_text import with_tokens
from cosmos_predict2.world_model.objectives import FLOW_SOLVER, objective_of
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire import distributed
from imaginaire.data.stream import POSITION_KEY, move_to
from imaginaire.distributed import places
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import ConfigError, DataError
from imaginaire.findings import CheckContext, Finding, error

# Trackers show these, and those of the rewards, as the public trainer does: GRPO/reward_mean
PUBLISHED_METRICS = {"reward_mean", "log_prob_ratio", "kl_loss", "policy_loss", "data_loss"}


class FlowGRPOModel(RLModel, Video2WorldModel):
    """A `Video2WorldModel` that learns from rewards. Its validation is that of supervised training."""

    config_class = Predict2RLConfig
    learns_from_clips = False
    config: Predict2RLConfig
    rl: RLConfig
    rl_key = KEY

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rl = rl_of(self.config)
        for field, text in self.rl.problems():
            raise ConfigError(f"{KEY}.{field}: {text}.")
        self.scoring = ClipRewards(self.rl)
        self.groups = Groups(self.rl.num_rollout, self.rl.ranks_per_group)
        self.ranks_per_sample = self.rl.ranks_per_group
        self.losses = Losses(self.world, self.rl)
        self._has_checked_states = False  # of the first clips of this start
        self._num_groups = 0  # of each batch, once one has come

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        yield from super().check(arguments, context)
        rl = rl_of(arguments["config"])
        problems = list(rl.problems())
        for field, text in problems:
            yield error(f"{KEY}.{field}", text)
        pipe_config = model_config(arguments["config"], cls.config_class).pipe_config
        if not problems and pipe_config.objective is None:  # one of its own may make its path of the conditions
            check_chain(objective_of(pipe_config), rl)
        if context.key in ("", "model"):  # else another model has it, which gives it its batches
            yield from check_steps(rl, context)
            yield from check_data(rl, context)
            for key, data in context.training.items():
                if data.get("missing_cameras") == "mask":
                    text = "mask, but rewards and the data term see whole pictures"
                    yield error(f"{key}.missing_cameras", text, "Leave it out: recordings with all cameras are taken")

    @classmethod
    def compared_data(cls, config: Any, context: CheckContext) -> Mapping[str, Mapping[str, Any]]:
        """Rollouts need no true clips; the data term and validation do."""
        return {**(context.training if rl_of(config).data_beta else {}), **context.validation}

    @classmethod
    def passes(cls, config: Any, conditions: int) -> Passes:
        model = model_config(config, cls.config_class)
        is_flow_model = FLOW_SOLVER in objective_of(model.pipe_config).solvers
        return passes_of(rl_of(model), conditions, is_flow_model=is_flow_model)

    batch_kinds: tuple[str, ...] = ()

    def published_name(self, name: str) -> str | None:
        of_rewards = {f"{reward}{end}" for reward in self.scoring.rewards for end in ("", "_std", "_valid_rate")}
        return f"GRPO/{name}" if name in PUBLISHED_METRICS | of_rewards else None

    # --- weights beside the trained ones

    def parallelize(self, dims: ParallelDims) -> None:
        super().parallelize(dims)
        self.scoring.shared_by(dims.cp_group)
        self.groups = replace(self.groups, dims=dims)
        if self.rl.kl_beta > 0 or not self.rl.on_policy:
            self.keep_reference()
        self.keep_old(self.rl.weight_copy_decay_type)

    def saved_weights(self) -> dict[str, Tensor]:
        return {**super().saved_weights(), **self.copied_weights()}

    def sampling_policy(self) -> AbstractContextManager[Any]:
        return super().sampling_policy() if self.rl.on_policy else self.reference()

    # --- experience

    def collect(self, batch: Mapping[str, Any], first: Rollout | None = None) -> Experience:
        if self.is_image_batch(batch):
            raise DataError("A batch has pictures, but rewards are of clips: choose data of clips alone.")
        size = len(batch["fps"])
        self._num_groups = self._num_groups or size
        if size != self._num_groups:
            found = f"A batch has {size} conditions and others {self._num_groups}, but all updates are equally large"
            raise DataError(f"{found}: set drop_last=True of the loader, or take a ResumableLoader.")
        if first is None:
            with places.at("agreeing on the draws of a rollout"):
                draws = RowDraws(self.seed, distributed.broadcast_object(int(batch[POSITION_KEY][0])))
        else:
            draws = first.draws
        with self.phase("rollout"), self.autocast(self.world.device):  # as training_step has it
            rollout, tickets = self._rolled_out(move_to(batch, self.world.device), draws)
            rollout = self._predicted(rollout)  # rewards that score elsewhere do so meanwhile
        with self.phase("reward_wait"):
            self.progress(f"waiting for the rewards of {len(rollout.samples)} clips")
            scored = self._score(tickets)
        return Experience(rollout, *scored)

    @torch.no_grad()
    def _rolled_out(self, batch: Mapping[str, Any], draws: RowDraws) -> tuple[Rollout, list[dict[str, Ticket]]]:
        """Clips for a batch's conditions, and what was asked of rewards."""
        rl, generators = self.rl, self._generators(batch, "rollout")
        low, high = rl.min_num_conditional_frames, rl.max_num_conditional_frames
        numbers = generators.integers(low, high + 1, "given_frames")
        if TRUE_FRAMES_KEY in batch and (least := int(min(batch[TRUE_FRAMES_KEY]))) < int(numbers.max()):
            found = f"The samples have {least} true frames, but {int(numbers.max())} are to condition them"
            raise DataError(f"{found}: set {KEY}.max_num_conditional_frames={least}, and the smallest number too.")
        batch = {**self._cut(batch, generators), "num_conditional_frames": numbers}
        x0, condition = self.data_and_condition(batch, generators, is_fixed=True)
        keep = self.world.conditioner.draw_keep(generators.each("condition"))  # of the data term, as in training
        data_condition = self.world.conditioner.withheld(condition, keep)
        unconditional = None
        if rl.guidance:
            text, negative = condition.crossattn_emb_B_S_E, batch.get(NEGATIVE_TEXT_KEY)
            other = torch.zeros_like(text) if negative is None else with_tokens(negative.to(text), text.shape[1])
            unconditional = replace(condition, crossattn_emb_B_S_E=other)
        steps, conditions, members = self._trained_steps(draws), (condition, unconditional), self.groups.members
        rows_B = torch.arange(len(x0)).repeat_interleave(len(members))
        places_B_2 = torch.cartesian_prod(batch[POSITION_KEY].cpu(), torch.tensor(members))
        context = self._reward_context(batch, x0, numbers)
        if self.scoring.needs_probe:
            self.progress("asking for the score of a true clip")
            self.scoring.probe(*self._clips(x0[:1], torch.zeros(1, dtype=torch.long), batch, context))
        parts, tickets = [], []
        with self.sampling_policy():
            for rows in self._chunks(len(rows_B)):
                self.progress(f"rollout, clip {rows.start + 1} of {len(rows_B)}")
                part = self._roll_out(conditions, rows_B[rows], places_B_2[rows], steps, draws)
                tickets += self._submit(part, batch, context)
                parts.append(self._kept_at(part))
        return Rollout(joined(parts), conditions, x0, data_condition, draws), tickets

    def _score(self, tickets: list[dict[str, Ticket]]) -> tuple[Tensor, Tensor, Facts]:
        """The advantages of this rank's samples, which of its groups have any, and what to log of rewards."""
        scores = self.groups.gathered(self.scoring.fetch(tickets, len(self.groups.members)))
        advantage, facts = self.scoring.advantages(scores)
        failed = [name for name, one in scores.items() if not one.is_valid_B.any()]
        self.count_failure(bool(failed), f"score of {', '.join(failed or scores)}")
        teaches_N_1 = (advantage != 0).any(dim=1, keepdim=True)
        return self.groups.own(advantage), self.groups.own(teaches_N_1.expand_as(advantage))[:, 0], facts

    def _roll_out(
        self, conditions: Conditions, rows_B: Tensor, places_B_2: Tensor, steps: Sequence[int], draws: RowDraws
    ) -> Samples:
        given = conditions[0].gt_frames_B_C_T_H_W
        assert given is not None
        shape, world = tuple(given.shape[1:]), self.world
        starts_B_2 = places_B_2 * ONE_MEMBER if self.rl.starts_alike else places_B_2
        noise = draws.normal(shape, starts_B_2, "start").to(given, non_blocking=True)

        def noise_of(k: int) -> Tensor:
            noise = draws.normal(shape, places_B_2, f"step{k}")
            return world.context.split_frames(noise.to(given, non_blocking=True))

        window = tuple(steps) if self.rl.noise_on_trained_steps_only else None
        path = chain_path(world, self.rl, *conditions_of(conditions, rows_B), noise, window)
        levels = list(path.chain.levels[: path.chain.num_steps])
        if self.rl.transition != "churn":  # they are flow times
            levels = [t / max(1 - t, 1 - LATEST_TIME) for t in levels]
        keep = steps if self.rl.is_ratio else ()
        start = world.context.split_frames(noise)
        final, kept = roll_out(path, start, noise_of, keep, is_checked=not self._has_checked_states)
        self._has_checked_states = True
        final = world.context.gather_frames(final)
        world.context.activate(False)
        return Samples(rows_B, places_B_2, noise, final, window, levels, kept)

    def _submit(self, part: Samples, batch: Mapping[str, Any], context: Mapping[str, Any]) -> list[dict[str, Ticket]]:
        """Ask for the scores of a part, those of each frame rate together."""
        rates = [float(batch["fps"][row]) for row in part.rows_B.tolist()]
        changes = [i for i in range(1, len(rates)) if rates[i] != rates[i - 1]]
        tickets = []
        with self.phase("reward"):
            for these in map(slice, [0, *changes], [*changes, len(rates)]):
                tickets.append(self.scoring.submit(*self._clips(part.final[these], part.rows_B[these], batch, context)))
        return tickets

    def _clips(
        self, latents: Tensor, rows: Tensor, batch: Mapping[str, Any], context: Mapping[str, Any]
    ) -> tuple[Clips, dict[str, Any]]:
        """Latents for the conditions ``rows``, of one frame rate, as rewards take them, with their context."""
        video = to_uint8(self.world.decode(latents)).cpu() if self.scoring.needs_pixels else None
        texts = batch.get("ai_caption") or [""] * len(batch["fps"])
        clips = Clips(latents.cpu(), video, [texts[i] for i in rows.tolist()], float(batch["fps"][int(rows[0])]))
        of_rows = {key: value[rows] if isinstance(value, Tensor) else value for key, value in context.items()}
        return clips, of_rows

    def _reward_context(self, batch: Mapping[str, Any], x0: Tensor, numbers: Tensor) -> dict[str, Any]:
        """The context of rewards: what they may compare with, a row for each condition."""
        context: dict[str, Any] = {"num_conditional_frames": numbers.cpu()}
        if (actions := batch.get("action")) is not None:
            context["actions"] = actions.cpu()
        if TRUE_FRAMES_KEY in batch:
            return context
        context["true_latents"] = x0.cpu()
        if self.scoring.needs_pixels:
            true = batch.get(self.config.input_video_key)
            if true is None or true.dtype != torch.uint8:
                true = to_uint8(self.world.decode(x0))
            context["true_video"] = true.cpu()
        return context

    def _trained_steps(self, draws: RowDraws) -> list[int]:
        """The indices of ``train_on``, with those that are drawn: steps that have a probability, each once."""
        chosen = [k for k in self.rl.train_on if k != ANY]
        last = self.rl.sample_steps - (self.rl.transition not in ("sde", "dance"))  # whose last step draws nothing
        open_steps = [k for k in range(last) if k not in chosen]
        wanted = len(self.rl.train_on) - len(chosen)
        drawn = draws.permutation(len(open_steps), "steps")[:wanted]
        return sorted(chosen + [open_steps[i] for i in drawn])

    # --- what other weights than the trained ones predict

    @torch.no_grad()
    def _predicted(self, rollout: Rollout) -> Rollout:
        """The rollout with what the sampling policy and the reference predict of what will be trained."""
        if self.rl.is_ratio:
            return self._with_reference_means(rollout) if self.rl.kl_beta else rollout
        forwards = self._noised(rollout.samples, rollout.draws)
        if self.rl.updates * self.rl.minibatches > 1 or self._old is not None:
            with self.sampling_policy():
                for k, one in forwards.items():
                    forwards[k] = replace(one, v_old_B_C_T_H_W=self._velocities(rollout, one))
        if self.rl.kl_beta:
            with self.reference():
                for k, one in forwards.items():
                    forwards[k] = replace(one, v_reference_B_C_T_H_W=self._velocities(rollout, one))
        return replace(rollout, samples=self._kept_at(replace(rollout.samples, forwards=forwards)))

    def _noised(self, samples: Samples, draws: RowDraws) -> dict[int, Forward]:
        """The clips with fresh noise at the sampler's levels, or at some of them."""
        found, final = {}, samples.final
        places_B_2 = samples.places_B_2 * ONE_MEMBER if self.rl.use_same_forward_noise else samples.places_B_2
        drawn = draws.permutation(self.rl.sample_steps, "levels")[: self.rl.num_timesteps or self.rl.sample_steps]
        for k in sorted(drawn):
            t = samples.levels[k] / (1 + samples.levels[k])
            t = min(max(t, SMALLEST_TIME), 1 - SMALLEST_TIME)
            t_B = torch.full((len(samples),), t, device=final.device).to(final.dtype)
            noise = draws.normal(tuple(final.shape[1:]), places_B_2, f"forward{k}")
            found[k] = Forward(final, noise.to(final, non_blocking=True), t_B)
        return found

    def _velocities(self, rollout: Rollout, forward: Forward) -> Tensor:
        """This rank's frames of the velocities of all samples."""
        chunks, of = self._chunks(len(rollout.samples)), rollout.conditions_of
        return torch.cat([self.losses.velocity(of(rows)[0], rows_of(forward, rows)) for rows in chunks])

    def _with_reference_means(self, rollout: Rollout) -> Rollout:
        samples = rollout.samples
        means: dict[int, list[Tensor]] = {k: [] for k in samples.kept}
        with self.reference():
            for rows in self._chunks(len(samples)):
                conditions = rollout.conditions_of(rows)
                path = chain_path(self.world, self.rl, *conditions, samples.noise[rows], samples.window)
                for k, whole in samples.kept.items():
                    one = move_to(rows_of(whole, rows), self.world.device)
                    means[k].append(judge(path, one).mean_B_C_T_H_W)
        kept = {k: replace(one, reference_mean_B_C_T_H_W=torch.cat(means[k])) for k, one in samples.kept.items()}
        return replace(rollout, samples=self._kept_at(replace(samples, kept=kept)))

    def _chunks(self, num_samples: int) -> list[slice]:
        """The rows that pass the network together."""
        size = self.rl.rollout_batch
        return [slice(start, start + size) for start in range(0, num_samples, size)]

    def _kept_at(self, samples: Samples) -> Samples:
        """The samples with what is kept of the trained steps or levels where it waits, such as the host's memory."""
        if not self.rl.offload_trajectories:
            return samples
        return replace(samples, kept=mapped(samples.kept, Tensor.cpu), forwards=mapped(samples.forwards, Tensor.cpu))

    # --- the order of training

    def minibatches(self, experience: Experience, batch: Mapping[str, Any]) -> tuple[int, Iterator[MicroBatch]]:
        rl, rollout, advantage_B = self.rl, experience.record, experience.advantage_G_M.flatten()
        samples, draws = rollout.samples, rollout.draws
        steps = list(samples.kept) if rl.is_ratio else list(samples.forwards)
        chunks = self._chunks(len(samples))  # as they were rolled out: the network computes the very same numbers
        size = len(chunks) // rl.minibatches
        parts = []  # the micro-batches of each update: of its part of the samples all steps
        for i in range(rl.updates * rl.minibatches):
            first = i % rl.minibatches * size
            shuffled = [steps[j] for j in draws.permutation(len(steps), f"order{i}")]
            parts.append([(rows, k) for k in shuffled for rows in chunks[first : first + size]])
        is_taught = [rl.teaches_without_advantage or any(advantage_B[rows].any() for rows, _ in part) for part in parts]
        teaches = distributed.all_reduce_(torch.tensor(is_taught).float(), "max") > 0  # of each update, on any rank
        facts = experience.facts | (experience.group_facts if rl.max_rollouts > 1 else {})

        def micro_batches() -> Iterator[MicroBatch]:
            begun: set[int] = set()  # the first rows of clips that were trained on
            for number, (update, rows, k) in enumerate((i, *pair) for i, part in enumerate(parts) for pair in part):
                condition, unconditional = rollout.conditions_of(rows)
                yield MicroBatch(
                    condition=condition,
                    unconditional=unconditional,
                    noise_B_C_T_H_W=samples.noise[rows],
                    advantage_B=advantage_B[rows],
                    window=samples.window,
                    kept=rows_of(samples.kept[k], rows) if rl.is_ratio else None,
                    forward=None if rl.is_ratio else rows_of(samples.forwards[k], rows),
                    data=self._data(rollout, rows, k, rows.start not in begun),
                    is_before_update=update == 0,
                    teaches=bool(teaches[update]),
                    facts=facts if number == 0 else {},
                )
                begun.add(rows.start)

        return sum(map(len, parts)), micro_batches()

    def _data(self, rollout: Rollout, rows: slice, k: int, is_of_new_clips: bool) -> Data | None:
        """The true clips of these samples for the data term, at the step's level or at one drawn as in training."""
        rl, samples, draws = self.rl, rollout.samples, rollout.draws
        if not rl.data_beta or (rl.data_on_first_only and not is_of_new_clips):
            return None
        of_rows, places_B_2 = samples.rows_B[rows], samples.places_B_2[rows]
        x0 = rollout.true_latents[of_rows.to(rollout.true_latents.device, non_blocking=True)]
        if rl.use_rl_sigma_and_noise:
            epsilon, sigma_B = samples.noise[rows].to(x0), torch.full((len(x0),), samples.levels[k])
        else:
            epsilon = draws.normal(tuple(x0.shape[1:]), places_B_2, f"data{k}").to(x0, non_blocking=True)
            uniform = draws.uniform(3, places_B_2, f"data_sigma{k}")
            sigma_B = self.config.draw_sigma(uniform, is_image=False)
        return Data(x0, epsilon, sigma_B[:, None].to(x0, non_blocking=True), rollout.data_condition.rows(of_rows))

    def part_loss(self, part: MicroBatch) -> tuple[dict[str, Any], Tensor]:
        return self.losses.of(part)
