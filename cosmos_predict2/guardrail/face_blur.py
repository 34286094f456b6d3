# SPDX-License-Identifier: Apache-2.0
"""Faces in a video made coarse: RetinaFace with a ResNet-50 (Cosmos-Guardrail1, face_blur_filter) finds them.

Names of modules are those of the released file. Widths follow from its shapes.
"""

import functools
import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_predict2.guardrail.judges import at_work
from cosmos_predict2.interfaces import Guardrail
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import shape_of
from imaginaire.errors import CheckpointError

FILE = "Resnet50_Final.pth"
BLOCKS = (3, 4, 6, 3)  # of the four stages
STRIDES, SIZES = (8, 16, 32), ((16, 32), (64, 128), (256, 512))  # pixels: of the three maps, of the boxes on each
VARIANCES = (0.1, 0.2)
MEAN_BGR = (104.0, 117.0, 123.0)
CONFIDENCE, OVERLAP, MOST_BOXES, MOST_FACES = 0.7, 0.4, 5000, 750
LEAST_SIDE, MOSAIC = 20, 5  # pixels of a face; squares along its sides


class FaceBlur(Guardrail):
    """Gives frames with a mosaic of 5 x 5 squares over every face of at least 20 x 20 pixels."""

    name = "face_blur"

    def __init__(self, folder: str, offload: bool = True) -> None:
        path = storage.join(folder, FILE)
        self.source, self._offload = folder, offload
        source = weights.renamed(weights.read(path), lambda name: name.removeprefix("module."))
        names = ("body.conv1.weight", "fpn.output1.0.weight")
        if lost := [name for name in names if name not in source]:
            raise CheckpointError(f"{path} is no RetinaFace of a ResNet-50: it has no {lost[0]}.")
        self._model = RetinaFace(*(shape_of(source, name)[0] for name in names))
        weights.load_into(self._model.state_dict(), source).require(source=path)
        self._model.eval().requires_grad_(False)

    def postprocess(self, frames_F_H_W_C: Tensor) -> Tensor:
        """The uint8 frames with their faces covered; new ones, if there is a face."""
        found = frames_F_H_W_C.clone()
        with at_work(self._model, self._offload) as device:
            for frame_H_W_C in found:
                picture = frame_H_W_C.to(device).permute(2, 0, 1)[None].flip(1).float()  # blue first
                boxes, scores = self._model(picture - torch.tensor(MEAN_BGR, device=device)[:, None, None])
                for x0, y0, x1, y1 in distinct_boxes(boxes[0].cpu(), scores[0].cpu()).tolist():
                    cover(frame_H_W_C, int(x0), int(y0), int(x1), int(y1))
        return found


def cover(frame_H_W_C: Tensor, x0: int, y0: int, x1: int, y1: int) -> None:
    """Replace a box of a frame, in place, by the means of 5 x 5 parts of it; a small one is left alone."""
    if min(x1 - x0, y1 - y0) < LEAST_SIDE:
        return
    part = frame_H_W_C[max(y0, 0) : max(y1, 0), max(x0, 0) : max(x1, 0)]
    if part.numel():
        means = functional.adaptive_avg_pool2d(part.permute(2, 0, 1).float(), MOSAIC)
        part.copy_(functional.interpolate(means[None], part.shape[:2])[0].round().permute(1, 2, 0))


def distinct_boxes(boxes_N_4: Tensor, scores_N: Tensor) -> Tensor:
    """Boxes of sure faces, the surest first, without those that overlap a surer one (non-maximum suppression)."""
    if not (boxes_N_4.isfinite().all() and scores_N.isfinite().all()):
        raise CheckpointError("The face detector gives numbers that are not finite.")
    order = scores_N.argsort(descending=True)[:MOST_BOXES]
    boxes = boxes_N_4[order[scores_N[order] > CONFIDENCE]]
    kept: list[Tensor] = []
    while len(boxes) and len(kept) < MOST_FACES:
        kept.append(boxes[0])
        low, high = torch.maximum(boxes[:, :2], boxes[0, :2]), torch.minimum(boxes[:, 2:], boxes[0, 2:])
        shared = (high - low + 1).clamp(min=0).prod(dim=1)
        areas = (boxes[:, 2:] - boxes[:, :2] + 1).prod(dim=1)
        others = shared / (areas + areas[0] - shared) <= OVERLAP
        others[0] = False
        boxes = boxes[others]
    return torch.stack(kept) if kept else boxes_N_4[:0]


@functools.lru_cache(maxsize=2)
def anchors(height: int, width: int) -> Tensor:
    """[N, 4]: centre and size, in pixels, of the boxes that the network corrects, row by row of its three maps."""
    rows = [
        ((x + 0.5) * stride, (y + 0.5) * stride, size, size)
        for stride, sizes in zip(STRIDES, SIZES)
        for y, x in itertools.product(range(math.ceil(height / stride)), range(math.ceil(width / stride)))
        for size in sizes
    ]
    return torch.tensor(rows)


