# SPDX-License-Identifier: Apache-2.0
"""A text encoder that remembers: embeddings by encoder and prompt, in memory and, if wanted, in a folder."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.bytes_encoder import prompt_list
from cosmos_predict2.text.embeddings.pickles import padded, trimmed
from imaginaire import storage
from imaginaire.errors import DataError
from imaginaire.storage.object_store import StrPath

KEY = "embedding"


class EmbeddingCache:
    """Gives what the encoder gives, and asks it only for prompts that it has not seen.

    Embeddings are kept in bfloat16 where it holds all their numbers as they are, those of an encoder in bfloat16 for
    one, and in float32 where not. Memory holds up to ``memory_bytes`` of them, the longest unused leaving first; a
    folder keeps them all, each in a file of its own, so that runs may share it. The key is the encoder's name with the
    prompt.
    """

    def __init__(self, encoder: TextEncoder, folder: StrPath | None = None, memory_bytes: int = 256 * 2**20) -> None:
        self.name = encoder.name
        self.num_tokens = encoder.num_tokens
        self.width = encoder.width
        self._encoder = encoder
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._memory: OrderedDict[str, Tensor] = OrderedDict()  # on the CPU, without zeros at the end
        self._used_bytes = 0
        self._device = torch.device("cpu")

    def encode(self, prompts: str | Sequence[str]) -> Tensor:
        """[len(prompts), num_tokens, width] float32, on the device that ``to`` named last (at first the CPU)."""
        batch = prompt_list(prompts)
        found = {prompt: self._find(prompt) for prompt in dict.fromkeys(batch)}
        missing = [prompt for prompt, embedding in found.items() if embedding is None]
        if missing:
            for prompt, embedding in zip(missing, self._encoder.encode(missing)):
                found[prompt] = self._keep(prompt, embedding)
        rows = [padded(row, self.num_tokens) for prompt in batch if (row := found[prompt]) is not None]
        return torch.stack(rows).to(self._device, non_blocking=True)

    def to(self, device: torch.device | str) -> "EmbeddingCache":
        self._device = torch.device(device)
        self._encoder.to(device)
        return self

    def path(self, prompt: str) -> str | None:
        """The file of a prompt's embedding."""
        if self._folder is None:
            return None
        digest = self._key(prompt)
        return storage.join(self._folder, digest[:2], f"{digest}.safetensors")

    def _key(self, prompt: str) -> str:
        return hashlib.sha256(f"{self.name}\0{prompt}".encode("utf-8", errors="surrogatepass")).hexdigest()

    def _find(self, prompt: str) -> Tensor | None:
        key = self._key(prompt)
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        path = self.path(prompt)
        if path is None or not storage.exists(path):
            return None
        with storage.open(path) as file:
            content = file.read()
        try:
            embedding = load(content)[KEY]
        except Exception as error:  # safetensors raises an error of its own, or KeyError
            raise DataError(f"{path} is a damaged entry of the embedding cache: delete it ({error}).") from error
        self._remember(key, embedding)
        return embedding

    def _keep(self, prompt: str, embedding: Tensor) -> Tensor:
        row = trimmed(embedding).detach()
        half = row.bfloat16()
        row = (half if torch.equal(half.to(row.dtype), row) else row).to("cpu", copy=True)  # bfloat16 if exact
        self._remember(self._key(prompt), row)
        if (path := self.path(prompt)) is not None:
            content = save({KEY: row.contiguous()}, metadata={"encoder": self.name})
            storage.write_bytes(path, content)
        return row

    def _remember(self, key: str, row: Tensor) -> None:
        if row.nbytes > self._memory_bytes:
            return
        self._memory[key] = row
        self._used_bytes += row.nbytes
        while self._used_bytes > self._memory_bytes:
            _, oldest = self._memory.popitem(last=False)
            self._used_bytes -= oldest.nbytes
