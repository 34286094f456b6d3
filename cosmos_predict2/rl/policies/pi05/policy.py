# SPDX-License-Identifier: Apache-2.0
"""PI0.5 as a policy: pictures and a sentence -> a chunk of actions, by flow matching.

    policy = Pi05Policy(path="lerobot-like/folder-or-hub-id", noise_method="flow_sde", train_expert_only=True)

Where it samples, one step of the flow from noise to actions is drawn (or with ``joint_logprob`` each), and its
probability is that of the decision. Letters: B decisions, V views, H the model's horizon, D its numbers, K steps.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_predict2.rl import interfaces
from cosmos_predict2.rl.interfaces import Decision, Generators, LogProb, Mode, Observation, PolicyDefaults, Velocities
from cosmos_predict2.rl.policies.cloning import CloneStart
from cosmos_predict2.rl.policies.files import check_public, require_public, result_of
from cosmos_predict2.rl.policies.network import add_adapters, correlated, merged_state
from cosmos_predict2.rl.policies.pi05 import flow, inputs, layout
from cosmos_predict2.rl.policies.pi05.config import read_config
from cosmos_predict2.rl.policies.pi05.network import Pi05Network, PrefixCache
from cosmos_predict2.rl.policies.pi05.tiny import STATISTICS, write_tiny
from cosmos_predict2.text import pretrained
from imaginaire.errors import ConfigError, DataError
from imaginaire.findings import CheckContext, Finding

_NO_STEP = -1  # the drawn step of a greedy decision
_BETA = 1.5  # t = 0.001 + 0.999 Beta(1.5, 1)


class Pi05Policy(nn.Module, PolicyDefaults):
    """``path`` is a folder in the public layout or a hub id; ``options`` are fields of `Pi05Config` that replace those
    of its config.json.

    ``statistics`` of actions take the place of the folder's, also where it is saved.
    With ``augment`` it is cloned on pictures that are cropped, turned and recoloured a little, as published ones were.
    Without ``load`` its weights are random, for a caller who loads others. With ``lora_rank`` adapters are trained in
    place of the weights (of the expert alone with ``train_expert_only``), after those of ``lora_path`` were added for
    good; a noise head is trained whole.
    """

    cloning: ClassVar[dict[str, Any]] = dict(demonstrations=2000, windows="all", steps=3000, lr=2e-3, batch_size=32)
    trainer_step: Tensor

    def __init__(
        self,
        path: str,
        load: bool = True,
        lora_rank: int = 0,
        lora_path: str = "",
        augment: bool = False,
        statistics: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require_public(path, "pi05")
        path = result_of(path)
        self.path, self.options, self.augment = path, options, augment
        self.config = read_config(layout.settings(path), path, options)
        self.reads_state = self.config.discrete_state_input
        if self.config.noise_method != "flow_noise":  # its head learns from log-probabilities alone
            self.flow_times = tuple(flow.step_times(self.config.num_steps)[:-1].tolist())
        if load:
            with torch.device("meta"):
                pretrained.refuse_larger(Pi05Network(self.config), layout.tensors_of(path), path)
        self.network = Pi05Network(self.config)
        if load:
            layout.load(self.network, path)
        frozen = ("paligemma_with_expert.paligemma.",) if self.config.train_expert_only else ()
        add_adapters(self.network, lora_rank, lora_path, without=(*frozen, "noise_head."))
        if self.config.noise_method == "flow_noise":
            self.network.noise_head.requires_grad_(True)
        if self.config.train_expert_only:
            self.network.paligemma.requires_grad_(False)
        content = layout.norm_stats_of(path, self.config.asset_id)
        self.state_stats, self.action_stats = inputs.quantiles_of(content, path)
        self.state_size = len(self.state_stats.q01)
        self._own_statistics = statistics
        if statistics is not None:
            self.action_stats = inputs.Quantiles.of(statistics)
        self._encode = inputs.tokenizer_of(path)
        self._prompts: dict[str, tuple[Tensor, Tensor]] = {}
        # of the trainer: what the noise is annealed by, also in the workers that are sent these weights
        self.register_buffer("trainer_step", torch.zeros((), dtype=torch.int64))
        self.arguments = dict(path=path, **options)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        return check_public(arguments, context, "pi05")

    @classmethod
    def to_clone(
        cls,
        start: CloneStart,
        base: str = "",
        keep_statistics: bool = False,
        lora_rank: int = 0,
        expert_only: bool = False,
        augment: bool = False,
        correlation: float | None = None,
    ) -> "Pi05Policy":
        """One with the weights of ``base``, or a tiny random one."""
        windows, of_start = start.windows, start.sizes
        sizes: dict[str, Any] = dict(
            action_horizon=start.num_knots, action_env_dim=of_start["action_dim"], hold=of_start["hold"]
        )
        sizes["num_images"] = len(windows.views)  # more, which an environment may have, it never saw
        if (state := windows.state_statistics()) is not None:
            sizes["discrete_state_input"] = True
        trained: dict[str, Any] = dict(lora_rank=lora_rank, augment=augment)
        given = dict(train_expert_only=expert_only or None, correlation=correlation)
        trained |= {name: value for name, value in given.items() if value is not None}  # else as base has it
        if base:
            return cls(base, **sizes, **trained, statistics=None if keep_statistics else windows.statistics())
        statistics = {**STATISTICS, "actions": windows.statistics()} | ({"state": state} if state is not None else {})
        write_tiny(start.folder, seed=start.seed, norm_stats=statistics, sentences=windows.tasks, **sizes)
        return cls(str(start.folder), **trained)

    @property
    def action_dim(self) -> int:
        return self.config.env_dim

    @property
    def chunk(self) -> int:
        return self.config.executed * self.config.hold

    draws_when_greedy: bool = True  # what is denoised begins as noise

    def on_trainer_step(self, iteration: int) -> None:
        self.trainer_step.fill_(iteration)

    def train(self, mode: bool = True) -> "Pi05Policy":
        super().train(mode)
        if self.config.train_expert_only:
            self.network.paligemma.eval()
        return self

    # --- decisions

    @torch.no_grad()
    def act(
        self, observation: Observation, *, mode: Mode, generators: Generators, temperature: float = 1.0
    ) -> Decision:
        config = self.config
        record = self.seen(observation)
        cache = self._prefix(record)
        shape = (config.action_horizon, config.action_dim)
        x = self._drawn(generators, shape)
        steps = [torch.full((config.num_steps,), _NO_STEP) for _ in generators]
        if mode == "sample":
            steps = [self._drawn_steps(each) for each in generators]
        record["denoise_inds"] = torch.stack(steps).to(x.device)
        level = (config.noise_level, config.noise_anneal, config.noise_params, int(self.trainer_step))
        record["noise_level"] = torch.full((len(x),), flow.noise_level(*level), device=x.device)
        chain, log_prob = [x], flow.start_log_prob(x) if config.joint_logprob else torch.zeros_like(x)
        for k in range(config.num_steps):
            index = torch.full((len(x),), k, device=x.device)
            v, hidden = self.network.velocity(cache, x, self._times(x)[index])
            mean, _ = self._step(flow.EVAL, index, x, v, hidden, record)
            if mode == "sample":
                drawn_mean, std = self._step(config.noise_method, index, x, v, hidden, record)
                noise, std = correlated(self._drawn(generators, shape), config.correlation), temperature * std
                is_drawn = (record["denoise_inds"] == k).any(dim=1)[:, None, None]
                term = flow.noise_log_prob(noise, std, is_safe=config.safe_get_logprob)
                log_prob = log_prob + torch.where(is_drawn, term, 0.0)
                mean = torch.where(is_drawn, drawn_mean + std * noise, mean)
            x = mean
            chain.append(x)
        record["chains"] = torch.stack(chain, dim=1)
        count = config.num_steps + 1 if config.joint_logprob else 1
        executed = (slice(None), slice(0, config.executed), slice(0, config.env_dim))
        actions = self.action_stats.restored(x[executed]).repeat_interleave(config.hold, dim=1)
        return Decision(actions, record, log_prob[executed] / count if mode == "sample" else None)

    def log_prob(self, record: Mapping[str, Tensor]) -> LogProb:
        """Executed actions count, each is a row. flow_noise, which learns its spread, has an entropy; a step
        of flow_sde that is drawn alone, by its density, is a `DrawnStep`."""
        config = self.config
        terms, entropies, mean, std = self.replay(record)
        part = (slice(None), slice(0, config.executed), slice(0, config.env_dim))
        entropy, step = entropies.mean(dim=1)[part] if config.noise_method == "flow_noise" else None, None
        if config.noise_method == "flow_sde" and not (config.joint_logprob or config.safe_get_logprob):
            step = interfaces.DrawnStep(mean[part], std[:, 0, 0], torch.full_like(std[:, 0, 0], 1 / config.num_steps))
        return LogProb(terms.mean(dim=1)[part], entropy, step)

    def replay(self, record: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies of what was drawn, [B, 1 or K + 1, H, D]: where every step was, the start's
        noise is the first. Then mean and deviation of the last of these steps, [B, H, D]."""
        config, chains, index_B_K = self.config, record["chains"].float(), record["denoise_inds"]
        cache = self._prefix(record)
        rows = torch.arange(len(chains), device=chains.device)
        terms, entropies = [], []
        for k in range(config.num_steps if config.joint_logprob else 1):
            index = index_B_K[:, k]
            if int(index.min()) < 0:
                raise DataError("A greedy decision has no probability: record what was sampled (mode='sample').")
            x, after = chains[rows, index], chains[rows, index + 1]
            v, hidden = self.network.velocity(cache, x, self._times(x)[index])
            mean, std = self._step(config.noise_method, index, x, v, hidden, record)
            terms.append(flow.step_log_prob(after, mean, std, is_safe=config.safe_get_logprob))
            entropies.append(flow.step_entropy(std))
        if config.joint_logprob:
            terms.insert(0, flow.start_log_prob(chains[:, 0]))
            entropies.insert(0, flow.step_entropy(torch.ones_like(chains[:, 0])))
        return torch.stack(terms, dim=1), torch.stack(entropies, dim=1), mean, std

    def velocities(self, record: Mapping[str, Tensor], time_B_L: Tensor, generators: Generators) -> Velocities:
        """Noise is added to the whole horizon, with what is not executed."""
        config, x0 = self.config, record["chains"][:, -1].float()
        noise = self._drawn(generators, (time_B_L.shape[1], *x0.shape[1:]))
        t, cache = time_B_L[:, :, None, None].to(x0), self._prefix(record)
        x_t = (1 - t) * x0[:, None] + t * noise
        found = [self.network.velocity(cache, x_t[:, k], t[:, k, 0, 0])[0] for k in range(t.shape[1])]
        part = (..., slice(0, config.executed), slice(0, config.env_dim))
        return Velocities(x0[part], noise[part], torch.stack(found, dim=1)[part])

    def _step(
        self, method: str, index: Tensor, x: Tensor, v: Tensor, hidden: Tensor, record: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        std = self.network.noise_head(hidden) if method == "flow_noise" else None
        return flow.flow_step(method, self._times(x), index, x, v, record["noise_level"], std)

    def _times(self, like: Tensor) -> Tensor:
        return flow.step_times(self.config.num_steps).to(like.device)

    def _drawn_steps(self, generator: torch.Generator) -> Tensor:
        """The steps that are drawn, [K]: each, or a single one K times."""
        config = self.config
        if config.joint_logprob:
            return torch.arange(config.num_steps)
        count = config.num_steps - config.ignores_last
        return torch.randint(count, (1,), generator=generator, device=generator.device).cpu().expand(config.num_steps)

    def _drawn(self, generators: Generators, shape: tuple[int, ...]) -> Tensor:
        draws = [torch.randn(shape, generator=each, device=each.device) for each in generators]
        return torch.stack(draws).to(self.network.action_in_proj.weight.device)

    # --- what it sees

    def seen(self, observation: Observation) -> dict[str, Tensor]:
        """The record of an observation: pictures in the model's size, which of them are there, and the prompt.

        Views that no environment has are left out: nothing attends to them.
        """
        device, sizes = self.network.action_in_proj.weight.device, self.config.vision
        views = [observation["full_image"], *observation["wrist_image"].unbind(1)][: self.config.num_images]
        images = torch.stack([inputs.resize_with_pad(view, sizes.image, sizes.image) for view in views], dim=1)
        prompts = [self._prompt(observation, i) for i in range(len(images))]
        return {
            "images": images.to(device),
            "image_masks": torch.ones(images.shape[:2], dtype=torch.bool, device=device),
            "tokens": torch.stack([ids for ids, _ in prompts]).to(device),
            "token_mask": torch.stack([mask for _, mask in prompts]).to(device),
        }

    def _prompt(self, observation: Observation, i: int) -> tuple[Tensor, Tensor]:
        task, length = str(observation["task_description"][i]), self.config.max_token_len
        if self.config.discrete_state_input:
            if not observation["state"].shape[-1]:
                raise ConfigError(
                    "policy.discrete_state_input puts the robot's state into the prompt, but the environment has none:"
                    " set policy.discrete_state_input=False where the weights were trained without it."
                )
            state = self.state_stats.normalised(observation["state"][i])[: len(self.state_stats.q01)]
            state = functional.pad(state, (0, max(0, self.config.state_dim - len(state))))
            return inputs.prompt_tokens(self._encode, task, state, length)
        if task not in self._prompts:
            self._prompts[task] = inputs.prompt_tokens(self._encode, task, None, length)
        return self._prompts[task]

    def _prefix(self, record: Mapping[str, Tensor], pixels: Tensor | None = None) -> PrefixCache:
        """``pixels`` are those of the record, unless others are to be seen in their place."""
        used = max(1, int(record["token_mask"].sum(dim=1).max()))  # pads that every row has change nothing
        tokens, mask = record["tokens"][:, :used], record["token_mask"][:, :used]
        pixels = inputs.pixels(record["images"]) if pixels is None else pixels
        return self.network.prefix(pixels, record["image_masks"], tokens, mask)

    # --- demonstrations

    def record_of(self, observation: Observation, actions_B_A_D: Tensor) -> dict[str, Tensor]:
        """The record of a demonstrator for `cloning_loss`: the actions are those that the model gives, normalised."""
        config = self.config
        steps = config.action_horizon * config.hold
        if actions_B_A_D.shape[1] != steps:
            raise ConfigError(
                f"The demonstrations' windows have {actions_B_A_D.shape[1]} actions, the policy's horizon is {steps}:"
                " they must be the same."
            )
        known = self.action_stats.normalised(actions_B_A_D.unflatten(1, (-1, config.hold)).mean(dim=2))
        padded = known.new_zeros(*known.shape[:2], config.action_dim)
        padded[..., : known.shape[2]] = known
        return {**self.seen(observation), "actions": padded.to(self.network.action_in_proj.weight.device)}

    def demonstrated(self, record: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The record of decisions as that of a demonstrator who did the same."""
        return {**record, "actions": record["chains"][:, -1].float()}

    def shares_outside(self, actions_B_A_D: Tensor) -> Tensor:
        """The share of each number of demonstrated actions [D] that the model would have to give beyond -1 and 1."""
        return (self.action_stats.normalised(actions_B_A_D).abs() > 1 + 2e-3).double().mean(dim=(0, 1))

    def cloning_loss(self, record: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The mean squared error of the velocity, at times of Beta(1.5, 1)."""
        actions = record["actions"]
        noise = torch.randn(actions.shape, generator=generator).to(actions)
        of_beta = torch.rand(len(actions), generator=generator) ** (1 / _BETA)  # Beta(a, 1) by its inverse
        pixels = inputs.augmented(inputs.pixels(record["images"]), generator) if self.augment else None
        return self.flow_loss(record, actions, noise, (0.001 + 0.999 * of_beta).to(actions), pixels).mean()

    def flow_loss(
        self, record: Mapping[str, Tensor], actions: Tensor, noise: Tensor, t_B: Tensor, pixels: Tensor | None = None
    ) -> Tensor:
        """[B, H, D], at given times."""
        t = t_B[:, None, None]
        v, _ = self.network.velocity(self._prefix(record, pixels), t * noise + (1 - t) * actions, t_B)
        return (noise - actions - v).square()

    # --- files

    def save(self, folder: Path) -> None:
        """In the public layout; the options that it was built with become those of config.json, and adapters are added
        to their weights."""
        layout.export(merged_state(self.network), self.path, folder, self.options, self._own_statistics)
