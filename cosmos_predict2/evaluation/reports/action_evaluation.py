# SPDX-License-Identifier: Apache-2.0
"""Figures of a world model with actions on recordings that it never saw: likeness to the true frames at every horizon
beside the first frame repeated; obedience (the loss with other actions, other actions beside other seeds, actions read
from the imagined frames); drift (likeness by chunk, sharpness, whether a seam is seen between chunks, and in the toy
world where things are).

The verdict has three signs, each beside a control that was measured in the same run; what could not be measured does
not count.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cosmos_predict2.data.video import media
from cosmos_predict2.data.views import split
from cosmos_predict2.evaluation.metrics import controllability, inverse_dynamics, video_quality
from cosmos_predict2.evaluation.metrics.controllability import ActionGap, Distances
from cosmos_predict2.evaluation.metrics.imagined_chunks import by_chunk, things_by_chunk
from cosmos_predict2.evaluation.metrics.inverse_dynamics import ActionAgreement
from cosmos_predict2.evaluation.reports.evaluation_page import FIGURES, Page, Table, aligned, shown_width
from cosmos_predict2.evaluation.reports.toy_world import Futures, ImaginedFigures
from cosmos_predict2.nn.state_head import StateTrail
from cosmos_predict2.pipelines.evaluation_data import EvaluationClips
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.world_model.world_model import SamplingOptions, initial_noise, to_uint8
from imaginaire import storage

log = logging.getLogger(__name__)

NUM_SCENES, NUM_SEQUENCES, NUM_SEEDS = 4, 3, 2  # first frames, sequences of actions and seeds of `action_trials`
NUM_SHOWN = 4  # clips of the page, those in which most happens

LEAST_RATIO, LEAST_SHARE = 1.05, 0.75
LEAST_DISTANCE = 0.5  # of that between seeds
LEAST_READ = 0.5  # of the R2 of true frames through the tokenizer
READABLE = 0.2  # R2 of those from which on the probe can be trusted
TRUE, CODED, IMAGINED, EXCHANGED = "true frames", "through the tokenizer", "imagined", "imagined, other clips' actions"

Likeness = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class FollowingVerdict:
    """``word`` is "follows", "ignores", "in part" or "unknown"."""

    word: str
    sentence: str


def verdict(
    gap: ActionGap | None, distances: Distances | None, following: Mapping[str, ActionAgreement], reason: str = ""
) -> FollowingVerdict:
    """The signs together; ``reason``: why nothing could be measured, if so."""
    signs: list[tuple[bool, str]] = []  # whether a measurement shows obedience, and a sentence
    if gap is not None:
        sentence = (
            f"with the actions of another clip its loss is {gap.mean:.2f} times as large, and larger on {gap.share:.0%}"
            " of the clips (1.00 and 50% for a model that ignores them)"
        )
        signs.append((gap.mean >= LEAST_RATIO and gap.share >= LEAST_SHARE, sentence))
    if distances is not None:
        sentence = (
            f"other actions change a video by {distances.actions:.2f} of 255, another seed by {distances.seeds:.2f} (0"
            " for a model that ignores them)"
        )
        signs.append((distances.ratio >= LEAST_DISTANCE, sentence))
    if {CODED, IMAGINED} <= set(following) and not following[CODED].r2_of_sums < READABLE:
        read, best = following[IMAGINED].r2_of_sums, following[CODED].r2_of_sums
        control = f", other clips' actions with {following[EXCHANGED].r2_of_sums:.2f}" if EXCHANGED in following else ""
        sentence = (
            f"its actions are read from the imagined frames with R2 {read:.2f} (from true frames through the tokenizer"
            f" with {best:.2f}{control})"
        )
        signs.append((read >= LEAST_READ * best, sentence))
    if not signs:
        why = reason or "nothing was measured"
        return FollowingVerdict("unknown", f"cannot say whether it follows its actions: {why}")
    shown, because = sum(is_shown for is_shown, _ in signs), "; ".join(sentence for _, sentence in signs)
    if shown == len(signs):
        return FollowingVerdict("follows", f"follows its actions: {because}")
    if not shown:
        return FollowingVerdict("ignores", f"ignores its actions: {because}")
    return FollowingVerdict("in part", f"follows its actions only in part ({shown} of {len(signs)} signs): {because}")


@dataclass(frozen=True)
class ActionTrials:
    """One first frame each, K sequences of actions (its own first, then those of others), R seeds."""

    which: list[int]  # recordings whose first frames they are
    borrowed: list[list[int]]  # the recordings whose actions were tried on each
    videos: list[Tensor]  # of each first frame: uint8 [K, R, 3, 1 + L, H, W]


@dataclass(frozen=True)
class Report:
    """The measurements. Lists by horizon begin with the first frame after the conditioning one."""

    data: str
    num_clips: int
    num_actions: int  # of a clip
    chunk_size: int
    num_steps: int
    likeness: dict[str, dict[str, list[float]]]  # name -> "imagined" and "first frame repeated" -> by horizon
    gap: ActionGap | None
    distances: Distances | None  # in units of pixels' values, 0 to 255
    following: dict[str, ActionAgreement]  # what is read of which frames: TRUE and the other three
    by_chunk: dict[str, list[float]]
    seams: dict[str, float]  # the change at the first frame of a chunk, over that between other frames
    left_out: tuple[str, ...] = ()  # what was not measured, and why
    cautions: tuple[str, ...] = ()  # what makes the verdict doubtful
    weights: str = ""  # which were measured

    @property
    def clips(self) -> str:
        return f"{self.num_clips} clip{'s' if self.num_clips > 1 else ''} of {self.data}"

    @property
    def steps(self) -> str:
        return f"{self.num_steps} sampling step{'s' if self.num_steps > 1 else ''}"

    def as_dict(self) -> dict[str, Any]:
        found = {"verdict": asdict(self.verdict), "cautions": self.cautions, "weights": self.weights, **asdict(self)}
        if self.gap is not None:
            found["gap"] = self.gap.as_dict()
        if self.distances is not None:
            found["distances"] |= {"ratio": self.distances.ratio}
        return found

    @property
    def verdict(self) -> FollowingVerdict:
        return verdict(self.gap, self.distances, self.following, "; ".join(self.left_out))

    def tables(self) -> list[Table]:
        """Likeness at a dozen horizons at most, the first and the last among them, and by chunk."""
        step = -(-self.num_actions // 12)
        horizons = sorted({1, *range(step, self.num_actions + 1, step), self.num_actions})
        likeness = [
            (f"{name}, {kind}", [values[h - 1] for h in horizons])
            for name, by_kind in self.likeness.items()
            for kind, values in by_kind.items()
        ]
        chunks = range(1, 1 + len(self.by_chunk["PSNR"]))
        return [("frame", horizons, likeness), ("chunk", chunks, list(self.by_chunk.items()))]

    def as_text(self) -> str:
        rows = [self.verdict.sentence, *(f"caution: {text}" for text in self.cautions)]
        rows += [f"({self.clips}, {self.steps})", *([f"weights: {self.weights}"] if self.weights else []), ""]
        rows += [line for table in self.tables() for line in [*aligned(*table), ""]]
        return "\n".join([*rows, *self.findings()])

    def findings(self) -> list[str]:
        """A sentence for each single figure."""
        found = []
        if self.gap is not None:
            by_sigma = zip(self.gap.sigmas, self.gap.ratios)
            ratios = ", ".join(f"{ratio:.2f} at sigma {sigma:g}" for sigma, ratio in by_sigma)
            found.append(f"loss with other actions / with the true ones: {self.gap.mean:.2f} ({ratios})")
        if self.distances is not None:
            found.append(
                f"other actions change a video by {self.distances.actions:.2f} (root mean square, of 255), another seed"
                f" by {self.distances.seeds:.2f}: {self.distances.ratio:.2f} times as far"
            )
        if self.following:
            read = ", ".join(f"{kind} {of.r2_of_sums:.3f} ({of.r2:.3f})" for kind, of in self.following.items())
            found.append(f"actions read from the frames, R2 of the sums of four (of each): {read}")
            if self.following[CODED].r2_of_sums < READABLE:
                found.append("the probe cannot read these actions from true frames either: no sign of the model's")
        if self.seams:
            seams = ", ".join(f"{kind} {value:.2f}" for kind, value in self.seams.items())
            found.append(f"change at the seams of chunks / elsewhere: {seams}")
        return found + [f"left out: {text}" for text in self.left_out]


def evaluate(
    pipe: Video2WorldActionConditionedPipeline,
    recordings: EvaluationClips,
    *,
    num_steps: int = 35,
    guidance: float = 0.0,
    seed: int = 0,
    batch_size: int | None = None,
    text_1_S_E: Tensor | None = None,
    with_lpips: bool = False,
    weights: str = "",
    views: Sequence[str] = ("",),
) -> tuple[Report, Tensor, ActionTrials]:
    """The figures, what was imagined of each recording (uint8 [B, 3, 1 + L, H, W]), and what other actions made.

    ``weights`` describes those of the pipeline, for the report. Likeness is measured of each of several ``views``, too.
    """
    options = SamplingOptions(num_steps=num_steps, guidance=guidance)
    sampling: dict[str, Any] = dict(options=options, batch_size=batch_size, text_B_S_E=text_1_S_E)
    seeds = range(seed, seed + len(recordings))
    head, states, trail = pipe.dit.state_head, recordings.state_B_F_S, dict[str, Any]()
    if head is not None and states is not None:
        trail["trail"] = StateTrail(head, states[:, 0])
    first, actions = recordings.first_B_C_1_H_W, recordings.action_B_L_D
    imagined = pipe.rollout(first, actions, seeds, **sampling, **trail).cpu()
    trials = action_trials(pipe, recordings, seed=seed, **sampling)
    log.info("imagined %d clips of %d frames", len(recordings), recordings.num_actions)
    truth, chunk = recordings.video_B_C_F_H_W, pipe.config.chunk_size
    gap = gap_of(pipe, truth, recordings.action_B_L_D, seed, text_1_S_E, recordings.origins)
    distances = mean_distances(trials)
    unreadable = why_not_read(recordings)
    read, read_by_chunk = ({}, {}) if unreadable else following(pipe, recordings, imagined)
    left_out = [f"actions read from the frames, as {unreadable}"] if unreadable else []
    if gap is None or distances is None:
        alike = f"the first {chunk} actions of all {len(recordings)} clips are alike: give --data in which they differ"
        found = f"there is one clip: {recordings.where_more_are}" if len(recordings) == 1 else alike
        left_out.insert(0, f"what other actions change, as {found}")
    report = Report(
        data=recordings.name,
        num_clips=len(recordings),
        num_actions=recordings.num_actions,
        chunk_size=chunk,
        num_steps=num_steps,
        likeness=_of_views(partial(likeness_by_horizon, with_lpips=with_lpips), imagined, truth, views),
        gap=gap,
        distances=distances,
        following=read,
        by_chunk=_of_views(partial(by_chunk, chunk=chunk), imagined, truth, views)
        | (state_errors(trail["trail"], states, chunk) if trail and states is not None else {})
        | read_by_chunk
        | ({} if recordings.episodes is None else things_by_chunk(recordings.episodes, imagined, chunk)),
        seams={"true": seam_change(truth, chunk), "imagined": seam_change(imagined, chunk)}
        if recordings.num_actions > chunk
        else {},
        left_out=tuple(left_out),
        cautions=recordings.cautions,
        weights=weights,
    )
    return report, imagined, trials


def _of_views(
    measure: Callable[[Tensor, Tensor], dict[str, T]], imagined: Tensor, truth: Tensor, views: Sequence[str]
) -> dict[str, T]:
    """Figures by name, of whole pictures, and of several views those of each behind them."""
    found = measure(imagined, truth)
    if len(views) > 1:
        parts = zip(views, split(imagined, len(views)), split(truth, len(views)), strict=True)
        for view, *videos in parts:
            found |= {f"{name}, {view}": value for name, value in measure(*videos).items()}
    return found


def likeness_by_horizon(
    imagined_B_C_F_H_W: Tensor, truth_B_C_F_H_W: Tensor, *, with_lpips: bool = False
) -> dict[str, dict[str, list[float]]]:
    """Each likeness of the frames after the first, of what was imagined and of the first frame repeated."""
    kinds: dict[str, Likeness] = {"PSNR (dB)": video_quality.psnr, "SSIM": video_quality.ssim}
    if with_lpips:
        kinds["LPIPS (0: equal)"] = video_quality.lpips
    else:
        kinds["gradient similarity"] = video_quality.gradient_similarity
    truth = truth_B_C_F_H_W[:, :, 1:]
    repeated = truth_B_C_F_H_W[:, :, :1].expand_as(truth)
    videos = {"imagined": imagined_B_C_F_H_W[:, :, 1:], "first frame repeated": repeated}
    return {
        name: {kind: likeness(video, truth).tolist() for kind, video in videos.items()}
        for name, likeness in kinds.items()
    }


def state_errors(trail: StateTrail, state_B_F_S: Tensor, chunk: int) -> dict[str, list[float]]:
    """The mean error of the robot's state at the end of each chunk, as a share of its range in recordings, and that of
    the first state repeated."""
    truth = state_B_F_S[:, 1:].to(trail.states_B_A_S)
    ends = [min(start + chunk, truth.shape[1]) - 1 for start in range(0, truth.shape[1], chunk)]
    kinds = {"state error": trail.states_B_A_S, "state error, the first repeated": state_B_F_S[:, :1].expand_as(truth)}
    return {
        name: trail.head.error(states.to(truth), truth)[:, ends].mean(dim=(0, 2)).tolist()
        for name, states in kinds.items()
    }


def seam_change(video_B_C_F_H_W: Tensor, chunk: int) -> float:
    """The change from the frame before a chunk to its first one, over that between other frames: about 1 where no seam
    is seen. The first chunk begins with a true frame and is left out of the former."""
    change_F = (video_B_C_F_H_W[:, :, 1:].float() - video_B_C_F_H_W[:, :, :-1].float()).square().mean(dim=(0, 1, 3, 4))
    is_seam_F = torch.arange(len(change_F)) % chunk == 0
    others = change_F[~is_seam_F].mean()
    is_seam_F[0] = False
    return float((change_F[is_seam_F].mean() / others.clamp(min=1e-12)).sqrt())


# ---- obedience -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gap_of(
    pipe: Video2WorldActionConditionedPipeline,
    video_B_C_F_H_W: Tensor,
    action_B_A_D: Tensor,
    seed: int = 0,
    text_1_S_E: Tensor | None = None,
    origins: Sequence[str] = (),
) -> ActionGap | None:
    """The action gap of the first chunk of each clip, with the actions as the model reads them."""
    count, size = pipe.config.chunk_size, video_B_C_F_H_W.shape[-2:]
    x0 = pipe.world.encode(video_B_C_F_H_W[:, :, : count + 1])
    epsilon = initial_noise(tuple(x0.shape), range(seed, seed + len(x0))).to(x0)
    text = torch.zeros(1, 1, pipe.dit.text_channels) if text_1_S_E is None else text_1_S_E
    condition = controllability.action_condition(pipe.config, action_B_A_D[:, :count].to(x0), x0, text, size)
    return controllability.action_gap(pipe.world, x0, epsilon, condition, origins=origins)


def action_trials(
    pipe: Video2WorldActionConditionedPipeline, recordings: EvaluationClips, *, seed: int = 0, **sampling: Any
) -> ActionTrials:
    """Videos of the first chunk from a few first frames, each with its own actions and those of others."""
    chunk = pipe.config.chunk_size
    action = recordings.action_B_L_D[:, :chunk]
    differs_B_B = controllability.differing(action)
    order_B_B = controllability.lending_order(recordings.origins, len(action))
    scenes, borrowed, videos = [], [], []
    for i in range(min(NUM_SCENES, len(recordings))):
        rows = [i]
        for k in order_B_B[i].tolist():  # the first ones whose actions differ from all so far
            if len(rows) < NUM_SEQUENCES and bool(differs_B_B[k, rows].all()):
                rows.append(k)
        if len(rows) < 2:
            continue
        first = recordings.first_B_C_1_H_W[[i] * (len(rows) * NUM_SEEDS)]
        commanded = action[rows].repeat_interleave(NUM_SEEDS, dim=0)
        seeds = [seed + r for _ in rows for r in range(NUM_SEEDS)]
        made = pipe.generate_actions(first, commanded, seeds, **sampling).cpu()
        scenes.append(i)
        borrowed.append(rows)
        videos.append(made.unflatten(0, (len(rows), NUM_SEEDS)))
    return ActionTrials(scenes, borrowed, videos)


def mean_distances(trials: ActionTrials) -> Distances | None:
    """The mean over the first frames; None where no two recordings have different actions."""
    if not trials.videos:
        return None
    each = [controllability.video_distances(videos) for videos in trials.videos]
    return Distances(sum(d.actions for d in each) / len(each), sum(d.seeds for d in each) / len(each))


def following(
    pipe: Video2WorldActionConditionedPipeline, recordings: EvaluationClips, imagined_B_C_F_H_W: Tensor
) -> tuple[dict[str, ActionAgreement], dict[str, list[float]]]:
    """The agreement with the actions of what a probe reads from true frames, true ones through the tokenizer, and
    imagined ones; and R2 in each chunk.

    It is fitted to true frames of both kinds: of other clips, or where there are none of those of every second
    recording, and scored on the rest.
    """
    truth, action = recordings.video_B_C_F_H_W, recordings.action_B_L_D
    (known, known_action), scored = _fitted_and_scored(recordings)
    probe = inverse_dynamics.fit_probe(torch.cat([known, _coded(pipe, known)]), torch.cat([known_action] * 2))
    frames = {IMAGINED: imagined_B_C_F_H_W[scored], CODED: _coded(pipe, truth[scored]), TRUE: truth[scored]}
    found = {kind: probe.score(video, action[scored]) for kind, video in frames.items()}
    origins = [recordings.origins[i] for i in scored] if recordings.origins else ()
    other, _ = controllability.partners(action[scored], origins)
    found[EXCHANGED] = probe.score(frames[IMAGINED], action[scored][other])
    by_chunk = {
        f"actions read, {kind} (R2)": probe.by_chunk(video, action[scored], pipe.config.chunk_size)
        for kind, video in frames.items()
        if kind != TRUE
    }
    return found, {name: values for name, values in by_chunk.items() if all(map(isfinite, values))}


def why_not_read(recordings: EvaluationClips) -> str:
    """The reason why actions cannot be read from the frames of these recordings; empty where they can."""
    (known, known_action), scored = _fitted_and_scored(recordings)
    action = recordings.action_B_L_D[scored]
    least = 2 * inverse_dynamics.HELD_BACK
    if len(known) < least or len(scored) < 2:
        if recordings.others is not None:
            return f"{len(scored)} recording is too few: raise --num_clips to 2 at least"
        return (
            f"the probe that reads them is fitted to {least} clips at least and scored on 2 of other recordings,"
            f" and of the {len(recordings)} clips there are {len(known)} and {len(scored)}: {recordings.where_more_are}"
        )
    if not inverse_dynamics.varying(known_action) or not inverse_dynamics.varying(action):
        return "they are all the same"
    return ""


def _fitted_and_scored(recordings: EvaluationClips) -> tuple[tuple[Tensor, Tensor], list[int]]:
    """The clips and actions that the probe is fitted to, and the rows of the recordings that it is scored on."""
    if recordings.others is not None:
        return recordings.others, list(range(len(recordings)))
    fitted, scored = recordings.halves()
    return (recordings.video_B_C_F_H_W[fitted], recordings.action_B_L_D[fitted]), scored


# ---- parts -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _coded(pipe: Video2WorldActionConditionedPipeline, video_B_C_F_H_W: Tensor) -> Tensor:
    """The frames as the tokenizer gives them back: all that a model can imagine at best."""
    parts = video_B_C_F_H_W.split(pipe.world.clips_at_once(*video_B_C_F_H_W.shape[2:]))
    return torch.cat([to_uint8(pipe.world.decode(pipe.world.encode(part))).cpu() for part in parts])


# ---- the page --------------------------------------------------------------------------------------------------------


def write_report(
    folder: Path,
    report: Report,
    recordings: EvaluationClips,
    imagined_B_C_F_H_W: Tensor,
    trials: ActionTrials,
    *,
    fps: float,
    futures: Futures | None = None,
    figures: ImaginedFigures | None = None,
) -> Path:
    """Write the folder of an evaluation; gives its page.

    It has index.html with curves and the videos that it shows, which opens without a network; figures.json; and of the
    toy world futures.mp4 and .png.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunks = len(report.by_chunk["PSNR"])
    sampling = f"{report.steps}, {chunks} chunk{'s' if chunks > 1 else ''} of {report.chunk_size} actions"
    facts = [f"weights: {report.weights}", f"data: {report.clips}", sampling]
    page = Page("How well the world model follows the robot's actions", facts, shown_width(imagined_B_C_F_H_W))
    page.verdict(f"The model {report.verdict.sentence}.")
    for caution in report.cautions:
        page.verdict(f"Caution: {caution}")
    values: dict[str, Any] = report.as_dict()

    truth, imagined = recordings.video_B_C_F_H_W, imagined_B_C_F_H_W
    page.heading("Truth and imagined", "The clips in which most happens; both get the same first frame.")
    change = (truth[:, :, 1:].float() - truth[:, :, :1].float()).square().flatten(1).mean(1)
    chosen = change.argsort(descending=True)[:NUM_SHOWN].tolist()
    for i in chosen:
        clips = [("true", truth[i]), ("imagined", imagined[i])]
        page.videos(folder, fps, [(f"clip_{i:02d}_{name}", f"clip {i}, {name}", clip) for name, clip in clips])
    page.note(f"Shown are {len(chosen)} of {len(truth)} clips; one that follows its actions moves as the truth does.")

    if trials.videos:
        _show_trials(page, folder, trials, fps)
    if futures is not None:
        values["futures"] = {"error": futures.error(), "apart": futures.apart()}
        _show_futures(page, folder, futures, fps)

    page.heading("Likeness to the true frames", "By frames after the first one, which is given.")
    page.curves(report.likeness, "frames after the first")
    by_kind = report.likeness["PSNR (dB)"]
    gains = [a - b for a, b in zip(by_kind["imagined"], by_kind["first frame repeated"])]
    page.note(
        f"Imagined frames are nearer to the truth than the first frame repeated at {sum(gain > 0 for gain in gains)} of"
        f" {len(gains)} frames: by {gains[0]:+.1f} dB at the first, {gains[-1]:+.1f} dB at the last."
    )
    likeness, by_chunk = report.tables()
    page.table(*likeness)
    if chunks > 1:
        page.heading("Drift over chunks", "Each chunk begins with the last frame that was imagined before.")
        page.table(*by_chunk)

    page.heading("All figures of obedience and seams")
    page.findings(report.findings())
    if figures is not None:
        values["toy_world"] = figures
        page.heading("Whole episodes of the toy world", "Whether they end as the simulator's do, judged from pixels.")
        page.text(figures.as_text())
    storage.write_json(folder / FIGURES, values)
    return page.write(folder)


