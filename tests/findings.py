# SPDX-License-Identifier: Apache-2.0
"""Findings of the check of a class, without a run around it."""

from collections.abc import Mapping, Sequence
from typing import Any

from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.findings import CheckContext, Finding

Nodes = Sequence[Mapping[str, Any]]


def checked(cls: Any, **arguments: Any) -> list[Finding]:
    return [*cls.check(arguments, CheckContext(key="node"))]


def problems(cls: Any, **arguments: Any) -> list[str]:
    """The findings as sentences."""
    return [str(finding) for finding in checked(cls, **arguments)]


def checked_model(cls: Any, config: Any, training: Nodes = (), validation: Nodes = (), **paths: Any) -> list[Finding]:
    """The findings of a model with this config and data sets; ``paths``: start_path or resume_path."""
    node = L(cls)(config=config, _recursive_=False)["config"]
    sets = [{f"dataloader_{part}.{i}": node for i, node in enumerate(found)} for part, found in
            (("train", training), ("val", validation))]  # fmt: skip
    return [*cls.check({"config": node}, CheckContext("model", training=sets[0], validation=sets[1], **paths))]
