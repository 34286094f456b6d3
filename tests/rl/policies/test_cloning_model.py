# SPDX-License-Identifier: Apache-2.0
import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.data.split import make_split, write_split
from cosmos_predict2.rl.episodes.policy_evaluation import Rate
from cosmos_predict2.rl.interfaces import Decision, PolicyDefaults
from cosmos_predict2.rl.policies.cloning import CloneWindows
from cosmos_predict2.rl.policies.cloning_model import CloningConfig, KeepBestPolicy, shifted
from cosmos_predict2.rl.policies.files import read_policy
from cosmos_predict2.rl.policies.null import Constant, by_errors, by_success, decision_errors
from cosmos_predict2.rl.policies.recorded_windows import RecordedWindows
from imaginaire.buildable import buildable
from imaginaire.errors import ConfigError, DataError
from scripts import train
from tests.multiprocess import run_distributed

FRAMES, SIDE = 9, 16
RUN = "checkpoints/posttraining/cloning/clone_recordings"


def record(folder: Path, num: int = 24, **changed: Any) -> Path:
    """Episodes whose pictures are as bright as their actions are large; every third one fails, and is still."""
    writer = Writer(folder, fps=5, robot="own")
    for episode in range(num):
        success = episode % 3 > 0
        level = (episode % 8) / 8 if success else 0.0
        video = torch.full((3, FRAMES, SIDE, SIDE), int(30 + 200 * level), dtype=torch.uint8)
        actions = numpy.full((FRAMES, 2), level, numpy.float32)
        actions[:, 1] = numpy.linspace(-1, 1, FRAMES)
        columns = {"action": actions, "next.success": numpy.full(FRAMES, success, numpy.float32), **changed}
        writer.add(Recording(columns, {"observation.images.top": video}, "go"))
    writer.finish()
    return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    record(folder / "my_data")
    write_split(folder / "split.json", make_split(folder / "my_data"))
    return folder


def command(recordings: Path, *overrides: str) -> int:
    data = [f"dataloader_train.dataset.{key}" for key in ("path", "split_file", "chunk")]
    values = (recordings / "my_data", recordings / "split.json", 4)
    given = [f"{key}={value}" for key, value in zip(data, values, strict=True)]
    few = ["trainer.validation_iter=2", "checkpoint.save_iter=2", "dataloader_train.batch_size=4"]
    return train.main(["--", "experiment=clone_recordings", "model.config.num_knots=2", *given, *few, *overrides])


