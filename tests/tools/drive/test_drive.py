# SPDX-License-Identifier: Apache-2.0
"""A session of a driver without a browser, and what is refused before a page is served."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.rl.envs.first_frames import RecordedFacts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.interfaces import Decision, FrameRewardDefaults, Judgement, PolicyDefaults
from cosmos_predict2.tools.drive import server
from cosmos_predict2.tools.drive.server import TOKEN, create_app
from cosmos_predict2.tools.drive.session import IMAGINED, Controls, Drive, drive_of
from imaginaire.errors import ConfigError
from scripts import drive as script
from tests.programs import call

SOCKET = "ws://127.0.0.1:8000/drive"
HERE = "tests.tools.drive.test_drive"
SIZE = (48, 48)


class Pusher(PolicyDefaults):
    """Moves to the right and up; decides on six actions."""

    chunk, action_dim = 6, 4

    def act(self, observation: Any, **_: Any) -> Decision:
        return Decision(torch.tensor([0.5, 0.25, 0.0, 0.0]).expand(1, 6, -1), {})


class Bright(FrameRewardDefaults):
    """How bright a picture is; above nothing it is a success."""

    def judge(self, frames_E_F_H_W_C: Any, context: Any) -> Judgement:
        value = frames_E_F_H_W_C.float().mean(dim=(2, 3, 4)) / 255
        return Judgement(value, value > 0)


class Wide(Pusher):
    action_dim = 7

    def act(self, observation: Any, **_: Any) -> Decision:
        return Decision(torch.zeros(1, 6, 7), {})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of the toy world: pictures at their starts, and random actions up to .5."""
    folder, env = tmp_path_factory.mktemp("drive") / "data", ToyEnv(6)
    shown, _ = env.reset(options=dict(task_ids=[0] * 6, trial_ids=range(6)))
    actions = torch.rand(6, 13, 4, generator=torch.Generator().manual_seed(0)) - 0.5
    writer = Writer(folder, 10.0)
    for picture, rows in zip(shown["full_image"], actions, strict=True):
        film = picture.permute(2, 0, 1)[:, None].expand(-1, 13, -1, -1)
        writer.add(Recording({"action": rows.numpy()}, {"observation.images.top": film}, "push the puck"))
    writer.finish()
    return folder


@contextmanager
def driven(*flags: object) -> Iterator[Drive]:
    args = script.parser.parse_args([str(flag) for flag in flags])
    with drive_of(args, imagination_of(device="cpu"), SIZE) as drive:
        yield drive


@pytest.fixture(scope="module")
def drive(data: Path) -> Iterator[Drive]:
    out = data.parent / "driven"
    with driven("--data", data, "--policy", f"{HERE}:Pusher", "--fps", 200, "--out", out) as found:
        yield found


def client(drive: Drive, token: str = "") -> TestClient:
    return TestClient(create_app(drive, token), base_url="http://127.0.0.1:8000")


def picture(socket: Any, until: Any = lambda facts: True) -> dict[str, Any]:
    """The figures of the next picture for which ``until`` holds."""
    while True:
        message = socket.receive()
        assert "error" not in (message.get("text") or ""), message
        if message.get("bytes"):
            facts, _, shown = message["bytes"].partition(b"\n")
            assert shown.startswith(b"\x89PNG")
            if until(figures := json.loads(facts)):
                return figures


def said(socket: Any) -> dict[str, Any]:
    """The next message about a recording that has ended, behind pictures that were on their way."""
    while not (found := json.loads(socket.receive().get("text") or "{}")) or found.get("recording"):
        pass
    return found


def test_keys_become_actions_within_the_recorded_range() -> None:
    motions = Controls.of(RecordedFacts(24, [-0.5, -1.0], [0.25, 2.0]), 2)
    still = torch.zeros(2)
    assert motions.action(torch.tensor([1.0, -0.5]), 1.0, still).tolist() == [0.25, -0.5]
    assert motions.action(torch.tensor([-1.0, 1.0]), 0.5, still).tolist() == [-0.25, 1.0]
    places = Controls.of(RecordedFacts(24, [2.0, 0.0], [4.0, 1.0]), 2)
    before = torch.tensor([3.0, 0.99])
    assert places.action(torch.tensor([-1.0, 1.0]), 1.0, before).tolist() == pytest.approx([2.9, 1.0])
    assert places.action(torch.zeros(2), 1.0, before).tolist() == before.tolist()


