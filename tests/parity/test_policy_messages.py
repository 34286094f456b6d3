# SPDX-License-Identifier: Apache-2.0
"""Messages of the public clients and servers of policies against ours."""

from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.rl.interfaces import Decision, PolicyDefaults
from cosmos_predict2.rl.policies.remote.layouts import layout_of, observed, shown
from cosmos_predict2.rl.policies.remote.policy import Gr00t, OpenPi
from cosmos_predict2.rl.remote import wire
from cosmos_predict2.tools.serve.server import Gr00tAnswers, ServedPolicy, openpi_reply
from tests.goldens import Golden, Value

AREA = "serving"
KEYS = ("full_image", "wrist_image", "state", "text")


class Recorded(PolicyDefaults):
    """Decides as a golden says."""

    def __init__(self, actions: Any) -> None:
        self.actions_A_D = torch.tensor(actions, dtype=torch.float32)
        self.chunk, self.action_dim = self.actions_A_D.shape
        self.reads_state = True

    def act(self, observation: Any, **_: Any) -> Decision:
        return Decision(self.actions_A_D.expand(len(observation["full_image"]), -1, -1), {})


class Wire:
    """A socket on which bytes are noted, and answered by what is recorded."""

    def __init__(self, *replies: bytes) -> None:
        self.sent: list[bytes] = []
        self.replies = [*replies]

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def recv(self, timeout: float = 0.0) -> bytes:
        return self.replies.pop(0)

    def setsockopt(self, option: int, value: int) -> None: ...


def data(value: Value) -> bytes:
    return bytes.fromhex(value.use())


def served(actions: Any, protocol: str, layout: str) -> ServedPolicy:
    return ServedPolicy(Recorded(actions), {}, layout_of(protocol, layout, {}))


def asked(connection: Any, layout: Any, seen: Any) -> tuple[Any, bytes]:
    """The actions that our client reads, and what it sent."""
    answer = connection.ask(layout, *shown(layout, seen, 0), seen["task_description"][0])
    return answer, connection.socket.sent[-1]


def require_shown(seen: Any, expected: Any, num: int = 1) -> None:
    """An observation of ``num`` environments that all show what a golden has."""
    full, wrist, state, text = (expected[key].expected() for key in KEYS)
    assert seen["full_image"].tolist() == [full] * num and seen["wrist_image"].tolist() == [wrist] * num
    assert torch.equal(seen["state"], torch.tensor([state] * num, dtype=torch.float32))
    assert seen["task_description"] == [text] * num


