# SPDX-License-Identifier: Apache-2.0
"""Loading the Python files that make configurations, with one message for what is wrong with one."""

import contextlib
import difflib
import importlib
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf.errors import UnsupportedValueType

from imaginaire.config.lazy_yaml import add_import_folder
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError, UserError, near

log = logging.getLogger(__name__)

EXTRAS = {  # top-level packages of the optional extras, for the cure in a message
    "megatron": "compat",
    "transformer_engine": "te",
    "flash_attn": "flash",
    "apex": "gpu",
    "ray": "rl",
    "libero": "libero",
    "s3fs": "s3",
}

_alone: set[str] = set()  # modules of config files that lie outside the working directory
# Experiment modules that did not import, with the cause: named when an experiment cannot be found.
broken_modules: dict[str, str] = {}
# Experiment modules that import but register nothing, with their files: named there, too.
silent_modules: dict[str, str] = {}


def find_config_file(path: str) -> Path:
    """The existing file that ``--config`` names: a Python file, or the config.yaml of a run."""
    if not path.strip():
        raise ConfigError("--config is empty. Give a Python file with make_config(), or the config.yaml of a run.")
    file = Path(path).expanduser()
    if file.is_dir():
        offered = [str(file / name) for name in ("config.py", "config.yaml") if (file / name).is_file()]
        hint = f" Did you mean {' or '.join(offered)}?" if offered else ""
        raise ConfigError(f"--config={path} is a folder; a Python file or a config.yaml is needed.{hint}")
    if not file.is_file():
        if file.parent.is_dir():
            hint = _near_configs(file)
        else:
            cure = "" if file.is_absolute() else " Run from the checkout, or give --config."
            hint = f" The folder {file.parent} does not exist either.{cure}"
        raise ConfigError(f"--config={path} does not exist (working directory {Path.cwd()}).{hint}")
    if file.suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"--config={path} is neither a Python file (.py) nor a saved configuration (.yaml).")
    return file.absolute()


def _near_configs(file: Path) -> str:
    """The configurations that lie where ``file`` was looked for, those of a similar name first."""
    marks = {".py": "def make_config", ".yaml": "trainer:"}
    there = [p for p in sorted(file.parent.iterdir()) if p.suffix in marks and p.is_file()]
    there = [p for p in there if marks[p.suffix] in p.read_text(encoding="utf-8", errors="replace")]
    if close := difflib.get_close_matches(file.name, [p.name for p in there], n=3):
        return f" Did you mean {' or '.join(str(file.with_name(name)) for name in close)}?"
    return f" In its folder: {', '.join(map(str, there[:12]))}." if there else ""


def load_config(path: Path) -> Config:
    """What ``make_config()`` of this Python file returns; importing it registers groups and experiments."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    # A module that prints while it is imported must not write between the names that --list gives on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        module = _import(path)
        make_config = getattr(module, "make_config", None)
        if not callable(make_config):
            public = [name for name in vars(module) if not name.startswith("_")]
            hint = near("make_config", public) if near("make_config", public).startswith(" Did") else ""
            raise ConfigError(f"{path} has no function make_config(), which must return the Config.{hint}")
        config = _run(make_config, f"make_config() of {path} failed")
    if not isinstance(config, Config):
        raise ConfigError(
            f"make_config() of {path} returned {'nothing' if config is None else f'a {type(config).__qualname__}'},"
            " but it must return an imaginaire.config.schema.Config."
        )
    return config


def _import(path: Path) -> ModuleType:
    """The module of a file, by its dotted name below the working directory; else by its stem, from its folder."""
    normal = Path(os.path.normpath(path))  # symbolic links stay: they may be how a folder came to lie here
    is_below = normal.is_relative_to(Path.cwd())
    parts = normal.relative_to(Path.cwd()).with_suffix("").parts if is_below else ()
    if not (is_below and all(part.isidentifier() for part in parts)):
        parts = (normal.stem,)
        if not normal.stem.isidentifier():
            raise ConfigError(f"{path}: '{path.name}' cannot be a module name. Rename the file, such as to config.py.")
        add_import_folder(normal.parent)
        importlib.invalidate_caches()
        if normal.stem in _alone and not _is_file(sys.modules.get(normal.stem), normal):
            sys.modules.pop(normal.stem, None)  # another config file of this name
    name = ".".join(parts)
    is_new = name not in sys.modules
    module: ModuleType = _run(lambda: importlib.import_module(name), f"{path} does not import")
    if not _is_file(module, normal):
        raise ConfigError(
            f"{path} would be the module '{name}', which is {getattr(module, '__file__', None) or 'a part of Python'}"
            f" already. Rename the file, or where {normal.parent} has no __init__.py add one."
        )
    if len(parts) == 1 and is_new:
        _alone.add(name)
    return module


def _is_file(module: Any, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def _run(action: Callable[[], Any], failed: str) -> Any:
    """The action's result; whatever a user's file raises becomes one message with the place."""
    try:
        return action()
    except UserError as error:
        raise ConfigError(f"{failed}: {error}") from error
    except (Exception, SystemExit) as error:  # a border: the file may do anything
        raise ConfigError(f"{failed}: {explain(error)}") from error


def explain(error: BaseException) -> str:
    """Kind, text and file:line of an error in somebody's file, on one line, with the extra that would mend it."""
    text = " ".join(str(error).split())
    if len(text) > 600:
        text = text[:600] + " ..."
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen importlib")]
    foreign = (str(Path(__file__).parent) + os.sep, os.path.dirname(os.__file__) + os.sep)
    theirs = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(foreign)] or frames
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    cure = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = EXTRAS.get(error.name.split(".")[0])
        alone = " Run from the folder it lies in, or install the package that brings it." * ("." not in error.name)
        cure = f" Install it from the checkout: pip install -e '.[{extra}]'" if extra else alone
    if isinstance(error, UnsupportedValueType):
        cure = " Hydra's store takes plain values only; imaginaire.config.register_experiment takes classes, too."
    return f"{type(error).__name__}: {text}{place}.{cure}"


