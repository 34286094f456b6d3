# SPDX-License-Identifier: Apache-2.0
"""The whole way of documentations/your_robot.md, with few iterations, and what is refused before it begins."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch

from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.tools.improve import improve as ways
from cosmos_predict2.tools.improve.phases import Options, RecordedSizes, chosen
from cosmos_predict2.tools.improve.steps import WayStep
from cosmos_predict2.tools.improve.way import steps_of
from imaginaire.buildable import buildable
from imaginaire.errors import ConfigError, DataError, TrainingError, UserError
from scripts import improve_policy as script
from tests.programs import warm_python
from tests.test_documentation import ROOT
from tests.tools.improve.test_way import RECORDED, rate, writing

PAGE = (ROOT / "documentations/your_robot.md").read_text()
SHORT = {
    "tokenizer": ("--steps", "20"),
    "world_model": ("trainer.max_iter=4", "trainer.validation_iter=4", "checkpoint.save_iter=4"),
    "reward": ("--steps", "20", "--least_precision", "0", "--least_recall", "0", "--least_area", "0"),
    **dict.fromkeys(
        ("clone", "clone_2"), ("trainer.max_iter=10", "trainer.validation_iter=5", "checkpoint.save_iter=10")
    ),
    "learning": (
        *("trainer.max_iter=2", "dataloader_train.batch_size=2", "trainer.run_validation=false"),
        "optimizer.lr=1e-5",  # of so few episodes approx_kl is noise, which would end the run
    ),
}

EXECUTABLE = sys.executable
# Every function of the toy world is left behind in a file when it is called, and fails.
WITHOUT_TOY_WORLD = """\
import importlib, types
def without(name):
    def fail(*given, **named):
        open({0!r}, "a").write(name)
        raise RuntimeError(name)
    return fail
for name in ("episodes", "physics", "rendering", "world"):
    module = importlib.import_module("cosmos_predict2.toy_world." + name)
    for key, value in vars(module).items():
        of_here = isinstance(value, types.FunctionType) and value.__module__ == module.__name__
        if of_here and key != "object_position":  # a column's number, which a module reads when it is imported
            setattr(module, key, without(key))
"""


@pytest.fixture
def robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's robot in it, as the working directory."""
    code = re.search(r"cat > dot_robot.py <<'PY'\n(.*?)PY\n", PAGE, re.DOTALL)
    assert code is not None
    (tmp_path / "dot_robot.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", warm_python())  # of the steps
    yield tmp_path
    sys.modules.pop("dot_robot", None)
    gymnasium.registry.pop("Dot-v0", None)


