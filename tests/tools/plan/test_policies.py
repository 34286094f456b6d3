# SPDX-License-Identifier: Apache-2.0
"""Plans of policies: activations beside the bytes that tiny ones keep and beside runs on a GPU; what fits in a
simulator and in a world model, what an iteration is, and what is no such plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.policies.network import cast, parallelize_policy
from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05
from cosmos_predict2.rl.policies.pi05.config import GemmaSizes
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.tools.plan.policies import (
    HOST_GB,
    PICTURE,
    POLICIES,
    PolicyEstimate,
    PolicySize,
    SimulatedRun,
    activations,
)
from cosmos_predict2.tools.plan.speed import GPUS
from cosmos_predict2.tools.plan.workload import GB
from imaginaire.distributed.parallel import ParallelDims
from scripts import plan
from tests.kept_bytes import kept_bytes
from tests.programs import call

ROWS, SIDE = 4, 56


def tiny(name: str, folder: Path) -> tuple[Any, PolicySize]:
    """A policy, and its sizes as the plan has those of published ones."""
    size = POLICIES[name]
    if name == "openpi":
        vlm, expert = GemmaSizes(64, 4, 96, 8, 1, 16, tiny_pi05.VOCAB), GemmaSizes(128, 4, 384, 8, 1, 16)
        tiny_pi05.write_tiny(folder, vlm=vlm, expert=expert, action_horizon=10, num_steps=3)
        assert size.expert is not None
        sizes: dict[str, Any] = dict(blocks=4, heads=8, head_dim=16)
        trunk = replace(size.trunk, width=64, mlp=96, **sizes)
        found = replace(size.expert, width=128, mlp=384, **sizes)
        policy: Any = Pi05Policy(str(folder), train_expert_only=True)
        return policy, replace(size, trunk=trunk, expert=found, expert_keys=16, patches=(SIDE // 14) ** 2)
    tiny_openvla.write_tiny(
        folder, image_size=SIDE, width=128, layers=4, mlp=352, heads=4, vision=(64, 96), vision_layers=4, bins=32,
        text_tokens=300, action_chunk=4, num_images_in_input=2,
    )  # fmt: skip
    towers = tuple(
        replace(tower, blocks=3, width=width, mlp=mlp, heads=4, head_dim=width // 4)
        for tower, width, mlp in zip(size.towers, (64, 96), (256, 358), strict=True)
    )
    trunk = replace(size.trunk, blocks=4, width=128, mlp=352, heads=4, head_dim=32)
    sizes = dict(patches=(SIDE // 14) ** 2, pixels=6 * SIDE**2, vocabulary=300 + 32 + 64, bins=32, answer=4 * 7 + 1)
    return OpenVLAPolicy(str(folder)), replace(size, towers=towers, trunk=trunk, **sizes)


@pytest.mark.parametrize(
    ("precision", "recomputes"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.float32, True, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", ["openvla_oft", "openpi"])
def test_what_a_policy_keeps_is_what_is_planned(
    name: str, precision: torch.dtype, recomputes: bool, tmp_path: Path
) -> None:
    policy, size = tiny(name, tmp_path)
    cast(policy, precision)
    parallelize_policy(policy, ParallelDims(), 0, recompute=recomputes)
    seen = {
        "full_image": torch.randint(0, 255, (ROWS, SIDE, SIDE, 3), dtype=torch.uint8),
        "wrist_image": torch.randint(0, 255, (ROWS, 1, SIDE, SIDE, 3), dtype=torch.uint8),
        "state": torch.zeros(ROWS, 3),
        "task_description": ["push the red disc to the ring"] * ROWS,
    }
    generators = [torch.Generator().manual_seed(i) for i in range(ROWS)]
    record = policy.act(seen, mode="sample", generators=generators).record
    words = record["length"][0] if "length" in record else record["token_mask"][0].sum()
    known = [*policy.parameters(), *policy.buffers(), *record.values()]
    found = kept_bytes(lambda: policy.log_prob(record).log_prob_B_K_N, known)
    planned = activations(replace(size, words=int(words)), ROWS, 2, precision.itemsize, recomputes=recomputes)
    assert planned.before_trunk + planned.trunk == pytest.approx(found, rel=0.05)


def test_an_h100_took_what_is_planned() -> None:
    """GB in use at most, above what was there before: OpenVLA-OFT's backward pass, and PI0.5's prefix."""
    size = POLICIES["openvla_oft"]
    weights = 2 * size.parameters
    found = activations(size, 32, 1, 2, recomputes=True)
    assert 4 * weights + found.peak(weights, accumulates=False) == pytest.approx(62.55e9, rel=0.06)
    assert found.before_trunk + found.trunk == pytest.approx(50.67e9 - 3 * weights, rel=0.25)  # with a block at work
    assert activations(size, 32, 1, 2, recomputes=False).trunk > 80e9
    found = activations(POLICIES["openpi"], 128, 1, 4, recomputes=False)
    assert found.trunk == pytest.approx(17.77e9 - 13.42e9, rel=0.05)
    assert found.peak(0, accumulates=True) == pytest.approx(22.17e9 - 13.42e9, rel=0.06)


OFT = "configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r-colocate.toml"
APART = "configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r.toml"
LIBERO, B1K = "configs/pi05/pi05-libero10-grpo-colocate.toml", "configs/pi05/pi05-b1k-grpo-colocate.toml"
WEIGHT = 7_541_237_184


def planned(capsys: pytest.CaptureFixture[str], recipe: str, *words: str) -> dict:
    call(plan, "--recipe", recipe, "--json", "-", *words)
    return json.loads(capsys.readouterr().out)


def test_a_policy_of_7b_fits_8_gpus_where_it_is_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, OFT)
    forms = found["forms"]
    assert found["gpus"] == 8 and forms["sharded"]["fits"]
    whole = 8 * WEIGHT + 2 * WEIGHT  # in bfloat16 with gradient and moments; and the gradients on their way
    assert forms["whole"]["policy"] == whole
    assert forms["sharded"]["policy"] == WEIGHT  # an eighth of it
    # where each rank has all to decide, and no gradients
    assert forms["sharded"]["at work"] == 2 * WEIGHT - 2 * WEIGHT // 8
    smaller = planned(capsys, OFT, "--gpu_memory", "20")["forms"]
    assert not smaller["sharded"]["fits"] and not smaller["whole"]["fits"]
    assert call(plan, "--recipe", OFT) == 0
    shown = capsys.readouterr().out
    assert "128 episodes of 64 decisions" in shown and "64 simulators" in shown and "An estimate" in shown


def of_experiment(capsys: pytest.CaptureFixture[str], name: str, *overrides: str, gpus: int = 8) -> dict:
    call(plan, "--gpus", gpus, "--json", "-", "--", f"experiment={name}", *overrides)
    return json.loads(capsys.readouterr().out)


def test_an_experiment_is_planned_as_its_recipe_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The published one, whose episodes are the same; of PI0.5, in both simulators."""
    found, recipe = of_experiment(capsys, "vla_grpo_openvla_oft_libero_10"), planned(capsys, OFT)
    forms, expected = found["forms"], recipe["forms"]
    assert found["gpus"] == recipe["gpus"] == 8 and forms.keys() == expected.keys()
    assert {form: one["policy"] for form, one in forms.items()} == {n: one["policy"] for n, one in expected.items()}
    for name in ("simulating", "deciding", "training"):
        assert forms["sharded"]["seconds"][name] == pytest.approx(expected["sharded"]["seconds"][name], rel=0.05)
    masters = of_experiment(capsys, "vla_grpo_openvla_oft_libero_10", "optimizer=fusedadamw")["forms"]
    assert masters["whole"]["policy"] == forms["whole"]["policy"] + 8 * WEIGHT  # moments in float32, and masters
    for name in ("vla_dapo_pi05_libero_spatial", "vla_grpo_pi05_b1k"):
        assert of_experiment(capsys, name)["forms"]["whole"]["fits"]


