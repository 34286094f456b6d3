# SPDX-License-Identifier: Apache-2.0
"""A random PI0.5 in the public layout, by default of 0.2 M parameters, for laptops and tests."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from cosmos_predict2.rl.policies.pi05.config import MODEL_TYPE, GemmaSizes, Pi05Config, Vision
from cosmos_predict2.rl.policies.pi05.inputs import prompt_ids, prompt_text, tokenizer_of
from cosmos_predict2.rl.policies.pi05.layout import CONFIG, WEIGHTS, public_name
from cosmos_predict2.rl.policies.pi05.network import AdaRMSNorm, Pi05Network
from imaginaire import random
from imaginaire.errors import DataError, optional_module

VOCAB = 96
WORDS = (  # that the tokenizer learns its pieces of
    *["push the puck to the ring"] * 8,
    "touch the puck and pick up the bowl",
    "Task: open the drawer, State: 0 1 2 3 4 5 6 7 8 9;\nAction: ",
)
TINY: dict[str, Any] = dict(
    vlm=GemmaSizes(64, 2, 96, 8, 1, 16, VOCAB),
    expert=GemmaSizes(32, 2, 48, 8, 1, 16),
    vision=Vision(32, 2, 4, 48, 56, 14, 64),
    action_dim=8,
    action_horizon=12,
    action_env_dim=4,
    num_steps=4,
    max_token_len=16,
    discrete_state_input=False,
)
STATISTICS = {"state": {"q01": [-1.0] * 3, "q99": [1.0] * 3}, "actions": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}


def write_tiny(
    folder: Path,
    *,
    seed: int = 0,
    norm_stats: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
    sentences: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **sizes: Any,
) -> Path:
    """config.json, model.safetensors, tokenizer.model and assets of a random policy; ``sizes`` are of `Pi05Config`.

    It learns the pieces of ``sentences``, too, and is as long as the longest of them needs. Weights are drawn on the
    ``device``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = dict.fromkeys(prompt_text(sentence, None) for sentence in sentences)
    (folder / "tokenizer.model").write_bytes(_tokenizer([text for text in texts if text not in WORDS]))
    encode = tokenizer_of(str(folder))
    state = None
    if sizes.get("discrete_state_input"):  # a bin has three digits at most, each a token where pieces do not join them
        state = torch.ones(len((norm_stats or STATISTICS)["state"]["q01"]))
    length = max([TINY["max_token_len"], *(len(prompt_ids(encode, text, state)) for text in texts)])
    length += 0 if state is None else 3 * len(state)
    config = Pi05Config(**{**TINY, "max_token_len": length, **sizes})
    with random.preserved():
        torch.manual_seed(seed)
        with torch.device(device):
            network = Pi05Network(config)
        _wake(network)
    network.to(dtype)
    tensors: dict[str, Tensor] = {public_name(name): value.cpu() for name, value in network.state_dict().items()}
    for stream, width in (("paligemma", config.vlm.width), ("gemma_expert", config.expert.width)):
        name = f"paligemma_with_expert.{stream}.lm_head.weight"
        tensors[name] = torch.zeros(config.vlm.vocab, width, dtype=dtype)
    embedding = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    tensors["paligemma_with_expert.paligemma.lm_head.weight"] = tensors[embedding].clone()
    safetensors.torch.save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    content = {"model_type": MODEL_TYPE, "pi05": True, **asdict(config)}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    stats = folder / "assets" / "toy" / "norm_stats.json"
    stats.parent.mkdir(parents=True, exist_ok=True)
    stats.write_text(json.dumps({"norm_stats": norm_stats or STATISTICS}, indent=1) + "\n", encoding="utf-8")
    return folder


def _wake(network: Pi05Network) -> None:
    """Open the gates of the expert, which begin closed, and let the places on a picture count: a random policy
    otherwise sees nothing, and learns slowly where things are."""
    for name, module in network.named_modules():
        if name.endswith("position_embedding") and isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        if isinstance(module, AdaRMSNorm):
            nn.init.normal_(module.dense.weight, std=0.02)
            with torch.no_grad():
                module.dense.bias.chunk(3)[2].fill_(1.0)


def _tokenizer(sentences: Sequence[str]) -> bytes:
    """sentencepiece's own file, with the special ids of PaliGemma."""
    sentencepiece = optional_module("sentencepiece", "weights")
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*WORDS, *sentences]),
            model_writer=written,
            model_type="bpe",
            vocab_size=VOCAB,
            hard_vocab_limit=False,
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            minloglevel=2,
            num_threads=1,
        )
    except RuntimeError as error:
        kinds = len(set("".join([*WORDS, *sentences])))
        raise DataError(
            f"The sentences of the demonstrations have {kinds} different characters, but a tiny PI0.5 knows {VOCAB}"
            " pieces of text, all of them together: give published weights, --base."
        ) from error
    return written.getvalue()
