# SPDX-License-Identifier: Apache-2.0
"""A reward that a service computes: requests go out in the background, scores are fetched when they are needed.

Works with this project's service and with the published one. Whatever goes wrong makes scores invalid, never wrong: it
is logged and counted, and the run goes on.
"""

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips, Scores, Ticket
from cosmos_predict2.rl.rewards import wire
from cosmos_predict2.rl.rewards.http import Answer, NoAnswer, ask
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)
_JITTER = random.Random()  # of its own: a retry must not move the random state of a training run

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 20.0
NOT_READY = "Not found scores"  # the published service's answer 400 to a pull that comes too early
RETRIED = {408, 425, 429, 500, 502, 503, 504, 507}


@dataclass(frozen=True)
class Address:
    """Where a service is, and the token for it. The environment counts more than the config."""

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


@dataclass(frozen=True)
class _Asked:
    """A request that was posted: its body, for as long as it may have to be posted again."""

    body: bytes
    size: int
    ticket: "Future[tuple[str, dict[str, str]]]"


class RemoteReward:
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
        self.address = Address.found(enqueue_url, fetch_url, token)
        self.reward = reward
        self.score_key = score_key or ("overall_reward" if reward == "dance_grpo" else reward)
        self.clip = clip
        self.scale = scale
        self.media = media
        self.needs_pixels = media == "video"
        self.context = tuple(context)
        self.latent_dtype: torch.dtype | None = getattr(torch, latent_dtype) if latent_dtype else None
        self.submit_deadline_s = submit_deadline_s
        self.wait_s = wait_s
        self.num_clips = 0
        self.num_invalid = 0
        self._asked: dict[str, _Asked] = {}
        self._senders = ThreadPoolExecutor(max_workers=4, thread_name_prefix="reward request")

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        sent = {name: context[name] for name in self.context if name in context}
        body = wire.encode(clips, {self.reward: 1.0}, media=self.media, context=sent, latent_dtype=self.latent_dtype)
        body = with_request_id(body, request_id)
        future = self._senders.submit(self._enqueue, body, time.monotonic() + self.submit_deadline_s)
        self._asked[request_id] = _Asked(body, len(clips.prompts), future)
        return Ticket(request_id)

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        asked = self._asked.pop(ticket.request_id, None)
        if asked is None:
            raise KeyError(f"no request '{ticket.request_id}' was submitted, or its scores were fetched before")
        try:
            scores = self._scores(asked, time.monotonic() + deadline)
        except (DataError, NoAnswer) as error:
            log.warning("the reward %s of %d clips is invalid: %s", self.reward, asked.size, error)
            scores = Scores(torch.zeros(asked.size), torch.zeros(asked.size, dtype=torch.bool))
        self.num_clips += asked.size
        self.num_invalid += int((~scores.is_valid_B).sum())
        return scores

    def close(self) -> None:
        """Send nothing more."""
        self._senders.shutdown(wait=False, cancel_futures=True)

    def _scores(self, asked: _Asked, ends: float) -> Scores:
        try:
            number, headers = asked.ticket.result(timeout=max(0.0, ends - time.monotonic()))
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

    def _enqueue(self, body: bytes, ends: float) -> tuple[str, dict[str, str]]:
        """The ticket of a request, and the headers for its pulls."""
        limit = min(max(30 + 3 * len(body) / 1e6, 60), 600)
        kind = {"Content-Type": "application/octet-stream"}
        answer = self._ask(self.address.enqueue_url, body, kind, ends, lambda left: min(limit, left))
        number = answer.content.get("uuid")
        if answer.status != 200 or not isinstance(number, str):
            raise NoAnswer(f"the service answered {answer.status} to a request: {answer.message()}")
        replica = answer.content.get("replica_id")
        is_pinned = replica and os.environ.get("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA") != "1"
        return number, {"X-Lepton-Replica-Target": str(replica)} if is_pinned else {}

    def _pull(self, number: str, headers: Mapping[str, str], ends: float) -> Answer:
        def body(left: float) -> bytes:
            wait = max(0.0, min(self.wait_s, left - 1))
            return f"uuid={number}&type={self.reward}&wait={wait:.1f}".encode()

        headers = {"Content-Type": "application/x-www-form-urlencoded", **headers}
        return self._ask(self.address.fetch_url, body, headers, ends, lambda left: min(self.wait_s + 10, left + 1))

    def _ask(
        self,
        url: str,
        body: bytes | Callable[[float], bytes],
        headers: Mapping[str, str],
        ends: float,
        limit: Callable[[float], float],
    ) -> Answer:
        """The first answer that is final; the errors on the way are tried again until the deadline."""
        if self.address.token:
            headers = {**headers, "Authorization": f"Bearer {self.address.token}"}
        failures, last = 0, "no answer"
        while (left := ends - time.monotonic()) > 0:
            began = time.monotonic()
            wait: float | None = None
            try:
                answer = ask(url, body(left) if callable(body) else body, headers, timeout=max(0.05, limit(left)))
            except NoAnswer as error:
                last = str(error)
            else:
                is_early = answer.status == 202 or (answer.status == 400 and answer.message().startswith(NOT_READY))
                if answer.status not in RETRIED and not is_early:
                    return answer
                last = f"the service answered {answer.status}: {answer.message()}"
                wait = answer.retry_after
                if answer.status == 202 and time.monotonic() - began > self.wait_s / 2:
                    failures = 0
                    continue  # the service waited for us
            failures += 1
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(failures - 1, 10))
            wait = _JITTER.uniform(0, longest) + (wait or 0.0)
            time.sleep(max(0.0, min(wait, ends - time.monotonic())))
        raise NoAnswer(f"nothing final before the deadline, after {failures} tries; the last: {last}")


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
