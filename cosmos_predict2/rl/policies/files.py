# SPDX-License-Identifier: Apache-2.0
"""Policies as files: safetensors whose header records the class, its arguments, and what the weights were trained on.

A policy is also read from the folder or the checkpoint of a run that trained one: its config.yaml names the class, its
weights are below ``net.``; a run that cloned one has its best policy in the folder ``policy``. A published policy is a
folder in its public layout, and stays one when it is written; what is recorded of it lies beside. Nothing that a file
names is imported; only registered classes are built.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from cosmos_predict2.actions.transforms import ActionContract
from cosmos_predict2.checkpoints.adapters import Adapter
from cosmos_predict2.checkpoints.card import name_of, run_folder, run_tree, safetensors_header, section_of
from cosmos_predict2.released import EMBODIED, EMBODIED_DIR
from cosmos_predict2.rl.interfaces import OF_RECORDINGS, PolicyDefaults, completed
from cosmos_predict2.rl.policies.network import trained_adapter
from cosmos_predict2.rl.policies.null import ADDRESS, null_policy
from cosmos_predict2.rl.remote.connections import is_policy
from imaginaire import foreign_json, storage
from imaginaire.buildable import made, recorded, resolve, shipped
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import below, is_hub, latest, local_file, names_at, open_address
from imaginaire.errors import MISSHAPEN, CheckpointError, ConfigError, UserError, near, raised_as
from imaginaire.findings import CheckContext, Finding, error
from imaginaire.training import provenance

PUBLIC_CONFIG = "config.json"  # of a folder in a public layout
RESULT = "policy"  # in the folder of a run that cloned one
KEY = "policy_card"  # in the header
FILE = "policy.safetensors"
WEIGHTS = (".safetensors", ".pt", ".pth")  # suffixes of files; a folder may be called pi0.5
CARD = "policy_card.json"  # of folders in a public layout
_HERE = "cosmos_predict2.rl.policies"
POLICIES = shipped(
    "policy",
    {
        "toy": f"{_HERE}.toy:ToyPolicy",
        "conv": f"{_HERE}.conv:ConvPolicy",
        "openvla_oft": f"{_HERE}.openvla.policy:OpenVLAPolicy",
        "pi05": f"{_HERE}.pi05.policy:Pi05Policy",
    },
)
_LABELS = {"openvla_oft": "OpenVLA", "pi05": "PI0.5"}  # by the policy's name in programs
_OF_A_RUN = ("net.", "net_ema.")
_CURE = "Give the policy's own file, or the run that trained it."
SIZED_BY_PATH = (f"{_HERE}.conv.ConvPolicy",)  # classes whose arguments are those of what they begin with
# Classes that `save` folders in a public layout, by the model_type of their config.json.
PUBLIC = {"openvla": f"{_HERE}.openvla.policy.OpenVLAPolicy", "pi05": f"{_HERE}.pi05.policy.Pi05Policy"}


@dataclass(frozen=True)
class PolicyCard:
    """A policy's kind and origin."""

    policy: str  # the dotted name of the class
    arguments: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)  # data, seed, options and versions of the training
    is_public: bool = False  # in its public layout


def file_of(path: Path) -> Path:
    """The file that a policy is written to: a path without a suffix is a folder."""
    return path if path.suffix else path / FILE


def is_public(cls: type) -> bool:
    """True for a class whose policies are folders in a public layout."""
    return isinstance(cls, type) and name_of(cls) in PUBLIC.values()


