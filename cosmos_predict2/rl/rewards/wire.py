# SPDX-License-Identifier: Apache-2.0
"""The published protocol of reward services: bodies of requests, and how scores are read.

A body is JSON on one line, a newline, and arrays in NumPy's .npy format, one after the other. The first array holds the
clips; the JSON field ``arrays`` names those that follow (an addition to the protocol: what older services ignore).
Nothing is unpickled, and an array has the length that its header declares.
"""

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from tokenize import TokenError
from typing import Any

import numpy
import torch
from numpy.lib import format as npy
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from imaginaire.errors import DataError

MEDIA = ("latent", "video", "image")
DEFAULT_FPS = 16.0
DEFAULT_REWARD = "dance_grpo"  # of a pull without a type
LARGEST_JSON = 4 << 20
LARGEST_BATCH = 1024
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,200}")

_DTYPES = {"<f2", "<f4", "<f8", "|u1"}
_DTYPES_OF_CONTEXT = _DTYPES | {"<i4", "<i8", "|b1"}
_BROKEN = (ArithmeticError, EOFError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError, TokenError)
_RANK = {"latent": "[B, C, T, H, W]", "video": "[B, 3, F, H, W]", "image": "[B, H, W, 3]"}


@dataclass(frozen=True)
class RewardRequest:
    """A parsed body."""

    media: str
    prompts: list[str]
    fps: list[float]  # one for each clip
    rewards: tuple[str, ...]  # with a weight above 0
    array: numpy.ndarray  # as it came
    context: dict[str, Any] = field(default_factory=dict)  # arrays of B rows, and lists of B values
    request_id: str | None = None

    def latents(self) -> Tensor | None:
        """[B, C, T, H, W]; uint8 is the bytes of bfloat16."""
        return _tensor(self.array, is_bfloat16=self.array.dtype == numpy.uint8) if self.media == "latent" else None

    def video(self) -> Tensor | None:
        """uint8 [B, 3, F, H, W]; of a picture one frame."""
        if self.media == "latent":
            return None
        pixels = _tensor(self.array)
        return pixels.permute(0, 3, 1, 2).unsqueeze(2) if self.media == "image" else pixels


def parse(body: bytes | bytearray) -> RewardRequest:
    """The request in a body; DataError with what is wrong with it."""
    file = io.BytesIO(body)
    meta = _meta(file)
    prompts = meta.get("prompts")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(one, str) for one in prompts):
        raise DataError("'prompts' must be a list of texts, one for each clip.")
    if len(prompts) > LARGEST_BATCH:
        raise DataError(f"A request has at most {LARGEST_BATCH} clips; this one has {len(prompts)}. Send several.")
    media = meta.get("media_type", "latent")
    if media not in MEDIA:
        raise DataError(f"'media_type' is {_short(media)}; known: {', '.join(MEDIA)}.")
    array = _array(file, "the array of clips", _DTYPES)
    _check_array(array, media, len(prompts))
    context = _context(file, meta, len(prompts))
    if left := file.read():
        raise DataError(f"{len(left)} bytes follow the last array: a body ends with it.")
    return RewardRequest(media, prompts, _fps(meta, len(prompts)), _rewards(meta), array, context, _request_id(meta))


def _meta(file: io.BytesIO) -> dict[str, Any]:
    head = file.readline(LARGEST_JSON + 1)
    if not head.endswith(b"\n"):
        raise DataError("A body is JSON on one line, a newline, and a .npy array; this one has no newline.")
    try:
        meta = json.loads(head, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"What stands before the first newline is not JSON on one line: {_short(error)}.") from error
    if not isinstance(meta, dict):
        raise DataError(f"The JSON is an object with 'prompts' and 'reward_fn'; this one is {_short(meta)}.")
    return meta


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _array(file: io.BytesIO, what: str, dtypes: set[str]) -> numpy.ndarray:
    """The array that begins here; nothing is unpickled."""
    try:
        array: numpy.ndarray = npy.read_array(file, allow_pickle=False)
    except _BROKEN as error:
        raise DataError(f"{what} is not in .npy format (numpy.save, allow_pickle=False): {_short(error)}.") from error
    if array.dtype.str not in dtypes:
        raise DataError(f"{what} has dtype {_short(array.dtype)}; known: {', '.join(sorted(dtypes))}.")
    if not array.size or not array.ndim:
        raise DataError(f"{what} has the shape {list(array.shape)}: every dimension is at least 1.")
    return array


