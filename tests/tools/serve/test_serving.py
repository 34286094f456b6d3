# SPDX-License-Identifier: Apache-2.0
"""Policies behind servers: ours against our clients, against the public ones where they are installed, and lost."""

import contextlib
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import zmq
from websockets.sync.client import connect
from websockets.sync.server import serve as serve_websocket

from cosmos_predict2.actions.transforms import ActionContract
from cosmos_predict2.released import TINY_POLICY
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.episodes import LocalRollout
from cosmos_predict2.rl.episodes.policy_evaluation import held_out_starts
from cosmos_predict2.rl.interfaces import OF_RECORDINGS, Decision, PolicyDefaults
from cosmos_predict2.rl.policies.files import find_policy, read_policy
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.rl.policies.pi05.tiny import write_tiny
from cosmos_predict2.rl.policies.remote.layouts import layout_of
from cosmos_predict2.rl.policies.remote.policy import RemotePolicy
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.remote import connections, wire
from cosmos_predict2.rl.remote.wire import TOKEN
from cosmos_predict2.tools.serve.server import Gr00tAnswers, ServedPolicy, gr00t_socket, openpi_server
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.listening import listening
from scripts import evaluate_policy, serve_policy
from tests.programs import HANG_S, call, warm_python
from tests.rl.policies.seen import generators, observation

PARTS = {"x": 1, "y": 1, "rest": 2}  # of the toy world's actions
ADDRESS = re.compile(r"(openpi|gr00t)://127\.0\.0\.1:\d+")


class Echo(PolicyDefaults):
    """Decides on what it is shown: mean brightness of each picture, the state and its words' length."""

    action_dim, chunk, reads_state, state_size = 4, 3, True, 8

    def act(self, observation: Any, **_: Any) -> Decision:
        full, wrist = observation["full_image"].float(), observation["wrist_image"].float()
        seen = [full.mean(dim=(1, 2, 3)), wrist.mean(dim=(1, 2, 3, 4)), observation["state"] @ torch.arange(8.0)]
        words = torch.tensor([float(len(one)) for one in observation["task_description"]])
        return Decision(torch.stack([*seen, words], dim=1)[:, None].expand(-1, 3, -1) * torch.arange(1, 4)[:, None], {})


def seen(num: int = 2, size: int = 24, state: int = 8) -> Any:
    return observation(num, size=(size, size), state=state)


def decided(policy: Any, observation: Any) -> torch.Tensor:
    return policy.act(observation, mode="greedy", generators=generators(len(observation["full_image"]))).actions_E_A_D


@contextlib.contextmanager
def served(policy: Any, protocol: str = "openpi", token: str = "", port: int = 0, **fields: Any) -> Iterator[str]:
    """The address of a server in threads of this process."""
    scheme = protocol.partition("_")[0]
    actions = {"actions": 4} if scheme == "openpi" else PARTS
    layout = layout_of(scheme, None, {"actions": actions, **fields})
    one, is_over = ServedPolicy(policy, {"execute": 2}, layout), threading.Event()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1", port))
        address = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        if scheme == "openpi":
            server = stack.enter_context(openpi_server(one, listener, token))
            thread = threading.Thread(target=server.serve_forever)
        else:
            replies = stack.enter_context(gr00t_socket(listener))
            answers = Gr00tAnswers(one, token, is_text=protocol != scheme)

            def answer() -> None:
                while not is_over.is_set():
                    if replies.poll(20):
                        replies.send(answers.reply(replies.recv()))

            thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield address
        finally:
            is_over.set()
            if scheme == "openpi":
                server.shutdown()
            thread.join()


@contextlib.contextmanager
def foreign(handler: Callable[[Any], None], port: int = 0) -> Iterator[str]:
    """An openpi server that is not ours."""
    with serve_websocket(handler, "127.0.0.1", port, compression=None) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"openpi://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()


@pytest.fixture
def remotes() -> Iterator[Callable[..., RemotePolicy]]:
    """Makes remote policies, which are closed at the end."""
    made: list[RemotePolicy] = []

    def find(address: str, **options: Any) -> RemotePolicy:
        made.append(find_policy(address, options=options)[0])
        return made[-1]

    yield find
    for one in made:
        one.connection.close()


