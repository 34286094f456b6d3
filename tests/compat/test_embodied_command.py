# SPDX-License-Identifier: Apache-2.0
"""run_embodiment.sh: the tiny twin from the command to a checkpoint, what a wrong call says, and every command of the
guide "RL with Cosmos Predict 2.5 World Model", as it prints them."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05
from scripts import embodied
from tests.checkpoints.hub_server import Hub, serve
from tests.guides import follow, linked, write_published
from tests.programs import finished, warm_python

OFT, PI05 = "cosmos_libero_spatial_grpo_openvlaoft", "cosmos_libero_spatial_grpo_openpi05"
SCRIPT = Path(__file__).resolve().parents[2] / "examples/embodiment/run_embodiment.sh"


def started(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The finished process of the script, started in the folder."""
    own = {"IMAGINAIRE_OUTPUT_ROOT": None, "PYTHON": warm_python(), "CUDA_VISIBLE_DEVICES": "", **variables}
    return finished("bash", SCRIPT, *words, cwd=folder, **own)


@pytest.mark.slow
def test_the_tiny_twin_learns_by_the_command_of_the_guide(tmp_path: Path) -> None:
    short = ("runner.max_epochs=1", "runner.val_check_interval=-1", "env.train.total_num_envs=16")
    short += ("actor.global_batch_size=32", "actor.micro_batch_size=32", "algorithm.rollout_epoch=1")
    made = started(tmp_path, "tiny_toy_grpo", "TOY", *short, "--", "job.group=mine")
    assert made.returncode == 0, made.stdout + made.stderr
    (logs,) = (tmp_path / "logs").glob("*-tiny_toy_grpo")
    log = (logs / "run_embodiment.log").read_text()
    assert log.startswith(warm_python()) and "finished: iteration 4" in log and "finished: iteration 4" in made.stdout
    folder = logs / "rlinf/mine/tiny_toy_grpo"
    assert (folder / "checkpoints/model/iter_000000004.pt").is_file()
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = set(events.Tags()["scalars"])
    assert {"env/success_once", "env/return", "actor/policy_loss", "actor/ratio", "rollout/advantages_max"} <= shown


def test_each_call_has_a_run_folder_of_its_own_below_the_output_root(tmp_path: Path) -> None:
    shown = tmp_path / "python"
    shown.write_text('#!/bin/bash\necho "root ${IMAGINAIRE_OUTPUT_ROOT-is unset}: $*"\n')
    shown.chmod(0o755)
    for root, place in (("", tmp_path), (str(tmp_path / "root"), tmp_path / "root"), ("s3://b/r", tmp_path)):
        made = started(tmp_path, "x", PYTHON=str(shown), IMAGINAIRE_OUTPUT_ROOT=root)
        (logs,) = (place / "logs").iterdir()
        run = f"s3://b/r/logs/{logs.name}" if "://" in root else str(logs)
        assert "root is unset: -m scripts.embodied" in made.stdout and f"log_path='{run}'" in made.stdout
        shutil.rmtree(place / "logs")


@pytest.mark.parametrize(
    "kind", [pytest.param("openvla_oft", marks=pytest.mark.long), pytest.param("openpi", marks=pytest.mark.slow)]
)
def test_published_policies_learn_in_imagination_by_the_command_of_the_guide(kind: str, tmp_path: Path) -> None:
    if kind == "openpi":
        tiny_pi05.write_tiny(tmp_path / "clone", action_horizon=4, hold=3)
    else:
        tiny_openvla.write_tiny(tmp_path / "clone", action_chunk=4, action_dim=4, hold=3, gripper="as_is")
    short = ("runner.max_epochs=1", "runner.val_check_interval=-1", "env.train.total_num_envs=8")
    short += ("actor.global_batch_size=16", "actor.micro_batch_size=8", "algorithm.rollout_epoch=1")
    policy = (f"actor.model.model_type={kind}", "actor.model.model_path=clone", "+actor.model.is_lora=true")
    made = started(tmp_path, "tiny_toy_grpo", *short, *policy, "algorithm.update_epoch=1", "+actor.model.lora_rank=2")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "finished: iteration 1" in made.stdout
    (saved,) = (tmp_path / "logs").glob("*/rlinf/embodied/tiny_toy_grpo/checkpoints/model/iter_000000001.pt")
    assert any(".lora_B." in name and bool(value.any()) for name, value in torch.load(saved).items())


