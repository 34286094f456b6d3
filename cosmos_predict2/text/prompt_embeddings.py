# SPDX-License-Identifier: Apache-2.0
"""The file that ``python -m scripts.encode_prompts`` writes, and its use in place of a text encoder.

A safetensors file: "embedding.0", "embedding.1", ... without the zeros at their ends, for each prompt and then for the
negative prompt; its metadata has these texts, and the encoder's name and sizes. It may also hold the one embedding that
every sample of a model has which takes no text, as a rule that of the empty prompt, and so may a .pt of a tensor.
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
from cosmos_predict2.text.bytes_encoder import prompt_list
from cosmos_predict2.text.embeddings.pickles import padded, trimmed
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weight_files
from imaginaire.errors import DataError, near, raised_as
from imaginaire.storage.object_store import StrPath

FORMAT = "prompt-embeddings-1"
_CURE = "It should be a file written by python -m scripts.encode_prompts."
_WRITE_ONE = 'Write one: python -m scripts.encode_prompts --prompt "" --no_negative_prompt --out FILE.safetensors'


@dataclass(frozen=True)
class Header:
    """The metadata of a file."""

    name: str  # of the encoder
    num_tokens: int
    width: int
    prompts: list[str]  # in the order they were written; the negative one is apart
    negative_prompt: str | None

    @property
    def texts(self) -> list[str]:
        """Texts of the embeddings, in their order."""
        return _distinct(self.prompts, self.negative_prompt)


class PromptEmbeddings(Mapping[str, Tensor]):
    """Embeddings by prompt, float32 [num_tokens, width]; also a text encoder of these prompts only."""

    def __init__(self, rows: Mapping[str, Tensor], about: Header, source: str) -> None:
        self.name, self.num_tokens, self.width = about.name, about.num_tokens, about.width
        self.prompts, self.negative_prompt = tuple(about.prompts), about.negative_prompt
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


def read_prompt_embeddings(path: StrPath) -> PromptEmbeddings:
    """The embeddings of a file, with the name of the encoder that made them."""
    with _opened(path) as file:
        about = _header(file, path)
        rows = {text: file.get_tensor(f"embedding.{i}") for i, text in enumerate(about.texts)}
    return PromptEmbeddings(rows, about, str(path))


@contextmanager
def _opened(path: StrPath) -> Iterator[Any]:
    local = storage.local_copy(path)
    with raised_as(DataError, f"{path} cannot be read as safetensors", SafetensorError, OSError, cure=_CURE):
        with safe_open(local, framework="pt") as file:
            yield file


def _header(file: Any, path: StrPath) -> Header:
    about = file.metadata() or {}
    if about.get("format") != FORMAT:
        raise DataError(f"{path} is a safetensors file of another kind (format {about.get('format')!r}). {_CURE}")
    try:
        header = Header(
            name=about["encoder"],
            num_tokens=int(about["num_tokens"]),
            width=int(about["width"]),
            prompts=foreign_json.loads(about["prompts"]),
            negative_prompt=foreign_json.loads(about["negative_prompt"]),
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
    storage.write_bytes(path, content)
    return read_prompt_embeddings(path)


# ---- one embedding for all


def read_constant_embedding(path: StrPath) -> Tensor:
    """[S, E], in the file's precision: a .pt of one tensor [S, E] or [1, S, E], or a file of scripts.encode_prompts.

    Of a file with several prompts it is that of the empty one.
    """
    _require_file(path)
    if str(path).endswith(".safetensors"):
        known = read_prompt_embeddings(path)
        return known[_only_prompt(path, list(known))]
    found = _saved_tensor(path)
    if not bool(torch.isfinite(found).all()):
        raise DataError(f"{path} holds an embedding with values that are not finite.")
    return found


def constant_embedding_shape(path: StrPath) -> tuple[int, int]:
    """(tokens, width) of what `read_constant_embedding` would give, from the file's header alone."""
    _require_file(path)
    if not str(path).endswith(".safetensors"):
        num_tokens, width = _saved_tensor(path).shape
        return num_tokens, width
    with _opened(path) as file:
        about = _header(file, path)
    _only_prompt(path, about.texts)
    return about.num_tokens, about.width


def _require_file(path: StrPath) -> None:
    if not storage.exists(path) or storage.is_folder(path):
        raise DataError(f"There is no embedding {path}. {_WRITE_ONE}")


def _only_prompt(path: StrPath, texts: Sequence[str]) -> str:
    if "" not in texts and len(texts) != 1:
        raise DataError(f"{path} has embeddings of {len(texts)} prompts, and none is empty. {_WRITE_ONE}")
    return "" if "" in texts else texts[0]


def _saved_tensor(path: StrPath) -> Tensor:
    """[S, E], memory-mapped."""
    found = weight_files.load_pt(path)
    if isinstance(found, Tensor) and found.ndim == 3 and found.shape[0] == 1:
        found = found[0]
    if not isinstance(found, Tensor) or found.ndim != 2 or not found.is_floating_point():
        what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise DataError(f"{path} holds {what}, but an embedding is a tensor [tokens, width] or [1, tokens, width].")
    return found


def _distinct(prompts: Sequence[str], negative_prompt: str | None) -> list[str]:
    return list(dict.fromkeys([*prompts, *([] if negative_prompt is None else [negative_prompt])]))


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 60 else f"{prompt[:57]}...")
