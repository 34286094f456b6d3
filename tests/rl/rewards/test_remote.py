# SPDX-License-Identifier: Apache-2.0
"""The client against services that are slow, full, wrong, published or gone."""

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock
from urllib.parse import parse_qs

import pytest
import torch

from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.interfaces import Clips, Scores
from cosmos_predict2.rl.rewards import remote, wire
from cosmos_predict2.rl.rewards.remote import Address, Answer, NoAnswer, RemoteReward, ask
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError
from tests.rl.rewards.doubles import ROOT, clips_of
from tests.rl.runs import RL, rl_options, run

TICKET = (200, '{"uuid": "t"}', {})
SCORES = (200, '{"scores": {"mean": [1.5], "word": ["Good"], "part": [2.0]}, "type": "mean"}', {})
NOT_READY = (400, '{"message": "Not found scores for t"}', {})


class Scripted(ThreadingHTTPServer):
    """Answers in the order of a script; the last answer of each path is repeated."""

    daemon_threads = True

    def __init__(self, **script: list[tuple[int, str, dict[str, str]]]) -> None:
        self.script = script
        self.page: tuple[int, str, dict[str, str]] = (404, "{}", {})
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def reward(self, **options: Any) -> RemoteReward:
        url = f"http://127.0.0.1:{self.server_address[1]}"
        return RemoteReward("mean", enqueue_url=f"{url}/enqueue", fetch_url=f"{url}/pull", **options)

    def asked(self, path: str) -> list[tuple[str, dict[str, str], bytes]]:
        return [one for one in self.requests if one[0] == path]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        data = self.rfile.read(int(self.headers["Content-Length"]))
        server.requests.append((self.path[1:], dict(self.headers), data))
        answers = server.script[self.path[1:]]
        self._say(*(answers.pop(0) if len(answers) > 1 else answers[0]))

    def do_GET(self) -> None:
        server: Any = self.server
        server.requests.append((self.path[1:], dict(self.headers), b""))
        self._say(*server.page)

    def _say(self, status: int, text: str, headers: dict[str, str]) -> None:
        if status == 0:
            self.connection.close()
            return
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(remote, "LONGEST_WAIT_S", 0.05)
    for name in ("TOKEN", "ENQUEUE_URL", "FETCH_URL"):
        monkeypatch.delenv(f"WFM_REWARD_{name}", raising=False)
        monkeypatch.delenv(f"REMOTE_REWARD_{name}", raising=False)


@pytest.fixture
def scripted() -> Iterator[Any]:
    made: list[Scripted] = []

    def make(**script: list[tuple[int, str, dict[str, str]]]) -> Scripted:
        made.append(Scripted(**script))
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


def scored(reward: RemoteReward, *prompts: str, deadline: float = 30.0) -> Scores:
    return reward.fetch(reward.submit(clips_of(*prompts), {}, "id"), deadline)


def test_scores_come_back(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[NOT_READY, NOT_READY, SCORES])
    reward = server.reward(token="secret", clip=(-1.0, 1.0), scale=3.0, context=["goal", "absent"])
    context = {"goal": ["left"], "true_latents": torch.zeros(1, 4)}
    scores = reward.fetch(reward.submit(clips_of("a"), context, "run 1/a"), 30)
    assert scores.value_B.tolist() == [3.0] and scores.is_valid_B.tolist() == [True]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"mean": [1.5], "part": [2.0]}
    assert {one[1]["Authorization"] for one in server.requests} == {"Bearer secret"}
    sent = wire.parse(server.asked("enqueue")[0][2])
    assert sent.rewards == ("mean",) and sent.prompts == ["a"]
    assert sent.request_id is not None and sent.request_id.startswith("run_1/a-")
    assert list(sent.context) == ["goal"]  # what it was asked to send along, and nothing else
    assert parse_qs(server.asked("pull")[0][2].decode())["uuid"] == ["t"]


