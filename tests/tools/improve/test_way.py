# SPDX-License-Identifier: Apache-2.0
"""The way's commands are those of its programs, and its verdict follows from what they wrote."""

import html
import importlib
import io
import itertools
import json
import math
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.rl.episodes.policy_evaluation import Rate
from cosmos_predict2.rl.imagined.verdict import CLONE
from cosmos_predict2.rl.imagined.watch import FILE as WATCHED
from cosmos_predict2.tools.improve import improve as ways
from cosmos_predict2.tools.improve.improve import keep
from cosmos_predict2.tools.improve.page import write_page
from cosmos_predict2.tools.improve.phases import (
    SAVED_AT,
    WORLD_MODEL,
    Options,
    Phase,
    RecordedSizes,
    last_of_best,
    look,
    phases_of,
)
from cosmos_predict2.tools.improve.results import WayResults, WayVerdict, difference
from cosmos_predict2.tools.improve.steps import Runner, WayStep
from cosmos_predict2.tools.improve.way import steps_of
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import to_yaml
from imaginaire.errors import ConfigError, DataError
from imaginaire.storage import write_json
from scripts import improve_policy
from scripts.train import DEFAULT_CONFIG
from tests.programs import finished, python

OPTIONS = Options(data=Path("my_data"), out=Path("RUN"), suite="gym:ID", clones=1)
RECORDED = RecordedSizes(size=(64, 64), recorded_size=(96, 96), camera="top", action_dim=3, num_actions=24, fps=10.0)


OWN = "cosmos_predict2.rl.policies.toy:ToyPolicy"


@pytest.mark.parametrize("policies", [("pi05",), ("openvla_oft", "pi05"), (OWN,)])
def test_every_step_is_a_command_that_its_program_takes(policies: tuple[str, ...]) -> None:
    options = replace(OPTIONS, policies=policies, clones=len(policies), camera="top", seed=3, phases=2)
    options = replace(options, imports=("json",), allow_unchecked=True, state=True, action_keys=("action.a", "b"))
    options = replace(options, success_column="won")
    wanted = dict(camera="top", success_column="won", seed=3, draws=1, image_size=96)  # wherever a program takes it
    steps = steps_of(options, RECORDED)
    strict = steps_of(replace(options, allow_unchecked=False, allow_faults=True), RECORDED)
    assert [one[0].codes for one in (steps, strict)] == [(0,), (0, 1)], "faults of recordings may be meant"
    assert "--allow_faults" in steps[0].cure
    learning = [" ".join(step.words) for each in (steps, strict) for step in each if step.name == "learning"]
    assert ["model.config.allow_unchecked=true" in words for words in learning] == [True, False]
    assert all("env.starts.size=[64,64]" in words for words in learning)
    alone = [" ".join(step.words) for step in steps_of(replace(options, suite="", phases=0), RECORDED)]
    assert all("imagination_watch.ends_full=false" in words for words in learning), "iterations are played"
    assert not any("ends_full" in words for words in alone), "nothing but imagination knows when to end"
    for step in steps:
        flag, program, *words = step.words
        assert flag == "-m"
        if program == "scripts.train":
            compose(DEFAULT_CONFIG, words[words.index("--") + 1 :])
            assert any(word.endswith(".camera=top") for word in words), step.name
        else:
            given = vars(importlib.import_module(program).parser.parse_args(words))
            assert {name: given.get(name, value) for name, value in wanted.items()} == wanted, step.name
    own = [word for step in steps for word in step.words if word.endswith((".state=observation.state", ".state=true"))]
    assert len(own) == 3 + len(policies) ** 2 + 2, "of the world model of each phase, and of the clones"
    readers = [step.words for step in steps if "cloning/clone" in " ".join(step.words)]
    assert OWN not in policies or (readers and all("cosmos_predict2.rl.policies.toy" in words for words in readers))
    made = [path for step in steps for path in step.makes]
    for k, step in enumerate(steps):  # what a step reads of the folder, one before it has made
        before = [path for earlier in steps[:k] for path in earlier.makes]
        # what was learnt, or what learnt it
        before += [phase.result for phase in phases_of(options) if phase.learnt in before]
        names = {Path(name) for word in step.words for name in re.split("[=,{}:]", word) if name}
        for path in step.reads:
            assert OPTIONS.out not in path.parents or any(one == path or one in path.parents for one in before), path
            assert path.suffix == ".py" or any(one in (path, path.parent) or path in one.parents for one in names), path
        for path in (OPTIONS.data, *before):  # and what it names, it reads
            assert path not in names or any(one == path or path in one.parents for one in step.reads), path
    assert len(made) == len(set(made))
    found = {step.name: step.words for step in steps if "--first" in step.words}
    numbers = [dict(itertools.pairwise(words)) for words in found.values()]
    spans = sorted({(int(one["--first"]), int(one["--first"]) + int(one["--episodes"])) for one in numbers})
    assert len(spans) == 7, "of three phases' trials, of the truth, of two phases' episodes, of what is chosen among"
    tried = [dict(itertools.pairwise(found[f"trial_after{phase.end}"]))["--first"] for phase in phases_of(options)]
    assert len({*tried}) == 3, "what was kept by a start is not tried by it again"
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(spans)), "each start serves once"
    assert str(phases_of(options)[1].data) in found["collect_3"], "which holds what the phase before recorded"
    for phase in phases_of(options):
        words = found[f"trial_before{phase.end}"]
        given = dict(itertools.pairwise(words))
        assert (given["--policy"], given["--seed"]) == (str(phase.before), "3")
        assert (given["--episodes"], given["--draws"]) == ("100", "1")
        assert phase.clone is None or str(phase.policy) in found[f"trial_clone{phase.end}"]
    assert "greedy" in found["collect_2"], "what a robot plays"
    assert dict(itertools.pairwise(found["collect_2"]))["--fps"] == "10"
    few = steps_of(replace(options, suite="libero_spatial", phases=0, seed=0, camera=""), RECORDED)
    assert not any("trial" in step.name or "--camera" in step.words for step in few)
    assert "'--seed', '0'" in str(few)
    truth = [dict(itertools.pairwise(step.words))["--first"] for step in few if "--first" in step.words]
    assert len(truth) >= 2 and {*truth} == {"0"}, "of a suite with few starts all are played"
    of_keys = [step.name for step in steps if "action.a" in " ".join(step.words)]
    assert of_keys[:2] == ["split", "world_model"] and {"starts", "clone", "clone_phase_3", "starts_3"} <= {*of_keys}
    (one,) = (s.words for s in steps_of(replace(options, episodes=1, phases=0), RECORDED) if s.name == "trial_after")
    assert one[one.index("--episodes") + 1] == "1"


