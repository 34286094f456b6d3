# SPDX-License-Identifier: Apache-2.0
"""The weights of policies, wherever they are, and in which precision."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from cosmos_predict2.released import EMBODIED, EMBODIED_DIR
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import below, is_hub, local_file, names_at
from imaginaire.errors import CheckpointError, UserError
from imaginaire.findings import CheckContext, Finding, error

PUBLIC_CONFIG = "config.json"  # of a folder in a public layout
RESULT = "policy"  # in the folder of a run that cloned one
_LABELS = {"openvla_oft": "OpenVLA", "pi05": "PI0.5"}  # by the policy's name in programs
_OF_A_RUN = ("net.", "net_ema.")
_CURE = "Give the policy's own file, or the run that trained it."


def result_of(address: str) -> str:
    """The policy of a run that cloned one, for the run's folder; other addresses unchanged."""
    if is_hub(address) or not storage.exists(storage.join(address, "config.yaml")):
        return address
    folder = storage.join(address, RESULT)
    return folder if storage.is_folder(folder) else address


def require_public(path: str, name: str) -> None:
    """Raise where the path is no folder or hub id in the public layout of a policy (openvla_oft, pi05)."""
    if not path:
        raise CheckpointError(
            f"the policy has no weights. A folder in {_LABELS[name]}'s public layout or a hub id is expected, such as"
            f" model.config.policy.path={EMBODIED_DIR}/{EMBODIED[name][1]}, which this fetches:\n"
            f"  python -m scripts.download_checkpoints --embodied {name}"
        )
    if PUBLIC_CONFIG not in names_at(result_of(path)):
        raise CheckpointError(
            f"{path} has no {PUBLIC_CONFIG}: a folder or hub id in {_LABELS[name]}'s public layout is expected. A tiny"
            " one (of recordings: --data FOLDER; of a robot with 7 numbers per action: --action_dim 7):\n"
            f"  python -m scripts.train_policy --policy {name} --out {path}"
        )


def check_public(arguments: Mapping[str, Any], context: CheckContext, name: str) -> Iterator[Finding]:
    """The finding of `require_public` about a policy's arguments; a hub's repository is asked when it is read."""
    path = str(arguments.get("path") or "")
    if path and is_hub(path):
        return
    try:
        require_public(path, name)
    except UserError as problem:
        yield error(f"{context.key}.path", str(problem))


def public_json(address: str, name: str) -> dict[str, Any]:
    """The content of a file of a public folder, {} where there is no such file."""
    if name not in names_at(address):
        return {}
    try:
        return foreign_json.load_object(local_file(below(address, name)))
    except ValueError as error:
        raise CheckpointError(f"{address}/{name} cannot be read: {error}.") from error


def load_weights(policy: nn.Module, path: str, which: str = "auto") -> None:
    """Put the weights of a policy's file, or of a run or checkpoint that trained one, into ``policy``, every name
    accounted for; ``which`` is "net", "net_ema" or "auto"."""
    source, state = weights.read(path), policy.state_dict()
    if which == "net_ema" or set(state) != set(source):  # else the policy's own file, where `net` may be a part of it
        if any(name.startswith(_OF_A_RUN) for name in source):  # which may hold a world model besides
            source = weights.renamed(source, lambda name: name if name.startswith(_OF_A_RUN) else None)
        source = weights.select(source, which)
    weights.load_into(state, source).require(source=path, cure=_CURE)
