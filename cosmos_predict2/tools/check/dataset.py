# SPDX-License-Identifier: Apache-2.0
"""A whole data set: what it holds, which of its files do not belong together, and what is wrong with each of them;
as a report for people and for programs.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import attrs

from cosmos_predict2.data import dataset_forms as forms
from cosmos_predict2.data import dataset_latents
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import SUCCESS_COLUMN, recorded_outcomes
from cosmos_predict2.data.video.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import SAME_RATE, files_by_stem
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder, EncoderRecord, embedding_files, find_embedding_dir
from cosmos_predict2.text.embeddings.pickles import NUM_TOKENS
from cosmos_predict2.text.trained_text import encode_commands
from cosmos_predict2.tokenizers.sizes import size_problem, swapped_size
from cosmos_predict2.tools.check import recordings
from cosmos_predict2.tools.check.clips import ClipFacts, ClipJob, check_all, check_clip, fault, file_of, kind_of
from imaginaire import foreign_json
from imaginaire.config.schema import above, at_least
from imaginaire.errors import ConfigError, DataError, listed
from imaginaire.findings import Finding

_SMALL = 64 * 2**20  # bytes of clips that one process looks through sooner than others start
_DISTORTED = 1.1  # ratio of aspect ratios from which on it shows
_SAMPLES = {  # form: folder, suffixes, what they are
    "video": ("videos", VIDEO_SUFFIXES, "clips"),
    "image": ("images", IMAGE_SUFFIXES, "pictures"),
    "latents": (dataset_latents.FOLDER, (dataset_latents.SUFFIX,), "latents"),
}
_NAMED = 3  # of many, so many are named in a note
MOST_FAULTS = 50
_MOST_ROWS = 8


@attrs.define(kw_only=True, frozen=True)
class Requirements:
    """Requirements of training on the data set; None: no requirement."""

    num_frames: int | None = attrs.field(default=None, validator=at_least(1))
    video_size: Sequence[int] | None = None  # height, width
    fps: float | None = attrs.field(default=None, validator=above(0))
    any_fps: bool = False  # clips may differ in their rate, as where training brings them all to one
    text_encoder: str | None = None
    text_width: int | None = attrs.field(default=None, validator=at_least(1))
    num_tokens: int | None = attrs.field(default=None, validator=at_least(1))  # of a text
    needs_embeddings: bool = True
    is_fast: bool = False
    workers: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.video_size is not None and (problem := size_problem("video_size", self.video_size)):
            raise ConfigError(problem)

    def command(self, folder: Path, record: EncoderRecord | None = None) -> str:
        """The command that encodes the captions of a folder, by the encoder of its record or the required one."""
        name = record.encoder if record else self.text_encoder or ""
        if name == "bytes" and self.text_width is not None:
            name = BytesEncoder(self.num_tokens or NUM_TOKENS, self.text_width).name
        return encode_commands(folder, name, self.num_tokens)


@dataclass
class DatasetReport:
    """Contents and faults of a folder; ``parts`` are the reports of its splits."""

    folder: str
    form: str
    counts: dict[str, int] = field(default_factory=dict)
    encoder: str = ""
    clips: list[ClipFacts] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # frames of each episode, where a file may have several
    findings: list[Finding] = field(default_factory=list)  # errors (key KIND/FILE) and notes
    parts: list["DatasetReport"] = field(default_factory=list)
    actions: list[recordings.ActionTable] = field(default_factory=list)

    def fault(self, file: Path | str, kind: str, message: str) -> None:
        self.findings.append(fault(file, kind, message))

    def note(self, *texts: str | None) -> None:
        self.findings += [Finding(self.folder, text) for text in texts if text]

    def add_findings(self, clips: Iterable[ClipFacts]) -> None:
        self.findings += [one for facts in clips for one in facts.faults]

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def notes(self) -> list[str]:
        return [finding.text for finding in self.findings if finding.level != "error"]

    def all_faults(self) -> list[Finding]:
        return [*self.faults, *(one for part in self.parts for one in part.all_faults())]


def check_dataset(folder: Path, required: Requirements) -> DatasetReport:
    """Look at every file of a data set. Raises where the folder has no form that is known."""
    form = forms.form_of(folder)
    report = DatasetReport(str(folder), form)
    if form == "splits":
        for part in forms.split_folders(folder):
            try:
                report.parts.append(check_dataset(part, required))
            except DataError as error:
                report.fault(part, "unknown_form", str(error))
        for first, second in itertools.combinations(report.parts, 2):  # what is validated on was trained on
            if both := sorted({facts.stem for facts in first.clips} & {facts.stem for facts in second.clips}):
                names = listed(both, _NAMED)
                report.note(f"{first.folder} and {second.folder} share {len(both)} names ({names})")
        return report
    if form == "bridge":
        _check_recordings(report, folder, required)
    elif form == "lerobot":
        _check_lerobot(report, folder, required)
    else:
        _check_samples(report, folder, required)
    _compare_rates(report, required)
    _compare_sizes(report, required)
    if form == "video" and files_by_stem(folder / "images", IMAGE_SUFFIXES):
        report.note(f"{folder / 'images'} was not looked at: the folder has videos/")
    return report


# Samples: a clip or picture, its caption and its embedding ------------------------------------------------------------


def _check_samples(report: DatasetReport, folder: Path, required: Requirements) -> None:
    """Clips (or pictures, latents) of a folder, with what has their names elsewhere."""
    name, suffixes, what = _SAMPLES[report.form]
    place = folder / name
    clips = _files(report, place, suffixes)
    captions = _files(report, folder / "metas", (".txt",))
    embeddings, record = _embeddings(report, folder, required)
    if not clips:
        report.fault(place, "empty", f"{place} holds no {what}.")
    _compare_stems(report, folder, set(clips), captions, embeddings, record, required)
    jobs = [
        ClipJob(
            stem=stem,
            path=path,
            caption=captions.get(stem),
            embedding=embeddings.get(stem),
            num_frames=None if report.form == "image" else required.num_frames,
            is_fast=required.is_fast,
            encoder=record.encoder if record else required.text_encoder,
            num_tokens=record.num_tokens if record else required.num_tokens or NUM_TOKENS,
            width=record.width if record else None,
            encoded=record.captions.get(stem) if record else None,
        )
        for stem, path in clips.items()
    ]
    if report.form == "latents" and not _has_latent_record(report, place):
        jobs = []
    found = check_all(check_clip, jobs, place, _workers(required, clips.values()))
    report.clips += found
    report.add_findings(found)
    counts = {what: len(clips), "captions": len(captions), "embeddings": len(embeddings)}
    report.counts = {key: report.counts.get(key, 0) + count for key, count in counts.items()}
    _compare_embeddings(report, folder, found, record, required)
    _check_annotations(report, folder / "annotation", set(clips))
    if report.form == "video":
        _check_latents(report, folder, set(clips), required)


def _files(report: DatasetReport, folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """The files by stem; two of one stem are a fault, and the first counts."""
    found: dict[str, Path] = {}
    if not folder.is_dir():
        return found
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == dataset_latents.RECORD:
            continue
        if not path.is_file():
            if path.suffix.lower() in suffixes:
                what = "is a folder" if path.is_dir() else "is a link to nothing" if path.is_symlink() else "is no file"
                report.fault(path, "unreadable", f"{path} {what}; training does not see it.")
            continue
        if path.suffix.lower() not in suffixes:
            report.note(f"{path} is none of {', '.join(suffixes)}; training does not see it")
        elif path.stem in found:
            report.fault(path, "same_stem", f"{path} has the stem of {found[path.stem].name}. Rename one of them.")
        else:
            found[path.stem] = path
    return found


def _embeddings(
    report: DatasetReport, folder: Path, required: Requirements
) -> tuple[dict[str, Path], EncoderRecord | None]:
    place = find_embedding_dir(folder)
    if place is None:
        return {}, None
    embeddings = {}
    for stem, paths in embedding_files(place).items():
        embeddings[stem] = paths[0]
        if len(paths) > 1:
            others = ", ".join(path.name for path in paths[1:])
            report.note(f"{paths[0]} is read, and {others} is not: they have the same stem")
    reader = EmbeddingFolder(place)
    try:
        record = reader.record
    except DataError as error:
        report.fault(place / "embeddings.json", "record", str(error))
        return embeddings, None
    if record is None and embeddings:
        report.note(f"{place} has no embeddings.json: its encoder and captions are unknown")
    report.encoder = record.encoder if record else report.encoder
    if required.text_encoder is not None:
        try:
            reader.require_encoder(required.text_encoder, required.num_tokens)
        except DataError as error:
            report.fault(place, "wrong_encoder", str(error))
    return embeddings, record


def _compare_stems(
    report: DatasetReport,
    folder: Path,
    clips: set[str],
    captions: dict[str, Path],
    embeddings: dict[str, Path],
    record: EncoderRecord | None,
    required: Requirements,
) -> None:
    """Faults for what has no counterpart."""
    place = folder / _SAMPLES[report.form][0]
    for files in (captions, embeddings):
        for stem in sorted(set(files) - clips):
            report.fault(files[stem], "no_clip", f"{files[stem]} has no counterpart in {place}.")
    if captions:
        for stem in sorted(clips - set(captions)):
            path = folder / "metas" / f"{stem}.txt"
            report.fault(path, "no_caption", f"{path} is missing: '{stem}' has no caption.")
    elif clips:
        text = f"{folder / 'metas'} holds no captions (*.txt)"
        if embeddings:
            report.note(f"{text}; training does not need them where there are embeddings")
        else:
            report.fault(folder / "metas", "no_caption", f"{text}: python -m scripts.caption_videos writes them.")
    if embeddings and required.needs_embeddings:
        for stem in sorted(clips - set(embeddings)):
            path = next(iter(embeddings.values())).parent / f"{stem}.pickle"
            cure = required.command(folder, record)
            report.fault(path, "no_embedding", f"{path} is missing: training leaves '{stem}' out. Write it: {cure}")
    elif clips and required.needs_embeddings:
        message = f"{folder / 't5_xxl'} holds no embeddings: {required.command(folder)}"
        report.fault(folder / "t5_xxl", "no_embedding", message)


def _compare_embeddings(
    report: DatasetReport, folder: Path, found: list[ClipFacts], record: EncoderRecord | None, required: Requirements
) -> None:
    """Faults for embeddings of another width than most, or than the model's."""
    have = [facts for facts in found if facts.num_tokens]
    if not have:
        return
    most = record.num_tokens if record else max(facts.num_tokens for facts in have)
    usual = record.width if record else Counter(facts.text_width for facts in have).most_common(1)[0][0]
    place = Path(have[0].embedding).parent
    if any(file_of(found) == str(place) for found in report.faults):
        pass  # reported already
    elif required.text_width is not None and usual != required.text_width:
        by = f" by {record.encoder}" if record else ""
        message = f"{place} holds embeddings of width {usual}{by}, but the model takes {required.text_width}."
        message += f" Delete the folder and encode with the model's encoder: {required.command(folder)}"
        report.fault(place, "wrong_encoder", message)
    elif required.num_tokens is not None and most > required.num_tokens:
        report.note(
            f"{place}: captions were encoded with up to {most} tokens, but the model's data reads {required.num_tokens}"
            f": longer ones are cut. Train with num_tokens={most} of the data set to have them whole"
        )
    for facts in have:
        if record is None and facts.text_width != usual:
            message = f"{facts.embedding} has width {facts.text_width}, most others have {usual}: of another encoder."
            report.fault(facts.embedding, "wrong_encoder", message)


