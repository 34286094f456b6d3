# SPDX-License-Identifier: Apache-2.0
"""Who reaches the service: clients with the token find room, and nobody holds a connection by sending nothing.

uvicorn closes a connection that is idle between two requests. Here the other waits end, too: for the head of a request,
for the rest of a body that was answered already, and for a client to read its answers. A connection is known once a
request with the token came over it. Of unknown ones an address has a share; where it is used up, its oldest is closed.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import resource
import socket
import time
from collections import defaultdict
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cosmos_predict2.rl.rewards.service.metrics import Metrics

OPEN_PATHS = {"/health", "/healthz", "/readyz"}  # they read and write nothing of anybody
WRITE_S = 60.0  # for a client to read what fills its buffers
MOST = 4096  # connections; then 503
OWN_FILES = 256  # that the service has open besides
UNKNOWN_SHARE, ADDRESS_SHARE = 4, 4  # a quarter of all connections may be unknown, a quarter of those one address's


class Connections:
    """The connections that have not shown the token, by address, the oldest first."""

    def __init__(self, idle_s: float, most: int = MOST) -> None:
        self.idle_s = idle_s
        self.most = most
        self.most_unknown = most // UNKNOWN_SHARE
        self._unknown: dict[str, dict[GuardedProtocol, None]] = defaultdict(dict)

    def add(self, one: "GuardedProtocol") -> None:
        """Count a connection, and close the oldest of its address, or of the address with most, if there are many."""
        crowd = self._unknown[one.network]
        if sum(map(len, self._unknown.values())) >= self.most_unknown:
            crowd = max(self._unknown.values(), key=len)
        elif len(crowd) < self.most_unknown // ADDRESS_SHARE:
            crowd = {}
        if crowd:
            oldest = next(iter(crowd))
            self.remove(oldest)
            oldest.end()
        self._unknown[one.network][one] = None

    def remove(self, one: "GuardedProtocol") -> None:
        """Count a connection no more: it is closed, or known."""
        of_address = self._unknown.get(one.network, {})
        of_address.pop(one, None)
        if not of_address:
            self._unknown.pop(one.network, None)


class GuardedProtocol(H11Protocol):
    """uvicorn's connection, with an end to each wait for the client."""

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.guard = connections
        self.network = ""
        self._head_ends: asyncio.TimerHandle | None = None
        self._write_ends: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.network = network_of(self.client[0]) if self.client else ""
        self.guard.add(self)
        self._wait_for_head()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel(self._head_ends)
            self.scope["state"]["connection"] = self  # for `become_known`

    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_ends, self._write_ends):
            self._cancel(timer)
        self.guard.remove(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_ends = self.loop.call_later(WRITE_S, self.end)

    def resume_writing(self) -> None:
        self._cancel(self._write_ends)
        super().resume_writing()

    def become_known(self) -> None:
        self.guard.remove(self)

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _wait_for_head(self) -> None:
        self._cancel(self._head_ends)
        self._head_ends = self.loop.call_later(self.guard.idle_s, self.end)

    def _cancel(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def room_for_connections() -> int:
    """How many this process may have open, once its limit of open files is as high as it is allowed to set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MOST + OWN_FILES:
        soft = MOST + OWN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST + OWN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, min(MOST, soft - OWN_FILES))


def network_of(host: str) -> str:
    """The unit that counts as one address: of IPv6 a network of 64 bits, which one machine has for itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)


def keep_alive(listener: socket.socket) -> None:
    """Have the kernel end connections, of those accepted here, whose peer is gone."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in dict(TCP_KEEPIDLE=60, TCP_KEEPINTVL=15, TCP_KEEPCNT=4, TCP_USER_TIMEOUT=120_000).items():
        if hasattr(socket, name):  # of Linux
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Access:
    """ASGI middleware: 401 without the token on every path but those of health, before the body is read."""

    def __init__(self, app: ASGIApp, token: str, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics
        self._digest = hashlib.sha256(token.encode()).digest() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS and not self._is_known(scope):
                self.metrics.count("reward_rejects_total", reason="token")
                headers = {
                    "WWW-Authenticate": 'Bearer realm="rewards"',
                    "Connection": "close",  # the body that was not read must not be taken for the next request
                }
                refusal = JSONResponse({"message": "The bearer token is missing or wrong."}, 401, headers)
                await refusal(scope, receive, send_and_note)
            else:
                connection = scope.get("state", {}).get("connection")
                if connection is not None and scope["path"] not in OPEN_PATHS:
                    connection.become_known()
                await self.app(scope, receive, send_and_note)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.observe("reward_http_seconds", time.perf_counter() - began, path=path, status=str(status))

    def _is_known(self, scope: Scope) -> bool:
        if self._digest is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        is_same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return kind.lower() == b"bearer" and is_same