def recorded(num: int) -> Path:
    """The page's recordings, so many of them."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (block,) = [block for block in blocks if "import dot_robot" in block]
    exec(block.replace("range(300)", f"range({num})"), {})
    return Path("datasets/dot")


def test_a_suite_that_does_not_fit_the_recordings_is_refused_by_name(
    robot: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(robot / "data", fps=10)
    writer.add(
        Recording({"action": torch.zeros(5, 2).numpy()}, {"top": torch.zeros(3, 5, 32, 32).byte()}, "to the dot")
    )
    writer.finish()
    options = Options(data=robot / "data", out=robot / "out", suite="gym:dot_robot:Dot-v0")
    fitting = replace(RECORDED, action_dim=2)
    with pytest.raises(ConfigError, match=r"Dot-v0, for actions of 3 numbers, as recorded: .* takes 2\. .*action_keys"):
        ways.require_suite(options, RECORDED)
    with pytest.raises(ConfigError, match="info of a step has no arrived"):
        ways.require_suite(replace(options, suite=f"{options.suite}?success=arrived"), fitting)
    other = replace(options, suite=f"{options.suite}?sentence=elsewhere")
    with pytest.raises(ConfigError, match=r"task 'elsewhere', which no recording.* Known: to the dot"):
        ways.require_suite(other, replace(fitting, sentences=("to the dot",)))
    with pytest.raises(ConfigError, match=r"--suite gym:dot.*: recorded pictures have height 64 .*another shape"):
        ways.require_suite(options, replace(fitting, sentences=("to the dot",), recorded_size=(64, 128)))
    stateful = replace(fitting, sentences=("to the dot",), state_dim=3)
    with pytest.raises(ConfigError, match=r"--state: the recordings have 3 numbers .*, but --suite .* shows 0"):
        ways.require_suite(replace(options, state=True), stateful)
    for num, text in ((24, ""), (12, "later success is not imagined"), (33, "not true. .*max_steps=33; .*&repeat=K")):
        caplog.clear()
        ways.require_suite(options, replace(fitting, sentences=("to the dot",), num_actions=num))
        assert re.search(text, caplog.text) and bool(caplog.messages) == bool(text)


class Unregistered(torch.nn.Module):
    act = record_of = cloning_loss = None


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("collections:OrderedDict", "OrderedDict cannot be cloned: it has no act, record_of, cloning_loss"),
        (f"{__name__}:Unregistered", "Unregistered is not registered.*@buildable"),
    ],
)
def test_a_class_that_is_no_policy_is_refused_before_anything_is_trained(robot: Path, policy: str, fault: str) -> None:
    for go in (ways.improve, ways.commands):
        with pytest.raises(ConfigError, match=fault):
            go(Options(data=Path("datasets/dot"), out=robot / "none", policies=("pi05", policy)))
    assert not (robot / "none").exists()


@pytest.mark.parametrize(
    ("num", "cameras", "last", "fault"),
    [
        (1, ("top",), 0.0, "has 1 episode: record at least 12"),
        (2, ("top", "hand"), 0.0, "has 2 cameras: name one, --camera .*top, .*hand"),
        (2, ("top",), float("nan"), "actions that are not finite: number 1 of row 12 is nan. Mend or remove"),
        (2, ("top",), 0.0, "has no column 'next.success', which marks success"),
    ],
)
def test_recordings_that_cannot_be_learnt_from_are_refused_at_once(
    num: int, cameras: tuple[str, ...], last: float, fault: str, tmp_path: Path
) -> None:
    writer, pictures = Writer(tmp_path / "data", fps=10), torch.zeros(3, 14, 32, 32, dtype=torch.uint8)
    actions = torch.zeros(14, 2).numpy()
    actions[12, 1] = last
    for _ in range(num):
        writer.add(Recording({"action": actions}, dict.fromkeys(cameras, pictures), "go"))
    writer.finish()
    with pytest.raises(DataError, match=fault) as error:
        ways.improve(Options(data=tmp_path / "data", out=tmp_path / "out"))
    assert "--classifier" not in str(error.value), "which this program does not take"
    assert not (tmp_path / "out").exists()


@buildable("policy", "wide_of_a_test")
class Wide(ToyPolicy):
    """Takes no action_dim."""

    def __init__(self, chunk: int = 12, path: str = "") -> None:
        super().__init__(action_dim=7, chunk=chunk, path=path)


def test_a_policy_of_another_width_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """It ended the way after the world model, with a misfit of shapes."""
    writer = Writer(tmp_path / "data", fps=10)
    pictures = torch.zeros(3, 14, 32, 32, dtype=torch.uint8)
    for _ in range(2):
        columns = {"action": torch.zeros(14, 4).numpy(), "next.success": torch.zeros(14).numpy()}
        writer.add(Recording(columns, {"top": pictures}, "go"))
    writer.finish()
    options = Options(data=tmp_path / "data", out=tmp_path / "out", policies=("pi05", f"{__name__}:Wide"))
    for go in (ways.improve, ways.commands):
        with pytest.raises(ConfigError, match=r"Wide decides on 7 numbers per action, .* have 4\. Let its con"):
            go(options)
    assert not options.out.exists()
    ways.require_policy("cosmos_predict2.rl.policies.toy:ToyPolicy", options)


@pytest.mark.parametrize(
    ("width", "state", "given", "fault"),
    [
        (2, False, TINY_ACTION, r"--world_model .*: .*its actions have 2 numbers, but those of the world model have 4"),
        (4, True, TINY_ACTION, r"--world_model .*: It predicts no state .*leave --state out"),
        (4, False, "runs/none/model.pt", r"runs/none/model.pt"),
    ],
    ids=["width", "state", "no file"],
)
def test_a_world_model_of_other_recordings_is_refused_before_anything_is_trained(
    width: int, state: bool, given: str, fault: str, tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "data", fps=10)
    columns = {"action": torch.zeros(14, width).numpy(), "next.success": torch.zeros(14).numpy()}
    columns["observation.state"] = torch.zeros(14, 3).numpy()
    for _ in range(2):
        writer.add(Recording(columns, {"top": torch.zeros(3, 14, 32, 32, dtype=torch.uint8)}, "go"))
    writer.finish()
    words = [str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--world_model", given]
    with pytest.raises(UserError, match=fault):
        script.run(script.parser.parse_args([*words, *(["--state"] if state else [])]))
    assert not (tmp_path / "out").exists()


def test_recordings_in_the_unit_of_the_environment_are_not_scaled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scale is a warning where nothing shows it."""

    def options(name: str, scale: float) -> Options:
        writer = Writer(tmp_path / name, fps=10, robot="dot")
        actions = scale * torch.linspace(-1, 1, 10).reshape(5, 2).numpy()
        for _ in range(2):
            columns = {"action": actions, "next.success": torch.zeros(5).numpy()}
            writer.add(Recording(columns, {"top": torch.zeros(3, 5, 32, 32, dtype=torch.uint8)}, "go"))
        writer.finish()
        return Options(data=tmp_path / name, out=tmp_path, suite="gym:Dot-v0?repeat=2")

    with pytest.raises(DataError, match="longest episode has 5 frames, and a world model learns from windows of 13"):
        ways.improve(options("short", 1))
    far, near = options("far", 200), options("near", 1)
    native = r"those from 0 to 512 .* -200 to 200.*'gym:Dot-v0\?repeat=2&actions=native'; else"
    with pytest.raises(ConfigError, match=native):
        ways.require_unit(far, [0.0, 0.0], [512.0, 512.0])
    with pytest.raises(ConfigError, match=r"go from -200 to 200\. Record them from -1 to 1\."):  # not clipped silently
        ways.require_unit(far, [-1.0, -1.0], [1.0, 1.0])
    ways.require_unit(near, [-1.0, -1.0], [1.0, 1.0])
    assert not caplog.messages
    ways.require_unit(near, [0.0, 0.0], [512.0, 512.0])
    assert "recorded ones go from -1 to 1; if" in caplog.text


