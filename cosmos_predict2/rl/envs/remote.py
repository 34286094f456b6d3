# SPDX-License-Identifier: Apache-2.0
"""Episodes that a server imagines (scripts.serve_world_model), by its address: wfm://HOST:8100.

    env = of_address("wfm://gpubox:8100?num_envs=16")

Results are those of the server's `WorldModelEnv`, bit by bit. A connection that is lost costs the episodes that were
under way, which are over and not valid; the next reset connects again.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionContract
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.interfaces import EnvDefaults, Info, Observation
from cosmos_predict2.rl.remote.connections import MOST_LOST, PATIENCE_S, ConnectionLost, Websocket
from cosmos_predict2.rl.remote.wire import reading
from imaginaire.buildable import made
from imaginaire.config import lazy_config
from imaginaire.errors import ConfigError, DataError, near

log = logging.getLogger(__name__)

SCHEME, TOKEN = "wfm://", "WFM_WORLD_MODEL_TOKEN"
FORMAT = "world model 1"  # of the greeting
LARGEST = 1 << 29  # bytes of a message: a chunk of 12 actions in 64 places of 256x320 pixels has 190 million
RESULTS = ("observation", "reward", "terminated", "truncated", "info")


def address_of(env: Any) -> str:
    """The address in a configuration's environment; empty of one in this process."""
    found = env.get("address") if isinstance(env, Mapping) else env
    return found if isinstance(found, str) and found.startswith(SCHEME) else ""


def of_address(address: str, **options: Any) -> "RemoteEnv":
    """The environment at an address, with arguments of `RemoteEnv` behind it, ?KEY=VALUE&KEY=VALUE, which win."""
    place, own = _parts(address)
    return made(RemoteEnv, {**options, **own}, f"{address}: ", address=place)


def _parts(address: str) -> tuple[str, dict[str, Any]]:
    place, _, query = address.partition("?")
    words = (word.partition("=") for word in query.split("&") if word)
    return place, {key: lazy_config.plain_data(value, f"{address}: {key}") for key, _, value in words}


def facts_of(address: str) -> Mapping[str, Any]:
    """The greeting of the server at an address: what it imagines by."""
    place, own = _parts(address)
    with reading(f"{address}: its port or patience"):
        session, patience = Session(place, TOKEN, 0.0), float(own.get("patience", 0))
    with closing(session):
        return session.opened(patience)  # type: ignore[no-any-return]


class Session(Websocket):
    """A connection; with a ``query`` it has episodes of its own."""

    port, largest, error = 8100, LARGEST, DataError
    waits = "?patience=SECONDS behind the address waits for it."

    def open(self) -> Any:
        facts = super().open()
        if facts.get("format") != FORMAT:
            raise ConfigError(f"{self.name} serves no '{FORMAT}', but perhaps a policy: is the port right?")
        return facts


