# SPDX-License-Identifier: Apache-2.0
"""Mistakes in flags of all programs: exit code 2 and a message that names the flag, never a traceback or a hang."""

import argparse
import copy
import importlib
import shutil
from pathlib import Path

import pytest

from cosmos_predict2.compat.rlinf.files import load_embodiment
from imaginaire import command_line
from imaginaire.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "scripts").glob("*.py")
    if path.stem not in ("__init__", "demo", "train") and "\nparser = " in path.read_text()
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


# program, arguments, what the message names; {out} is a new path
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
            "train_reward_model": ["--out", "{out}"],
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
            ("train_reward_model", "--out", []),
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
]


@pytest.mark.parametrize(("program", "words", "named"), MISTAKES)
def test_a_mistake_is_a_message_that_names_it(
    program: str, words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"scripts.{program}")
    given = [word.replace("{out}", str(tmp_path / "out")) for word in words]
    try:
        code = command_line.main(module.parser, module.run, given)
    except SystemExit as left:
        code = int(left.code or 0)
    error = capsys.readouterr().err
    assert code == 2 and named in error, error
    assert not list(tmp_path.iterdir())


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
        with pytest.raises(ConfigError, match="is not valid YAML"):
            load_embodiment(str(tmp_path / "config"), "cosmos_libero_spatial_grpo_openvlaoft")
