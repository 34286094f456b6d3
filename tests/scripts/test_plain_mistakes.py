# SPDX-License-Identifier: Apache-2.0
"""Mistakes in flags of all programs: exit code 2 and a message that names the flag, never a traceback or a hang."""

import argparse
import copy
import importlib
import re
import shutil
from pathlib import Path

import pytest

from cosmos_predict2.compat.rlinf.files import load_embodiment
from imaginaire import command_line
from imaginaire.errors import ConfigError
from tests.data.video_files import write_stream
from tests.programs import call

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "scripts").glob("*.py")
    if path.stem not in ("__init__", "train") and "\nparser = " in path.read_text()
)
EXAMPLES = ["video2world", "video2world_action"]
NO_NUMBERS = ["nan", "inf", "-inf", "1e300", "-1e300", "1" + "0" * 30, "x", ""]
SEED_OF_80_BITS = str(2**80 - 1)


def _parser(program: str) -> argparse.ArgumentParser:
    if program in EXAMPLES:
        module = importlib.import_module(f"examples.{program}")
        return module._parser(module.VIDEO2WORLD) if program == "video2world" else module._parser()
    return copy.deepcopy(importlib.import_module(f"scripts.{program}").parser)


def _is_number(action: argparse.Action) -> bool:
    try:
        return isinstance(action.type("1"), int | float) and not action.choices  # type: ignore[misc, operator]
    except (TypeError, ValueError, argparse.ArgumentTypeError):
        return False


