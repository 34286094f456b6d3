# SPDX-License-Identifier: Apache-2.0
"""The client against services that are slow, full, wrong, published or gone."""

import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import remote, wire
from cosmos_predict2.rl.rewards.remote import Address, RemoteReward
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError
from tests.rl.rewards.doubles import clips_of

TICKET = (200, '{"uuid": "t"}', {})
SCORES = (200, '{"scores": {"mean": [1.5], "word": ["Good"], "part": [2.0]}, "type": "mean"}', {})
NOT_READY = (400, '{"message": "Not found scores for t"}', {})


class Scripted(ThreadingHTTPServer):
    """Answers in the order of a script; the last answer of each path is repeated."""

    daemon_threads = True

    def __init__(self, **script: list[tuple[int, str, dict[str, str]]]) -> None:
        self.script = script
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

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
        status, text, headers = answers.pop(0) if len(answers) > 1 else answers[0]
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


def test_scores_come_back(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[NOT_READY, NOT_READY, SCORES])
    reward = server.reward(token="secret", clip=(-1.0, 1.0), scale=3.0)
    scores = reward.fetch(reward.submit(clips_of("a"), {}, "run 1/a"), 30)
    assert scores.value_B.tolist() == [3.0] and scores.is_valid_B.tolist() == [True]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"mean": [1.5], "part": [2.0]}
    assert {one[1]["Authorization"] for one in server.requests} == {"Bearer secret"}
    sent = wire.parse(server.asked("enqueue")[0][2])
    assert sent.rewards == ("mean",) and sent.prompts == ["a"]
    assert sent.request_id is not None and sent.request_id.startswith("run_1/a-")
    assert parse_qs(server.asked("pull")[0][2].decode())["uuid"] == ["t"]
    assert reward.num_invalid == 0


def test_the_same_clips_ask_under_the_same_id(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    for value in (1.0, 1.0, 2.0):
        reward = server.reward()
        reward.fetch(reward.submit(clips_of("a", value=value), {}, "id"), 30)
    ids = [wire.parse(one[2]).request_id for one in server.asked("enqueue")]
    assert ids[0] == ids[1] != ids[2]


def test_errors_that_may_pass_are_tried_again(scripted: Any) -> None:
    busy = (429, '{"message": "full"}', {"Retry-After": "0"})
    server = scripted(
        enqueue=[(0, "", {}), (503, "", {}), busy, (500, "<html>", {}), TICKET],
        pull=[(0, "", {}), (502, "", {}), (200, "<html>", {}), (202, "{}", {}), SCORES],
    )
    reward = server.reward()
    state = random.getstate()
    assert reward.fetch(reward.submit(clips_of("a"), {}, "id"), 30).is_valid_B.all()
    assert random.getstate() == state, "a retry moves the random state of the run, so that it cannot be resumed exactly"


@pytest.mark.parametrize("status", [400, 401, 403, 409, 413])
def test_errors_of_ours_are_not_tried_again(scripted: Any, status: int, caplog: pytest.LogCaptureFixture) -> None:
    server = scripted(enqueue=[(status, '{"message": "wrong"}', {})], pull=[SCORES])
    reward = server.reward()
    scores = reward.fetch(reward.submit(clips_of("a", "b"), {}, "id"), 30)
    assert scores.value_B.tolist() == [0, 0] and not scores.is_valid_B.any()
    assert len(server.requests) == 1
    assert (reward.num_clips, reward.num_invalid) == (2, 2)
    assert str(status) in caplog.text and "wrong" in caplog.text


def test_a_redirect_is_not_followed_with_the_token(scripted: Any) -> None:
    server = scripted(enqueue=[(307, "", {"Location": "/pull"}), TICKET], pull=[SCORES])
    reward = server.reward(token="secret")
    assert not reward.fetch(reward.submit(clips_of("a"), {}, "id"), 30).is_valid_B.any()
    assert not server.asked("pull")


def test_a_failed_job_is_invalid_at_once(scripted: Any) -> None:
    failed = (200, '{"status": "failed", "scores": null, "error": "the weights are torn", "valid": [false]}', {})
    server = scripted(enqueue=[TICKET], pull=[failed])
    reward = server.reward()
    assert not reward.fetch(reward.submit(clips_of("a"), {}, "id"), 30).is_valid_B.any()
    assert len(server.asked("pull")) == 1


def test_scores_of_another_number_are_invalid(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    reward = server.reward()
    assert not reward.fetch(reward.submit(clips_of("a", "b"), {}, "id"), 30).is_valid_B.any()


def test_a_service_that_lost_its_queue_is_asked_once_more(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[(404, "{}", {}), SCORES])
    reward = server.reward()
    assert reward.fetch(reward.submit(clips_of("a"), {}, "id"), 30).is_valid_B.all()
    assert len(server.asked("enqueue")) == 2
    assert server.asked("enqueue")[0][2] == server.asked("enqueue")[1][2]


def test_the_deadline_holds_when_nobody_answers(scripted: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}/x"
    reward = RemoteReward("mean", enqueue_url=url, fetch_url=url, submit_deadline_s=0.5)
    assert not reward.fetch(reward.submit(clips_of("a"), {}, "id"), 0.3).is_valid_B.any()
    server = scripted(enqueue=[TICKET], pull=[NOT_READY])
    reward = server.reward()
    assert not reward.fetch(reward.submit(clips_of("a"), {}, "id"), 0.3).is_valid_B.any()
    with pytest.raises(KeyError):
        reward.fetch(reward.submit(clips_of("a"), {}, "id").__class__("other"), 1)


def test_pulls_go_to_the_replica_that_took_the_request(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for off, expected in ((False, "r7"), (True, None)):
        if off:
            monkeypatch.setenv("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA", "1")
        server = scripted(enqueue=[(200, '{"uuid": "t", "replica_id": "r7"}', {})], pull=[SCORES])
        reward = server.reward()
        reward.fetch(reward.submit(clips_of("a"), {}, "id"), 30)
        headers = {name.lower(): value for name, value in server.asked("pull")[0][1].items()}
        assert headers.get("x-lepton-replica-target") == expected


def test_the_environment_counts_before_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Address.found("http://a", "http://b", "t") == Address("http://a", "http://b", "t")
    for prefix, letter in (("REMOTE_REWARD", "r"), ("WFM_REWARD", "w")):
        monkeypatch.setenv(f"{prefix}_ENQUEUE_URL", f"http://{letter}")
        monkeypatch.setenv(f"{prefix}_FETCH_URL", f"http://{letter}")
        monkeypatch.setenv(f"{prefix}_TOKEN", letter)
        assert Address.found("http://a", "http://b", "t") == Address(f"http://{letter}", f"http://{letter}", letter)
    monkeypatch.setenv("WFM_REWARD_FETCH_URL", "host:8080")
    with pytest.raises(ConfigError, match="WFM_REWARD_FETCH_URL"):
        Address.found()


def test_video_and_half_precision_are_sent(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    clips = Clips(torch.randn(1, 4, 1, 2, 2), torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8), ["a"], 16.0)
    for options in (dict(media="video"), dict(latent_dtype="bfloat16")):
        reward = server.reward(**options)
        reward.fetch(reward.submit(clips, {}, "id"), 30)
    video, latent = (wire.parse(one[2]) for one in server.asked("enqueue"))
    assert video.video() is not None and reward.needs_pixels is False
    found = latent.latents()
    assert found is not None and found.dtype == torch.bfloat16
    for wrong in (dict(media="sound"), dict(clip=(1.0, 0.0))):
        with pytest.raises(ConfigError):
            server.reward(**wrong)
