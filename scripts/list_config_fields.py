# SPDX-License-Identifier: Apache-2.0
"""Print a reference of all configuration fields: key, type, default, allowed values and the comment in the source.

python -m scripts.list_config_fields > documentations/configuration_fields.md
"""

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import attrs
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from cosmos_predict2.configs.base.config import make_config
from imaginaire.config.schema import Config

HEADER = """\
# All configuration fields

You get every key that a configuration may have, to search in: its type, its default, the values that it may take, and
the comment that stands beside it in the source. Set a key on the command line, `optimizer.lr=1e-4`, or in an experiment
([configuration](configuration.md)). `python -m scripts.train --dryrun -- experiment=NAME` prints the values of a run.
A wrong key is an error that names near keys; a wrong value is an error that names the expectation.

This page is generated: `python -m scripts.list_config_fields > documentations/configuration_fields.md`.
"""
DATA = ("folder", "latents", "lerobot_train", "bridge_json_train", "libero_hdf5_train", "toy", "toy_action")
OTHER_SIZES = ("14b", "480p", "720p")  # of models that the group has smaller, of the same classes
NOT_SET_BY_HAND = {"self", "config", "trainer", "model"}  # passed when the object is built


class Field(NamedTuple):
    name: str
    kind: str  # as written in the source
    default: str
    allowed: str
    comment: str
    section: Any = None  # an instance of the section of its own that this field holds


def comment_beside(lines: list[str], comments: Mapping[int, str], first: int, last: int) -> str:
    """The comments within the lines of a field, or else the block of comment lines directly above."""
    if beside := [comments[n] for n in range(first, last + 1) if n in comments]:
        return " ".join(beside)
    above: list[str] = []
    while first > 1 and first - 1 in comments and lines[first - 2].lstrip().startswith("#"):
        first -= 1
        above.insert(0, comments[first])
    return " ".join(above)


def source_of(thing: Any) -> tuple[ast.AST, list[str], dict[int, str]]:
    text = textwrap.dedent(inspect.getsource(thing))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {t.start[0]: t.string.lstrip("# ").replace("noqa", "") for t in tokens if t.type == tokenize.COMMENT}
    return ast.parse(text).body[0], text.splitlines(), comments


def allowed_values(validator: ast.expr | None, module: Any) -> str:
    """The values that a validator of imaginaire.config.schema admits, in words; other validators are not shown."""
    if not isinstance(validator, ast.Call) or not isinstance(validator.func, ast.Name):
        return ""
    words = ", ".join(ast.unparse(word) for word in [*validator.args, *(k.value for k in validator.keywords)])
    if validator.func.id == "one_of":
        choices = eval(f"[{words}]", vars(module))  # the source of this repository: it may name a constant
        return "one of " + ", ".join("null" if choice is None else str(choice) for choice in choices)
    return f"{validator.func.id.replace('_', ' ')} {words.replace(', ', ', at most ')}"


def section_fields(cls: type, instance: Any = None) -> Iterator[Field]:
    """The fields that an attrs class declares itself, with the values of an instance."""
    node, lines, comments = source_of(cls)
    assert isinstance(node, ast.ClassDef)
    module, types = sys.modules[cls.__module__], attrs.fields_dict(cls)
    instance = cls() if instance is None else instance
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        name = item.target.id
        if "no_effect" in types[name].metadata:
            continue
        options = {word.arg: word.value for word in item.value.keywords} if isinstance(item.value, ast.Call) else {}
        value, optional = getattr(instance, name), typing.get_type_hints(cls)[name]
        nested = value if attrs.has(type(value)) else None
        if value is None:  # a section that is there when it is set
            nested = next((kind() for kind in typing.get_args(optional) if attrs.has(kind)), None)
        comment = comment_beside(lines, comments, item.lineno, item.end_lineno or item.lineno)
        allowed = allowed_values(options.get("validator"), module)
        yield Field(name, ast.unparse(item.annotation), repr(value), allowed, comment, nested)


def all_fields(instance: Any) -> Iterator[Field]:
    """The fields of a section, those of its base classes first."""
    found: dict[str, Field] = {}
    for base in reversed(type(instance).__mro__):
        if attrs.has(base):
            found |= {field.name: field for field in section_fields(base, instance)}
    yield from found.values()


def argument_fields(target: Any, node: Any = None) -> Iterator[Field]:
    """The arguments of a function or of a class's constructor, base classes included, with the values of a node."""
    values = OmegaConf.to_container(node) if node is not None else {}
    assert isinstance(values, dict)
    functions = [vars(base).get("__init__") for base in target.__mro__] if isinstance(target, type) else [target]
    seen: set[str] = set(NOT_SET_BY_HAND)
    for function in functions:
        if not inspect.isfunction(function):
            continue
        code, lines, comments = source_of(function)
        assert isinstance(code, ast.FunctionDef)
        plain, named = [*code.args.posonlyargs, *code.args.args], code.args.kwonlyargs
        defaults = [None] * (len(plain) - len(code.args.defaults)) + code.args.defaults + code.args.kw_defaults
        for argument, value in zip([*plain, *named], defaults, strict=True):
            if argument.arg not in seen:
                seen.add(argument.arg)
                kind = ast.unparse(argument.annotation) if argument.annotation else ""
                known = inspect.signature(function).parameters[argument.arg].default
                given = values.get(argument.arg)
                if isinstance(given, bool | int | float | str | list) and given != "???":
                    known, value = given, value or ast.Constant(None)
                is_plain = isinstance(known, int | float | str | list | tuple | None)
                text = "required" if value is None else repr(known) if is_plain else ast.unparse(value)
                if "${" in text:
                    text = "that of " + ", ".join(re.findall(r"\b(?!oc\.)[a-z_]+(?:\.\w+)+", text))
                comment = comment_beside(lines, comments, argument.lineno, argument.lineno)
                yield Field(argument.arg, kind, text, "", comment)
        if code.args.kwarg is None:
            break