PROTOCOLS = ["openpi", "gr00t", "gr00t_n1.5"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_gives_the_same_actions(protocol: str, remotes: Any) -> None:
    with served(Echo(), protocol) as address:
        remote = remotes(address)
        assert (remote.chunk, remote.action_dim, remote.reads_state, remote.draws_when_greedy) == (3, 4, True, False)
        assert torch.equal(decided(remote, seen()), decided(Echo(), seen()))
        assert torch.equal(decided(remote, seen(1)), decided(Echo(), seen(1)))


class Drawing(ToyPolicy):
    """A policy whose likeliest decisions are drawn, as those of a flow are."""

    draws_when_greedy = True

    def act(self, observation: Any, **options: Any) -> Decision:
        return super().act(observation, **{**options, "mode": "sample"})


@pytest.mark.parametrize("name", ["toy", pytest.param("pi05", marks=pytest.mark.slow)])
def test_a_policy_that_draws_is_seeded_by_the_server(name: str, tmp_path: Path, remotes: Any) -> None:
    """Two servers of one seed agree, and their second decisions are others. PI0.5 is in its public layout."""
    found: list[list[torch.Tensor]] = []
    torch.manual_seed(0)
    policy: Any = Drawing() if name == "toy" else Pi05Policy(str(write_tiny(tmp_path, action_horizon=4, hold=3))).eval()
    for _ in range(2):
        with served(policy, actions={"actions": policy.action_dim}) as address:
            remote = remotes(address)
            assert remote.draws_when_greedy and not remote.reads_state
            found.append([decided(remote, seen(1)) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(*found[0])


@pytest.mark.parametrize("protocol", ["openpi", "gr00t"])
def test_the_record_of_a_policy_is_compared(protocol: str, remotes: Any) -> None:
    policy = ToyPolicy()
    policy.sentences, policy.views, policy.recorded_size = ("push", "pull"), ("top",), (96, 160)
    policy.contract = ActionContract(("a", "b"), 10.0, ("q",))
    with served(policy, protocol) as address:
        remote, card = find_policy(address)
        remote.connection.close()
        assert all(getattr(remote, name) == getattr(policy, name) for name in OF_RECORDINGS)
        assert card.about["execute"] == 2 and (remote.chunk, remote.action_dim) == (12, 4)
        assert not remote.layout.state  # which it does not read
        named = remotes(address, names=["c", "d"], rate=20.0)
        with pytest.raises(ConfigError, match=r"takes the actions \(a, b\), but theirs \(c, d\)"):
            policy.contract.require(named.contract, "ours", "theirs", "mend it")
        with pytest.raises(ConfigError, match="calls its task 'fly'"):
            decided(remotes(address), {**seen(1), "task_description": ["fly"]})


def test_sizes_of_state_and_pictures_are_compared(remotes: Any) -> None:
    with pytest.raises(ConfigError, match=r"state \(observation/state\) are 7 numbers, the policy's 8"):
        ServedPolicy(Echo(), {}, layout_of("openpi", None, {"actions": {"a": 4}, "state": {"observation/state": 7}}))
    with pytest.raises(ConfigError, match=r"actions \(actions\) are 7 numbers, the policy's 4"):
        ServedPolicy(Echo(), {}, layout_of("openpi", None, {}))
    with served(Echo(), size=[24, 24]) as address:
        remote = remotes(address)
        with pytest.raises(ConfigError, match=r"has 16x24 pixels|has 16x16 pixels, the policy takes 24x24"):
            decided(remote, seen(1, size=16))
        with pytest.raises(ConfigError, match=r"state has 5 numbers, the policy takes 8 \(observation/state 8\)"):
            decided(remote, seen(1, state=5))
        with pytest.raises(ConfigError, match="zero_state=true"):
            decided(remote, seen(1, state=0))
        zeros = remotes(address, zero_state=True)
        assert not zeros.reads_state
        assert torch.equal(decided(zeros, seen(1, state=0)), decided(Echo(), {**seen(1), "state": torch.zeros(1, 8)}))
        with pytest.raises(ConfigError, match="--mode greedy"):
            zeros.act(seen(1), mode="sample", generators=[torch.Generator()])


# --- connections that are lost


class Dying:
    """An openpi server without a record, whose connection dies at some of its decisions."""

    def __init__(self, *at: int) -> None:
        self.at, self.count, self.policy = at, 0, ToyPolicy()

    def __call__(self, connection: Any) -> None:
        connection.send(wire.pack({}, "openpi"))
        for data in connection:
            self.count += 1
            if self.count in self.at:
                connection.socket.close()
                return
            request = wire.unpack(data, "openpi", "it")
            picture = torch.from_numpy(request["observation/image"])[None]
            actions = self.policy.act({"full_image": picture}, mode="greedy", generators=[]).actions_E_A_D[0]
            connection.send(wire.pack({"actions": actions.numpy()}, "openpi"))


def test_a_lost_connection_costs_an_episode(remotes: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Decisions are asked for after one about nothing; with 12 actions each, an episode has two."""
    server, starts = Dying(4), held_out_starts(4, 1, seed=0)
    with foreign(server) as address:
        remote = remotes(address, layout="libero", state={})
        assert (remote.chunk, remote.action_dim) == (12, 4)
        with caplog.at_level(logging.WARNING):
            found = LocalRollout(remote, ToyEnv(2), keep_record=False).collect(starts, "greedy")
    assert f"{address} was lost" in caplog.text
    expected = LocalRollout(server.policy, ToyEnv(2), keep_record=False).collect(starts, "greedy")
    assert found.is_valid_E.sum() == 3
    assert torch.equal(found.success_E[found.is_valid_E], expected.success_E[found.is_valid_E])


def test_a_server_that_stays_away_ends_the_run(remotes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with foreign(Dying()) as address:
        remote = remotes(address, state={}, patience=0.3)
    assert remote.act(seen(1), mode="greedy", generators=[]).is_lost_E.tolist() == [True]
    with pytest.raises(ConfigError, match=f"{address} does not answer.*patience"):
        decided(remote, seen(1))
    for away in (address, address.replace("openpi", "gr00t"), "openpi://no.such.host", "gr00t://no.such.host"):
        monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
        with pytest.raises(ConfigError, match=f"{away} does not answer"):
            find_policy(away)


def test_a_server_that_only_greets_ends_the_run(remotes: Any) -> None:
    with foreign(Dying(2, 3, 4)) as address:
        remote = remotes(address, state={})
        with pytest.raises(ConfigError, match="was lost 3 times in a row"):
            for _ in range(3):
                decided(remote, seen(1))


@pytest.mark.parametrize("protocol", ["openpi", "gr00t"])
def test_a_slow_server_is_not_waited_for(protocol: str, remotes: Any) -> None:
    is_slow = threading.Event()

    class Slow(Echo):
        def act(self, observation: Any, **options: Any) -> Decision:
            if is_slow.is_set():
                time.sleep(0.6)
            return super().act(observation, **options)

    with served(Slow(), protocol) as address:
        remote = remotes(address, timeout=0.2)
        is_slow.set()
        assert remote.act(seen(1), mode="greedy", generators=[]).is_lost_E.tolist() == [True]
        is_slow.clear()
        remote.connection.timeout = HANG_S
        assert torch.equal(decided(remote, seen()), decided(Echo(), seen()))


@pytest.mark.parametrize("protocol", ["openpi", "gr00t"])
def test_a_server_that_begins_again_goes_on(protocol: str, remotes: Any) -> None:
    with served(Echo(), protocol) as address:
        remote = remotes(address, timeout=0.4)
        assert decided(remote, seen(1)).any()
    port = int(address.rpartition(":")[2])
    assert remote.act(seen(1), mode="greedy", generators=[]).is_lost_E.tolist() == [True]
    with served(Echo(), protocol, port=port):
        assert torch.equal(decided(remote, seen()), decided(Echo(), seen()))
    remote.act(seen(1), mode="greedy", generators=[])
    other = Echo()
    other.chunk = 2
    with served(other, protocol, port=port), pytest.raises(ConfigError, match="another policy than before"):
        decided(remote, seen(1))


# --- what is refused


@pytest.mark.parametrize("protocol", ["openpi", "gr00t"])
def test_a_server_may_stand_before_another(protocol: str, remotes: Any) -> None:
    """As between a client of one protocol and a server of the other; what is lost behind it is an error before it."""
    behind = "gr00t" if protocol == "openpi" else "openpi"
    with contextlib.ExitStack() as stack:
        last = stack.enter_context(contextlib.ExitStack())
        relayed = remotes(last.enter_context(served(Echo(), behind)), timeout=0.4)
        remote = remotes(stack.enter_context(served(relayed, protocol)))
        assert torch.equal(decided(remote, seen()), decided(Echo(), seen()))
        last.close()
        with pytest.raises(ConfigError, match="was lost: ask again"):
            decided(remote, seen(1))


@pytest.mark.parametrize("protocol", ["openpi", "gr00t"])
def test_a_token_is_asked_for(protocol: str, remotes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Echo(), protocol, token="secret") as address:
        for wrong in ("", "secres"):
            monkeypatch.setenv(TOKEN, wrong)
            with pytest.raises(ConfigError, match=f"{address} refuses.*{TOKEN}"):
                find_policy(address)
        monkeypatch.setenv(TOKEN, "secret")
        assert decided(remotes(address), seen()).any()


def request_of(**changes: Any) -> dict[str, Any]:
    picture, state = numpy.zeros((8, 8, 3), numpy.uint8), numpy.zeros(8)
    request = {"observation/image": picture, "observation/wrist_image": picture, "observation/state": state}
    given = {name.replace("__", "/"): value for name, value in changes.items()}
    return {name: value for name, value in {**request, "prompt": "go", **given}.items() if value is not None}


BAD = [
    (request_of(observation__image=None), "has no 'observation/image'"),
    (request_of(observation__image=numpy.zeros((8, 8, 4), numpy.uint8)), r"uint8 \[8, 8, 4\]"),
    (request_of(observation__image=numpy.zeros((8, 8, 3), numpy.int64)), r"int64 \[8, 8, 3\]"),
    (request_of(observation__image=numpy.full((8, 8, 3), 7.0)), r"outside of \[0, 1\]"),
    (request_of(observation__image="picture"), "a str"),
    (request_of(observation__state=numpy.zeros(7)), r"float64 \[7\]; 8 finite"),
    (request_of(observation__state=numpy.full(8, numpy.nan)), "8 finite"),
    (request_of(observation__state=["a"] * 8), "8 finite"),
    (request_of(observation__state=[[1.0], [2.0, 3.0]]), "The request cannot be used: ValueError"),
    (request_of(prompt=7), "a sentence is expected"),
    (request_of(prompt=["go", "on"]), "1 and 2 environments"),
    ([1, 2], "is a map"),
    (b"\xc1", "cannot be used"),
    (b"\xdd\xff\xff\xff\xff", "cannot be used"),
    (b"\x91" * 10_000, "cannot be used"),
    ("text", "binary"),
]


def test_bad_requests_are_answered_and_the_connection_goes_on() -> None:
    with served(Echo()) as address, connect(address.replace("openpi", "ws"), max_size=None) as client:
        assert wire.unpack(client.recv(), "openpi", "it")[wire.RECORD]["chunk"] == 3
        for request, message in BAD:
            client.send(request if isinstance(request, bytes | str) else wire.pack(request, "openpi"))
            answer = client.recv()
            assert isinstance(answer, str) and re.search(message, answer) and "\n" not in answer, (message, answer)
        client.send(wire.pack(request_of(), "openpi"))
        assert wire.unpack(client.recv(), "openpi", "it")["actions"].shape == (3, 4)


def test_faults_of_a_policy_are_for_the_log(caplog: pytest.LogCaptureFixture, remotes: Any) -> None:
    class Faulty(Echo):
        def act(self, observation: Any, **_: Any) -> Decision:
            raise RuntimeError("the password is rosebud")

    class Endless(Echo):
        def act(self, observation: Any, **_: Any) -> Decision:
            return Decision(torch.full((1, 3, 4), torch.inf), {})

    for policy, message in ((Faulty(), "The policy failed \\(RuntimeError\\)"), (Endless(), "not finite")):
        for protocol in ("openpi", "gr00t"):
            with served(policy, protocol) as address, pytest.raises(ConfigError, match=f"{address} refuses.*{message}"):
                decided(remotes(address), seen(1))
    assert "rosebud" in caplog.text


def test_pages_of_a_browser_are_refused_and_health_is_told() -> None:
    import http.client

    with served(Echo()) as address:
        place = address.removeprefix("openpi://")
        with pytest.raises(Exception, match="HTTP 403"), connect(f"ws://{place}", origin="http://evil.example"):
            pass
        asked = http.client.HTTPConnection(place, timeout=HANG_S)
        asked.request("GET", "/healthz")
        answer = asked.getresponse()
        assert (answer.status, answer.read()) == (200, b"OK\n")
        asked.close()


@pytest.mark.parametrize("protocol", ["openpi", "gr00t"])
def test_messages_have_a_largest_size(protocol: str, remotes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_predict2.tools.serve.server.LARGEST", 10_000)
    with served(Echo(), protocol) as address:
        remote = remotes(address, timeout=0.5)
        assert remote.act(seen(1, size=64), mode="greedy", generators=[]).is_lost_E.tolist() == [True]
        assert torch.equal(decided(remote, seen(1)), decided(Echo(), seen(1)))
    with pytest.raises(DataError, match="are the most"):
        wire.unpack(b"0" * (wire.LARGEST + 1), protocol, "it")


def arrays(**changes: Any) -> dict[bytes, Any]:
    content = {b"__ndarray__": True, b"data": b"12345678", b"dtype": "<f4", b"shape": [2]}
    return {**content, **{name.encode(): value for name, value in changes.items()}}


def test_objects_and_false_sizes_are_refused() -> None:
    import io
    import pickle

    import msgpack

    file = io.BytesIO()
    numpy.save(file, numpy.array([{}], dtype=object), allow_pickle=True)
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }"
    for protocol, message in [
        *(("gr00t", {"__ndarray_class__": True, "as_npy": data}) for data in (file.getvalue(), header.ljust(128), b"")),
        ("gr00t", {"__ModalityConfig_class__": True, "as_json": "[]"}),
        *(("openpi", arrays(dtype=dtype)) for dtype in ("|O", "V4", "<c8", "<U0", "(((", "i4,i4", 7)),
        *(("openpi", arrays(shape=shape)) for shape in ([3], [-2, -1], [2**62, 2**62], "ab", None, [[2]])),
        ("openpi", {b"__npgeneric__": True, b"data": 1, b"dtype": "|O"}),
        ("openpi", {b"__npgeneric__": True, b"data": "a", b"dtype": "<f4"}),
    ]:
        with pytest.raises(DataError, match="A message of it cannot be used"):
            wire.unpack(msgpack.packb({"a": message}), protocol, "it")
    for protocol in ("openpi", "gr00t"):
        with pytest.raises(DataError, match="cannot be used"):
            wire.unpack(pickle.dumps({"a": 1}), protocol, "it")
        with pytest.raises(ValueError, match="numbers or text"):
            wire.pack({"a": numpy.array([{}])}, protocol)


REPLIES = [
    ({"actions": numpy.zeros((2, 3, 4))}, "not \\[actions, numbers\\]"),
    ({"actions": numpy.full((3, 4), numpy.nan)}, "not finite"),
    ({"actions": numpy.zeros((0, 4))}, "cannot be used"),
    ({"actions": ["a"]}, "cannot be used"),
    ({"no": 1}, "cannot be used"),
    ([], "cannot be used"),
]


@pytest.mark.parametrize(("reply", "message"), REPLIES)
def test_replies_without_actions_name_the_server(reply: Any, message: str) -> None:
    def odd(connection: Any) -> None:
        connection.send(wire.pack({}, "openpi"))
        for _ in connection:
            connection.send(wire.pack(reply, "openpi"))

    with foreign(odd) as address, pytest.raises(DataError, match=f"reply of {address} .*{message}"):
        find_policy(address)


@pytest.mark.parametrize(
    "greeting", [[], {wire.RECORD: 7}, {wire.RECORD: {"chunk": 3}}, {wire.RECORD: {"layout": 3, "chunk": 1}}]
)
def test_greetings_that_are_none_name_the_server(greeting: Any) -> None:
    with foreign(lambda connection: connection.send(wire.pack(greeting, "openpi"))) as address:
        with pytest.raises(UserError, match=address):
            find_policy(address)


def test_actions_may_change_their_number_upwards_only(remotes: Any) -> None:
    """The first decision is about nothing, and gives the sizes."""
    lengths = [10, 15, 8]

    def growing(connection: Any) -> None:
        connection.send(wire.pack({"reset_pose": [0.0], "policy": "theirs"}, "openpi"))
        for _ in connection:
            connection.send(wire.pack({"actions": numpy.ones((lengths.pop(0), 7))}, "openpi"))

    with foreign(growing) as address:
        remote = remotes(address)
        assert (remote.chunk, remote.action_dim, remote.draws_when_greedy) == (10, 7, True)
        assert decided(remote, seen(1)).shape == (1, 10, 7)
        with pytest.raises(DataError, match=r"its actions are \[8, 7\], not \[10, 7\]"):
            decided(remote, seen(1))


@contextlib.contextmanager
def foreign_gr00t(answers: dict[str, Any]) -> Iterator[str]:
    """A GR00T server that is not ours, with fixed answers."""
    is_over = threading.Event()

    def answer() -> None:
        while not is_over.is_set():
            if socket.poll(20):
                endpoint = wire.unpack(socket.recv(), "gr00t", "it")["endpoint"]
                socket.send(wire.pack(answers.get(endpoint, {"error": f"Unknown endpoint: {endpoint}"}), "gr00t"))

    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"gr00t://127.0.0.1:{port}"
        finally:
            is_over.set()
            thread.join()


def test_modalities_of_a_server_say_what_it_is_shown(remotes: Any) -> None:
    from cosmos_predict2.rl.remote.wire import Modality

    modalities = {"video": Modality(("ego", "hand")), "state": Modality(("single_arm", "gripper"))}
    modalities |= {"action": Modality(("single_arm", "gripper"), tuple(range(16))), "language": Modality(("task",))}
    parts = {"single_arm": numpy.ones((1, 16, 5), numpy.float32), "gripper": numpy.zeros((1, 16, 1), numpy.float32)}
    answers: dict[str, Any] = {"get_modality_config": modalities, "get_action": [parts, {}]}
    with foreign_gr00t(answers) as address:
        remote = remotes(address)
        assert remote.layout.pictures == ("video.ego", "video.hand") and remote.layout.text == "task"
        assert remote.layout.state == {"state.single_arm": 5, "state.gripper": 1}  # as SO-100 has them
        assert (remote.chunk, remote.action_dim) == (16, 6)
        assert decided(remote, seen(2, state=6)).shape == (2, 16, 6)
    names = ("pan", "lift", "flex")
    single = {"action": Modality(names), "state": Modality(names)}
    answers["get_modality_config"] = {**modalities, **single}
    answers["get_action"] = [{name: numpy.ones((1, 16, 1), numpy.float32) for name in names}, {}]
    with foreign_gr00t(answers) as address:
        for given in ((), ("a", "b", "c")):
            policy, _ = find_policy(address, options={"names": given})
            policy.connection.close()
            assert policy.contract.names == (given or names) and list(policy.layout.state.values()) == [1, 1, 1]
    answers["get_modality_config"] = {**modalities, "video": Modality(("ego",), (-15, 0))}
    with foreign_gr00t(answers) as address, pytest.raises(ConfigError, match="looks back in time"):
        find_policy(address)


def test_weights_of_a_server_are_not_read() -> None:
    with pytest.raises(ConfigError, match="its weights are not here"):
        read_policy("openpi://127.0.0.1:1")


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("openpi://", {}, "expected openpi://HOST:8000"),
        ("gr00t://host/path", {}, "expected gr00t://HOST:5555"),
        ("openpi://127.0.0.1:1", {}, "does not answer"),
        ("openpi://127.0.0.1:99999", {}, "Port out of range"),
        ("openpi://127.0.0.1:1", {"patience": "long"}, "patience=long"),
        ("openpi://127.0.0.1:1", {"patiense": 60}, "No layout has patiense=60"),  # before it is waited for
        ("openpi://127.0.0.1:1", {"layout": "liberto"}, "Did you mean libero"),
    ],
)
def test_wrong_addresses(address: str, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_policy(address, options=options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(fly=1), "fly=1"),
        (dict(pictures=[]), "pictures="),
        (dict(state=7), "state=7"),
        (dict(actions={"a": "many"}), "many"),
    ],
)
def test_wrong_layouts(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"No layout has .*{message}.* Expected pictures"):
        layout_of("openpi", None, fields)
    with pytest.raises(ConfigError, match=r"gr00t has no layout 'liberto'\. Did you mean libero"):
        layout_of("gr00t", "liberto", {})
    assert layout_of("gr00t", None, {"pictures": "front"}).pictures == ("video.front",)


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, address in (("websockets", "openpi://127.0.0.1:1"), ("zmq", "gr00t://127.0.0.1:1")):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
        with pytest.raises(ConfigError, match=rf"'{name}' is not installed.*pip install -e '\.\[serve\]'"):
            find_policy(address)


# --- programs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "toy_policy", "--protocol", "openpi", "--host", "0.0.0.0"], TOKEN),
        (["--policy", f"{__name__}:Echo", "--protocol", "openpi"], "actions={PART: NUMBERS}"),
        (["--policy", f"{__name__}:Echo", "--protocol", "gr00t", "--layout", "name=aloha"], "Known: libero, so100"),
        (["--policy", f"{__name__}:Echo", "--protocol", "openpi", "--layout", "aloha"], "KEY=VALUE"),
    ],
)
def test_mistakes_in_flags(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(serve_policy, *words) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["openpi", "gr00t"])
def test_a_served_policy_is_evaluated_as_itself(protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the simulator and in the tiny world model, against the same policy in this process."""
    torch.manual_seed(3)
    policy = ToyPolicy().eval()
    words = ("--suite", "toy", "--episodes", 4, "--batch_size", 1, "--world_model")
    lines = []
    with served(policy, protocol) as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Local", lambda: policy, raising=False)
        for each in (address, f"{__name__}:Local"):
            assert call(evaluate_policy, *words, "--policy", each, "--execute", 12) == 0
            lines.append([line for line in capsys.readouterr().out.splitlines() if line.startswith(("push", "act"))])
    assert lines[0] == lines[1] and len(lines[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["openpi", "gr00t"])
def test_the_program_serves_until_it_is_interrupted(protocol: str) -> None:
    address, words = f"{protocol}://127.0.0.1:{(port := free_port())}", ["--policy", TINY_POLICY]
    words += ["--protocol", protocol, "--port", str(port), "--layout", "actions={actions: 4}"]
    program = [warm_python(), "-m", "scripts.serve_policy", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        try:
            remote = find_policy(address, options={"patience": HANG_S})[0]
            shown, _ = ToyEnv(1).reset(seed=0)
            found = decided(remote, shown)
            remote.connection.close()
        finally:
            server.send_signal(signal.SIGINT)
        assert f"{address} serves the policy" in server.communicate(timeout=HANG_S)[0] and server.returncode == 0
    torch.testing.assert_close(found, decided(read_policy(TINY_POLICY)[0], shown))


def test_the_public_server_of_openpi_talks_with_our_client(remotes: Any) -> None:
    """From a checkout of Physical-Intelligence/openpi on PYTHONPATH, with openpi-client; its policy is a stand-in."""
    public = pytest.importorskip("openpi.serving.websocket_policy_server", reason="openpi is not installed")

    class Policy:
        def infer(self, request: dict[str, Any]) -> dict[str, Any]:
            return {"actions": openpi_actions(request), "policy_timing": {"infer_ms": 1.0}}

    server = public.WebsocketPolicyServer(Policy(), "127.0.0.1", port := free_port(), metadata={"reset_pose": [0.0]})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    remote = remotes(f"openpi://127.0.0.1:{port}", patience=HANG_S)
    assert torch.equal(decided(remote, seen()), decided(Echo(), seen()))


def openpi_actions(request: dict[str, Any]) -> Any:
    """The decision of `Echo` about a request in openpi's names."""
    pictures = [torch.from_numpy(request[f"observation/{name}"].copy()) for name in ("image", "wrist_image")]
    state = torch.from_numpy(request["observation/state"].copy())[None]
    observation = dict(full_image=pictures[0][None], wrist_image=pictures[1][None, None], state=state)
    return Echo().act({**observation, "task_description": [request["prompt"]]}).actions_E_A_D[0].numpy()


def test_the_public_client_of_openpi_talks_with_our_server(remotes: Any) -> None:
    """pip install --no-deps openpi-client, which asks for numpy 1 and runs with 2."""
    public = pytest.importorskip("openpi_client.websocket_client_policy", reason="openpi-client is not installed")
    observation, policy = seen(1), Echo()
    expected = decided(policy, observation)[0].numpy()
    with served(policy, token="secret") as address:
        host, _, port = address.removeprefix("openpi://").rpartition(":")
        client = public.WebsocketClientPolicy(host, int(port), api_key="secret")
        assert client.get_server_metadata()[wire.RECORD]["chunk"] == 3
        request = {
            "observation/image": observation["full_image"][0].numpy(),
            "observation/wrist_image": observation["wrist_image"][0, 0].numpy(),
            "observation/state": observation["state"][0].double().numpy(),
            "prompt": observation["task_description"][0],
        }
        with pytest.raises(RuntimeError, match="has no 'observation/state'"):
            client.infer({name: value for name, value in request.items() if name != "observation/state"})
        for _ in range(2):
            reply = client.infer(request)
            assert numpy.array_equal(reply["actions"], expected)
        assert {"infer_ms", "prev_total_ms"} == reply["server_timing"].keys()
        client._ws.close()
