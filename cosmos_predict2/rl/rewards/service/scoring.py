# SPDX-License-Identifier: Apache-2.0
"""Bodies to results, inside a worker: parse, decode where pixels are needed, score in portions, split again."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.interfaces import VideoTokenizer
from cosmos_predict2.rl.interfaces import Clips, SeesPixels
from cosmos_predict2.rl.rewards import wire
from cosmos_predict2.rl.rewards.local import ScoreFunction
from cosmos_predict2.rl.rewards.service.settings import DecodeSettings
from imaginaire.errors import ConfigError, DataError, UserError

log = logging.getLogger(__name__)

NUM_CONDITIONAL = "num_conditional_frames"


@dataclass
class Sample:
    """One clip of a request, and its scores once they are there."""

    prompt: str
    fps: float
    latent: Tensor | None
    video: Tensor | None
    context: dict[str, Any]
    scores: dict[str, Any] = field(default_factory=dict)
    is_valid: bool = False

    def form(self) -> tuple[Any, ...]:
        """Properties that must agree for clips to be scored together."""
        sizes = [(name, tuple(v.shape), v.dtype) if isinstance(v, Tensor) else name for name, v in self.context.items()]
        clips = [None if one is None else (tuple(one.shape), one.dtype) for one in (self.latent, self.video)]
        return (self.fps, *clips, *sizes)


class Scorer:
    """A reward as a worker asks it: bytes of requests in, results or errors out."""

    def __init__(
        self,
        name: str,
        function: ScoreFunction,
        decoder: Callable[[], VideoTokenizer],
        max_clips: int = 8,
        progress: Callable[[], None] = lambda: None,  # called before each step: a clip decoded, a portion scored
    ) -> None:
        self.name = name
        self.function = function
        self.needs_pixels = isinstance(function, SeesPixels) and function.needs_pixels
        self.max_clips = max_clips
        self.progress = progress
        self._make_decoder = decoder
        self._decoder: VideoTokenizer | None = None

    def score(self, bodies: Sequence[bytes]) -> list[dict[str, Any] | Exception]:
        """A result for each body, or why there is none; where they fail together, each is tried alone."""
        try:
            return [*self._score([wire.parse(body) for body in bodies])]
        except Exception as error:  # a border: a user's function may raise anything
            if isinstance(error, RuntimeError) and "CUDA error" in str(error):  # only another process can go on
                raise SystemExit(f"the GPU is lost to this process: {error}") from error
            if len(bodies) > 1:
                log.warning("%s failed on %d requests together, trying each alone: %s", self.name, len(bodies), error)
                return [self.score([one])[0] for one in bodies]
            if not isinstance(error, UserError):
                log.error("%s failed", self.name, exc_info=error)
            return [error]

    @torch.no_grad()
    def _score(self, requests: Sequence[wire.RewardRequest]) -> list[dict[str, Any]]:
        began = time.perf_counter()
        of_requests = [self._samples(request) for request in requests]
        decoded_s = time.perf_counter() - began if self.needs_pixels else None
        began = time.perf_counter()
        groups: dict[Any, list[Sample]] = {}
        for sample in (sample for samples in of_requests for sample in samples):
            groups.setdefault(sample.form(), []).append(sample)
        for group in groups.values():
            for k in range(0, len(group), self.max_clips):
                self._ask(group[k : k + self.max_clips])
        score_s = time.perf_counter() - began
        share = 1 / max(1, len(requests))
        return [
            self._result(request, samples, score_s * share, None if decoded_s is None else decoded_s * share)
            for request, samples in zip(requests, of_requests)
        ]

    def _samples(self, request: wire.RewardRequest) -> list[Sample]:
        latents, video = request.latents(), request.video()
        context = dict(request.context)
        context.setdefault(NUM_CONDITIONAL, [1] * len(request.prompts))
        if self.needs_pixels:
            if video is None:
                assert latents is not None
                video = self._decode(latents)
            if "true_latents" in context and "true_video" not in context:
                context["true_video"] = self._decode(context["true_latents"])
        return [
            Sample(
                prompt,
                request.fps[i],
                None if latents is None else latents[i],
                None if video is None else video[i],
                {name: value[i] for name, value in context.items()},
            )
            for i, prompt in enumerate(request.prompts)
        ]

    def _decode(self, latents_B_C_T_H_W: Tensor) -> Tensor:
        """uint8 video; one clip at a time, which bounds the memory."""
        if self._decoder is None:
            self._decoder = self._make_decoder()
        clips = []
        for latent_1_C_T_H_W in latents_B_C_T_H_W.split(1):
            self.progress()
            pixels = self._decoder.decode(latent_1_C_T_H_W.to(self._decoder.dtype)).float().clamp(-1, 1)
            clips.append(((pixels + 1) * 127.5).nan_to_num().round().to(torch.uint8).cpu())
        return torch.cat(clips)

    def _ask(self, samples: Sequence[Sample]) -> None:
        latents = [one.latent for one in samples if one.latent is not None]
        videos = [one.video for one in samples if one.video is not None]
        clips = Clips(
            torch.stack(latents) if latents else None,
            torch.stack(videos) if videos else None,
            [one.prompt for one in samples],
            samples[0].fps,
        )
        context = {name: _column([one.context[name] for one in samples]) for name in samples[0].context}
        self.progress()
        found = self.function(clips, context)
        columns = dict(found) if isinstance(found, Mapping) else {"value": found}
        if "value" not in columns:
            raise DataError(f"The reward {self.name} gave {', '.join(columns)}, but no 'value'.")
        value = columns.pop("value")
        columns = {self.name: value, **columns}
        for name, column in columns.items():
            numbers = column.detach().cpu().tolist() if isinstance(column, Tensor) else list(column)
            if len(numbers) != len(samples):
                raise DataError(f"The reward {self.name} gave {len(numbers)} of '{name}' for {len(samples)} clips.")
            for sample, number in zip(samples, numbers):
                sample.scores[name] = _finite(number)
        for sample in samples:
            is_finite = sample.latent is None or bool(sample.latent.float().isfinite().all())
            sample.is_valid = is_finite and sample.scores[self.name] is not None

    def _result(
        self, request: wire.RewardRequest, samples: Sequence[Sample], score_s: float, decoded_s: float | None
    ) -> dict[str, Any]:
        names = list(samples[0].scores)
        first = samples[0].video if samples[0].video is not None else samples[0].latent
        assert first is not None
        return {
            "status": "done",
            "scores": {name: [one.scores[name] if one.is_valid else None for one in samples] for name in names},
            "valid": [one.is_valid for one in samples],
            "input_info": {
                "shape": str([len(samples), *first.shape]),
                "dtype": str(first.dtype),
                "min": str(_finite(float(first.min()))),
                "max": str(_finite(float(first.max()))),
                "video_infos": [{"video_fps": rate} for rate in request.fps],
            },
            "duration": f"{score_s:.2f}",
            "decoded_duration": "N/A" if decoded_s is None else f"{decoded_s:.2f}",
            "type": self.name,
        }


def failed_result(name: str, reason: str, num_clips: int) -> dict[str, Any]:
    """The answer to a pull of a job that failed for good."""
    return {
        "status": "failed",
        "error": reason,
        "scores": None,
        "valid": [False] * num_clips,
        "duration": "0.00",
        "decoded_duration": "N/A",
        "type": name,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value if abs(value) < float("inf") else None
    return value if isinstance(value, (str, bool)) else None


def _column(values: list[Any]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(values)
    is_numeric = all(isinstance(value, (int, float)) for value in values)
    return torch.tensor(values) if is_numeric else values


def build_decoder(settings: DecodeSettings, device: str) -> VideoTokenizer:
    dtype = getattr(torch, settings.dtype)
    place = settings.device or device or ("cuda" if torch.cuda.is_available() else "cpu")
    if settings.model_path == "tiny":
        from cosmos_predict2.tokenizers.tiny import TinyTokenizer

        return TinyTokenizer(device=place, dtype=dtype)
    if not settings.model_path:
        raise ConfigError(
            "This reward needs pixels and got latents: name their decoder in --config, [decode_args] model_path = "
            "'.../Wan2.1_VAE.pth' (or 'tiny'), or send media_type video."
        )
    from cosmos_predict2.tokenizers.wan_vae import WanTokenizer

    return WanTokenizer(settings.model_path, device=place, dtype=dtype, temporal_window=settings.temporal_window)