def _check_array(array: numpy.ndarray, media: str, size: int) -> None:
    shape = list(array.shape)
    channels = {"video": 1, "image": 3}.get(media)
    if array.ndim != (4 if media == "image" else 5) or (channels is not None and shape[channels] != 3):
        raise DataError(f"Clips of media_type {media} are {_RANK[media]}; this array is {shape}.")
    if media != "latent" and array.dtype != numpy.uint8:
        raise DataError(f"Clips of media_type {media} are uint8, 0 to 255; this array is {array.dtype}.")
    if media == "latent" and array.dtype == numpy.uint8 and shape[-1] % 2:
        raise DataError(f"Latents as uint8 are bytes of bfloat16, two for each number; the last size is {shape[-1]}.")
    if shape[0] != size:
        raise DataError(f"There are {size} prompts, but {shape[0]} clips.")


def _context(file: io.BytesIO, meta: Mapping[str, Any], size: int) -> dict[str, Any]:
    values, arrays = meta.get("context", {}), meta.get("arrays", [])
    if not isinstance(values, dict) or not all(isinstance(v, list) and len(v) == size for v in values.values()):
        raise DataError(f"'context' maps names to lists of {size} values, one for each clip.")
    if not isinstance(arrays, list) or len(arrays) > 16:
        raise DataError("'arrays' is a list of at most 16 names of the arrays that follow the clips.")
    found: dict[str, Any] = dict(values)
    for row in arrays:
        name = row.get("name") if isinstance(row, dict) else None
        if not isinstance(name, str) or name in found:
            raise DataError(f"'arrays' holds {_short(row)}: expected an object with a 'name' that occurs once.")
        array = _array(file, f"the array '{_short(name)}'", _DTYPES_OF_CONTEXT)
        if array.shape[0] != size:
            raise DataError(f"The array '{_short(name)}' has {array.shape[0]} rows for {size} clips.")
        is_bfloat16 = row.get("dtype") == "bfloat16"
        if is_bfloat16 and (array.dtype != numpy.uint8 or array.ndim < 2 or array.shape[-1] % 2):
            raise DataError(f"The array '{_short(name)}' cannot be the bytes of bfloat16.")
        found[name] = _tensor(array, is_bfloat16)
    return found


def _fps(meta: Mapping[str, Any], size: int) -> list[float]:
    infos = meta.get("video_infos", [{}] * size)
    if not isinstance(infos, list) or len(infos) != size or not all(isinstance(one, dict) for one in infos):
        raise DataError(f"'video_infos' is a list of {size} objects, one for each clip, such as {{'video_fps': 16.0}}.")
    rates = [one.get("video_fps", one.get("fps", DEFAULT_FPS)) for one in infos]
    if not all(_is_number(rate) and 0 < rate <= 1000 for rate in rates):
        raise DataError(f"'video_fps' is a number of frames per second above 0; found {_short(rates)}.")
    return [float(rate) for rate in rates]


def _rewards(meta: Mapping[str, Any]) -> tuple[str, ...]:
    weights = meta.get("reward_fn")
    if not isinstance(weights, dict) or not all(_is_number(weight) for weight in weights.values()):
        raise DataError("'reward_fn' maps names of rewards to weights, such as {'dance_grpo': 1.0}.")
    names = tuple(name for name, weight in weights.items() if weight > 0)
    if not names:
        raise DataError("'reward_fn' names no reward with a weight above 0.")
    return names