@pytest.mark.parametrize("word", ["LIBREO", "ALOHA", "tiny_toy_grpo"])
def test_the_second_word_is_a_platform_or_an_override(word: str, tmp_path: Path) -> None:
    made = started(tmp_path, "tiny_toy_grpo", word, PYTHON="echo")
    assert made.returncode == 2 and f"'{word}' is no platform" in made.stderr and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("word", ["libero", "TOY", "~runner.save_interval", "+a=1", "--dryrun"])
def test_a_second_word_that_is_no_platform_reaches_the_program(word: str, tmp_path: Path) -> None:
    made = started(tmp_path, "tiny_toy_grpo", word, PYTHON="echo")
    assert made.returncode == 0
    assert made.stdout.strip().endswith(f" {word}") == (word not in ("libero", "TOY"))


@pytest.mark.parametrize("words", [(), ("runner.max_epochs=2",), ("--dryrun",)])
def test_without_a_configuration_the_script_names_those_that_there_are(words: tuple[str, ...], tmp_path: Path) -> None:
    made = started(tmp_path, *words)
    assert made.returncode == 2 and "tiny_toy_grpo" in made.stderr and not (tmp_path / "logs").exists()


def test_a_configuration_that_is_not_there_is_an_error_with_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert embodied.main(["--config-name", "tiny_toy_gpro"]) == 2
    assert "Did you mean tiny_toy_grpo" in capsys.readouterr().err
    assert embodied.main(["--config-name", "tiny_toy_grpo", "algorithm.group_size=7"]) == 2
    assert "algorithm.group_size" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "is_kept"), [(0, True), (1, True), (2, False)])
def test_a_refused_start_leaves_no_folder(code: int, is_kept: bool, tmp_path: Path) -> None:
    refusing = tmp_path / "python"
    refusing.write_text(f"#!/bin/bash\necho said >&2; exit {code}")
    refusing.chmod(0o755)
    made = started(tmp_path, "tiny_toy_grpo", PYTHON=str(refusing))
    assert made.returncode == code and made.stdout == "said\n"
    logs = list(tmp_path.glob("logs/*/run_embodiment.log"))
    assert len(logs) == is_kept == (tmp_path / "logs").exists() and all("said\n" in path.read_text() for path in logs)