def _show_trials(page: Page, folder: Path, trials: ActionTrials, fps: float) -> None:
    note = "Each row has one first frame: under its own actions, under those of other clips, and with another seed."
    page.heading("Other actions, and another seed", note)
    for i, rows, videos in zip(trials.which, trials.borrowed, trials.videos):
        shown = [("own actions" if k == i else f"actions of clip {k}", clip) for k, clip in zip(rows, videos[:, 0])]
        shown.append(("own actions, another seed", videos[0, 1]))
        page.videos(folder, fps, [(f"tried_{i:02d}_{j}", *captioned) for j, captioned in enumerate(shown)])
    page.note(
        "Where actions are followed, videos of a row differ; the first and the last, with equal actions, hardly do."
    )


def _show_futures(page: Page, folder: Path, futures: Futures, fps: float) -> None:
    page.heading(
        "Three futures of one picture",
        "Above the simulator's, below what is imagined with one noise for all. The imagined ones are"
        f" {futures.error():.1f} from the simulated ones (root mean square, of 255) and {futures.apart():.1f} from"
        " each other.",
    )
    for kind, videos in (("simulated", futures.simulated), ("imagined", futures.imagined)):
        named = enumerate(zip(futures.names, videos))
        page.videos(folder, fps, [(f"future_{j}_{kind}", f"{name}: {kind}", clip) for j, (name, clip) in named])
    media.write_video(folder / "futures.mp4", futures.video(), fps)
    media.write_image(folder / "futures.png", futures.sheet())
