# SPDX-License-Identifier: Apache-2.0
"""Every command and recipe fragment of the guide "VLA" of Cosmos-RL, as it prints them: what it does here."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.compat.cosmos_rl.policies import translate_vla
from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05
from imaginaire.config.registry import load_toml
from scripts import cosmos_rl
from tests.compat.recipes import edited
from tests.guides import ROOT, follow, linked
from tests.training import records

OPENVLA = """
ROBOT_PLATFORM=LIBERO \\
uv run cosmos-rl --config configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r-colocate.toml \\
      cosmos_rl/tools/dataset/libero_grpo.py
"""
LOGGED = """
ROBOT_PLATFORM=LIBERO \\
uv run cosmos-rl --config configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r-colocate.toml \\
       --log-dir logs \\
       cosmos_rl/tools/dataset/libero_grpo.py
"""
PI05 = """
uv run cosmos-rl --config configs/pi05/pi05-b1k-grpo-colocate.toml \\
      cosmos_rl/tools/dataset/b1k_grpo.py
"""
OF_THE_MACHINE = [  # they set it up for the simulators
    "cd /your/workspace/cosmos-rl",
    "cd /your/workspace",
    "apt install python3-dev # if necessary",
    "uv sync",
    "source .venv/bin/activate",
    "git clone -b v3.7.2 https://github.com/StanfordVL/BEHAVIOR-1K.git",
    "cd BEHAVIOR-1K",
    "uv add pip cffi==1.17.1 # if necessary",
    "apt install -y libsm6 libxt6 libglu1-mesa",
    "UV_LINK_MODE=hardlink ./setup.sh --omnigibson --bddl --joylo --confirm-no-conda --accept-nvidia-eula",
    "uv sync --extra vla",
    "pip install -e .[vla]",
]
MINE = "my_recipe.toml"  # a user's own, which validates after each iteration
SHORT = " -- dataloader_val.dataset.num=8 trainer.max_iter=1"
TRAINED = [  # a command; the recipe in its place, and what is added; what it prints
    (LOGGED, "configs/openvla-oft/tiny-openvla-oft-grpo.toml", SHORT, "iter 1 validation greedy success"),
    (PI05, MINE, " -- dataloader_val.dataset.num=4", "iter 2 validation greedy success"),
]
OTHERS = [  # a command, its exit code, and what it prints
    (OPENVLA, 2, "policy.parallelism.dp_shard_size"),  # a machine without GPUs
    (PI05, 2, "policy.parallelism.n_init_replicas"),
    (f"{OPENVLA.rstrip()} --dryrun", 0, "# processes: 8"),
    (OPENVLA.replace("LIBERO", "LIBREO"), 2, "ROBOT_PLATFORM=LIBREO does not fit"),
    (OPENVLA.replace("LIBERO", "BEHAVIOR"), 2, "ROBOT_PLATFORM=BEHAVIOR does not fit"),
    (OPENVLA.replace("libero_grpo", "b1k_grpo"), 2, "cosmos_rl/tools/dataset/libero_grpo.py"),
    (PI05.replace("-colocate", "-collocate"), 2, "Did you mean configs/pi05/pi05-b1k-grpo-colocate.toml"),
]


@pytest.mark.parametrize(("command", "code", "printed"), OTHERS, ids=lambda case: str(case)[:40])
def test_a_command_of_the_guide_that_trains_nothing_here(
    command: str, code: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    words = shlex.split(command.replace("uv run ", "").replace("\\\n", " "))
    start = words.index("cosmos-rl")
    for variable in words[:start]:
        monkeypatch.setenv(*variable.split("="))
    assert cosmos_rl.main(words[start + 1 :]) == code
    shown = capsys.readouterr()
    assert printed in shown.out + shown.err


def test_the_platform_is_that_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", "configs/openvla-oft/openvla-oft-libero10-eval.toml", "--dryrun", "--", "--first", "3"]
    for platform, code in (("", 0), ("LIBERO", 0), ("libero", 0), ("b1k", 2)):
        monkeypatch.setenv("ROBOT_PLATFORM", platform)
        assert cosmos_rl.main(words) == code
    assert capsys.readouterr().out.count(" --first 3\n") == 3  # what follows -- is the evaluation's


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that looks like a checkout, with tiny policies where the tiny recipes look for them."""
    folder = linked(tmp_path_factory.mktemp("checkout"), "configs")
    policies = folder / "checkpoints/policies"
    tiny_openvla.write_tiny(policies / "tiny_openvla_oft", action_chunk=4, action_dim=4, hold=3, gripper="as_is")
    tiny_pi05.write_tiny(policies / "tiny_pi05", action_horizon=4, hold=3)
    recipe = (ROOT / "configs/pi05/tiny-pi05-grpo.toml").read_text()
    for published, own in (("val_before_train = true", "val_before_train = false"), ("freq = 2", "freq = 1")):
        assert published in recipe
        recipe = recipe.replace(published, own)
    (folder / MINE).write_text(recipe)
    yield folder


