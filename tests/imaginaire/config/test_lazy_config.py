# SPDX-License-Identifier: Apache-2.0
"""Lazy calls, and configurations as YAML text and back."""

import copy
import enum
import functools
import pickle
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ReadonlyConfigError

from imaginaire.buildable import locate, name_of
from imaginaire.config.lazy_config import PLACEHOLDER, LazyDict, from_yaml, instantiate, load_yaml, save_yaml, to_yaml
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.config.schema import Config, JITConfig, JobConfig, Profiling
from imaginaire.errors import ConfigError


def node_of(content: Any) -> DictConfig:
    return DictConfig(content, flags={"allow_objects": True})


class Colour(enum.Enum):
    RED = 1


@attrs.define(kw_only=True, slots=False)
class Settings:
    rank: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    names: list[str] = attrs.field(factory=list)
    part: Any = None
    jit: JITConfig = attrs.field(factory=JITConfig)


class Recorder:
    """Keeps what it was called with."""

    def __init__(self, a: Any = 1, b: Any = (0.9, 0.99), *, c: Any = None, d: Any = None) -> None:
        self.a, self.b, self.c, self.d = a, b, c, d

    @classmethod
    def make(cls, a: Any = 3) -> "Recorder":
        return cls(a=a)


_SENTINEL = object()


def anything(**kwargs: Any) -> dict[str, Any]:
    return kwargs


def with_sentinel(x: int = 1, y: Any = _SENTINEL, z: str = "${no.interpolation}") -> Any:
    return x, y, z


def needs(x: int, y: int = 2) -> int:
    return x + y


def adder(amount: int) -> Any:
    return functools.partial(needs, y=amount)


def breaks(x: int) -> Any:
    return x + "text"  # type: ignore[operator]


# --- LazyCall ---


def test_lazy_call_fills_in_the_defaults_and_calls_nothing() -> None:
    node = L(Recorder)(c=[1])
    assert isinstance(node, LazyDict)
    assert node == {"_target_": Recorder, "a": 1, "b": [0.9, 0.99], "c": [1], "d": None}


def test_lazy_call_leaves_out_defaults_that_no_file_can_show() -> None:
    assert set(L(with_sentinel)()) == {"_target_", "x"}
    assert instantiate(L(with_sentinel)()) == (1, _SENTINEL, "${no.interpolation}")


def test_config_classes_and_containers_are_stored_by_name() -> None:
    assert L(Settings)()._target_ == f"{__name__}.Settings"
    assert instantiate(L(Settings)(rank=3)).rank == 3 and instantiate(L(dict)(a=1)) == {"a": 1}
    assert instantiate(L("torch.Size")()) == torch.Size([])


# --- instantiate ---


def test_instantiate_builds_arguments_first_and_hands_over_plain_containers() -> None:
    node = L(Recorder)(a=L(Recorder)(a=5), c={"x": [L(needs)(x=1)], "y": {"z": (1, 2)}}, d=[[L(needs)(x=2)]])
    made = instantiate(node)
    assert made.a.a == 5
    assert type(made.b) is list
    assert made.c == {"x": [3], "y": {"z": [1, 2]}}
    assert type(made.c) is dict and type(made.c["x"]) is list and type(made.c["y"]) is dict
    assert made.d == [[4]] and type(made.d[0]) is list


def test_instantiate_without_recursion_hands_nodes_over() -> None:
    made = instantiate(L(Recorder)(a=L(Recorder)(a=5), b=[1, 2], c=Settings(), _recursive_=False))
    assert isinstance(made.a, DictConfig) and made.a._target_ is Recorder
    assert type(made.b) is list
    assert isinstance(made.c, DictConfig) and made.c.rank == 16


def test_arguments_of_the_call_win_and_replace_the_nodes() -> None:
    made = instantiate(L(Recorder)(a=L(breaks)(x=1), c=PLACEHOLDER), a=1, c="given")
    assert (made.a, made.c) == (1, "given")


def test_a_data_set_that_the_sampler_repeats_is_built_once() -> None:
    def loader(*numbers: int) -> Any:
        data = [L(Recorder)(a=number, b="${..c}") for number in numbers]
        return L(anything)(sampler=L(anything)(dataset=data[-1], c=7), dataset=data[0], c=7)

    same, other = instantiate(loader(1, 1)), instantiate(loader(1, 2))
    assert same["dataset"] is same["sampler"]["dataset"] and same["dataset"].a == 1 and same["sampler"]["c"] == 7
    assert (other["dataset"].a, other["sampler"]["dataset"].a) == (1, 2)
    given = instantiate(loader(1, 1), dataset="given")
    assert given["dataset"] == "given" and given["sampler"]["dataset"].a == 1


