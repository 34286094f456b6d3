# SPDX-License-Identifier: Apache-2.0
"""The text of a training batch where its embeddings are too large to be kept beside the clips.

One embedding of Reason1 has 512 x 100352 numbers, 103 MB in bfloat16. So the captions of a batch (``ai_caption``) are
encoded in training, equal ones and those that came before once; or all samples have the same embedding, from a file.
Nothing set: the data carry embeddings (``t5_text_embeddings``) of the width that the network takes.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from cosmos_predict2.conditioner import TEXT_KEY
from cosmos_predict2.released import describe_missing
from cosmos_predict2.text.constant_embedding import read_constant_embedding
from cosmos_predict2.text.embeddings.cache import EmbeddingCache
from imaginaire import storage
from imaginaire.config import lazy_config
from imaginaire.config.schema import Section, at_least
from imaginaire.errors import ConfigError, DataError
from imaginaire.findings import Finding, error

log = logging.getLogger(__name__)

CAPTION_KEY = "ai_caption"


@attrs.define(kw_only=True, slots=False)
class TrainingTextConfig(Section):
    """Where the text comes from; at most one of the first two is set."""

    encoder: Any = None  # lazy node of a TextEncoder for the captions
    constant_path: str = ""  # the embedding of every sample, whatever its caption
    cache_bytes: int = attrs.field(default=2 << 30, validator=at_least(0))  # of host memory, for captions that return

    def __attrs_post_init__(self) -> None:
        if self.encoder is not None and self.constant_path:
            raise ConfigError(f"text.encoder and text.constant_path={self.constant_path} are both set: choose one.")

    @property
    def is_set(self) -> bool:
        """Whether embeddings in the data are of no use."""
        return self.encoder is not None or bool(self.constant_path)


class TrainingText:
    """Puts embeddings into batches. The encoder or the file is read at the first one, on the device of training."""

    def __init__(self, config: TrainingTextConfig) -> None:
        self.config = config
        self._encoder: EmbeddingCache | None = None
        self._constant: Tensor | None = None

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> Iterator[Finding]:
        """What is wrong with the section; an encoder has a check of its own."""
        path = config.get("constant_path") or ""
        if path and not storage.exists(path):
            yield error("model.config.text.constant_path", describe_missing(path))

    def added_to(self, batch: Mapping[str, Any], size: int, device: torch.device) -> Mapping[str, Any]:
        """The batch with the embeddings of its ``size`` samples, in place of those that it may have."""
        if self.config.encoder is not None:
            return {**batch, TEXT_KEY: self._encoded(batch, size, device)}
        if self.config.constant_path:
            if self._constant is None:
                self._constant = read_constant_embedding(self.config.constant_path).to(device)
                log.info("text: %s for every sample", self.config.constant_path)
            return {**batch, TEXT_KEY: self._constant.expand(size, *self._constant.shape)}
        if TEXT_KEY not in batch:
            raise DataError(
                f"The batch has no '{TEXT_KEY}', and nothing is set to make them of its captions: set"
                " model.config.text.encoder (or constant_path), or take a data set that carries embeddings."
            )
        return batch

    @torch.no_grad()
    def _encoded(self, batch: Mapping[str, Any], size: int, device: torch.device) -> Tensor:
        captions = batch.get(CAPTION_KEY)
        if captions is None or isinstance(captions, str) or len(captions) != size:
            raise DataError(
                f"model.config.text.encoder encodes captions, but the batch's '{CAPTION_KEY}' is"
                f" {captions if captions is None else repr(captions)[:80]}: a list of {size} texts is expected. Give"
                " every clip a caption (metas/NAME.txt)."
            )
        if self._encoder is None:
            encoder = lazy_config.instantiate(self.config.encoder)
            self._encoder = EmbeddingCache(encoder, memory_bytes=self.config.cache_bytes).to(device)
            log.info("text: captions are encoded by %s", encoder.name)
        return self._encoder.encode(list(captions))