def test_the_same_clips_ask_under_the_same_id(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    for value in (1.0, 1.0, 2.0):
        reward = server.reward()
        reward.fetch(reward.submit(clips_of("a", value=value), {}, "id"), 30)
    ids = [wire.parse(one[2]).request_id for one in server.asked("enqueue")]
    assert ids[0] == ids[1] != ids[2]


def rewards_page(**timeouts: float) -> tuple[int, str, dict[str, str]]:
    rows = [{"name": name, "timeout_s": limit} for name, limit in timeouts.items()]
    return 200, json.dumps({"rewards": rows}), {}


@pytest.mark.parametrize(
    ("page", "enqueue", "pull", "named"),
    [
        (rewards_page(mean=120.0), TICKET, SCORES, ""),
        ((404, "{}", {}), TICKET, SCORES, ""),  # a published service
        (rewards_page(man=120.0), TICKET, SCORES, "man"),
        (rewards_page(mean=300.0), TICKET, SCORES, "timeout_s=300"),
        ((401, "{}", {}), (401, '{"message": "The bearer token is missing or wrong."}', {}), SCORES, "token"),
        ((404, "{}", {}), (400, '{"message": "is not served"}', {}), SCORES, "not served"),
        (rewards_page(mean=120.0), TICKET, (200, '{"scores": null, "error": "the judge is ill"}', {}), "ill"),
        (rewards_page(mean=120.0), TICKET, (200, '{"scores": {"other": [1.0]}}', {}), "other"),
    ],
)
def test_what_could_give_no_score_ends_the_start(scripted: Any, page: Any, enqueue: Any, pull: Any, named: str) -> None:
    server = scripted(enqueue=[enqueue], pull=[pull])
    server.page = page
    reward = server.reward(token="secret")
    if not named:
        reward.probe(clips_of("a"), {}, 300.0)
        return
    with pytest.raises(ConfigError, match=named):
        reward.probe(clips_of("a"), {}, 300.0)
    assert {one[1]["Authorization"] for one in server.requests} == {"Bearer secret"}


def test_after_the_deadline_what_is_there_still_counts_for_a_moment(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    reward = server.reward()
    for deadline, is_valid in ((-1.0, True), (-remote.LAST_LOOK_S - 1, False)):
        ticket = reward.submit(clips_of("a"), {}, "id")
        ticket.number.result(900)  # it is posted
        assert reward.fetch(ticket, deadline).is_valid_B.all() == is_valid
    assert len(server.asked("pull")) == 1


def test_errors_that_may_pass_are_tried_again(scripted: Any) -> None:
    busy = (429, '{"message": "full"}', {"Retry-After": "0"})
    server = scripted(
        enqueue=[(0, "", {}), (503, "", {}), busy, (500, "<html>", {}), TICKET],
        pull=[(0, "", {}), (502, "", {}), (200, "<html>", {}), (202, "{}", {}), SCORES],
    )
    reward = server.reward()
    state = random.getstate()
    assert scored(reward, "a").is_valid_B.all()
    assert random.getstate() == state, "a retry moves the random state of the run, so that it cannot be resumed exactly"


def test_a_service_that_says_when_to_ask_again_is_asked_then(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted(enqueue=[(429, '{"message": "full"}', {"Retry-After": "7"}), TICKET], pull=[SCORES])
    slept: list[float] = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    reward = server.reward(submit_deadline_s=900.0)
    assert scored(reward, "a", deadline=900).is_valid_B.all()
    assert len(slept) == 1 and 7 <= slept[0] <= 7 + remote.LONGEST_WAIT_S  # and a moment, so that not all come at once


class Talk:
    """Answers by a script, each after some seconds of a clock of its own: what was asked, and how long was slept."""

    def __init__(self, patch: pytest.MonkeyPatch, *script: tuple[float, Answer | NoAnswer]) -> None:
        self.script, self.now = list(script), 1000.0
        self.asked: list[tuple[Any, float]] = []
        self.slept: list[float] = []
        for name, value in dict(FIRST_WAIT_S=0.5, LONGEST_WAIT_S=20.0, ask=self.ask).items():
            patch.setattr(remote, name, value)
        patch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        patch.setattr(remote, "_JITTER", SimpleNamespace(uniform=lambda low, high: high))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def ask(self, url: str, body: Any, headers: Any, timeout: float) -> Answer:
        self.asked.append((body, timeout))
        took, answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.now += took
        if isinstance(answer, NoAnswer):
            raise answer
        return answer


NONE, EARLY, GOOD = NoAnswer("gone"), Answer(202, {}), Answer(200, {"uuid": "t"})


def far(**options: Any) -> RemoteReward:
    return RemoteReward("mean", enqueue_url="http://x/enqueue", fetch_url="http://x/pull", **options)


def test_waits_grow_with_failures_in_a_row_and_end_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(monkeypatch, *[(0, NONE)] * 7, (0, EARLY), (5, EARLY), (5, EARLY), (0, NONE), (0, GOOD))
    sender = far()
    assert sender._ask("http://x", {}, talk.now + 1e3, lambda left: (b"", left)) is GOOD
    assert talk.slept == [0.5, 1, 2, 4, 8, 16, 20, 20, 0.5]  # a pull that was held is no failure
    talk = Talk(monkeypatch, (0, NONE))
    with pytest.raises(NoAnswer, match="after 3 tries; the last: gone"):
        sender._ask("http://x", {}, talk.now + 3, lambda left: (b"", left))
    assert talk.slept == [0.5, 1, 1.5]
    for status in (408, 425, 429, 500, 502, 503, 504, 507):
        talk = Talk(monkeypatch, (0, Answer(status, {})), (0, GOOD))
        assert sender._ask("http://x", {}, talk.now + 3, lambda left: (b"", left)) is GOOD


UPLOADS = [(1, 1e4, 60), (10**8, 1e4, 330), (3 * 10**8, 1e4, 600), (10**8, 10, 10)]  # bytes, seconds left and given


@pytest.mark.parametrize(("size", "left", "limit"), UPLOADS)
def test_an_upload_has_time_by_its_size(size: int, left: float, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(monkeypatch, (0, GOOD))
    assert far()._enqueue(bytes(size), talk.now + left) == ("t", {})
    assert talk.asked[0][1] == limit


@pytest.mark.parametrize(("left", "wait", "timeout"), [(100, 20, 30), (20.5, 19.5, 21.5), (0.5, 0, 1.5), (-1, 0, 1)])
def test_a_pull_waits_within_its_deadline(
    left: float, wait: float, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(monkeypatch, (0, GOOD))
    far()._pull("t", {}, talk.now + left)
    assert talk.asked == [(f"uuid=t&type=mean&wait={wait:.1f}".encode(), timeout)]


def test_a_request_has_its_own_deadline_and_is_waited_for_until_the_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    talk, posted = Talk(monkeypatch, (0, GOOD)), []
    monkeypatch.setattr(RemoteReward, "_enqueue", lambda _, body, ends: posted.append(ends - talk.now) or ("t", {}))
    reward = far(submit_deadline_s=50.0)
    first: Any = reward.submit(clips_of("a"), {}, "x" * 300)
    assert wire.REQUEST_ID.fullmatch(str(wire.parse(first.body).request_id))
    monkeypatch.setattr(reward, "_check_service", lambda deadline: None)

    def scores(asked: Any, ends: float) -> Scores:
        asked.number.result(60)
        return Scores(torch.ones(1), torch.ones(1) > 0)

    monkeypatch.setattr(reward, "_scores", scores)
    first.number.result(60)
    for deadline in (9.0, 90.0):
        reward.probe(clips_of("a"), {}, deadline)
    assert posted == [50, 9, 50]
    waited: list[float] = []

    def late(timeout: float) -> Any:
        waited.append(timeout)
        raise remote.Late

    for left in (7.0, -7.0):
        asked = remote._PostedRequest("id", b"", 1, SimpleNamespace(result=late))  # type: ignore[arg-type]
        with pytest.raises(NoAnswer, match="delivered"):
            far()._scores(asked, talk.now + left)
    assert waited == [7, 0]


def test_a_process_ends_though_its_service_is_gone() -> None:
    code = f"""
from cosmos_predict2.rl.rewards.remote import RemoteReward
from tests.rl.rewards.doubles import clips_of
place = "http://127.0.0.1:9"  # where nothing listens
reward = RemoteReward("mean", enqueue_url=place + "/enqueue", fetch_url=place + "/pull", submit_deadline_s=3600)
reward.submit(clips_of("a"), {{}}, "{"x" * 64}")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def test_scores_are_fetched_in_the_order_in_which_they_were_asked(scripted: Any) -> None:
    tickets = [(200, f'{{"uuid": "{name}"}}', {}) for name in ("t1", "t2")]
    answers = [(200, f'{{"scores": {{"mean": [{value}]}}}}', {}) for value in (1, 2)]
    server = scripted(enqueue=tickets, pull=answers)
    reward = server.reward()
    asked = []
    for _ in range(2):
        asked.append(reward.submit(clips_of("a"), {}, "id"))
        asked[-1].number.result(900)  # it is posted
    assert [reward.fetch(ticket, 30).value_B.item() for ticket in asked] == [1, 2]
    assert [parse_qs(one[2].decode())["uuid"] for one in server.asked("pull")] == [["t1"], ["t2"]]


def test_an_invalid_clip_leaves_the_parts_of_the_others(scripted: Any) -> None:
    scores = '{"scores": {"mean": [1.5, null], "part": [2.0, null], "odd": [null, 1.0]}, "valid": [true, false]}'
    server = scripted(enqueue=[TICKET], pull=[(200, scores, {})])
    reward = server.reward()
    found = scored(reward, "a", "b")
    assert found.is_valid_B.tolist() == [True, False]
    assert {name: part.tolist() for name, part in found.parts.items()} == {"mean": [1.5, 0.0], "part": [2.0, 0.0]}


FAILED = (200, '{"status": "failed", "scores": null, "error": "the weights are torn", "valid": [false, false]}', {})
INVALID: dict[str, tuple[Any, Any, int, str]] = {  # answers to a request and to a pull, number of pulls, what is logged
    "a ticket that is no text": ((200, '{"uuid": 5}', {}), SCORES, 0, "answered 200 to a request"),
    "a failed job": (TICKET, FAILED, 1, "the weights are torn"),
    "scores of another number": (TICKET, SCORES, 1, "1 scores for 2 clips"),
    # a client by default follows the first of these; the token goes nowhere else
    **{f"{status}": ((status, "", {"Location": "/pull"}), SCORES, 0, f"{status}") for status in (302, 307)},
    **{f"{status}": ((status, '{"message": "wrong"}', {}), SCORES, 0, "wrong") for status in (400, 401, 403, 409, 413)},
}


@pytest.mark.parametrize("name", INVALID)
def test_what_will_give_no_score_is_invalid_at_once(scripted: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    enqueue, pull, num_pulls, logged = INVALID[name]
    server = scripted(enqueue=[enqueue], pull=[pull])
    reward = server.reward(token="secret")
    scores = scored(reward, "a", "b")
    assert scores.value_B.tolist() == [0, 0] and not scores.is_valid_B.any()
    assert (len(server.asked("enqueue")), len(server.asked("pull"))) == (1, num_pulls)
    assert logged in caplog.text


@pytest.mark.parametrize("status", [404, 410])  # it lost its queue, or forgot the result
def test_a_service_that_has_no_scores_any_more_is_asked_once_more(scripted: Any, status: int) -> None:
    server = scripted(enqueue=[TICKET], pull=[(status, "{}", {}), SCORES])
    reward = server.reward()
    assert scored(reward, "a").is_valid_B.all()
    assert len(server.asked("enqueue")) == 2
    assert server.asked("enqueue")[0][2] == server.asked("enqueue")[1][2]


def test_the_deadline_holds_when_nobody_answers(scripted: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}/x"
    reward = RemoteReward("mean", enqueue_url=url, fetch_url=url, submit_deadline_s=0.5)
    assert not scored(reward, "a", deadline=0.3).is_valid_B.any()
    server = scripted(enqueue=[TICKET], pull=[NOT_READY])
    reward = server.reward()
    assert not scored(reward, "a", deadline=0.3).is_valid_B.any()


def test_a_service_that_never_answers_what_it_took_gives_no_answer() -> None:
    """urllib makes no error of its own of a time-out while it reads."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NoAnswer, match="does not answer"):
        ask(f"http://127.0.0.1:{silent.getsockname()[1]}/pull", b"", {}, timeout=0.2)


def test_an_answer_says_as_much_as_it_can(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not asked for what is near
    server = scripted(
        pull=[
            (503, "<html>busy", {"Retry-After": "1e9"}),
            (503, '{"detail": "d"}', {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}),
            (400, json.dumps({"error": "e" * 999}), {"Retry-After": "-5"}),
            (200, "[]", {}),
        ]
    )
    url = f"http://127.0.0.1:{server.server_address[1]}/pull"
    found = [ask(url, b"", {}, 900) for _ in range(3)]
    assert [(one.status, one.message(), one.retry_after) for one in found] == [
        *((503, "<html>busy", 300.0), (503, "d", None), (400, "e" * 300, 0.0))
    ]
    with pytest.raises(NoAnswer, match="no JSON object"):
        ask(url, b"", {}, 900)
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(NoAnswer):
        ask("http://far.invalid/pull", b"", {}, 900)
    monkeypatch.setenv("http_proxy", url)
    server.page = (200, '{"proxy": 1}', {})
    assert ask("http://far.invalid/pull", None, {}, 900).content == {"proxy": 1}  # a GET, through the proxy


def test_pulls_go_to_the_replica_that_took_the_request(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was lost there, and another one took it."""
    tickets = [(200, f'{{"uuid": "t", "replica_id": "{name}"}}', {}) for name in ("r7", "r8")]
    for off, expected in ((False, ["r7", "r8"]), (True, [None, None])):
        if off:
            monkeypatch.setenv("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA", "1")
        server = scripted(enqueue=[*tickets], pull=[(404, "{}", {}), SCORES])
        reward = server.reward()
        scored(reward, "a")
        pulls = [{name.lower(): value for name, value in one[1].items()} for one in server.asked("pull")]
        assert [headers.get("x-lepton-replica-target") for headers in pulls] == expected


def test_the_environment_counts_before_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Address.found("http://a", "http://b", "t") == Address("http://a", "http://b", "t")
    for prefix, letter in (("REMOTE_REWARD", "r"), ("WFM_REWARD", "w")):
        monkeypatch.setenv(f"{prefix}_ENQUEUE_URL", f"http://{letter}")
        monkeypatch.setenv(f"{prefix}_FETCH_URL", f"http://{letter}")
        monkeypatch.setenv(f"{prefix}_TOKEN", letter)
        assert Address.found("http://a", "http://b", "t") == Address(f"http://{letter}", f"http://{letter}", letter)
    for wrong in ("host:8080", "httpd:8080"):
        monkeypatch.setenv("WFM_REWARD_FETCH_URL", wrong)
        with pytest.raises(ConfigError, match="WFM_REWARD_FETCH_URL"):
            Address.found()


def test_video_and_half_precision_are_sent(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    clips = Clips(torch.randn(1, 4, 1, 2, 2), torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8), ["a"], 16.0)
    for options in (dict(media="video"), dict(latent_dtype="bfloat16")):
        reward = server.reward(**options)
        reward.fetch(reward.submit(clips, {}, "id"), 30)
    video, latent = (cast(Any, wire.parse(one[2])) for one in server.asked("enqueue"))
    assert video.video() is not None and reward.needs_pixels is False
    assert latent.latents().dtype == torch.bfloat16
    assert far(clip=(1.0, 1.0)).clip == (1.0, 1.0)
    assert (far().score_key, RemoteReward("dance_grpo", enqueue_url="http://x", fetch_url="http://x").score_key) == (
        *("mean", "overall_reward"),
    )
    for wrong in (dict(media="sound"), dict(clip=(1.0, 0.0)), dict(latent_dtype="bfloat61"), dict(latent_dtype="int8")):
        with pytest.raises(ConfigError):
            server.reward(**wrong)


@pytest.mark.slow
def test_a_run_with_a_wrong_token_ends_before_its_first_rollout(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = scripted(enqueue=[(401, '{"message": "The bearer token is missing or wrong."}', {})])
    serving = scripted(enqueue=[TICKET], pull=[(200, '{"scores": {"mean": [1.5, 2.5]}, "type": "mean"}', {})])
    far = "{make: {_target_: cosmos_predict2.rl.rewards.remote.RemoteReward, reward: mean}}"

    def started(server: Any) -> list[dict[str, Any]]:
        for name, path in {"ENQUEUE_URL": "enqueue", "FETCH_URL": "pull"}.items():
            monkeypatch.setenv(f"WFM_REWARD_{name}", f"http://127.0.0.1:{server.server_address[1]}/{path}")
        return run(tmp_path / path, *rl_options(), f"+{RL}.rewards.far={far}")

    roll_out = mock.create_autospec(FlowGRPOModel._roll_out, side_effect=FlowGRPOModel._roll_out)
    monkeypatch.setattr(FlowGRPOModel, "_roll_out", roll_out)
    with pytest.raises(ConfigError, match=r"401.*token"):
        started(refusing)
    assert not roll_out.called
    serving.script["pull"].insert(0, SCORES)  # of the first clip alone
    records = started(serving)
    assert roll_out.called and records[0]["train/far_valid_rate"] == 1
    sizes = [len(wire.parse(one[2]).prompts) for one in serving.asked("enqueue")]
    assert sizes[0] == 1 and {*sizes[1:]} == {2}
