# SPDX-License-Identifier: Apache-2.0
"""The published name of the data set of several cameras, whose models do not run here."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset

from imaginaire.errors import ConfigError
from imaginaire.findings import CheckContext, Finding, error

_NOT_HERE = "multiview is not here: use cosmos_predict2.data.dataset_video.Dataset with the folder of one camera"


class MultiviewDataset(Dataset[dict[str, Any]]):
    """Raises that multiview is not here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(f"MultiviewDataset: {_NOT_HERE}.")

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        yield error(context.key, _NOT_HERE)
