# SPDX-License-Identifier: Apache-2.0
"""Common to all tests: the golden kit, and a process that each test finds and leaves alone."""

import os
from collections.abc import Iterator

import pytest

from tests.goldens import (
    case,
    golden,
    pytest_addoption,
    pytest_configure,
    pytest_generate_tests,
)

__all__ = ["case", "golden", "pytest_addoption", "pytest_configure", "pytest_generate_tests"]

# No test reaches for a tracker or a model hub by accident.
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "IMAGINAIRE_OUTPUT_ROOT"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """A test may lower torch's threads; the next one finds them as they were."""
    import torch

    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
