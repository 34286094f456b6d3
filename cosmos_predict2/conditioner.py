# SPDX-License-Identifier: Apache-2.0
"""Conditions of a generation, which training withholds at times so that guidance can be learnt.

The conditioner turns a batch into a `Condition`. In training each input may be dropped for a whole sample: its values
become zero, and a text of zeros is what "no text" means to the network. In inference the pair for guidance is made:
with the text, and with the negative text or none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from imaginaire.config.schema import Section, at_least
from imaginaire.errors import DataError

TEXT_KEY = "t5_text_embeddings"
NEGATIVE_TEXT_KEY = "neg_t5_text_embeddings"
ACTION_KEY = "action"
STATE_KEY = "state"  # of the robot, [B, F, S] at the frames
SHOWN_KEY = "shown"  # 1 for each view that was filmed, [B, V]
EXTRA_KEY, IMAGE_KEY = "extra_channels", "image_features"  # of image to video, see `image_channels`
GIVEN_VIEW_KEY = "given_view"  # of several views the one of which all frames are given, [B]
MASK_CHANNELS = 4  # of `image_channels`
EMBEDDERS = ("fps", "padding_mask", "text", "use_video_condition")  # in the order of their draws


@dataclass(frozen=True)
class Condition:
    """Everything that the network sees besides the noisy latents and the noise level."""

    crossattn_emb_B_S_E: Tensor
    padding_mask_B_1_H_W: Tensor | None = None  # in pixels; 1 where the picture is padding
    fps_B: Tensor | None = None
    is_image: bool = False
    use_video_condition: bool = True  # False: conditioning frames are zeros, under the same mask
    gt_frames_B_C_T_H_W: Tensor | None = None
    condition_mask_B_1_T_H_W: Tensor | None = None  # 1 on the conditioning frames
    given_view_B: Tensor | None = None  # of several views the one whose frames all are
    action_B_A_D: Tensor | None = None  # of the whole clip, scaled; never withheld
    state_B_F_S: Tensor | None = None  # of training alone, where the network predicts it
    shown_B_V: Tensor | None = None  # of training alone: 1 for the views in which errors count
    extra_B_C_T_H_W: Tensor | None = None  # channels that follow the noisy latents; never withheld
    image_B_S_E: Tensor | None = None  # features of the picture that the clip begins with; never withheld
    is_without_text: bool = False  # known to be: then nobody looks at the text, for which a GPU would be waited for

    def with_conditioning_frames(self, gt_frames_B_C_T_H_W: Tensor, num_frames_B: Tensor) -> "Condition":
        """The same, with the first latent frames of each sample as conditioning frames."""
        mask = conditioning_frames_mask(num_frames_B, gt_frames_B_C_T_H_W)
        return replace(self, gt_frames_B_C_T_H_W=gt_frames_B_C_T_H_W, condition_mask_B_1_T_H_W=mask)

    def with_given_view(self, view_B: Tensor, num_views: int) -> "Condition":
        """The same, with all frames of a view of each sample as conditioning frames."""
        assert self.condition_mask_B_1_T_H_W is not None
        is_given_B_V = F.one_hot(view_B, num_views)
        mask_B_1_T_V_H_W = self.condition_mask_B_1_T_H_W.unflatten(3, (num_views, -1))
        given = torch.maximum(mask_B_1_T_V_H_W, is_given_B_V[:, None, None, :, None, None].to(mask_B_1_T_V_H_W))
        return replace(self, condition_mask_B_1_T_H_W=given.flatten(3, 4), given_view_B=view_B)

    def frames(self, first: int, end: int) -> "Condition":
        """The same for latent frames ``first`` to ``end``: values of frames are cut, values of the clip stay."""
        own = ("gt_frames_B_C_T_H_W", "condition_mask_B_1_T_H_W", "extra_B_C_T_H_W")
        found = {name: value for name in own if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value[:, :, first:end] for name, value in found.items()})

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Condition":
        """The same with every tensor changed, such as moved to a device, or cut to some of the samples."""
        changed: dict[str, Any] = {name: change(v) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **changed)

    def rows(self, rows_B: Tensor) -> "Condition":
        """The condition of some of the samples; where all are the same one, its text is expanded and not copied."""
        text, numbers = self.crossattn_emb_B_S_E, rows_B.tolist()

        def chosen(value: Tensor) -> Tensor:
            return value[rows_B.to(value.device, non_blocking=True)]

        others = self.with_tensors(lambda value: value if value is text else chosen(value))
        own = text[numbers[0] : numbers[0] + 1].expand(len(numbers), -1, -1) if len(set(numbers)) == 1 else chosen(text)
        return replace(others, crossattn_emb_B_S_E=own)

    def equals(self, other: "Condition") -> bool:
        """True where a network sees the same in both, so that guidance would subtract zero."""
        known = {"crossattn_emb_B_S_E"} if self.is_without_text and other.is_without_text else set()
        names = [field.name for field in fields(self) if field.name not in known]
        return all(_is_same(getattr(self, name), getattr(other, name)) for name in names)

    def stacked_with(self, other: "Condition") -> "Condition":
        """Both conditions in one batch, this one first."""
        values: dict[str, Any] = {
            name: torch.cat([value, getattr(other, name)])
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **values, is_without_text=self.is_without_text and other.is_without_text)


def conditioning_frames_mask(num_frames_B: Tensor, like_B_C_T_H_W: Tensor) -> Tensor:
    """[B, 1, T, H, W], 1 on the first ``num_frames_B`` latent frames of each sample; none where T is 1."""
    batch, _, frames, height, width = like_B_C_T_H_W.shape
    index_T = torch.arange(frames, device=like_B_C_T_H_W.device)
    count_B_1 = num_frames_B.to(index_T.device, non_blocking=True)[:, None] * (frames > 1)
    mask_B_T = (index_T < count_B_1).to(like_B_C_T_H_W.dtype)
    return mask_B_T[:, None, :, None, None].expand(batch, 1, frames, height, width).contiguous()


def image_channels(encode: Callable[[Tensor], Tensor], video_B_C_F_H_W: Tensor, is_given_F: Tensor) -> Tensor:
    """The channels by which a network of Wan2.1 sees given frames of a clip in [-1, 1]: of their mask and of latents.

    Frames that are not given are grey before the clip is encoded. The mask's channels are the pixel frames of a latent
    frame; the first latent frame has one, which is repeated.
    """
    latent_B_C_T_H_W = encode(torch.where(is_given_F[:, None, None], video_B_C_F_H_W, 0.0))
    is_given = torch.cat([is_given_F[:1].expand(MASK_CHANNELS - 1), is_given_F]).to(latent_B_C_T_H_W)
    mask_M_T_1_1 = is_given.view(-1, MASK_CHANNELS).t()[:, :, None, None]
    batch, _, frames, height, width = latent_B_C_T_H_W.shape
    mask_B_M_T_H_W = mask_M_T_1_1.expand(batch, MASK_CHANNELS, frames, height, width)
    return torch.cat([mask_B_M_T_H_W, latent_B_C_T_H_W], dim=1)


def first_frames_as_channels(
    encode: Callable[[Tensor], Tensor], frames_B_C_F_H_W: Tensor, num_frames: int
) -> dict[str, Tensor]:
    """`image_channels` of the first frames, in [-1, 1], of a clip of so many, as a part of a batch."""
    count = frames_B_C_F_H_W.shape[2]
    video_B_C_F_H_W = F.pad(frames_B_C_F_H_W, (0, 0, 0, 0, 0, num_frames - count))
    is_given_F = torch.arange(num_frames, device=frames_B_C_F_H_W.device) < count
    return {EXTRA_KEY: image_channels(encode, video_B_C_F_H_W, is_given_F)}


@attrs.define(kw_only=True, slots=False)
class DropoutConfig(Section):
    """The share of samples from which training withholds an input."""

    dropout_rate: float = attrs.field(default=0.0, validator=at_least(0, at_most=1))


@attrs.define(kw_only=True, slots=False)
class ConditionerConfig(Section):
    fps: DropoutConfig = attrs.field(factory=DropoutConfig)
    padding_mask: DropoutConfig = attrs.field(factory=DropoutConfig)
    text: DropoutConfig = attrs.field(factory=lambda: DropoutConfig(dropout_rate=0.2))
    use_video_condition: DropoutConfig = attrs.field(factory=DropoutConfig)


class Conditioner:
    """Batches to conditions, by the dropout rates of its config."""

    def __init__(self, config: ConditionerConfig | None = None) -> None:
        config = config or ConditionerConfig()
        self.rates = {name: float(getattr(config, name).dropout_rate) for name in EMBEDDERS}

    def draw_keep(self, generators: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """Masks [B] by input, 1 for the samples that keep it; of the flag, which is the batch's, a single number."""
        keep = {}
        for name, rate in self.rates.items():
            chosen = generators[:1] if name == "use_video_condition" else generators
            keep[name] = torch.cat([torch.bernoulli(torch.full((1,), 1.0 - rate), generator=g) for g in chosen])
        return keep

    def condition(
        self, batch: Mapping[str, Any], *, is_image: bool, keep: Mapping[str, Tensor] | None = None
    ) -> Condition:
        """The condition of a batch; ``keep`` as `draw_keep` gives it, or all of it."""
        condition = Condition(
            crossattn_emb_B_S_E=_required(batch, TEXT_KEY),
            padding_mask_B_1_H_W=_required(batch, "padding_mask"),
            fps_B=_required(batch, "fps"),
            is_image=is_image,
            action_B_A_D=batch.get(ACTION_KEY),
            state_B_F_S=batch.get(STATE_KEY),
            shown_B_V=batch.get(SHOWN_KEY),
            extra_B_C_T_H_W=batch.get(EXTRA_KEY),
            image_B_S_E=batch.get(IMAGE_KEY),
        )
        return condition if keep is None else self.withheld(condition, keep)

    def guidance_pair(self, batch: Mapping[str, Any]) -> tuple[Condition, Condition]:
        """The condition with the text, and that with the batch's negative text in its place, or with zeros where it
        has none."""
        conditional = self.condition(batch, is_image=False)
        if NEGATIVE_TEXT_KEY in batch:
            return conditional, replace(conditional, crossattn_emb_B_S_E=batch[NEGATIVE_TEXT_KEY])
        dropped = {name: torch.full((1,), float(rate <= 1e-4)) for name, rate in self.rates.items()}
        # The user's conditioning frames are never withheld.
        dropped["use_video_condition"] = torch.ones(1)
        return conditional, self.withheld(conditional, dropped)

    def withheld(self, condition: Condition, keep: Mapping[str, Tensor]) -> Condition:
        """The condition with what ``keep`` leaves of it, as `draw_keep` gives it."""
        return replace(
            condition,
            crossattn_emb_B_S_E=_kept(condition.crossattn_emb_B_S_E, keep["text"], self.rates["text"]),
            padding_mask_B_1_H_W=_kept(
                condition.padding_mask_B_1_H_W, keep["padding_mask"], self.rates["padding_mask"]
            ),
            fps_B=_kept(condition.fps_B, keep["fps"], self.rates["fps"]),
            use_video_condition=bool(keep["use_video_condition"].item()),
        )


def _kept(value: Any, keep: Tensor, rate: float) -> Any:
    if rate == 0.0 or value is None:
        return value  # as it is: an integer frame rate stays one
    return value * keep.to(value, non_blocking=True).reshape(-1, *[1] * (value.dim() - 1))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
    return bool(a == b)


def _required(batch: Mapping[str, Any], key: str) -> Tensor:
    if key not in batch:
        raise DataError(f"The batch has no '{key}'. It has: {', '.join(sorted(map(str, batch)))}.")
    value: Tensor = batch[key]
    return value