def test_folders_may_have_any_name(tmp_path: Path) -> None:
    """A way ended behind its tokenizer, as no override takes a letter beyond ASCII or a bracket as it is."""
    folder = tmp_path / "l'été, (1)"
    options = replace(OPTIONS, data=folder / "data", out=folder / "out", policies=(OWN,))
    trained = [step for step in steps_of(options, RECORDED) if "scripts.train" in step.words]
    assert {step.name for step in trained} == {"world_model", "clone", "learning"}
    for step in trained:
        config = compose(DEFAULT_CONFIG, step.words[step.words.index("--") + 1 :])
        data = config.dataloader_train.dataset
        given = (data.get("root"), data.get("path"), config.model.config.get("policy"))
        assert any(str(folder) in str(value) for value in given), step.name


def test_a_world_model_of_the_users_stands_in_place_of_a_tiny_one(tmp_path: Path) -> None:
    """Phases keep it: nothing here can train it on."""
    run = tmp_path / "my_run"
    (run / "checkpoints").mkdir(parents=True)
    options = replace(OPTIONS, phases=1)
    own, given = (steps_of(one, RECORDED) for one in (options, replace(options, world_model=run)))
    gone = {step.name for step in own} - {step.name for step in given}
    assert gone == {"tokenizer", "world_model", "world_model_2"} and len(given) == len(own) - 3
    for step in given:
        assert "RUN/posttraining/video2world" not in " ".join(step.words)
        assert (str(run) in " ".join(step.words)) == (run / "checkpoints" in step.reads), step.name
    asked = {step.name for step in given if run / "checkpoints" in step.reads}
    assert asked >= {"imagined", "reward", "reward_2", "gate", "gate_2", "learning", "learning_2", "after"}
    words = {step.name: step.words for step in given}
    assert not any("starts.size" in word for word in words["learning"]), "pictures have the size of its training"
    assert dict(itertools.pairwise(words["imagined"]))["--data"] == "my_data", "its run may have seen other recordings"
    file = tmp_path / "weights.safetensors"
    (gate,) = (s for s in steps_of(replace(options, phases=0, world_model=file), RECORDED) if s.name == "gate")
    assert file in gate.reads


def test_what_the_robot_played_is_asked_by_the_gate(tmp_path: Path) -> None:
    def recordings(name: str, width: int) -> Path:
        writer, pictures = Writer(tmp_path / name, fps=10), torch.zeros(3, 5, 32, 32, dtype=torch.uint8)
        rows = {"action": numpy.zeros((5, width), numpy.float32), "next.success": numpy.zeros(5, numpy.float32)}
        for _ in range(2):
            writer.add(Recording(rows, {"observation.images.front": pictures}, "go"))
        writer.finish()
        return tmp_path / name

    own = recordings("own", 2)
    options = replace(OPTIONS, data=recordings("data", 2), suite="", played=own)
    (gate,) = (step for step in steps_of(options, look(options)) if "--played" in step.words)
    assert gate.name == "gate" and own in gate.reads and str(own) in gate.words
    with pytest.raises(DataError, match=r"wide has actions of 3 numbers, .*data of 2"):
        look(replace(options, played=recordings("wide", 3)))
    with pytest.raises(DataError, match="none"):
        look(replace(options, played=tmp_path / "none"))
    words = map(str, (options.data, "--out", tmp_path / "out", "--played", own, "--suite", "gym:ID"))
    with pytest.raises(ConfigError, match="the gate plays the clone itself"):
        improve_policy.run(improve_policy.parser.parse_args([*words]))