def test_pictures_follow_the_keys_and_repeat(drive: Drive) -> None:
    def film(*deflections: float) -> torch.Tensor:
        drive.restart(2)
        return torch.stack([moment.picture for _ in range(4) for moment in drive.advance(deflections)])

    right, left = film(1.0), film(-1.0)
    assert right.shape == (16, *SIZE, 3) and not torch.equal(right, left) and torch.equal(right, film(1.0))
    assert not torch.equal(drive.restart(2)[0].picture, drive.restart(3)[0].picture)


def test_the_policy_acts_until_a_key_is_pressed_and_again(drive: Drive) -> None:
    """Its decision of six actions is played to its end, and forgotten at a key."""
    low, high = drive.controls.range_2_D.tolist()
    drive.restart(0)
    counts = [len(drive.advance(autopilot=True)) for _ in range(4)]
    assert counts == [4, 2, 4, 2]
    drive.advance(autopilot=True)
    (*_, last) = drive.advance([0.0, -1.0], autopilot=True)
    assert not last.figures["autopilot"] and last.figures["action"] == pytest.approx([0.0, low[1], 0.0, 0.0])
    (*_, last) = drive.advance(autopilot=True)
    assert last.figures["autopilot"] and last.figures["action"] == pytest.approx([min(0.5, high[0]), 0.25, 0, 0])
    assert last.figures["unlike"] > 0 and last.figures["processor_ms"] > 0
    assert drive.familiar and last.figures["is_faded"] == (drive.familiar.faded(last.picture[None]) == 1)


def test_a_session_over_the_socket_is_recorded_as_episodes(drive: Drive) -> None:
    with client(drive) as page, page.websocket_connect(SOCKET) as socket:
        assert "<canvas" in page.get("/").text
        hello = socket.receive_json()["hello"]
        assert hello["names"] == [f"action {i}" for i in (1, 2, 3, 4)] and hello["starts"] == 6 and hello["policy"]
        assert picture(socket)["step"] == 0
        for number in range(2):
            socket.send_json(dict(deflections=[1.0], run=True, at=7.0 + number, record=True, start=number))
            assert picture(socket, lambda facts: facts["step"] == 2)["action"][0] > 0
            socket.send_json(dict(deflections=[], run=True, autopilot=True, at=9.0 + number))
            picture(socket, lambda facts: facts["autopilot"])
            socket.send_json(dict(deflections=[], run=False, record=False))
            assert "Episode" in said(socket)["text"]
    source = LeRobotSource.open(str(drive.out))
    assert len(source) == 2 and source.camera() == IMAGINED and source.caption(0) == "push the puck"
    assert source.info.fps == 200 and "next.success" not in source.info.features
    actions = source.columns(1, ["action"])["action"]
    assert len(actions) == source.episodes.lengths[1] >= 7
    assert actions[0, 0] == pytest.approx(drive.controls.range_2_D[1, 0])
    assert source.frames(1, IMAGINED, [0]).shape[2:] == SIZE