@dataclass(eq=False)
class RemoteEnv(EnvDefaults):
    """``num_envs`` places at the server of ``address``; see `VecEnv`. 0: as many as it allows.

    With a ``part``, "train" or "held_out", ``trial_ids`` count the starts of that part alone. A reply may take
    ``timeout`` seconds. A server may be away for ``patience`` seconds; None is 0 at first, and then 60.
    """

    address: str
    num_envs: int = 0
    part: str = ""
    seed: int = 0
    timeout: float = 600.0
    patience: float | None = None
    keep_frames: bool | None = False

    def __post_init__(self) -> None:
        address, patience = self.address, self.patience
        with reading(f"{address}: num_envs={self.num_envs}, seed={self.seed}, timeout or patience"):
            self.connection = Session(address, TOKEN, float(self.timeout))
            self.connection.query = f"?num_envs={int(self.num_envs)}&seed={int(self.seed)}"
            self.facts = facts = self.connection.opened(float(patience or 0))
        with reading(f"The greeting of {address}"):
            self.num_envs, self.metadata = int(self.num_envs) or int(facts["num_envs"]), dict(facts["metadata"])
            self.views, self.contract = tuple(facts["views"]), ActionContract.read(facts["contract"])
            self.num_noises, self.state_size = int(facts["num_noises"]), int(facts["state_size"])
            self.head = facts["predicts_state"] or None  # of the state, which is else zeros
            self.scoring = Scoring(**facts["scoring"])
            if self.part and self.part not in facts["parts"]:
                raise ConfigError(
                    f"{address} has no starts of the part '{self.part}'.{near(self.part, facts['parts'])}"
                )
            self._trials: Sequence[int] = facts["parts"].get(self.part, ())
        self.imagination, self.state_reader, self.is_open, self.num_lost = address, "", True, 0
        self.terminate_on_success = self.scoring.terminate_on_success
        self._played: set[int] = set()  # places with an episode of this session
        self._lost: set[int] = set()  # places whose episodes were lost

    def __reduce__(self) -> Any:
        """Travels without its connection."""
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Observation, Info]:
        given = {key: rows if rows is None else [int(row) for row in rows] for key, rows in (options or {}).items()}
        if self._trials and (trials := given.get("trial_ids")):
            given["trial_ids"] = [self._trials[trial % len(self._trials)] for trial in trials]
        while (reply := self._called("reset", seed=seed, options=given)) is None:
            pass  # a session that was lost begins anew
        ids = {*range(self.num_envs)} if (some := given.get("env_ids")) is None else {*some}
        self._played, self._lost = self._played | ids, self._lost - ids
        return self._parts_of(reply, "observation", "info")  # type: ignore[return-value]

    def chunk_step(
        self, actions_E_A_D: Tensor, env_ids: Sequence[int] | None = None, execute: int | None = None
    ) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Have imagined what the actions lead to; see `VecEnv.chunk_step`."""
        actions = torch.as_tensor(actions_E_A_D).detach().to("cpu", torch.float32)
        ids = [*range(self.num_envs)] if env_ids is None else [int(i) for i in env_ids]
        how = dict(keep_frames=self.keep_frames, terminate_on_success=self.terminate_on_success)
        if self._lost.isdisjoint(ids):
            reply = self._called("chunk_step", actions=actions, env_ids=ids, execute=execute, **how)
        else:
            reply = None  # so are those that were begun since, together with lost ones
        if reply is None:
            self._lost, reply = self._lost | {*ids}, self._over(len(ids), actions.shape[1])
        return self._parts_of(reply, *RESULTS)  # type: ignore[return-value]

    def get_state(self) -> bytes:
        reply = None if self._lost else self._called("get_state")
        if reply is None:
            raise ConfigError(f"{self.address} was lost, and with it episodes: reset them before get_state.")
        return self._parts_of(reply, "state")[0]  # type: ignore[no-any-return]

    def load_state(self, state: bytes) -> None:
        while self._called("load_state", state=state) is None:
            pass
        self._played, self._lost = {*range(self.num_envs)}, set()

    def close(self) -> None:
        self.connection.close()
        self.is_open = False

    def _parts_of(self, reply: Any, *names: str) -> tuple[Any, ...]:
        with reading(f"The reply of {self.address}"):
            return tuple(reply[name] for name in names)

    # --- what is lost

    def _called(self, call: str, **arguments: Any) -> Any:
        """The reply; None where the session was lost."""
        if not self.is_open:
            self._open_again()
        try:
            reply = _tensors(self.connection.asked({"call": call, **arguments}))
        except ConnectionLost as error:
            self.close()
            self._played, self._lost, self.num_lost = set(), self._lost | self._played, self.num_lost + 1
            if self.num_lost >= MOST_LOST:
                raise ConfigError(f"{self.address} was lost {self.num_lost} times in a row: {error}.") from error
            log.warning("%s was lost (%s): the episodes that it imagined are over", self.address, error)
            return None
        self.num_lost = 0 if call == "chunk_step" else self.num_lost
        return reply

    def _open_again(self) -> None:
        before = self.facts
        now = self.connection.opened(PATIENCE_S if self.patience is None else float(self.patience))
        if other := [key for key in {**before, **now} if key != "instance" and before.get(key) != now.get(key)]:
            self.close()
            raise ConfigError(f"{self.address} has another world than before ({', '.join(other)}): begin again.")
        if now["instance"] != before["instance"]:
            log.warning("%s was restarted: its episodes begin anew", self.address)
        self.facts, self.is_open = now, True

    def _over(self, num: int, num_actions: int) -> dict[str, Any]:
        """Results of episodes that were lost: not valid, over, and nothing executed."""
        flags_E, flags_E_A = torch.zeros(num, dtype=torch.bool), torch.zeros(num, num_actions, dtype=torch.bool)
        seen: dict[str, Any] = {"task_description": [""] * num}
        for name, shape in self.facts["observation"].items():
            seen[name] = torch.zeros(num, *shape, dtype=torch.float32 if name == "state" else torch.uint8)
        info = dict.fromkeys(("success", "active", "valid", "disagrees"), flags_E)
        info |= dict.fromkeys(("finish_step", "task_ids", "trial_ids"), flags_E.long()) | {"executed": flags_E_A}
        info |= {"value": flags_E.float(), "values": flags_E_A.float()}
        if self.keep_frames:
            rows, *rest = seen["full_image"].shape[1:]
            info["frames"] = torch.zeros(num, num_actions, rows * len(self.views), *rest, dtype=torch.uint8)
        return dict(zip(RESULTS, (seen, flags_E_A.float(), flags_E_A, flags_E_A, info)))


def _tensors(value: Any) -> Any:
    """The same with tensors in place of arrays."""
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value)
    return {name: _tensors(one) for name, one in value.items()} if isinstance(value, dict) else value
