# SPDX-License-Identifier: Apache-2.0
"""Training of a world model: one batch becomes latents, noise and a condition, and the network learns to undo it.

Conditioning frames enter the network without noise. Predict2 adds nothing for them to the sum of the loss, but divides
it by them, too; Predict2.5 takes their velocity for right.

Every draw follows from the run's seed and the sample's place in the training stream, so a resumed run and another
number of processes draw the same. Batches without ``sample_position`` draw from torch's global generator.
"""

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from cosmos_predict2.checkpoints.card import (
    RATE_KEY,
    TEXT_ENCODER,
    TOKENIZER,
    ModelCard,
    card_in,
    card_of_config,
    card_tensors,
    read_card,
)
from cosmos_predict2.checkpoints.dit_loading import require_alpha
from cosmos_predict2.conditioner import GIVEN_VIEW_KEY, TEXT_KEY, Condition
from cosmos_predict2.data.dataset_latents import LATENTS_KEY, check_tokenizer
from cosmos_predict2.diffusion import rectified_flow
from cosmos_predict2.models import model_checks
from cosmos_predict2.models.actions import actions_of
from cosmos_predict2.models.config import (
    Passes,
    Predict2ModelManagerConfig,
    Predict2p5Video2WorldModelConfig,
    Predict2Video2WorldModelConfig,
    model_config,
)
from cosmos_predict2.models.teacher import check_teacher, passes_of_teacher, teacher_of
from cosmos_predict2.models.text import TrainingText, data_text, require_text, text_of_config
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.nn.multiview_dit import MultiViewDiT
from cosmos_predict2.text.trained_text import text_facts
from cosmos_predict2.tokenizers.sizes import pixel_frames
from cosmos_predict2.world_model.assembly import (
    add_trained_adapters,
    fill_network,
    other_parts,
    part_digest,
    settle_attention,
)
from cosmos_predict2.world_model.config import CONDITION_LOCATIONS, PRECISIONS, MultiviewPipelineConfig
from cosmos_predict2.world_model.parallelize import parallelize_dit
from cosmos_predict2.world_model.world_model import build_world_model
from imaginaire import distributed
from imaginaire.checkpoint import weights
from imaginaire.data.facts import facts_of
from imaginaire.data.stream import POSITION_KEY, WEIGHT_KEY
from imaginaire.distributed.parallel import ParallelDims, current_dims
from imaginaire.errors import CheckpointError, ConfigError, DataError
from imaginaire.findings import CheckContext, Finding
from imaginaire.optim import frozen, lora
from imaginaire.random import Draws
from imaginaire.training.model import ImaginaireModel, PowerEMA, has_meta

__all__ = [
    "Predict2ModelManagerConfig",
    "Predict2Video2WorldActionConditionedModel",
    "Predict2Video2WorldModel",
    "Predict2Video2WorldModelConfig",
    "Predict2p5ActionConditionedModel",
    "Predict2p5Video2WorldModel",
    "Predict2p5Video2WorldModelConfig",
    "Video2WorldModel",
]

log = logging.getLogger(__name__)

SMALLEST_RELEASED = 1280  # model_channels of the 0.6B network


