# SPDX-License-Identifier: Apache-2.0
"""Servers of a policy: openpi's websocket, and GR00T's ZeroMQ socket. One decision is computed at a time.

A request that cannot be answered gets a sentence in the form in which its client expects an error; the connection and
the server go on.
"""

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import attrs
import numpy
import torch
from numpy.typing import NDArray

from cosmos_predict2.rl.episodes.episodes import lost, require_known_sentences, require_views
from cosmos_predict2.rl.interfaces import Mode
from cosmos_predict2.rl.policies.remote.layouts import Layout, observed
from cosmos_predict2.rl.remote.wire import LARGEST, RECORD, TOKEN, Modality, pack, package, reading, unpack
from imaginaire import random
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.listening import in_address, listening

log = logging.getLogger(__name__)


@dataclass
class ServedPolicy:
    """A policy that others ask; draws of its k-th decision follow from ``seed`` and k."""

    policy: Any
    about: Mapping[str, Any]  # of its card
    layout: Layout
    mode: Mode = "greedy"
    seed: int = 0
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        reads = self.policy.state_size if self.policy.reads_state else None
        for name, needed in (("actions", self.policy.action_dim), ("state", reads)):
            parts = getattr(self.layout, name)
            if needed not in (None, count := sum(parts.values())):
                raise ConfigError(
                    f"The layout's {name} ({', '.join(parts)}) are {count} numbers, the policy's {needed}: give"
                    f' --layout "{name}={{PART: NUMBERS}}".'
                )

    def record(self) -> dict[str, Any]:
        """The policy as a client of ours compares it with its environment."""
        policy = self.policy
        known = {name: list(getattr(policy, name)) for name in ("sentences", "views", "recorded_size")}
        known["contract"] = policy.contract.to_dict()
        action_dim = sum(self.layout.actions.values())
        sizes = dict(chunk=policy.chunk, action_dim=action_dim, execute=self.about.get("execute"))
        state = self.layout.state if policy.reads_state else {}
        layout = attrs.asdict(attrs.evolve(self.layout, state=state))
        return {**known, **sizes, "draws_when_greedy": policy.draws_when_greedy, "layout": layout}

    @torch.no_grad()
    def decide(self, request: Any) -> NDArray[Any]:
        """The actions, float32 [E, A, D]."""
        policy = self.policy
        with reading("The request"):
            seen = observed(self.layout, request, max(1, len(policy.views)), reads_state=policy.reads_state)
        require_known_sentences(policy.sentences, seen)
        require_views(type(policy).__name__, policy.views, seen)
        with self._lock:
            num, first = len(seen["full_image"]), self._count
            self._count += num
            draws = [random.generator(self.seed, first + i, "served decision") for i in range(num)]
            decision = policy.act(seen, mode=self.mode, generators=draws)
        actions = decision.actions_E_A_D.float().cpu()
        if lost(decision).any():
            raise DataError("The policy is a server's, which was lost: ask again.")
        if not actions.isfinite().all():
            raise DataError("The policy decided on numbers that are not finite.")
        return actions.numpy()  # type: ignore[no-any-return]


def fault_of(error: Exception, what: str = "policy") -> str:
    """The sentence that a client gets; what nobody foresaw is in the log."""
    if isinstance(error, UserError):
        return str(error)
    log.error("a request could not be answered", exc_info=error)
    return f"The {what} failed ({type(error).__name__}); the server's log has more."


