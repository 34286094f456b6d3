# SPDX-License-Identifier: Apache-2.0
"""Several cameras of a recording as one picture: the views lie one below the other, all of one size.

    camera=front+wrist      the first view is what policies see as full_image, the second as wrist_image

Where one camera is named, the picture is its own. A size that data are brought to (video_size) is that of each view, so
that the seams lie on multiples of 16 pixels, and no latent and no token belongs to two cameras.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.data.video.clips import stretch
from imaginaire.errors import ConfigError, DataError

AND = "+"
CAMERA_KEYS = ("camera_keys", "cameras", "camera", "cam_id")  # the arguments of data sets that name views


def cameras_in(camera: str) -> list[str]:
    """The cameras that are named: "front+wrist" names two."""
    names = camera.split(AND)
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"camera='{camera}': names of different cameras, with {AND} between them.")
    return names


def views_of(camera: str | None) -> tuple[str, ...]:
    """The names of the views from top to bottom, without the folder of a key: observation.images.front is "front".

    Keys that end alike, left.rgb and right.rgb, are whole. A camera that is not named, the only one of its recordings,
    is ""."""
    keys = cameras_in(camera) if camera else [""]
    names = [key.rpartition(".")[2] for key in keys]
    return tuple(names if len(set(names)) == len(names) else keys)


def views_of_data(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The views of a data set's samples, by its arguments; of several cameras that take turns those of the first."""
    if arguments.get("camera_keys"):
        return tuple(map(str, arguments["camera_keys"]))
    cameras = arguments.get("cameras")
    camera = (
        cameras[0] if isinstance(cameras, Sequence) and cameras else arguments.get("camera", arguments.get("cam_id"))
    )
    return views_of(camera if isinstance(camera, str) else None)


def stacked(views: Sequence[Tensor]) -> Tensor:
    """uint8 [3, F, V * H, W] of views [3, F, H, W]; those of another size are stretched to that of the first."""
    if len(views) == 1:
        return views[0]
    height, width = views[0].shape[-2:]
    return torch.cat([stretch(view, (height, width)) for view in views], dim=-2)


def stretched(picture_3_F_H_W: Tensor, size: tuple[int, int], num_views: int) -> Tensor:
    """Each view of a picture stretched to (height, width)."""
    return torch.cat([stretch(view, size) for view in split(picture_3_F_H_W, num_views)], dim=-2)


def split(pictures: Tensor, num_views: int, dim: int = -2) -> tuple[Tensor, ...]:
    """The views of pictures, of whose dimensions ``dim`` is the height; the first is the top."""
    if num_views > 1 and pictures.shape[dim] % num_views:
        raise DataError(f"Pictures that are {pictures.shape[dim]} high do not hold {num_views} views of one height.")
    return pictures.chunk(num_views, dim=dim)


def require_same(views: Sequence[str], others: Sequence[str], what: str, and_what: str, cure: str) -> None:
    """Raise where one of two parts knows several views, and the other one not these in this order."""
    if max(len(views), len(others)) > 1 and tuple(views) != tuple(others):
        raise ConfigError(f"{what} has {named(views)}, but {and_what} {named(others)}: {cure}")


def named(views: Sequence[str]) -> str:
    """The views in words."""
    known = AND.join(views)
    return f"{len(views)} view{'s' if len(views) > 1 else ''}{f' ({known})' if known else ''}"
