# SPDX-License-Identifier: Apache-2.0
"""OpenVLA's pictures, question and actions, exactly as published.

Pictures are brought to size as uint8 by PIL, and normalised later, on the device: what records hold takes a quarter of
the memory of what the towers compute with. An action's numbers are tokens: the last 256 ids of a vocabulary stand for
bins of [-1, 1], and statistics give these a unit. A larger action has a smaller id. The round trip is not the identity
at the top: 1 and the bin below it share a centre.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.statistics import refuse_impossible
from cosmos_predict2.text import pretrained
from imaginaire.errors import CheckpointError, ConfigError, DataError, near

PREPROCESSOR = "preprocessor_config.json"
STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
CROP_AREA = 0.9
Picture = NDArray[numpy.uint8]
PROMPT = "In: What action should the robot take to {}?\nOut:"
SPACE = "▁"  # a lone space, which the answers of the training data begin with
BOUNDS = {"q99": ("q01", "q99"), "minmax": ("min", "max")}
GRIPPERS = ("as_is", "libero")
EPSILON = 1e-8
_TOO_LONG = 1.5  # some checkpoints store the statistics of two chunks side by side
Floats = NDArray[numpy.float64]


# --- pictures


def center_crop(picture: Picture, size: int, area: float = CROP_AREA) -> Picture:
    """The middle of a picture [H, W, 3], ``area`` of it, at size x size."""
    from PIL import Image

    height, width = picture.shape[:2]
    rows, columns = int(height * math.sqrt(area)), int(width * math.sqrt(area))
    top, left = (height - rows) // 2, (width - columns) // 2
    cropped = Image.fromarray(picture[top : top + rows, left : left + columns])
    return numpy.asarray(cropped.resize((size, size), Image.Resampling.BILINEAR))


@dataclass(frozen=True)
class Resize:
    """The way a tower's pictures are brought to size."""

    strategy: str
    size: int
    interpolation: str
    fill: tuple[int, ...]  # of a letterbox

    def __call__(self, picture: Picture) -> Picture:
        from PIL import Image

        image = Image.fromarray(picture)
        resample = Image.Resampling[self.interpolation.upper()]
        if self.strategy == "letterbox":
            longest = max(image.size)
            left, top = (int((longest - side) / 2) for side in image.size)
            boxed = Image.new("RGB", (image.width + 2 * left, image.height + 2 * top), self.fill)
            boxed.paste(image, (left, top))
            image = boxed
        if self.strategy == "resize-naive":
            return numpy.asarray(image.resize((self.size, self.size), resample))
        width, height = image.size
        shorter = min(width, height)
        sides = tuple(int(self.size * side / shorter) for side in (width, height))
        image = image.resize((sides[0], sides[1]), resample)
        left, top = (round((side - self.size) / 2) for side in sides)
        return numpy.asarray(image.crop((left, top, left + self.size, top + self.size)))


@dataclass(frozen=True)
class Preprocessor:
    """A checkpoint's preprocessor_config.json; one entry for each tower."""

    resizes: tuple[Resize, ...]
    means: tuple[tuple[float, ...], ...]
    stds: tuple[tuple[float, ...], ...]
    crops: bool = False  # to the middle beforehand, as policies are evaluated that were trained on random crops

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str, crops: bool = False) -> "Preprocessor":
        try:
            strategy, means, stds = config["image_resize_strategy"], config["means"], config["stds"]
            sizes, interpolations = config["input_sizes"], config["interpolations"]
        except KeyError as error:
            raise CheckpointError(
                f"{source} has no {error}, how pictures are brought to size. Copy the published file there."
            ) from None
        if strategy not in STRATEGIES:
            raise CheckpointError(f"{source}: image_resize_strategy is '{strategy}'.{near(strategy, STRATEGIES)}")
        fill = tuple(int(255 * value) for value in means[-1])  # one frame for all towers, as published: of the last
        resizes = tuple(Resize(strategy, size[-1], name, fill) for size, name in zip(sizes, interpolations))
        return cls(resizes, tuple(map(tuple, means)), tuple(map(tuple, stds)), crops)

    @property
    def kinds(self) -> tuple[Resize, ...]:
        """Resizes that differ; towers mostly share one."""
        return tuple(dict.fromkeys(self.resizes))

    def resized(self, views_E_V_H_W_C: Tensor) -> Tensor:
        """uint8 pictures [E, V, H, W, 3] as [E, V, kinds, 3, size, size], still uint8."""
        flat = views_E_V_H_W_C.flatten(0, 1).cpu().numpy()
        if self.crops:
            flat = numpy.stack([center_crop(picture, self.resizes[0].size) for picture in flat])
        of_kinds = numpy.stack([numpy.stack([resize(picture) for picture in flat]) for resize in self.kinds], axis=1)
        pictures = torch.from_numpy(of_kinds).permute(0, 1, 4, 2, 3).contiguous()
        return pictures.unflatten(0, views_E_V_H_W_C.shape[:2])

    def normalized(self, resized_E_V_R_C_H_W: Tensor) -> Tensor:
        """The towers' input, float32 [E, V * towers * 3, size, size]: of each view the channels of each tower."""
        scaled = resized_E_V_R_C_H_W.float() / 255
        towers = []
        for resize, mean, std in zip(self.resizes, self.means, self.stds):
            of_tower = scaled[:, :, self.kinds.index(resize)]
            mean_3_1_1, std_3_1_1 = (of_tower.new_tensor(value)[:, None, None] for value in (mean, std))
            towers.append((of_tower - mean_3_1_1) / std_3_1_1)
        return torch.stack(towers, dim=2).flatten(1, 3)


