# SPDX-License-Identifier: Apache-2.0
"""imaginaire.command_line: flags keep their older spellings."""

import argparse
import importlib
from pathlib import Path

import pytest

from imaginaire import command_line

# program, arguments in older spellings, the same in today's
OLDER = [
    ("cache_latents", "--dataset_path=D --size 48,64 --dry-run", "--data D --size 48 64 --dry_run"),
    ("caption_videos", "--dataset_path D --command x", "--data D --command x"),
    ("check_dataset", "D --video_size 48 64", "D --size 48 64"),
    ("encode_prompts", "--output F --width 8", "--out F --text_width 8"),
    ("evaluate_world_model", "--resolution 48,64 -- a=b,c", "--size 48 64 -- a=b,c"),
    ("evaluate_world_model", "--resolution=48,64", "--size 48 64"),
    ("extract_images_from_videos", "--input_dataset_dir A --output_dataset_dir B", "--data A --out B"),
    ("get_t5_embeddings", "--dataset_path D --max_length 8 --width 9", "--data D --num_tokens 8 --text_width 9"),
    ("get_t5_embeddings_from_cosmos_nemo_assets", "--dataset_path D", "--data D"),
    ("get_t5_embeddings_from_groot_dataset", "--dataset_path D", "--data D"),
    ("train", "--dry-run", "--dryrun"),
    ("download_checkpoints", "--no-text-encoder --dry-run", "--no_text_encoder --dry_run"),
    ("prepare_agibot_fisheye_data", "--data_dir D --window-size 2", "--source D --window_size 2"),
    ("prepare_batch_input_json", "--dataset_path D --save_path S --output_path O", "--data D --save_path S --out O"),
    ("prepare_cosmos_nemo_data", "--dataset_path D", "--out D"),
    ("prepare_groot_data", "--dataset_path D", "--out D"),
    ("prepare_libero_data", "--no-rotate --dry-run", "--no_rotate --dry_run"),
]


@pytest.mark.parametrize(("program", "older", "today"), OLDER)
def test_older_spellings_of_flags_are_accepted(program: str, older: str, today: str) -> None:
    module = importlib.import_module(f"scripts.{program}")
    parser = module.parser() if program == "train" else module.parser
    assert parser.parse_args(older.split()) == parser.parse_args(today.split())


def test_the_help_lists_older_spellings_and_a_wrong_flag_is_compared_with_them(capsys: pytest.CaptureFixture) -> None:
    parser = command_line.parser("name", "text", older={"--dataset_path": "--data"})
    parser.add_argument("--data")
    assert "--dataset_path for --data" in parser.format_help()
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--dataset_pth", "x"])
    assert caught.value.code == 2 and "--dataset_path" in capsys.readouterr().err


def test_what_is_written_is_a_file_or_a_folder(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    assert command_line.file_to_write(str(file)) == str(file)
    assert command_line.folder_to_write(str(tmp_path / "new")) == str(tmp_path / "new")
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder: name a file in it"):
        command_line.file_to_write(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="is a file: name a folder"):
        command_line.folder_to_write(str(file))
