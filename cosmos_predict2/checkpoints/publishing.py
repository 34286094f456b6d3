# SPDX-License-Identifier: Apache-2.0
"""The model card (README.md) of exported weights, of what they record about themselves, and their way to the hub."""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cosmos_predict2.checkpoints.card import read_card
from imaginaire import storage
from imaginaire.checkpoint.weight_files import is_hub
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.storage import hub

log = logging.getLogger(__name__)

CARD = "README.md"
TOKEN = "HF_TOKEN"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def model_card(path: str, source: str, more: str = "") -> str:
    """Markdown with the hub's header: network, clips, text, adapters, base and commit, as far as they are recorded by
    the exported weights or by their source.

    Of places on this machine it has the last name alone.
    """
    card, starts = read_card(path), read_card(source, fetch=False).starts
    base = card.base if is_hub(card.base) else os.path.basename(card.base.rstrip("/"))
    git: Mapping[str, str] = starts.get("git") or {}
    facts = {
        "network": "" if card.family is None else str(card.family),
        "trained on": str(card) if card.has_pipeline else "",
        "text": card.texts[0].encoder if card.texts else "",
        "actions": json.dumps(card.action_transform.to_dict()) if card.action_transform is not None else "",
        "adapters": "" if card.lora_rank is None else f"LoRA, rank {card.lora_rank}, alpha {card.lora_alpha}",
        "base": base.removeprefix("hf://"),
        "commit": git.get("commit", ""),
    }
    header = ["tags:", "- world-model", *(["- lora"] if facts["adapters"] else [])]
    header += [f"base_model: {facts['base']}"] if is_hub(card.base) else []
    rows = [f"| {name} | {' '.join(value.split())} |" for name, value in facts.items() if value]
    title = f"# {os.path.basename(os.path.normpath(path))}"
    return "\n".join(["---", *header, "---", title, "", "| fact | value |", "|---|---|", *rows, more])


def write_card(folder: str, source: str) -> None:
    """Write the card into a folder of weights that has none."""
    if os.path.isdir(folder) and not os.path.exists(place := os.path.join(folder, CARD)):
        storage.write_text(place, model_card(folder, source))


@dataclass(frozen=True)
class Push:
    """The files to send: those of a folder, or one file with its card."""

    repository: str
    dry_run: bool = False
    public: bool = False

    def check(self, destination: str) -> None:
        """Raise for whatever would keep the files from the hub, before they are made."""
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repository):
            raise ConfigError(f"--push {self.repository}: expected a repository as ORGANISATION/NAME.")
        if storage.is_remote(destination) or is_hub(destination):
            raise ConfigError(
                f"--push sends files of this machine, and {destination} is elsewhere: write a local path."
            )
        if self.dry_run:
            return
        for name in OFFLINE:
            if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
                raise ConfigError(f"--push needs the hub, and {name} is set: unset it, or add --dry_run.")
        if not os.environ.get(TOKEN):
            raise ConfigError(f"--push needs a token with write access in {TOKEN}: set it, or add --dry_run.")
        hub.client()

    def send(self, destination: str, source: str) -> None:
        """Send a folder, or a file and a card of it; a dry run logs what would be sent."""
        place = Path(destination)
        is_folder = place.is_dir()
        text = (place / CARD).read_text(encoding="utf-8") if is_folder else model_card(destination, source)
        files = sorted(file for file in place.rglob("*") if file.is_file()) if is_folder else [place]
        sizes = {str(file.relative_to(place if is_folder else place.parent)): file.stat().st_size for file in files}
        for name, size in {**sizes, CARD: len(text.encode())}.items():
            log.info("%s: %s, %.3g MB", self.repository, name, size / 1e6)
        if self.dry_run:
            log.info("nothing was sent (--dry_run). The card:\n%s", text)
            return
        api = hub.client().HfApi(token=os.environ[TOKEN])
        try:
            api.create_repo(self.repository, private=not self.public, exist_ok=True)
            if is_folder:
                api.upload_folder(repo_id=self.repository, folder_path=place)
            else:
                api.upload_file(path_or_fileobj=place, path_in_repo=place.name, repo_id=self.repository)
                api.upload_file(path_or_fileobj=text.encode(), path_in_repo=CARD, repo_id=self.repository)
        except Exception as error:  # of the client, whose classes moved between its versions
            raise CheckpointError(hub.explained(error, self.repository, revision=None, licence="")) from error
        log.info("sent to https://huggingface.co/%s (%s)", self.repository, "public" if self.public else "private")