def _request_id(meta: Mapping[str, Any]) -> str | None:
    found = meta.get("request_id")
    if found is not None and (not isinstance(found, str) or not REQUEST_ID.fullmatch(found)):
        raise DataError(f"'request_id' is {_short(found)}: expected 1 to 200 letters, digits or . _ : / = + -")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _short(value: Any) -> str:
    text = ascii(value) if not isinstance(value, Exception) else ascii(str(value))[1:-1]
    return text if len(text) <= 120 else text[:117] + "..."


def _tensor(array: numpy.ndarray, is_bfloat16: bool = False) -> Tensor:
    tensor = torch.from_numpy(numpy.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def encode(
    clips: Clips,
    rewards: Mapping[str, float],
    *,
    media: str,
    request_id: str | None = None,
    context: Mapping[str, Any] | None = None,
    latent_dtype: torch.dtype | None = None,
) -> bytes:
    """The body of a request; latents travel in ``latent_dtype`` or as they are."""
    array = clips.latents_B_C_T_H_W if media == "latent" else clips.video_B_C_F_H_W
    if array is None:
        raise DataError(f"The clips have no {media}.")
    array = array.detach().cpu()
    if media == "latent" and latent_dtype is not None:
        array = array.to(latent_dtype)
    parts, rows, values = [_npy(array)], [], {}
    for name, value in (context or {}).items():
        if isinstance(value, Tensor) and value.ndim > 1:
            rows.append({"name": name} | ({"dtype": "bfloat16"} if value.dtype == torch.bfloat16 else {}))
            parts.append(_npy(value.detach().cpu()))
        else:
            values[name] = value.tolist() if isinstance(value, Tensor) else list(value)
    meta: dict[str, Any] = {
        "prompts": list(clips.prompts),
        "reward_fn": dict(rewards),
        "video_infos": [{"video_fps": float(clips.fps)}] * len(clips.prompts),
        "media_type": media,
    }
    optional = {"request_id": request_id, "context": values, "arrays": rows}
    meta |= {name: value for name, value in optional.items() if value}
    return json.dumps(meta).encode() + b"\n" + b"".join(parts)


def _npy(tensor: Tensor) -> bytes:
    tensor = tensor.contiguous()
    file = io.BytesIO()
    array = (tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    npy.write_array(file, array, allow_pickle=False)
    return file.getvalue()


def read_scores(
    response: Mapping[str, Any], score_key: str, clip: Sequence[float] | None = None, scale: float = 1.0
) -> tuple[list[float], list[bool]]:
    """Scores and their validity: the list under ``score_key`` or the sum of those it joins by '+', clipped, scaled.

    A failed request has no scores: DataError with its reason.
    """
    scores = response.get("scores")
    if not isinstance(scores, Mapping):
        raise DataError(f"there are no scores: {_short(response.get('error') or response.get('message') or response)}")
    keys = [score_key] if score_key in scores else score_key.split("+")
    if absent := [key for key in keys if key not in scores]:
        raise DataError(f"there is no score '{absent[0]}'; the scores are {', '.join(map(str, scores))}.")
    columns = [scores[key] for key in keys]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        raise DataError(f"the scores of '{score_key}' are not lists of one length.")
    declared = [True] * len(columns[0]) if (given := response.get("valid")) is None else given
    if not isinstance(declared, list):
        raise DataError(f"'valid' is {_short(declared)}: expected a list, with a value for each clip.")
    values, is_valid = [], []
    for row, may_count in zip(zip(*columns), declared, strict=False):
        good = bool(may_count) and all(_is_number(value) and math.isfinite(value) for value in row)
        total = float(sum(row)) if good else 0.0
        if good and clip is not None:
            total = min(max(total, clip[0]), clip[1])
        values.append(total * scale)
        is_valid.append(good)
    return values, is_valid
