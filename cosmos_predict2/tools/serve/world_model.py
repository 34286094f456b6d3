# SPDX-License-Identifier: Apache-2.0
"""A server of a world model: each connection is a session, with episodes of its own. One chunk is imagined at a time.

A request is a map with ``call`` (reset, chunk_step, get_state or load_state) and the arguments of that call of
`VecEnv`; the reply is a map of its results, or a sentence as text.
"""

import contextlib
import io
import socket
import struct
import threading
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import attrs
import numpy
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.remote import FORMAT, LARGEST, RESULTS, SCHEME, TOKEN
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.remote import wire
from cosmos_predict2.rl.remote.wire import RECORD, pack, package, reading, unpack
from cosmos_predict2.tools.serve.server import fault_of, websocket_server
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.listening import in_address, listening


@dataclass(eq=False)
class ServedWorld:
    """A world model that clients act in. ``make(num_envs, seed)`` gives the environment of a session.

    ``about`` has what clients compare and demand: ``inputs`` (digests) and ``places`` of world model and reward, their
    ``card``, ``parts`` (numbers of starts) and ``has_failures``. At most ``sessions`` are open, each of ``num_envs``
    places at most; one that asks for nothing for ``idle`` seconds ends.
    """

    make: Callable[[int, int], WorldModelEnv]
    about: Mapping[str, Any]
    num_envs: int = 64
    sessions: int = 8
    idle: float = 3600.0

    def __post_init__(self) -> None:
        self._lock, self._seats = threading.Lock(), threading.BoundedSemaphore(self.sessions)
        env = self.make(1, 0)
        env.state_reader = "A policy of a client" if env.head else ""  # then starts must have the state
        seen, _ = env.reset(options={"trial_ids": [0]})  # what does not fit is an error here
        if (size := self.num_envs * len(env.get_state())) > LARGEST:
            raise ConfigError(f"--num_envs {self.num_envs}: their state has {size} bytes, and {LARGEST} are the most.")
        self.largest = wire.LARGEST + size  # bytes of a request: small values take 70 times theirs once unpacked
        self.record: dict[str, Any] = {
            **dict(self.about, format=FORMAT, instance=uuid.uuid4().hex, num_envs=self.num_envs, metadata=env.metadata),
            "observation": {name: list(one.shape[1:]) for name, one in seen.items() if isinstance(one, Tensor)},
            **dict(views=list(env.views), contract=env.contract.to_dict(), num_noises=env.num_noises),
            **dict(state_size=env.state_size, predicts_state=env.head is not None, scoring=attrs.asdict(env.scoring)),
            "fps": float(env.imagination.config.fps),
        }

    def answer(self, connection: Any) -> None:
        """Greet a client, and answer it until it leaves or is idle."""
        asked = dict(parse_qsl(urlsplit(connection.request.path).query))
        with contextlib.suppress(package("websockets.exceptions").ConnectionClosed):
            if not asked:
                return connection.send(pack({RECORD: self.record}, "openpi"))  # type: ignore[no-any-return]
            if not self._seats.acquire(blocking=False):
                text = f"{self.sessions} sessions are open, and no more are allowed (--sessions)"
                return connection.close(1013, text)  # type: ignore[no-any-return]
            try:
                # Else a client that is alive and reads nothing would keep its seat for ever.
                limit = struct.pack("ll", *divmod(int(1e6 * self.idle), 10**6))
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                env = self._opened(asked)
                connection.send(pack({RECORD: self.record}, "openpi"))
                while True:
                    connection.send(self._reply(env, connection.recv(self.idle)))
            except TimeoutError:
                connection.close(1001, f"idle for {self.idle:g} seconds (--idle): connect again")
            except UserError as error:
                connection.send(str(error))
            finally:
                self._seats.release()

    def _opened(self, asked: Mapping[str, str]) -> WorldModelEnv:
        with reading("The address"):
            num_envs, seed = int(asked.get("num_envs", 0)) or self.num_envs, int(asked.get("seed", 0))
        if not 1 <= num_envs <= self.num_envs:
            raise ConfigError(f"num_envs={num_envs}: a session here has 1 to {self.num_envs} places (--num_envs).")
        return self.make(num_envs, seed)

    def _reply(self, env: WorldModelEnv, data: str | bytes) -> str | bytes:
        """The reply to a message; a text is an error."""
        try:
            if isinstance(data, str):
                raise DataError("A request is a binary message.")
            with reading("The request"):
                call = self._call_of(env, unpack(data, "openpi", "the client", self.largest))
            with self._lock, torch.no_grad():
                return pack(call(), "openpi")
        except Exception as error:  # a border: the client gets a sentence
            return fault_of(error, "world model")

    def _call_of(self, env: WorldModelEnv, request: Any) -> Callable[[], Mapping[str, Any]]:
        """The call that a request asks for; its words are read here, and nothing is computed yet."""
        name, get = request["call"], request.get
        seed, execute = (None if get(key) is None else int(get(key)) for key in ("seed", "execute"))
        options = {**(get("options") or {}), **({"env_ids": get("env_ids")} if get("env_ids") is not None else {})}
        options = {str(key): None if rows is None else [int(row) for row in rows] for key, rows in options.items()}
        if name == "reset":
            return lambda: dict(zip(("observation", "info"), env.reset(seed=seed, options=options)))
        if name == "get_state":
            return lambda: {"state": env.get_state()}
        if name == "load_state":
            state = bytes(request["state"])
            with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(state)) as file:
                if (size := sum(one.file_size for one in file.infolist())) > self.largest:
                    raise DataError(f"The state has {size} bytes, and {self.largest} are the most.")
            return lambda: env.load_state(state) or {}  # type: ignore[func-returns-value]
        if name != "chunk_step":
            raise DataError(f"There is no call '{name}': reset, chunk_step, get_state or load_state.")
        actions = torch.from_numpy(numpy.array(request["actions"], dtype=numpy.float32))
        env.keep_frames = bool(get("keep_frames"))
        ends = bool(get("terminate_on_success", self.record["scoring"]["terminate_on_success"]))
        env.scoring = attrs.evolve(env.scoring, terminate_on_success=ends)
        picture = len(env.views) * int(numpy.prod(self.record["observation"]["full_image"]))
        if env.keep_frames and (size := actions.shape[:2].numel() * picture) > LARGEST // 2:
            raise DataError(f"The frames would have {size} bytes: step fewer places at once (num_envs).")
        return lambda: dict(zip(RESULTS, env.chunk_step(actions, options.get("env_ids"), execute)))


def serve(served: ServedWorld, host: str, port: int, token: str) -> None:
    """Serve until Ctrl-C."""
    with listening(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
        address = f"{SCHEME}{in_address(host)}:{listener.getsockname()[1]}"
        print(f"{address} serves the world model (Ctrl-C ends it)", flush=True)
        with websocket_server(served.answer, listener, token, TOKEN, served.largest) as server:
            server.serve_forever()
