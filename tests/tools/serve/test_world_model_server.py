# SPDX-License-Identifier: Apache-2.0
"""A world model behind a server: the tiny one of the toy world, in threads of this process."""

import contextlib
import io
import json
import re
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from cosmos_predict2.actions.transforms import ActionContract
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.released import TINY_ACTION, TINY_POLICY
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.contract import check_environment
from cosmos_predict2.rl.envs.remote import TOKEN, RemoteEnv, facts_of, of_address
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import WorldModelEnv, require_inputs
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig
from cosmos_predict2.rl.episodes.episode_starts import RecordedEpisodeStarts
from cosmos_predict2.rl.episodes.episodes import LocalRollout
from cosmos_predict2.rl.episodes.policy_evaluation import held_out_starts
from cosmos_predict2.rl.interfaces import PolicyDefaults
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.remote import wire
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.rl.trust import UNCHECKED, LearntIn, digest
from cosmos_predict2.tools.serve.server import websocket_server
from cosmos_predict2.tools.serve.world_model import ServedWorld
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.buildable import path_of
from imaginaire.config import L
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError, DataError
from imaginaire.listening import listening
from scripts import rank_policies, serve_world_model
from tests.programs import BASE, call
from tests.training import difference, losses, train

PAGE = Path(__file__).parents[3] / "documentations/world_model_servers.md"
PARTS = {"train": [0, 1, 2], "held_out": [7, 5]}
INPUTS = {"world_model": "aa", "reward": "bb"}
ABOUT = dict(inputs=INPUTS, places={"world_model": "W", "reward": "R"}, parts=PARTS, card=None, has_failures=True)


@pytest.fixture(scope="module")
def imagination() -> Imagination:
    return imagination_of(device="cpu")


@pytest.fixture(scope="module")
def make(imagination: Imagination) -> Callable[..., WorldModelEnv]:
    def made(num_envs: int, seed: int = 0, **options: Any) -> WorldModelEnv:
        options = {"max_steps": 24, "scoring": Scoring(judge="last", reward_on="last"), **options}
        return WorldModelEnv(imagination, ToyStarts(), ToyDetectorReward(), num_envs, seed=seed, **options)

    return made


@contextlib.contextmanager
def serving(make: Any, port: int = 0, token: str = "", about: Any = ABOUT, **options: Any) -> Iterator[Any]:
    """A server with its address."""
    with listening("127.0.0.1", port) as listener:
        served = ServedWorld(make, about, **options)
        with websocket_server(served.answer, listener, token, TOKEN, served.largest) as server:
            server.served = served
            server.address = f"wfm://127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield server
        thread.join()


@pytest.fixture(scope="module")
def server(make: Any) -> Iterator[Any]:
    with serving(make) as found:
        yield found


def cut(server: Any) -> None:
    """Break all connections, as a network does."""
    for connection in server.connections:
        with contextlib.suppress(OSError):  # one that was cut before may still be listed
            connection.socket.shutdown(2)


def begin(env: Any, *ids: int) -> Any:
    return env.reset(options={"env_ids": ids, "trial_ids": [10 + i for i in ids], "seeds": ids})