def test_an_environment_that_changed_is_played_again_and_nothing_is_cloned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clone reads recordings alone; it was trained again."""
    (tmp_path / "worlds_of_a_test.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    options = replace(OPTIONS, suite="gym:worlds_of_a_test:ID", policies=("pi05", OWN), clones=2, phases=1)
    for given in (options, replace(options, suite="gym:ID", imports=("worlds_of_a_test",), policies=("pi05",))):
        steps = steps_of(given, RECORDED)
        readers = {step.name for step in steps if tmp_path / "worlds_of_a_test.py" in step.reads}
        assert readers == {step.name for step in steps if "--suite" in step.words}
    of_policy = [s.name for s in steps_of(options, RECORDED) if any(path.name == "toy.py" for path in s.reads)]
    assert of_policy[:3] == ["clone_2", "clone_4", "choice"], "of the policy that the file has"


@pytest.mark.slow
def test_nothing_that_the_way_runs_or_builds_knows_the_toy_world() -> None:
    """The experiments are registered beside those of the toy world; what they build, and every program, needs none."""
    names = {"cosmos_predict2.tools.improve.improve", "scripts.collect"}  # of later phases
    for step in steps_of(replace(OPTIONS, policies=("openvla_oft", "pi05")), RECORDED):
        names.add(step.words[1])
        if step.words[1] == "scripts.train":
            tree = to_yaml(compose(DEFAULT_CONFIG, step.words[step.words.index("--") + 1 :]))
            names |= {name.rpartition(".")[0] for name in re.findall(r"_(?:target|type)_: ([\w.]+)", tree)}
    assert {"cosmos_predict2.rl.envs.world_model", "cosmos_predict2.models.video2world_model"} <= names
    program = f"import importlib, sys; sys.modules['cosmos_predict2.toy_world'] = None; names = {sorted(names)}"
    done = finished(python(), "-c", f"{program}; [importlib.import_module(name) for name in names]")
    assert done.returncode == 0, done.stderr


def test_the_first_of_the_ranking_learns(tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path / "now", policies=("openvla_oft", "pi05"), clones=2, seed=3, phases=1)
    names = [step.name for step in steps_of(options, RECORDED)]
    assert names[6:12] == ["clone", "clone_2", "clone_3", "clone_4", "starts", "choice"]

    for suite, is_played in (("gym:ID", True), ("libero_spatial", False), ("", False)):
        (step,) = (s for s in steps_of(replace(options, suite=suite, phases=0), RECORDED) if s.name == "choice")
        assert ("--suite" in step.words) == is_played == (1 in step.codes), "few starts serve the truth alone"

    def learning(name: str = "learning") -> str:
        return " ".join(next(step for step in steps_of(options, RECORDED) if step.name == name).words)

    assert "experiment=vla_grpo_recordings " in learning() and "cloning/clone/policy" in learning()
    order = ["clone_4", "clone", "clone_2", "clone_3"]
    value = {"value": 0.5, "low": 0.4, "high": 0.6}
    rows = [{"policy": f"elsewhere/posttraining/cloning/{name}/policy", "value": value} for name in order]
    write_json(options.out / "ranking.json", {"policies": rows})
    assert [step.name for step in steps_of(options, RECORDED)] == names, "the steps are counted as before"
    found = learning()
    assert "experiment=vla_grpo_recordings_pi05 " in found and "cloning/clone_4/policy" in found
    anew = learning("clone_phase_2")
    assert "experiment=clone_recordings " in anew and "trainer.seed=4" in anew, "of the chosen kind and seed"
    options = replace(options, clones=1)
    assert "cloning/clone/policy" in learning(), "fewer are trained now than were ranked"
    options = replace(options, clones=2)
    seeds = [word for step in steps_of(options, RECORDED)[6:10] for word in step.words if "trainer.seed" in word]
    assert seeds == [f"trainer.seed={seed}" for seed in (3, 3, 4, 4)], "more clones come behind those that are there"
    write_json(options.out / "posttraining/cloning/clone/clone.json", cloned(True))
    write_json(options.out / "posttraining/cloning/clone_4/clone.json", cloned(True))
    write_json(options.out / "split.json", {"outcomes": [True, False, None, True]})
    with Runner(options.out, steps_of(options, RECORDED), shown=io.StringIO()) as runner:
        page = write_page(WayResults(options, runner)).read_text()
    assert "2 succeed, 1 fail" in page, "of a recording without an outcome neither is known"
    assert "clone 4, pi05, seed 4, learns" in page and "clone, openvla_oft, seed 3" in page
    for row, true in zip(rows, (0.2, 0.4, 0.4, 0.3), strict=True):
        row["true_success"] = {**value, "value": true}
    write_json(options.out / "ranking.json", {"policies": rows})
    assert "cloning/clone/policy" in learning(), "of most true success; of equals the first in imagination"
    with Runner(options.out, steps_of(options, RECORDED), shown=io.StringIO()) as runner:
        assert (
            "clone, openvla_oft, seed 3, learns: it truly succeeds most"
            in write_page(WayResults(options, runner)).read_text()
        )
    for damaged in ("[]", "{", '{"policies": []}', '{"policies": ["a"]}'):
        (options.out / "ranking.json").write_text(damaged)
        with pytest.raises(DataError, match=r"ranking.json is no ranking of clones .* Remove it"):
            learning()


def cloned(is_better: bool) -> dict[str, Any]:
    verdict = {"is_better": is_better, "text": "It sees so much.", "next_step": "" if is_better else "Record more."}
    return {"best": {"verdict": verdict}, "history": [{"iteration": 1, "loss": 0.5}]}


def test_the_page_has_what_is_imagined_where_something_moves(tmp_path: Path) -> None:
    """A world model follows its actions, and what decides the task fades: of this the page had nothing."""
    run = tmp_path / "posttraining/video2world/world_model"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"iteration": 1}')
    by_chunk = {"PSNR": [31.04, 29.0], "PSNR where something moves": [17.42, 14.8], "SSIM": [0.9, 0.8]}
    figures = {"verdict": {"word": "follows", "sentence": "follows its actions"}, "by_chunk": by_chunk}
    contents = {
        "world_model": (f"{WORLD_MODEL}/stop_rule.json", {"text": ""}),
        "imagined": ("imagined/figures.json", figures),
    }
    steps = writing(tmp_path, contents | {"gate": ("card.json", {})})
    gone(replace(OPTIONS, out=tmp_path), steps, until=2)
    page = (tmp_path / "index.html").read_text()
    assert "PSNR where something moves, by chunk: 17.4, 14.8" in page and "SSIM, by" not in page


def test_a_clone_that_sees_nothing_is_announced_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stood far down on the page alone, without its cure."""
    options = replace(OPTIONS, out=tmp_path, suite="", policies=("pi05",), clones=1)
    (tmp_path / "posttraining/cloning/clone").mkdir(parents=True)
    contents: dict[str, tuple[str, Any]] = {
        "clone": ("posttraining/cloning/clone/clone.json", cloned(False)),
        "learning": ("learning", ""),
    }
    steps = writing(tmp_path, contents | {"gate": ("card.json", _card("doubtful", ""))})
    monkeypatch.setattr(ways, "steps_of", lambda *_: steps)
    monkeypatch.setattr(ways, "look", lambda _: RECORDED)
    imagined(phases_of(options)[0], 0.1, 0.5)
    assert ways.improve(options).word == "unmeasured"
    assert "It sees so much. Record more." in capsys.readouterr().out
    page = (tmp_path / "index.html").read_text()
    assert "blind" in page and "It sees so much. Record more." in page
    hardly = cloned(False)
    hardly["best"]["verdict"]["is_better"] = True
    write_json(tmp_path / "posttraining/cloning/clone/clone.json", hardly)
    assert "hardly sees" in write_page(WayResults(options, Runner(tmp_path, steps))).read_text()