def require_same_form(found: Any, expected: Any, name: str = "") -> None:
    """The same names, shapes and values; state is float32 where the public client sends float64."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            require_same_form(found[key], value, f"{name}/{key}")
    elif isinstance(expected, numpy.ndarray):
        assert found.dtype.kind == expected.dtype.kind and numpy.array_equal(found, expected.astype(found.dtype)), name
    else:
        assert found == expected, name


def test_bytes_are_the_same_when_they_are_written_again(golden: Golden) -> None:
    messages = {"openpi": [golden.json("openpi.json")["metadata"]["bytes"]], "gr00t": []}
    for row in [*golden.json("openpi.json")["requests"], *golden.json("openpi.json")["replies"]]:
        messages["openpi"].append(row["bytes"])
    for row in golden.json("gr00t.json")["requests"]:
        messages["gr00t"] += [row["bytes"], row["reply"]]
    for protocol, some in messages.items():
        for message in some:
            read = wire.unpack(data(message), protocol, "it")
            assert wire.pack(read, protocol) == data(message), message.entry


def test_our_openpi_server_reads_the_public_client(golden: Golden) -> None:
    file = golden.json("openpi.json")
    for request, reply in zip(file["requests"], file["replies"], strict=True):
        name, actions = request["layout"].use(), reply["actions"].expected()
        one = served(actions, "openpi", name)
        require_shown(observed(one.layout, wire.unpack(data(request["bytes"]), "openpi", "it")), request)
        answer = openpi_reply(one, data(request["bytes"]), {"prev_total_ms": 1.0})
        assert isinstance(answer, bytes), answer
        ours, theirs = (wire.unpack(each, "openpi", "it") for each in (answer, data(reply["bytes"])))
        assert numpy.array_equal(ours["actions"], theirs["actions"].astype(numpy.float32))
        assert ours.keys() == theirs.keys() and ours["policy_timing"].keys() == theirs["policy_timing"].keys()
        assert {"infer_ms", "prev_total_ms"} == ours["server_timing"].keys() >= theirs["server_timing"].keys()
        assert reply["layout"].use() == name


def test_our_openpi_client_sends_what_the_public_one_sends(golden: Golden) -> None:
    file = golden.json("openpi.json")
    metadata = wire.unpack(data(file["metadata"]["bytes"]), "openpi", "it")
    file["metadata"]["reset_pose"].compare(metadata["reset_pose"])
    for request, reply in zip(file["requests"], file["replies"], strict=True):
        layout = layout_of("openpi", request["layout"].use(), {})
        sent = wire.unpack(data(request["bytes"]), "openpi", "it")
        client = OpenPi("openpi://it", wire.TOKEN, 1.0)
        client.socket = Wire(data(reply["bytes"]))
        actions, message = asked(client, layout, observed(layout, sent))
        assert numpy.array_equal(actions, numpy.array(reply["actions"].expected(), actions.dtype))
        if not isinstance(sent["prompt"], bytes):  # else in a form that we read and do not send
            require_same_form(wire.unpack(message, "openpi", "it"), sent)


@pytest.mark.golden_cases("gr00t.json", "requests")
def test_our_gr00t_server_reads_requests_of_each_version(case: Value, golden: Golden) -> None:
    file, num = golden.json("gr00t.json"), case["num"].use()
    one = served(file["actions"].expected(), "gr00t", "libero")
    request = wire.unpack(data(case["bytes"]), "gr00t", "it")["data"]
    require_shown(observed(one.layout, request.get("observation", request)), file, num)
    answer = wire.unpack(Gr00tAnswers(one, token="").reply(data(case["bytes"])), "gr00t", "it")
    expected = wire.unpack(data(case["reply"]), "gr00t", "it")
    rows = [answer, expected] if case["version"].use() == "n1.5" else [answer[0], expected[0]]
    require_same_form(*rows)
    assert case["version"].use() == "n1.5" or answer[1] == expected[1] == {}


@pytest.mark.golden_cases("gr00t.json", "requests")
def test_our_gr00t_client_sends_requests_of_each_version(case: Value, golden: Golden) -> None:
    version = case["version"].use()
    if version == "n1.6_sim":
        return  # a form that we read and do not send
    file, layout = golden.json("gr00t.json"), layout_of("gr00t", "libero", {})
    client = Gr00t("gr00t://it", wire.TOKEN, 1.0)
    client.is_flat, client.socket = version == "n1.5", Wire(data(case["reply"]))
    sent = wire.unpack(data(case["bytes"]), "gr00t", "it")
    seen = observed(layout, sent["data"].get("observation", sent["data"]))
    actions, message = asked(client, layout, seen)
    assert numpy.array_equal(numpy.float32(actions), numpy.float32(file["actions"].expected()))
    require_same_form(wire.unpack(message, "gr00t", "it"), sent)


@pytest.mark.golden_cases("gr00t.json", "modalities")
def test_modalities_of_each_version(case: Value, golden: Golden) -> None:
    found = wire.unpack(data(case["bytes"]), "gr00t", "it")
    case["keys"].compare({name: list(one.keys) for name, one in found.items()})
    is_text = case["version"].use() == "n1.5"
    assert {one.is_text for one in found.values()} == {is_text} and found["action"].steps == (0, 1, 2, 3)
    if case["is_sent"].use():
        one = served(golden.json("gr00t.json")["actions"].expected(), "gr00t", "libero")
        call = wire.pack({"endpoint": "get_modality_config"}, "gr00t")
        assert Gr00tAnswers(one, is_text=is_text).reply(call) == data(case["bytes"])


@pytest.mark.golden_cases("gr00t.json", "calls")
def test_other_calls(case: Value, golden: Golden) -> None:
    request = data(case["bytes"])
    token = wire.unpack(request, "gr00t", "it").get("api_token", "")
    one = served(golden.json("gr00t.json")["actions"].expected(), "gr00t", "libero")
    answer = Gr00tAnswers(one, token="secret" if token else "").reply(request)
    assert wire.unpack(answer, "gr00t", "it") == wire.unpack(data(case["reply"]), "gr00t", "it")
