# SPDX-License-Identifier: Apache-2.0
"""Cosmos-Reason1 text embeddings, as the Predict2.5 models read them: normalised hidden states of every layer.

The prompt goes through the chat template of the language model without an attention mask, padded on the right to 512
tokens whose padding is ordinary input; each layer's output is normalised over its channels and all are joined.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cosmos_predict2.text import pretrained
from cosmos_predict2.text.bytes_encoder import prompt_list
from cosmos_predict2.text.tiny_reason1 import CONFIG, TINY, folder_of
from imaginaire import foreign_json, storage
from imaginaire.checkpoint import weights
from imaginaire.errors import CheckpointError, ConfigError, near
from imaginaire.findings import CheckContext, Finding, errors

NUM_TOKENS = 512
Strategy = Literal["full_concat", "mean_pooling", "pool_every_n_layers_and_concat"]
SYSTEM = "You are a helpful assistant who will provide prompts to an image generator."
REVISION = "3210bec0495fdc7a8d3dbb8d58da5711eab4b423"  # of the weights that the released models were trained with
DOWNLOAD = f"Fetch it with: hf download nvidia/Cosmos-Reason1-7B --revision {REVISION} --local-dir {{path}} (17 GB)."
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")


class Reason1Encoder:
    """Prompts to [B, 512, width]: 28 layers of 3584 channels make a width of 100352 under "full_concat".

    The path "tiny" is a random twin without files, whose width is 64.
    """

    def __init__(
        self,
        path: str,
        *,
        strategy: Strategy = "full_concat",
        n_layers_per_group: int = 5,
        max_length: int = NUM_TOKENS,
        dtype: str | torch.dtype | None = None,  # None: as in the checkpoint; "int8": see EightBitLinear
        device: torch.device | str = "cpu",
    ) -> None:
        _check_strategy(strategy, n_layers_per_group)
        if problems := self.problems(path):
            raise CheckpointError(problems[0])
        package = pretrained.transformers()
        with folder_of(path) as folder:
            self._tokenizer = pretrained.from_folder(package.AutoTokenizer, folder)
            if self._tokenizer.pad_token_id is None:
                raise CheckpointError(f"The tokenizer in {path} names no padding token. {DOWNLOAD.format(path=path)}")
            self._model = load_reason1(folder, dtype=dtype, device=device)
        self._strategy: Strategy = strategy
        self._n_layers_per_group = n_layers_per_group
        config = self._model.config
        parts = num_parts(strategy, config.num_hidden_layers, n_layers_per_group)
        self.num_tokens = max_length
        self.width = parts * int(config.hidden_size)
        kind = pretrained.dtype_name(self._model)
        how = f"{strategy}{n_layers_per_group}" if strategy.startswith("pool") else strategy
        self.name = f"reason1-{pretrained.fingerprint(self._model)}-{max_length}x{self.width}-{how}-{kind}"

    @staticmethod
    def problems(path: str) -> list[str]:
        """Problems that keep an encoder at this path from being built, each with its cure; loads nothing."""
        return [] if path == TINY else pretrained.problems_of(path, TOKENIZER_FILES, DOWNLOAD.format(path=path))

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        return errors(context.key, cls.problems(arguments["path"]))

    @classmethod
    def declared_width(
        cls, path: str, *, strategy: Strategy = "full_concat", n_layers_per_group: int = 5, **_: Any
    ) -> int | None:
        """The width of an encoder with these arguments, as the folder's config.json has it; None without one."""
        _check_strategy(strategy, n_layers_per_group)
        try:
            file = storage.join(path, "config.json")
            content = CONFIG if path == TINY else foreign_json.loads(storage.read_text(file))
            config = content.get("text_config", content)
            layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return None  # building it reports why
        return num_parts(strategy, layers, n_layers_per_group) * hidden

    @torch.no_grad()
    def encode(self, prompts: str | Sequence[str]) -> Tensor:
        """[len(prompts), max_length, width] float32; one pass for each distinct prompt, for they are large."""
        batch = prompt_list(prompts)
        rows = {}
        for prompt in dict.fromkeys(batch):
            ids = torch.tensor([self.token_ids(prompt)], device=self._model.device)
            rows[prompt] = embed(self._model, ids, self._strategy, self._n_layers_per_group)[0]
        return torch.stack([rows[prompt] for prompt in batch])

    def token_ids(self, prompt: str) -> list[int]:
        """The ids of the prompt in its chat template, cut or padded on the right to exactly ``max_length``."""
        text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][: self.num_tokens]
        return [*ids, *[self._tokenizer.pad_token_id] * (self.num_tokens - len(ids))]

    def to(self, device: torch.device | str) -> "Reason1Encoder":
        self._model.to(device)
        return self


