# SPDX-License-Identifier: Apache-2.0
"""The card of `scripts.check_imagination`: a verdict on a world model and a reward, for the inputs that it measured.

    card = Card("go", reasons, figures, inputs={"world_model": digest(path), "reward": digest(reward), ...}, next_step)
    write_card(path, card)
    require_card(path, inputs)        # raises for another input, for "no", and where there is no card

A digest is of the weights that would be loaded and of what decides how they are used: in a run its newest checkpoint
and its ``model`` section, in a folder of a policy the weights, sizes, statistics and tokenizer. Other files of the
folder (figures, pages, logs) and the place where it lies do not count.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from cosmos_predict2.checkpoints.card import run_folder, run_tree
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.rl.envs.remote import address_of, facts_of
from imaginaire import foreign_json, storage
from imaginaire.buildable import describe
from imaginaire.checkpoint.weight_files import TENSOR_SUFFIXES, is_hub, latest
from imaginaire.errors import MISSHAPEN, CheckpointError, ConfigError, near, raised_as
from imaginaire.storage.hub import absent

log = logging.getLogger(__name__)

Verdict = Literal["go", "doubtful", "no"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
PROGRAM = "python -m scripts.check_imagination"
UNCHECKED = "unchecked imagination"  # beside each success that is shown without a card that fits

LEAST_CONTRAST = 0.2  # two standard errors of a difference between shares of 45 recordings each
LEARNT_IN = "learnt_in"  # in runs.jsonl of a policy's run: digests of the world model and the reward
BUILDERS = ("imagination_of", "world_model_of")  # of a world model by the path of its weights
OPTIONS = {  # arguments that count beside the weights
    "world_model": ("action_transform", "chunk_size", "tokenizer_path", "load_ema"),
    "policy": ("temperature", "noise_level", "correlation"),  # by which attempts differ from what is played
}

# Files that decide how a folder's weights are used; not figures, pages and logs that lie beside.
_KINDS = "config|card|statist|stats|token|vocab|merges|processor|index"
_DECIDES = re.compile(rf"({_KINDS})[^/]*\.(json|txt|model)$|\.model$")
_BLOCK = 2**22


@dataclass(frozen=True)
class Card:
    """Verdict, its reasons in sentences, figures by name, digests of the inputs by name, and the one thing to do next.

    Names of inputs are ``world_model``, ``tokenizer``, ``reward``, ``split`` and, for each policy, ``policy`` or
    ``policy/NAME``; ``places`` has their paths.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    figures: Mapping[str, Any]
    inputs: Mapping[str, str]
    next_step: str
    places: Mapping[str, str] = field(default_factory=dict)
    command: str = ""  # that made it


def write_card(path: Path, card: Card) -> None:
    """Write the card, complete or not at all."""
    storage.write_json(path, {"format": "imagination card 1", **asdict(card)}, indent=1)


def read_card(path: str) -> Card:
    """The card of a file, or of the server at an address."""
    served = facts_of(path)["card"] if address_of(path) else None
    if served is None and not storage.exists(path):
        raise absent(path)
    with raised_as(CheckpointError, f"{path} is no card of {PROGRAM}", *MISSHAPEN, cure="Make it anew."):
        content = served or foreign_json.load_object(storage.local_copy(path))
        if content["verdict"] not in VERDICTS:
            raise ValueError(f"its verdict is '{content['verdict']}'{near(content['verdict'], VERDICTS)}")
        names = ("verdict", "figures", "inputs", "next_step", "places", "command")
        return Card(reasons=tuple(content["reasons"]), **{name: content[name] for name in names})


