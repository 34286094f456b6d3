# SPDX-License-Identifier: Apache-2.0
"""A policy that a server decides for, openpi's (openpi://HOST:8000) or GR00T's (gr00t://HOST:5555).

Each is asked by a connection of its own, one request and one reply at a time. A connection that is lost costs the
episode that asked. A server that stays away, or refuses, ends the run.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy
import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionContract
from cosmos_predict2.rl.interfaces import (
    OF_RECORDINGS,
    Decision,
    Generators,
    LogProb,
    Mode,
    Observation,
    PolicyDefaults,
)
from cosmos_predict2.rl.policies.remote.layouts import LAYOUTS, Layout, layout_of, shown
from cosmos_predict2.rl.remote import connections
from cosmos_predict2.rl.remote.connections import (
    GR00T,
    MOST_LOST,
    OPENPI,
    PATIENCE_S,
    Connection,
    ConnectionLost,
    Websocket,
)
from cosmos_predict2.rl.remote.wire import LARGEST, TOKEN, Modality, pack, package, reading, unpack
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

PROBE = (224, 224)  # a black picture, which a server is asked about that has no record of its policy


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


PROTOCOLS: dict[str, type[OpenPi] | type[Gr00t]] = {OPENPI: OpenPi, GR00T: Gr00t}


class RemotePolicy(PolicyDefaults):
    """The policy of the server at ``address``.

    ``layout`` and ``fields``, those of `Layout`, name what it is shown, where the server does not. ``names`` and
    ``rate`` are of its actions, in place of the server's; GR00T's parts are names where each is one number. With
    ``zero_state`` zeros stand for the robot's state where an environment shows none. A reply may take ``timeout``
    seconds. A server may be away for ``patience`` seconds; None is 0 at first, and then 60.
    """

    def __init__(
        self,
        address: str,
        layout: str | None = None,
        names: Sequence[str] = (),
        rate: float | None = None,
        zero_state: bool = False,
        timeout: float = 120.0,
        patience: float | None = None,
        **fields: Any,
    ) -> None:
        scheme = urlsplit(address).scheme
        layout_of(scheme, layout, fields)  # raises for an option that is none, before a server is waited for
        with reading(f"{address}, timeout={timeout} or patience={patience}"):
            self.connection: OpenPi | Gr00t = PROTOCOLS[scheme](address, TOKEN, float(timeout))
            self.patience = PATIENCE_S if patience is None else float(patience)
        self.address, self.zero_state, self.num_lost = address, zero_state, 0
        self.facts: Facts = self.connection.opened(0.0 if patience is None else self.patience)
        self.is_open, (own, _) = True, self.facts
        with reading(f"The record of a policy that {address} sent"):
            stated = _stated(self.facts) if layout is None else None
            self.about = {name: own[name] for name in (*OF_RECORDINGS, "execute") if own.get(name)}
            contract = ActionContract.read(own.get("contract"))
            sizes = (int(own["chunk"]), int(own["action_dim"])) if own else None
        self.layout = layout_of(scheme, layout, fields, stated)
        self.reads_state, self.state_size = bool(self.layout.state) and not zero_state, sum(self.layout.state.values())
        self.draws_when_greedy = bool(own.get("draws_when_greedy", True))
        self.chunk, self.action_dim = sizes or self._probed()
        parts = tuple(part.removeprefix("action.") for part in self.layout.actions)
        known = contract.names if own or len(parts) != self.action_dim else parts
        given_names = (names,) if isinstance(names, str) else tuple(names)
        self.about["contract"] = replace(contract, names=given_names or known, rate=rate or contract.rate).to_dict()

    def _probed(self) -> tuple[int, int]:
        """Actions of a decision, and numbers of an action."""
        black = torch.zeros(1, *(self.layout.size or PROBE), 3, dtype=torch.uint8)
        wrists = black[:, None].expand(-1, len(self.layout.pictures) - 1, -1, -1, -1)
        state = torch.zeros(1, sum(self.layout.state.values()))
        found = self._asked(dict(full_image=black, wrist_image=wrists, state=state, task_description=[""]), 0)
        if found is None:
            raise ConfigError(f"{self.address} answers greetings, but does not decide.")
        return found.shape[0], found.shape[1]

    def act(
        self, observation: Observation, *, mode: Mode, generators: Generators, temperature: float = 1.0
    ) -> Decision:
        if mode == "sample":
            raise ConfigError(f"{self.address} decides as its server was started: give --mode greedy here.")
        rows = [self._asked(observation, i) for i in range(len(observation["full_image"]))]
        actions = torch.zeros(len(rows), self.chunk, self.action_dim)
        for i, row in enumerate(rows):
            if row is not None:
                with reading(f"The reply of {self.address}"):
                    if len(row) < self.chunk or row.shape[1] != self.action_dim:
                        raise ValueError(f"its actions are {[*row.shape]}, not {[self.chunk, self.action_dim]}")
                actions[i] = row[: self.chunk]
        return Decision(actions, {}, None, torch.tensor([row is None for row in rows]))

    def log_prob(self, record: Mapping[str, Tensor]) -> LogProb:
        raise ConfigError(f"{self.address} gives actions without a probability: it can be evaluated only.")

    def _asked(self, observation: Observation, row: int) -> Tensor | None:
        """The actions [H, D] for one environment; None where the connection was lost."""
        pictures, state = shown(self.layout, observation, row, fills_state=self.zero_state)
        text = str(observation["task_description"][row])
        if not self.is_open and self.connection.opened(self.patience) != self.facts:
            raise ConfigError(f"{self.address} has another policy than before: begin again.")
        self.is_open = True
        try:
            with reading(f"The reply of {self.address}"):
                found = self.connection.ask(self.layout, pictures, state, text)
                actions = torch.from_numpy(numpy.array(found, dtype=numpy.float32))
                if actions.ndim != 2 or not len(actions) or not actions.isfinite().all():
                    raise ValueError(f"its actions are {[*actions.shape]}, not [actions, numbers], or not finite")
        except ConnectionLost as error:
            self.connection.close()
            self.is_open, self.num_lost = False, self.num_lost + 1
            if self.num_lost >= MOST_LOST:
                raise ConfigError(f"{self.address} was lost {self.num_lost} times in a row: {error}.") from error
            log.warning("%s was lost (%s): the episode that it decided for is over", self.address, error)
            return None
        self.num_lost = 0
        return actions


def _stated(facts: Facts) -> Layout | None:
    """The layout that a server states; None of one that does not. GR00T does not say how wide parts of a state are."""
    own, modalities = facts
    if own:
        return Layout(**own["layout"])
    if not modalities:
        return None
    video, state, action, text = (modalities[name] for name in ("video", "state", "action", "language"))
    if len(video.steps) != 1 or len(state.steps) != 1:
        raise ConfigError("The server's policy looks back in time, but is shown the present picture alone.")
    parts = [name.removeprefix("state.") for name in state.keys]
    widths = next((one.state for one in LAYOUTS["gr00t"].values() if [*one.state] == parts), dict.fromkeys(parts, 1))
    return Layout(video.keys, widths, text.keys[0], dict.fromkeys(action.keys, 1), joint=".")
