# SPDX-License-Identifier: Apache-2.0
"""The page of a drive and its one websocket: the driver's keys come in, pictures go out when they are due.

While pictures are shown, the next ones are computed as late as can be, so that they follow the latest keys.
"""

import asyncio
import contextlib
import hmac
import io
import json
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import uvicorn
import websockets  # noqa: F401  which uvicorn needs, and does not demand
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from cosmos_predict2.tools.drive.session import Drive, Moment
from imaginaire import foreign_json
from imaginaire.errors import UserError
from imaginaire.listening import in_address, listening

log = logging.getLogger(__name__)

TOKEN = "WFM_DRIVE_TOKEN"
BUSY = "Another driver is at the wheel: close that page, then load this one again."
HERE = ["localhost", "127.0.0.1", "[::1]"]  # another name of this machine is that of a foreign page
POLICY = "default-src 'self' 'unsafe-inline' data:; frame-ancestors 'none'"  # no page that is laid over this one
SAFE = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}


def serve(drive: Drive, host: str, port: int, token: str) -> None:
    """Serve the page until Ctrl-C."""
    with listening(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
        query, name = "?token=..." if token else "", in_address(host)
        print(f"drive at http://{name}:{listener.getsockname()[1]}/{query} (Ctrl-C ends it)", flush=True)
        limits: dict[str, Any] = dict(ws_max_size=2**16, timeout_graceful_shutdown=2)
        config = uvicorn.Config(create_app(drive, token, name), log_config=None, log_level="warning", **limits)
        uvicorn.Server(config).run(sockets=[listener])


def create_app(drive: Drive, token: str = "", name: str = HERE[0]) -> FastAPI:
    """The application; without a token it answers to this machine's own names, and the ``name`` it has, alone."""
    app, seat = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), asyncio.Lock()
    worker = ThreadPoolExecutor(1, "drive")  # all that is computed is computed there
    if not token:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*HERE, name])

    def is_known(asks: Any) -> bool:
        return not token or hmac.compare_digest(asks.query_params.get("token", "").encode(), token.encode())

    @app.get("/")
    async def page(request: Request) -> Response:
        if not is_known(request):
            return PlainTextResponse("The token is missing or wrong: open /?token=TOKEN.", 401)
        return HTMLResponse(Path(__file__).with_name("page.html").read_text(encoding="utf-8"), headers=SAFE)

    @app.websocket("/drive")
    async def driven(socket: WebSocket) -> None:
        origin = socket.headers.get("origin")
        if not is_known(socket) or (origin and urlsplit(origin).netloc != socket.headers.get("host")):
            return await socket.close(1008)
        await socket.accept()
        for _ in range(20):  # a page that is loaded again is soon gone
            if not seat.locked():
                break
            await asyncio.sleep(0.05)
        else:
            await socket.send_json({"error": BUSY})
            return await socket.close(1013)
        async with seat:
            await Driver(socket, drive, worker).run()

    return app


