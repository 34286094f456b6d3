# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of the reward service: the published endpoints, and those that make it observable.

The paths below /api/reward are compatible with the published service. A pull that gives ``wait`` asks for the precise
answers: 202 while the job waits, 404 for a ticket that is unknown or whose result was forgotten.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from cosmos_predict2.rl.rewards import wire
from cosmos_predict2.rl.rewards.service.queue import OtherBody, Queue, QueueFull, QueueUnusable, ticket_of
from cosmos_predict2.rl.rewards.service.scoring import failed_result
from cosmos_predict2.rl.rewards.service.settings import ServiceSettings
from cosmos_predict2.rl.rewards.service.supervisor import ServiceMetrics, Supervisor
from imaginaire.errors import DataError

log = logging.getLogger(__name__)

VERSION = "1"
OPEN_PATHS = {"/health", "/healthz", "/readyz"}  # they read and write nothing of anybody
LARGEST_FORM = 1 << 16
RETRY_AFTER_S = 2
PURGE_S = 30.0
LOOK_S = 0.02  # between two looks at the queue, for all pulls that wait


class Access:
    """ASGI middleware: 401 without the token on every path but those of health, before the body is read."""

    def __init__(self, app: ASGIApp, token: str, metrics: ServiceMetrics) -> None:
        self.app = app
        self.metrics = metrics
        self._digest = hashlib.sha256(token.encode()).digest() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self.app(scope, receive, send)
            return
        self.metrics.count("reward_rejects_total", reason="token")
        headers = {
            "WWW-Authenticate": 'Bearer realm="rewards"',
            "Connection": "close",  # the body that was not read must not be taken for the next request
        }
        refusal = JSONResponse({"message": "The bearer token is missing or wrong."}, 401, headers)
        await refusal(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        if self._digest is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        is_same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return kind.lower() == b"bearer" and is_same


class Service:
    """The state that the handlers share."""

    def __init__(self, settings: ServiceSettings, queue: Queue, supervisor: Supervisor) -> None:
        self.settings = settings
        self.queue = queue
        self.supervisor = supervisor
        self.metrics = supervisor.metrics
        self.timeouts = {reward.reward_type: reward.timeout_s for reward in settings.rewards}
        self.names = [*self.timeouts]
        self.is_draining = False  # no more requests are taken, and pulls that wait are answered
        self._waiting: dict[tuple[str, str], asyncio.Event] = {}  # jobs that pulls wait for

    async def enqueue(self, request: Request) -> Response:
        """JSON on one line, a newline, a .npy array; gives the ticket of the request as ``uuid``."""
        if self.is_draining:
            raise self._rejected(503, "draining", "The service is stopping. Ask again: what it accepted is kept.", True)
        body = await self._body(request, int(self.settings.max_body_mb * 1e6))
        return await asyncio.to_thread(self._accept, body)

    def _accept(self, body: bytes) -> Response:
        try:
            parsed = wire.parse(body)
        except DataError as error:
            raise self._rejected(400, "malformed", str(error)) from error
        if unknown := [name for name in parsed.rewards if name not in self.names]:
            message = f"The reward {unknown[0][:80]!a} is not served. Served: {', '.join(self.names)}."
            raise self._rejected(400, "unknown_reward", message)
        if all(self.supervisor.is_broken(name) for name in parsed.rewards):  # else the others' scores are of use
            broken = parsed.rewards[0]
            message = f"The reward '{broken}' is out of order: {self.supervisor.why_broken(broken)}"
            raise self._rejected(503, "broken_reward", message, True)
        ticket = ticket_of(parsed.request_id)
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        try:
            versions = {name: self.supervisor.version(name) for name in parsed.rewards}
            is_new = self.queue.put(ticket, versions, body, digest, len(parsed.prompts))
        except QueueFull as error:
            raise self._rejected(429, "queue_full", f"The queue is full: {error}", True) from error
        except OtherBody as error:
            raise self._rejected(409, "other_body", str(error)) from error
        self.metrics.count("reward_requests_total", kind="new" if is_new else "repeated")
        log.debug("request %s: %d clips, %d bytes", ticket, len(parsed.prompts), len(body))
        replica = os.environ.get("LEPTON_REPLICA_ID")
        return JSONResponse({"uuid": ticket} | ({"replica_id": replica} if replica else {}))

    async def pull(self, request: Request) -> Response:
        """The scores of one reward of a request."""
        fields = _fields(await self._body(request, LARGEST_FORM), request)
        ticket, reward = fields.get("uuid", ""), fields.get("type", wire.DEFAULT_REWARD)
        if not ticket:
            raise self._rejected(400, "malformed", "A pull is form-encoded: uuid=TICKET&type=REWARD.")
        wait = self._wait(fields.get("wait"))
        status = await asyncio.to_thread(self.queue.look, ticket, reward)
        if wait and status is not None and status.is_open:
            settled = self._waiting.setdefault((ticket, reward), asyncio.Event())
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(settled.wait(), wait)
            status = await asyncio.to_thread(self.queue.look, ticket, reward)
        if status is None:
            return JSONResponse({"status": "unknown", "message": f"There is no request {ticket} for {reward}."}, 404)
        if status.state == "failed":
            return JSONResponse(failed_result(reward, status.error or "", status.num_clips))
        if status.result is not None:
            return Response(status.result, media_type="application/json")
        is_broken = reward in self.names and self.supervisor.is_broken(reward)
        fault = f": {self.supervisor.why_broken(reward)}" if is_broken else ""
        message = {"status": status.state, "message": f"Not found scores for {ticket}{fault}"}
        return JSONResponse(message, 400 if wait is None else 202)

    def _wait(self, text: str | None) -> float | None:
        """Seconds to wait; None of a client that knows no waiting."""
        if text is None:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise self._rejected(400, "malformed", f"wait={text[:40]!a} is no number of seconds.")
        return min(seconds, self.settings.max_wait_s)

    async def _body(self, request: Request, limit: int) -> bytes:
        """The body, unless it is longer than the limit."""
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    text = f"A body has at most {limit} bytes."
                    raise self._rejected(413, "too_long", text, headers={"Connection": "close"})
        except ClientDisconnect:  # nobody reads this answer
            raise self._rejected(400, "disconnected", "The connection was closed before the body's end.") from None
        return bytes(body)

    def _rejected(
        self, status: int, reason: str, message: str, again: bool = False, headers: dict[str, str] | None = None
    ) -> HTTPException:
        self.metrics.count("reward_rejects_total", reason=reason)
        more = {"Retry-After": str(RETRY_AFTER_S)} if again else {}
        return HTTPException(status, message, headers={**more, **(headers or {})})

    def faults(self) -> list[str]:
        """The reasons that the service is not ready; empty when it is."""
        found = [f"{name} is not ready" for name in self.names if not self.supervisor.is_ready(name)]
        if self.is_draining:
            found.append("the service is stopping")
        if fault := self.queue.fault():
            return [*found, fault]
        open_jobs = sum(depth.num_open for depth in self.queue.depth().values())
        if open_jobs >= self.settings.max_jobs:
            found.append(f"the queue is full ({open_jobs} jobs)")
        return found

    def rewards(self) -> dict[str, Any]:
        depths = self.queue.depth()
        rows = [
            {
                "name": name,
                "workers": self.supervisor.states()[name],
                "timeout_s": self.timeouts[name],
                "waiting": depths[name].num_open if name in depths else 0,
                "fault": self.supervisor.why_broken(name),
            }
            for name in self.names
        ]
        return {"version": VERSION, "rewards": rows, "media_types": list(wire.MEDIA)}

    def metrics_text(self) -> str:
        depths = self.queue.depth()
        jobs = [({"reward": r, "state": s}, float(n)) for r, depth in depths.items() for s, n in depth.counts.items()]
        ages = [({"reward": reward}, depth.oldest_s) for reward, depth in depths.items()]
        states = self.supervisor.states()
        workers = [
            ({"reward": r, "state": s}, float(states[r].count(s))) for r in states for s in sorted(set(states[r]))
        ]
        return self.metrics.text({"reward_jobs": jobs, "reward_oldest_job_seconds": ages, "reward_workers": workers})

    async def keep_house(self) -> None:
        """Forget old results, for as long as the service runs."""
        while True:
            await asyncio.sleep(min(PURGE_S, self.settings.result_ttl_s / 2))
            try:
                await asyncio.to_thread(self.queue.purge)
            except Exception:  # the next time may succeed
                log.exception("old results could not be purged")

    def _settled(self, waiting: list[tuple[str, str]]) -> list[tuple[str, str]]:
        found = {key: self.queue.look(*key) for key in waiting}
        return [key for key, status in found.items() if status is None or not status.is_open]

    async def watch(self) -> None:
        """Wake the pulls whose jobs are settled, each looked for once however many wait, or all at the end."""
        while True:
            await asyncio.sleep(LOOK_S)
            waiting = [*self._waiting]
            try:
                if waiting and not self.is_draining:
                    waiting = await asyncio.to_thread(self._settled, waiting)
            except Exception:  # the next look may succeed; until then pulls wait to their end
                log.exception("the queue could not be looked at")
                waiting = []
            for key in waiting:
                self._waiting.pop(key).set()


def create_app(service: Service) -> FastAPI:
    """The application; its workers are started and stopped by whoever runs it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(service.watch()), asyncio.create_task(service.keep_house())]
        yield
        for task in tasks:
            task.cancel()

    app = FastAPI(title="Reward service", version=VERSION, lifespan=lifespan, openapi_url=None)
    app.add_middleware(Access, token=service.settings.token, metrics=service.metrics)  # type: ignore[arg-type]

    @app.exception_handler(HTTPException)
    async def say(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"message": error.detail}, error.status_code, headers=error.headers)

    @app.exception_handler(QueueUnusable)
    async def say_unusable(request: Request, error: QueueUnusable) -> JSONResponse:
        log.error("%s", error)
        service.metrics.count("reward_rejects_total", reason="queue_unusable")
        return JSONResponse({"message": str(error)}, 503, headers={"Retry-After": str(RETRY_AFTER_S)})

    app.post("/api/reward/enqueue")(service.enqueue)
    app.post("/api/reward/pull")(service.pull)

    @app.post("/api/reward/ping")
    async def ping(request: Request) -> dict[str, str]:
        await service._body(request, LARGEST_FORM)
        return {"message": "Ping request received"}

    @app.get("/v1/rewards")
    async def rewards() -> dict[str, Any]:
        return await asyncio.to_thread(service.rewards)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(await asyncio.to_thread(service.metrics_text))

    @app.get("/health")
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        faults = await asyncio.to_thread(service.faults)
        return JSONResponse({"ready": not faults, "faults": faults}, 503 if faults else 200)

    return app


def _fields(body: bytes, request: Request) -> dict[str, str]:
    """The fields of a form, or of JSON, as the published README shows a pull; none of what is neither."""
    text = body.decode("utf-8", errors="replace")
    try:
        if request.headers.get("content-type", "").startswith("application/json"):
            fields = {str(name): str(value) for name, value in json.loads(text).items()}
            "".join(fields.values()).encode()  # JSON may have half a surrogate pair, which no queue takes
            return fields
        return {name: values[-1] for name, values in parse_qs(text, max_num_fields=20).items()}
    except (ValueError, AttributeError, RecursionError):
        return {}
