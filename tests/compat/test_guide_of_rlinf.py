# SPDX-License-Identifier: Apache-2.0
"""Every command of the guide "RL with Cosmos Predict 2.5 World Model", as it prints them: what it does here."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.checkpoints.hub_server import Hub, serve
from tests.guides import follow, linked
from tests.programs import warm_python

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


@pytest.mark.slow
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
