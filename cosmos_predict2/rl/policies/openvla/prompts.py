# SPDX-License-Identifier: Apache-2.0
"""OpenVLA's question about a task, as tokens of the checkpoint's own tokenizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.text import pretrained
from imaginaire.errors import DataError

PROMPT = "In: What action should the robot take to {}?\nOut:"
SPACE = "▁"  # a lone space, which the answers of the training data begin with


class Prompts:
    """Sentences to padded ids; each sentence is encoded once."""

    def __init__(self, folder: str, max_tokens: int, pad_id: int) -> None:
        package = pretrained.transformers()
        # the public config.json asks for code of its own, which a tokenizer does not need
        self.tokenizer: Any = pretrained.from_folder(package.AutoTokenizer, folder, config=package.LlamaConfig())
        self.max_tokens, self.pad_id = max_tokens, pad_id
        self.space = int(self.tokenizer.convert_tokens_to_ids(SPACE))
        self._known: dict[str, list[int]] = {}

    def ids(self, sentence: str) -> list[int]:
        if sentence not in self._known:
            ids = list(self.tokenizer(PROMPT.format(sentence.lower()), add_special_tokens=True).input_ids)
            ids += [] if ids[-1] == self.space else [self.space]
            if len(ids) > self.max_tokens:
                raise DataError(
                    f"The task '{sentence}' has {len(ids)} tokens, but policy.max_tokens={self.max_tokens}: raise it."
                )
            self._known[sentence] = ids
        return self._known[sentence]

    def batch(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids [E, max_tokens] with pads on the right, and how many are no pads [E]."""
        rows = [self.ids(sentence) for sentence in sentences]
        padded = [row + [self.pad_id] * (self.max_tokens - len(row)) for row in rows]
        return torch.tensor(padded), torch.tensor([len(row) for row in rows])