def summary(thing: Any) -> str:
    """The first paragraph of its own docstring."""
    return " ".join((vars(thing).get("__doc__") or "").split("\n\n")[0].split()) if hasattr(thing, "__dict__") else ""


def lines_of(prefix: str, fields: Iterator[Field]) -> Iterator[str]:
    """A list item for each field; a field that is a section of its own gives the items of that section."""
    for field in fields:
        if field.section is not None:
            if field.default == "None":
                yield f"- `{prefix}{field.name}` (`{field.kind}`, default `None`); when it is set:"
            yield from lines_of(f"{prefix}{field.name}.", all_fields(field.section))
            continue
        kind = f"`{field.kind}`" if field.kind else ""
        is_text = field.default.startswith(("required", "that of "))
        default = field.default if is_text else f"default `{field.default}`"
        facts = ", ".join(filter(None, (kind, default, field.allowed)))
        item = f"- `{prefix}{field.name}` ({facts})" + (f": {field.comment}" if field.comment else "")
        yield textwrap.fill(item, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def heading(title: str, text: str = "") -> Iterator[str]:
    yield f"\n## {title}\n"
    if text:
        yield textwrap.fill(text, 118, break_on_hyphens=False) + "\n"


def entries(group: str, *names: str) -> dict[str, Any]:
    """The nodes of these entries of a group, or of all. Each is built when it is asked for, which takes its time."""
    found = {name.removesuffix(".yaml"): entry for name, entry in ConfigStore.instance().repo[group].items()}
    return {name: found[name].node for name in names or found}


def model_pages() -> Iterator[str]:
    """The sections of each model class, from the base to what each class adds; then its networks."""
    names = [name.removesuffix(".yaml") for name in ConfigStore.instance().repo["model"]]
    names = [name for name in names if not any(size in name for size in OTHER_SIZES)]
    nodes = [entry["model"] for entry in entries("model", *names).values()]
    configs = dict.fromkeys(
        (OmegaConf.get_type(node["config"]), OmegaConf.get_type(node["config"]["pipe_config"])) for node in nodes
    )
    seen: set[type] = set()
    for config, pipe in configs:
        for prefix, cls in (("model.config.", config), ("model.config.pipe_config.", pipe)):
            for base in reversed(cls.__mro__ if cls else ()):
                if attrs.has(base) and base not in seen and base.__attrs_attrs__:
                    seen.add(base)
                    found = [field for field in section_fields(base) if field.name != "pipe_config"]
                    yield from heading(f"{prefix}*: {base.__name__}", summary(base))
                    yield from lines_of(prefix, iter(found))
    listed: set[str] = set()
    for network in dict.fromkeys(node["config"]["pipe_config"]["net"]["_target_"] for node in nodes):
        added = [field for field in argument_fields(network) if field.name not in listed]
        listed.update(field.name for field in added)
        yield from heading(f"model.config.pipe_config.net.*: {network.__name__}", summary(network))
        yield from lines_of("model.config.pipe_config.net.", iter(added))


def page() -> str:
    make_config()
    out = [HEADER]
    for field in section_fields(Config):
        if field.section is not None:
            out += heading(f"{field.name}.*", summary(type(field.section)))
            out += lines_of(f"{field.name}.", section_fields(type(field.section), field.section))
    out += model_pages()
    for group in ("optimizer", "scheduler"):
        for name, node in entries(group).items():
            target = node["_target_"]
            out += [*heading(f"{group}={name}", summary(target)), *lines_of(f"{group}.", argument_fields(target, node))]
    for group, callbacks in entries("callbacks", "basic", "long", "viz_online_sampling").items():
        for name, node in callbacks.items():
            target = node["_target_"]
            out += heading(f"trainer.callbacks.{name} (callbacks=[{group}])", summary(target))
            out += lines_of(f"trainer.callbacks.{name}.", argument_fields(target, node))
    loaders = entries("dataloader_train", *DATA)
    loader = loaders["folder"]["_target_"]  # all entries use it, with values of their own
    out += [*heading("dataloader_train, dataloader_val", summary(loader))]
    out += lines_of("dataloader_train.", argument_fields(loader))
    for name in DATA:
        node = loaders[name]["dataset"]
        target = node["_target_"]
        out += heading(f"dataloader_train={name}", summary(target))
        out += lines_of("dataloader_train.dataset.", argument_fields(target, node))
    return "\n".join(out).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
