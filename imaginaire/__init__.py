# SPDX-License-Identifier: Apache-2.0
"""The training engine. Outside the environment every program prints one line on how to enter it: all of them, and
cosmos_predict2, import this package before any other of theirs."""

import sys
from importlib.util import find_spec
from pathlib import Path

_NEEDED = (  # the modules of what setup.py calls CORE
    *("torch", "numpy", "attrs", "hydra", "omegaconf", "fsspec", "safetensors", "einops", "tqdm", "psutil", "yaml"),
    *("av", "PIL"),
)
_ROOT = Path(__file__).resolve().parent.parent


def _require_environment() -> None:
    """Raise, or leave with one line where a program of ours runs, when this interpreter lacks what everything needs."""
    absent = [name for name in _NEEDED if find_spec(name) is None]
    if not absent and sys.version_info >= (3, 10):
        return
    more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    old = f"is Python {sys.version.split()[0]}, and 3.10 or newer is needed"
    venv = ".venv" if Path.cwd() == _ROOT else _ROOT / ".venv"
    enter = f"use {venv}/bin/python in place of python, or first: source {venv}/bin/activate"
    if Path(sys.prefix) == _ROOT / ".venv":
        enter = f"mend it: rm -f {venv}/.installed; make setup"
    elif not (_ROOT / ".venv/.installed").exists():
        enter = f"make it with 'make setup', then {enter}"
    problem = f"has no {', '.join(absent[:3])}{more}" if absent else old
    text = f"{sys.executable} {problem}. The environment of this project has all that is needed: {enter}"
    program = Path(sys.argv[0] if sys.argv else "")
    if str(program) != "-m" and program.resolve().parent not in (_ROOT / "scripts", _ROOT / "examples"):
        raise ImportError(text)  # somebody's own program
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


_require_environment()

from imaginaire import renamed  # noqa: E402,F401  (old names of modules)