def require_card(
    path: str, inputs: Mapping[str, str], allow_unchecked: bool = False, *, key: str = "card", made_by: str = PROGRAM
) -> Card | None:
    """The card of a path or of a server's address, where it is of these inputs and does not say "no"; else an error
    that names the problem and the command ``made_by``, or with ``allow_unchecked`` a warning, and None."""
    problem, card = "", None
    if facts_of(path)["card"] is None if address_of(path) else not path or not storage.exists(path):
        missing = f"{key}={path or 'null'} is no file, and no server that has a card"
        problem = f"{missing}: nothing has shown that the success which is imagined is true"
    else:
        card = read_card(path)
        problem = next(_problems(card, inputs, f"{key}={path}"), "")
    if not problem:
        if card is not None and card.verdict == "doubtful":
            log.warning('%s: verdict "doubtful": %s. Next: %s', path, "; ".join(card.reasons), card.next_step)
        return card
    if not allow_unchecked:
        beside = f"{key.rpartition('.')[0]}.allow_unchecked".lstrip(".")
        raise ConfigError(f"{problem}. Run\n  {made_by}\nor learn at your own risk: {beside}=true.")
    log.warning("%s. allow_unchecked=true: each success is shown as one of an %s", problem, UNCHECKED)
    return None


def corrected(rate: float, figures: Mapping[str, Any]) -> float | None:
    """The true rate of an imagined one, (r - FPR) / (TPR - FPR) within [0, 1], by the shares of imagined recordings
    that are judged a success though they failed, and where they succeeded; None where these are not known to differ."""
    false, true = figures.get("false_success_imagined"), figures.get("recall_imagined")
    if false is None or true is None or true - false < LEAST_CONTRAST:
        return None
    return min(1.0, max(0.0, (rate - false) / (true - false)))


def _problems(card: Card, inputs: Mapping[str, str], where: str) -> Iterator[str]:
    for name, found in inputs.items():
        known = {other: value for other, value in card.inputs.items() if other.partition("/")[0] == name}
        if not known:
            yield f"{where} has no {name.replace('_', ' ')}: it was made without one"
        elif found not in known.values():
            place, digests = " or ".join(card.places.get(other, other) for other in known), " or ".join(known.values())
            made_for = f"{where} was made for another {name.replace('_', ' ')}, or for other settings of it"
            yield f"{made_for}: digest {digests} ({place}), but this run's is {found}"
    if card.verdict == "no":
        yield f'{where} has the verdict "no": {"; ".join(card.reasons)}. Next: {card.next_step}'