def test_recordings_are_looked_at_before_anything_is_trained(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "data", fps=10)
    columns = {"action": numpy.zeros((5, 2), numpy.float32), "next.success": numpy.zeros(5, numpy.float32)}
    video = torch.zeros(3, 5, 96, 160, dtype=torch.uint8)
    for _ in range(2):
        writer.add(Recording(columns, {"observation.images.a": video, "observation.images.b": video}, "a task"))
    writer.finish()
    options = replace(OPTIONS, data=tmp_path / "data")
    with pytest.raises(ValueError, match=r"has 2 cameras: name one, --camera "):
        look(options)
    found = look(replace(options, camera="a"))
    assert found == RecordedSizes((32, 64), (96, 160), "observation.images.a", 2, 4, 10.0, ("a task",))
    with pytest.raises(DataError):
        look(replace(options, data=tmp_path))
    both = look(replace(options, camera="a+b"))
    assert (both.size, both.recorded_size) == ((32, 64), (96, 160))
    assert both.camera == "observation.images.a+observation.images.b"
    with pytest.raises(ConfigError, match=r"there is no state 'observation\.state'"):
        look(replace(options, camera="a", state=True))
    larger = replace(options, camera="a", picture_size=128)
    assert look(larger).size == (80, 128) and look(replace(larger, picture_size=90)).size == (48, 80)
    words = [step.words for step in steps_of(larger, look(larger)) if step.name in ("tokenizer", "world_model")]
    sizes = [f"+model.config.arguments.size={side}" for side in (128, 64)]
    for kind, size, is_given in (("conv", 128, True), ("conv", 64, False), ("pi05", 128, False)):
        of_kind = replace(larger, picture_size=size, policies=(kind,))
        (clone,) = (step for step in steps_of(of_kind, look(of_kind)) if step.name == "clone")
        assert [one in clone.words for one in sizes] == [is_given, False], "convolutions see as large pictures"
    assert all("[80,128]" in " ".join(of_step) or "80 128" in " ".join(of_step) for of_step in words)


WRITE = "import os, sys; os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True);"  # pathlib is half of such a process
WRITE += "open(sys.argv[1], 'w').write(sys.argv[2])"


def writing(folder: Path, contents: Mapping[str, tuple[str, Any]]) -> list[WayStep]:
    """Steps by name, each of which writes one file."""
    return [
        WayStep(name, name, ("-IS", "-c", WRITE, str(folder / file), json.dumps(content)), makes=(folder / file,))
        for name, (file, content) in contents.items()
    ]


