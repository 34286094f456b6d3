# SPDX-License-Identifier: Apache-2.0
"""A random OpenVLA-OFT in the public layout, by default a tiny one: for tests, and for laptops in the toy world."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmos_predict2.rl.policies.openvla.inputs import PREPROCESSOR, PROMPT, SPACE
from cosmos_predict2.rl.policies.openvla.layout import CONFIG, STATISTICS, Origin, to_public, write_folder
from cosmos_predict2.rl.policies.openvla.model import DINOV2, SIGLIP, OpenVLAModel, OpenVLASizes
from cosmos_predict2.text.pretrained import transformers
from imaginaire import random

PADDING = 64
_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
_MEANS = [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]]
_STDS = [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]]
_SIGLIP_MLP = 3.7362


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """``vision`` are the widths of the towers, None the published towers."""

    image_size: int = 56
    width: int = 64
    layers: int = 3
    mlp: int = 96
    heads: int = 4
    vision: tuple[int, int] | None = (32, 48)
    vision_layers: int = 3
    text_tokens: int = 320
    bins: int = 256
    action_chunk: int = 8
    action_dim: int = 7
    hold: int = 1
    num_images_in_input: int = 1
    proprio_dim: int = 0
    gripper: str = "as_is"

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        towers: dict[str, Any] = {}
        if self.vision is not None:  # else the backbone's name implies it
            depth = self.vision_layers
            towers[DINOV2] = dict(embed_dim=self.vision[0], depth=depth, num_heads=4, reg_tokens=4, patch=14)
            towers[SIGLIP] = dict(embed_dim=self.vision[1], depth=depth, num_heads=4, mlp_ratio=_SIGLIP_MLP, patch=14)
        return {
            "model_type": "openvla",
            "architectures": ["OpenVLAForActionPrediction"],
            "vision_backbone_id": "dinosiglip-vit-so-224px",
            "use_fused_vision_backbone": True,
            "image_sizes": [self.image_size, self.image_size],
            **towers,
            "n_action_bins": self.bins,
            "pad_token_id": 3,
            "pad_to_multiple_of": PADDING,
            "text_config": {
                "model_type": "llama", "vocab_size": self.text_tokens + self.bins + PADDING,
                "hidden_size": self.width, "intermediate_size": self.mlp, "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
                "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
                "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2,
            },
            "action_chunk": self.action_chunk,
            "action_dim": self.action_dim,
            "hold": self.hold,
            "num_images_in_input": self.num_images_in_input,
            "use_proprio": self.proprio_dim > 0,
            "proprio_dim": self.proprio_dim,
            "gripper": self.gripper,
            "center_crop": False,
        }  # fmt: skip


def write_tiny(
    folder: Path,
    *,
    seed: int = 0,
    statistics: Mapping[str, Any] | None = None,
    sentences: Sequence[str] = ("push the red disc to the ring",),
    shard: int = 2**30,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **sizes: Any,
) -> None:
    """Write config.json, random weights, settings of pictures, a tokenizer of the ``sentences``, and ``statistics``:
    {"action": {"q01": ..., ...}, "proprio": ...}, without which numbers lie in [-1, 1].

    ``sizes`` are of `TinySizes`. Weights are drawn on the ``device``.
    """
    transformers()  # which brings tokenizers, or an error before anything is written
    tiny, folder = TinySizes(**sizes), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny.config()
    pictures = {
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, tiny.image_size, tiny.image_size]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": _MEANS,
        "stds": _STDS,
    }
    found = dict(statistics or {"action": in_unit_range(tiny.action_dim)})
    if tiny.proprio_dim:
        found.setdefault("proprio", in_unit_range(tiny.proprio_dim))
    for name, content in ((CONFIG, config), (PREPROCESSOR, pictures), (STATISTICS, {"tiny": found})):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _write_tokenizer(folder, sentences, tiny.text_tokens)
    of_model = OpenVLASizes.of(config, str(folder))
    with random.preserved():
        torch.manual_seed(random.derive_seed(seed, 0, "tiny_openvla"))
        with torch.device(device):
            model = OpenVLAModel(of_model, tiny.proprio_dim)
        model.apply(_drawn).to(dtype)
        first, second = (f"vision_backbone.{name}" for name in ("featurizer", "fused_featurizer"))
        unread = {  # some of what published files hold and nothing reads
            f"{first}.norm.weight": torch.randn(of_model.dinov2.embed_dim),
            f"{second}.norm.weight": torch.randn(of_model.siglip.embed_dim),
            f"{second}.attn_pool.latent": torch.randn(1, 1, of_model.siglip.embed_dim),
        }
    write_folder(folder, to_public(model.state_dict(), Origin(unread, {})), {}, shard)


def in_unit_range(dim: int) -> dict[str, list[Any]]:
    """Statistics of numbers that lie in [-1, 1] already."""
    low, high = [-1.0] * dim, [1.0] * dim
    return {"q01": low, "q99": high, "min": low, "max": high, "mask": [True] * dim}


def _drawn(module: nn.Module) -> None:
    """Wide enough that pictures matter from the beginning, and where on them a thing is: transformers' .02 is meant for
    wide networks."""
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):  # words, and SigLIP's places
        nn.init.normal_(module.weight)
    elif (places := getattr(module, "position_embeddings", None)) is not None:  # DINOv2's
        nn.init.normal_(places)


def _write_tokenizer(folder: Path, sentences: Sequence[str], size: int) -> None:
    """A byte-pair tokenizer in LLaMA's form: words begin with a mark of the space, and a sentence with <s>."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE)  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE)  # type: ignore[assignment]
    letters = [*map(chr, range(32, 127)), "\n", SPACE]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*_SPECIAL], initial_alphabet=letters)
    tokenizer.train_from_iterator([PROMPT.format(sentence.lower()) for sentence in sentences] * 2, trainer)
    begin = (_SPECIAL[1], tokenizer.token_to_id(_SPECIAL[1]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), _SPECIAL))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
