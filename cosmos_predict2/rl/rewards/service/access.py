# SPDX-License-Identifier: Apache-2.0
"""What every request passes before a handler sees it: the token, the size of its body, the clock."""

import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from cosmos_predict2.rl.rewards.service.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = {"/health", "/healthz", "/readyz"}  # they read and write nothing of anybody
REALM = b'Bearer realm="rewards"'


class Access:
    """ASGI middleware: 401 without the token on every path but those of health, before the body is read."""

    def __init__(self, app: App, token: str, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics
        self._digest = hashlib.sha256(token.encode()).digest() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def send_and_note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS and not self._is_known(scope):
                self.metrics.count("reward_rejects_total", reason="token")
                await _refuse(send_and_note)
            else:
                connection = scope.get("state", {}).get("connection")
                if connection is not None and scope["path"] not in OPEN_PATHS:
                    connection.become_known()
                await self.app(scope, receive, send_and_note)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self.metrics.observe("reward_http_seconds", time.perf_counter() - began, path=path, status=str(status))

    def _is_known(self, scope: Scope) -> bool:
        if self._digest is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        is_same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return kind.lower() == b"bearer" and is_same


async def _refuse(send: Send) -> None:
    body = json.dumps({"message": "The bearer token is missing or wrong."}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", REALM),
        (b"connection", b"close"),  # the body that was not read must not be taken for the next request
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