@pytest.mark.parametrize("program", [*PROGRAMS, *EXAMPLES])
def test_no_program_takes_numbers_that_are_none(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = _parser(program)
    for action in parser._actions:
        action.required = False
    for action in filter(_is_number, list(parser._actions)):
        count = action.nargs if isinstance(action.nargs, int) else 1
        for value in [*NO_NUMBERS, SEED_OF_80_BITS]:
            if action.dest == "timeout" and value not in ("nan", "x", ""):
                continue  # a clip may take as long as it wants
            flag = action.option_strings[-1]
            with pytest.raises(SystemExit) as left:
                parser.parse_args([f"{flag}={value}"] if count == 1 else [flag, *[value] * count])
            assert left.value.code == 2 and flag.lstrip("-") in capsys.readouterr().err


@pytest.mark.parametrize("program", [*PROGRAMS, *EXAMPLES])
def test_every_program_imports_modules_of_ones_own(program: str) -> None:
    assert "--import" in _parser(program)._option_string_actions


# program, arguments, what the message names; {out} is a new path, and {data} a folder with a clip
MISTAKES = [
    *(
        (program, [*words, "--device", device], device)
        for program, words in {
            "collect": ["--suite", "toy", "--policy", "x", "--episodes", "1", "--out", "{out}"],
            "cache_latents": ["--data", "x", "--tokenizer", "tiny"],
            "encode_prompts": ["--prompt", "x", "--text_encoder", "bytes", "--out", "{out}.safetensors"],
            "evaluate_policy": ["--policy", "x"],
            "evaluate_world_model": ["--data", "toy", "--out", "{out}"],
            "train_policy": ["--out", "{out}"],
            "train_reward_model": ["--data", "x", "--out", "{out}"],
        }.items()
        for device in ("cuda:99", "tpu")
    ),
    *(
        (program, [*words, flag, place], flag)
        for program, flag, words in (
            ("check_dataset", "--json", ["x"]),
            ("collect", "--out", ["--suite", "toy", "--policy", "x", "--episodes", "1"]),
            ("split_recordings", "--out", ["x"]),
            ("encode_prompts", "--out", ["--prompt", "x", "--text_encoder", "bytes"]),
            ("evaluate_policy", "--out", ["--policy", "x"]),
            ("evaluate_world_model", "--out", ["--data", "toy"]),
            ("evaluate_world_model", "--json", ["--data", "toy"]),
            ("extract_images_from_videos", "--out", ["--data", "x"]),
            ("make_reset_states", "--out", ["--dataset", "x"]),
            ("make_toy_world", "--out", []),
            ("prepare_batch_input_json", "--out", ["--data", "x", "--save_path", "y"]),
            ("prepare_bridge_data", "--out", []),
            ("prepare_cosmos_nemo_data", "--out", []),
            ("prepare_groot_data", "--out", []),
            ("prepare_lerobot_data", "--out", ["--source", "x"]),
            ("prepare_libero_data", "--out", ["--source", "x"]),
            ("train_policy", "--out", []),
            ("train_reward_model", "--out", ["--data", "x"]),
        )
        for place in ("/proc/nope/x.safetensors", "/dev/null/x.safetensors", "s3://bucket/x", "")
    ),
    ("evaluate_policy", ["--policy", "x", "--num_steps", "4"], "--num_steps 4"),
    ("evaluate_policy", ["--policy", "x", "--workers", "4"], "--workers 4"),
    ("evaluate_policy", ["--policy", "x", "--render", "egl"], "--render"),
    ("evaluate_policy", ["--policy", "x", "--suite", "lift", "--workers", "4", "--batch_size", "2"], "--workers 4"),
    ("evaluate_policy", ["--policy", "x", "--options", "a=[1, 2"], "--options a=[1, 2"),
    ("plan", ["--gpus", "999999999999"], "--gpus"),
    ("plan", ["--gpus", "0"], "--gpus"),
    ("prepare_lerobot_data", ["--source", ""], "--source"),
    ("train_policy", ["--out", "{out}", "--suite", "my_robot"], "--suite my_robot --policy MODULE:CLASS"),
    ("train_policy", ["--out", "{out}", "--camera", "front"], "--camera"),
    ("train_policy", ["--out", "{out}", "--action_keys", "action"], "--action_keys"),
    ("train_policy", ["--out", "{out}", "--batch_size", "100000000"], "--batch_size"),
    ("train_policy", ["--out", "{out}", "--lr", "1e300"], "--lr"),
    ("train_policy", ["--out", "{out}", "--seed", SEED_OF_80_BITS], "--seed"),
    ("extract_images_from_videos", ["--data", "x", "--out", "{out}", "--workers", "1600000001"], "--workers"),
    ("cache_latents", ["--data", "{data}", "--tokenizer", "tiny", "--workers", "-1"], "--workers"),
    ("cache_latents", ["--data", "{data}", "--tokenizer", "tiny", "--size", "0", "0"], "size=(0, 0)"),
    ("cache_latents", ["--data", "{data}", "--tokenizer", "tiny", "--size", "50", "48"], "size=(50, 48)"),
    ("caption_videos", ["--data", "{data}", "--command", "{video}", "--timeout", "0"], "--timeout"),
    ("check_dataset", ["{data}", "--video_size", "0", "0"], "video_size"),
    ("convert", ["RUN", "{out}.pt", "--merge-lora", "--lora_alpha", "nan"], "--lora_alpha"),
    ("convert", ["RUN", "{out}", "--to", "diffusers", "--rope_scale", "0", "1", "1"], "--rope_scale"),
    ("doctor", ["--limit", "-1"], "--limit"),
    (
        "encode_prompts",
        ["--prompt", "x", "--text_encoder", "bytes", "--out", "{out}.safetensors", "--width", "-1"],
        "width",
    ),
    ("evaluate_world_model", ["--dit_path", "RUN", "--num_clips", "0"], "--num_clips"),
    ("evaluate_world_model", ["--dit_path", "RUN", "--out", "/proc/x/y"], "/proc/x/y cannot be written"),
    ("fit_tiny_tokenizer", ["--data", "{data}", "--out", "{out}", "--seed", "-1"], "--seed"),
    ("fit_tiny_tokenizer", ["--data", "{data}", "--out", "{out}.json"], "--out"),
    ("fit_tiny_tokenizer", ["--data", "{data}", "--out", "{out}", "--video_size", "50", "64"], "--video_size 50 64"),
    ("get_t5_embeddings", ["--data", "{data}", "--text_encoder", "bytes", "--width", "0"], "--text_width"),
    ("get_t5_embeddings", ["--data", "{data}", "--text_encoder", "bytes", "--batch_size", "0"], "--batch_size"),
    ("make_toy_world", ["--out", "{out}", "--seed", "-1"], "--seed"),
    ("make_toy_world", ["--out", "{out}", "--seed", str(2**63)], "--seed"),
    ("make_toy_world", ["--out", "{out}", "--episodes", "0"], "--episodes"),
    ("prepare_agibot_fisheye_data", ["--split_only", "--data_dir", "{data}", "--window_size", "nan"], "--window_size"),
    ("prepare_agibot_fisheye_data", ["--data_dir", "{data}", "--task_ids", "../x"], "--task_ids"),
    ("prepare_agibot_fisheye_data", ["--data_dir", "{data}", "--camera", "../x"], "--camera"),
    ("prepare_lerobot_data", ["--repo_id", "me/..", "--out", "{out}"], "--repo_id"),
]


@pytest.mark.parametrize(("program", "words", "named"), MISTAKES)
def test_a_mistake_is_a_message_that_names_it(
    program: str, words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data/videos").mkdir(parents=True)
    write_stream(tmp_path / "data/videos/a.mp4", 5)
    given = [word.replace("{out}", f"{tmp_path}/out").replace("{data}", f"{tmp_path}/data") for word in words]
    code, error = call(importlib.import_module(f"scripts.{program}"), *given), capsys.readouterr().err
    assert code == 2 and named in error, error
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.mp4"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("Unable to allocate 9 TiB"), "not enough memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: not enough memory"), "not enough"),
        (FileNotFoundError(2, "No such file or directory", "/proc/nope"), "/proc/nope: No such file"),
        (FileNotFoundError(2, "No such file or directory", "/elsewhere"), None),
        (RuntimeError("a bug"), None),
    ],
)
def test_what_a_user_can_mend_is_explained_and_a_bug_is_not(error: Exception, said: str | None) -> None:
    found = command_line.explained(error, {"out": "/proc/nope/x", "seed": 0, "base": ""})
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize("name", ["cosmos_libero_spatial_grpo_openvlaoft.yaml", "env/cosmos_libero_spatial.yaml"])
def test_yaml_of_rlinf_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/embodiment/config", tmp_path / "config")
    for content in (b"a: [1, 2\nb: {", b"a: 1\n\tb: 2", b"a: *unknown", b"\xff\xfe\x00"):
        (tmp_path / "config" / name).write_bytes(content)
        said = f"{name} is not text in UTF-8" if b"\xff" in content else "is not valid YAML"
        with pytest.raises(ConfigError, match=re.escape(said)):
            load_embodiment(str(tmp_path / "config"), "cosmos_libero_spatial_grpo_openvlaoft")