def test_a_recording_that_could_not_be_saved_is_kept(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with driven("--data", data, "--out", tmp_path / "out") as drive:
        for number in range(2):
            drive.restart(number)
            drive.record()
            drive.advance([1.0])
            if number:
                with monkeypatch.context() as full, pytest.raises(OSError, match="full"):
                    full.setattr(Writer, "finish", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
                    drive.save()
            assert drive.save().startswith(f"Episode {number}") and not drive.recorded


def test_the_simulator_gets_the_same_actions(data: Path, tmp_path: Path) -> None:
    flags = ("--reward", f"{HERE}:Bright", "--out", tmp_path / "driven", "--max_steps", 13)
    with driven("--suite", "toy", "--data", data, *flags) as drive:
        (first,) = drive.restart(3)
        assert first.true is not None and torch.equal(first.picture, first.true)
        drive.record()
        moments = [moment for _ in range(3) for moment in drive.advance([1.0, 1.0])]
        env = ToyEnv(1, split="val")
        env.reset(options=dict(task_ids=[0], trial_ids=[3]))
        shown, *_ = env.chunk_step(torch.tensor([[moment.figures["action"] for moment in moments]]))
        assert moments[-1].true is not None and torch.equal(shown["full_image"][0], moments[-1].true)
        figures = moments[-1].figures
        assert 0.1 < figures["value"] < 1 and figures["is_valued"] and not figures["success"]
        assert "13 pictures" in drive.save()
        ends = [moment.figures["is_over"] for moment in drive.advance()]
        assert ends == [True] * 4 and not moments[-1].figures["is_over"]
    source = LeRobotSource.open(tmp_path / "driven")
    assert {IMAGINED, "observation.images.front", "next.success"} <= set(source.info.features)


def test_one_driver_at_a_time_and_nothing_runs_behind_it(drive: Drive) -> None:
    with client(drive) as page:
        with page.websocket_connect(SOCKET) as socket:
            socket.send_json(dict(deflections=[1.0], run=True))
            picture(socket, lambda facts: facts["step"] > 4)
            with page.websocket_connect(SOCKET) as second:
                assert "Another driver" in second.receive_json()["error"]
                with pytest.raises(WebSocketDisconnect):
                    second.receive_json()
        time.sleep(0.3)
        steps = drive._num_steps
        time.sleep(0.3)
        assert drive._num_steps == steps
        with page.websocket_connect(SOCKET) as third:
            assert "hello" in third.receive_json() and picture(third)["step"] == 0


MESSAGES = (
    *("", "[]", "{}", "[" * 9999, '{"deflections": 3}', '{"deflections": ["x"]}', '{"deflections": [1e999]}'),
    *('{"deflections": [1, 2, 3, 4, 5]}', '{"deflections": [], "start": -2}', '{"deflections": [], "start": "NaN"}'),
)


def test_what_is_no_message_of_a_driver_is_answered(drive: Drive) -> None:
    with client(drive) as page, page.websocket_connect(SOCKET) as socket:
        socket.receive_json()
        picture(socket)
        for message in MESSAGES:
            socket.send_text(message)
            assert "no message of a driver" in socket.receive_json()["error"], message
        socket.send_json(dict(deflections=[1.0], run=True))
        assert picture(socket)["step"] == 1


def test_strangers_are_refused(drive: Drive) -> None:
    with client(drive) as page:
        assert page.get("/", headers={"host": "elsewhere.example"}).status_code == 400
        with pytest.raises(WebSocketDisconnect):
            page.websocket_connect(SOCKET, headers={"origin": "http://elsewhere.example"}).__enter__()
    with TestClient(create_app(drive, name="127.0.0.2"), base_url="http://127.0.0.2:8000") as page:
        assert page.get("/").status_code == 200 and page.get("/", headers={"host": "[::1]:8000"}).status_code == 200
    with client(drive, "secret") as page:
        assert page.get("/").status_code == 401 and page.get("/?token=secret").status_code == 200
        with pytest.raises(WebSocketDisconnect):
            page.websocket_connect(f"{SOCKET}?token=other").__enter__()
        with page.websocket_connect(f"{SOCKET}?token=secret") as socket:
            assert "hello" in socket.receive_json()


def test_one_camera_is_not_halved_into_the_views_of_a_world_model(data: Path) -> None:
    imagination = imagination_of(device="cpu")
    args = script.parser.parse_args(["--data", str(data), "--camera", "top"])
    imagination.views = ("top", "wrist")
    with pytest.raises(ConfigError, match="2 views"), drive_of(args, imagination, SIZE):
        pass


MISTAKES: list[tuple[list[str], str]] = [
    ([], "no picture to begin with"),
    (["--host", "0.0.0.0", "--suite", "toy"], TOKEN),
    (["--suite", "toy", "--policy", f"{HERE}:Wide"], "7 numbers per action"),
    (["--data", "{data}", "--policy", f"{HERE}:Wide"], "cloned anew"),
    (["--data", "{data}", "--actions", "13"], "13 actions are to be executed"),
    (["--data", "{data}", "--stream"], "makes whole chunks"),
    (["--data", "{data}", "--stream", "--actions", "6"], "Give 4, 8 or 12"),
    (["--data", "{wide}"], "those of the world model have 4"),
    (["--data", "{data}", "--out", "{data}"], "holds no driven episodes"),
    (["--data", "{data}", "--world_model", "{data}"], "{data}"),
    (["--data", "{data}", "--port", "-1"], "--port"),
]


@pytest.mark.parametrize(("flags", "named"), MISTAKES, ids=[" ".join(flags) or "nothing" for flags, _ in MISTAKES])
def test_mistakes_are_named_before_a_page_is_served(
    flags: list[str], named: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(server, "serve", lambda *_: pytest.fail("a page is served"))
    writer = Writer(tmp_path / "wide", 10.0)
    rows, film = torch.rand(13, 7).numpy(), torch.zeros(3, 13, *SIZE, dtype=torch.uint8)
    writer.add(Recording({"action": rows}, {"top": film}, "push"))
    writer.finish()
    words = [word.format(data=data, wide=tmp_path / "wide") for word in flags]
    code = call(script, *words, "--device", "cpu")
    shown = capsys.readouterr()
    assert code == 2 and named.format(data=data) in shown.err + shown.out