def _check_annotations(report: DatasetReport, folder: Path, clips: set[str]) -> None:
    """Annotations beside clips: readable, and of clips that are there."""
    for stem, path in files_by_stem(folder, (".json",)).items():
        try:
            foreign_json.load(path)
        except (OSError, ValueError) as error:
            report.fault(path, "annotation", f"{path} cannot be read: {error}.")
        if stem not in clips:
            report.fault(path, "no_clip", f"{path} has no clip.")


def _check_latents(report: DatasetReport, folder: Path, clips: set[str], required: Requirements) -> None:
    """Cached latents beside clips: readable, and of the clips that are there."""
    place = folder / dataset_latents.FOLDER
    files = _files(report, place, (dataset_latents.SUFFIX,))
    if not files or not _has_latent_record(report, place):
        return
    jobs = [ClipJob(stem, path, num_frames=required.num_frames) for stem, path in files.items()]
    report.add_findings(check_all(check_clip, jobs, place, _workers(required, files.values())))
    report.counts["latents"] = len(files)
    for stem in sorted(set(files) - clips):
        report.note(f"{files[stem]} is of a clip that is not here; training from latents uses it")
    if lost := sorted(clips - set(files)):
        names = listed(lost, _NAMED)
        report.note(f"{len(lost)} clips have no latents ({names}): training from latents leaves them out")


