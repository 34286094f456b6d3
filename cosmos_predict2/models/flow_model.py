# SPDX-License-Identifier: Apache-2.0
"""Post-training of Predict2.5: the network learns the velocity of a flow from pictures to noise.

    x_t = (1 - t) x_0 + t eps        loss = mean of (network(x_t, t) - (eps - x_0))^2

Times are drawn near t = 1/2 and shifted towards noise. Of each sample none, one or two latent frames are given; they
enter clean, and what the network says of them counts as right. All else, from data to checkpoints, is as for Predict2,
whose noise levels sigma = t / (1 - t) name the same mixtures: the methods here take and give those, too.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

import attrs
import torch
from torch import Tensor

from cosmos_predict2.diffusion import flow_time, rectified_flow
from cosmos_predict2.models.draws import Draws
from cosmos_predict2.models.text_widths import text_of_config, text_problems
from cosmos_predict2.models.training_text import TrainingText, TrainingTextConfig
from cosmos_predict2.models.video2world_model import Predict2Video2WorldModel, Predict2Video2WorldModelConfig
from cosmos_predict2.text.trained_text import text_facts
from imaginaire.config.schema import above, one_of
from imaginaire.errors import ConfigError
from imaginaire.findings import Finding, error, warning

log = logging.getLogger(__name__)

_FLOW_KEY = "model.config.pipe_config.flow"
_NO_FLOW = (
    "null, but a Predict2.5 network is trained by it. Set flow=dict(shift=5.0) in the"
    " experiment, or take the pipeline of get_cosmos_predict2p5_video2world_pipeline"
)

OF_PREDICT2: dict[str, Any] = {  # options that are inherited and that this loss does not read, with their defaults
    "adjust_video_noise": True,
    "pipe_config.adjust_video_noise": True,
    "pipe_config.video_noise_factor": None,
    "pipe_config.rectified_flow_loss_weight_uniform": True,
}

# Of a sample's noise as sigma = t / (1 - t), which is infinite for noise alone: float32 knows no time between the two.
LATEST_TIME = 1 - 2.0**-24


def check_probabilities(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """A validator: a share for each number of given frames."""
    if value is None:
        return
    try:
        shares = given_shares(value)
    except (AttributeError, TypeError, ValueError):
        shares = {}
    if not shares or min(shares) < 0 or not all(0 <= share < float("inf") for share in shares.values()):
        shares = {}
    if not sum(shares.values()) > 0:
        raise ConfigError(
            f"{attribute.name}={value}, but it gives numbers of latent frames, from 0, their shares, which are"
            " not negative: {0: 0.5, 1: 0.25, 2: 0.25}, or null for pipe_config.min_ and max_num_conditional_frames."
        )


def _replaces_texts(text: Mapping[str, Any]) -> bool:
    """Whether texts that the data may carry are of no use."""
    return text["encoder"] is not None or bool(text["constant_path"])


def given_shares(value: Mapping[Any, Any]) -> dict[int, float]:
    """The share of each number of given frames, by number."""
    return {int(number): float(share) for number, share in sorted(value.items())}


@attrs.define(kw_only=True, slots=False)
class Predict2p5Video2WorldModelConfig(Predict2Video2WorldModelConfig):
    """``high_sigma_ratio`` is the share of videos that train at timesteps from 980 to 1000."""

    loss_scale: float = attrs.field(default=1.0, validator=above(0))
    train_time_distribution: str = attrs.field(default="logitnormal", validator=one_of(*flow_time.DISTRIBUTIONS))
    train_time_shift: float = attrs.field(default=5.0, validator=above(0))
    train_time_table: bool = False  # times from a table of 1000, as in the first version of the family
    # How often so many latent frames are given; null: evenly from the pipeline's smallest to its largest number.
    conditional_frames_probs: Any = attrs.field(
        factory=lambda: {0: 0.5, 1: 0.25, 2: 0.25}, validator=check_probabilities
    )
    text: TrainingTextConfig = attrs.field(factory=TrainingTextConfig)


class Predict2p5Video2WorldModel(Predict2Video2WorldModel):
    """As its base; ``pipe_config.flow`` says how the network is asked."""

    config_class = Predict2p5Video2WorldModelConfig
    config: Predict2p5Video2WorldModelConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.pipe_config.flow is None:
            raise ConfigError(f"{_FLOW_KEY}: {_NO_FLOW}.")
        self.text = TrainingText(self.config.text)
        if shares := given_shares(self.config.conditional_frames_probs or {}):
            # Said, since a mapping in an override is merged over the one that stands there.
            total = sum(shares.values())
            told = ", ".join(f"{number} in {share / total:.0%}" for number, share in shares.items())
            log.info("given latent frames: %s of the clips", told)

    @classmethod
    def _check_config(cls, config: Any) -> Iterator[Finding]:
        yield from super()._check_config(config)
        yield from TrainingText.check(config["text"])
        pipe = config["pipe_config"]
        yield from starmap(error, text_problems(config["text"], pipe["net"]))
        for key, default in OF_PREDICT2.items():
            section, name = (pipe, key.removeprefix("pipe_config.")) if "." in key else (config, key)
            if (value := section.get(name, default)) != default:
                yield warning(
                    f"model.config.{key}",
                    f"{value} has no effect: the loss of Predict2 reads it, that of Predict2.5 does not. The noise of"
                    " Predict2.5 is set by train_time_shift and train_time_distribution",
                )
        shares = given_shares(config["conditional_frames_probs"] or {})
        most = max((number for number, share in shares.items() if share > 0), default=0)
        if most >= pipe["state_t"]:
            text = f"{most} conditioning frames, but a clip has {pipe['state_t']} (state_t)"
            yield error("model.config.conditional_frames_probs", text)

    @classmethod
    def _check_family(cls, pipe: Mapping[str, Any]) -> Iterator[Finding]:
        if pipe.get("flow") is None:
            yield error(_FLOW_KEY, _NO_FLOW)

    @classmethod
    def _check_data(
        cls, key: str, data: Mapping[str, Any], config: Any, training: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[Finding]:
        """As for Predict2; besides, captions that nothing encodes."""
        yield from super()._check_data(key, data, config, training)
        if data.get("text_encoder") == "none" and not _replaces_texts(config["text"]):
            text = "text_encoder=none reads captions without embeddings, but nothing is set to encode them"
            yield error(key, text, "Set model.config.text.encoder")

    @classmethod
    def _text_problems(cls, data: Mapping[str, Any], config: Any) -> Iterator[str]:
        """Those in the data need not fit where they are not used."""
        if not _replaces_texts(config["text"]):
            for problem in super()._text_problems(data, config):
                yield f"{problem}. Or set model.config.text.encoder or constant_path: their texts replace these"

    def _text_facts(self, data_sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not self.config.text.is_set:
            return super()._text_facts(data_sets)
        text = text_of_config(self.config.text)
        return text_facts([] if text is None else [text])

    # --- one step

    def draw_noise(self, x0_B_C_T_H_W: Tensor, is_image: bool, generators: Draws) -> tuple[Tensor, Tensor]:
        """Standard normal noise, and one noise level t / (1 - t) per sample [B, 1]."""
        config = self.config
        epsilon = generators.normal(x0_B_C_T_H_W.shape, "epsilon").to(x0_B_C_T_H_W, non_blocking=True)
        uniform_B_3 = generators.uniform(3, "sigma")
        timesteps_B = flow_time.draw_timesteps(
            uniform_B_3[:, 0],
            distribution=config.train_time_distribution,
            shift=config.train_time_shift,
            from_table=config.train_time_table,
            high_noise_ratio=0.0 if is_image else config.high_sigma_ratio,
            pick_B=uniform_B_3[:, 1],
            high_B=uniform_B_3[:, 2],
        )
        t_B = (timesteps_B.double() / flow_time.NUM_TIMESTEPS).clamp(max=LATEST_TIME)
        return epsilon, rectified_flow.noise_level(t_B)[:, None].to(x0_B_C_T_H_W, non_blocking=True)

    # --- its parts

    def _with_text(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        size, device = len(batch[self._input_key(batch)]), next(self.net.parameters()).device
        return self.text.added_to(batch, size, device)

    def _fewest_given(self) -> int:
        """One, if it is ever given: from text alone nothing follows that a true clip could be compared with."""
        low, high = self.pipe_config.min_num_conditional_frames, self.pipe_config.max_num_conditional_frames
        shares = given_shares(self.config.conditional_frames_probs or {})
        given = [number for number, share in shares.items() if share > 0] or range(low, high + 1)
        return min((n for n in given if n > 0), default=0)

    def _num_given(self, batch: Mapping[str, Any], x0: Tensor, generators: Draws, number: int | None = None) -> Tensor:
        shares = given_shares(self.config.conditional_frames_probs or {})
        if not shares or number is not None or "num_conditional_frames" in batch:
            return super()._num_given(batch, x0, generators, number)
        numbers = torch.tensor(list(shares))
        limits = torch.tensor(list(shares.values()), dtype=torch.float64).cumsum(0)
        drawn_B = generators.uniform(1, "given_frames")[:, 0] * limits[-1]
        given_B = numbers[torch.searchsorted(limits, drawn_B, right=True).clamp(max=len(numbers) - 1)]
        return given_B.to(x0.device, non_blocking=True)