def serve(served: ServedPolicy, protocol: str, host: str, port: int, token: str) -> None:
    """Serve until Ctrl-C; ``protocol`` is openpi, gr00t or gr00t_n1.5."""
    scheme = protocol.partition("_")[0]
    for name in ("msgpack", "websockets.sync.server" if scheme == "openpi" else "zmq"):
        package(name)  # before anybody asks
    with listening(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
        address = f"{scheme}://{in_address(host)}:{listener.getsockname()[1]}"
        print(f"{address} serves the policy (Ctrl-C ends it)", flush=True)
        if scheme == "openpi":
            with openpi_server(served, listener, token) as server:
                server.serve_forever()
        else:
            answers = Gr00tAnswers(served, token, is_text=protocol != scheme)
            with gr00t_socket(listener) as replies:
                while True:  # a signal that comes just before ZeroMQ waits is seen when the wait ends
                    if replies.poll(1000):
                        replies.send(answers.reply(replies.recv()))


# --- openpi


def openpi_server(served: ServedPolicy, listener: socket.socket, token: str = "") -> Any:
    """A server with a thread for each connection; /healthz is answered while decisions are computed."""
    closed = package("websockets.exceptions").ConnectionClosed

    def answered(connection: Any) -> None:
        took: dict[str, float] = {}  # milliseconds, of the decision before
        with contextlib.suppress(closed):
            connection.send(pack({RECORD: served.record()}, "openpi"))
            for data in connection:
                began = time.monotonic()
                connection.send(openpi_reply(served, data, took))
                took["prev_total_ms"] = 1e3 * (time.monotonic() - began)

    return websocket_server(answered, listener, token, TOKEN, LARGEST)


def websocket_server(
    answered: Callable[[Any], None], listener: socket.socket, token: str, variable: str, largest: int
) -> Any:
    """A server that calls ``answered`` with each connection, in a thread of its own, where ``token`` is given."""

    def admitted(connection: Any, request: Any) -> Any:
        if request.path == "/healthz":
            return connection.respond(200, "OK\n")
        given = request.headers.get("Authorization") or ""
        if token and not hmac.compare_digest(given.encode(), f"Api-Key {token}".encode()):
            return connection.respond(401, f"The token is missing or wrong: {variable}, or api_key.\n")
        return None

    limits: dict[str, Any] = dict(compression=None, max_size=largest, max_queue=1)
    make = package("websockets.sync.server").serve
    return make(answered, sock=listener, process_request=admitted, origins=[None], **limits)  # no page of a browser


def openpi_reply(served: ServedPolicy, data: str | bytes, took: Mapping[str, float]) -> str | bytes:
    """The reply to a message; a text is an error."""
    began = time.monotonic()
    try:
        if isinstance(data, str):
            raise DataError("A request is a binary message.")
        actions = served.decide(unpack(data, "openpi", "the client"))
    except Exception as error:  # a border: the client gets a sentence
        return fault_of(error)
    spent = {"infer_ms": 1e3 * (time.monotonic() - began)}
    return pack({"actions": actions[0], "policy_timing": spent, "server_timing": {**spent, **took}}, "openpi")


# --- GR00T


@contextlib.contextmanager
def gr00t_socket(listener: socket.socket) -> Iterator[Any]:
    """The socket of requests and replies, which takes over the one that listens."""
    zmq, (host, port, *_) = package("zmq"), listener.getsockname()
    with zmq.Context() as context, context.socket(zmq.REP) as replies:
        options = {zmq.LINGER: 0, zmq.MAXMSGSIZE: LARGEST, zmq.IPV6: int(":" in host)}
        for option, value in {**options, zmq.USE_FD: listener.detach()}.items():
            replies.setsockopt(option, value)
        replies.bind(f"tcp://{in_address(host)}:{port}")
        yield replies


@dataclass
class Gr00tAnswers:
    """Answers to N1.6 and N1.7, and to N1.5, by the form of what they ask; with ``is_text`` modalities are in the form
    of N1.5. ``kill`` is unknown: who may ask may not end."""

    served: ServedPolicy
    token: str = ""
    is_text: bool = False

    def reply(self, data: bytes) -> bytes:
        try:
            request = unpack(data, "gr00t", "the client")
            if not isinstance(request, Mapping):
                raise DataError("A request is a map with 'endpoint' and 'data'.")
            if self.token and not hmac.compare_digest(str(request.get("api_token")).encode(), self.token.encode()):
                raise ConfigError("Unauthorized: Invalid API token")
            return pack(self._answer(str(request.get("endpoint", "get_action")), request.get("data")), "gr00t")
        except Exception as error:  # a border: the client gets a sentence
            return pack({"error": fault_of(error)}, "gr00t")

    def _answer(self, endpoint: str, data: Any) -> Any:
        if endpoint == "get_action":
            return self._decided(data)
        if endpoint == "get_modality_config":
            return self._modalities()
        if endpoint == "get_policy_record":  # ours alone
            return self.served.record()
        if endpoint == "ping":
            return {"status": "ok", "message": "Server is running"}
        if endpoint == "reset":
            return {}
        raise ConfigError(f"Unknown endpoint: {endpoint}")

    def _decided(self, data: Any) -> Any:
        """N1.6 puts the observation beside options, and has an axis of environments; its simulators use flat names."""
        is_new = isinstance(data, Mapping) and isinstance(data.get("observation"), Mapping)
        request = data["observation"] if is_new else data
        ends = numpy.cumsum([*self.served.layout.actions.values()])[:-1]
        parts = dict(zip(self.served.layout.actions, numpy.split(self.served.decide(request), ends, axis=2)))
        if not is_new:
            return {name: part[0] for name, part in parts.items()}
        is_flat = "video" not in request
        return [{name if is_flat else name.removeprefix("action."): part for name, part in parts.items()}, {}]

    def _modalities(self) -> dict[str, Modality]:
        layout = self.served.layout
        parts = {"video": layout.pictures, "state": layout.state, "action": layout.actions, "language": [layout.text]}
        steps = {"action": tuple(range(self.served.policy.chunk))}
        return {
            modality: Modality(
                tuple(name if self.is_text else name.removeprefix(f"{modality}.") for name in names),
                steps.get(modality, (0,)),
                self.is_text,
            )
            for modality, names in parts.items()
        }
