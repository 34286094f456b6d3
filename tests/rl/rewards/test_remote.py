# SPDX-License-Identifier: Apache-2.0
"""The client against services that are slow, full, wrong, published or gone."""

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch

from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import remote, wire
from cosmos_predict2.rl.rewards.http import NoAnswer, ask
from cosmos_predict2.rl.rewards.local import LocalReward
from cosmos_predict2.rl.rewards.remote import Address, RemoteReward, share_senders
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError
from tests.rl.rewards.doubles import clips_of, mean
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


def test_clips_that_are_alike_have_one_id_and_scores_of_their_own(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    for reward in (server.reward(), LocalReward(mean)):
        tickets = [reward.submit(clips_of("a"), {}, "id") for _ in range(2)]
        assert all(reward.fetch(ticket, 30).is_valid_B.all() for ticket in tickets)


def test_rewards_of_one_service_upload_a_clip_once(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    other = scripted(enqueue=[TICKET], pull=[SCORES])
    url = f"http://127.0.0.1:{server.server_address[1]}"
    clips = Clips(torch.ones(1, 4, 1, 2, 2), torch.zeros(1, 3, 1, 8, 8, dtype=torch.uint8), ["a"], 16.0)
    rewards = [
        server.reward(context=["true_latents"]),
        RemoteReward("second", "part", enqueue_url=f"{url}/enqueue", fetch_url=f"{url}/pull", context=["actions"]),
        server.reward(score_key="part"),
        server.reward(media="video"),
        server.reward(latent_dtype="bfloat16"),
        other.reward(),
    ]
    share_senders([*rewards, LocalReward(mean)])
    context = {"true_latents": clips.latents_B_C_T_H_W, "actions": torch.ones(1, 2, 3), "goal": torch.ones(1, 2)}
    for _ in range(2):
        tickets = [reward.submit(clips, context, "id") for reward in rewards]
        scores = [reward.fetch(ticket, 30) for reward, ticket in zip(rewards, tickets)]
        assert [one.value_B.tolist() for one in scores] == [[1.5], [2.0], [2.0], [1.5], [1.5], [1.5]]
    sent = [wire.parse(one[2]) for one in server.asked("enqueue")]
    assert sorted((one.rewards, one.media) for one in sent) == sorted(
        [(("mean", "second"), "latent"), (("mean",), "video"), (("mean",), "latent")] * 2
    )
    shared = next(one for one in sent if len(one.rewards) == 2)
    assert {*shared.context} == {"true_latents", "actions"}
    assert len(other.asked("enqueue")) == 2
    assert {*(parse_qs(one[2].decode())["type"][0] for one in server.asked("pull"))} == {"mean", "second"}


def rewards_page(**timeouts: float) -> tuple[int, str, dict[str, str]]:
    rows = [{"name": name, "timeout_s": limit} for name, limit in timeouts.items()]
    return 200, json.dumps({"rewards": rows}), {}


@pytest.mark.parametrize(
    ("page", "enqueue", "pull", "named"),
    [
        (rewards_page(mean=120.0), TICKET, SCORES, ""),
        ((404, "{}", {}), TICKET, SCORES, ""),  # a published service
        (rewards_page(man=120.0), TICKET, SCORES, "man"),
        (rewards_page(mean=900.0), TICKET, SCORES, "timeout_s=900"),
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


def test_after_the_deadline_what_is_there_still_counts_for_a_moment(scripted: Any) -> None:
    server = scripted(enqueue=[TICKET], pull=[SCORES])
    reward = server.reward()
    for deadline, is_valid in ((-1.0, True), (-remote.LAST_LOOK_S - 1, False)):
        ticket = reward.submit(clips_of("a"), {}, "id")
        reward._asked["id"][0].ticket.result(900)  # it is posted
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
    assert reward.fetch(reward.submit(clips_of("a"), {}, "id"), 30).is_valid_B.all()
    assert random.getstate() == state, "a retry moves the random state of the run, so that it cannot be resumed exactly"


def test_a_service_that_says_when_to_ask_again_is_asked_then(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = scripted(enqueue=[(429, '{"message": "full"}', {"Retry-After": "7"}), TICKET], pull=[SCORES])
    slept: list[float] = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    reward = server.reward(submit_deadline_s=900.0)
    assert reward.fetch(reward.submit(clips_of("a"), {}, "id"), 900).is_valid_B.all()
    assert len(slept) == 1 and 7 <= slept[0] <= 7 + remote.LONGEST_WAIT_S  # and a moment, so that not all come at once


@pytest.mark.parametrize("status", [400, 401, 403, 409, 413])
def test_errors_of_ours_are_not_tried_again(scripted: Any, status: int, caplog: pytest.LogCaptureFixture) -> None:
    server = scripted(enqueue=[(status, '{"message": "wrong"}', {})], pull=[SCORES])
    reward = server.reward()
    scores = reward.fetch(reward.submit(clips_of("a", "b"), {}, "id"), 30)
    assert scores.value_B.tolist() == [0, 0] and not scores.is_valid_B.any()
    assert len(server.requests) == 1
    assert (reward.num_clips, reward.num_invalid) == (2, 2)
    assert str(status) in caplog.text and "wrong" in caplog.text


@pytest.mark.parametrize("status", [302, 307])  # of which a client by default follows the first
def test_a_redirect_is_not_followed_with_the_token(scripted: Any, status: int) -> None:
    server = scripted(enqueue=[(status, "", {"Location": "/pull"}), TICKET], pull=[SCORES])
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


def test_a_service_that_never_answers_what_it_took_gives_no_answer() -> None:
    """urllib makes no error of its own of a time-out while it reads."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NoAnswer, match="does not answer"):
        ask(f"http://127.0.0.1:{silent.getsockname()[1]}/pull", b"", {}, timeout=0.2)


def test_pulls_go_to_the_replica_that_took_the_request(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was lost there, and another one took it."""
    tickets = [(200, f'{{"uuid": "t", "replica_id": "{name}"}}', {}) for name in ("r7", "r8")]
    for off, expected in ((False, ["r7", "r8"]), (True, [None, None])):
        if off:
            monkeypatch.setenv("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA", "1")
        server = scripted(enqueue=[*tickets], pull=[(404, "{}", {}), SCORES])
        reward = server.reward()
        reward.fetch(reward.submit(clips_of("a"), {}, "id"), 30)
        pulls = [{name.lower(): value for name, value in one[1].items()} for one in server.asked("pull")]
        assert [headers.get("x-lepton-replica-target") for headers in pulls] == expected


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

    rollouts = []
    monkeypatch.setattr(FlowGRPOModel, "_roll_out", _counted(rollouts, FlowGRPOModel._roll_out))
    with pytest.raises(ConfigError, match=r"401.*token"):
        started(refusing)
    assert not rollouts
    serving.script["pull"].insert(0, SCORES)  # of the first clip alone
    records = started(serving)
    assert rollouts and records[0]["train/far_valid_rate"] == 1
    sizes = [len(wire.parse(one[2]).prompts) for one in serving.asked("enqueue")]
    assert sizes[0] == 1 and {*sizes[1:]} == {2}


def _counted(calls: list[int], method: Any) -> Any:
    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return method(*arguments)

    return counted
