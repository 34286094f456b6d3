# SPDX-License-Identifier: Apache-2.0
"""A reward that a service computes: requests go out in the background, scores are fetched when they are needed.

Works with this project's service and with the published one. Whatever goes wrong makes scores invalid, never wrong: it
is logged, and the run goes on.
"""

import contextlib
import hashlib
import http.client
import json
import logging
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips, RewardDefaults, Scores, Ticket
from cosmos_predict2.rl.rewards import wire
from imaginaire.errors import ConfigError, DataError, near

log = logging.getLogger(__name__)
_JITTER = random.Random()  # of its own: a retry must not move the random state of a training run

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0
LAST_LOOK_S = 5.0  # after a deadline, in which scores that are there are still taken
NOT_READY = "Not found scores"  # the published service's answer 400 to a pull that comes too early
LARGEST_ANSWER = 64 << 20
RETRIED = {408, 425, 429, 500, 502, 503, 504, 507}


@dataclass(frozen=True)
class Address:
    """The address of a service, and the token for it. The environment counts more than the config."""

    enqueue_url: str
    fetch_url: str
    token: str = ""

    @classmethod
    def found(cls, enqueue_url: str = "", fetch_url: str = "", token: str = "") -> "Address":
        """WFM_REWARD_*, else REMOTE_REWARD_*, else what is given."""
        given = dict(enqueue_url=enqueue_url, fetch_url=fetch_url, token=token)
        for name in given:
            for prefix in ("WFM_REWARD", "REMOTE_REWARD"):
                if value := os.environ.get(f"{prefix}_{name.upper()}", "").strip():
                    given[name] = value
                    break
        for name in ("enqueue_url", "fetch_url"):
            if not given[name].startswith(("http://", "https://")):
                raise ConfigError(
                    f"WFM_REWARD_{name.upper()} is {given[name]!r}: expected the whole address, such as "
                    f"http://HOST:8080/api/reward/{'enqueue' if name == 'enqueue_url' else 'pull'}."
                )
        return cls(**given)


class NoAnswer(Exception):
    """Nothing that could be used came back."""


@dataclass(frozen=True)
class Answer:
    status: int
    content: dict[str, Any]
    retry_after: float | None = None

    def message(self) -> str:
        """The message of the service about a failure."""
        return str(self.content.get("message") or self.content.get("detail") or self.content.get("error") or "")[:300]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token goes to the address that was configured, and to no other."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def ask(url: str, body: bytes | None, headers: Mapping[str, str], timeout: float) -> Answer:
    """The answer to a POST, or to a GET without a body, whatever its status; NoAnswer where there is none."""
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="GET" if body is None else "POST")
    is_near = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    handlers: list[Any] = [_NoRedirects(), *([urllib.request.ProxyHandler({})] if is_near else [])]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as response:
            return _answer(response.status, response.read(LARGEST_ANSWER), response.headers)
    except urllib.error.HTTPError as error:
        text = b""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            text = error.read(1 << 20)
        return _answer(error.code, text, error.headers)
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{urlsplit(url).netloc} does not answer: {getattr(error, 'reason', error)}") from error


def _answer(status: int, body: bytes, headers: Any) -> Answer:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        if status == 200:
            raise NoAnswer("the answer is no JSON object")
        content = {"message": body[:200].decode(errors="replace")}
    try:
        seconds = float(headers.get("Retry-After") or "")
    except ValueError:  # none, or a date: our own waits do
        return Answer(status, content)
    return Answer(status, content, min(max(seconds, 0.0), 300.0))


@dataclass(frozen=True)
class _PostedRequest(Ticket):
    """A request that was posted: its body, for as long as it may have to be posted again."""

    body: bytes
    size: int
    number: "Future[tuple[str, dict[str, str]]]"  # of the service, and the headers of its pulls