@pytest.mark.parametrize(("name", "policy"), [(OFT, "openvla_oft"), (PI05, "pi05")])
def test_a_run_without_its_weights_is_refused_with_all_that_is_missing(
    name: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert embodied.main(["--config-path", str(SCRIPT.parent / "config"), "--config-name", name]) == 2
    told = capsys.readouterr().err
    assert told.count(" does not exist. Download it: ") == 5 and f"download_checkpoints --embodied {policy}" in told
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", [OFT, PI05])
def test_a_dry_run_of_the_guides_own_configurations_prints_the_composition_with_notes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_published(tmp_path / "config", "wm_vla_rl")
    monkeypatch.chdir(tmp_path)
    assert embodied.main(["--config-path", str(folder), "--config-name", name, "--dryrun"]) == 0
    made = capsys.readouterr().out
    assert "# override: experiment=tiny_vla_grpo_" in made and f'# override: job.name="{name}"' in made
    notes = [line for line in made.splitlines() if line.startswith("note: ") and "Download it" in line]
    assert len(notes) == 5 and sum(note.startswith("note: env.train.") for note in notes) == 4


RAYS = [
    "ray start --head --num-gpus=4 --num-cpus=32",
    "ray status",
    "ray stop --force",
    "ray start --head --num-gpus=4",
]
DOWNLOAD = """
pip install huggingface_hub

python -c "
from huggingface_hub import snapshot_download
snapshot_download(
    repo_id='tayalmanan/cosmos-robotics',
    local_dir='models/Cosmos-Predict2.5-LIBERO-Spatial',
)
"
"""
DOWNLOAD_POLICY = """
python -c "
from huggingface_hub import snapshot_download
snapshot_download(
    repo_id='RLinf/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora',
    local_dir='models/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora',
)
"
"""
LAUNCH = "bash examples/embodiment/run_embodiment.sh cosmos_libero_spatial_grpo_openvlaoft"
TINY = LAUNCH.replace("cosmos_libero_spatial_grpo_openvlaoft", "tiny_toy_grpo") + " runner.max_epochs=1"
TABLE = [  # the command; what is put in place of it here; its exit code; what it prints
    # The first two set up a machine: this checkout is what they make.
    ("git clone https://github.com/tayalmanan28/wm_vla_rl.git\ncd wm_vla_rl", "ls requirements", 0, "install.sh"),
    ("bash requirements/install.sh cosmos_world_model", "{} --dry-run", 0, "venv .venv_cosmos"),
    ("bash requirements/install.sh openvla_oft", "{} --dry-run", 0, "venv .venv_openvla_oft"),
    (LAUNCH, "{}", 2, "download_checkpoints --embodied openvla_oft"),
    (LAUNCH, f"{TINY} --dryrun", 0, "experiment=tiny_vla_grpo_world_model"),
    ("bash ray_utils/start_ray.sh", "{}", 2, "RANK is ''"),
    # Of the machine, not of this project.
    ("kill -9 $(nvidia-smi --query-compute-apps=pid --format=csv,noheader)", "type kill", 0, "kill"),
    # Not needed: a missing package is no error, and the doctor tells which attention runs.
    ('python -c "import flash_attn; print(flash_attn.__version__)"', "python -m scripts.doctor --brief", 0, "ready"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return linked(tmp_path, "examples", "requirements", "ray_utils", "constraints.txt")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "here", "code", "printed"), TABLE, ids=lambda case: str(case)[:40])
def test_a_command_of_the_guide(command: str, here: str, code: int, printed: str, checkout: Path) -> None:
    made = follow(checkout, here.format(command), code=code, PYTHON=warm_python())
    assert printed in made


@pytest.mark.long  # its flags change with the version of Ray that constraints.txt has
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra rl: Ray's own commands")
def test_rays_own_commands_of_the_guide_are_there_with_their_flags(checkout: Path) -> None:
    """One process, as importing Ray is what each takes its time for; a flag that it does not have is an error."""
    calls = [f"cli.main({[*command.split()[1:], '--help']}, standalone_mode=False)" for command in RAYS]
    code = "\n".join(["from ray.scripts.scripts import cli", *calls])
    made = follow(checkout, f"command -v ray && python - <<'END'\n{code}\nEND")
    assert made.count("Usage:") == len(RAYS)


@pytest.mark.slow
def test_the_downloads_of_the_guide_put_files_where_its_configuration_looks(checkout: Path) -> None:
    files = ("libero-spatial-2b-19k.pt", "resnet_rm.pth", "tokenizer/tokenizer.pth", "dataset/seed_0_traj_0.npy")
    policy = {"config.json": b"{}"}
    repositories = {
        "tayalmanan/cosmos-robotics": dict.fromkeys(files, b"x"),
        "RLinf/RLinf-OpenVLAOFT-LIBERO-130-Base-Lora": policy,
    }
    with serve(Hub(repositories)) as hub:
        settings = dict(HF_ENDPOINT=hub.url, HF_HOME=str(checkout / "home"), HF_HUB_DISABLE_XET="1")
        settings["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # an interpreter that reads them anew
        for text in (DOWNLOAD.partition("\n\n")[2], DOWNLOAD_POLICY):
            follow(checkout, text, **settings)
    overrides = "actor.model.model_type=toy actor.fsdp_config.gradient_checkpointing=false --dryrun"
    made = follow(checkout, f"{LAUNCH} {overrides}", PYTHON=warm_python())
    assert 'dit_path:"models/Cosmos-Predict2.5-LIBERO-Spatial/libero-spatial-2b-19k.pt"' in made
    assert "does not exist" not in made