def _conv(inner: int, outer: int, size: int = 3, slope: float | None = 0.0) -> nn.Sequential:
    layers = [nn.Conv2d(inner, outer, size, padding=size // 2, bias=False), nn.BatchNorm2d(outer)]
    return nn.Sequential(*layers, *([] if slope is None else [nn.LeakyReLU(slope)]))


class _Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        shortcut = nn.Sequential(nn.Conv2d(inner, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.downsample = shortcut if stride > 1 or inner != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return (self.bn3(self.conv3(y)) + self.downsample(x)).relu()  # type: ignore[no-any-return]


class _Body(nn.Module):
    """A ResNet-50 without its head; gives the maps of its last three stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        inner = width
        for i, count in enumerate(BLOCKS):
            blocks = [_Bottleneck(inner, width << i, 2 if i else 1)]
            inner = 4 * (width << i)
            blocks += [_Bottleneck(inner, width << i, 1) for _ in range(count - 1)]
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        maps = [x := self.get_submodule(f"layer{i}")(x) for i in range(1, 5)]
        return maps[1:]


class _Pyramid(nn.Module):
    """Feature maps of one width; coarser ones are added to the next finer."""

    def __init__(self, inner: list[int], width: int, slope: float) -> None:
        super().__init__()
        self.output1, self.output2, self.output3 = (_conv(channels, width, 1, slope) for channels in inner)
        self.merge1, self.merge2 = (_conv(width, width, slope=slope) for _ in range(2))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        fine, middle, coarse = self.output1(maps[0]), self.output2(maps[1]), self.output3(maps[2])
        middle = self.merge2(middle + functional.interpolate(coarse, middle.shape[2:]))
        return [self.merge1(fine + functional.interpolate(middle, fine.shape[2:])), middle, coarse]


class _Context(nn.Module):
    """Three sizes of surroundings side by side (SSH)."""

    def __init__(self, width: int, slope: float) -> None:
        super().__init__()
        quarter = width // 4
        self.conv3X3 = _conv(width, width // 2, slope=None)
        self.conv5X5_1, self.conv5X5_2 = _conv(width, quarter, slope=slope), _conv(quarter, quarter, slope=None)
        self.conv7X7_2, self.conv7x7_3 = _conv(quarter, quarter, slope=slope), _conv(quarter, quarter, slope=None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv5X5_1(x)
        return torch.cat([self.conv3X3(x), self.conv5X5_2(y), self.conv7x7_3(self.conv7X7_2(y))], dim=1).relu()


class _Head(nn.Module):
    def __init__(self, width: int, numbers: int) -> None:
        super().__init__()
        self.conv1x1 = nn.Conv2d(width, 2 * numbers, 1)  # two boxes at each place
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1x1(x).permute(0, 2, 3, 1).reshape(len(x), -1, self.numbers)  # type: ignore[no-any-return]


class RetinaFace(nn.Module):
    """Pictures [B, 3, H, W], BGR minus their mean -> corners of boxes [B, N, 4] in pixels, and how sure each is."""

    def __init__(self, body_width: int = 64, width: int = 256) -> None:
        super().__init__()
        slope = 0.1 if width <= 64 else 0.0
        self.body = _Body(body_width)
        self.fpn = _Pyramid([body_width * 8, body_width * 16, body_width * 32], width, slope)
        self.ssh1, self.ssh2, self.ssh3 = (_Context(width, slope) for _ in STRIDES)
        for name, numbers in (("ClassHead", 2), ("BboxHead", 4), ("LandmarkHead", 10)):
            setattr(self, name, nn.ModuleList(_Head(width, numbers) for _ in STRIDES))

    def forward(self, x_B_C_H_W: Tensor) -> tuple[Tensor, Tensor]:
        maps = [ssh(found) for ssh, found in zip((self.ssh1, self.ssh2, self.ssh3), self.fpn(self.body(x_B_C_H_W)))]
        moves, classes = (
            torch.cat([head(found) for head, found in zip(self.get_submodule(name).children(), maps)], dim=1)
            for name in ("BboxHead", "ClassHead")
        )
        anchors_N_4 = anchors(*x_B_C_H_W.shape[2:]).to(moves)
        centres = anchors_N_4[:, :2] + moves[..., :2] * VARIANCES[0] * anchors_N_4[:, 2:]
        halves = anchors_N_4[:, 2:] * (moves[..., 2:] * VARIANCES[1]).exp() / 2
        return torch.cat([centres - halves, centres + halves], dim=-1), classes.softmax(dim=-1)[..., 1]
