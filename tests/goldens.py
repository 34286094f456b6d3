# SPDX-License-Identifier: Apache-2.0
"""Golden values, read so that nothing in a folder is passed over unseen (a pytest plugin).

A test in tests/parity says which area it belongs to and reads values through the fixtures:

    AREA = "training"                                   # tests/golden/training, or the folder given as --goldens DIR

    @pytest.mark.golden_cases("lr_schedules.json", "cases")      # one test per case in the file
    def test_multiplier(case: Value) -> None:
        schedule = make(**case["params"].use())                   # an input
        case["multiplier"].compare(schedule(), rtol=1e-9)         # an expected result

Every file is a tree of entries ("lr_schedules.json/cases/0/multiplier", "attention.safetensors/q", and of what the
header of such a file says "attention.safetensors/__metadata__/config/num_heads"). A value can only be had by ``use`` or
``compare``, and both note its entries. After a run of a whole area each entry must have been noted or
match the area's list in tests/parity/unread.json (pattern and reason); otherwise the run fails.
"""

import ast
import fnmatch
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PARITY = Path(__file__).parent / "parity"
DEFAULT = Path(__file__).parent / "golden"
DOCUMENTATION = "README.md"
UNREAD = "unread.json"
TOLERANCES = {"max_abs": "atol", "abs": "atol", "relative": "rtol", "of_max": "of_largest"}  # as meta.json calls them
METADATA = "__metadata__"  # no tensor can be called so


class Value:
    """A part of a golden file. Indexing and iterating go deeper; ``use`` and ``compare`` note that it was read."""

    def __init__(self, golden: "Golden", entry: str, content: Any) -> None:
        self.entry = entry
        self._golden = golden
        self._content = content

    def use(self) -> Any:
        """The plain value, as an input of the test."""
        self._golden.used.update(_leaves(self.entry, self._content))
        return self._content

    def expected(self) -> Any:
        """The plain value, for a test that compares in a way of its own; say why ``compare`` does not do."""
        self._golden.compared.update(_leaves(self.entry, self._content))
        return self._content

    def compare(self, actual: Any, *, rtol: float = 0.0, atol: float = 0.0, of_largest: float = 0.0) -> None:
        """Fail unless ``actual`` equals this value: numbers within the tolerances, all else exactly.

        ``of_largest`` is for a tensor: a share of its largest magnitude, added to ``atol``."""
        self._golden.compared.update(_leaves(self.entry, self._content))
        if of_largest:
            atol += of_largest * float(self._content.abs().max())
        _assert_equal(self.entry, actual, self._content, rtol, atol)

    def __getitem__(self, key: Any) -> "Value":
        if isinstance(self._content, dict) and key not in self._content:
            pytest.fail(f"{self.entry} has no '{key}'; it has {', '.join(map(str, self._content))}.")
        if self.entry in _leaves(self.entry, self._content):
            pytest.fail(f"{self.entry} is read whole: use() or compare() it, then index what that gives.")
        return Value(self._golden, f"{self.entry}/{key}", self._content[key])

    def __iter__(self) -> Iterator[Any]:
        """A list gives its items; a dictionary its keys, as dictionaries do."""
        if isinstance(self._content, dict):
            return iter(self._content)
        return (self[i] for i in range(len(self._content)))

    def __contains__(self, key: Any) -> bool:
        return key in self._content

    def __len__(self) -> int:
        return len(self._content)

    def __repr__(self) -> str:
        return f"Value({self.entry})"


