# SPDX-License-Identifier: Apache-2.0
"""A batch file for `examples/video2world.py` from a folder of pictures with their prompts beside them."""

import logging
import os
from pathlib import Path

from cosmos_predict2.data.dataset_forms import require_files
from cosmos_predict2.data.video.media import IMAGE_SUFFIXES
from cosmos_predict2.data.video_folder import read_caption
from cosmos_predict2.tools.jobs import Outcome
from cosmos_predict2.tools.prepare.records import some, write_json
from imaginaire.errors import DataError

log = logging.getLogger(__name__)


def batch_entries(pictures_dir: str, save_dir: str) -> Outcome[dict[str, str]]:
    """One entry a picture that has a prompt: ``NAME.txt`` or ``NAME..txt`` beside it, without the spaces around it."""
    pictures = require_files(Path(pictures_dir), IMAGE_SUFFIXES, "pictures")
    if os.path.realpath(pictures_dir) == os.path.realpath(save_dir):
        raise DataError(
            f"The videos may not go to {save_dir}, where the pictures lie: the inference script writes NAME.txt beside"
            " each video, which would replace the prompt. Give another --save_path."
        )
    outcome, without_prompt = Outcome[dict[str, str]](), []
    for stem, path in pictures.items():
        texts = [path.with_name(stem + ending) for ending in (".txt", "..txt")]
        text = next((text for text in texts if text.is_file()), None)
        if text is None:
            without_prompt.append(path.name)
            continue
        try:
            prompt = read_caption(text)
        except DataError as error:
            outcome.faults.append(str(error))
            continue
        output = os.path.join(save_dir, f"{stem}.mp4")
        picture = os.path.join(pictures_dir, path.name)
        outcome.results.append({"input_video": picture, "prompt": prompt, "output_video": output})
    if without_prompt:
        names = some(without_prompt)
        log.warning("%d pictures have no NAME.txt beside them and are left out: %s", len(without_prompt), names)
    return outcome


def write_batch(entries: list[dict[str, str]], path: str) -> None:
    target = Path(path)
    if target.is_dir() or target.suffix == ".jsonl":
        raise DataError(f"{path}: --out is the JSON file to write, a list that ends in .json.")
    write_json(target, entries)