def test_lists_typed_nodes_and_other_values() -> None:
    assert instantiate([L(needs)(x=1), 5]) == [3, 5]
    assert instantiate(ListConfig([L(needs)(x=1)], flags={"allow_objects": True})) == [3]
    made = instantiate(node_of(Settings(part=L(needs)(x=1), names=["a"])))
    assert isinstance(made, Settings) and isinstance(made.jit, JITConfig)
    assert made.names == ["a"] and type(made.names) is list
    assert instantiate(made.part) == 3  # a lazy part waits for its owner
    for value in (None, 5, "text", {"a": 1}):
        assert instantiate(value) is value


def test_a_target_may_be_a_name_or_a_node_that_makes_it() -> None:
    assert instantiate({"_target_": "operator.add"}, 1, 2) == 3
    assert instantiate(L({"_target_": adder, "amount": 5})(x=1)) == 6


def test_interpolations_are_resolved_for_the_target() -> None:
    tree = node_of({"lr": 3, "node": L(Recorder)(a="${lr}", c={"x": "${add:${lr},2}"})})
    made = instantiate(tree.node)
    assert (made.a, made.c) == (3, {"x": 5})


FAILING = [  # node, its place, what the message names besides the place
    (L(needs)(x=1, z=3), "opt", f"{__name__}.needs"),
    (dict(deep=L(Recorder)(cc=3)), "opt.deep", "'cc'"),
    (L(breaks)(x=3), "opt", "breaks"),
    (L("no.such.module")(), "opt._target_", "'no'"),
    (L("torch.optim.AdamWW")(), "opt._target_", "mean AdamW"),
    ([L(needs)(x=1, z=3)], "opt[0]", "'z'"),
]


@pytest.mark.parametrize(("node", "place", "named"), FAILING)
def test_a_call_that_fails_names_key_and_target(node: Any, place: str, named: str) -> None:
    tree = node_of({"opt": node})
    value = tree.opt.deep if "deep" in tree.opt else tree.opt
    with pytest.raises(ConfigError) as error:
        instantiate({"_target_": anything, "opt": value} if isinstance(value, ListConfig) else value)
    assert place in str(error.value) and named in str(error.value)


# --- names ---


@pytest.mark.parametrize(
    "value",
    [torch.bfloat16, torch.channels_last, torch.relu, torch.nn.functional.gelu, torch.optim.AdamW, Colour.RED]
    + [len, dict, Recorder.make, Path, functools.partial],
)
def test_names_find_the_same_object(value: Any) -> None:
    assert locate(name_of(value)) == value