def test_held_out_recordings_are_shown_with_their_own_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "data", fps=10)
    for _ in range(4):
        pictures = torch.zeros(3, 5, 32, 32, dtype=torch.uint8)
        writer.add(Recording({"action": torch.zeros(5, 2).numpy()}, {"top": pictures}, "go"))
    writer.finish()
    split = SimpleNamespace(held_out=[1, 2, 3], outcomes=[True, False, True, None], lengths=[5] * 4)
    monkeypatch.setattr(ways, "read_split", lambda _: split)
    ways.illustrate("split", Options(data=tmp_path / "data", out=tmp_path), replace(RECORDED, size=(32, 32)))
    captions = json.loads((tmp_path / "page/captions.json").read_text())["split"]
    assert sorted(captions.values()) == ["recording 1, fails", "recording 2, succeeds"]
    assert all(caption.split()[1].startswith(name[0]) for name, caption in captions.items())


def test_what_follows_the_choice_is_of_the_clone_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clone is known only once the ranking is there; what learnt before is not compared with another clone."""
    options = Options(data=tmp_path / "data", out=tmp_path / "out", suite="gym:any")
    rates = {"before": 40, "chosen": 120, "after": 60}

    def plan(options: Options, recorded: RecordedSizes) -> list[WayStep]:
        learns = chosen(options).name
        contents: dict[str, tuple[str, Any]] = {
            "choice": ("ranking.json", {"policies": [{"policy": "RUN/clone_2/policy", "value": VALUE}]}),
            "gate": ("card.json", {"verdict": "go", "reasons": [], "figures": {}, "next_step": "learn"}),
            "learning": ("learnt", learns),
        }
        for name, count in rates.items():
            if name != "chosen" or learns == "clone_2":
                contents[name] = (f"{name}/evaluation.json", rate(count))
        return writing(options.out, contents)

    monkeypatch.setattr(ways, "steps_of", plan)
    monkeypatch.setattr(ways, "look", lambda _: RECORDED)
    monkeypatch.setattr(ways, "require_suite", lambda *_: None)
    found = ways.improve(options)
    assert (options.out / "learnt").read_text() == '"clone_2"'
    assert found.word == "worse" and "0.600 before, 0.300 after" in found.sentence
    assert "its true success is 0.600, that of clone, conv, seed 0, 0.200" in str(found.notes)


VALUE = {"value": 0.5, "low": 0.4, "high": 0.6}


@pytest.mark.slow
def test_recordings_without_failures_end_the_way_before_anything_is_trained(robot: Path) -> None:
    data = recorded(14)
    with pytest.raises(TrainingError, match=r"step 2 of 22, split them.*of each are needed"):
        ways.improve(Options(data=data, out=robot / "out", suite="gym:dot_robot:Dot-v0"))
    verdict = json.loads((robot / "out/verdict.json").read_text())
    assert verdict["verdict"] == "ended" and "of each are needed" in verdict["sentence"]
    assert verdict["sentence"].partition(":")[0] in (robot / "out/index.html").read_text()
    assert not (robot / "out/posttraining").exists()


@pytest.mark.long
def test_the_whole_way_ends_in_a_page_with_a_verdict(robot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(options: Options, recorded: RecordedSizes) -> list[WayStep]:
        steps = steps_of(options, recorded)
        return [replace(step, words=(*step.words, *SHORT.get(step.name, ()))) for step in steps]

    monkeypatch.setattr(ways, "steps_of", shortened)
    monkeypatch.setattr(sys, "executable", EXECUTABLE)  # a new interpreter, which begins by the file below
    (robot / "sitecustomize.py").write_text(WITHOUT_TOY_WORLD.format(str(robot / "toy_world_called")))
    out = robot / "mes données (1)"  # what the grammar of overrides does not take as it is
    options = Options(data=recorded(60), out=out, suite="gym:dot_robot:Dot-v0", episodes=8, clones=1)
    assert ways.improve(options).word == "refused"  # 4 iterations make no world model
    found = ways.improve(replace(options, allow_unchecked=True))
    assert found.word in ("better", "worse", "unclear", "kept")
    assert not (robot / "toy_world_called").exists()
    own = out / "posttraining/video2world/world_model"
    found = ways.improve(replace(options, out=robot / "own", world_model=own))
    assert found.word == "refused" and "A given one" in (robot / "own/index.html").read_text()
    page = (out / "index.html").read_text()
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert (out / name).exists(), name
