# SPDX-License-Identifier: Apache-2.0
"""T5 text embeddings, as the released Video2World models were trained with, and UMT5's of Wan2.1: 512 tokens, exact
zeros past the prompt."""

import contextlib
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.text import pretrained, wan_files
from cosmos_predict2.text.bytes_encoder import prompt_list
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import names_at
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.findings import CheckContext, Finding, errors

NUM_TOKENS = 512
BATCH_SIZE = 8
DOWNLOAD = (
    "Fetch T5-11B with: hf download google-t5/t5-11b --exclude tf_model.h5 --local-dir {path} (45 GB). A machine"
    " without it can use embeddings made on another: see python -m scripts.encode_prompts --help."
)
WAN_DOWNLOAD = "Fetch the model with: hf download Wan-AI/NAME --local-dir {path}, NAME being the folder's."
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
SHARED, TIED = "shared.weight", "encoder.embed_tokens.weight"  # one tensor; files have either name, or both


class T5Encoder:
    """Prompts to [B, max_length, width] by the encoder half of a T5 folder; the decoder is not loaded."""

    kind, classes = "t5", ("T5Config", "T5EncoderModel")

    def __init__(
        self,
        path: str = "checkpoints/google-t5/t5-11b",
        *,
        max_length: int = NUM_TOKENS,
        dtype: str | torch.dtype | None = None,  # None: as in the checkpoint; "int8": see EightBitLinear
        device: torch.device | str = "cpu",
        batch_size: int = BATCH_SIZE,
    ) -> None:
        if problems := self.problems(path, max_length=max_length, dtype=dtype, batch_size=batch_size):
            raise CheckpointError(problems[0])
        package = pretrained.transformers()
        places = self.places(path)
        self._tokenizer = pretrained.from_folder(package.T5TokenizerFast, places[1])
        self._model = load_t5(places[0], dtype=dtype, device=device, classes=self.classes)
        self.num_tokens = max_length
        self._batch_size = batch_size
        self.width = int(self._model.config.d_model)
        kind = pretrained.dtype_name(self._model)
        self.name = f"{self.kind}-{pretrained.fingerprint(self._model)}-{max_length}x{self.width}-{kind}"

    @staticmethod
    def places(path: str) -> tuple[str, str]:
        """The folders of the network and of the tokenizer."""
        return path, path

    @staticmethod
    def clean(prompt: str) -> str:
        """The prompt as it is tokenised."""
        return prompt

    @staticmethod
    def faults(path: str) -> list[str]:
        """Faults of a folder, each with its cure."""
        return pretrained.problems_of(path, TOKENIZER_FILES, DOWNLOAD.format(path=path))

    @classmethod
    def problems(
        cls,
        path: str = "checkpoints/google-t5/t5-11b",
        *,
        max_length: int = NUM_TOKENS,
        dtype: str | torch.dtype | None = None,
        batch_size: int = BATCH_SIZE,
        **_: Any,
    ) -> list[str]:
        """Problems that keep an encoder with these arguments from being built, each with its cure; loads nothing."""
        if pretrained.encoder_dtype(dtype) == torch.float16:
            raise ConfigError("T5 overflows in float16: use bfloat16 or float32.")
        if min(max_length, batch_size) < 1:
            raise ConfigError(f"max_length={max_length} and batch_size={batch_size} of a T5Encoder must be 1 at least.")
        return cls.faults(path)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        return errors(context.key, cls.problems(**arguments))

    @torch.no_grad()
    def encode(self, prompts: str | Sequence[str]) -> Tensor:
        """[len(prompts), max_length, width] float32: zero behind the end token of each. Equal prompts are one pass.

        A batch is as long as its longest prompt: what a token becomes does not depend on the padding behind it, and
        most prompts are far shorter than max_length.
        """
        batch = prompt_list(prompts)
        distinct = list(dict.fromkeys(batch))
        device = self._model.device
        rows: dict[str, Tensor] = {}
        for start in range(0, len(distinct), self._batch_size):
            chunk = distinct[start : start + self._batch_size]
            tokens = self._tokenizer(
                [self.clean(prompt) for prompt in chunk],
                padding="longest",
                truncation=True,
                max_length=self.num_tokens,
                return_tensors="pt",
            )
            ids, mask = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)
            rows.update(zip(chunk, embed(self._model, ids, mask)))
        result = torch.zeros(len(batch), self.num_tokens, self.width, device=device)
        for row, prompt in zip(result, batch):
            row[: len(rows[prompt])] = rows[prompt]
        return result

    def to(self, device: torch.device | str) -> "T5Encoder":
        self._model.to(device)
        return self


class UMT5Encoder(T5Encoder):
    """Prompts of Wan2.1, by the folders ``text_encoder`` and ``tokenizer`` of a diffusers pipeline, or by the folder of
    Wan2.1's own repository."""

    kind, classes = "umt5", ("UMT5Config", "UMT5EncoderModel")

    @staticmethod
    def places(path: str) -> tuple[str, str]:
        if original := wan_files.file_in(path, wan_files.UMT5):
            return original, f"{path}/{wan_files.UMT5_TOKENIZER}"
        return f"{path}/text_encoder", f"{path}/tokenizer"

    @staticmethod
    def clean(prompt: str) -> str:
        """Without entities of HTML and runs of blanks; broken Unicode is mended where ftfy is installed."""
        with contextlib.suppress(ImportError):
            import ftfy  # type: ignore[import-not-found]

            prompt = ftfy.fix_text(prompt)
        return re.sub(r"\s+", " ", html.unescape(html.unescape(prompt)).strip())

    @staticmethod
    def faults(path: str) -> list[str]:
        network, tokenizer = UMT5Encoder.places(path)
        if not wan_files.is_original(network):
            return pretrained.problems_of(network, (pretrained.CONFIG,), WAN_DOWNLOAD.format(path=path))
        if set(names_at(tokenizer)).isdisjoint(TOKENIZER_FILES):
            return [f"{tokenizer} has no tokenizer ({' or '.join(TOKENIZER_FILES)}). {WAN_DOWNLOAD.format(path=path)}"]
        return []


def load_t5(
    path: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: torch.device | str = "cpu",
    classes: tuple[str, str] = T5Encoder.classes,
) -> Any:
    """The encoder of a folder: its config, its encoder's weights, all of them accounted for."""
    package = pretrained.transformers()
    kind = getattr(package, classes[0])
    is_original = wan_files.is_original(path)
    config = kind(**wan_files.umt5_settings(path)) if is_original else pretrained.config_of(kind, path)
    return pretrained.load(
        lambda: getattr(package, classes[1])(config),
        encoder_weights(path),
        path,
        allow_missing=(TIED,),
        dtype=pretrained.encoder_dtype(dtype),
        device=device,
    )


def encoder_weights(path: str) -> Mapping[str, Tensor]:
    """The encoder's tensors of a folder, or of the file of Wan2.1's repository, its table of words once."""
    if wan_files.is_original(path):
        return wan_files.umt5_tensors(path)
    source = weights.read(path)

    def rename(name: str) -> str | None:
        if name.startswith(("decoder.", "lm_head.")) or (name == TIED and SHARED in source):
            return None
        return SHARED if name == TIED else name

    return weights.renamed(source, rename)


def embed(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The last hidden states as float32, with exact zeros where the mask is 0."""
    hidden: Tensor = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    length = attention_mask.sum(dim=1, keepdim=True)
    is_padding = torch.arange(hidden.shape[1], device=hidden.device) >= length
    return hidden.float().masked_fill(is_padding[:, :, None], 0.0)