class RemoteReward(RewardDefaults):
    """`Reward` of the service's reward ``reward``.

    ``score_key`` names the score, or several joined by '+' (default: the one called like the reward); it is clipped to
    ``clip`` and multiplied by ``scale``. ``media``: latents go out, which the service decodes, or video. ``context``
    names what goes along of what the clips are conditioned on, such as true_latents.
    """

    def __init__(
        self,
        reward: str = wire.DEFAULT_REWARD,
        score_key: str = "",
        *,
        clip: Sequence[float] | None = None,
        scale: float = 1.0,
        media: str = "latent",
        context: Collection[str] = (),
        latent_dtype: str | None = None,
        enqueue_url: str = "",
        fetch_url: str = "",
        token: str = "",
        submit_deadline_s: float = 300.0,
        wait_s: float = 20.0,
    ) -> None:
        if media not in ("latent", "video"):
            raise ConfigError(f"media={media!r}: expected latent or video.")
        if clip is not None and (len(clip) != 2 or clip[0] > clip[1]):
            raise ConfigError(f"clip={clip!r}: expected two numbers, the lower one first.")
        dtype = getattr(torch, latent_dtype, None) if latent_dtype else None
        if latent_dtype and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"latent_dtype={latent_dtype!r}: expected float32, float16 or bfloat16.")
        self.address = Address.found(enqueue_url, fetch_url, token)
        self.media, self.latent_dtype = media, dtype
        self.reward = reward
        self.score_key = score_key or ("overall_reward" if reward == "dance_grpo" else reward)
        self.clip = clip
        self.scale = scale
        self.needs_pixels = media == "video"
        self.context = tuple(context)
        self.submit_deadline_s = submit_deadline_s
        self.wait_s = wait_s
        self._turns = threading.Semaphore(4)

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        return self._post(clips, context, request_id, self.submit_deadline_s)

    def probe(self, clips: Clips, context: Mapping[str, Any], deadline: float) -> None:
        """Raise unless the service takes the token, has this reward, and scores these clips within the deadline."""
        place = self.address.enqueue_url
        self._check_service(deadline)
        asked = self._post(clips, context, "probe", min(deadline, self.submit_deadline_s))
        try:
            scores = self._scores(asked, time.monotonic() + deadline)
        except (DataError, NoAnswer) as error:
            raise ConfigError(
                f"The service at {place} gave no score of '{self.reward}' for a first clip: {str(error).rstrip('.')}."
                " Check the address, WFM_REWARD_TOKEN and the names of reward and score_key; its log has more."
            ) from error
        if not scores.is_valid_B.all():
            log.warning("the reward %s of %s gives a true clip no valid score", self.reward, place)

    def _check_service(self, deadline: float) -> None:
        """Raise where our service lacks this reward, or gives it more time than there is."""
        address = self.address
        headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
        try:
            answer = ask(urljoin(address.enqueue_url, "/v1/rewards"), None, headers, timeout=10.0)
        except NoAnswer:
            return  # it may be about to start; what a request meets will be the message
        rows = answer.content.get("rewards")
        if answer.status != 200 or not isinstance(rows, list):
            return  # a published service has no such page
        limits = {row.get("name"): row.get("timeout_s") for row in rows if isinstance(row, dict)}
        if self.reward not in limits:
            known = [str(name) for name in limits]
            raise ConfigError(
                f"The service at {address.enqueue_url} has no reward '{self.reward}'.{near(self.reward, known)}"
            )
        if isinstance(limit := limits[self.reward], (int, float)) and limit >= deadline:
            raise ConfigError(
                f"The service notices that '{self.reward}' hangs after timeout_s={limit:g}, but a rollout waits"
                f" {deadline:g} s for its scores: lower timeout_s in service.toml, or raise the reward's deadline."
            )

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        if not isinstance(ticket, _PostedRequest):
            raise ConfigError("fetch takes the ticket that submit gave, which a reward around this one hands on.")
        try:
            return self._scores(ticket, time.monotonic() + deadline)
        except (DataError, NoAnswer) as error:
            log.warning("the reward %s of %d clips is invalid: %s", self.reward, ticket.size, error)
            return Scores(torch.zeros(ticket.size), torch.zeros(ticket.size, dtype=torch.bool))

    def _post(self, clips: Clips, context: Mapping[str, Any], request_id: str, deadline: float) -> _PostedRequest:
        """A request for scores, on its way."""
        sent = {name: value for name, value in context.items() if name in self.context}
        options: dict[str, Any] = dict(media=self.media, context=sent, latent_dtype=self.latent_dtype)
        body = with_request_id(wire.encode(clips, {self.reward: 1.0}, **options), request_id)
        asked = _PostedRequest(request_id, body, len(clips.prompts), Future())
        given = asked, time.monotonic() + deadline
        # a daemon: the end of a run doesn't wait for a service that is gone
        threading.Thread(target=self._send, args=given, daemon=True, name="reward request").start()
        return asked

    def _send(self, asked: _PostedRequest, ends: float) -> None:
        with self._turns:
            try:
                asked.number.set_result(self._enqueue(asked.body, ends))
            except Exception as error:  # who asks for the number meets it
                asked.number.set_exception(error)

    def _enqueue(self, body: bytes, ends: float) -> tuple[str, dict[str, str]]:
        """The service's number of a request, and the headers for its pulls."""
        limit = min(max(30 + 3 * len(body) / 1e6, 60), 600)
        kind = {"Content-Type": "application/octet-stream"}
        answer = self._ask(self.address.enqueue_url, kind, ends, lambda left: (body, min(limit, left)))
        number = answer.content.get("uuid")
        if answer.status != 200 or not isinstance(number, str):
            raise NoAnswer(f"the service answered {answer.status} to a request: {answer.message()}")
        replica = answer.content.get("replica_id")
        is_pinned = replica and os.environ.get("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA") != "1"
        return number, {"X-Lepton-Replica-Target": str(replica)} if is_pinned else {}

    def _ask(
        self, url: str, headers: Mapping[str, str], ends: float, request: Callable[[float], tuple[bytes, float]]
    ) -> Answer:
        """The first answer that is final; the errors on the way are tried again until the deadline. ``request`` gives a
        body and its time-out by the seconds that are left."""
        if self.address.token:
            headers = {**headers, "Authorization": f"Bearer {self.address.token}"}
        failures, last = 0, "no answer"
        while (left := ends - time.monotonic()) > 0 or (failures == 0 and left > -LAST_LOOK_S):
            began = time.monotonic()
            wait: float | None = None
            body, limit = request(left)
            try:
                answer = ask(url, body, headers, timeout=max(0.05, limit))
            except NoAnswer as error:
                last = str(error)
            else:
                is_early = answer.status == 202 or (answer.status == 400 and answer.message().startswith(NOT_READY))
                if answer.status not in RETRIED and not is_early:
                    return answer
                last = f"the service answered {answer.status}: {answer.message()}"
                wait = answer.retry_after
                if answer.status == 202 and time.monotonic() - began > FIRST_WAIT_S:
                    failures = 0
                    continue  # the service waited for us
            failures += 1
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(failures - 1, 10))
            wait = _JITTER.uniform(0, longest) + (wait or 0.0)
            time.sleep(max(0.0, min(wait, ends - time.monotonic())))
        raise NoAnswer(f"nothing final before the deadline, after {failures} tries; the last: {last}")

    def _scores(self, asked: _PostedRequest, ends: float) -> Scores:
        try:
            number, headers = asked.number.result(timeout=max(0.0, ends - time.monotonic()))
        except Late:
            raise NoAnswer("the request could not be delivered before the deadline") from None
        answer = self._pull(number, headers, ends)
        if answer.status in (404, 410):  # the service lost its queue, or forgot the result: it is asked once more
            log.warning("the service has no scores of request %s any more (%d): asked again", number, answer.status)
            number, headers = self._enqueue(asked.body, ends)
            answer = self._pull(number, headers, ends)
        if answer.status != 200:
            raise NoAnswer(f"the service answered {answer.status}: {answer.message()}")
        values, is_valid = wire.read_scores(answer.content, self.score_key, self.clip, self.scale)
        if len(values) != asked.size:
            raise DataError(f"the service gave {len(values)} scores for {asked.size} clips.")
        return Scores(torch.tensor(values), torch.tensor(is_valid), _parts(answer.content["scores"], is_valid))

    def _pull(self, number: str, headers: Mapping[str, str], ends: float) -> Answer:
        def request(left: float) -> tuple[bytes, float]:
            wait = max(0.0, min(self.wait_s, left - 1))
            body = f"uuid={number}&type={self.reward}&wait={wait:.1f}".encode()
            return body, min(self.wait_s + 10, max(left, 0.0) + 1)

        headers = {"Content-Type": "application/x-www-form-urlencoded", **headers}
        return self._ask(self.address.fetch_url, headers, ends, request)


def with_request_id(body: bytes, request_id: str) -> bytes:
    """The body with an id of the client's own, which follows from the content, too: other clips never share one."""
    digest = hashlib.blake2b(body, digest_size=12).hexdigest()
    readable = "".join(c if wire.REQUEST_ID.fullmatch(c) else "_" for c in request_id)[:150]
    head, _, arrays = body.partition(b"\n")
    return head[:-1] + f', "request_id": "{readable}-{digest}"}}\n'.encode() + arrays


def _parts(scores: Mapping[str, Any], is_valid: Sequence[bool]) -> dict[str, Tensor]:
    """The lists of numbers; 0 where a score is invalid."""
    parts = {}
    for name, column in scores.items():
        if isinstance(column, list) and len(column) == len(is_valid):
            rows = [value if good else 0.0 for value, good in zip(column, is_valid)]
            if all(isinstance(value, (int, float)) for value in rows):
                parts[name] = torch.tensor(rows, dtype=torch.float32).nan_to_num(0.0)
    return parts
