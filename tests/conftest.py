# SPDX-License-Identifier: Apache-2.0
"""Common to all tests: the golden kit, their order, and a process that each test finds and leaves alone."""

import gc
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests import goldens, order
from tests.goldens import case, golden, pytest_generate_tests
from tests.leftovers import Leftovers
from tests.programs import SHARED, python, spawn_by, warm_python

__all__ = ["case", "golden", "pytest_generate_tests"]
pytest_plugins = ["tests.s3_server"]

# No test reaches for a tracker or a model hub by accident, nor sees what the user has set.
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
for name in (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("IMAGINAIRE_OUTPUT_ROOT", "COSMOS_PREDICT2_ARGS", "EMBODIED_PATH", "REPO_PATH"),
):
    os.environ.pop(name, None)

# No test cuts the power, and what a killed process wrote is with the system: each call takes 4 to 30 ms.
os.fsync = lambda descriptor: None

# With torch and all that tests import, looking through the heap takes .4 s, and each configuration that is composed
# leaves enough objects to set it off: a third of the processor time went into it.
gc.set_threshold(50_000, 20, 10)


def pytest_addoption(parser: pytest.Parser) -> None:
    goldens.pytest_addoption(parser)
    order.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    goldens.pytest_configure(config)
    config.pluginmanager.register(order)
    spawn_by(warm_python)
    config.pluginmanager.register(Leftovers(getattr(config, "workerinput", {}).get("workerid", "")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Workers are forked from a server that has imported torch, and start their programs by the same one."""
    for spec in specs:
        spec.python = python()
    os.environ[SHARED] = os.path.dirname(python())


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now is there to stay


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    gc.freeze()  # pytest has looked through all of it for errors, and would again


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU here")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """End TensorBoard's threads while the test's folder is there: they write for 30 s, and fail in the next test."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard."):
            thread.stop()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """A program that runs inside a test sets variables, such as where its runs go."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_import_folders() -> Iterator[None]:
    """A configuration file that a test writes is no folder that later configurations are saved with."""
    from imaginaire.config import lazy_config

    before = list(lazy_config._import_folders)
    yield
    lazy_config._import_folders[:] = before


@pytest.fixture(autouse=True)
def _same_log() -> Iterator[None]:
    """A program that runs inside a test, or in a fixture of its module, sends the log to a stream that ends with it."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    root.setLevel(logging.WARNING)
    yield
    for handler in [h for h in root.handlers if h not in handlers and getattr(h, "of_imaginaire", False)]:
        root.removeHandler(handler)
        handler.close()


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """A test may lower torch's threads; the next one finds them as they were."""
    import torch

    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
