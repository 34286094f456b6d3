# SPDX-License-Identifier: Apache-2.0
"""Groups ``dataloader_train`` and ``dataloader_val`` (also spelt data_train, data_val). None has an entry yet."""


def register() -> None:
    """Nothing to add; a group without entries is left out of the defaults list when a run is composed."""
