# SPDX-License-Identifier: Apache-2.0
"""Quick copies of nodes are those that OmegaConf makes."""

import copy
import enum
import gc
from typing import Any

import attrs
import pytest
from omegaconf import DictConfig, ListConfig, Node, OmegaConf

from imaginaire.config.internals import OBJECTS
from imaginaire.config.registry import forgiving_store
from imaginaire.errors import ConfigError


class Colour(enum.Enum):
    RED = 1


@attrs.define(kw_only=True)
class Part:
    colour: Colour = Colour.RED
    size: int | float = 1  # a union
    rate: float | None = None
    names: list[str] = attrs.field(factory=lambda: ["a", "b"])
    widths: dict[str, int] = attrs.field(factory=lambda: {"left": 3})
    path: str = "${more.text}"


def tree() -> DictConfig:
    more = {"_target_": gc.collect, "text": "x", "null": None, "missing": "???", "list": [1, {"a": [2.5, True]}, None]}
    more |= {"refers": "${more.text}", "null_list": ListConfig(None), "null_tree": DictConfig(None), 3: b"key"}
    made = DictConfig({"part": OmegaConf.structured(Part()), "more": more}, flags=dict(OBJECTS))
    made.more["frozen"] = {"a": 1}
    OmegaConf.set_readonly(made.more.frozen, True)
    OmegaConf.set_struct(made.part, False)
    assert made.more.refers == made.part.path == "x"
    return made


def described(node: Any) -> Any:
    """Everything that a node holds, with the classes, the metadata and the flags of all that it holds."""
    if not isinstance(node, Node):
        return node
    state = {name: value for name, value in vars(node).items() if name not in ("_parent", "_flags_cache", "_content")}
    facts = vars(node._metadata)
    state["_metadata"] = type(node._metadata), {**facts, "flags": dict(facts["flags"])}
    content: Any = vars(node).get("_content")
    if isinstance(content, dict):
        content = {key: described(child) for key, child in content.items()}
    elif isinstance(content, list):
        content = [described(child) for child in content]
    else:
        content = described(content)
    return type(node), state, content


def parents_are_right(node: Any) -> bool:
    content: Any = vars(node).get("_content")
    children = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return all(child._get_parent() is node and parents_are_right(child) for child in children)


def test_a_quick_copy_is_the_copy_that_omegaconf_makes() -> None:
    original = tree()
    for node in (original, original.part, original.more["list"], original.part._get_node("rate")):
        expected = copy.deepcopy(node)
        with forgiving_store():
            quick = copy.deepcopy(node)
        assert described(quick) == described(expected) == described(node)
        assert quick._get_parent() is expected._get_parent() is node._get_parent()
        assert parents_are_right(quick)


def test_a_quick_copy_shares_no_node_with_its_original() -> None:
    original = tree()
    before = described(original)
    with forgiving_store():
        quick = copy.deepcopy(original)
    quick.more.text = "changed"
    quick.more["list"][1]["a"].append(7)
    quick.part.names.append("c")
    quick.part.widths.left = 4
    quick.part.size = 2.5
    OmegaConf.set_readonly(quick.more.frozen, False)
    OmegaConf.set_struct(quick.more, True)
    quick.more.frozen.a = 2
    assert quick.part.path == "changed"  # interpolations look in the copy
    assert described(original) == before


def test_nodes_are_copied_quickly_while_a_configuration_is_composed_alone() -> None:
    usual = DictConfig.__deepcopy__, ListConfig.__deepcopy__
    with pytest.raises(ConfigError), forgiving_store():
        assert DictConfig.__deepcopy__ is ListConfig.__deepcopy__
        raise ConfigError("a composition that fails")
    assert (DictConfig.__deepcopy__, ListConfig.__deepcopy__) == usual