def imagined(phase: Phase, *values: float) -> None:
    """What learning and the reward leave: imagined values, where a success is worth .2 more than a failure."""
    phase.run.mkdir(parents=True, exist_ok=True)
    rows = [
        {"iteration": 1},
        *({"iteration": 20 * i, "val/imagined_greedy_return": value} for i, value in enumerate(values)),
    ]
    (phase.run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = {"held out": {}, "imagined, by the outcome": {"value_of_successes": 0.5, "value_of_failures": 0.3}}
    write_json(phase.reward / "quality.json", {"ends": ends, "quality": {}})


def rate(successes: int) -> Mapping[str, Any]:
    return {"success": Rate(successes, 200).as_dict()}


def gone(options: Options, steps: list[WayStep], *, until: int | None = None) -> tuple[WayVerdict, set[str]]:
    """The verdict of a way that went so far, with a page of it, and the steps that are done."""
    with Runner(options.out, steps, shown=io.StringIO()) as runner:
        for step in steps[:until]:
            if step.name not in WayResults(options, runner).left_out():
                runner.run(step)
        results = WayResults(options, runner)
        page, found = write_page(results).read_text(), results.verdict()
        assert all(html.escape(text) in page for text in (found.sentence, *found.notes)) and len(found.sentence) < 250
        assert json.loads((options.out / "verdict.json").read_text())["verdict"] == found.word
        return found, {step.name for step in steps if results.is_done(step.name)}


@pytest.mark.parametrize(
    ("verdict", "before", "after", "word"),
    [
        ("go", 40, 70, "better"),
        ("go", 150, 195, "better"),
        ("go", 40, 50, "unclear"),
        ("doubtful", 70, 30, "worse"),
        ("no", 40, 70, "refused"),
        ("overruled", 40, 70, "better"),
        ("go", 40, None, "unfinished"),
    ],
)
def test_the_verdict_follows_from_what_was_measured(
    tmp_path: Path, verdict: str, before: int, after: int | None, word: str
) -> None:
    contents: dict[str, tuple[str, Any]] = dict(
        gate=("card.json", _card("no" if verdict == "overruled" else verdict, "its reason")), learning=("learnt", "")
    )
    contents["before"] = "before/evaluation.json", rate(before)
    contents["after"] = "after/evaluation.json", after and rate(after)
    options = replace(OPTIONS, out=tmp_path, allow_unchecked=verdict == "overruled")
    steps = writing(tmp_path, contents)
    found, _ = gone(options, steps, until=None if after else -1)
    assert found.word == word
    assert (word == "refused") == found.next_step.startswith("do this. --phases 1 records")
    assert (after == 195) == found.next_step.startswith("Use RUN/policy"), "a success of .975 asks for no phase"
    assert (verdict == "overruled") == ("the gate says no, which was overruled" in str(found.notes))
    imagined(phases_of(options)[0], 0.1, 0.5)
    untried = WayResults(replace(options, suite=""), Runner(tmp_path, steps)).verdict()
    assert untried.word == (word if word in ("refused", "unfinished") else "unmeasured")


@pytest.mark.parametrize(("verdict", "word"), [("no", "refused"), ("go", "unclear")])
def test_a_way_tells_what_the_choice_of_a_clone_brought(tmp_path: Path, verdict: str, word: str) -> None:
    options = replace(OPTIONS, out=tmp_path, policies=("openvla_oft", "pi05"))
    rows = [{"policy": f"RUN/{name}/policy", "value": {"value": 0.5}} for name in ("clone_2", "clone")]
    contents = {
        "choice": ("ranking.json", {"policies": rows, "problem": ""}),
        "gate": ("card.json", _card(verdict, "its reason")),
        "learning": ("learnt", ""),
        "before": ("before/evaluation.json", rate(40)),
        "chosen": ("chosen/evaluation.json", rate(90)),
        "after": ("after/evaluation.json", rate(90)),
    }
    steps = writing(tmp_path, contents)
    found, done = gone(options, steps)
    assert {"learning", "after"} & done == ({"learning", "after"} if verdict == "go" else set())
    assert found.word == word and (verdict == "no") != ("true success 0.450 before, 0.450 after" in found.sentence)
    assert verdict == "no" or found.next_step.startswith("Give one more of --phases")
    said = "of 2 clones clone 2, pi05, seed 0, is first in imagination: its true success is 0.450, that of clone,"
    assert f"{said} openvla_oft, seed 0, 0.200 (+0.250, with 95 %" in str(found.notes)

    (tmp_path / "ranking.json").write_text(json.dumps({"policies": rows[::-1], "problem": ""}))
    plan = Runner(tmp_path, steps)
    assert "chosen" in WayResults(options, plan).left_out()
    assert (
        "of 2 clones clone, openvla_oft, seed 0, is first in imagination" in WayResults(options, plan).verdict().notes
    )
    for row in rows:
        row["true_success"] = {"value": 0.5}
    (tmp_path / "ranking.json").write_text(json.dumps({"policies": rows[::-1], "problem": ""}))
    assert "of 2 clones clone, openvla_oft, seed 0, truly succeeds most" in WayResults(options, plan)._choice()
    if verdict == "go":  # what the gate doubts of the clone comes before more episodes of it
        write_json(tmp_path / "card.json", {**_card("doubtful", "its reason"), "next_step": CLONE})
        for rates, expected in (((40, 45), "unclear"), ((40, 190), "better")):
            for name, of_200 in zip(("before", "after"), rates, strict=True):
                write_json(tmp_path / name / "evaluation.json", rate(of_200))
            found = WayResults(options, plan).verdict()
            assert found.word == expected and found.next_step.startswith(CLONE) is (expected == "unclear")


def test_a_simulator_that_was_played_can_teach_itself(tmp_path: Path) -> None:
    def said(**given: Any) -> str:
        options = replace(OPTIONS, out=tmp_path / "my run", imports=("mine",), **given)
        return WayResults(options, Runner(options.out, steps_of(options, RECORDED)))._in_simulator()

    words = shlex.split(said(suite="gym:ID?sentence=don't öffne").partition(": ")[2])
    root, *_, path, env = words
    assert root == f"IMAGINAIRE_OUTPUT_ROOT={tmp_path / 'my run'}" and "job.name=simulator" in words
    assert path == f"model.config.policy.path={tmp_path / 'my run' / 'policy'}" and "mine" in words
    suite = r"gym:ID?sentence=don\'t öffne&image_size=96"
    assert env == f"model.config.env='{suite}'", "in the size that was played"
    assert said(suite="gym:ID?image_size=64").count("image_size=64") == 1
    assert said(suite="mine:Robot") == said(policies=("pi05",)) == "", "of a robot, and of what was not tried so"


@pytest.mark.parametrize(
    ("truly", "count", "until", "word"),
    [
        (0.97, 100, None, "full"),
        (0.96, 100, None, "better"),
        (1.0, 99, None, "better"),
        (0.97, 100, "learning", "better"),
        (0.5, 100, "refused", "refused"),
    ],
)
def test_nothing_is_learnt_of_a_clone_that_truly_succeeds_nearly_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truly: float, count: int, until: str | None, word: str
) -> None:
    """A folder whose policy has learnt goes on as it began, and a step that failed and is left out decides nothing."""
    options = replace(OPTIONS, out=tmp_path, suite="gym:any", policies=("openvla_oft", "pi05"))
    value = {"value": truly if until != "learning" else 0.5, "count": count}
    rows = [{"policy": f"RUN/{name}/policy", "true_success": value} for name in ("clone_2", "clone")]
    contents: dict[str, tuple[str, Any]] = {"choice": ("ranking.json", {"policies": rows})}
    contents["gate"] = "card.json", _card("no" if word == "refused" else "go", "its reason")
    contents |= {"learning": ("learning", ""), "export": ("learnt/weights", "learnt")}
    for name, of_200 in {"trial_before": 40, "trial_after": 50}.items():
        contents[name] = f"{name}/evaluation.json", rate(of_200)
    for name, of_200 in {"before": 90, "chosen": 100, "after": 195}.items():
        contents[name] = f"{name}/evaluation.json", rate(of_200)
    clone = tmp_path / "posttraining/cloning/clone_2/policy"
    clone.mkdir(parents=True)
    (clone / "weights").write_text("clone_2")
    steps = writing(tmp_path, contents)
    monkeypatch.setattr(ways, "steps_of", lambda *_: steps)
    monkeypatch.setattr(ways, "look", lambda _: RECORDED)
    monkeypatch.setattr(ways, "require_suite", lambda *_: None)
    if until == "learning":  # before its trials; then the clones are played again, and the choice is the same
        gone(options, steps, until=4)
        rows[0]["true_success"] = rows[1]["true_success"] = {"value": truly, "count": count}
        (tmp_path / "ranking.json").write_text(json.dumps({"policies": rows}))
    if word == "full":
        write_json(tmp_path / "steps/learning.json", {"state": "failed", "error": "of before"})
    found = ways.improve(options)
    assert found.word == word and found.sentence in (tmp_path / "index.html").read_text()
    assert (tmp_path / "policy/weights").read_text() == ('"learnt"' if word == "better" else "clone_2")
    assert (tmp_path / "chosen").exists() and (tmp_path / "card.json").exists() == (word != "full")
    assert (tmp_path / "learning").exists() == (tmp_path / "after").exists() == (word == "better")
    if word == "full":
        assert "in 0.500 of 200 episodes by whose starts it was not chosen" in found.sentence
        assert "of 2 clones clone 2, pi05, seed 0, truly succeeds most" in str(found.notes)
        assert found.next_step.startswith("Use RUN/policy")