def test_a_policy_that_imagines_is_planned_and_a_tiny_one_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = of_experiment(capsys, "vla_grpo_recordings", gpus=4)
    assert found["policy"] == "openvla_oft" and set(found["forms"]) == {"sharded", "whole", "adapters"}
    for name in ("tiny_vla_grpo_world_model", "tiny_vla_grpo_openvla_oft_lift", "tiny_vla_grpo_pi05_simulator"):
        assert of_experiment(capsys, name) == {"fits": True}
    assert call(plan, "--one_card", "--", "experiment=vla_grpo_recordings") == 2
    assert "--gpus 1" in capsys.readouterr().err


def test_episodes_that_find_no_place_take_another_wave() -> None:
    run = SimulatedRun(
        policy="openvla-oft", simulator="libero", views=2, gpus=8, players=0, shards=1, envs=8, episodes=8,
        decisions=64, max_steps=512, chunk=16, updates=1, recomputes=True, samples_again=False, steps=100, bytes_each=2,
        optimizer_bytes=4, accumulates=True,
    )  # fmt: skip
    gpu = GPUS["H100"]

    def seconds(**changes: Any) -> dict[str, float]:
        return replace(run, **changes).estimate(gpu, "whole").seconds

    one = seconds()
    assert seconds(episodes=9)["simulating"] == seconds(episodes=16)["simulating"] == 2 * one["simulating"]
    assert 6 < seconds(policy="openvla")["deciding"] / one["deciding"] < 7  # token after token, in shorter rows
    assert seconds(updates=3)["training"] > 2 * one["training"] > 2 * seconds(recomputes=False)["training"]
    assert seconds(players=16)["deciding"] == one["deciding"] / 2
    sizes = [replace(run, lora_rank=rank).size.trained for rank in (32, 64)]
    assert sizes == [POLICIES["openvla_oft"].adapters * k for k in (1, 2)]
    pictures = 8 * run.episodes * run.decisions * run.views * PICTURE / 2**30
    assert run.estimate(gpu, "whole").host_gb == pytest.approx(8 * 8 * HOST_GB + pictures)
    again = replace(run, samples_again=True).estimate(gpu, "whole").host_gb
    assert again == pytest.approx(8 * 8 * HOST_GB + 3 * pictures), "of rollouts that wait for others"
    small, large = (PolicyEstimate({"policy": number * GB}, {}) for number in (10, 30))
    apart = replace(run, players=8)
    assert apart.fits({"whole": small, "playing": small}, 24) and not apart.fits({"whole": small, "playing": large}, 24)


