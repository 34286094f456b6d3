# SPDX-License-Identifier: Apache-2.0
"""The command ``cosmos-rl``: a recipe is translated, and runs as by scripts.train on the processes it asks for."""

import importlib.metadata
import os
import re
import shlex
from pathlib import Path

import pytest

from cosmos_predict2.compat import launch
from cosmos_predict2.compat.fields import Translation
from cosmos_predict2.data.video_folder import list_captioned
from imaginaire.config.registry import load_toml
from scripts import cosmos_rl
from tests.compat.recipes import ROOT
from tests.training import records

TINY = "configs/wfm/tiny_grpo_mock_data.toml"
MOCK = "configs/wfm/cosmos_predict2-5_2b_480_grpo_mock_data.toml"
MODULE, FILE = "cosmos_rl.tools.dataset.wfm_rl", "./cosmos_rl/tools/dataset/wfm_rl.py"


@pytest.fixture(autouse=True)
def output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("COSMOS_OUTPUT_DIR", str(tmp_path))
    return tmp_path


def test_the_distribution_has_the_command() -> None:
    (command,) = importlib.metadata.distribution("cosmos-posttrain").entry_points.select(name="cosmos-rl")
    assert command.load() is cosmos_rl.main


# What the guide prints: the command, and the table of parallelism.
GUIDE = (
    "cosmos-rl --config ./configs/wfm/cosmos_predict2-5_2b_480_grpo_mock_data.toml"
    " --wfm-mode ./cosmos_rl/tools/dataset/wfm_rl.py"
)
PARALLELISM = """
[model]
fsdp_shard_size = 8
dp_replicate_size = 4

[model_parallel]
context_parallel_size = 2

[job]
name = "guide"
"""
STEPS = [  # a command of the guide; what is put in place of its recipe, and added; exit code; what is printed
    (GUIDE, "", "", 2, "model.fsdp_shard_size = 8"),  # a machine without GPUs
    pytest.param(
        *(GUIDE.replace(FILE, MODULE), "", "--dryrun -- trainer.max_iter=7", 0, "(?s)# processes: 8.*max_iter: 7"),
        marks=pytest.mark.slow,
    ),
    pytest.param(GUIDE, TINY, "", 0, "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("command", "recipe", "more", "code", "printed"), STEPS)
def test_the_guides_command(
    command: str,
    recipe: str,
    more: str,
    code: int,
    printed: str,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    words = shlex.split(f"{command} {more}")[1:]
    assert cosmos_rl.main([recipe if recipe and word.endswith(".toml") else word for word in words]) == code
    shown = capsys.readouterr()
    assert re.search(printed, shown.out + shown.err)
    if recipe:
        rewards = [record["train/fake_reward"] for record in records(output) if "train/fake_reward" in record]
        assert rewards and all(reward < 0 for reward in rewards)


def test_the_guides_parallelism_is_64_gpus(tmp_path: Path) -> None:
    (tmp_path / "guide.toml").write_text(PARALLELISM)
    translation = cosmos_rl.translate(load_toml(str(tmp_path / "guide.toml")))
    assert translation.num_gpus == 64
    assert "model.config.rl.ranks_per_group=8" in translation.overrides  # of 32 model instances


@pytest.mark.parametrize("folder", ["text_embedding", "t5_xxl"])
def test_the_guides_folder_of_clips_is_read(folder: str, tmp_path: Path) -> None:
    for name, suffix in (("metas", "txt"), ("videos", "mp4"), (folder, "pickle")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"clip.{suffix}").touch()
    found = list_captioned(str(tmp_path), text_encoder=None, num_tokens=512, caption_format="text")
    assert list(found.files) == ["clip"]


WRONG = [  # arguments, and what the error names
    (["--config", "configs/wfm/absent.toml"], "configs/wfm/absent.toml"),
    (["--config", "setup.py"], "not TOML"),
    (["--config", MOCK], "model.fsdp_shard_size = 8"),
    (["--config", TINY, "--wfm-mode", "my_script.py"], "my_script.py"),
    (["--config", TINY, "--num-workers", "2"], "--num-workers 2"),
    (["--config", TINY, "--", "trainer.max_itr=3"], "trainer.max_itr"),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG, ids=lambda case: str(case)[-40:])
def test_a_wrong_command_is_one_message(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    assert cosmos_rl.main(arguments) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "told"), [("./" + TINY, f"give --config {ROOT / TINY}"), ("configs/wfm/tiny.toml", "Did you mean")]
)
def test_a_recipe_that_is_not_below_this_folder_is_named_where_it_is(
    recipe: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cosmos_rl.main(["--config", recipe]) == 2
    assert told in capsys.readouterr().err
    monkeypatch.setattr(cosmos_rl, "ROOT", tmp_path)  # as of a wheel, which has none
    assert cosmos_rl.main(["--config", recipe]) == 2
    assert "of its checkout" in capsys.readouterr().err


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cosmos_rl.main(["--config", TINY, "--lepton-mode"])
    assert "--lepton-mode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], r"--standalone"),
        (["--log-dir", "logs"], r"--standalone --log-dir=logs --tee=3"),
        (
            ["--num-workers", "2", "--worker-idx", "1", "--node-ip-list", "10.0.0.1;10.0.0.2"],
            r"--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=29345",
        ),
    ],
)
def test_several_processes_are_started_by_torchrun(more: list[str], expected: str) -> None:
    args = cosmos_rl.parser.parse_args(["--config", MOCK, *more])
    assert re.fullmatch(expected, " ".join(cosmos_rl.torchrun(args)))


def test_gpus_are_counted_for_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    of_two = {"model.fsdp_shard_size": 8, "model.dp_replicate_size": 2}
    launch.require_gpus(Translation([], of_two, {}, []), 2)
    started = list[str]()
    monkeypatch.setattr(launch, "_become", started.extend)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WFM_REWARD_TOKEN", "my own")
    recipe = Translation(["experiment=any"], of_two, {"WFM_REWARD_TOKEN": "the recipe's"}, [])
    launch.start(recipe, [], lambda _: 0, name="recipe", dryrun=False, debug=False, num_machines=2)
    assert "--nproc_per_node=8" in started and os.environ["WFM_REWARD_TOKEN"] == "my own"
