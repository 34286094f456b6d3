# SPDX-License-Identifier: Apache-2.0
"""The form of a data set on disk, recognised by the entries of its folder."""

from pathlib import Path

from cosmos_predict2.data.dataset_latents import FOLDER, SUFFIX
from cosmos_predict2.data.video.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from imaginaire import foreign_json
from imaginaire.errors import DataError, near

SPLITS = ("train", "val", "validation", "test")
ANNOTATIONS = ("annotation", "annotations")

_KNOWN = """\
  videos/*.mp4                        clips, with metas/*.txt and t5_xxl/*.pickle
  latents/*.safetensors               cached latents of clips, with metas/*.txt and t5_xxl/*.pickle
  images/*.jpg                        pictures, with metas/*.txt and t5_xxl/*.pickle
  annotation/<split>/*.json           recordings of a robot, with videos/<split>/<name>/*.mp4
  meta/info.json                      a LeRobot data set, with data/ and videos/
  train/, val/ or test/               any of these in each"""

TOY_STATES = "states-*.npz"  # of the toy world: compact states, drawn when they are wanted


def form_of(folder: Path) -> str:
    """ "video", "image", "latents", "bridge", "lerobot", or "splits" for a folder of such folders."""
    if folder.is_file():
        raise DataError(f"{folder} is a file; give the data set's folder.")
    if not folder.is_dir():
        names = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise DataError(f"There is no folder {folder}.{near(folder.name, names)}")
    if (folder / "meta" / "info.json").is_file():
        return "lerobot"
    form = _form(folder)
    if form is None and any(_form(folder / name) for name in SPLITS):
        return "splits"
    if form is None:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise DataError(f"{folder} has none of the forms that are known here:\n{_KNOWN}\nIt holds {found}.")
    return form


def split_folders(folder: Path) -> list[Path]:
    """The parts of a data set of the form "splits", with those that hold nothing that is known."""
    return [folder / name for name in SPLITS if (folder / name).is_dir()]


def annotation_folders(folder: Path) -> list[Path]:
    """Folders of a "bridge" data set's annotations: one for each split, or one for all."""
    top = next(folder / name for name in ANNOTATIONS if (folder / name).is_dir())
    below = sorted(path for path in top.iterdir() if path.is_dir() and any(path.glob("*.json")))
    return ([top] if any(top.glob("*.json")) else []) + below


def _form(folder: Path) -> str | None:
    if any(_has_recordings(folder / name) for name in ANNOTATIONS):
        return "bridge"
    videos, images = folder / "videos", folder / "images"
    if _holds(videos, VIDEO_SUFFIXES):
        return "video"
    if videos.is_dir() and (cameras := sorted(path.name for path in videos.iterdir() if _holds(path, VIDEO_SUFFIXES))):
        raise DataError(
            f"{videos} has a folder of clips for each camera ({', '.join(cameras)}): a multi-view model trains on it"
            " (cosmos_predict2.data.dataset_multiview). For one of a single view, move those of one camera to"
            f" {videos}."
        )
    if _holds(images, IMAGE_SUFFIXES):
        return "image"
    if _holds(folder / FOLDER, (SUFFIX,)):
        return "latents"
    return "video" if videos.is_dir() else "image" if images.is_dir() else None  # empty ones, which is a fault


def _has_recordings(folder: Path) -> bool:
    """True for annotations of recordings that name their videos; a folder of clips may have other ones."""
    if not folder.is_dir():
        return False
    first = next(iter(sorted(folder.glob("*.json"))), None)
    if first is None:
        return any(next(path.glob("*.json"), None) for path in folder.iterdir() if path.is_dir())
    try:
        annotation = foreign_json.load(first)
    except (OSError, ValueError):
        return False
    return isinstance(annotation, dict) and "videos" in annotation


def _holds(folder: Path, suffixes: tuple[str, ...]) -> bool:
    return folder.is_dir() and any(
        path.suffix.lower() in suffixes and not path.name.startswith(".") for path in folder.iterdir()
    )
