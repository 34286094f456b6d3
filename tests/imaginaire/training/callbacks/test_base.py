# SPDX-License-Identifier: Apache-2.0
import functools
import inspect
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from imaginaire.errors import ConfigError
from imaginaire.training.callbacks import Callback, CallbackGroup, EveryN
from imaginaire.training.callbacks.base import HOOKS
from tests.imaginaire.training.callbacks.fakes import lazy, make_config, stepped


class Recorder(Callback):
    def __init__(self, config: Any = None, trainer: Any = None, tag: str = "") -> None:
        self.given = (config, trainer)
        self.tag = tag
        self.seen: list[int] = []

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self.config.order.append(self.tag)

    def state_dict(self) -> dict[str, Any]:
        return {"tag": self.tag}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tag = state["tag"]


class Hits(EveryN):
    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self.hits: list[int] = []

    def every_n_impl(self, trainer: Any, model: Any, batch: Any, output: Any, loss: Any, iteration: int) -> None:
        assert trainer is self.trainer
        self.hits.append(iteration)


def test_group_fills_placeholders_names_members_and_calls_in_config_order() -> None:
    config = make_config({"b": lazy(Recorder, tag="b"), "off": None, "a": lazy(Recorder, tag="a")})
    config.order = []
    trainer = object()
    group = CallbackGroup(config, trainer)
    group.on_train_start(None, iteration=0)
    assert config.order == ["b", "a"]
    assert "off" not in group
    member = group["a"]
    assert isinstance(member, Recorder)
    assert member.given == (config, trainer)
    assert (member.name, member.config, member.trainer) == ("a", config, trainer)


def test_every_hook_can_be_called_on_an_empty_group_and_no_other() -> None:
    group = CallbackGroup(make_config(None), None)
    for name in HOOKS:
        getattr(group, name)(*[None] * (len(inspect.signature(getattr(Callback, name)).parameters) - 1))
    with pytest.raises(AttributeError, match="on_trian_start"):
        group.on_trian_start(None)


def test_states_go_by_name_and_differences_are_said(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config({"kept": lazy(Recorder, tag="before"), "gone": lazy(Recorder, tag="x")})
    state = CallbackGroup(config, None).state_dict()
    config = make_config({"new": lazy(Recorder), "kept": lazy(Recorder, tag="after")})
    group = CallbackGroup(config, None)
    with caplog.at_level(logging.INFO):
        group.load_state_dict(state)
    kept = group["kept"]
    assert isinstance(kept, Recorder) and kept.tag == "before"
    assert "state dropped: gone" in caplog.text
    assert "starting afresh: new" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (dict(every_n=3), [3, 6, 9]),
        (dict(every_n=3, run_at_start=True), [1, 3, 6, 9]),
        (dict(every_n=0, run_at_start=True), []),
        (dict(every_n=2, step_size=2), [1, 4, 5, 8, 9]),  # iteration // step_size, so each hit lasts step_size steps
        (dict(), [2, 4, 6, 8, 10]),  # trainer.logging_iter
    ],
)
def test_every_n_fires(arguments: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    hits = stepped(tmp_path, {"hits": lazy(Hits, **arguments)}, *[1.0] * 10).callbacks["hits"]
    assert isinstance(hits, Hits) and hits.hits == expected


def test_no_target_is_called_before_all_are_known_to_be_callbacks(tmp_path: Path) -> None:
    made = {"good": lazy(Hits, every_n=-1), "bad": {"_target_": "os.mkdir", "path": str(tmp_path / "made")}}
    for nodes in (made, dict(reversed(made.items()))):
        with pytest.raises(ConfigError, match=r"trainer.callbacks.bad._target_ is .*mkdir: no class of callbacks"):
            CallbackGroup(make_config(nodes), None)
    assert not (tmp_path / "made").exists()
    CallbackGroup(make_config({"partial": lazy(functools.partial(Hits, every_n=2))}), None)


def make_hits(every_n: int) -> "Hits":
    return Hits(every_n=every_n) if every_n else cast(Hits, None)


def test_a_function_that_says_to_make_a_callback_is_called() -> None:
    made = CallbackGroup(make_config({"made": lazy(make_hits, every_n=2)}), None).callbacks["made"]
    assert isinstance(made, Hits) and made.every_n == 2
    with pytest.raises(ConfigError, match=r"trainer.callbacks.made makes a NoneType"):
        CallbackGroup(make_config({"made": lazy(make_hits, every_n=0)}), None)


class WrongHook(Callback):
    def on_train_end(self) -> None: ...  # type: ignore[override]


class WrongEveryN(EveryN):
    def every_n_impl(self, model: Any) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (lazy(WrongHook), r"trainer.callbacks.bad: .*WrongHook.on_train_end .*\(self, model, iteration\)"),
        (WrongHook(), r"trainer.callbacks.bad: .*WrongHook.on_train_end"),
        (lazy(WrongEveryN), r"WrongEveryN.every_n_impl .*\(self, trainer, model, batch, output, loss, iteration\)"),
        ({"clip_norm": 1.0}, r"trainer.callbacks.bad must be a lazy node"),
        (lazy(torch.nn.Identity), r"trainer.callbacks.bad._target_ is torch.*Identity: no class of callbacks"),
        (lazy(print), r"trainer.callbacks.bad._target_ is .*print: no class"),
        ({"_target_": "imaginaire.training.callbacks.train.GradKlip"}, r"(?s)trainer.callbacks.bad._target_.*GradClip"),
        (lazy(Hits, every_n=-1), r"every_n must be at least 0.*found every_n=-1"),
    ],
)
def test_a_wrong_node_is_an_error_with_its_key(node: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CallbackGroup(make_config({"bad": node}), None)


class NearlyHooked(Callback):
    def on_training_step_ends(self, model: Any, batch: Any, output: Any, loss: Any, iteration: int = 0) -> None: ...

    def on_rollout_scored(self) -> None: ...


def test_a_method_with_nearly_the_name_of_a_hook_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CallbackGroup(make_config({"mine": lazy(NearlyHooked), "other": lazy(Recorder)}), None)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "trainer.callbacks.mine" in message and "on_training_step_ends" in message
    assert "Did you mean on_training_step_end" in message
