# SPDX-License-Identifier: Apache-2.0
"""examples/video2world.py as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.data.video import media
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.pipelines import requests
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.released import DEFAULT_NEGATIVE_PROMPT
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.prompt_embeddings import write_prompt_embeddings
from examples.video2world import Program, main, parse, prepare
from tests.examples.records import frames_of
from tests.programs import finished, warm_python

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/video2world.py"
TINY = ["--model_size", "tiny", "--prompt", "push the red puck to the green ring", "--num_steps", "2"]


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return finished(warm_python(), ROOT / SCRIPT, *arguments, cwd=cwd, **environment)


def test_flags_are_read_as_in_the_guides(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(["--lora", "a.safetensors:0.5", "--lora", "b", "--aspect_ratio", "9:16", "--fps", "10"])
    assert (args.lora, args.aspect_ratio, args.fps) == (["a.safetensors:0.5", "b"], "9:16", 10)
    assert (args.model_size, args.dit_path, args.num_conditional_frames, args.num_steps) == (None, "", 1, None)
    types = ("text2world", "image2world", "video2world")
    assert [parse(["--inference_type", name]).num_conditional_frames for name in types] == [0, 1, 5]
    assert parse(["--num_conditional_frmaes", "5"]).num_conditional_frames == 5  # as a guide spells it
    assert "--num_conditional_frames" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--promt", "x"], "error: unknown flag --promt. Did you mean --prompt"),
        (["--zzzzzz=1"], "error: unknown flag --zzzzzz. See --help.\n"),
        (["--seed", "abc"], "error: argument --seed: invalid int value: 'abc'. See --help.\n"),
        (["--model_size", "0.6B"], "0.6B is not yet here: this program has no Text2Image models"),
        (["--model", "2B/auto/multiview"], "2B/auto/multiview is not yet here: this program has no multi-view"),
        (["--model", "2B/robot/action-cond"], "takes actions: run it with examples/action_conditioned.py"),
        (["--model", "2B/posttrained"], "invalid choice: '2B/posttrained'"),
        (["--fps", "nan"], "--fps"),
        (["--import", "absent_module"], "--import"),
        (["--inference_type", "text2world", "--num_conditional_frames", "5"], "--num_conditional_frames"),
        (["--guidance", "nan"], "--guidance: nan"),
        (["--num_frames", "1600000001"], "--num_frames: 1600000001"),
        (["--num_steps", "100000000"], "--num_steps: 100000000"),
        (["--num_gpus", "0"], "--num_gpus: 0"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    said = capsys.readouterr().err
    assert left.value.code == 2 and text in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prompt", "x"], "download_checkpoints --model_types video2world --model_sizes 2B --resolution 720"),
        (["--prompt", "x", "--input_path", "absent.png"], "absent.png"),
        (["--prompt", "x", "--save_path", "out.gif"], ".gif"),
        ([*TINY, "--save_path", "/proc/x/y.mp4"], "--save_path"),
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8 text"),
        ([*TINY, "--negative_prompt", "\udcff"], "--negative_prompt is not UTF-8 text"),
        (["--prompt", "x", "--natten", "--resolution", "480"], "natten"),
        (["--prompt", "x", "--natten", "--aspect_ratio", "1:1"], "16:9"),
        (["--prompt", "x", "--resolution", "48"], "no variant"),
        (["--prompt", "x", "--num_conditional_frames", "5"], "one picture"),
        (["--prompt", "x", "--num_conditional_frames", "0"], "--model 2B/post-trained"),
        (["--prompt", "x", "--solver", "unipc"], "--solver unipc"),
        ([*TINY, "--solver", "own"], "--import"),
        (["--prompt", "x", "--prompt_embeddings", "absent.safetensors"], "absent.safetensors"),
        (["--prompt", "x", "--batch_input_json", "absent.json"], "absent.json"),
        ([*TINY, "--prompt_embeddings", "README.md"], "encode_prompts"),
        ([*TINY, "--dit_path", "README.md"], "README.md"),
        ([*TINY, "--seed", "-1"], "seed is -1"),
        ([*TINY, "--load_ema"], "--dit_path"),
        ([*TINY, "--num_gpus", "3"], "These numbers do: 1, 2."),
        ([*TINY, "--num_gpus", "2"], "torchrun --nproc_per_node=2"),
        ([*TINY, "--device", "meta"], "--device meta"),
        ([*TINY, "--benchmark", "--batch_input_json", "absent.json"], "--benchmark"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = [] if "--save_path" in arguments else ["--save_path", str(tmp_path / "out.mp4")]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments, *output])
    monkeypatch.chdir(ROOT)
    assert main() == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_embeddings_and_weights_of_another_width_are_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_prompt_embeddings(tmp_path / "wide.safetensors", BytesEncoder(64, 32), ["push the puck"], "")
    net = Video2WorldDiT(model_channels=64, num_blocks=1, num_heads=2, crossattn_emb_channels=64, adaln_lora_dim=32)
    torch.save({f"net.{name}": value for name, value in net.state_dict().items()}, tmp_path / "model.pt")
    monkeypatch.setattr(Video2WorldPipeline, "from_config", None)
    monkeypatch.chdir(tmp_path)
    for flags, named in (
        (["--prompt_embeddings", "wide.safetensors"], ("width 32",)),
        (["--dit_path", "model.pt"], ("width 64", "128")),
    ):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *TINY, *flags, "--save_path", "o.mp4"])
        assert main() == 2
        error = capsys.readouterr().err
        assert all(words in error for words in named)


def test_the_first_run_of_a_benchmark_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took = iter((9.0, 1.0, 2.0, 4.5))
    monkeypatch.setattr(requests, "generate_to_file", lambda *_: next(took))
    monkeypatch.setattr(Video2WorldPipeline, "from_config", lambda *_, **__: None)
    assert main([*TINY, "--benchmark", "--save_path", str(tmp_path / "a.mp4")]) == 0
    assert "9.00 1.00 2.00 4.50 s; mean of all but the first: 2.50 s" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "guidance", "negative"), [("2B", 7.0, DEFAULT_NEGATIVE_PROMPT), ("tiny", 0.0, "")])
def test_models_are_led_by_a_description_of_poor_video_but_for_the_tiny_one(
    size: str, guidance: float, negative: str
) -> None:
    class Planned(Exception):
        pass

    def plan(args: Any, choice: Any, jobs: Any) -> Any:
        raise Planned(jobs[1].sampling.guidance, jobs[0][0].negative_prompt)

    program = Program(plan=plan)
    args = parse(["--model_size", size, "--random_weights", "--prompt", "push"], program)
    with pytest.raises(Planned) as found:
        prepare(args, program)
    assert found.value.args == (guidance, negative)


@pytest.mark.slow
def test_a_video_from_anywhere_with_no_download(tmp_path: Path) -> None:
    """From a picture and from a clip, from another folder, twice the same."""
    first = run(*TINY, "--save_path", "a/one.mp4", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "weights: " in first.stderr and "tiny_video2world.safetensors" in first.stderr
    assert re.search(r"attention: \w+ \(asked: auto", first.stderr)
    assert "guardrail: blocklist" in first.stderr
    info = media.probe_video(tmp_path / "a/one.mp4")
    assert (info.num_frames, info.fps) == (13, 10)
    clip = str(ROOT / "assets/toy_world/clip.mp4")
    arguments = [*TINY, "--input_path", clip, "--num_conditional_frames", "5", "--compare_to", clip, "--guidance", "1"]
    for name in ("two", "again"):
        assert run(*arguments, "--save_path", f"{name}.mp4", cwd=tmp_path).returncode == 0
    # of the frames, not of the file: x264 was seen to code one block of equal frames in two ways
    assert frames_of(tmp_path / "two.mp4") == frames_of(tmp_path / "again.mp4")
    assert (tmp_path / "two.png").exists()
