# SPDX-License-Identifier: Apache-2.0
"""Connections to policy servers: openpi's websocket and GR00T's ZeroMQ socket, one request and one reply at a time."""

from collections.abc import Mapping
from typing import Any

import numpy

from cosmos_predict2.rl.policies.remote.layouts import Layout
from cosmos_predict2.rl.remote import connections
from cosmos_predict2.rl.remote.connections import Connection, Websocket
from cosmos_predict2.rl.remote.wire import LARGEST, Modality, pack, package, unpack
from imaginaire.errors import ConfigError

# What a server says of itself: the record of its policy, which ours give, and GR00T's modalities.
Facts = tuple[Mapping[str, Any], Mapping[str, Modality]]


class OpenPi(Websocket):
    port = 8000

    def open(self) -> Facts:
        return super().open(), {}

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
        return self.asked(request)["actions"]


class Gr00t(Connection):
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
        modalities = self._called("get_modality_config", connections.HANDSHAKE_S)
        self.is_flat = any(one.is_text for one in modalities.values())
        try:
            return self._called("get_policy_record", connections.HANDSHAKE_S), modalities
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