def write_policy(path: Path, policy: Any, about: Mapping[str, Any]) -> Path:
    """Write a policy, complete or not at all, to the file of this path, a published one to the folder; gives which."""
    public = is_public(type(policy))
    if public and path.suffix in WEIGHTS:
        raise ConfigError(f"{path}: a {type(policy).__name__} is a folder in its public layout: give a folder.")
    path = path if public else file_of(path)
    installed = provenance.version_of(provenance.DISTRIBUTION)  # None of a folder that was not installed
    versions = {"torch": torch.__version__, provenance.DISTRIBUTION: installed}
    card = {
        "policy": name_of(type(policy)),
        # where a published one is read from is its path
        "arguments": {name: value for name, value in policy.arguments.items() if not (public and name == "path")},
        "about": {**about, "versions": versions},
    }
    if public:
        policy.save(path)
        storage.write_text(path / CARD, json.dumps(card, indent=1, sort_keys=True) + "\n")
        return path
    tensors = {name: value.detach().cpu().contiguous() for name, value in policy.state_dict().items()}
    content = safetensors.torch.save(tensors, {"format": "pt", KEY: json.dumps(card, sort_keys=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_bytes(path, content)
    return path


def holds_policy(address: str) -> bool:
    """True for a file, a folder or a run that a policy can be read from; raises where there is nothing."""
    if address.startswith(ADDRESS):
        return True
    address = latest(result_of(address))
    try:
        return recorded(_card(address).policy, "policy") is not None
    except CheckpointError:
        open_address(address)
        return False


def read_policy(address: str, which: str = "auto", options: Mapping[str, Any] | None = None) -> tuple[Any, PolicyCard]:
    """The policy of a file, a folder or a run, and what is recorded of it; ``which`` is "net", "net_ema" or "auto".

    ``options`` are arguments of its class that replace the recorded ones. The folder of a run that cloned a policy is
    its best one; null:KIND:FOLDER is one that sees nothing (`null_policy`).
    """
    if address.startswith(ADDRESS):
        found = null_policy(address, **(options or {}))
        return found.eval(), PolicyCard(name_of(type(found)), {"address": address})
    if is_policy(address):
        raise ConfigError(f"{address}: its policy is played (evaluate_policy, collect), its weights are not here.")
    address = latest(result_of(address))  # once: a run may save another checkpoint meanwhile
    card = _card(address)
    if (cls := recorded(card.policy, "policy")) is None:
        raise CheckpointError(
            f"{address} holds a policy of class '{card.policy}', which is not registered here. Decorate the class with"
            f' @buildable("policy"), and import its module: --import {card.policy.rpartition(".")[0]}.'
        )
    try:
        policy = cls(**{**card.arguments, **(options or {})})
    except TypeError as error:
        given = f" and {', '.join(options)}" if options else ""
        raise CheckpointError(f"{address}: its policy cannot be built from what it records{given}: {error}.") from error
    if not card.is_public:  # else it has read its folder
        load_weights(policy, address, which)
    remember(policy, card.about)
    return completed(policy.eval(), PolicyDefaults), card


def arguments_of(address: str, cls: type) -> Mapping[str, Any]:
    """The arguments that build a policy of this class again, as a file, a folder or a run of it records them."""
    card = _card(latest(result_of(address)))
    if card.policy != name_of(cls):
        raise ConfigError(f"{address} holds a policy of class '{card.policy}', but {name_of(cls)} is to begin with it.")
    return card.arguments


def about_of(address: str) -> Mapping[str, Any]:
    """Read what a policy records of its training; empty where it records nothing."""
    try:
        return _card(latest(result_of(address))).about
    except CheckpointError:
        return {}


def remember(policy: Any, about: Mapping[str, Any]) -> None:
    """Give a policy what is known of the recordings that it was cloned on; what is not recorded is empty."""
    for name in ("sentences", "views", "recorded_size"):
        setattr(policy, name, tuple(about.get(name, ())))
    policy.contract = ActionContract.read(about.get("contract"))


def find_policy(address: str, which: str = "auto", options: Mapping[str, Any] | None = None) -> tuple[Any, PolicyCard]:
    """The same, or a driver of one's own that is no file, MODULE:CLASS, or a server's policy (`RemotePolicy`), which
    are built with ``options``."""
    if is_policy(address):
        from cosmos_predict2.rl.policies.remote.policy import RemotePolicy  # which the other policies do not need

        remote = made(RemotePolicy, options or {}, f"{address}: ", address=address)
        remember(remote, remote.about)
        return remote, PolicyCard(address, dict(options or {}), remote.about)
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", address) or Path(address).exists():
        return read_policy(address, which, options)
    driver = made(resolve(address, "policy"), options or {}, f"{address}: ")
    if missing := [name for name in ("act", "action_dim", "chunk") if not hasattr(driver, name)]:
        raise ConfigError(
            f"{address} has no '{missing[0]}': a policy has act(observation, *, mode, generators, temperature), which"
            " gives a Decision, action_dim (numbers of an action) and chunk (actions of a decision)."
        )
    return completed(driver, PolicyDefaults), PolicyCard(address, dict(options or {}))


def policy_adapter(address: str, which: str = "auto", alpha: float | None = None) -> Adapter | None:
    """The adapters that a run trained beside its policy's weights; None for a source that records no policy.

    ``alpha`` is an error where it is another one than the run's.
    """
    address = latest(result_of(address))
    tree = run_tree(folder) if (folder := run_folder(address)) else {}
    if "_target_" not in section_of(tree, "model", "config", "policy"):
        return None
    policy, card = read_policy(address, which)
    return trained_adapter(policy, address, card.arguments, alpha)


def _public_card(address: str) -> PolicyCard | None:
    """The card of a folder in a public layout; None for anything else."""
    names = names_at(address)
    if PUBLIC_CONFIG not in names:
        return None
    with raised_as(CheckpointError, f"{address}: its {PUBLIC_CONFIG} or {CARD} cannot be read", *MISSHAPEN):
        content = foreign_json.load(local_file(below(address, PUBLIC_CONFIG)))
        kind = content["type" if "type" in content else "model_type"]  # lerobot's name, and transformers'
        recorded = foreign_json.load(local_file(below(address, CARD))) if CARD in names else {}
        arguments = {**recorded.get("arguments", {}), "path": address}
    if kind not in PUBLIC:
        raise CheckpointError(f"{address} holds a model of type '{kind}', no policy known here.{near(kind, PUBLIC)}")
    return PolicyCard(PUBLIC[kind], arguments, recorded.get("about", {}), is_public=True)


def _card(address: str) -> PolicyCard:
    if (public := _public_card(address)) is not None:
        return public
    header = safetensors_header(address)
    if KEY in header:
        with raised_as(CheckpointError, f"{address}: its {KEY} cannot be read", ValueError, TypeError, KeyError):
            card = foreign_json.loads(header[KEY])
            return PolicyCard(str(card["policy"]), dict(card["arguments"]), dict(card["about"]))
    folder = run_folder(address)
    if folder and (result := result_of(folder)) != folder:  # another checkpoint of a clone
        return replace(_card(result), is_public=False)
    config = section_of(run_tree(folder) if folder else {}, "model", "config")
    tree = section_of(config, "policy")
    if "_target_" not in tree:
        open_address(address)  # raises where there is nothing
        raise CheckpointError(
            f"{address} records no policy: its header has no {KEY}, and no run's config.yaml names model.config.policy."
            " Give the policy's own file, or the run that trained it."
        )
    policy = str(tree["_target_"])
    is_public = policy in PUBLIC.values()  # whose sizes are at its path
    begins_at_path = is_public or policy in SIZED_BY_PATH
    names = tree.keys() - {"_target_"} - (set() if begins_at_path else {"path"})
    arguments = {name: value for name, value in tree.items() if name in names}
    about: dict[str, Any] = {"run": folder, "execute": section_of(config, "rl").get("execute")}
    if (begun := tree.get("path")) and os.path.exists(begun):
        about |= {name: value for name, value in about_of(begun).items() if name in OF_RECORDINGS and value}
    if clips := section_of(config, "env").get("clip_actions"):
        about["contract"] = replace(ActionContract.read(about.get("contract")), clip_actions=clips).to_dict()
    return PolicyCard(policy, arguments, about)


# --- weights, wherever they are


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
            "the policy has no weights. A clone (experiment=clone_recordings...), a folder in"
            f" {_LABELS[name]}'s public layout or a hub id is expected, such as"
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


def load_weights(policy: nn.Module, path: str, which: str = "auto") -> None:
    """Put the weights of a policy's file, or of a run or checkpoint that trained one, into ``policy``, every name
    accounted for; ``which`` is "net", "net_ema" or "auto"."""
    source, state = weights.read(path), policy.state_dict()
    if which == "net_ema" or set(state) != set(source):  # else the policy's own file, where `net` may be a part of it
        if any(name.startswith(_OF_A_RUN) for name in source):  # which may hold a world model besides
            source = weights.renamed(source, lambda name: name if name.startswith(_OF_A_RUN) else None)
        source = weights.select(source, which)
    weights.load_into(state, source).require(source=path, cure=_CURE)
