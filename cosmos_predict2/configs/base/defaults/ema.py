# SPDX-License-Identifier: Apache-2.0
"""Group ``ema``: averages of the weights. None is registered yet."""


def register() -> None:
    """Nothing to add; a group without entries is left out of the defaults list when a run is composed."""