def actions(num: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(num, 12, 4, generator=torch.Generator().manual_seed(seed)) * 3 - 1.5


def played(env: Any) -> list[Any]:
    """Every kind of call, and their results."""
    found = [begin(env, 0, 1, 2), env.chunk_step(actions(3))]
    found += [env.chunk_step(actions(2, 1), env_ids=[2, 0], execute=5), begin(env, 1)]
    env.keep_frames = True
    found += [env.chunk_step(actions(3, 2)), env.chunk_step(actions(3, 3)), env.chunk_step(actions(3, 4))]
    env.keep_frames = False
    return [*found, env.reset(), env.reset(seed=5, options={"env_ids": [1]})]


def test_results_are_those_of_the_process_bit_by_bit(server: Any, make: Any) -> None:
    with contextlib.closing(of_address(f"{server.address}?num_envs=3&seed=9&keep_frames=false")) as env:
        assert env.keep_frames is False
        other, there = make(3, 9), make(3, 9)
        assert difference(played(env), played(there)) is None
        for name in ("metadata", "views", "contract", "state_size", "num_noises", "scoring"):
            assert getattr(env, name) == getattr(there, name), name
        other.load_state(env.get_state())
        assert difference(env.chunk_step(actions(3)), other.chunk_step(actions(3))) is None
        env.load_state(there.get_state())
        assert difference(env.chunk_step(actions(3)), there.chunk_step(actions(3))) is None
        with pytest.raises(DataError, match=f"{server.address} refuses: .*num_envs=2"):
            env.load_state(make(2).get_state())


def test_a_chunk_is_imagined_alone_and_ends_as_its_client_asks(make: Any) -> None:
    seen: list[tuple[bool, bool]] = []

    def spied(num_envs: int, seed: int) -> WorldModelEnv:
        env = make(num_envs, seed)
        step = env.chunk_step
        facts = lambda: (server.served._lock.locked(), env.scoring.terminate_on_success)  # noqa: E731
        env.chunk_step = lambda *args: (seen.append(facts()), step(*args))[1]
        return env

    with serving(spied) as server, contextlib.closing(RemoteEnv(server.address, 1)) as env:
        begin(env, 0)
        for ends in (False, True):
            env.terminate_on_success = ends
            env.chunk_step(actions(1))
    assert seen == [(True, False), (True, True)]


def test_it_keeps_the_contract_of_environments(server: Any) -> None:
    check_environment(of_address(server.address, num_envs=3), picture_levels=1)


def test_each_session_has_episodes_of_its_own_and_their_number_is_bounded(make: Any) -> None:
    with serving(make, sessions=2, num_envs=4) as server, contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(contextlib.closing(RemoteEnv(server.address, 2, seed=k))) for k in (0, 9))
        assert facts_of(server.address)["num_envs"] == 4  # a greeting takes no session
        begin(one, 0, 1)
        other.reset(options={"trial_ids": [3, 4]})
        with pytest.raises(ConfigError, match=r"does not answer \(.*1013.*2 sessions are open.*--sessions"):
            RemoteEnv(server.address, 1)
        mine = make(2)
        begin(mine, 0, 1)
        assert difference(one.chunk_step(actions(2)), mine.chunk_step(actions(2))) is None
        other.close()
        with contextlib.closing(RemoteEnv(server.address, 1, patience=5)) as third:
            assert third.num_envs == 1
        with pytest.raises(DataError, match="num_envs=5: a session here has 1 to 4 places"):
            RemoteEnv(server.address, 5, patience=5)