def test_gpus_that_play_alone_are_planned_beside_those_that_train(capsys: pytest.CaptureFixture[str]) -> None:
    apart, together = planned(capsys, APART), planned(capsys, OFT)
    assert (apart["gpus"], apart["players"], together["players"]) == (8, 8, 0)
    assert "playing" not in together["forms"] and apart["forms"]["playing"]["policy"] == 2 * WEIGHT
    for name in ("policy", "at work"):
        assert apart["forms"]["sharded"][name] == together["forms"]["sharded"][name]
    assert call(plan, "--recipe", APART) == 0
    assert "8 x H100 train and 8 others play" in capsys.readouterr().out
    assert call(plan, "--recipe", APART, "--gpu_memory", "20") == 1
    capsys.readouterr()


def test_the_expert_alone_fits_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    libero, b1k = planned(capsys, LIBERO), planned(capsys, B1K)
    assert list(libero["forms"]) == ["whole"] and libero["forms"]["whole"]["fits"]
    assert b1k["forms"]["whole"]["fits"]  # 1,024 times 200 decisions of three pictures are kept on the host
    assert libero["forms"]["whole"]["policy"] < 16e9
    assert "episodes" not in b1k["forms"]["whole"]


def test_fewer_episodes_of_behavior_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As the page has it."""
    text, published = Path(B1K).read_text(), "train_batch_per_replica = 256"
    for batch_size, more in ((128, ""), (8, "\nmax_steps = 26000")):
        recipe = tmp_path / "recipe.toml"
        changed = text.replace(published, f"train_batch_per_replica = {batch_size}")
        recipe.write_text(changed.replace("num_envs = 1", f"num_envs = 1{more}"))
        assert planned(capsys, str(recipe))["forms"]["whole"]["fits"]


# --- in a world model

OF_RLINF, PI05 = "cosmos_libero_spatial_grpo_openvlaoft", "cosmos_libero_spatial_grpo_openpi05"


def imagined(capsys: pytest.CaptureFixture[str], gpus: int, gpu: str, name: str, *overrides: str) -> dict:
    call(plan, "--gpus", gpus, "--gpu", gpu, "--json", "-", "--embodied", name, *overrides)
    return json.loads(capsys.readouterr().out)["forms"]


def test_four_a100_hold_what_is_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    forms = imagined(capsys, 4, "A100", OF_RLINF)
    assert 30e9 < forms["sharded"]["total"] < 50e9  # published are about 50 GB, with moments in float32
    assert forms["sharded"]["policy"] + forms["sharded"]["at work"] > 2 * WEIGHT  # whole, where it decides
    assert not forms["whole"]["fits"] and forms["adapters"]["total"] < forms["sharded"]["total"]
    assert 2.4 / 2 < forms["sharded"]["hours_per_epoch"] < 2.4  # half the passes, and the training
    assert call(plan, "--gpus", 4, "--gpu", "A100", "--embodied", OF_RLINF) == 0
    shown = capsys.readouterr().out
    assert "1,024 episodes of 32 decisions" in shown and "An estimate" in shown
    assert forms["adapters"]["hours_per_epoch"] < forms["sharded"]["hours_per_epoch"], "frozen weights have no gradient"
    assert f"{30 * forms['sharded']['hours_per_epoch']:,.0f} h" in shown, "30 epochs"


def test_one_card_of_80_and_one_of_24_gb(capsys: pytest.CaptureFixture[str]) -> None:
    forms = imagined(capsys, 1, "A100", OF_RLINF)
    assert forms["whole"]["fits"] and "sharded" not in forms
    resident = imagined(capsys, 1, "A100", OF_RLINF, "env.enable_offload=false")
    assert resident["whole"]["total"] > forms["whole"]["total"]
    small = ("actor.micro_batch_size=4", "env.train.world_model_cfg.cosmos.batch_size=4")
    forms = imagined(capsys, 1, "RTX-4090", OF_RLINF, *small)
    assert forms["adapters"]["fits"] and not forms["whole"]["fits"]
    assert imagined(capsys, 1, "A100", PI05)["whole"]["fits"]


def test_a_plan_follows_the_precision_and_what_is_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    """The published PI0.5 has precision null, which is float32."""
    wide, narrow = (
        imagined(capsys, 1, "A100", PI05, f"actor.model.precision={precision}")["whole"]
        for precision in ("null", "bf16")
    )
    assert wide["policy"] == 4 * (3_350_000_000 + 3 * 430_000_000)
    assert narrow["policy"] == 2 * (3_350_000_000 + 2 * 430_000_000)  # while it imagines, which needs more then
    assert wide["total"] > 1.5 * narrow["total"]
    one, many = (imagined(capsys, 1, "A100", OF_RLINF, f"actor.micro_batch_size={size}")["whole"] for size in (1, 32))
    assert one["policy"] == many["policy"] == 8 * WEIGHT  # with gradients and two moments
    kept = imagined(capsys, 1, "A100", OF_RLINF, "actor.fsdp_config.gradient_checkpointing=false")["whole"]
    assert 5e9 < many["at work"] < 9e9 and kept["at work"] > 10 * many["at work"] and not kept["fits"]


# --- neither


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--recipe", "configs/openvla-oft/tiny-openvla-oft-grpo.toml"), "a tiny policy"),
        (("--recipe", "configs/wfm/tiny_grpo_mock_data.toml"), "[vla]"),
        (("--recipe", "configs/pi05/none.toml"), "none.toml"),
        (("--gpus", "1", "--embodied", "tiny_toy_grpo"), "a tiny policy"),
        (("--embodied", "cosmos_libero"), "--config-name cosmos_libero"),
        (("--gpus", "3", "--embodied", OF_RLINF), "not divided by the 3 processes"),
        (("--embodied", OF_RLINF, "algorithm.gruop_size=4"), "group_size"),
    ],
)
def test_what_cannot_be_planned_is_an_error(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(plan, *words) == 2
    assert named in capsys.readouterr().err
