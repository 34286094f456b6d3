# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def any_company() -> Callable[[Callable[[Mapping[str, Tensor]], Any], Mapping[str, Tensor], Tensor], None]:
    """Five decisions that were made together have the same probabilities in shuffled parts of them."""

    def check(log_prob: Callable[[Mapping[str, Tensor]], Any], record: Mapping[str, Tensor], acted: Tensor) -> None:
        assert len(acted) == 5
        for rows in ([3, 0], [4, 2, 1], [1], [2, 4, 0, 3, 1]):
            part = {name: value[rows] for name, value in record.items()}
            torch.testing.assert_close(log_prob(part).log_prob_B_K_N, acted[rows], rtol=0, atol=1e-5)

    return check
