# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run where the project says, on their tiny twins, and say what they found."""

import argparse
import gc
import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import driving, imagination, inference, machine, rl_step, rollout, trainer_overhead, vla
from benchmarks.robots import ways
from benchmarks.rollout import published
from cosmos_predict2.rl.config import ANY, RLConfig
from cosmos_predict2.rl.policies.openvla.model import OpenVLASizes
from cosmos_predict2.tools.plan.policies import POLICIES
from cosmos_predict2.tools.plan.workload import read_workload
from cosmos_predict2.toy_world.rendering import detect
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError, TrainingError
from tests.programs import warm_python

FOLDER = Path(machine.__file__).parent


def test_no_benchmark_chooses_one_itself() -> None:
    chooses = re.compile(r"""device\(f?["']cuda|device=["']cuda|\.cuda\(|\.to\(f?["']cuda""")
    found = [path.name for path in FOLDER.glob("*.py") if chooses.search(path.read_text())]
    assert found == []


def test_benchmarks_import_modules_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = machine.parser(None, "quick").parse_args(["--import", "colorsys", "--quick"])
    assert vars(arguments) == {"import": ["colorsys"], "quick": True}
    with pytest.raises(SystemExit):
        machine.parser(None).parse_args(["--import", "no.such"])
    assert "no.such does not import" in capsys.readouterr().err


