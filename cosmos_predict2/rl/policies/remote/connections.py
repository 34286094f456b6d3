# SPDX-License-Identifier: Apache-2.0
"""Connections to policy servers: openpi's websocket and GR00T's ZeroMQ socket, one request and one reply at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy

from cosmos_predict2.rl.policies.remote.layouts import Layout
from cosmos_predict2.rl.policies.remote.wire import LARGEST, RECORD, TOKEN, Modality, pack, package, unpack
from imaginaire.errors import ConfigError

HANDSHAKE_S = 10.0


class Lost(Exception):
    """The connection is gone, or no reply came in time."""


# What a server says of itself: the record of its policy, which ours give, and GR00T's modalities.
Facts = tuple[Mapping[str, Any], Mapping[str, Modality]]


class _Connection:
    """A server at ``name``, which may take ``timeout`` seconds for a reply."""

    port: ClassVar[int]
    faults: tuple[type[Exception], ...] = (OSError,)  # of its socket

    def __init__(self, name: str, host: str, port: int | None, token: str, timeout: float) -> None:
        self.name, self.place, self.token, self.timeout = name, f"{host}:{port or self.port}", token, timeout
        self.socket: Any = None

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """Inside, faults of the socket are `Lost`."""
        try:
            yield
        except self.faults as error:
            is_late = isinstance(error, TimeoutError) or type(error).__name__ == "Again"  # ZeroMQ's
            raise Lost("no answer in time" if is_late else str(error)) from error

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def refused(self, text: str, *, is_token: bool = False) -> ConfigError:
        """The error for what the server said; of a traceback its last line."""
        cure = f" Set {TOKEN} to the server's token." if is_token else ""
        return ConfigError(f"{self.name} refuses: {(text.strip().splitlines() or [''])[-1][:500]}{cure}")


class OpenPi(_Connection):
    port = 8000

    def open(self) -> Facts:
        headers = {"Authorization": f"Api-Key {self.token}"} if self.token else None
        limits: dict[str, Any] = dict(compression=None, max_size=LARGEST, max_queue=1, open_timeout=HANDSHAKE_S)
        connect, exceptions = package("websockets.sync.client").connect, package("websockets.exceptions")
        self.faults = (OSError, exceptions.WebSocketException)
        with self._losses():
            try:
                connected = connect(f"ws://{self.place}", additional_headers=headers, proxy=None, **limits)
                self.socket = connected.__enter__()  # which of a later websockets gives the connection
            except exceptions.InvalidStatus as error:
                status = error.response.status_code
                raise self.refused(f"HTTP {status}.", is_token=status in (401, 403)) from error
        return self._received(HANDSHAKE_S).get(RECORD, {}), {}

    def ask(self, layout: Layout, pictures: Mapping[str, Any], state: Mapping[str, Any], text: str) -> Any:
        """The actions of a decision, [H, D]."""
        if layout.is_channels_first:
            pictures = {name: picture.transpose(2, 0, 1) for name, picture in pictures.items()}
        request: dict[str, Any] = {}
        for name, value in {**pictures, **state, layout.text: text}.items():
            outer, _, inner = name.partition("/")
            if inner and layout.is_nested:
                request.setdefault(outer, {})[inner] = value
            else:
                request[name] = value
        with self._losses():
            self.socket.send(pack(request, "openpi"))
        return self._received(self.timeout)["actions"]

    def _received(self, timeout: float) -> Any:
        with self._losses():
            data = self.socket.recv(timeout)
        if isinstance(data, str):  # an error of the server's
            raise self.refused(data)
        return unpack(data, "openpi", self.name)


class Gr00t(_Connection):
    """N1.6 and N1.7, and N1.5, whose modalities are texts."""

    port = 5555
    is_flat = False  # N1.5

    def open(self) -> Facts:
        zmq = package("zmq")
        self.faults, self.socket = (zmq.ZMQError,), zmq.Context.instance().socket(zmq.REQ)
        is_v6 = self.place.startswith("[")  # of a name it takes the first address alone
        for option, value in {zmq.LINGER: 0, zmq.MAXMSGSIZE: LARGEST, zmq.IPV6: int(is_v6)}.items():
            self.socket.setsockopt(option, value)
        with self._losses():
            self.socket.connect(f"tcp://{self.place}")
        modalities = self._called("get_modality_config", HANDSHAKE_S)
        self.is_flat = any(one.is_text for one in modalities.values())
        try:
            return self._called("get_policy_record", HANDSHAKE_S), modalities
        except ConfigError:  # the server has no such endpoint: it is not one of ours
            return {}, modalities

    def ask(self, layout: Layout, pictures: Mapping[str, Any], state: Mapping[str, Any], text: str) -> Any:
        """The actions of a decision, [H, D]."""
        flat = {name: value[None] for name, value in {**pictures, **state}.items()}
        if self.is_flat:
            reply = self._called("get_action", self.timeout, {**flat, layout.text: [text]})
        else:
            nested: dict[str, Any] = {"video": {}, "state": {}, "language": {layout.text: [[text]]}}
            for name, value in flat.items():
                modality, _, part = name.partition(".")
                nested[modality][part] = value[None]
            reply, _ = self._called("get_action", self.timeout, {"observation": nested, "options": None})
        parts = {name.removeprefix("action."): numpy.asarray(part) for name, part in reply.items()}
        found = [parts[name.removeprefix("action.")] for name in layout.actions]
        rows = found if self.is_flat else [part[0] for part in found]
        return numpy.concatenate([row.reshape(len(row), -1) for row in rows], axis=1)

    def _called(self, endpoint: str, timeout: float, data: Any = None) -> Any:
        request = {"endpoint": endpoint, **({} if data is None else {"data": data})}
        message = pack({**request, **({"api_token": self.token} if self.token else {})}, "gr00t")
        with self._losses():
            for option in (package("zmq").SNDTIMEO, package("zmq").RCVTIMEO):
                self.socket.setsockopt(option, round(1e3 * timeout))
            self.socket.send(message)
            reply = self.socket.recv()
        found = unpack(reply, "gr00t", self.name)
        if isinstance(found, Mapping) and "error" in found:
            raise self.refused(str(found["error"]), is_token="Unauthorized" in str(found["error"]))
        return found