def _has_latent_record(report: DatasetReport, place: Path) -> bool:
    try:
        if dataset_latents.read_record(place) is not None:
            return True
        message = f"{place / dataset_latents.RECORD} is missing, so the tokenizer of the latents is unknown."
    except DataError as error:
        message = str(error)
    report.fault(place / dataset_latents.RECORD, "record", message)
    return False


# Recordings, splits --------------------------------------------------------------------------------------------------


def _check_recordings(report: DatasetReport, folder: Path, required: Requirements) -> None:
    files = [path for place in forms.annotation_folders(folder) for path in sorted(place.glob("*.json"))]
    jobs = [recordings.RecordingJob(path, folder, required.num_frames, required.is_fast) for path in files]
    workers = _workers(required, (folder / "videos").rglob("*.mp4"))
    facts = [item for items in check_all(recordings.check_recording, jobs, folder, workers) for item in items]
    report.clips = [item for item in facts if item.path]
    report.add_findings(facts)
    report.counts = {"recordings": len(files), "clips": len(report.clips)}
    if (table := recordings.bridge_table(files)) is not None:
        _add_actions(report, [table])


def _check_lerobot(report: DatasetReport, folder: Path, required: Requirements) -> None:
    source = LeRobotSource.open(folder)
    report.note(f"version {source.info.version}, cameras {', '.join(source.info.cameras) or 'none'}")
    workers = _workers(required, folder.rglob("*.mp4"))
    report.clips = recordings.check_videos(source, is_fast=required.is_fast, workers=workers)
    try:
        _add_actions(report, recordings.lerobot_tables(source))
        if SUCCESS_COLUMN in source.info.features:
            ever, last = (recorded_outcomes(source, SUCCESS_COLUMN, last=one).count(True) for one in (False, True))
            report.note(
                f"{ever} of {len(source)} episodes succeed ({SUCCESS_COLUMN}), {last} still in their last picture"
            )
    except DataError as error:
        report.fault(folder, "actions", str(error))
    report.add_findings(report.clips)
    report.findings += recordings.index_faults(source, report.clips, required.num_frames)
    report.lengths = source.episodes.lengths.tolist()
    report.counts = {"episodes": len(source), "frames": sum(report.lengths)}
    report.counts |= {"tasks": len(source.tasks) or len(source.episodes.texts), "videos": len(report.clips)}
    report.note(source.rate_note())
    report.findings += recordings.classic_faults_of(source, with_pictures=not required.is_fast)
    if (note := source.episodes.several_tasks()) is not None:
        report.note(f"{note}: a clip or an embedding of a whole episode has the text of its first frame")