# --- words


class Prompts:
    """Sentences to padded ids; each sentence is encoded once."""

    def __init__(self, folder: str, max_tokens: int, pad_id: int) -> None:
        package = pretrained.transformers()
        # the public config.json asks for code of its own, which a tokenizer does not need
        self.tokenizer: Any = pretrained.from_folder(package.AutoTokenizer, folder, config=package.LlamaConfig())
        self.max_tokens, self.pad_id = max_tokens, pad_id
        self.space = int(self.tokenizer.convert_tokens_to_ids(SPACE))
        self._known: dict[str, list[int]] = {}

    def ids(self, sentence: str) -> list[int]:
        if sentence not in self._known:
            ids = list(self.tokenizer(PROMPT.format(sentence.lower()), add_special_tokens=True).input_ids)
            ids += [] if ids[-1] == self.space else [self.space]
            if len(ids) > self.max_tokens:
                raise DataError(
                    f"The task '{sentence}' has {len(ids)} tokens, but policy.max_tokens={self.max_tokens}: raise it."
                )
            self._known[sentence] = ids
        return self._known[sentence]

    def batch(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids [E, max_tokens] with pads on the right, and how many are no pads [E]."""
        rows = [self.ids(sentence) for sentence in sentences]
        padded = [row + [self.pad_id] * (self.max_tokens - len(row)) for row in rows]
        return torch.tensor(padded), torch.tensor([len(row) for row in rows])


# --- actions


@dataclass(frozen=True)
class ActionTokens:
    """``size`` is the vocabulary without its padding."""

    size: int
    bins: int = 256

    @property
    def ids(self) -> slice:
        """The place of actions in the vocabulary."""
        return slice(self.size - self.bins, self.size)

    @property
    def centres(self) -> Tensor:
        edges = torch.from_numpy(numpy.linspace(-1, 1, self.bins))
        return (edges[1:] + edges[:-1]) / 2

    def encode(self, actions: Tensor) -> Tensor:
        """The id of each number, which is clipped to [-1, 1]."""
        edges = numpy.linspace(-1, 1, self.bins)
        found = numpy.digitize(actions.double().clamp(-1, 1).cpu().numpy(), edges)
        return torch.from_numpy(self.size - found)

    def decode(self, ids: Tensor) -> Tensor:
        """float64 in (-1, 1); an id that is no action is the nearest one."""
        centres = self.centres.to(ids.device)
        return centres[(self.size - ids.long() - 1).clamp(0, self.bins - 2)]


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and the entropy, of the logits [..., bins] of actions alone; ``tokens`` counts from
    the first of them."""
    log_probs = F.log_softmax(logits.float() / temperature, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(-1, tokens.long()[..., None])[..., 0], entropy


@dataclass(frozen=True)
class Statistics:
    """The range of each dimension; numbers that ``mask`` leaves out have none."""

    low: Floats
    high: Floats
    mask: NDArray[numpy.bool_]

    @classmethod
    def of(cls, values: Mapping[str, Any], bounds: str, dim: int | None = None) -> "Statistics":
        """Read a file's entry, by quantiles ("q99") or extremes ("minmax"), cut to ``dim`` where it is longer."""
        if bounds not in BOUNDS:
            raise ConfigError(f"bounds='{bounds}' of a policy's statistics.{near(bounds, BOUNDS)}")
        low_name, high_name = BOUNDS[bounds]
        missing = [name for name in (low_name, high_name) if name not in values]
        if missing:
            raise CheckpointError(f"The statistics have no {' and '.join(missing)}; they have {', '.join(values)}.")
        refuse_impossible(values, "The policy's statistics", CheckpointError)
        low, high = (numpy.asarray(values[name], dtype=numpy.float64) for name in (low_name, high_name))
        mask = numpy.asarray(values.get("mask", numpy.ones(len(low))), dtype=bool)
        dim = len(low) if dim is None else dim
        if len(low) > _TOO_LONG * dim:
            low, high, mask = low[:dim], high[:dim], mask[:dim]
        if not len(low) == len(high) == len(mask) == dim:
            raise CheckpointError(
                f"The statistics are of {len(low)} numbers, but the policy has {dim}: set policy.action_dim or"
                " policy.unnorm_key."
            )
        return cls(low, high, mask)

    def unnormalized(self, values: Tensor) -> Tensor:
        """From [-1, 1] to the unit of the data, float64."""
        low, high, mask = self._like(values)
        scaled = 0.5 * (values.double() + 1) * (high - low + EPSILON) + low
        return torch.where(mask, scaled, values.double())

    def normalized(self, values: Tensor) -> Tensor:
        """From the unit of the data to [-1, 1], clipped, float64; numbers without a range stay as they are."""
        low, high, mask = self._like(values)
        scaled = (2 * (values.double() - low) / (high - low + EPSILON) - 1).clamp(-1, 1)
        return torch.where(mask, scaled, values.double())

    def is_outside(self, values: Tensor) -> Tensor:
        """True for numbers that `normalized` and tokens clip; those without a range reach from -1 to 1."""
        low, high, mask = self._like(values)
        low, high = torch.where(mask, low, -1.0), torch.where(mask, high, 1.0)
        margin = 1e-3 * (high - low) + EPSILON
        return (values.double() < low - margin) | (values.double() > high + margin)

    def _like(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high, mask = (torch.from_numpy(part).to(values.device) for part in (self.low, self.high, self.mask))
        return low, high, mask


def statistics_for(norm_stats: Mapping[str, Any], key: str, source: str) -> tuple[str, Mapping[str, Any]]:
    """The entry of a data set: ``key``, or without one the only one or that of LIBERO-10; and its name."""
    wanted = [key, f"{key}_no_noops"] if key else ["libero_10_no_noops", "libero_10"]
    if not key and len(norm_stats) == 1:
        wanted = list(norm_stats)
    for name in wanted:
        if name in norm_stats:
            return name, norm_stats[name]
    if not norm_stats:
        raise CheckpointError(
            f"{source} has no dataset_statistics.json, and no norm_stats in its config.json: how its actions are scaled"
            " is unknown. Copy the file of the data that the weights were trained on there."
        )
    raise CheckpointError(
        f"{source} has no statistics of '{key or wanted[0]}': set policy.unnorm_key to one of its"
        f" {', '.join(sorted(norm_stats))}."
    )


def with_gripper(actions: Tensor, gripper: str, index: int = -1) -> Tensor:
    """Actions as the environment takes them: "libero" turns 1 = open into -1 = open; 0.5 exactly becomes 0."""
    if gripper == "as_is":
        return actions
    turned = actions.clone()
    turned[..., index] = -torch.sign(2 * actions[..., index] - 1)
    return turned


def without_gripper(actions: Tensor, gripper: str) -> Tensor:
    """Actions of an environment as those of the data: what `with_gripper` turns into them again. Of "libero" -1 becomes
    1 = open."""
    if gripper == "as_is":
        return actions
    turned = actions.clone()
    turned[..., -1] = (1 - actions[..., -1].clamp(-1, 1)) / 2
    return turned


def default_gripper(config: Mapping[str, Any], key: str) -> str:
    """The form of a folder's last number, by its config.json, or by the name of its data: published folders of LIBERO
    say nothing of it, and the last number of another robot is its own."""
    return str(config.get("gripper", "libero" if "libero" in key else "as_is"))
