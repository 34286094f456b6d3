# SPDX-License-Identifier: Apache-2.0
"""Requests for rollouts: read and checked before anything heavy, carried out many at a time, and recorded."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.checkpoints.card import ModelCard
from cosmos_predict2.data.video import media
from cosmos_predict2.evaluation.metrics.video_quality import psnr
from cosmos_predict2.guardrail.runner import checked_frames
from cosmos_predict2.pipelines.action_inputs import ActionInput, LeRobotRecordings, read_episode
from cosmos_predict2.pipelines.requests import check_outputs
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.released import PREDICT25_EMPTY_TEXT
from cosmos_predict2.text.prompt_embeddings import read_constant_embedding, read_prompt_embeddings
from cosmos_predict2.text.trained_text import NO_TEXT, other_text, parse_name
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.imagination import check_bases, check_rollout, chunk_starts
from cosmos_predict2.world_model.options import Reading, RequestText, RolloutSettings
from imaginaire import storage
from imaginaire.config.lazy_config import to_yaml
from imaginaire.errors import CheckpointError, ConfigError, DataError, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActionRequest:
    """One recording whose actions are imagined."""

    annotation: str
    save_path: str
    video: str = ""  # empty: the one that the annotation names
    seed: int = 0
    episode: int | None = None  # of a LeRobot data set, whose folder ``annotation`` is

    def check(self, settings: RolloutSettings) -> None:
        """Raise where the output cannot be written or would replace an input."""
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"The seed is {self.seed}; it must be from 0 to {2**31 - 1}.")
        media.check_writable(self.save_path, media.WRITTEN_VIDEO_SUFFIXES, flag="--save_path (or --save_root)")
        stem = os.path.splitext(self.save_path)[0]
        more = [f"{stem}_side_by_side.mp4"] * settings.side_by_side + [f"{stem}.png"] * settings.contact_sheet
        check_outputs([self.save_path, f"{stem}.json", f"{stem}.yaml", *more], [self.annotation, self.video])


@dataclass(frozen=True)
class ActionJob:
    """A request with what was read for it."""

    request: ActionRequest
    episode: ActionInput

    @property
    def num_actions(self) -> int:
        return len(self.episode.actions_L_D)


def prepare(
    requests: Sequence[ActionRequest],
    reading: Reading,
    settings: RolloutSettings,
    root: str = "",
    lerobot: LeRobotRecordings | None = None,
) -> tuple[list[ActionJob], int]:
    """The requests with their first frames and actions, and how many cannot be read; one alone raises its error."""
    reading.check()
    if lerobot is None and reading.stride > 1 and reading.transform.kind == "controller" and reading.combine is None:
        log.warning(
            "--fps_downsample_ratio %d adds up the actions in between, which is right for moves. For absolute targets,"
            " such as joint positions, take the last: --combine_actions last",
            reading.stride,
        )
    jobs, failed = [], 0
    for request in requests:
        try:
            request.check(settings)
            if lerobot is not None and request.episode is not None:
                episode = lerobot.read(request.episode, reading)
            else:
                episode = read_episode(request.annotation, reading, request.video, root)
            num_actions, size, history = len(episode.actions_L_D), reading.chunk_size, settings.history
            check_rollout(num_actions, size, history, settings.reference, settings.last_chunk)
            if num_actions > size:
                check_bases(reading.transform, size, history)
            if settings.side_by_side and not episode.has_truth:
                raise ConfigError(f"--side_by_side: {episode.video} has no more than the rollout begins with.")
        except UserError as error:
            if len(requests) == 1:
                raise
            log.error("%s", error)
            failed += 1
            continue
        jobs.append(ActionJob(request, episode))
    if not jobs:
        raise DataError(f"None of the {len(requests)} recordings can be used; the log says why.")
    for source in dict.fromkeys(job.episode.source for job in jobs):
        count = sum(job.episode.source == source for job in jobs)
        log.info("actions: %s, as %s (%d of %d)", source, reading.transform, count, len(jobs))
    return jobs, failed


def run_rollouts(
    pipe: Video2WorldActionConditionedPipeline,
    jobs: Sequence[ActionJob],
    settings: RolloutSettings,
    texts: Sequence[Tensor | None] = (None, None),
) -> None:
    """Imagine the actions of all jobs, with a text and a negative one, and write the results."""
    done, likeness = 0, []
    for batch in batches(jobs, settings.batch_size):
        start = time.monotonic()
        videos = imagine(pipe, batch, settings, texts)
        seconds = time.monotonic() - start
        for job, video in zip(batch, videos):
            likeness.append(save(pipe, job, video, settings, seconds / len(batch)))
        done += len(batch)
        frames = sum(video.shape[1] - 1 for video in videos)
        last = batch[-1].request.save_path
        log.info("saved %s (%d of %d, %.1f frames per second)", last, done, len(jobs), frames / seconds)
    if known := [pair for pair in likeness if pair is not None]:
        ours, still = (sum(figures) / len(known) for figures in zip(*known))
        verdict = f"{ours - still:.1f} dB nearer" if ours > still else "no nearer than a picture that does not move"
        figures = "beside the true clips: %.1f dB (PSNR, mean of %d); the first picture for all frames: %.1f dB, so %s"
        log.info(figures, ours, len(known), still, verdict)


def compared(frames_C_F_H_W: Tensor, true_C_F_H_W: Tensor, num_given: int) -> tuple[float, float] | None:
    """Mean PSNR of the frames behind the given ones to the true clip, and that of the last given one in their place."""
    shown = min(frames_C_F_H_W.shape[1], true_C_F_H_W.shape[1])
    if shown <= num_given:
        return None
    true = true_C_F_H_W[None, :, num_given:shown]
    still = frames_C_F_H_W[None, :, num_given - 1 : num_given].expand_as(true)
    ours = frames_C_F_H_W[None, :, num_given:shown]
    return float(psnr(ours, true).mean()), float(psnr(still, true).mean())


def batches(jobs: Sequence[ActionJob], batch_size: int) -> list[list[ActionJob]]:
    """The jobs in parts of frames of one size and about one length."""
    by_shape: dict[Any, list[ActionJob]] = {}
    for job in sorted(jobs, key=lambda job: job.num_actions):
        by_shape.setdefault(tuple(job.episode.first_frames_C_F_H_W.shape), []).append(job)
    return [some[i : i + batch_size] for some in by_shape.values() for i in range(0, len(some), batch_size)]


def imagine(
    pipe: Video2WorldActionConditionedPipeline,
    jobs: Sequence[ActionJob],
    settings: RolloutSettings,
    texts: Sequence[Tensor | None] = (None, None),
) -> list[Tensor]:
    """uint8 [3, F, H, W] of each job, as if it were alone: shorter ones go on with actions that are cut off again."""
    longest = max(job.num_actions for job in jobs)
    rest = pipe.transformed([[0.0] * pipe.transform.dim])
    rows = [job.episode.actions_L_D for job in jobs]
    actions = torch.stack([torch.cat([row, rest.expand(longest - len(row), -1)]) for row in rows])
    videos = pipe.rollout(
        torch.stack([job.episode.first_frames_C_F_H_W for job in jobs]),
        actions,
        [job.request.seed for job in jobs],
        settings.sampling,
        text_B_S_E=texts[0],
        negative_text_B_S_E=texts[1],
        history=settings.history,
        reference=settings.reference,
        float_hand_over=settings.float_hand_over,
        last_chunk=settings.last_chunk,
    )
    chunk, overlap = pipe.config.chunk_size, 4 * (settings.history - 1)
    ends = [chunk_starts(len(row), chunk, overlap, settings.last_chunk)[-1] + chunk for row in rows]
    cut = [video[:, : 1 + min(end, len(row))].cpu() for video, end, row in zip(videos, ends, rows)]
    return [checked_frames(pipe.guardrail, video) for video in cut]


def save(
    pipe: Video2WorldActionConditionedPipeline,
    job: ActionJob,
    frames: Tensor,
    settings: RolloutSettings,
    seconds: float,
) -> tuple[float, float] | None:
    """Write the video with its record, and with what shows it beside the true one; gives `compared` of the two."""
    stem = os.path.splitext(job.request.save_path)[0]
    fps = settings.save_fps or job.episode.fps
    _, num_frames, height, width = frames.shape
    own = {key: value for key, value in asdict(settings).items() if key not in ("other_flags", "sampling")}
    shared = {**settings.other_flags, **own, **settings.sampling.record()}
    record = {**shared, **asdict(job.request), "video": job.episode.video, "actions": job.episode.source}
    record |= {"action_transform": pipe.transform.to_dict(), "chunk_size": pipe.config.chunk_size}
    record |= {"solver": settings.sampling.solver or pipe.world.objective.solvers[0], "resolution": f"{height},{width}"}
    record |= {"dtype": str(pipe.dit.dtype).removeprefix("torch."), "device": str(pipe.device)}
    record |= {"num_frames": num_frames, "height": height, "width": width, "seconds": round(seconds, 3), "fps": fps}
    record["frames_sha256"] = hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest()
    true = _true_frames(job, num_frames)
    likeness = None if true is None else compared(frames, true, job.episode.first_frames_C_F_H_W.shape[1])
    if likeness is not None:
        record |= dict(zip(("psnr", "psnr_of_first_picture"), (round(figure, 3) for figure in likeness)))
    storage.write_text(f"{stem}.json", json.dumps(record, indent=2) + "\n")
    storage.write_text(f"{stem}.yaml", to_yaml(pipe.config))
    if settings.side_by_side or settings.contact_sheet:
        rows, labels = ([frames], ["imagined"]) if true is None else ([true, frames], ["true", "imagined"])
        if settings.contact_sheet:
            media.write_image(f"{stem}.png", media.contact_sheet(rows, labels, columns=min(8, num_frames)))
        if settings.side_by_side:
            shown = min(row.shape[1] for row in rows)
            both = torch.cat([row[:, :shown] for row in rows], dim=3)
            media.write_video(f"{stem}_side_by_side.mp4", both, fps)
    media.write_video(job.request.save_path, frames, fps)  # last: where it is, all the rest is
    return likeness


def _true_frames(job: ActionJob, num_frames: int) -> Tensor | None:
    """The true clip, as far as it goes; None where there is none, or where it cannot be read: that costs no video."""
    try:
        return job.episode.true_frames(num_frames) if job.episode.has_truth else None
    except DataError as error:
        log.warning("nothing is shown or measured beside %s: %s", job.request.save_path, error)
        return None


def constant_text(card: ModelCard) -> str:
    """The file of the one embedding that weights were trained with: as recorded, or the released one beside them."""
    beside = storage.join(card.path.rpartition("/")[0], PREDICT25_EMPTY_TEXT.rpartition("/")[2])
    return card.constant_text or (beside if storage.exists(beside) else "")


def read_texts(wanted: RequestText, config: Video2WorldPipelineConfig, card: ModelCard, width: int) -> tuple[Any, Any]:
    """The text and the negative text of all samples, [1, S, E]; None for none."""
    path, trained = wanted.prompt_embeddings or constant_text(card), config.text_encoder_name
    has_prompt = bool(wanted.prompt or wanted.negative_prompt)
    if has_prompt and not str(wanted.prompt_embeddings).endswith(".safetensors"):
        raise ConfigError(
            "--prompt and --negative_prompt need their embeddings: write them with python -m scripts.encode_prompts,"
            " and give the file with --prompt_embeddings."
        )
    if not path:
        if trained not in ("", NO_TEXT):
            flags = parse_name(trained).flags()
            log.warning(
                "text: zeros, but %s was trained with captions encoded by %s: give --prompt, and its embedding with"
                " --prompt_embeddings (python -m scripts.encode_prompts %s)",
                *(card.path, trained, flags),
            )
        elif config.flow is not None:
            log.info("text: zeros; these weights saw an embedding of the empty prompt too (--prompt_embeddings)")
        return None, None
    if path.endswith(".safetensors"):
        known = read_prompt_embeddings(path)
        if (problem := other_text(trained, known.name, known.values())) is not None:
            raise ConfigError(f"--prompt_embeddings {path} {problem}")
        found = [known.encode([wanted.prompt])[0]]
        found += [known.encode([wanted.negative_prompt])[0]] if wanted.negative_prompt else []
    else:
        found = [read_constant_embedding(path)]
    if wrong := [row for row in found if row.shape[1] != width]:
        raise CheckpointError(f"{path} has embeddings of width {wrong[0].shape[1]}, but this model takes {width}.")
    log.info("text: %s", path)
    text, negative, *_ = *(row[None] for row in found), None
    return text, negative