def load_reason1(path: str, *, dtype: str | torch.dtype | None = None, device: torch.device | str = "cpu") -> Any:
    """The language model of a vision-language folder, all names accounted for, without vision part and head."""
    package = pretrained.transformers()
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    config = pretrained.config_of(package.AutoConfig, path)
    config = getattr(config, "text_config", config)
    model: Any = pretrained.load(
        lambda: Qwen2_5_VLTextModel(config),
        weights.renamed(weights.read(path), text_name),
        path,
        dtype=pretrained.encoder_dtype(dtype),
        device=device,
    )
    # Its tables are in no file, and must not be rounded to the weights' dtype.
    model.rotary_emb = type(model.rotary_emb)(config=config).to(device)
    return model


def text_name(name: str) -> str | None:
    """A weight's name in the language model alone, from public and from transformers' own names; None for the rest."""
    name = name.removeprefix("model.")
    if name.startswith(("visual.", "lm_head.")):
        return None
    return name.removeprefix("language_model.")


def embed(model: nn.Module, input_ids: Tensor, strategy: Strategy, n_layers_per_group: int = 5) -> Tensor:
    """The combined hidden states, (B, S, width) float32, of ids that are padded already.

    Their numbers are rounded to the model's own precision: no more was ever in them, and so a cache keeps half as much.
    """
    output = model(input_ids=input_ids, attention_mask=None, output_hidden_states=True, use_cache=False)
    combined = combine(output.hidden_states[1:], strategy, n_layers_per_group)
    return combined.to(output.hidden_states[-1].dtype).to(combined.dtype)


def combine(hidden_states: Sequence[Tensor], strategy: Strategy, n_layers_per_group: int = 5) -> Tensor:
    """The layers' outputs (without the embeddings of the tokens), each normalised over its channels, as one tensor."""
    _check_strategy(strategy, n_layers_per_group)
    layers = [_normalised(state) for state in hidden_states]
    if strategy == "full_concat":
        return torch.cat(layers, dim=-1)
    group = len(layers) if strategy == "mean_pooling" else n_layers_per_group
    groups = [layers[start : start + group] for start in range(0, len(layers), group)]
    return torch.cat([torch.stack(members).mean(dim=0) for members in groups], dim=-1)


def num_parts(strategy: Strategy, num_layers: int, n_layers_per_group: int = 5) -> int:
    """Width of what ``combine`` gives, in hidden sizes."""
    group = {"full_concat": 1, "mean_pooling": num_layers}.get(strategy, n_layers_per_group)
    return -(-num_layers // group)


def _normalised(state: Tensor) -> Tensor:
    state = state.to(torch.promote_types(state.dtype, torch.float32))
    return (state - state.mean(dim=-1, keepdim=True)) / (state.std(dim=-1, keepdim=True) + 1e-8)


def _check_strategy(strategy: str, n_layers_per_group: int) -> None:
    if strategy not in (known := get_args(Strategy)):
        raise ConfigError(f"There is no embedding strategy '{strategy}'.{near(strategy, known)}")
    if n_layers_per_group < 1:
        raise ConfigError(f"n_layers_per_group is at least 1, not {n_layers_per_group}.")