def _add_actions(report: DatasetReport, tables: list[recordings.ActionTable]) -> None:
    report.actions = tables
    for table in tables:
        report.note(*table.notes())
        if table.fault:
            report.fault(report.folder, "constant_actions", f"{report.folder}: {table.fault}.")


# All clips together ---------------------------------------------------------------------------------------------------


def _compare_rates(report: DatasetReport, required: Requirements) -> None:
    have = [facts for facts in report.clips if facts.fps > 0]
    if not have or required.any_fps:
        return
    usual = required.fps or Counter(round(facts.fps, 3) for facts in have).most_common(1)[0][0]
    whose = "is wanted" if required.fps else "is the most frequent rate"
    for facts in have:
        if abs(facts.fps - usual) > SAME_RATE * usual:
            message = f"{facts.path} has {facts.fps:g} frames per second, {usual:g} {whose}. Encode it at"
            message += " one rate with the others, or train with dataloader_train.dataset.fps=RATE (here: --any_fps)."
            report.fault(facts.path, "mixed_fps", message)


def _compare_sizes(report: DatasetReport, required: Requirements) -> None:
    if required.video_size is None:
        return
    height, width = required.video_size
    have = [facts for facts in report.clips if facts.height]
    small = [facts.path for facts in have if facts.height < height and facts.width < width]
    if small:
        report.note(f"{len(small)} are smaller than {height}x{width} and will be enlarged ({listed(small, _NAMED)})")
    sizes = ((facts.path, (facts.height, facts.width)) for facts in have)
    if across := [note for path, size in sizes if (note := swapped_size((height, width), size, path))]:
        report.note(f"{across[0]} ({len(across)} of {len(have)})")
    ratios = {facts.path: facts.width * height / (facts.height * width) for facts in have}
    if bent := [path for path, ratio in ratios.items() if max(ratio, 1 / ratio) > _DISTORTED]:
        names = listed(bent, _NAMED)
        report.note(f"{len(bent)} have another shape than {height}x{width}: training stretches them ({names})")