@pytest.mark.parametrize(
    ("after", "word", "second", "anew"),
    [
        (30, "kept", 30, 20),
        (40, "better", 30, 20),
        (50, "better", 90, 20),
        (30, "better", 30, 60),
        (30, "better", 50, 60),
        (30, "better", 30, 40),
        (30, "better", None, 60),
    ],
)
def test_what_became_worse_in_a_trial_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, word: str, second: int | None, anew: int
) -> None:
    """A tie is kept: by the truth that follows on other starts it may be better. A later phase also has a new clone,
    without a gate's leave, too (None: it says no)."""
    options = replace(OPTIONS, out=tmp_path, suite="gym:any", phases=1)
    contents: dict[str, tuple[str, Any]] = {}
    is_refused, second = second is None, second or 0
    policies = {"": (after, "learnt/weights"), "_2": (second, "phase_2/learnt/weights")}
    for end, (tried, weights) in policies.items():
        if end:
            contents["clone_phase_2"] = "posttraining/cloning/clone_phase_2/policy/weights", "the new clone"
        contents[f"trial_before{end}"] = f"trial_before{end}/evaluation.json", rate(40)
        if end:
            contents["trial_clone_2"] = "trial_clone_2/evaluation.json", rate(anew)
        card = f"phase{end}/card.json" if end else "card.json"
        contents[f"gate{end}"] = card, _card("no" if end and is_refused else "go", "")
        contents[f"learning{end}"] = f"learning{end}", ""
        contents[f"export{end}"] = weights, f"learnt{end}"
        contents[f"trial_after{end}"] = f"trial_after{end}/evaluation.json", rate(tried)
        if not end:
            contents["before"] = "before/evaluation.json", rate(40)
        contents[f"after{end}"] = f"after{end}/evaluation.json", rate(95 if end else 90)
    for folder in ("cloning/clone/policy", "cloning/clone_phase_2/policy", "reinforcement_learning/policy_2"):
        (tmp_path / "posttraining" / folder).mkdir(parents=True)
    (tmp_path / "posttraining/cloning/clone/policy/weights").write_text("the clone")
    (phases_of(options)[1].run / "metrics.jsonl").write_text('{"iteration": 1, "train/approx_kl": 0.1}')
    (tmp_path / "phase_2").mkdir()

    def plan(*_: Any) -> list[WayStep]:
        return writing(tmp_path, contents | {"learning_2": ("learning_2", phases_of(options)[1].policy.parent.name)})

    monkeypatch.setattr(ways, "steps_of", plan)
    monkeypatch.setattr(ways, "look", lambda _: RECORDED)
    monkeypatch.setattr(ways, "require_suite", lambda *_: None)
    found = ways.improve(options)
    assert found.word == word
    first, later = ((phase.result / "weights").read_text() for phase in phases_of(options))
    assert first == ('"learnt"' if after >= 40 else "the clone")
    learner = tmp_path / "learning_2"  # what learns there is known once both have been tried
    assert is_refused != learner.exists() and (is_refused or ("clone_phase_2" in learner.read_text()) == (anew >= 40))
    kept = '"the new clone"' if anew >= 40 else first
    assert later == (kept if second < max(40, anew) else '"learnt_2"')
    is_new = second >= 40 or anew >= 40
    assert (tmp_path / "after").exists() == (after >= 40) and (tmp_path / "after_2").exists() == is_new
    if word == "kept":
        assert "it succeeded in 0.150 of 200 true episodes, and 0.200 before" in found.sentence
    else:
        is_worse = second < max(40, anew) and not is_refused
        assert ("learnt in phase 2 was worse and is not kept" in str(found.notes)) == is_worse
        assert ("phase 2 ends with its new clone" in str(found.notes)) == (anew >= 40)
        assert ("0.475 after" if is_new else "0.450 after") in found.sentence
    page = (tmp_path / "index.html").read_text()
    assert found.sentence in page and (is_refused or f"and {max(40, anew) / 200:.3f} before" in page)
    for name in ("trial_after", "trial_clone_2"):
        (tmp_path / name / "evaluation.json").write_text("{}")
        with pytest.raises(DataError, match=f"{name}/evaluation.json is no evaluation .* Remove .*/{name}:"):
            ways.improve(options)


