# SPDX-License-Identifier: Apache-2.0
"""The success classifier of world-model environments: a residual network that looks at one picture.

Names of its weights are the published ones (`resnet_rm.pth`), so that such a file is read as it is. It resembles a
ResNet-18, but every convolution has a bias and a shortcut has no normalisation. Files of ours may have a second output,
progress, which differs between failures.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cosmos_predict2.checkpoints.card import safetensors_header
from cosmos_predict2.rl.interfaces import FrameReward, FrameRewardDefaults, Judgement
from imaginaire import foreign_json, storage
from imaginaire.buildable import completed, resolve
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import shape_of
from imaginaire.errors import CheckpointError, ConfigError, near, raised_as

WIDTHS = (64, 64, 128, 256, 512)  # of the stem and the four stages
THRESHOLD = 0.5
VALUES = ("success", "progress")  # what a classifier may say of a picture
KEY = "success_classifier"  # in the header of a file of ours: what it was trained on, and its threshold

_AT_ONCE = 256  # pictures


class Residual(nn.Module):
    """relu(BN(conv(relu(BN(conv x)))) + x), where x passes a 1x1 convolution if its shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1)
        has_shortcut = stride > 1 or in_channels != channels
        self.conv3 = nn.Conv2d(in_channels, channels, 1, stride) if has_shortcut else None
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x_B_C_H_W: Tensor) -> Tensor:
        y_B_C_H_W = torch.relu(self.bn1(self.conv1(x_B_C_H_W)))
        shortcut = x_B_C_H_W if self.conv3 is None else self.conv3(x_B_C_H_W)
        return torch.relu(self.bn2(self.conv2(y_B_C_H_W)) + shortcut)


class SuccessClassifier(nn.Module):
    """Pictures [B, 3, H, W] in [-1, 1] of any size -> the probability that the task is done, [B, 1].

    With ``progress`` it has a second output of the same features: how soon the task will be done, 1 where it is.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, progress: bool = False) -> None:
        super().__init__()
        if len(widths) != len(WIDTHS) or min(widths) < 1:
            raise ConfigError(f"widths={list(widths)}: 5 numbers of channels are expected, of stem and stages.")
        self.widths = tuple(widths)
        stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, 3), nn.BatchNorm2d(widths[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages = [
            nn.Sequential(Residual(before, width, 1 if i == 0 else 2), Residual(width, width))
            for i, (before, width) in enumerate(itertools.pairwise(widths))
        ]
        head = nn.Linear(widths[-1], 1)
        self.net = nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head, nn.Sigmoid())
        self.progress = nn.Linear(widths[-1], 1) if progress else None

    @property
    def heads(self) -> list[nn.Linear]:
        """The last layers: of success, and of progress where there is one."""
        success = self.net[-2]
        assert isinstance(success, nn.Linear)
        return [success] if self.progress is None else [success, self.progress]

    def forward(self, images_B_C_H_W: Tensor) -> Tensor:
        return torch.sigmoid(self.logits(images_B_C_H_W)[:, :1])

    def logits(self, images_B_C_H_W: Tensor) -> Tensor:
        """Log-odds [B, 1], or [B, 2] with those of progress, as training needs them."""
        features_B_D: Tensor = self.net[:-2](images_B_C_H_W.clamp(-1, 1))
        return torch.cat([head(features_B_D) for head in self.heads], dim=1)


class ResnetReward(FrameRewardDefaults):
    """Judges pictures one by one with a `SuccessClassifier`; see `FrameReward`.

    Success is a probability of at least ``threshold``, by default the one that the file was calibrated to, or 0.5. The
    value is progress of a file that has it, else the probability of success: ``value`` "progress" or "success" chooses
    one. With ``rounded`` it is 0 or 1 by the threshold.
    """

    def __init__(
        self,
        path: str = "",
        *,
        model: SuccessClassifier | None = None,
        threshold: float | None = None,
        rounded: bool = False,
        value: str | None = None,
        device: str | None = None,
    ) -> None:
        if (model is None) == (not path):
            raise ConfigError("ResnetReward needs either path, the file of a success classifier, or model.")
        recorded: Mapping[str, Any] = {}
        if model is None:
            model, recorded = read_classifier(path)
        self.views = tuple(recorded.get("views", ()))
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(device).eval().requires_grad_(False)
        self.threshold = float(recorded.get("threshold", THRESHOLD)) if threshold is None else threshold
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold} of ResnetReward: above 0 and at most 1.")
        known = VALUES[: len(self.model.heads)]
        if value is not None and value not in known:
            raise ConfigError(f"value is '{value}', but this classifier has {' and '.join(known)}.{near(value, known)}")
        self.rounded, self._column = rounded, known.index(value) if value else len(known) - 1

    def to(self, device: torch.device | str) -> "ResnetReward":
        """Move the weights, as an environment does that leaves the GPU to others by phases; gives itself."""
        self.model.to(device)
        return self

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        outputs_E_F_K = self.outputs(frames_E_F_H_W_C)
        is_success_E_F = outputs_E_F_K[:, :, 0] >= self.threshold
        value_E_F = is_success_E_F.float() if self.rounded else outputs_E_F_K[:, :, self._column]
        return Judgement(value_E_F, is_success_E_F)

    def outputs(self, frames_E_F_H_W_C: Tensor) -> Tensor:
        """The probability of success, and progress where the classifier has it, [E, F, K], of uint8 pictures."""
        return log_odds(self.model, frames_E_F_H_W_C.flatten(0, 1)).sigmoid().unflatten(0, frames_E_F_H_W_C.shape[:2])


@torch.no_grad()
def log_odds(model: SuccessClassifier, pictures_N_H_W_C: Tensor) -> Tensor:
    """The classifier's log-odds of uint8 pictures, [N, K], on its device."""
    device = next(model.parameters()).device
    return torch.cat([model.logits(to_unit(part.to(device))) for part in pictures_N_H_W_C.split(_AT_ONCE)])