def _local() -> Any:
    def local() -> None: ...

    return local


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"optimizer": {"f": lambda: 1}}, "optimizer.f: "),
        ({"model": [_local()]}, "model[0]: "),
        ({"a": object()}, "a: <object"),
        ({"a": type("InMain", (), {"__module__": "__main__"})}, "a: __main__.InMain"),
        ({"a": {"_object_": "x"}}, "a._object_: "),
    ],
)
def test_what_no_file_can_hold_is_refused_with_the_key(tree: Any, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        to_yaml(tree)
    assert str(error.value).startswith(named)


# --- YAML ---

VALUES: list[Any] = [
    None, True, False, 0, -3, 1_000_000, 1e-4, 1e-6, 2**-14.5, -0.0, 1e20, 1.0, float("inf"), -float("inf"),
    "", "text", "1e-4", "5", "true", "null", "yes", "~",
    "2024-01-01", "1_000", "1:30", "a: b", "# no", "- x", "é ü 中",
    "line\nline\n", " lead", "trail ", "'quoted\"", "{a}", "[a]", "%", "@", "*x", "&y", "!z", "0x10", "0b1",
    ".5", "1.", "e5",
    [], {}, [[]], [[1, [2, []]], None], {0: 0.5, 1: 0.25}, {"a": {"b": []}}, {1.5: "x"}, {True: 1},
    torch.bfloat16, torch.device("cuda:1"), torch.preserve_format, len, torch.relu, Recorder, Colour.RED, b"bytes\x00",
    functools.partial(needs, 1, y=torch.float16), functools.partial(L, target=Recorder),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[str(i) for i in range(len(VALUES))])
def test_values_survive_the_file(value: Any) -> None:
    node = node_of({"a": value, "b": [value]})
    text = to_yaml(node)
    again = from_yaml(text)
    assert to_yaml(again) == text
    found = again.a
    if isinstance(value, functools.partial):
        assert (found.func, found.args, found.keywords) == (value.func, value.args, value.keywords)
    else:
        assert found == value and type(found) in (type(value), DictConfig, ListConfig)


def test_a_whole_config_survives_the_file_and_runs_again(tmp_path: Path) -> None:
    config = Config()
    config.model = L(Recorder)(a=Settings(rank=3, part=L(needs)(x=1)), _recursive_=False)
    config.optimizer = L(Recorder)(a=L(needs)(x=2), d=torch.bfloat16)
    save_yaml(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    again = load_yaml(tmp_path / "config.yaml")
    assert to_yaml(again) == text
    assert instantiate(again.optimizer).a == 4 and instantiate(again.optimizer).d is torch.bfloat16
    assert OmegaConf.get_type(again.model.a) is Settings
    with pytest.raises(Exception, match="rank"):
        again.model.a.rank = "abc"


def test_the_file_is_plain_yaml_with_resolved_values() -> None:
    tree = {"f": 1e-4, "t": torch.bfloat16, "p": Path("a/b"), "n": L(needs)(x=1), "c": "${f}", "s": ["${subtract:3,1}"]}
    data = yaml.safe_load(to_yaml(node_of(tree)))
    assert data["t"] == {"_object_": "torch.bfloat16"} and data["n"]["_target_"] == f"{__name__}.needs"
    assert (data["p"], data["c"], data["s"]) == ("a/b", data["f"], [2])


def _bomb(levels: int, each: int, form: str = "[{}]") -> str:
    """A few hundred bytes that mean each ** levels values."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} " + form.format(", ".join([f"*a{i - 1}"] * each)) for i in range(1, levels + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: [1", "YAML"),
        ("a: 1\na: 2\n", "duplicate key a"),
        ("a: !!python/object/apply:os.system ['true']", "YAML"),
        ("a: {_object_: os.no_such}", "'no_such'"),
        ("a: {_type_: os.path.join}", "os.path.join"),
        (_bomb(9, 10), "repeat"),
        (_bomb(9, 10, "{{<<: [{}]}}"), "repeat"),
        ("a: &a [1, *a]", "RecursionError"),
        ("{a: " * 2_000, "RecursionError"),
        ("a: " + "9" * 10_000, "ValueError"),
        ("a: \x00", "YAML"),
        (f"a: {{_type_: {__name__}.Settings, rnk: 3}}", "a.rnk"),
        (f"a: {{_partial_: builtins.dict, kwargs: {{x: {{_type_: {__name__}.Settings, rank: [1]}}}}}}", "a.kwargs.x"),
        ("a: !!set {x}", "a: a configuration has no set"),
    ],
)
def test_a_bad_file_is_one_message(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_yaml(text, "run/config.yaml")
    assert named in str(error.value) and "run/config.yaml" in str(error.value)


def test_aliases_may_repeat_what_they_name() -> None:
    one = {"x": 1, "y": [2]}
    found = from_yaml("a: &a {x: 1, y: [2]}\nb: *a\nc: {<<: *a, x: 3}\nd: [*a, *a]")
    assert found == {"a": one, "b": one, "c": {**one, "x": 3}, "d": [one, one]}


# --- freezing ---


def test_a_frozen_config_refuses_every_change_and_names_the_cure() -> None:
    config = Config()
    config.optimizer = L(Recorder)(c={"x": [1]})
    config.freeze()
    with pytest.raises(AttributeError, match=r"trainer\.profiling\.profile_freq=VALUE"):
        config.trainer.profiling.profile_freq = 3
    changes: list[Any] = [
        lambda: setattr(config, "model", None),
        lambda: setattr(config.trainer, "no_such_field", 1),
        lambda: delattr(config.trainer, "seed"),
        lambda: config.optimizer.c.x.append(2),
    ]
    for change in changes:
        with pytest.raises((AttributeError, ReadonlyConfigError)):
            change()


def test_frozen_configs_copy_pickle_and_evolve() -> None:
    config = Config()
    config.freeze()
    again = pickle.loads(pickle.dumps(config))
    assert again.trainer.seed == 0 and to_yaml(again) == to_yaml(config)
    with pytest.raises(AttributeError):
        again.trainer.seed = 1
    assert copy.deepcopy(config.trainer).seed == 0 and isinstance(config.trainer.profiling, Profiling)
    assert attrs.evolve(config.job, name="other").name == "other"


def test_the_run_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobConfig(project="p", group="g", name="n")
    monkeypatch.delenv("IMAGINAIRE_OUTPUT_ROOT", raising=False)
    assert job.path_local == "checkpoints/p/g/n"
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "s3://bucket/runs/")
    assert job.path_local == "s3://bucket/runs/p/g/n"