class LearntIn:
    """Digests of what a policy learns in (``inputs``), and the figures of their card; see `require_card`."""

    def __init__(self, config: Any) -> None:
        self.inputs, places = learning_inputs(config)
        self.figures: Mapping[str, Any] = {}
        self.is_checked = self.has_card = config.card is not None
        if config.card is None or not self.inputs:  # nothing is imagined
            return
        flags = " ".join(f"--{name} {place}" for name, place in places.items())
        out = "CARD, and serve it there with --card CARD" if address_of(config.card) else config.card
        command = f"{PROGRAM} --data my_data {flags} --out {out}"
        card = require_card(config.card, self.inputs, config.allow_unchecked, key="model.config.card", made_by=command)
        self.figures, self.is_checked = {} if card is None else card.figures, card is not None

    def corrected(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Imagined rates as they would be truly, by the card; nothing where that is not known."""
        found = {f"{name}_corrected": corrected(rate, self.figures) for name, rate in rates.items()}
        return {name: rate for name, rate in found.items() if rate is not None}

    def note(self, metric: str, is_imagined: bool) -> str:
        """A remark beside each value of a validation's metric, with the corrected one by its name in braces."""
        if is_imagined and self.figures:
            is_known = corrected(0.0, self.figures) is not None
            return f"corrected {{{metric}_corrected:.3g}}" if is_known else "corrected: not known"
        return UNCHECKED if not self.is_checked and (self.has_card or is_imagined) else ""


def learning_inputs(config: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Digests and places of what a ``model.config`` of a policy learns in, by their names in a card; ({}, {}) where no
    world model imagines. A server computes those of its own."""
    if address := address_of(config.env):
        facts, place = facts_of(address), _place_of(config.policy)
        if not place:
            return dict(facts["inputs"]), dict(facts["places"])
        of_policy = digest(place, **counting("policy", config.policy))
        return {**facts["inputs"], "policy": of_policy}, {**facts["places"], "policy": place}
    if isinstance(config.env, str):  # a suite
        return {}, {}
    node, held = config.env.get("imagination"), config.world_model
    if node is None and held is None:
        return {}, {}
    named: Any = node if held is None else held
    if held is not None and "config" in held:
        path = held.config.model_manager_config.dit_path or TINY_ACTION
    elif _target(named).rpartition(".")[2] in BUILDERS:
        path = named.get("dit_path") or TINY_ACTION
    else:
        path = _by_name(named)
    places = {"world_model": str(path)}
    given: dict[str, Any] = dict(world_model=node, policy=config.policy)
    for name, part in (("reward", config.env.get("reward")), ("policy", config.policy)):
        if place := _place_of(part):
            places[name] = place
    return {name: digest(place, **counting(name, given.get(name))) for name, place in places.items()}, places


def counting(name: str, arguments: Any) -> dict[str, Any]:
    """Those of a part's arguments that decide how its weights are used."""
    return {key: arguments[key] for key in OPTIONS.get(name, ()) if isinstance(arguments, Mapping) and key in arguments}


def _place_of(part: Any) -> str:
    """The path in a part's arguments, or the name of its class; empty of none."""
    return str((isinstance(part, Mapping) and part.get("path")) or _by_name(part)) if part is not None else ""


def _target(part: Any) -> str:
    """The dotted name of what makes a part, or of its class."""
    return describe(part["_target_"] if isinstance(part, Mapping) and "_target_" in part else type(part))


def _by_name(part: Any) -> str:
    return ":".join(_target(part).rsplit(".", 1))


# Digests --------------------------------------------------------------------------------------------------------------


def digest(address: str, **options: Any) -> str:
    """16 hexadecimal digits of the weights at an address (a file, a folder, a run or one of its checkpoints) and of
    what decides how they are used; ``options`` that are set count too. Of a hub's repository the name alone counts.
    Of no path, a class that is named ``module:Class``, likewise the name."""
    found = hashlib.sha256()
    for name, value in sorted(options.items()):
        if value not in (None, "", False):
            found.update(f"{name}={value}\n".encode())
    if is_hub(address) or (":" in address and not storage.exists(address)):
        found.update(address.encode())
        return found.hexdigest()[:16]
    place = latest(address)
    if not storage.exists(place) and not storage.is_folder(place):
        raise absent(place)
    for name, file in _files(place):
        found.update(f"{name}\n".encode())
        with storage.open(file) as content:
            while block := content.read(_BLOCK):
                found.update(block)
    if folder := run_folder(place):
        model = run_tree(folder).get("model", {})
        found.update(json.dumps(model, sort_keys=True, default=str).encode())
    return found.hexdigest()[:16]


def _files(place: str) -> Iterator[tuple[str, str]]:
    """Names and addresses of the files that count, in order; a single one has no name, as the file itself."""
    if not storage.is_folder(place):
        yield "", place
        return
    waiting, found = [""], {}
    while waiting:
        inner = waiting.pop()
        for name in storage.listdir(storage.join(place, inner) if inner else place):
            whole = f"{inner}/{name}" if inner else name
            address = storage.join(place, whole)
            if storage.is_folder(address):
                waiting.append(whole)
            elif name.endswith((*TENSOR_SUFFIXES, ".distcp", ".metadata")) or _DECIDES.search(name):
                found[whole] = address
    if not any(name.endswith((*TENSOR_SUFFIXES, ".distcp")) for name in found):
        raise CheckpointError(f"{place} holds no weights: give a file, a run's folder or a policy's folder.")
    yield from sorted(found.items()) if len(found) > 1 else (("", file) for file in found.values())