@dataclass
class Golden:
    """One area's folder and what was read of it."""

    area: str
    folder: Path
    used: dict[str, int] = field(default_factory=dict)  # entry -> how many numbers it holds
    compared: dict[str, int] = field(default_factory=dict)

    def json(self, name: str) -> Value:
        path = self.folder / name
        if not path.is_file():
            pytest.fail(f"{self.folder} has no {name}.")
        return Value(self, name, _read(path))

    tensors = json  # of a .safetensors file, by name

    def metadata(self, name: str) -> Value:
        """The metadata in the header of a .safetensors file, by name; a text that is JSON is parsed."""
        self.json(name)
        return Value(self, f"{name}/{METADATA}", _read_metadata(self.folder / name))

    def tolerance(self, kind: str) -> dict[str, float]:
        """The tolerances in meta.json for a kind of value, as arguments of ``Value.compare``."""
        stated = self.json("meta.json")["tolerances"][kind]
        return {TOLERANCES[name]: stated[name].use() for name in stated}

    def file(self, name: str) -> Path:
        """The path of a file of another kind (a video, say), noted as an input."""
        self.used[name] = 1
        return self.folder / name

    def entries(self) -> dict[str, int]:
        """Everything that the folder holds."""
        found: dict[str, int] = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path.name != DOCUMENTATION:
                name = path.relative_to(self.folder).as_posix()
                found.update(_leaves(name, _read(path)) if path.suffix in _READERS else {name: 1})
                if path.suffix == ".safetensors" and (header := _read_metadata(path)):
                    found.update(_leaves(f"{name}/{METADATA}", header))
        return found


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(path))


@cache
def _read_metadata(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata() or {})
    header.pop("format", None)  # of the library: for which framework a file was written
    return {name: _meaning(text) for name, text in header.items()}