def to_unit(pictures_B_H_W_C: Tensor) -> Tensor:
    """uint8 pictures as the classifier takes them: [B, 3, H, W] in [-1, 1]."""
    return pictures_B_H_W_C.permute(0, 3, 1, 2).float() / 127.5 - 1


def write_classifier(path: Path, model: SuccessClassifier, about: Mapping[str, Any]) -> None:
    """Write a classifier and what is recorded of it (its threshold among that), complete or not at all."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    content = safetensors.torch.save(tensors, {"format": "pt", KEY: json.dumps(dict(about), sort_keys=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_bytes(path, content)


def read_classifier(path: str) -> tuple[SuccessClassifier, Mapping[str, Any]]:
    """The classifier of a file, its widths as its weights have them, and what is recorded of it.

    Published files (`resnet_rm.pth`) are read as plain tensors; every name is accounted for.
    """
    source = weights.read(path)
    first = ["net.0.0.weight", *(f"net.{stage}.0.conv1.weight" for stage in range(1, len(WIDTHS)))]
    if missing := [name for name in first if name not in source]:
        raise CheckpointError(
            f"{path} is no success classifier: it has no '{missing[0]}'. A published resnet_rm.pth is expected, or a"
            " file of scripts.train_reward_model."
        )
    model = SuccessClassifier([shape_of(source, name)[0] for name in first], progress="progress.weight" in source)
    weights.load_into(model.state_dict(), source).require(
        ["*.num_batches_tracked"], source=path, cure="Give the classifier's own file."
    )
    header = safetensors_header(path)
    with raised_as(CheckpointError, f"{path}: its {KEY} cannot be read", ValueError):
        recorded = foreign_json.loads(header.get(KEY, "{}"))
    return model.eval(), recorded if isinstance(recorded, dict) else {}


def read_reward(address: str) -> FrameReward:
    """A judge of pictures: a success classifier's file, a folder that holds one, or ``MODULE:CLASS``."""
    place = Path(address)
    if ":" in address and not place.exists():
        judge: Any = resolve(address, "reward")()
        if not hasattr(judge, "judge"):
            raise ConfigError(f"reward {address} has no judge(frames, context), as a FrameReward has.")
        return completed(judge, FrameRewardDefaults)  # type: ignore[no-any-return]
    inside = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if len(inside) != 1:
        raise ConfigError(f"{address} holds {len(inside)} safetensors files: name reward_model.safetensors.")
    return ResnetReward(str(inside[0]))
