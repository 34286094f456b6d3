# SPDX-License-Identifier: Apache-2.0
"""From noise to latents: the network with its conditions, guidance, and the solver that a config asks for."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.schedules import karras_sigmas
from cosmos_predict2.diffusion.solvers import guide, sample
from cosmos_predict2.nn.blocks import KeysValues
from cosmos_predict2.nn.dit import DiT, Prepared
from cosmos_predict2.world_model.cuda_graph import GraphedNetwork
from cosmos_predict2.world_model.denoiser import Predict, clean_latents, with_given
from cosmos_predict2.world_model.device_memory import activation_bytes, free_memory
from cosmos_predict2.world_model.flow import DISTILLED, default_solver, sample_distilled, sample_flow, solver_names
from cosmos_predict2.world_model.flow import SOLVER as FLOW_SOLVER
from cosmos_predict2.world_model.parallelize import ContextParallel
from imaginaire import distributed
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.progress import Progress

if TYPE_CHECKING:
    from cosmos_predict2.world_model.config import Video2WorldPipelineConfig


class Sampler:
    """A network's ways to make latents. What is captured of it on a GPU is kept from one sampling to the next."""

    def __init__(
        self, config: "Video2WorldPipelineConfig", net: DiT, device: torch.device, context: ContextParallel
    ) -> None:
        self.config = config
        self.dit = net
        self.device = device
        self.context = context
        self.denoiser = config.denoiser(net)
        self._graphed: GraphedNetwork | None = None

    @property
    def has_graphs(self) -> bool:
        return self._graphed is not None

    def sample(
        self,
        conditional: Condition,
        unconditional: Condition,
        noise_B_C_T_H_W: Tensor,
        *,
        guidance: float,
        num_steps: int,
        solver: str | None,
        use_cuda_graphs: bool,
        progress: bool,
        on_step: Callable[[int, Any], None] | None,
    ) -> Tensor:
        """Latents [B, C, T, H, W] out of standard normal noise, all of whole clips; each rank may see its own frames.

        Where both conditions are the same, the network is asked once a step.
        """
        config, flow = self.config, self.config.flow
        solver = solver or default_solver(flow)
        if solver not in (known := solver_names(flow)):
            raise ConfigError(f"No solver of this network's noise levels is called '{solver}'.{near(solver, known)}")
        if num_steps < 1:
            raise ConfigError(f"num_steps={num_steps}: sampling takes at least 1 step.")
        is_guided = guidance != 0 and not self._on_all_ranks(conditional.equals(unconditional))
        self.context.activate(True)
        conditional = self.context.part_of(conditional)
        other = self.context.part_of(unconditional) if is_guided else None
        noise = self.context.split_frames(noise_B_C_T_H_W)
        with Progress("sampling", num_steps, unit="step", leave=False, is_shown=progress) as bar:

            def report(i: int, step: Any) -> None:
                bar.update()
                if on_step is not None:
                    on_step(i, step)

            if flow is not None and solver in (FLOW_SOLVER, DISTILLED):
                guided = self._guided(conditional, other, guidance, use_cuda_graphs, flow.velocity)

                def velocity(x: Tensor, timesteps_B: Tensor) -> Tensor:
                    return flow.with_true_velocity(guided(x, timesteps_B), conditional, noise)

                if solver == DISTILLED:
                    latent = sample_distilled(velocity, noise, num_steps, flow.shift, report)
                else:
                    latent = sample_flow(velocity, noise, flow.levels(num_steps), report)
                # The line that given frames move along ends beside them, as the first time is a little below 1.
                latent = with_given(latent, conditional)
            else:
                levels = config.timestamps
                sigmas = karras_sigmas(num_steps, levels.t_min, levels.t_max, levels.order)
                denoise = self._guided(conditional, other, guidance, use_cuda_graphs)
                latent = sample(denoise, noise * levels.t_max, sigmas, solver, report)
            return self.context.gather_frames(latent)

    def _guided(
        self,
        conditional: Condition,
        unconditional: Condition | None,
        guidance: float,
        use_cuda_graphs: bool,
        predict: Predict = clean_latents,
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """What is predicted, with guidance; both halves in one batch where memory allows and their texts are equally
        long."""
        given = conditional.gt_frames_B_C_T_H_W
        assert given is not None
        shape = (given.shape[2], given.shape[3], given.shape[4])

        def run(condition: Condition) -> Callable[[Tensor, Tensor], Tensor]:
            denoiser = self.denoiser
            if use_cuda_graphs:
                denoiser = self.config.denoiser(cast(DiT, self._graphed_net()))
            if isinstance(self.dit, FSDPModule):  # its weights are whole only inside its own forward pass
                self.dit.require_readable(condition.crossattn_emb_B_S_E)
                prepared = None
            else:
                prepared = self._prepared(condition, shape)
            return lambda x, level_B: predict(denoiser, x, level_B, condition, prepared)

        if unconditional is None:
            return run(conditional)
        lengths = {one.crossattn_emb_B_S_E.shape[1] for one in (conditional, unconditional)}
        if len(lengths) == 1 and self.fits_twice(given):
            both = run(conditional.stacked_with(unconditional))

            def guided_together(x: Tensor, level_B: Tensor) -> Tensor:
                positive, negative = both(torch.cat([x, x]), torch.cat([level_B, level_B])).chunk(2)
                return guide(positive, negative, guidance)

            return guided_together
        positive, negative = run(conditional), run(unconditional)
        return lambda x, level_B: guide(positive(x, level_B), negative(x, level_B), guidance)

    def _prepared(self, condition: Condition, latent_shape: tuple[int, int, int]) -> Prepared:
        """What the network keeps of a condition from step to step; of one text for all samples it is made once."""
        text_B_S_E = condition.crossattn_emb_B_S_E
        size = text_B_S_E.shape[0]
        is_one = size > 1 and text_B_S_E.stride(0) == 0
        text = (text_B_S_E[:1] if is_one else text_B_S_E).to(self.dit.dtype)
        try:
            prepared = self.dit.prepare(text, latent_shape=latent_shape, fps_B=condition.fps_B, skip_no_text=True)
        except ValueError as error:  # frames or a text that this network does not take
            raise DataError(f"This network cannot make such a video. {error}") from error
        if not is_one:
            return prepared
        cross = (kept and tuple(value.expand(size, -1, -1, -1) for value in kept) for kept in prepared.cross)
        return replace(prepared, cross=cast("tuple[KeysValues | None, ...]", tuple(cross)))

    def fits_twice(self, latent_B_C_T_H_W: Tensor) -> bool:
        """Whether the activations of a batch twice as large fit into the memory that is free, on all ranks."""
        if self.device.type != "cuda":
            return True
        needed = 2 * activation_bytes(self.dit, latent_B_C_T_H_W[:, 0].numel())
        return self._on_all_ranks(needed < free_memory(self.device))

    def _graphed_net(self) -> GraphedNetwork:
        """The network that replays, with what it has captured so far."""
        if self._graphed is None or not self._graphed.fits(self.dit):
            self._graphed = GraphedNetwork(self.dit, self.device)
        return self._graphed

    def _on_all_ranks(self, value: bool) -> bool:
        """Whether it is so on all ranks whose forward passes are this one's, too."""
        found = torch.tensor(float(value))
        if isinstance(self.dit, FSDPModule):  # every forward pass is one of all ranks
            distributed.all_reduce_(found, "min")
        elif self.context.size > 1:
            distributed.all_reduce_(found, "min", self.context.group)
        return bool(found)


def initial_noise(shape: tuple[int, ...], seed: int | Sequence[int]) -> Tensor:
    """Standard normal float32 from NumPy's RandomState: the same on every device and number of processes.

    With a seed for each sample, each is what a batch of it alone gets.
    """
    if not isinstance(seed, int):
        if len(seed) != shape[0]:
            raise ConfigError(f"There are {len(seed)} seeds for a batch of {shape[0]}: one for each sample.")
        return torch.cat([initial_noise((1, *shape[1:]), int(one)) for one in seed])
    return torch.from_numpy(numpy.random.RandomState(seed).standard_normal(shape).astype(numpy.float32))


def to_uint8(video: Tensor) -> Tensor:
    """[-1, 1] to 0 ... 255, rounded."""
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