def _meaning(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


_READERS = {".json": lambda path: json.loads(path.read_text(encoding="utf-8")), ".safetensors": _read_safetensors}


@cache
def _read(path: Path) -> Any:
    return _READERS[path.suffix](path)


def _leaves(entry: str, content: Any) -> dict[str, int]:
    """The entries at and below ``entry`` with how many values each holds; a list of plain values is one entry."""
    if isinstance(content, dict) and content:
        children: Iterable[tuple[Any, Any]] = content.items()
    elif isinstance(content, list) and any(isinstance(item, dict) for item in content):
        children = enumerate(content)
    else:
        return {entry: _count(content)}
    leaves: dict[str, int] = {}
    for key, item in children:
        leaves.update(_leaves(f"{entry}/{key}", item))
    return leaves


def _count(content: Any) -> int:
    if isinstance(content, list):
        return sum(_count(item) for item in content)
    return int(content.numel()) if hasattr(content, "numel") else 1


def _assert_equal(entry: str, actual: Any, expected: Any, rtol: float, atol: float) -> None:
    if isinstance(expected, dict):
        assert isinstance(actual, dict), f"{entry}: expected a dictionary, found {type(actual).__name__}"
        assert actual.keys() == expected.keys(), f"{entry}: keys {sorted(actual)}, expected {sorted(expected)}"
        for key, item in expected.items():
            _assert_equal(f"{entry}/{key}", actual[key], item, rtol, atol)
    elif isinstance(expected, list) and not _is_numeric(expected):
        assert len(actual) == len(expected), f"{entry}: {len(actual)} items, expected {len(expected)}"
        for i, item in enumerate(expected):
            _assert_equal(f"{entry}/{i}", actual[i], item, rtol, atol)
    elif expected is None or isinstance(expected, (str, bool)):
        assert actual == expected, f"{entry}: {actual!r}, expected {expected!r}"
    else:
        _assert_close(entry, actual, expected, rtol, atol)


def _is_numeric(content: Any) -> bool:
    if isinstance(content, list):
        return bool(content) and all(map(_is_numeric, content))
    return isinstance(content, (int, float)) and not isinstance(content, bool)


def _assert_close(entry: str, actual: Any, expected: Any, rtol: float, atol: float) -> None:
    import torch

    found, wanted = _tensor(actual), _tensor(expected)
    if isinstance(expected, (int, float, list)):  # JSON has no dtypes: compare in the wider of the two
        found, wanted = found.double(), wanted.double()
    torch.testing.assert_close(
        found, wanted, rtol=rtol, atol=atol, check_dtype=False, equal_nan=True, msg=lambda text: f"{entry}: {text}"
    )


def _tensor(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return torch.stack([_tensor(item) for item in value])
    if hasattr(value, "__array__"):
        return torch.from_numpy(value.copy())
    return torch.tensor(value, dtype=torch.float64)


# ---- the plugin ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--goldens",
        metavar="DIR",
        help="run one area's parity tests, all tiers, on this folder (its last component: the area)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("goldens")
    folder = Path(given).resolve() if given else None
    if folder is not None:
        areas = sorted({area for area in _areas().values() if area})
        if not folder.is_dir():
            raise pytest.UsageError(f"--goldens {given}: there is no such folder.")
        if folder.name not in areas:
            raise pytest.UsageError(
                f"--goldens {given}: no parity test is of area '{folder.name}'. Areas: {', '.join(areas) or 'none'}."
            )
        asked = any(argument.startswith("-m") for argument in config.invocation_params.args)
        if not asked and not hasattr(config, "workerinput"):
            config.option.markexpr = ""  # all tiers
    config.pluginmanager.register(_Session(config, folder), "golden-session")


def _areas() -> dict[Path, str]:
    """The area that each parity module declares, read without importing it."""
    areas = {}
    for path in sorted(PARITY.rglob("test_*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "AREA":
                areas[path] = ast.literal_eval(statement.value)
        if path not in areas:
            raise pytest.UsageError(f'{path}: a parity test names its area at module level: AREA = "..."')
    return areas


class _Session:
    """Collects what every process of the run read, and judges it at the end."""

    def __init__(self, config: pytest.Config, folder: Path | None) -> None:
        self.config = config
        self.given = folder
        self.goldens: dict[str, Golden] = {}
        self.collected: dict[str, set[str]] = {}  # area -> names of the tests that exist in what was collected
        self.modules: set[str] = set()
        self.ran: set[str] = set()
        self.failed: set[str] = set()
        self.broken_collection = False
        self.lines: list[str] = []

    def golden(self, area: str) -> Golden:
        if area not in self.goldens:
            self.goldens[area] = Golden(area, self.given or DEFAULT / area)
        return self.goldens[area]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        elsewhere = []
        for item in list(items):
            area = item.module.AREA if item.path.is_relative_to(PARITY) else None  # type: ignore[attr-defined]
            if self.given is not None and area != self.given.name:
                items.remove(item)
                elsewhere.append(item)
            if area is None or item in elsewhere:
                continue
            if item.get_closest_marker("gpu"):  # it compares again, on another device
                continue
            self.collected.setdefault(area, set()).add(item.nodeid)
            self.modules.add(str(item.path))
        if elsewhere:
            self.config.hook.pytest_deselected(items=elsewhere)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.broken_collection |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown":
            self.ran.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """A worker of pytest-xdist hands over what it read."""
        sent = getattr(node, "workeroutput", {}).get("goldens")
        if sent is None:
            self.broken_collection = True
            return
        for area, (used, compared) in sent["read"].items():
            self.golden(area).used.update(used)
            self.golden(area).compared.update(compared)
        for area, names in sent["collected"].items():
            self.collected.setdefault(area, set()).update(names)
        self.modules.update(sent["modules"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["goldens"] = {
                "read": {area: (golden.used, golden.compared) for area, golden in self.goldens.items()},
                "collected": {area: sorted(names) for area, names in self.collected.items()},
                "modules": sorted(self.modules),
            }
            return
        if self.config.option.collectonly:
            return
        for area in sorted(self.collected):
            self._judge(session, area)

    def _judge(self, session: pytest.Session, area: str) -> None:
        golden = self.golden(area)
        used = {entry: count for entry, count in golden.used.items() if entry not in golden.compared}
        counts = f"{sum(golden.compared.values())} values compared, {sum(used.values())} used"
        if reason := self._why_not_whole(area):
            self.lines.append(f"parity {area}: {counts} (whether all was read is not checked: {reason})")
            return
        found = golden.entries()
        unread = [entry for entry in found if entry not in golden.compared and entry not in golden.used]
        listed, problems = _listed(area, unread, is_default=self.given is None)
        problems += [f"neither compared nor used: {entry}" for entry in unread if entry not in listed]
        self.lines.append(f"parity {area}: {counts}, {len(listed)} listed as unread")
        if problems:
            self._fail(session, golden, problems)

    def _why_not_whole(self, area: str) -> str:
        if self.broken_collection:
            return "not everything could be collected"
        if self.failed & self.collected[area]:
            return "a test of the area failed"
        if absent := [p.name for p, a in _areas().items() if a == area and str(p) not in self.modules]:
            return f"{', '.join(absent)} did not run"
        if any("::" in argument for argument in self.config.args):
            return "single tests were asked for"
        if left := len(self.collected[area] - self.ran):
            return f"{left} of the area's {len(self.collected[area])} tests did not run"
        return ""

    def _fail(self, session: pytest.Session, golden: Golden, problems: list[str]) -> None:
        """Count as one error of the run, so that the exit code and pytest's last line both say so."""
        more = [f"... and {len(problems) - 30} more"] if len(problems) > 30 else []
        cure = f"Compare or use them in tests/parity, or list them with a reason in tests/parity/{UNREAD}."
        text = "\n".join([f"The folder {golden.folder} was not read completely.", *problems[:30], *more, cure])
        where = f"tests/parity[{golden.area}]"
        report = pytest.TestReport(
            nodeid=where,
            location=("tests/parity", None, f"golden values of {golden.area}"),
            keywords={},
            outcome="failed",
            longrepr=text,
            when="teardown",
        )
        if (reporter := self.config.pluginmanager.get_plugin("terminalreporter")) is not None:
            reporter.stats.setdefault("error", []).append(report)
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines:
            terminalreporter.write_line(line)


def _listed(area: str, unread: list[str], is_default: bool) -> tuple[set[str], list[str]]:
    """The unread entries that the area's written list allows, and what is wrong with the list itself."""
    path = PARITY / UNREAD
    rows = json.loads(path.read_text(encoding="utf-8")).get(area, []) if path.exists() else []
    listed: set[str] = set()
    problems = []
    for row in rows:
        if not row.get("reason", "").strip():
            problems.append(f"{UNREAD}: {area}: '{row['pattern']}' gives no reason")
        matches = {entry for entry in unread if fnmatch.fnmatchcase(entry, row["pattern"])}
        if not matches and is_default and not row.get("optional", False):
            problems.append(f"{UNREAD}: {area}: '{row['pattern']}' matches nothing that is left unread: remove it")
        listed |= matches
    return listed, problems


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("golden_cases")
    if marker is None:
        return
    file, key = marker.args
    session = metafunc.config.pluginmanager.get_plugin("golden-session")
    area = metafunc.module.AREA
    if session.given is not None and session.given.name != area:
        metafunc.parametrize("case", [None], ids=["other-area"], indirect=True)  # deselected right after
        return
    path = session.golden(area).folder / file
    cases = _read(path).get(key, []) if path.is_file() else []
    if not cases:  # one test that runs, and fails on opening what is not there
        metafunc.parametrize("case", [(file, key, None)], ids=["absent"], indirect=True)
        return
    ids = [str(item.get("name", i)) if isinstance(item, dict) else str(i) for i, item in enumerate(cases)]
    metafunc.parametrize("case", [(file, key, i) for i in range(len(cases))], ids=ids, indirect=True)


def parts_of(metafunc: pytest.Metafunc) -> tuple[Path, dict[str, Any]]:
    """The folder of a module's area and its meta.json, for a ``pytest_generate_tests`` of its own."""
    folder = metafunc.config.pluginmanager.get_plugin("golden-session").golden(metafunc.module.AREA).folder
    meta = folder / "meta.json"
    return folder, _read(meta) if meta.is_file() else {}


def parametrize(metafunc: pytest.Metafunc, values: dict[str, list[str]]) -> None:
    """One test for each value of an argument that it takes; of none one that runs, and fails on what is not there."""
    for name in [name for name in values if name in metafunc.fixturenames]:
        metafunc.parametrize(name, values[name] or ["absent"])


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """The folder of the test module's AREA."""
    opened: Golden = request.config.pluginmanager.get_plugin("golden-session").golden(request.module.AREA)
    return opened


@pytest.fixture
def case(request: pytest.FixtureRequest, golden: Golden) -> Value:
    """One case of the list that the test's golden_cases mark names."""
    file, key, i = request.param
    cases = golden.json(file)[key]
    if i is None:
        pytest.fail(f"{golden.folder / file}: '{key}' holds no case.")
    chosen = cases[i]
    if "name" in chosen:
        chosen["name"].use()
    return chosen