def test_windows_are_of_the_successes_of_a_part(recordings: Path) -> None:
    split = make_split(recordings / "my_data")
    paths = (str(recordings / "my_data"), str(recordings / "split.json"))
    found = RecordedWindows(*paths, chunk=4)
    assert len(found) == 5 * sum(bool(split.outcomes[i]) for i in split.train) == 5 * len(found.demonstrations.actions)
    assert len(RecordedWindows(paths[0], chunk=4)) + len(RecordedWindows(paths[0], part="val", chunk=4)) == 24 * 5
    episode = next(i for i in split.train if split.outcomes[i])
    window = found[3]
    assert float(window["actions"][0, 0]) == (episode % 8) / 8 and window["task"] == "go"
    assert abs(float(window["full_image"].float().mean()) - (30 + 200 * (episode % 8) / 8)) < 8
    assert found.windows.recorded_size == (SIDE, SIDE)
    few = RecordedWindows(*paths, chunk=4, most=4)
    assert few.places == [found.places[k * len(found) // 4] for k in range(4)]


def test_pictures_are_kept_while_there_is_room(recordings: Path) -> None:
    size = SIDE * SIDE * 3 / 2**20
    data = RecordedWindows(str(recordings / "my_data"), chunk=4, cache_mib=7 * size)  # of one episode's five
    pictures = [data[k]["full_image"] for k in range(10)]
    assert list(data._kept) == [0] and data._room < 5 * SIDE * SIDE * 3
    others = RecordedWindows(str(recordings / "my_data"), chunk=4, cache_mib=0)
    assert all(torch.equal(others[k]["full_image"], picture) for k, picture in enumerate(pictures)) and not others._kept


def test_recordings_that_are_not_given_are_asked_for_by_their_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--", "experiment=clone_recordings_conv"]) == 2
    assert "dataloader_train.dataset.path=DIR" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["pi05", pytest.param("openvla_oft", marks=pytest.mark.long)])
def test_a_run_resumes_bit_for_bit_and_gives_its_best_policy(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    own = [f"model.config.policy={policy}", "trainer.max_iter=4", "model.config.ema.enabled=true"]
    own += ["dataloader_train.dataset.action_keys=[action]"]
    for folder, lengths in ((whole, (4,)), (parts, (2, 4))):
        folder.mkdir()
        monkeypatch.chdir(folder)
        for length in lengths:
            assert command(recordings, *own, f"trainer.max_iter={length}", "scheduler.cycle_lengths=[4]") == 0
    states = [torch.load(folder / RUN / "checkpoints/model/iter_000000004.pt") for folder in (whole, parts)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    figures = [json.loads((folder / RUN / "clone.json").read_text()) for folder in (whole, parts)]
    assert figures[0]["best"] == figures[1]["best"] and figures[0]["history"] == figures[1]["history"]
    assert figures[0]["best"]["loss"] == min(one["loss"] for one in figures[0]["history"])
    assert figures[0]["best"]["iteration"] == 4 and len(figures[0]["history"]) == 3
    assert figures[0]["data"]["action_keys"] == ["action"]
    best, card = read_policy(str(whole / RUN))
    averaged, _ = read_policy(str(whole / RUN / "checkpoints/model/iter_000000004.pt"), "net_ema")
    assert card.about["iteration"] == 4 and best.action_dim == 2 and best.sentences == ("go",)
    assert best.contract.rate == 5 and not best.contract.names and best.recorded_size == (SIDE, SIDE)
    folder_alone = type(best)(str(whole / RUN / "policy"))  # as an experiment reads it that learns on
    for each in (best, folder_alone):
        assert (each.config if policy == "pi05" else each).correlation == 0.9, "the clone draws as it learns"
        assert policy == "pi05" or each.temperature == 0.3
    seen = CloneWindows(torch.full((1, SIDE, SIDE, 3), 99, dtype=torch.uint8), torch.zeros(1, 4, 2), ["go"]).observation
    decided = [
        each.act(seen, mode="greedy", generators=[torch.Generator().manual_seed(0)]).actions_E_A_D
        for each in (best, averaged)
    ]
    torch.testing.assert_close(*decided)


@buildable("policy")
class Bare(torch.nn.Module):
    """A policy that has no member which may be left out."""

    def __init__(self, action_dim: int, chunk: int, path: str = "") -> None:
        super().__init__()
        self.action_dim, self.chunk, self.arguments = action_dim, chunk, dict(action_dim=action_dim, chunk=chunk)
        self.mean = torch.nn.Parameter(torch.zeros(chunk, action_dim))

    def act(self, observation: Any, *, mode: str, generators: Any, temperature: float = 1.0) -> Decision:
        return Decision(self.mean.detach().expand(len(generators), -1, -1), {})

    def record_of(self, observation: Any, actions: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"actions": actions}

    def cloning_loss(self, record: dict[str, torch.Tensor], generator: torch.Generator) -> torch.Tensor:
        return (record["actions"] - self.mean).square().mean()


def test_a_policy_may_leave_out_what_is_optional(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(recordings, "trainer.max_iter=2", f"model.config.policy={__name__}:Bare") == 0
    assert isinstance(read_policy(str(tmp_path / RUN))[0], Bare)


def test_draws_are_narrow_unless_given_or_of_a_base() -> None:
    assert CloningConfig().draws == dict(noise=None, correlation=0.9, temperature=0.3)
    assert CloningConfig(base="there").draws == dict(noise=None, correlation=None, temperature=None)
    assert CloningConfig(base="there", correlation=0, temperature=2).draws["temperature"] == 2


def test_a_clone_of_a_base_draws_as_the_base_does(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["trainer.max_iter=1", "trainer.run_validation=false"]
    assert command(recordings, *short, "model.config.correlation=0.5") == 0
    base = read_policy(str(tmp_path / RUN))[0]
    assert base.config.correlation == 0.5
    assert command(recordings, *short, "job.name=wrong", "model.config.correlation=1.5") == 2
    assert "model.config.correlation" in capsys.readouterr().err
    again = [f"model.config.base={tmp_path / RUN / 'policy'}", "job.name=again"]
    assert command(recordings, *short, *again) == 0
    assert read_policy(str((tmp_path / RUN).parent / "again"))[0].config.correlation == 0.5


def test_pictures_of_training_are_moved_each_by_its_own_draw() -> None:
    picture = torch.arange(16 * 16 * 3, dtype=torch.float32).view(1, 16, 16, 3).expand(40, -1, -1, -1)
    places = {(y, x): picture[0, y : y + 12, x : x + 12] for y in range(5) for x in range(5)}
    found = []
    for moved in shifted(picture, 0.125, torch.Generator().manual_seed(0)):
        found += [place for place, inner in places.items() if torch.equal(moved[2:14, 2:14], inner)]
    assert len(found) == 40 and {y for y, _ in found} == {x for _, x in found} == set(range(5))
    assert shifted(picture, 0.0, torch.Generator()) is picture


def _clone_on_rank(recordings: Path, folder: Path, overrides: list[str]) -> int:
    os.chdir(folder)
    return command(recordings, "trainer.max_iter=2", "model.config.ema.enabled=true", *overrides)


@pytest.mark.long
def test_a_sharded_policy_is_cloned_and_written_like_a_whole_one(recordings: Path, tmp_path: Path) -> None:
    sharded = ["model.config.fsdp_shard_size=-1", "trainer.distributed_parallelism=fsdp", "ckpt_type=dcp"]
    found = []
    for name, overrides in (("whole", []), ("sharded", sharded)):
        (tmp_path / name).mkdir()
        assert run_distributed(_clone_on_rank, 2, (recordings, tmp_path / name, overrides)) == [0, 0]
        run = tmp_path / name / RUN
        found.append((read_policy(str(run))[0].state_dict(), json.loads((run / "clone.json").read_text())["best"]))
    (whole, best), (parts, best_of_parts) = found
    assert best["windows"] == 15 and best_of_parts["loss"] == pytest.approx(best["loss"], rel=1e-4)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-4)


def test_a_sharded_policy_is_not_trained_whole(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(recordings, "model.config.fsdp_shard_size=-1") == 2
    assert "Set trainer.distributed_parallelism=fsdp" in capsys.readouterr().err


def test_another_clone_of_other_recordings_is_not_resumed(
    recordings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(recordings, "trainer.max_iter=1") == 0
    assert command(recordings, "trainer.max_iter=2", "dataloader_train.dataset.num=5") == 2
    assert "is of a clone of other recordings" in capsys.readouterr().err
    gc.collect()  # the refused model has a folder


def test_actions_that_are_not_finite_are_named(tmp_path: Path) -> None:
    record(tmp_path / "my_data", action=numpy.full((FRAMES, 2), numpy.nan, numpy.float32))
    with pytest.raises(DataError, match=r"episode_000000.*action 0 is not finite"):
        RecordedWindows(str(tmp_path / "my_data"), chunk=4)


def windows_of(pictures_B: torch.Tensor, actions_B: torch.Tensor) -> CloneWindows:
    pictures = pictures_B.mul(255).byte()[:, None, None, None].expand(-1, 8, 8, 3)
    return CloneWindows(pictures, actions_B[:, None, None].expand(-1, 4, 2), ["go"] * len(actions_B))


class Sees(PolicyDefaults):
    """Its decision is the picture's brightness, with noise of this deviation."""

    draws_when_greedy = True

    def __init__(self, noise: float, blind: bool = False) -> None:
        self.noise, self.blind = noise, blind

    def act(self, observation: Any, *, generators: Any, **others: Any) -> Decision:
        mean = observation["full_image"].float().mean(dim=(1, 2, 3))[:, None, None].expand(-1, 4, 2) / 255
        mean = torch.full_like(mean, 0.5) if self.blind else mean
        draws = torch.stack([torch.randn(4, 2, generator=each) for each in generators])
        return Decision(mean + self.noise * draws, {})


@pytest.mark.parametrize(("noise", "blind", "is_better"), [(0.0, False, True), (0.3, False, True), (0.3, True, False)])
def test_a_clone_must_see_more_than_the_mean_action_does(noise: float, blind: bool, is_better: bool) -> None:
    levels = torch.linspace(0, 1, 200)
    windows = windows_of(levels, levels)
    constant = Constant.of(windows)
    errors = decision_errors(Sees(noise, blind), windows, constant, 0, range(200))  # type: ignore[arg-type]
    figures, verdict = by_errors(errors, constant.errors(windows.actions_B_A_D), torch.arange(200) // 10)
    assert verdict.is_better is is_better and figures["constant_error"] == pytest.approx(1)
    assert figures["explained"] == pytest.approx(0 if blind else 1, abs=0.15)  # the noise of a draw is no error
    assert is_better or ("no better than the mean action" in verdict.text and "record more" in verdict.next_step)


def test_a_clone_that_explains_hardly_anything_is_not_praised() -> None:
    """One that explained .03 was said to see something."""
    one = torch.ones(200)
    _, verdict = by_errors(0.97 * one, one, torch.arange(200) // 10)
    assert verdict.is_better and "hardly anything" in verdict.text and "record more" in verdict.next_step


@pytest.mark.parametrize(("iteration", "is_said"), [(0, True), (200, False)])
def test_a_clone_that_was_best_before_it_learnt_is_said_to_be_untrained(
    iteration: int, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice to clone for longer would make it worse."""
    caplog.set_level("INFO")
    keeps: Any = KeepBestPolicy()
    keeps.trainer = SimpleNamespace(run_dir=str(tmp_path))
    keeps.best = {"iteration": iteration, "verdict": {"text": "It is blind.", "next_step": "Clone for longer."}}
    keeps.history = [{"iteration": i, "loss": loss} for i, loss in ((0, 1.63), (200, 2.1))]
    monkeypatch.setattr(keeps, "figures", lambda *of: {})
    keeps.on_train_end(SimpleNamespace(close=lambda: None), 200)
    said = "It is blind. These are the weights that it began with: its held-out loss was 1.63 then and 2.1 at last"
    assert (said in caplog.text) is is_said and ("Clone for longer." in caplog.text) is not is_said


def test_few_episodes_tell_nothing() -> None:
    rows = torch.rand(20, generator=torch.Generator().manual_seed(0))
    assert by_errors(rows, rows + 1, torch.arange(20) // 10)[1].is_better is None


@pytest.mark.parametrize(("clone", "null", "is_better"), [(60, 10, True), (12, 10, False), (8, 20, False)])
def test_success_is_compared_with_that_of_null_policies(clone: int, null: int, is_better: bool) -> None:
    found = by_success(Rate(clone, 200), {"still": Rate(0, 200), "random": Rate(null, 200)})
    assert found.is_better is is_better and (is_better or "'random'" in found.text)


def test_null_policies_do_not_look(recordings: Path) -> None:
    seen = windows_of(torch.tensor([0.1, 0.9]), torch.zeros(2)).observation
    folder = recordings / "my_data"
    recorded = RecordedWindows(str(folder), chunk=4, held_out_share=0.0).windows.actions_B_A_D
    decided = {}
    for kind in ("still", "mean", "random"):
        policy, _ = read_policy(f"null:{kind}:{folder}", options={"chunk": 4})
        generators = [torch.Generator().manual_seed(k) for k in range(2)]
        decided[kind] = policy.act(seen, mode="greedy", generators=generators).actions_E_A_D
        assert policy.action_dim == 2 and decided[kind].shape == (2, 4, 2)
    assert not decided["still"].any() and torch.equal(decided["mean"][1], recorded.mean(dim=0))
    assert all((recorded == one).all(dim=(1, 2)).any() for one in decided["random"])
    with pytest.raises(ConfigError, match="null:still:FOLDER"):
        read_policy("null:stil:my_data")
