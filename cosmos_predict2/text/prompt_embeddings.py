# SPDX-License-Identifier: Apache-2.0
"""The file that ``python -m scripts.encode_prompts`` writes, and its use in place of a text encoder.

A safetensors file: "embedding.0", "embedding.1", ... without the zeros at their ends, for each prompt and then for the
negative prompt; its metadata has these texts, and the encoder's name and sizes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.embeddings.pickles import padded, trimmed
from cosmos_predict2.text.prompts import prompt_list
from imaginaire import storage
from imaginaire.errors import DataError, near
from imaginaire.storage.object_store import StrPath

FORMAT = "prompt-embeddings-1"
_CURE = "It should be a file written by python -m scripts.encode_prompts."


class PromptEmbeddings(Mapping[str, Tensor]):
    """Embeddings by prompt, float32 [num_tokens, width]; also a text encoder of these prompts only."""

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        *,
        name: str,
        num_tokens: int,
        width: int,
        prompts: Sequence[str],
        negative_prompt: str | None = None,
        source: str = "These embeddings",
    ) -> None:
        self.name = name
        self.prompts = tuple(prompts)  # in the order they were written; the negative one is apart
        self.num_tokens = num_tokens
        self.width = width
        self.negative_prompt = negative_prompt
        self._rows = dict(rows)
        self._source = source
        self._device = torch.device("cpu")

    def __getitem__(self, prompt: str) -> Tensor:
        if prompt not in self._rows:
            raise KeyError(prompt)
        return padded(self._rows[prompt], self.num_tokens).to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def encode(self, prompts: str | Sequence[str]) -> Tensor:
        """[len(prompts), num_tokens, width] float32."""
        batch = prompt_list(prompts)
        for prompt in batch:
            if prompt not in self._rows:
                raise DataError(
                    f"{self._source} has no embedding of {_short(prompt)}."
                    f"{near(_short(prompt), map(_short, self._rows), limit=4)}"
                    " Encode it: python -m scripts.encode_prompts --prompt TEXT --out FILE.safetensors"
                )
        return torch.stack([self[prompt] for prompt in batch])

    def to(self, device: torch.device | str) -> "PromptEmbeddings":
        self._device = torch.device(device)
        return self


@dataclass(frozen=True)
class Header:
    """The metadata of a file."""

    name: str  # of the encoder
    num_tokens: int
    width: int
    prompts: list[str]
    negative_prompt: str | None

    @property
    def texts(self) -> list[str]:
        """Of the embeddings, in their order."""
        return _distinct(self.prompts, self.negative_prompt)


def read_prompt_embeddings(path: StrPath) -> PromptEmbeddings:
    """The embeddings of a file, with the name of the encoder that made them."""
    with _opened(path) as file:
        about = _header(file, path)
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    texts = about.texts
    return PromptEmbeddings(
        {text: tensors[f"embedding.{i}"] for i, text in enumerate(texts)},
        name=about.name,
        num_tokens=about.num_tokens,
        width=about.width,
        prompts=about.prompts,
        negative_prompt=about.negative_prompt,
        source=str(path),
    )


def read_header(path: StrPath) -> Header:
    """The metadata of a file, without its embeddings."""
    with _opened(path) as file:
        return _header(file, path)


@contextmanager
def _opened(path: StrPath) -> Iterator[Any]:
    local = storage.local_copy(path)
    try:
        with safe_open(local, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read as safetensors ({error}). {_CURE}") from error


def _header(file: Any, path: StrPath) -> Header:
    about = file.metadata() or {}
    if about.get("format") != FORMAT:
        raise DataError(f"{path} is a safetensors file of another kind (format {about.get('format')!r}). {_CURE}")
    try:
        header = Header(
            name=about["encoder"],
            num_tokens=int(about["num_tokens"]),
            width=int(about["width"]),
            prompts=json.loads(about["prompts"]),
            negative_prompt=json.loads(about["negative_prompt"]),
        )
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is damaged: its metadata lacks or garbles {error}. {_CURE}") from error
    names = set(file.keys())
    if names != {f"embedding.{i}" for i in range(len(header.texts))}:
        raise DataError(f"{path} names {len(header.texts)} prompts and holds {len(names)} embeddings. {_CURE}")
    return header


def write_prompt_embeddings(
    path: StrPath,
    encoder: TextEncoder,
    prompts: Sequence[str],
    negative_prompt: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> PromptEmbeddings:
    """Encode the prompts, and the negative one if any, write them, and give them back as they can be read."""
    prompts = list(dict.fromkeys(prompt_list(prompts)))
    texts = _distinct(prompts, negative_prompt)
    rows = [trimmed(encoder.encode([text])[0]).to("cpu", dtype) for text in texts]  # one at a time: some are large
    metadata = {
        "format": FORMAT,
        "encoder": encoder.name,
        "num_tokens": str(encoder.num_tokens),
        "width": str(encoder.width),
        "prompts": json.dumps(prompts),
        "negative_prompt": json.dumps(negative_prompt),
    }
    content = save({f"embedding.{i}": row.contiguous() for i, row in enumerate(rows)}, metadata)
    storage.write_atomically(path, lambda file: file.write(content))
    return read_prompt_embeddings(path)


def _distinct(prompts: Sequence[str], negative_prompt: str | None) -> list[str]:
    return list(dict.fromkeys([*prompts, *([] if negative_prompt is None else [negative_prompt])]))


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 60 else f"{prompt[:57]}...")
