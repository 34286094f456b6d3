# SPDX-License-Identifier: Apache-2.0
"""Tests in random order: ``--order random``, or ``--order SEED`` to repeat one.

Files are shuffled, and the tests within each. The tests of a file stay together, as they share fixtures.
"""

import random
import secrets
from typing import Any

import pytest


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--order", metavar="SEED", help="tests in random order: random, or the seed of an earlier order")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.order == "random":
        of_the_controller = getattr(config, "workerinput", {}).get("order")
        config.option.order = of_the_controller or str(secrets.randbelow(10**6))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Each worker has the same order."""
    node.workerinput["order"] = node.config.option.order


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.order is None:
        return
    draws = random.Random(config.option.order)
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    order = list(files.values())
    draws.shuffle(order)
    for tests in order:
        draws.shuffle(tests)
    items[:] = [item for tests in order for item in tests]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.order is not None:
        terminalreporter.write_line(f"random order: --order {config.option.order} repeats it")
