# SPDX-License-Identifier: Apache-2.0
"""The folder that an evaluation of a world model with actions writes: index.html with curves and the videos that it
shows, which opens without a network; figures.json; of the toy world futures.mp4 and .png.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from cosmos_predict2.data.video import media
from cosmos_predict2.evaluation.reports.action_evaluation import ActionTrials, Report
from cosmos_predict2.evaluation.reports.evaluation_page import FIGURES, Page, shown_width
from cosmos_predict2.evaluation.reports.toy_world import Futures, ImaginedFigures
from cosmos_predict2.pipelines.evaluation_data import Recordings
from imaginaire import storage

NUM_SHOWN = 4  # clips, those in which most happens


def write_report(
    folder: Path,
    report: Report,
    recordings: Recordings,
    imagined_B_C_F_H_W: Tensor,
    trials: ActionTrials,
    *,
    fps: float,
    futures: Futures | None = None,
    figures: ImaginedFigures | None = None,
) -> Path:
    """Write all of it; gives the page."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = len(report.by_chunk["PSNR"])
    sampling = f"{report.steps}, {chunks} chunk{'s' if chunks > 1 else ''} of {report.chunk_size} actions"
    page = Page(
        "How well the world model follows the robot's actions",
        [f"weights: {report.weights}", f"data: {report.clips}", sampling],
        video_width=shown_width(imagined_B_C_F_H_W),
    )
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
    page.heading(
        "Other actions, and another seed",
        "Each row has one first frame: under its own actions, under those of other clips, and with another seed.",
    )
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