def test_the_best_of_the_iterations_that_were_saved_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last weights were tried alone: on sweep-into .260 truly, where .445 had been before. The best one by chance,
    .39 beside .37 of the last, had .385 of 200 other starts, that had .450. By the watch a run ends before some were
    saved, and those of a run before have rates, too."""
    options = replace(OPTIONS, out=tmp_path, suite="gym:any")
    monkeypatch.setattr(ways, "look", lambda _: RECORDED)
    monkeypatch.setattr(ways, "require_suite", lambda *_: None)
    (phase,) = phases_of(options)
    phase.policy.mkdir(parents=True)
    (phase.policy / "weights").write_text("the clone")
    true = {20: 72, 40: 90, 60: 82, 80: 200}
    contents: dict[str, tuple[str, Any]] = {"gate": ("card.json", _card("doubtful", "")), "learning": ("a.txt", "")}
    contents |= {f"look_{i}": (f"look_{i}/evaluation.json", rate(of_200)) for i, of_200 in true.items()}
    later = {"trial_before": 40, "trial_after": 50, "before": 40, "after": 60}

    def plan(*_: Any) -> list[WayStep]:
        made = {"export": ("learnt/weights", str(phases_of(options)[0].best))}
        rates = {name: (f"{name}/evaluation.json", rate(of_200)) for name, of_200 in later.items()}
        return writing(tmp_path, contents | made | rates)

    monkeypatch.setattr(ways, "steps_of", plan)
    for iteration in (20, 40, 60):
        phase.weights(iteration).parent.mkdir(parents=True, exist_ok=True)
        phase.weights(iteration).touch()
    (phase.run / "metrics.jsonl").write_text('{"iteration": 1, "train/approx_kl": 0.1}')
    write_json(tmp_path / "look_80/evaluation.json", rate(200))
    assert ways.improve(options).word == "better"
    assert (phase.result / "weights").read_text() == '"60"', "within a standard error, .05"
    assert not (tmp_path / "steps/look_80.json").exists()
    page = (tmp_path / "index.html").read_text()
    assert "Iteration 60 is tried" in page and "iteration 20" in page and "iteration 80" not in page
    assert phases_of(options)[0].best == 60
    phase.weights(160).touch()  # it went on by hand
    write_json(tmp_path / "look_160/evaluation.json", rate(90))
    assert phases_of(options)[0].best == 160 and "look_160" in {step.name for step in steps_of(options, RECORDED)}
    assert phases_of(replace(options, suite=""))[0].best is None, "nothing is played"
    assert last_of_best({20: 0.33, 40: 0.39, 60: 0.35, 80: 0.37}, 100) == 80
    assert last_of_best({20: 0.36, 40: 0.45, 60: 0.41, 80: 0.26}, 100) == 60
    assert last_of_best({}, 100) is None and last_of_best({20: 1.0, 40: 0.99}, 100) == 20
    config = compose(DEFAULT_CONFIG, ["experiment=vla_grpo_recordings_conv"])
    every, last = config.checkpoint.save_iter, config.trainer.max_iter
    assert tuple(range(every, last + 1, every)) == SAVED_AT


@pytest.mark.parametrize("suite", ["gym:any", "mine:Robot", ""])
def test_learning_that_the_watch_stops_at_once_keeps_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str
) -> None:
    """The way ended with an error, without a result."""
    options = replace(OPTIONS, out=tmp_path, suite=suite)
    (phase,) = phases_of(options)
    phase.policy.mkdir(parents=True)
    (phase.policy / "weights").write_text("the clone")
    run = phase.run.relative_to(tmp_path)
    ended = "approx_kl is 0.3, above 0.2: lower optimizer.lr. So the run has ended at iteration 2."
    contents: dict[str, tuple[str, Any]] = {"gate": ("card.json", _card("doubtful", ""))}
    contents["learning"] = f"{run}/{WATCHED}", {"looks": [{"iteration": 2}], "ended": ended}
    contents["export"] = "learnt/weights", ""
    contents |= {
        name: (f"{name}/evaluation.json", rate(40)) for name in ("trial_before", "trial_after", "before", "after")
    }
    imagined(phase, 0.1, 0.5)
    steps = writing(tmp_path, contents)
    for name, value in (("steps_of", steps), ("look", RECORDED), ("require_suite", None)):
        monkeypatch.setattr(ways, name, lambda *_, value=value: value)
    found = ways.improve(options)
    assert found.word == "kept" and ended.rstrip(".") in found.sentence and found.next_step.startswith("Use the clone")
    assert (phase.result / "weights").read_text() == "the clone"
    assert found.sentence in (tmp_path / "index.html").read_text() and (tmp_path / "before").exists()
    assert not any((tmp_path / name).exists() for name in ("learnt", "trial_before", "trial_after", "after"))
    (phase.run / WATCHED).write_text(json.dumps({"looks": [{}, {}], "ended": ended}))
    assert ways.improve(options).word == ("unclear" if suite else "unmeasured"), (
        "a later look goes back to what is right"
    )


@pytest.mark.parametrize(
    ("verdict", "values", "word", "kept", "said"),
    [
        ("doubtful", (0.2, 0.45), "unmeasured", "learnt", "rose by 1.25 of what a success is worth above a failure"),
        ("go", (0.2, 0.345), "unmeasured", "learnt", "rose by 0.72 of what a success"),
        ("go", (0.2, 0.335), "kept", "the clone", "What was learnt is not kept: its imagined value rose by 0.68"),
        ("go", (0.4, 0.3), "kept", "the clone", "its imagined value fell by 0.50 of what"),
        ("go", (), "kept", "the clone", "changed by an unknown share of what"),
        ("no", (), "refused", "the clone", "The gate says no"),
    ],
)
def test_where_nothing_can_be_played_what_imagination_gained_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verdict: str,
    values: tuple[float, ...],
    word: str,
    kept: str,
    said: str,
) -> None:
    """A robot's policy that had fallen from .755 to .235 would have been the result: its imagined value rose by .65."""
    options = replace(OPTIONS, out=tmp_path, suite="")
    (phase,) = phases_of(options)
    phase.policy.mkdir(parents=True)
    (phase.policy / "weights").write_text("the clone")
    imagined(phase, *values)
    contents = {"gate": ("card.json", _card(verdict, "its reason")), "learning": ("a.txt", "")}
    steps = writing(tmp_path, {**contents, "export": ("learnt/weights", "learnt")})
    for name, value in (("steps_of", steps), ("look", RECORDED)):
        monkeypatch.setattr(ways, name, lambda *_, value=value: value)
    found = ways.improve(options)
    assert found.word == word and said in found.sentence
    assert (tmp_path / "policy/weights").read_text().strip('"') == kept
    asked = "cloning/clone/policy and 20 with RUN/learnt, from the same starts; count. Recorded"
    assert (verdict == "no") != (asked in found.next_step)
    if verdict != "no":
        assert "--played" not in ways.improve(replace(options, played=tmp_path)).next_step
    with Runner(tmp_path, steps) as runner:
        imagined(phase, 0.2, 0.6, 0.1)
        (phase.run / "metrics.jsonl").open("a").write('{"iteration": 40, "watch/returned_to": 20.0}\n')
        assert WayResults(options, runner).gain(phase) == pytest.approx(2.0), "of the weights that a watch went back to"
        (phase.run / "metrics.jsonl").open("a").write('{"iteration": 40, "watch/returned_to": 2.0}\n')
        assert math.isnan(WayResults(options, runner).gain(phase)), "weights whose value was not measured"
        (phase.run / "metrics.jsonl").unlink()
        assert math.isnan(WayResults(options, runner).gain(phase)), "and nothing was drawn of it either"