class Video2WorldModel(ImaginaireModel):
    """Trains the network of a world model, in ``net``, with its average in ``ema``; nothing else is trained or saved.

    The objective (EDM or flow) is the world model's, the noise that is drawn the config's; ``actions`` puts actions
    into batches, or leaves them as they are.
    """

    config_class: type[Predict2Video2WorldModelConfig] = Predict2Video2WorldModelConfig  # of a plain mapping
    learns_from_clips = True  # so that weights may begin with the latents of another tokenizer

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config = model_config(config, self.config_class)
        self.pipe_config = config.pipe_config
        for finding in self._check_family(config):
            if finding.level == "error":
                raise ConfigError(f"{finding}.")
        self.precision = PRECISIONS[config.precision]
        # Before the network is built, whose adapters draw too. The trainer has seeded all ranks alike.
        self._start_seed = int(torch.randint(2**62, ()))
        adapt = partial(add_trained_adapters, config=config)
        self.world = build_world_model(self.pipe_config, dtype=self.weight_dtype, adapt=adapt)
        self.net: DiT = self.world.net
        self.teacher = teacher_of(self.world, self.weight_dtype)
        if not current_dims().will_shard(config.fsdp_shard_size):
            self._has_trained_adapters = fill_network(self.net, config, "cpu", self._start_seed)
        if config.frozen_weights != "full" or config.swap_blocks:
            frozen.freeze(self.net, list(self.net.blocks), config.frozen_weights, config.swap_blocks)
        self.text = TrainingText(config.text)
        total = sum(config.conditional_frames.values())
        shares = ", ".join(f"{n} in {share / total:.0%}" for n, share in config.conditional_frames.items())
        log.info("conditioning latent frames: %s of the clips", shares)
        self.actions = actions_of(self)
        if config.model_manager_config.dit_path:
            self._compare_with_start(config.model_manager_config.dit_path)
        self._has_checked_latents = False  # that the data's latents are of this tokenizer

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        yield from cls._check_family(arguments["config"])
        yield from model_checks.check(arguments["config"], context)
        yield from check_teacher(arguments["config"], context)
        yield from model_checks.check_true_clips(cls.compared_data(arguments["config"], context))

    @classmethod
    def compared_data(cls, config: Any, context: CheckContext) -> Mapping[str, Mapping[str, Any]]:
        """The data sets with whose clips a loss compares, by key."""
        return {**context.training, **context.validation}

    @classmethod
    def passes(cls, config: Any, conditions: int) -> Passes | None:
        """The passes of an experience, for a rank whose batches have so many clips; None: each is trained on once."""
        return passes_of_teacher(config, conditions)

    @classmethod
    def _check_family(cls, config: Any) -> Iterator[Finding]:
        """Noise and objective that do not fit each other; nothing for a subclass with a loss of its own."""
        return iter(()) if cls.loss is not Video2WorldModel.loss else model_checks.check_family(config)

    @classmethod
    def checkpoint_switches(cls, path: str) -> dict[str, Any]:
        """The settings of the run that wrote these weights which a resumed one must share: adapters or none."""
        return {f"config.{key}": value for key, value in read_card(path).switches.items()}

    def data_facts(self, data_sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rates = [rate for data in data_sets if (rate := facts_of(data).rate) is not None]
        if self.config.text.is_set:
            text = text_of_config(self.config.text)
            texts = [] if text is None else [text]
        else:
            texts = [text for data in data_sets if (text := data_text(data)) is not None]
        return text_facts(texts) | ({RATE_KEY: rates[0]} if rates else {})

    # --- set-up

    def on_load_path(self, path: str) -> None:
        """Raise where adapters would go on that were trained with another alpha."""
        require_alpha(read_card(path), lora.lora_spec(self.net))
        self.actions.take_over(read_card(path).opened())
        self._compare_with_start(path)

    def _compare_with_start(self, path: str) -> None:
        """Report start weights that were trained with other parts: what they know is learnt anew, if at all."""
        for problem in other_parts(read_card(path), self.pipe_config, self.world.tokenizer):
            if self.learns_from_clips:
                log.warning("start weights: %s What they know of latents must be learnt anew", problem)
            else:
                raise CheckpointError(problem)

    def on_data(self, *loaders: Any) -> None:
        self.actions.on_data(*loaders)

    def on_after_backward(self) -> None:
        self.actions.on_after_backward()

    # --- checkpoints

    def card(self) -> ModelCard:
        """The record that is saved with the weights of this run."""
        digests = {TOKENIZER: self._tokenizer_digest, TEXT_ENCODER: self.text.encoder_name}
        return replace(
            self._card_of_config,
            digests={part: digest for part, digest in digests.items() if digest},
            has_action_embedders=self.net.takes_actions,
            action_transform=self.actions.transform,
        )

    @functools.cached_property
    def _tokenizer_digest(self) -> str:
        return part_digest(self.world.tokenizer)

    @functools.cached_property
    def _card_of_config(self) -> ModelCard:
        return card_of_config(self.config)

    def saved_weights(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint besides the card."""
        return super().checkpoint_state()

    def checkpoint_state(self) -> dict[str, Tensor]:
        return self.saved_weights() | card_tensors(self.card())

    def load_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        self._take_over(state)
        live = self.saved_weights()
        report = weights.load_into(live, state)
        frozen.take(self.net, live, "net.")
        return report

    def account_checkpoint_state(self, state: Mapping[str, Tensor]) -> weights.LoadReport:
        self._take_over(state)
        frozen.take(self.net, state, "net.")
        return weights.account(self.saved_weights(), state)

    def _take_over(self, state: Mapping[str, Tensor]) -> None:
        """The actions of a checkpoint are the run's; raise where its latents are of another tokenizer."""
        card = replace(card_in(state), path="The checkpoint")  # for messages
        self.actions.take_over(card)
        if card.digests.get(TOKENIZER, self._tokenizer_digest) != self._tokenizer_digest:
            for problem in other_parts(card, self.pipe_config, self.world.tokenizer):
                raise CheckpointError(problem)

    # --- set-up

    def on_train_start(self, memory_format: torch.memory_format = torch.preserve_format) -> None:
        device = next(self.net.parameters()).device
        if device.type == "meta":  # it is filled when it is sharded
            device = distributed.device()
        self.world.device = device
        settle_attention(self.net, device, self.precision)

    def parallelize(self, dims: ParallelDims) -> None:
        self.world.context = parallelize_dit(
            self.net,
            dims,
            fsdp_shard_size=self.config.fsdp_shard_size,
            sac_config=self.net.sac_config,
            compile=self.config.torch_compile,
        )
        if has_meta(self.net):
            self._has_trained_adapters = fill_network(self.net, self.config, distributed.device(), self._start_seed)
        ema = self.pipe_config.ema
        if ema.enabled:
            self.ema = PowerEMA(self.net, ema.rate, ema.iteration_shift, offload=ema.offload)

    # --- one step

    def training_step(self, batch: Mapping[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        is_image = self.is_image_batch(batch)
        generators = self._generators(batch, "train")
        if self.training:
            name = "accum_image_sample_counter" if is_image else "accum_video_sample_counter"
            self.net.get_buffer(name).add_(len(batch[self._input_key(batch)]) * current_dims().dp_size)
            self.net.get_buffer("accum_iteration").add_(1)
        x0, condition = self.data_and_condition(batch, generators)
        epsilon, sigma_B_1 = self.draw_noise(x0, is_image, generators)
        losses = self.loss(self.taught(x0, epsilon, condition), epsilon, sigma_B_1, condition)
        return self.actions.with_state(losses, x0, condition)

    def validation_step(self, batch: Mapping[str, Any], iteration: int) -> tuple[dict[str, Any], Tensor]:
        """The loss at each of ``validation_sigmas`` and their mean, with all inputs kept and as few conditioning frames
        as the config allows."""
        is_image = self.is_image_batch(batch)
        generators = self._generators(batch, "validation")
        x0, condition = self.data_and_condition(batch, generators, is_fixed=True)
        epsilon, sigma_B_1 = self.draw_noise(x0, is_image, generators)
        x0 = self.taught(x0, epsilon, condition)
        weight_B = batch.get(WEIGHT_KEY)
        if not self.validation_sigmas:
            output, loss = self.loss(x0, epsilon, sigma_B_1, condition)
            output["edm_loss"], loss = counted_losses(output, loss, weight_B)
            return output, loss
        edm_losses, losses = [], {}
        for sigma in self.validation_sigmas:
            output, loss = self.loss(x0, epsilon, torch.full_like(sigma_B_1, float(sigma)), condition)
            edm_loss, losses[f"loss_sigma_{sigma:g}"] = counted_losses(output, loss, weight_B)
            edm_losses.append(edm_loss)
        mean = torch.stack(list(losses.values())).mean()
        return {**losses, "edm_loss": torch.stack(edm_losses).mean()}, mean

    @torch.no_grad()
    def clean_clips(self, batch: Mapping[str, Any]) -> tuple[Tensor | None, Tensor, Condition]:
        """Pixels in [-1, 1] (None where the batch has latents only), latents and condition of a validation batch."""
        generators = self._generators(batch, "validation")
        self.actions.check(batch)
        batch = self._cut(batch, generators)
        x0, condition = self.data_and_condition(batch, generators, is_fixed=True)
        return None if LATENTS_KEY in batch else self._pixels(batch), x0, condition

    def data_and_condition(
        self, batch: Mapping[str, Any], generators: Draws, *, is_fixed: bool = False
    ) -> tuple[Tensor, Condition]:
        """Clean latents, and the condition: inputs dropped for guidance, and conditioning frames.

        ``is_fixed`` drops nothing and takes as few conditioning frames as the config allows.
        """
        is_image = self.is_image_batch(batch)
        self.actions.check(batch)
        batch = self._cut(batch, generators)
        batch = self.text.added_to(batch, len(batch[self._input_key(batch)]), next(self.net.parameters()).device)
        if self.net.extra_channels and LATENTS_KEY in batch:
            raise DataError("Cached latents do not have the first frame that image to video is given: use pixels.")
        x0 = self._latents(batch) * self.pipe_config.sigma_data
        self._require_size(x0)
        if self.net.extra_channels:
            batch = {**batch, **self.world.first_frames(self._pixels(batch)[:, :, :1], pixel_frames(x0.shape[2]))}
        keep = None if is_fixed else self.world.conditioner.draw_keep(generators.each("condition"))
        condition = self.world.conditioner.condition(batch, is_image=is_image, keep=keep)
        require_text(self.net, condition.crossattn_emb_B_S_E, f"The batch's '{TEXT_KEY}'")
        if not is_image:
            numbers = self._num_conditional_frames(batch, x0, generators, is_fixed)
            condition = condition.with_conditioning_frames(x0, numbers)
            if (view_B := self.given_view(x0.shape[0], generators)) is not None:
                condition = condition.with_given_view(view_B.to(x0.device), self.net.num_views)
        return x0, condition

    @property
    def _condition_locations(self) -> Sequence[str]:
        config = self.pipe_config
        return config.condition_locations if isinstance(config, MultiviewPipelineConfig) else CONDITION_LOCATIONS[:1]

    def given_view(self, size: int, generators: Draws) -> Tensor | None:
        """The view of each sample of which all frames are given, [B]; None where the config has none."""
        locations = self._condition_locations
        if "any_cam" in locations:
            return generators.integers(0, self.net.num_views, GIVEN_VIEW_KEY)
        if "ref_cam" not in locations:
            return None
        return torch.full((size,), cast(MultiViewDiT, self.net).front)

    def draw_noise(self, x0_B_C_T_H_W: Tensor, is_image: bool, generators: Draws) -> tuple[Tensor, Tensor]:
        """Standard normal noise, and one noise level per sample [B, 1]."""
        epsilon = generators.normal(x0_B_C_T_H_W.shape, "epsilon").to(x0_B_C_T_H_W, non_blocking=True)
        uniform_B_3 = generators.uniform(3, "sigma")
        if self.teacher is not None:
            sigma_B = self.teacher.draw_sigma(uniform_B_3)
        else:
            sigma_B = self.config.draw_sigma(uniform_B_3, is_image=is_image)
        return epsilon, sigma_B[:, None].to(x0_B_C_T_H_W, non_blocking=True)

    def taught(self, x0_B_C_T_H_W: Tensor, epsilon_B_C_T_H_W: Tensor, condition: Condition) -> Tensor:
        """The latents that are learnt: those of the data, or what a teacher makes of the noise."""
        return x0_B_C_T_H_W if self.teacher is None else self.teacher.latents(epsilon_B_C_T_H_W, condition)

    def loss(
        self, x0_B_C_T_H_W: Tensor, epsilon_B_C_T_H_W: Tensor, sigma_B_T: Tensor, condition: Condition
    ) -> tuple[dict[str, Any], Tensor]:
        """The loss of these draws, with its parts.

        Under context parallelism a video's are those of this rank's frames, tensors and numbers alike; the mean over
        the group is what one process finds for the whole clip.
        """
        world, context = self.world, self.world.context
        context.activate(not condition.is_image)
        x0_B_C_T_H_W, epsilon_B_C_T_H_W = context.split_frames(x0_B_C_T_H_W), context.split_frames(epsilon_B_C_T_H_W)
        sigma_B_T = sigma_B_T if sigma_B_T.shape[1] == 1 else context.split_frames(sigma_B_T, 1)
        condition = context.part_of(condition)
        error, parts = world.objective.errors(world.denoiser, x0_B_C_T_H_W, epsilon_B_C_T_H_W, sigma_B_T, condition)
        if "x0_pred" not in parts:
            name = type(world.objective).__qualname__
            raise ConfigError(
                f"{name}.errors returned the parts {sorted(parts)}, but 'x0_pred', the predicted latents, is needed:"
                " return those of the class that it derives from, too."
            )
        if (shown_B_V := condition.shown_B_V) is not None:
            error = error * weight_of_views(shown_B_V.to(error), error.shape[3])
        loss = self._reduced(error)
        output = {
            **parts,
            "x0": x0_B_C_T_H_W,
            "sigma": sigma_B_T,
            "condition": condition,
            "mse_loss": (parts["x0_pred"] - x0_B_C_T_H_W).square().mean(),
            "edm_loss": error.detach().mean(),
            "edm_loss_per_frame": error.detach().mean(dim=(1, 3, 4)),
        }
        return output, loss

    def _reduced(self, error_B_C_T_H_W: Tensor) -> Tensor:
        reduction = cast(Literal["mean", "sum"], self.config.loss_reduce)
        return rectified_flow.reduce_loss(error_B_C_T_H_W, reduction, self.config.loss_scale)

    # --- checks of the first step

    def has_start_weights(self) -> bool:
        """True where training starts from weights of a file."""
        return bool(self.config.model_manager_config.dit_path)

    def adapters_begin_at_zero(self) -> bool:
        """True where the start leaves the base as it was: not with drawn factors, nor with adapters from a file."""
        return self.config.init_lora_weights and not self._has_trained_adapters

    @torch.no_grad()
    def expected_first_loss(self, output: Mapping[str, Any]) -> tuple[float, float] | None:
        """The range of the loss of a first step when training starts from trained weights; None where it is not known.

        An empty network predicts a velocity of zero. Its loss is that of eps - x_0: 1 + var(x_0) for each latent. A
        trained one does better. It is worst near no noise, where eps cannot be seen and 1 is left; elsewhere it has
        less than half. So a loss of 95 % of the empty one's means that weights were not loaded, or that the latents are
        those of another tokenizer.
        """
        if not self.has_start_weights() or self.net.model_channels < SMALLEST_RELEASED:
            return None  # a small network knows so little beyond its own data that it may do worse than nothing there
        if lora.adapters(self.net) and not (self.config.init_lora_weights or self._has_trained_adapters):
            return None  # drawn adapters are noise in every block
        return 0.0, 0.95 * float(self._reduced(self.world.objective.errors_of_zero_velocity(output)))

    # --- its parts

    batch_kinds: tuple[str, ...] = ("image", "video")

    @property
    def validation_sigmas(self) -> Sequence[float]:
        """Noise levels of validation; none: each sample has one, drawn as in training."""
        return self.config.validation_sigmas

    def batch_kind(self, batch: Mapping[str, Any]) -> str:
        return "image" if self.is_image_batch(batch) else "video"

    @property
    def _work_dtype(self) -> torch.dtype:
        """Latents, noise and the loss are in float32 at least; a float64 network has all of it in float64."""
        return torch.promote_types(self.precision, torch.float32)

    def is_image_batch(self, batch: Mapping[str, Any]) -> bool:
        return self._input_key(batch) == self.config.input_image_key

    def _input_key(self, batch: Mapping[str, Any]) -> str:
        """The key of a batch's clips: videos, images, or the cached latents of videos."""
        keys = (self.config.input_video_key, self.config.input_image_key, LATENTS_KEY)
        found = [key for key in keys if key in batch]
        if len(found) != 1:
            raise DataError(
                f"A batch must have one of {', '.join(repr(key) for key in keys)}, but it has"
                f" {f'both {found[0]} and {found[1]}' if found else 'none'}: {', '.join(sorted(map(str, batch)))}."
            )
        return found[0]

    def _cut(self, batch: Mapping[str, Any], generators: Draws) -> Mapping[str, Any]:
        """The batch with clips of the model's length, each cut at random (cached latents at their end), and what lies
        between their frames."""
        key = self._input_key(batch)
        if key == self.config.input_image_key:
            return batch
        clips: Tensor = batch[key]
        is_cached, state_t = key == LATENTS_KEY, self.pipe_config.state_t
        have, wanted = pixel_frames(clips.shape[2]) if is_cached else clips.shape[2], pixel_frames(state_t)
        if have == wanted:
            return batch
        if have < wanted or not (is_cached or self.pipe_config.resize_online):
            raise DataError(
                f"The clips of this batch have {have} frames, but the model takes {wanted} (state_t={state_t}). Set the"
                f" data set's num_frames={wanted}."
            )
        starts, length = [0] * len(clips), state_t
        if not is_cached:
            starts, length = (generators.uniform(1, "crop")[:, 0] * (have - wanted + 1)).long().tolist(), wanted
        cut = torch.stack([clip[:, start : start + length] for clip, start in zip(clips, starts)])
        return self.actions.cut({**batch, key: cut}, starts, wanted - 1)

    @torch.no_grad()
    def _latents(self, batch: Mapping[str, Any]) -> Tensor:
        """Latents of the pixels, or those that were cached when the data set was prepared."""
        if LATENTS_KEY not in batch:
            self.world.tokenizer.to(self.world.device)
            return self.world.tokenizer.encode(self._pixels(batch)).to(self._work_dtype)
        if not self._has_checked_latents:
            check_tokenizer(self.world.tokenizer, batch)
            self.world.offload_tokenizer = True  # it is only used between steps, if ever
            self._has_checked_latents = True
        latents: Tensor = batch[LATENTS_KEY]
        if latents.shape[1] != (channels := self.world.tokenizer.latent_ch):
            raise DataError(f"The latents of this batch have {latents.shape[1]} channels; the model takes {channels}.")
        return latents.to(next(self.net.parameters()).device, self._work_dtype)

    def _require_size(self, x0_B_C_T_H_W: Tensor) -> None:
        """Raise for pictures that the network's patches do not fill."""
        patch, factor = self.net.patch_spatial, self.world.tokenizer.spatial_compression_factor
        height, width = x0_B_C_T_H_W.shape[3:]
        if height % patch or width % patch:
            raise DataError(
                f"The clips of this batch are {width * factor} x {height * factor} pixels, but this model takes"
                f" multiples of {patch * factor}. Set the data set's video_size."
            )

    def _pixels(self, batch: Mapping[str, Any]) -> Tensor:
        """RGB in [-1, 1], [B, 3, F, H, W]. Floating pixels are taken as they are, and must lie there."""
        pixels: Tensor = batch[self._input_key(batch)]
        pixels = pixels[:, :, None] if pixels.dim() == 4 else pixels
        is_scaled = pixels.is_floating_point()
        pixels = pixels.to(next(self.net.parameters()).device).to(self._work_dtype)
        if not is_scaled:
            return pixels / 127.5 - 1
        if pixels.numel() and (largest := float(pixels.abs().max())) > 1.0001:
            raise DataError(f"Floating pixels reach {largest:.4g}; they must lie in [-1, 1]. Give uint8 for 0...255.")
        return pixels

    def _num_conditional_frames(
        self, batch: Mapping[str, Any], x0: Tensor, generators: Draws, is_fixed: bool
    ) -> Tensor:
        """The number of latent frames that condition each sample: that of the batch, the fewest, or drawn."""
        if "num_conditional_frames" in batch:
            given = torch.as_tensor(batch["num_conditional_frames"]).reshape(-1)
            if given.numel() not in (1, x0.shape[0]) or not ((given >= 0) & (given < max(2, x0.shape[2]))).all():
                raise DataError(
                    f"The batch's num_conditional_frames is {given.tolist()}, but it must be one number or one for each"
                    f" of the {x0.shape[0]} samples, and below the {x0.shape[2]} latent frames."
                )
            return given.expand(x0.shape[0]) if given.numel() == 1 else given
        if "first_random_n" not in self._condition_locations:
            return torch.zeros(x0.shape[0], dtype=torch.int64)
        if is_fixed:
            return torch.full((x0.shape[0],), self.config.fewest_conditional_frames, device=x0.device)
        return self.config.draw_conditional_frames(generators).to(x0.device, non_blocking=True)

    def _generators(self, batch: Mapping[str, Any], pass_name: str) -> Draws:
        size, positions = len(batch[self._input_key(batch)]), batch.get(POSITION_KEY)
        return Draws(size, None if positions is None else positions.tolist(), self.seed, pass_name)


def weight_of_views(shown_B_V: Tensor, height: int) -> Tensor:
    """[B, 1, 1, H, 1] of latents whose views are stacked: 0 where nothing was filmed, and 1 on the mean of a sample."""
    if height % (num_views := shown_B_V.shape[1]):
        raise DataError(f"Latents that are {height} high do not hold {num_views} views of one height: see video_size.")
    weight_B_V = shown_B_V / shown_B_V.mean(dim=1, keepdim=True)
    return weight_B_V.repeat_interleave(height // num_views, dim=1)[:, None, None, :, None]


def counted_losses(output: Mapping[str, Any], loss: Tensor, weight_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """``edm_loss`` and the loss of a batch, of its samples of weight 1 alone (another rank has those of 0, too)."""
    edm_loss: Tensor = output["edm_loss"]
    if weight_B is None:
        return edm_loss, loss
    weight_B = weight_B.to(edm_loss)
    counted = (output["edm_loss_per_frame"].mean(dim=1) * weight_B).sum() / weight_B.sum().clamp(min=1)
    return counted, loss * counted / edm_loss.clamp(min=torch.finfo(edm_loss.dtype).tiny)


# The names of published configurations, whose parts are composed now.
Predict2Video2WorldModel = Predict2Video2WorldActionConditionedModel = Video2WorldModel


class Predict2p5Video2WorldModel(Video2WorldModel):
    """A plain mapping is a config of Predict2.5."""

    config_class = Predict2p5Video2WorldModelConfig


Predict2p5ActionConditionedModel = Predict2p5Video2WorldModel