class Driver:
    """One connection, from its first message to its last."""

    def __init__(self, socket: WebSocket, drive: Drive, worker: ThreadPoolExecutor) -> None:
        self.socket, self.drive, self.worker = socket, drive, worker
        self.keys: dict[str, Any] = {}  # arguments of `Drive.advance`
        self.commands: list[Callable[[], Any]] = [partial(drive.restart, 0)]
        self.is_running, self.changed_at, self.awake = False, 0.0, asyncio.Event()
        self.shows: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))

    async def run(self) -> None:
        """Until the driver leaves; nothing is computed after that."""
        await self.socket.send_json({"hello": self.drive.facts()})
        imagines = asyncio.create_task(self._imagine())
        try:
            while (message := await self.socket.receive())["type"] != "websocket.disconnect":
                await self._heed(message.get("text") or "")
        finally:
            imagines.cancel()
            self.shows.cancel()
        await asyncio.wait([imagines, self.shows])
        for task in (imagines, self.shows):
            fault = None if task.cancelled() else task.exception()
            if fault is not None and not isinstance(fault, WebSocketDisconnect):
                log.error("the drive stood still", exc_info=fault)
        await asyncio.get_running_loop().run_in_executor(self.worker, int)  # behind what was being computed

    async def _heed(self, text: str) -> None:
        """Take over what a message of the page asks for."""
        try:
            found = foreign_json.loads(text)
            *deflections, scale, at = map(float, [*found["deflections"], found.get("scale", 1), found.get("at", 0)])
            start = int(found.get("start", -1))
            if not all(map(math.isfinite, (*deflections, scale, at))) or not -1 <= start < 2**40:
                raise ValueError("its numbers are out of range")
            if len(deflections) > self.drive.env.action_dim:
                raise ValueError(f"an action has {self.drive.env.action_dim} numbers")
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            return await self.socket.send_json({"error": f"This is no message of a driver: {error}."})
        deflections, scale = [max(-1.0, min(1.0, value)) for value in deflections], max(0.0, min(1.0, scale))
        self.keys = dict(deflections=deflections, scale=scale, autopilot=bool(found.get("autopilot")))
        self.is_running, self.changed_at = bool(found.get("run")), at
        if start >= 0:
            self.commands = [partial(self.drive.restart, start)]
        if "record" in found:
            self.commands.append(self.drive.record if found["record"] else self.drive.save)
        self.awake.set()

    async def _imagine(self) -> None:
        """Compute pictures while those before them are shown."""
        clock, due, takes = asyncio.get_running_loop().time, 0.0, 0.0  # due: when the next ones are
        while True:
            if not self.commands and not self.is_running:
                await self.awake.wait()
            elif not self.commands and (early := due - takes - clock()) > 0:
                await asyncio.sleep(early)
            else:
                began, changed_at = clock(), self.changed_at
                todo = self.commands.pop(0) if self.commands else partial(self.drive.advance, **self.keys)
                moments = await self._computed(todo)
                takes = max(clock() - began, 0.8 * takes)  # rather early than late
                if moments:
                    self.shows.cancel() if moments[0].figures["step"] == 0 else await self.shows
                    due = max(due, clock())
                    self.shows = asyncio.create_task(self._show(moments, due, changed_at))
                due += len(moments) / self.drive.fps
            self.awake.clear()

    async def _computed(self, todo: Callable[[], Any]) -> list[Moment]:
        """The pictures of a computation. A sentence, or a fault that the driver can mend, goes to the page."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(self.worker, todo)
        except Exception as error:  # a border: the page shows the message, the log what nobody foresaw
            if not isinstance(error, UserError):
                log.exception("the drive stands still")
            self.is_running, found = False, []
            await self.socket.send_json({"error": str(error)})
        if isinstance(found, list):
            return found
        await self.socket.send_json({"recording": bool(self.drive.recorded), "text": found})
        return []

    async def _show(self, moments: list[Moment], due: float, changed_at: float) -> None:
        """Send pictures when they are due: figures as JSON on one line, the picture behind it."""
        for k, moment in enumerate(moments):
            facts = {**moment.figures, "at": changed_at, "sides": 1 + (moment.true is not None)}
            message = json.dumps(facts).encode() + b"\n" + encoded(moment)
            await asyncio.sleep(due + k / self.drive.fps - asyncio.get_running_loop().time())
            await self.socket.send_bytes(message)


def encoded(moment: Moment) -> bytes:
    """The imagined picture, the simulator's to its right; small ones without loss."""
    from PIL import Image

    shown = [moment.picture] if moment.true is None else [moment.picture, moment.true]
    options = dict(format="JPEG", quality=92, subsampling=0) if len(moment.picture) > 128 else dict(format="PNG")
    file = io.BytesIO()
    Image.fromarray(torch.cat(shown, dim=1).numpy()).save(file, **options)
    return file.getvalue()
