# SPDX-License-Identifier: Apache-2.0
"""Rules of imports: every import of the repository is read and checked against the table below."""

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
OURS = ("imaginaire", "cosmos_predict2", "scripts", "examples")


def _ours(*names: str) -> set[str]:
    return {f"cosmos_predict2.{name}" for name in names}


_MATHEMATICS = _ours("nn", "diffusion", "toy_world")
_PARTS = _ours("tokenizers", "text", "conditioner", "data", "guardrail")
_BELOW_PARTS = {"imaginaire"} | _MATHEMATICS | _ours("actions", "interfaces", "released")
_BELOW_CHECKPOINTS = _BELOW_PARTS | _PARTS
_BELOW_WORLD_MODEL = _BELOW_CHECKPOINTS | _ours("checkpoints")
_BELOW_METRICS = _BELOW_WORLD_MODEL | _ours("world_model")
_BELOW_SIBLINGS = _BELOW_METRICS | _ours("evaluation.metrics")
_BELOW_RL = _BELOW_SIBLINGS | _ours("models", "pipelines", "callbacks")
_INSIDE_RL = _ours("rl.rewards", "rl.envs", "rl.policies")

# package -> what it may import from this repository, besides itself. The longest matching name counts.
MAY_IMPORT: dict[str, set[str]] = {
    "imaginaire": set(),
    **{name: set() for name in _MATHEMATICS},
    "cosmos_predict2.interfaces": set(),
    "cosmos_predict2.actions": {"imaginaire"},
    "cosmos_predict2.released": {"imaginaire"},
    **{name: _BELOW_PARTS | _ours("text", "tokenizers", "conditioner") for name in _PARTS},
    "cosmos_predict2.checkpoints": _BELOW_CHECKPOINTS,
    "cosmos_predict2.world_model": _BELOW_WORLD_MODEL,
    "cosmos_predict2.evaluation.metrics": _BELOW_METRICS,
    "cosmos_predict2.evaluation": set(),
    "cosmos_predict2.pipelines": _BELOW_SIBLINGS,
    "cosmos_predict2.models": _BELOW_SIBLINGS,
    "cosmos_predict2.callbacks": _BELOW_SIBLINGS | _ours("models", "pipelines"),
    "cosmos_predict2.evaluation.reports": _BELOW_RL,
    "cosmos_predict2.tools": _BELOW_RL | _ours("evaluation.reports"),
    "cosmos_predict2.tools.improve": _BELOW_RL | _ours("evaluation.reports", "rl"),  # it looks at a user's environment
    **{f"cosmos_predict2.tools.{name}": _BELOW_RL | _ours("rl") for name in ("drive", "serve")},
    "cosmos_predict2.rl.interfaces": _BELOW_RL - _ours("pipelines"),
    "cosmos_predict2.rl.remote": _BELOW_RL - _ours("pipelines"),
    **{name: _BELOW_RL - _ours("pipelines") | _ours("rl.interfaces", "rl.remote") for name in _INSIDE_RL},
    "cosmos_predict2.rl": _BELOW_RL - _ours("pipelines"),
    "cosmos_predict2.renamed": set(),
    "cosmos_predict2.configs": _BELOW_RL | _ours("rl", "tools", "evaluation.reports"),
    "cosmos_predict2.compat": {"imaginaire", "cosmos_predict2"},
    "cosmos_predict2": {"imaginaire", "cosmos_predict2.renamed"},  # its __init__ alone
    "scripts": {"imaginaire", "cosmos_predict2"},
    "examples": {"imaginaire", "cosmos_predict2"},
}

# The mathematics knows nothing of machines: what it may import from outside, besides the standard library.
ONLY_FROM_OUTSIDE = {
    # Kernels of attention are optional: NEVER_AT_THE_TOP keeps them inside the functions that choose them.
    "cosmos_predict2.nn": {"torch", "einops", "flash_attn", "flash_attn_interface", "transformer_engine"},
    "cosmos_predict2.diffusion": {"torch", "einops"},
    "cosmos_predict2.toy_world": {"numpy"},
}
NOT_IN_THE_MATHEMATICS = ("torch.distributed", "logging")

# Optional or slow to import: inside the function that needs it, never at the top of a module of the two packages.
NEVER_AT_THE_TOP = {
    "PIL", "apex", "av", "boto3", "diffusers", "flash_attn", "flash_attn_interface", "h5py", "huggingface_hub",
    "libero", "lpips", "matplotlib", "megatron", "moto", "peft", "pyarrow", "ray", "s3fs", "tensorboard",
    "torch.utils.tensorboard", "transformer_engine", "transformers", "wandb",
}  # fmt: skip

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where statements stand
FORBIDDEN_NAMES = {"utils", "util", "misc", "common", "helpers"}