def test_a_figure_that_noise_hides_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def saves(*tens: float, lost: int = 0) -> float | None:
        steps = [0.0] * 19 + [seconds / 10 for seconds in tens for _ in range(10)]
        monkeypatch.setattr(trainer_overhead, "trainer_loop", lambda *_: steps[: len(steps) - lost])
        return trainer_overhead.saving(len(tens) // 2, 0.1)

    assert saves(1.03, 1.0, 1.04, 1.0, 1.03, 1.0, 1.03, 1.0) == pytest.approx(1.03)
    assert "+3.0%" in capsys.readouterr().out
    assert saves(1.4, 1.0, 1.0, 1.3, 1.2, 1.0, 0.9, 1.0) is None
    assert saves(1.03, 1.0, 1.04, 1.0, lost=10) is None  # which divided by zero
    assert capsys.readouterr().out.count("not measured here") == 2
    times = iter([[1.0] * 10, [1.5] * 10, [1.0] * 10, [1.1] * 10])
    monkeypatch.setattr(trainer_overhead, "bare_loop", lambda steps: next(times))
    monkeypatch.setattr(trainer_overhead, "trainer_loop", lambda *_: next(times))
    trainer_overhead.overhead(10, 2)
    assert "not measured here" in capsys.readouterr().out


def test_driving_is_timed_and_looked_at(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def detected(pictures: Any) -> Any:
        found = detect(pictures)
        found.position["puck"][0] = float("nan")  # of one table of two
        return found

    monkeypatch.setattr(driving, "detect", detected)
    args = Namespace(teacher="", load_ema=False, teacher_steps=1, student="", causal="", rounds=1)
    driving.speed(args)
    driving.minute(Namespace(**vars(args), minute=64, actions=8, tables=2))
    rows = capsys.readouterr().out.splitlines()
    assert len([row for row in rows if row.startswith("  ")]) == 4 + 4 and "faster" in rows[4]
    (true,) = [row.split() for row in rows if "the simulator" in row]
    assert true[6:] == ["0.00"] * 4 + ["0.50"] * 4 + ["1.00"] * 4, "nothing fades, and on one table all is seen"


def test_parts_of_a_video_are_timed_and_the_rest_is_said_to_be_computed(capsys: pytest.CaptureFixture[str]) -> None:
    found = inference.measure("tiny", "48", 3)
    text = capsys.readouterr().out
    assert "as one batch of two" in text and "; 4 evaluations" in text and "35 steps would take" in text
    assert min(found.values()) > 0
    assert found["whole"] >= found["encode"] + found["denoise"] + found["decode"]


def test_a_video_that_is_not_finite_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = WorldModel.decode
    monkeypatch.setattr(WorldModel, "decode", lambda self, latent: decode(self, latent) * float("nan"))
    with pytest.raises(SystemExit, match="tiny 48: the video is not finite"):
        inference.measure("tiny", "48", 1)


def test_the_published_way_and_ours_imagine_the_same(tmp_path: Path) -> None:
    env = imagination.make_env("tiny", 2, tmp_path)
    ends = []
    for is_published in (False, True):
        if is_published:
            env.imagination.generate_actions = published(env.imagination.world, 64)  # type: ignore[method-assign]
        imagination.chunk(env)
        assert env._frames is not None
        ends.append(env._frames.clone())
    assert (ends[0].int() - ends[1].int()).abs().max() <= 1 and ends[0].float().std() > 1


@pytest.mark.long
def test_parts_operations_and_the_published_way_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imagination, "ceiling", lambda: 1e10)  # a busy machine has a share of it, too
    imagination.measure_released("tiny", 1, 1)
    found = capsys.readouterr().out
    assert "FAILED" not in found and len(re.findall(r"decode \d+\.\d+ s", found)) == 2
    assert float(re.findall(r"([\d.]+) times ours", found)[0]) > 0
    share, rate = (float(re.findall(form, found)[0]) for form in (r"([\d.]+)% of the fastest", r"([\d.e-]+) TFLOP/s:"))
    assert share / 100 == pytest.approx(100 * rate, abs=1e-3) and share > 0


def test_operations_of_the_published_size() -> None:
    """16 environments with 1280 tokens each: 24 products of width by width and the attention among them."""
    config = rollout.get_cosmos_predict2_action_conditioned_pipeline(model_size="2B", network="chunk")
    tokens, width, blocks = 16 * 1280, 2048, 28
    linear, attention = blocks * tokens * 24 * width**2, blocks * tokens * 4 * 1280 * width
    assert imagination.step_flops(config, 16, "2B") == pytest.approx(linear + attention, rel=0.02)


def test_a_recipe_is_measured_and_one_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--released", "--size", "tiny", "--architecture", "lora"]
    words += ["--experiment", "predict2p5_2b_none", "predict2p5_2b_ddrl"]
    monkeypatch.setattr(sys, "argv", ["rl_step", *words])
    monkeypatch.setattr(machine, "quiet_trainer", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        rl_step.main()
    found = capsys.readouterr().out
    assert stopped.value.code == 1 and found.count("FAILED") == 1
    assert "num_rollout 8 -> 2" in found and "trained base -> lora" in found and "its encoder -> random" in found
    assert re.search(r"an experience of 2 clips: .* gradient \d+\.\d\d s \((?!0%)", found)
    ours, plain = re.findall(r"\((\d+) evaluations\), sampled plainly [\d.]+ s \((\d+)\)", found)[0]
    assert ours == plain == "5"  # and the rollout takes as long as the same steps of the sampler


@pytest.mark.long
def test_ratios_that_are_not_one_are_reported_and_the_recipe_is_timed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def measure(experiment: str, architecture: str, arguments: Any, *others: str) -> None:
        asked.append(others)
        if not others:
            raise TrainingError("it differs by 0.1 (model.config.rl.ratio_tolerance=0.001)")

    monkeypatch.setattr(rl_step, "measure_released", measure)
    with pytest.raises(SystemExit):
        rl_step.run_released(Namespace(size="tiny", experiment=["one"], architecture=["base"]))
    assert asked == [(), (rl_step.LOOSE,)] and capsys.readouterr().out.count("FAILED") == 1


def test_an_experiment_without_rewards_of_clips_is_named() -> None:
    words = ["experiment=predict2_video2world_training_tiny_cosmos_nemo_assets"]
    work = read_workload(compose(machine.CONFIG, words), 1)
    with pytest.raises(ConfigError, match="makes no clips to learn from"):
        rl_step.passes_of(work)


def test_steps_that_a_short_chain_does_not_have_are_left_out() -> None:
    def steps(**options: Any) -> list[str]:
        return [one for one in rl_step.reduced(RLConfig(**options)) if "train_on" in one or "times" in one]

    assert steps(train_on=[0, 5, 9], sample_steps=10) == ["model.config.rl.train_on=[0]"]
    assert steps(train_on=[ANY, ANY], sample_steps=10) == [f"model.config.rl.train_on={[ANY]}"]
    assert steps(objective="nft", transition="ode") == ["model.config.rl.num_timesteps=1"]


@pytest.fixture(autouse=True)
def _as_benchmarks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "unused")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(machine, "quiet_trainer", lambda: None)  # which changes the whole process
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # which looks through all that tests have imported


def flags(folder: Path, **changes: Any) -> argparse.Namespace:
    plain = dict(policies=["openvla", "pi05"], size="tiny", envs=2, groups_of=2, decisions=1, experiences=1)
    plain |= dict(adapters=False, folder=str(folder), overrides=[])
    return argparse.Namespace(**{**plain, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "adapters"), [pytest.param("openvla", False, marks=pytest.mark.long), ("pi05", True)]
)
def test_both_policies_roll_out_and_learn(
    policy: str, adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vla, "planned", lambda *_: {})
    assert vla.run(flags(tmp_path, policies=[policy], adapters=adapters)) == 0
    found = capsys.readouterr().out
    phases = ("policy", "imagination", "reward", "forward", "backward", "optimizer", "probabilities", "away")
    for phase in phases:
        seconds = re.findall(rf": {phase} +(\d+\.\d+)", found)
        assert len(seconds) == 1, phase
    assert not any(tmp_path.iterdir())  # policies are large


@pytest.mark.slow
def test_the_plan_is_of_the_changed_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    found = vla.planned("openvla", "2B", flags(tmp_path, envs=16, groups_of=8, decisions=2))
    assert {"whole", "adapters"} <= found.keys() and found["whole"]["total"] > found["adapters"]["total"] > 1e10


@pytest.mark.long
def test_a_policy_that_fails_does_not_stop_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(policy: str, *_: Any) -> None:
        if policy == "openvla":
            raise RuntimeError("one\n\ntwo")
        print("pi05 ran")

    monkeypatch.setattr(vla, "measure", measure)
    assert vla.run(flags(tmp_path)) == 1
    found = capsys.readouterr().out
    assert "openvla FAILED: RuntimeError: one\n    two" in found and "pi05 ran" in found


def test_the_written_sizes_are_the_published_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seven billion numbers are drawn on a GPU only; here they are counted."""
    import torch

    from cosmos_predict2.rl.policies.openvla import tiny
    from cosmos_predict2.rl.policies.openvla.model import OpenVLAModel

    counted = []

    def model(sizes: OpenVLASizes, proprio_dim: int) -> Any:
        with torch.device("meta"):
            counted.append(sum(weight.numel() for weight in OpenVLAModel(sizes, proprio_dim).parameters()))
        raise StopIteration

    monkeypatch.setattr(tiny, "OpenVLAModel", model)
    with pytest.raises(StopIteration):
        vla.write_policy(tmp_path / "openvla", "openvla", "2B")
    assert counted[0] == pytest.approx(POLICIES["openvla_oft"].parameters, rel=0.01)


def test_ways_stand_in_one_table_and_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A way that its gate ended has no figure behind learning, one whose clone succeeds always none of the gate."""
    figures = {"policy": {"true_ends": {"value": 0.7}, "within_starts": {"value": None}}}
    learnt = (["before", "chosen", "after", "after_2"], "go")
    cases = {"a": (["before"], "no"), "b": learnt, "c": (["before"], "doubtful")}
    for name, (stages, verdict) in cases.items():
        for k, stage in enumerate(stages):
            rate = 0.4 + k / 5
            found = dict(rate=rate, low=rate - 0.1, high=min(1.0, rate + 0.1), episodes=200)
            (tmp_path / name / stage).mkdir(parents=True)
            (tmp_path / name / stage / "evaluation.json").write_text(json.dumps(dict(success=found)))
        (tmp_path / name / "steps").mkdir()
        (tmp_path / name / "steps" / "gate.json").write_text(json.dumps(dict(processor_seconds=120.0)))
        word = "full" if name == "c" else "unclear"  # full: with a card of before
        (tmp_path / name / "verdict.json").write_text(json.dumps(dict(verdict=word)))
        (tmp_path / name / "card.json").write_text(json.dumps(dict(verdict=verdict, figures=figures)))
    (tmp_path / "b/phase_2").mkdir()
    (tmp_path / "b/phase_2/card.json").write_text(json.dumps(dict(verdict="doubtful", figures={})))
    picture = tmp_path / "ways.png"
    ways.run(ways.parser.parse_args([*(str(tmp_path / name) for name in cases), "--picture", str(picture)]))
    *_, ended, gone_on, full = capsys.readouterr().out.splitlines()
    assert ended == "| a | .700 |  |  | no | .400 |  |  |  | 2 |"
    assert gone_on == "| b | .700 |  |  | go, doubtful | .400 | .600 | .800 | 1.000 | 2 |"
    assert full == "| c |  |  |  | full | .400 |  |  |  | 2 |"
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"has no verdict\.json: give folders"):
        ways.run(ways.parser.parse_args([str(tmp_path)]))