def test_an_idle_session_ends_with_a_sentence_and_is_opened_again(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with serving(make, idle=0.2) as server, contextlib.closing(RemoteEnv(server.address, 2)) as env:
        begin(env, 0, 1)
        env.connection.socket.recv_events_thread.join()
        assert begin(env, 0)[1]["active"].tolist() == [True]
    assert "idle for 0.2 seconds (--idle): connect again" in caplog.text


def test_a_client_that_reads_nothing_loses_its_seat(make: Any) -> None:
    with serving(make, idle=0.2, sessions=1) as server:
        with connect(f"{server.address.replace('wfm', 'ws')}/?num_envs=64", max_size=None, max_queue=1) as client:
            for connection in server.connections:
                connection.close_timeout = 0.1
            with contextlib.suppress(ConnectionClosed):
                client.send(wire.pack({"call": "reset"}, "openpi"))
                for _ in range(40):  # 36 MB, more than buffers hold
                    client.send(wire.pack({"call": "get_state"}, "openpi"))
            with contextlib.closing(RemoteEnv(server.address, 1, patience=20)) as other:
                assert other.num_envs == 1
            client.close_timeout = 0.1


def test_a_lost_connection_costs_its_episodes(server: Any, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    env, expected = of_address(server.address, num_envs=3), make(3)
    env.keep_frames = True
    begin(env, 0, 1, 2), begin(expected, 0, 1, 2)
    env.chunk_step(actions(3))
    cut(server)
    observation, reward, terminated, truncated, info = env.chunk_step(actions(2), env_ids=[2, 0])
    zeros = (reward, terminated, truncated, info["valid"], info["active"], info["executed"])
    assert not any(one.any() for one in zeros)
    assert info["frames"].shape == (2, 12, 48, 48, 3) and observation["task_description"] == ["", ""]
    assert f"{server.address} was lost" in caplog.text and "restarted" not in caplog.text
    with pytest.raises(ConfigError, match="reset them before get_state"):
        env.get_state()
    begin(env, 1)
    found, known = env.chunk_step(actions(1), env_ids=[1]), expected.chunk_step(actions(1), env_ids=[1])
    assert "valid" not in found[4] and torch.equal(found[0]["full_image"], known[0]["full_image"])
    begin(env, 0, 1, 2)
    state = env.get_state()
    cut(server)
    begin(env, 1)  # which finds that the others are lost: what is stepped with them is lost, too
    for _ in range(2):
        assert not env.chunk_step(actions(3))[4]["valid"].any()
    env.load_state(state)  # which begins all places anew
    assert "valid" not in env.chunk_step(actions(3))[4]
    assert begin(env, 0, 1, 2) and "valid" not in env.chunk_step(actions(3))[4]
    env.close()
    rollout = LocalRollout(ToyPolicy(), of_address(server.address, num_envs=2), keep_record=False)
    with mock.patch.object(rollout.policy, "act", wraps=rollout.policy.act) as act:
        act.side_effect = lambda *_, **__: (act.call_count == 2 and cut(server), mock.DEFAULT)[1]
        found = rollout.collect(held_out_starts(4, 1, seed=0), "greedy")
    assert found.is_valid_E.tolist() == [False, False, True, True]
    rollout.env.close()


def test_a_restarted_server_is_said_so_and_another_world_ends_the_run(make: Any, caplog: Any) -> None:
    with serving(make) as server:
        env = of_address(f"{server.address}?num_envs=2&patience=0.3")
        begin(env, 0, 1)
    port = int(server.address.rpartition(":")[2])
    with serving(make, port) as again:
        assert not env.chunk_step(actions(2))[4]["valid"].any()
        expected = make(2)
        begin(env, 0, 1), begin(expected, 0, 1)
        assert difference(env.chunk_step(actions(2)), expected.chunk_step(actions(2))) is None
        assert f"{again.address} was restarted" in caplog.text
    with serving(make, port, about={**ABOUT, "inputs": {**INPUTS, "reward": "cc"}}):
        assert not env.chunk_step(actions(2))[4]["valid"].any()
        with pytest.raises(ConfigError, match=r"another world than before \(inputs\)"):
            begin(env, 0, 1)
    with pytest.raises(ConfigError, match=r"does not answer.*patience=SECONDS"):
        begin(env, 0, 1)


def test_a_world_that_dies_at_each_chunk_ends_the_run(make: Any) -> None:
    with serving(make) as server:
        env = of_address(server.address, num_envs=1)
        with pytest.raises(ConfigError, match="was lost 3 times in a row"):
            for _ in range(3):
                begin(env, 0)
                cut(server)
                env.chunk_step(actions(1))


def test_inputs_of_a_policy_are_compared_by_name(imagination: Imagination, make: Any) -> None:
    contract = ActionContract(("dx", "dy"), 10.0)
    fields = dict(contract=contract, views=("front", "wrist"), state_size=0)
    policy = PolicyDefaults()
    policy.reads_state, policy.views, policy.contract = True, ("front", "wrist"), ActionContract(("dy", "dx"))
    with serving(lambda num, seed: _with(make(num, seed), **fields)) as server:
        with contextlib.closing(of_address(server.address)) as env:
            with pytest.raises(
                ConfigError, match=r"the actions \(dx, dy\), but PolicyDefaults was cloned on \(dy, dx\)"
            ):
                require_inputs(env, policy)
            policy.contract = contract
            with pytest.raises(ConfigError, match="reads the robot's state, which this world model does not show"):
                require_inputs(env, policy)
            policy.views = ("wrist", "front")
            with pytest.raises(ConfigError, match=r"front\+wrist.*wrist\+front"):
                require_inputs(env, policy)
    with pytest.raises(ConfigError, match="expected wfm://HOST:8100"):
        RemoteEnv("wfm://host/path")
    for reached in (facts_of, of_address):
        with pytest.raises(DataError, match=r"wfm://host:99999: .*Port out of range"):
            reached("wfm://host:99999")


def _with(env: WorldModelEnv, **fields: Any) -> WorldModelEnv:
    vars(env).update(fields)
    env._observation = lambda ids: {"full_image": torch.zeros(len(ids), 4, 4, 3)}  # type: ignore[method-assign]
    return env


BAD = [
    ([1, 2], "The request cannot be used"),
    (b"\xc1", "cannot be used"),
    ("text", "binary"),
    ({"call": "fly"}, "no call 'fly'"),
    ({"call": "reset", "options": {"env_ids": ["a"]}}, "cannot be used: ValueError"),
    ({"call": "reset", "options": {"env_id": [1]}}, "no option 'env_id'. Did you mean env_ids"),
    ({"call": "chunk_step"}, "KeyError: 'actions'"),
    ({"call": "chunk_step", "actions": numpy.zeros((2, 12, 3))}, r"\[2, actions, 4\] are expected"),
    ({"call": "chunk_step", "actions": numpy.full((2, 12, 4), numpy.nan)}, "not finite"),
    ({"call": "chunk_step", "actions": numpy.zeros((2, 10**5, 4)), "keep_frames": True}, "frames would have"),
    ({"call": "load_state", "state": b"nothing"}, "no state of an environment"),
]


def test_bad_requests_are_answered_and_the_session_goes_on(server: Any, make: Any) -> None:
    address = server.address.replace("wfm", "ws")
    with connect(f"{address}/?num_envs=a") as client:
        assert "The address cannot be used: ValueError" in client.recv()
    with connect(f"{address}/?num_envs=2", max_size=None) as client:
        wire.unpack(client.recv(), "openpi", "it")

        def ask(request: Any) -> Any:
            client.send(request if isinstance(request, bytes | str) else wire.pack(request, "openpi"))
            reply = client.recv()
            return reply if isinstance(reply, str) else wire.unpack(reply, "openpi", "it")

        ask({"call": "reset"})
        bomb = io.BytesIO()
        with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("a.npy", bytes(1 << 20))
        with mock.patch.object(server.served, "largest", 1 << 19):
            reply = ask({"call": "load_state", "state": bomb.getvalue()})
        assert "1048576 bytes, and 524288 are the most" in reply
        for request, message in BAD:
            reply = ask(request)
            assert isinstance(reply, str) and re.search(message, reply), (message, reply)
        assert ask({"call": "chunk_step", "actions": numpy.zeros((2, 12, 4))})["info"]["active"].all()
        client.send(bytes(wire.LARGEST + (1 << 24)))  # far below what a reply may have
        with pytest.raises(Exception, match="1009"):
            client.recv()
    with pytest.raises(Exception, match="HTTP 403"), connect(address, origin="http://evil"):
        pass
    with mock.patch("cosmos_predict2.tools.serve.world_model.LARGEST", 100):
        with pytest.raises(ConfigError, match="--num_envs 64: their state has"):
            ServedWorld(make, ABOUT)


def test_a_reply_without_its_parts_is_an_error_of_ours(server: Any) -> None:
    with contextlib.closing(RemoteEnv(server.address, 1)) as env, mock.patch.object(env.connection, "asked") as asked:
        asked.return_value = {"reward": 1}
        for call in (env.reset, env.get_state, lambda: env.chunk_step(actions(1))):
            with pytest.raises(DataError, match=r"The reply of wfm://.* cannot be used"):
                call()


def test_a_token_is_asked_for(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make, token="secret") as server:
        for wrong in ("", "secres"):
            monkeypatch.setenv(TOKEN, wrong)
            with pytest.raises(DataError, match=f"{server.address} refuses.*{TOKEN}"):
                facts_of(server.address)
        monkeypatch.setenv(TOKEN, "secret")
        assert facts_of(server.address)["inputs"] == INPUTS


def test_the_client_of_the_page_acts(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(block.replace("ws://127.0.0.1:8100", server.address.replace("wfm", "ws")), {})
    assert re.fullmatch(r"\[\w+ +\w+\] \[.*\] \(2, 48, 48, 3\)\n", capsys.readouterr().out)


# --- what learns and is measured there


def test_a_suite_is_imagined_from_held_out_starts(server: Any, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    place, policy = suites.find(server.address), ToyPolicy()
    assert (place.tasks, place.episodes, place.at_once) == (["imagined 1"], 2, 64)
    assert place.conditions() == {"imagined_by": INPUTS, "verdict": None} and "unchecked" in caplog.text
    starts, expected = held_out_starts(2, 1, seed=0), make(2)
    with contextlib.closing(place.env(2, policy)) as env:
        found = LocalRollout(policy, env).collect(starts, "greedy")
    assert env.imagination == server.address
    starts.trial_ids[:] = PARTS["held_out"]
    assert difference(vars(found), vars(LocalRollout(policy, expected).collect(starts, "greedy"))) is None
    with pytest.raises(ConfigError, match="decides on 7 numbers per action"):
        place.env(1, SimpleNamespace(action_dim=7))
    with pytest.raises(ConfigError, match="no starts of the part 'val'"):
        of_address(f"{server.address}?part=val")
    data = RecordedEpisodeStarts(server.address, "held_out")
    assert [data[i] for i in range(len(data))] == [{"task_id": 0, "trial_id": n} for n in (7, 5)]


@pytest.mark.parametrize("case", ["fits", "another policy", "none"])
def test_a_learner_demands_the_card_of_the_server(case: str, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy = digest(path_of(ToyPolicy)) if case == "fits" else "ff"
    card = dict(verdict="go", reasons=["fine"], figures={"auc": 0.9}, inputs={**INPUTS, "policy": policy})
    card |= dict(next_step="go on", places={}, command="")
    with serving(make, about={**ABOUT, "card": None if case == "none" else card}) as server:
        config = VLAGRPOConfig(policy=L(ToyPolicy)(), env=server.address, card=server.address)
        if case == "fits":
            found = LearntIn(config)
            assert found.is_checked and found.figures == {"auc": 0.9} and found.inputs["world_model"] == "aa"
            return
        text = "no server that has a card" if case == "none" else "made for another policy"
        with pytest.raises(ConfigError, match=f"{text}[^~]*serve it there with --card"):
            LearntIn(config)
        config.allow_unchecked = True
        assert LearntIn(config).note("success", True) == UNCHECKED


def test_grpo_learns_there_as_in_the_process_and_resumes(make: Any, tmp_path: Path) -> None:
    """Two iterations, and one after the other with a server that is another one by then."""
    options = [
        *("experiment=tiny_vla_grpo_simulator", "job.project=tests", "job.group=engine", "job.name=restless"),
        *("model.config.eval_env=null", "trainer.run_validation=false", "trainer.logging_iter=1"),
        *("dataloader_train.batch_size=2", "model.config.rl.group_size=2", "model.config.rl.updates=1"),
        *("model.config.rl.minibatches=1", "checkpoint.save_iter=1"),
    ]
    port = free_port()
    options.append(f'model.config.env="wfm://127.0.0.1:{port}?num_envs=4"')
    with (
        serving(make, port),
        mock.patch("cosmos_predict2.rl.episodes.grpo.environment", lambda node, _: node and make(4)),
    ):
        assert train(tmp_path / "here", [*options, "trainer.max_iter=2"], config=BASE) == 0
    for count in (1, 2):
        with serving(make, port):
            assert train(tmp_path / "there", [*options, f"trainer.max_iter={count}"], config=BASE) == 0
    keys = ("train/loss", "train/reward_mean", "train/success", "train/grad_norm")
    here, there = (losses(tmp_path / place, keys=keys) for place in ("here", "there"))
    assert len(here) == 8 and here == there


# --- programs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], TOKEN),
        (["--reward", "R"], "--starts S --reward R go together"),
        (["--card", "no.json"], "--card=no.json is no file"),
        (["--options", "max_step=3"], "max_step has no meaning here: leave it out. Did you mean max_steps"),
        (["--scoring", "judge=first"], "judge"),
        (["--num_envs", "100000"], "--num_envs 100000: their state has"),
    ],
)
def test_mistakes_in_flags(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(serve_world_model, *words) == 2 and message in capsys.readouterr().err


def test_policies_are_ranked_by_the_program_that_serves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with mock.patch("cosmos_predict2.tools.serve.world_model.serve") as served:
        assert call(serve_world_model, "--num_envs", 8, "--options", "num_noises=2", "--scoring", "confirm=2") == 0
    world = served.call_args.args[0]
    assert (world.record["num_noises"], world.record["scoring"]["confirm"]) == (2, 2)
    assert world.record["inputs"]["world_model"] == digest(TINY_ACTION)
    assert not {*world.record["parts"]["train"]} & {*world.record["parts"]["held_out"]}
    other = shutil.copy(TINY_POLICY, tmp_path / "other.safetensors")
    with serving(world.make, about=world.about) as server:
        words = ("--world_model", server.address, "--policies", TINY_POLICY, other)
        assert call(rank_policies, *words, "--episodes", 4, "--out", tmp_path / "ranks.json") == 0
        assert call(rank_policies, *words, "--reward", "R") == 2
    values = [row["value"] for row in json.loads((tmp_path / "ranks.json").read_text())["policies"]]
    assert len(values) == 2 and values[0] == values[1] and "leave out --reward" in capsys.readouterr().err