def _files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (REPOSITORY / package).rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _imports(source: str, module: str, is_package: bool = False) -> tuple[tuple[int, str, bool], ...]:
    """(line, full name, at the top of the module) of every import; under ``if TYPE_CHECKING`` nothing is at the top."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def walk(node: ast.AST, is_top: bool) -> Iterator[tuple[int, str, bool]]:
        for child in (child for field in BLOCKS for child in getattr(node, field, ())):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, is_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                prefix = ".".join([*base, *([child.module] if child.module else [])])
                yield from ((child.lineno, f"{prefix}.{alias.name}", is_top) for alias in child.names)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
                typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from walk(child, is_top and not inside and not typing_only)

    return tuple(walk(ast.parse(source), True))


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _row(module: str) -> str | None:
    return max((package for package in MAY_IMPORT if _within(module, package)), key=len, default=None)


def _violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Every import of a module that the tables above do not allow."""
    problems = []
    row = _row(module)
    outside = next((allowed for package, allowed in ONLY_FROM_OUTSIDE.items() if _within(module, package)), None)
    in_packages = _within(module, "imaginaire") or _within(module, "cosmos_predict2")
    for line, name, is_top in _imports(source, module, is_package):
        first = name.partition(".")[0]
        where = f"{module}:{line} imports {name}"
        if first in OURS:
            allowed = MAY_IMPORT[row] | {row} if row else set()
            if not any(_within(name, package) for package in allowed):
                problems.append(f"{where}, which is above it or beside it")
        elif outside is not None and first not in sys.stdlib_module_names and first not in outside:
            problems.append(f"{where}; it may use {', '.join(sorted(outside))} only")
        if outside is not None and any(_within(name, package) for package in NOT_IN_THE_MATHEMATICS):
            problems.append(f"{where}; mathematics has no processes and no log")
        if is_top and in_packages and any(_within(name, package) for package in NEVER_AT_THE_TOP):
            problems.append(f"{where} at its top; import it in the function that needs it")
    return problems


def test_every_import_runs_down() -> None:
    problems = [
        problem
        for path in _files(*OURS)
        for problem in _violations(path.read_text(encoding="utf-8"), _module(path), path.name == "__init__.py")
    ]
    assert not problems, "\n".join(problems)


def _circle(sources: dict[str, str]) -> str:
    """Modules that import each other, also inside functions, or ""."""
    graph = {
        module: {name if name in sources else name.rpartition(".")[0] for _, name, _ in _imports(source, module)}
        for module, source in sources.items()
    }
    try:
        graphlib.TopologicalSorter({module: found & set(graph) - {module} for module, found in graph.items()}).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(error.args[1])
    return ""


def test_no_modules_import_each_other() -> None:
    files = [path for path in _files(*OURS) if path.name != "__init__.py"]
    sources = {_module(path): path.read_text(encoding="utf-8") for path in files}
    assert not _circle(sources)
    sources["imaginaire.errors"] += "\ndef cure():\n    from imaginaire import command_line\n"
    assert "imaginaire.errors" in _circle(sources)


def test_every_module_has_a_row_in_the_table() -> None:
    modules = [_module(path) for path in _files(*OURS)]
    homeless = [name for name in modules if _row(name) in (None, "cosmos_predict2") and name != "cosmos_predict2"]
    assert not homeless, f"not in the layer table: {', '.join(homeless)}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("imaginaire.training.trainer", "def f():\n    from cosmos_predict2.models import x"),
        ("imaginaire.training.callbacks.trackers", "try:\n    from wandb import init\nexcept ImportError:\n    pass"),
        ("cosmos_predict2.nn.dit", "from cosmos_predict2.diffusion import sde"),
        ("cosmos_predict2.nn.dit", "from torch import distributed"),
        ("cosmos_predict2.nn.dit", "import numpy"),
        ("cosmos_predict2.toy_world.simulator", "import torch"),
        ("cosmos_predict2.pipelines.video2world", "from ..models import video2world_model"),
        ("cosmos_predict2.rl.rewards.client", "from cosmos_predict2.rl import losses"),
        ("cosmos_predict2.configs.base.config_video2world", "from cosmos_predict2.compat import fields"),
    ],
)
def test_a_planted_import_is_found(module: str, source: str) -> None:
    assert _violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("imaginaire.training.trainer", "from . import data\nimport torch.distributed"),
        ("imaginaire.training.callbacks.trackers", "def f():\n    import wandb"),
        ("cosmos_predict2.nn.dit", "import math\nfrom einops import rearrange\nfrom cosmos_predict2.nn import blocks"),
        ("cosmos_predict2.rl.clips.flow_grpo", "from cosmos_predict2.rl.rewards import client"),
        ("cosmos_predict2.rl.rewards.client", "from cosmos_predict2.rl.interfaces import Reward"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert not _violations(source, module)


def test_modules_are_named_after_their_idea() -> None:
    vague = [
        _module(path) for path in _files(*OURS) if path.stem in FORBIDDEN_NAMES or path.parent.name in FORBIDDEN_NAMES
    ]
    assert not vague


def test_every_file_begins_with_its_licence() -> None:
    files = [*_files(*OURS, "tests", "benchmarks"), REPOSITORY / "setup.py"]
    bare = [
        str(path)
        for path in files
        if not path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert not bare
