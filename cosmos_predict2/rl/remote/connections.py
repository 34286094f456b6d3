# SPDX-License-Identifier: Apache-2.0
"""Connections to servers of policies and of world models, one request and one reply at a time."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import urlsplit

from cosmos_predict2.rl.remote.wire import LARGEST, RECORD, pack, package, reading, unpack
from imaginaire.errors import ConfigError, UserError
from imaginaire.listening import in_address

HANDSHAKE_S = 10.0
PATIENCE_S = 60.0  # that a server may be away later, where nothing else is set
OPENPI, GR00T = "openpi", "gr00t"  # schemes of the addresses of policies
MOST_LOST = 3  # requests in a row: the server answers greetings alone


def is_policy(address: str) -> bool:
    """True for the address of a policy that a server decides for."""
    return urlsplit(address).scheme in (OPENPI, GR00T)


class ConnectionLost(Exception):
    """The connection is gone, or no reply came in time."""


class Connection(ABC):
    """A server at the address ``name``, which may take ``timeout`` seconds for a reply; ``variable`` of the environment
    holds its token."""

    port: ClassVar[int]
    waits: ClassVar[str] = "--options patience=SECONDS waits for it."
    error: ClassVar[type[UserError]] = ConfigError  # for what the server refuses
    faults: tuple[type[Exception], ...] = (OSError,)  # of its socket

    def __init__(self, name: str, variable: str, timeout: float) -> None:
        place = urlsplit(name)
        host = place.hostname or ""
        if not host or place.path.strip("/") or place.query:
            raise ConfigError(f"{name} is no server's address: expected {place.scheme}://HOST:{self.port}.")
        self.place = f"{in_address(host)}:{place.port or self.port}"
        self.name, self.variable, self.timeout = name, variable, timeout
        self.token = os.environ.get(variable, "")
        self.socket: Any = None

    @abstractmethod
    def open(self) -> Any:
        """Connect, and return what the server states of itself."""

    def opened(self, patience: float) -> Any:
        """The same, at the latest after ``patience`` seconds."""
        until = time.monotonic() + patience
        while True:
            try:
                with reading(f"The greeting of {self.name}"):
                    return self.open()
            except ConnectionLost as error:
                self.close()
                if time.monotonic() >= until:
                    cure = f"Is its server up, and the port right? {self.waits}"
                    raise ConfigError(f"{self.name} does not answer ({error}). {cure}") from error
                time.sleep(min(1.0, patience / 10))

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """Inside, faults of the socket are `ConnectionLost`."""
        try:
            yield
        except self.faults as error:
            is_late = isinstance(error, TimeoutError) or type(error).__name__ == "Again"  # ZeroMQ's
            raise ConnectionLost("no answer in time" if is_late else str(error)) from error

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def refused(self, text: str, *, is_token: bool = False) -> UserError:
        """The error for what the server said; of a traceback its last line."""
        cure = f" Set {self.variable} to the server's token." if is_token else ""
        return self.error(f"{self.name} refuses: {(text.strip().splitlines() or [''])[-1][:500]}{cure}")


class Websocket(Connection):
    """A server that greets with a record and answers a binary message by one, an error by a text."""

    largest: ClassVar[int] = LARGEST
    query = ""

    def open(self) -> Any:
        headers = {"Authorization": f"Api-Key {self.token}"} if self.token else None
        limits: dict[str, Any] = dict(compression=None, max_size=self.largest, max_queue=1, open_timeout=HANDSHAKE_S)
        connect, exceptions = package("websockets.sync.client").connect, package("websockets.exceptions")
        self.faults = (OSError, exceptions.WebSocketException)
        with self._losses():
            try:
                connected = connect(f"ws://{self.place}/{self.query}", additional_headers=headers, proxy=None, **limits)
                self.socket = connected.__enter__()  # which of a later websockets gives the connection
            except exceptions.InvalidStatus as error:
                status = error.response.status_code
                raise self.refused(f"HTTP {status}.", is_token=status in (401, 403)) from error
        return self._received(HANDSHAKE_S).get(RECORD, {})

    def asked(self, request: Any) -> Any:
        """The reply to a request."""
        with self._losses():
            self.socket.send(pack(request, "openpi"))
        return self._received(self.timeout)

    def _received(self, timeout: float) -> Any:
        with self._losses():
            data = self.socket.recv(timeout)
        if isinstance(data, str):  # an error of the server's
            raise self.refused(data)
        return unpack(data, "openpi", self.name, self.largest)