@pytest.mark.parametrize(
    ("command", "recipe", "more", "printed"),
    [
        pytest.param(*TRAINED[0], id="openvla", marks=pytest.mark.long),
        pytest.param(*TRAINED[1], id="pi05", marks=pytest.mark.slow),
    ],
)
def test_a_command_of_the_guide(command: str, recipe: str, more: str, printed: str, checkout: Path) -> None:
    words = command.strip().replace("uv run ", "")
    published = next(word for word in words.split() if word.endswith(".toml"))
    name = Path(recipe).stem
    assert printed in follow(checkout, f"{words.replace(published, recipe)}{more} job.name={name}")
    (metrics,) = checkout.rglob(f"{name}/metrics.jsonl")
    found = records(metrics.parent)
    assert any(record.get("train/grad_norm", 0) > 0 for record in found)
    validated = [record["iteration"] for record in found if "val/greedy_success" in record]
    assert validated == ([1, 2] if recipe == MINE else [0, 1])


OFT = "configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r-colocate.toml"
LIBERO, B1K = "configs/pi05/pi05-libero10-grpo-colocate.toml", "configs/pi05/pi05-b1k-grpo-colocate.toml"
PI05_OF_THE_GUIDE = dict(
    num_steps=5, action_chunk=10, action_env_dim=7, noise_method="flow_sde", train_expert_only=True
)
GRPO = dict(
    type="grpo", trainer_type="grpo_vla", variant="dapo", temperature=1.6, epsilon_low=0.2, epsilon_high=0.28,
    lower_bound_ratio=10.0, kl_beta=0.0,
)  # fmt: skip
FRAGMENTS: list[tuple[str, dict[str, dict[str, Any]], list[str]]] = [  # recipe; sections of the guide; overrides of it
    (
        OFT,
        dict(
            policy=dict(model_name_or_path="Haozhan72/Openvla-oft-SFT-libero10-trajall"),
            vla=dict(vla_type="openvla-oft", training_chunk_size=16),
        ),
        ['model.config.policy.path="Haozhan72/Openvla-oft-SFT-libero10-trajall"', "trainer.grad_accum_iter=64"],
    ),
    (
        LIBERO,
        dict(
            policy=dict(model_name_or_path="sunshk/pi05_libero_pytorch"),
            vla=dict(vla_type="pi05", training_chunk_size=16),
            custom__pi05=PI05_OF_THE_GUIDE,
        ),
        ["++model.config.policy.num_steps=5", "++model.config.policy.train_expert_only=true"],
    ),
    (
        OFT,
        dict(validation__dataset=dict(name="libero", subset="libero_10", split="val"), vla=dict(num_envs=8)),
        ["model.config.env.num_envs=8", "model.config.eval_env.num_envs=8"],
    ),
    (
        B1K,
        dict(validation__dataset=dict(name="b1k", subset="b1k"), vla=dict(num_envs=4, height=256, width=256)),
        ["model.config.env.num_envs=4"],
    ),
    (
        OFT,
        dict(train__train_policy=GRPO),
        ["++model.config.policy.temperature=1.6", "model.config.rl.clip_ratio_high=0.28"],
    ),
]


@pytest.mark.parametrize(("recipe", "fragment", "expected"), FRAGMENTS)
def test_a_fragment_of_the_guide_is_translated(
    recipe: str, fragment: dict[str, dict[str, Any]], expected: list[str]
) -> None:
    fields = {f"{section}__{name}": value for section, one in fragment.items() for name, value in one.items()}
    found = translate_vla(edited(load_toml(str(ROOT / recipe)), **fields))
    assert set(expected) <= set(found.overrides)


@pytest.mark.parametrize("command", [LOGGED, PI05, *OF_THE_MACHINE], ids=lambda text: text.strip()[:30])
def test_the_page_has_each_command_of_the_guide(command: str) -> None:
    page = " ".join((ROOT / "documentations/coming_from_cosmos_rl_vla.md").read_text().split())
    bare = command.replace("uv run ", "").partition(" #")[0].replace("\\\n", " ")
    assert " ".join(bare.split()) in page.replace("\\ ", "")