def test_a_way_without_a_suite_goes_on_where_its_clone_is_being_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the clone before had learnt was still there: the way removed RUN/policy and ended with a traceback."""
    options = replace(OPTIONS, out=tmp_path, suite="")
    (phase,) = phases_of(options)
    clone = str(phase.policy.relative_to(tmp_path))
    imagined(phase, 0.2, 0.25)
    contents = {"check": ("b.txt", ""), "clone": (f"{clone}/weights", "clone"), "learning": ("a.txt", "")}
    check, *others = writing(tmp_path, {**contents, "export": ("learnt/weights", "learnt")})
    steps = [check, *(replace(step, reads=(phase.policy,) if step.name == "learning" else ()) for step in others)]
    for name, value in (("steps_of", steps), ("look", RECORDED)):
        monkeypatch.setattr(ways, name, lambda *_, value=value: value)
    phase.card.write_text(json.dumps(_card("doubtful", "")))
    assert ways.improve(options).word == "kept"
    shutil.rmtree(phase.policy)
    assert ways.improve(options).word == "kept" and (phase.result / "weights").exists()


def test_a_way_goes_on_where_learning_ended_before_its_first_record(tmp_path: Path) -> None:
    """Its page named the empty file in place of the error, and no later start came to learning any more."""
    (phase,) = phases_of(options := replace(OPTIONS, out=tmp_path))
    phase.run.mkdir(parents=True)
    (phase.run / "metrics.jsonl").touch()
    found, _ = gone(
        options, writing(tmp_path, {"gate": ("card.json", _card("go", "")), "learning": ("a.txt", "")}), until=1
    )
    assert found.word == "unfinished"
    for damaged in (b"no record\n", b"\xff\n"):
        (phase.run / "metrics.jsonl").write_bytes(damaged)
        with pytest.raises(DataError, match=r"metrics.jsonl is damaged: .* or remove .*policy, which is then made"):
            WayResults(options, Runner(tmp_path, [])).lines(phase)


def test_a_named_suite_is_no_reason_that_imagination_gained(tmp_path: Path) -> None:
    """Its page gave a gain of .10 as the reason why what was learnt is kept."""
    options = replace(OPTIONS, out=tmp_path, suite="libero_spatial")
    (phase,) = phases_of(options)
    imagined(phase, 0.2, 0.22)
    contents: dict[str, tuple[str, Any]] = {"gate": ("card.json", _card("go", "")), "learning": ("a.txt", "")}
    contents |= {
        "export": ("learnt/weights", ""),
        **{one: (f"{one}/evaluation.json", rate(40)) for one in ("before", "after")},
    }
    gone(options, writing(tmp_path, contents))
    page = (tmp_path / "index.html").read_text()
    assert "rose by 0.10" in page and "What it learnt is kept: the suite may have too few starts for a trial." in page


@pytest.mark.parametrize(("second", "word"), [("go", "better"), ("no", "refused"), (None, "unfinished")])
def test_a_later_phase_follows_where_the_gate_says_no(tmp_path: Path, second: str | None, word: str) -> None:
    """Its own true episodes are what a policy lacks that imagination is too kind to."""
    options = replace(OPTIONS, out=tmp_path, suite="gym:any", phases=1)
    first, later = (phase.folder.relative_to(tmp_path) for phase in phases_of(options))
    names = "gate learning export trial_before before after collect_2 gate_2 learning_2 export_2 after_2"
    contents: dict[str, tuple[str, Any]] = {name: (f"{name}.txt", "") for name in names.split()}
    contents["gate"] = f"{first}/card.json", _card("no", "the first")
    if second is not None:
        contents["gate_2"] = f"{later}/card.json", _card(second, "the second")
    contents |= {name: (f"{name}/evaluation.json", rate(n)) for name, n in (("before", 40), ("after_2", 70))}
    steps = writing(tmp_path, contents)
    found, done = gone(options, steps, until=7 if second is None else None)
    assert {"before", "collect_2"} <= done and not {"learning", "export", "trial_before", "after"} & done
    assert ("learning_2" in done) == (second == "go") and found.word == word
    assert word != "better" or "and no to phase 1" in str(found.notes)
    assert word != "refused" or "the second" in found.notes
    phase = phases_of(options)[0]
    for content in ("clone", "another clone"):
        phase.policy.mkdir(parents=True, exist_ok=True)
        (phase.policy / "weights").write_text(content)
        keep(WayResults(options, Runner(tmp_path, steps)))
        assert (phase.result / "weights").read_text() == content


def _card(verdict: str, reason: str) -> dict[str, Any]:
    return {"verdict": verdict, "reasons": [reason], "figures": {"area": {"mean": 0.8}}, "next_step": "do this"}


def test_the_interval_of_a_change_is_newcombes() -> None:
    """56 of 70 against 48 of 80: 0.2 with 0.0524 to 0.3339, of Newcombe (1998), table II, method 10."""
    low, high = difference(Rate(48, 80).as_dict(), Rate(56, 70).as_dict())
    assert low == pytest.approx(0.0524, abs=2e-4) and high == pytest.approx(0.3339, abs=2e-4)