def import_all_modules_from_package(
    package: str | ModuleType, reload: bool = False, skip_underscore: bool = True
) -> None:
    """Import every module below a package, so that what it registers is registered; plain sub-folders count, too.

    A module that does not import is one warning, is remembered in ``broken_modules``, and does not stop the others.
    So is a file that registers nothing (``silent_modules``); what other files import from may begin with "_".
    """
    root = importlib.import_module(package) if isinstance(package, str) else package
    for short, is_package in _modules_in(root):
        if skip_underscore and short.startswith("_"):
            continue
        name = f"{root.__name__}.{short}"
        known, before = sys.modules.get(name), _stored()
        try:
            module = importlib.reload(known) if known is not None and reload else importlib.import_module(name)
        except Exception as error:  # a border: experiment files are the users' own
            cause = str(error) if isinstance(error, UserError) else explain(error)
            is_known = broken_modules.get(name) == cause
            broken_modules[name] = cause
            if not is_known:
                _warn("%s did not import, so its experiments are absent: %s", name, cause)
            continue
        broken_modules.pop(name, None)
        if is_package:
            import_all_modules_from_package(module, reload, skip_underscore)
        elif known is None and list(map(id, _stored())) == list(map(id, before)):
            silent_modules[name] = str(module.__file__)
            _warn(
                "%s registers nothing: it has no register_experiment(...) and no ConfigStore store(...) that was run."
                " If it only helps other files, let its name begin with '_'.",
                module.__file__,
            )


def _modules_in(package: ModuleType) -> list[tuple[str, bool]]:
    """(name, is it a package) of what lies in a package, with sub-folders that have Python files but no __init__.py."""
    found = {info.name: info.ispkg for info in pkgutil.iter_modules(package.__path__)}
    for folder in map(Path, package.__path__):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            is_folder = path.is_dir() and path.name != "__pycache__" and any(path.rglob("*.py"))
            if path.name.startswith(".") or not (is_folder or path.suffix == ".py"):
                continue
            if "." in (name := path.stem if path.suffix == ".py" else path.name):
                _warn("%s cannot be imported: rename it to a name without dots.", path)
            elif is_folder:
                found.setdefault(name, True)
    return sorted(found.items())


def _stored(node: Any = None) -> list[Any]:
    """The entries of Hydra's store, as objects: one that is registered anew is another object."""
    node = ConfigStore.instance().repo if node is None else node
    return [entry for child in node.values() for entry in _stored(child)] if isinstance(node, dict) else [node]


def _warn(text: str, *arguments: Any) -> None:
    """Log a warning on the first process alone."""
    if os.environ.get("RANK", "0") == "0":
        log.warning(text, *arguments)
