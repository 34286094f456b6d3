# SPDX-License-Identifier: Apache-2.0
"""Loading the Python files that make configurations, with one message for what is wrong with one."""

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from imaginaire.config.lazy_config import add_import_folder
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError, UserError, missing_package, near

log = logging.getLogger(__name__)

EXTRAS = {  # top-level packages of the optional extras, for the cure in a message
    "megatron": "compat",
    "transformer_engine": "te",
    "flash_attn": "flash",
    "apex": "gpu",
    "ray": "rl",
    "robosuite": "vla",
    "s3fs": "s3",
}

HOME = Path(__file__).resolve().parents[2]  # of our packages

# Experiment modules that did not import, with the cause: named when an experiment cannot be found.
broken_modules: dict[str, str] = {}


def find_config_file(path: str) -> Path:
    """The existing file that ``--config`` names: a Python file, or the config.yaml of a run. A relative path is below
    the working directory, else, as the default of programs is, below the folder that this package lies in."""
    file = Path(path).expanduser()
    if not file.exists() and (HOME / file).is_file():
        file = HOME / file
    if not file.is_file() or file.suffix not in (".py", ".yaml", ".yml"):
        folder = file if file.is_dir() else file.parent
        there = [str(found) for found in folder.glob("*") if found.suffix in (".py", ".yaml")]
        raise ConfigError(
            f"--config={path} is no Python file with make_config() and no config.yaml of a run (working directory"
            f" {Path.cwd()}).{near(str(file), there)}"
        )
    return file.absolute()


def load_toml(path: str) -> dict[str, Any]:
    """The content of the TOML file that a command was given."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise missing_package("tomli", "rl") from None
    try:
        return dict(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.") from error


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """The garbage collector rests: it would look through what torch imported again and again, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_collections()
def load_config(path: Path) -> Config:
    """The result of ``make_config()`` in this Python file; importing it registers groups and experiments."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    # A module that prints while it is imported must not write between the names that --list gives on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        module = _import(path)
        make_config = getattr(module, "make_config", None)
        if not callable(make_config):
            raise ConfigError(f"{path} has no function make_config(), which must return the Config.")
        config = _run(make_config, f"make_config() of {path} failed")
    if not isinstance(config, Config):
        raise ConfigError(f"make_config() of {path} returned {config!r}, not an imaginaire.config.Config.")
    return config


def _import(path: Path) -> ModuleType:
    """The module of a file, by its dotted name below the working directory, or of our own; else by its stem, from its
    folder."""
    normal = Path(os.path.normpath(path))  # symbolic links stay: they may be how a folder came to lie here
    root = next((root for root in (Path.cwd(), HOME) if normal.is_relative_to(root)), None)
    parts = normal.relative_to(root).with_suffix("").parts if root else ()
    is_dotted = bool(parts) and all(part.isidentifier() for part in parts)
    if not is_dotted or (root != Path.cwd() and importlib.util.find_spec(parts[0]) is None):
        parts = (normal.stem,)
        if not normal.stem.isidentifier():
            raise ConfigError(f"{path}: '{path.name}' cannot be a module name. Rename the file, such as to config.py.")
        add_import_folder(normal.parent)
        importlib.invalidate_caches()
    name = ".".join(parts)
    module: ModuleType = _run(lambda: importlib.import_module(name), f"{path} does not import")
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve() != normal.resolve():
        raise ConfigError(
            f"{path} would be the module '{name}', which is {file or 'a part of Python'} already. Rename the file, or"
            f" where {normal.parent} has no __init__.py add one."
        )
    return module


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
    frames = traceback.extract_tb(error.__traceback__)
    foreign = (str(Path(__file__).parent) + os.sep, os.path.dirname(os.__file__) + os.sep, "<frozen importlib")
    theirs = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(foreign)]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    cure = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = EXTRAS.get(error.name.split(".")[0])
        cure = f" Install it from the checkout: pip install -e '.[{extra}]'" if extra else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}{place}.{cure}"


def import_all_modules_from_package(
    package: str | ModuleType, reload: bool = False, skip_underscore: bool = True
) -> None:
    """Import every module below a package, so that what it registers is registered; plain sub-folders count, too.

    A module that does not import is one warning, is remembered in ``broken_modules``, and does not stop the others.
    """
    root = importlib.import_module(package) if isinstance(package, str) else package
    for short, is_package in _modules_in(root):
        if skip_underscore and short.startswith("_"):
            continue
        name = f"{root.__name__}.{short}"
        known = sys.modules.get(name)
        try:
            module = importlib.reload(known) if known is not None and reload else importlib.import_module(name)
        except Exception as error:  # a border: experiment files are the users' own
            cause = str(error) if isinstance(error, UserError) else explain(error)
            if broken_modules.get(name) != cause and os.environ.get("RANK", "0") == "0":
                log.warning("%s did not import, so its experiments are absent: %s", name, cause)
            broken_modules[name] = cause
            continue
        broken_modules.pop(name, None)
        if is_package:
            import_all_modules_from_package(module, reload, skip_underscore)


def _modules_in(package: ModuleType) -> list[tuple[str, bool]]:
    """(name, is it a package) of what lies in a package, with sub-folders that have Python files but no __init__.py."""
    found = {info.name: info.ispkg for info in pkgutil.iter_modules(package.__path__)}
    for folder in map(Path, package.__path__):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_dir() and path.name.isidentifier() and path.name != "__pycache__" and any(path.rglob("*.py")):
                found.setdefault(path.name, True)
    return sorted(found.items())