def _workers(required: Requirements, paths: Iterable[Path]) -> int | None:
    if required.workers is not None:
        return required.workers
    return 0 if sum(path.stat().st_size for path in paths) < _SMALL else None


# ---- a report for people and for programs ----------------------------------------------------------------------------


def as_text(report: DatasetReport, most_faults: int = MOST_FAULTS) -> str:
    """A few lines for each folder, then its notes and faults."""
    lines = list(_lines(report))
    faults = report.all_faults()
    if faults:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(map(kind_of, faults)).most_common())
        lines += ["", f"{len(faults)} fault{'s' if len(faults) > 1 else ''}: {kinds}"]
        lines += [f"  {kind_of(fault)}: {fault.text}" for fault in faults[:most_faults]]
        if len(faults) > most_faults:
            lines.append(f"  ... and {len(faults) - most_faults} more; --json FILE writes all of them")
    else:
        lines += ["", "no faults"]
    return "\n".join(lines)


def as_json(report: DatasetReport) -> dict[str, Any]:
    """Everything, without the single clips."""
    readable = [facts for facts in report.clips if facts.height]
    return {
        "folder": report.folder,
        "form": report.form,
        "counts": report.counts,
        "encoder": report.encoder,
        "seconds": round(_seconds(readable), 3),
        "num_frames": dict(Counter(report.lengths or [facts.num_frames for facts in readable]).most_common()),
        "sizes": {f"{height}x{width}": n for (height, width), n in _table(readable, "height", "width")},
        "fps": dict(_table([facts for facts in readable if facts.fps], "fps")),
        "faults": [{"file": file_of(f), "kind": kind_of(f), "message": f.text} for f in report.faults],
        "notes": report.notes,
        "actions": [table.to_dict() for table in report.actions],
        "parts": [as_json(part) for part in report.parts],
    }


def _lines(report: DatasetReport) -> Iterator[str]:
    yield f"{report.folder}: {report.form}"
    if report.counts:
        yield f"  counts    {', '.join(f'{count} {what}' for what, count in report.counts.items())}"
    if report.encoder:
        yield f"  encoder   {report.encoder}"
    readable = [facts for facts in report.clips if facts.height]
    if readable and report.form != "image":
        frames = sorted(report.lengths or [facts.num_frames for facts in readable])
        length = f"{_seconds(readable) / 60:.1f} min" if _seconds(readable) >= 60 else f"{_seconds(readable):.1f} s"
        yield f"  frames    {frames[0]} to {frames[-1]}, median {median(frames):g}; {length} in all"
        yield f"  fps       {_rows([(f'{fps:g}', n) for fps, n in _table(readable, 'fps')], 'clips')}"
    if readable:
        sizes = [(f"height {height}, width {width}", n) for (height, width), n in _table(readable, "height", "width")]
        yield f"  size      {_rows(sizes, 'pictures' if report.form == 'image' else 'clips')}"
    for table in report.actions:
        title, *rows = table.lines()
        yield f"  actions   {title}"
        yield from (f"            {row}" for row in rows)
    for note in report.notes[:_MOST_ROWS]:
        yield f"  note      {note}"
    if len(report.notes) > _MOST_ROWS:
        yield f"  note      ... and {len(report.notes) - _MOST_ROWS} more"
    for part in report.parts:
        yield from _lines(part)


def _rows(table: list[tuple[str, int]], what: str) -> str:
    more = f"; {len(table) - _MOST_ROWS} more" if len(table) > _MOST_ROWS else ""
    return "; ".join(f"{value} ({count} {what})" for value, count in table[:_MOST_ROWS]) + more


def _table(facts: list[ClipFacts], *names: str) -> list[tuple[Any, int]]:
    """Values and how often they occur, the most frequent first; of several names tuples of them."""
    values = [tuple(round(getattr(item, name), 3) for name in names) for item in facts]
    return Counter(value if len(names) > 1 else value[0] for value in values).most_common()


def _seconds(facts: list[ClipFacts]) -> float:
    return sum(item.num_frames / item.fps for item in facts if item.fps)
