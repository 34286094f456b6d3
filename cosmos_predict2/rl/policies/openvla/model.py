# SPDX-License-Identifier: Apache-2.0
"""OpenVLA's network: pictures and a prompt give logits of action tokens, all at once (OFT) or one after the other.

Its sizes are those of config.json: by names of timm's models, or a tiny twin's by numbers. The two vision towers are
transformers' modules without what nothing reads: the last block, final norms and the attention pooling of the public
files. Letters: B rows, S tokens of a row, N action tokens, D width, P tokens of pictures (and of proprioception).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmos_predict2.text.pretrained import transformers
from imaginaire.errors import CheckpointError, near, raised_as

MODEL_TYPE = "openvla"
DINOV2, SIGLIP = "dinov2", "siglip"
TIMM: dict[str, dict[str, Any]] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": dict(embed_dim=1024, depth=24, num_heads=16, reg_tokens=4, patch=14),
    "vit_so400m_patch14_siglip_224": dict(embed_dim=1152, depth=27, num_heads=16, mlp_ratio=3.7362, patch=14),
}
TOWERS = tuple(zip((DINOV2, SIGLIP), TIMM))  # in the order of the channels
_OF_TEXT = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
}
_EPSILON = 1e-6
PLACEHOLDER = 1  # the id that stands where an action will; its embedding counts as zero


# --- sizes


@dataclass(frozen=True)
class Tower:
    """A vision transformer; of its blocks the last is not used."""

    embed_dim: int
    depth: int
    num_heads: int
    patch: int
    mlp_ratio: float = 4.0
    reg_tokens: int = 0


@dataclass(frozen=True)
class OpenVLASizes:
    """All that the modules are built from."""

    image_size: int
    dinov2: Tower
    siglip: Tower
    text: Mapping[str, Any]  # of transformers' LlamaConfig
    vocabulary: int  # ids that mean something; the rest is padding
    bins: int
    stop_id: int
    pad_id: int

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> "OpenVLASizes":
        text = {**config.get("text_config", {})}
        text.pop("model_type", None)
        text.pop("torch_dtype", None)
        text.setdefault("vocab_size", 32064)
        text.setdefault("pad_token_id", config.get("pad_token_id", 32000))
        towers = [_tower(config, name, timm, source) for name, timm in TOWERS]
        size = config["image_size"] if "image_size" in config else config.get("image_sizes", [224])[0]
        for name in _OF_TEXT & text.keys():
            whole(text[name], name, source)
        if text.get("hidden_size", 0) % text.get("num_attention_heads", 1):
            raise CheckpointError(
                f"{source}/config.json: hidden_size {text['hidden_size']} is no multiple of num_attention_heads"
                f" {text['num_attention_heads']}."
            )
        sizes = cls(
            image_size=whole(size, "image_size", source),
            dinov2=towers[0],
            siglip=towers[1],
            text=text,
            vocabulary=text["vocab_size"] - whole(config.get("pad_to_multiple_of", 64), "pad_to_multiple_of", source),
            bins=whole(config.get("n_action_bins", 256), "n_action_bins", source),
            stop_id=whole(config.get("stop_token_id", text.get("eos_token_id", 2)), "stop_token_id", source, least=0),
            pad_id=whole(text["pad_token_id"], "pad_token_id", source, least=0),
        )
        if sizes.bins > sizes.vocabulary:
            raise CheckpointError(f"{source}/config.json: {sizes.bins} action bins, but {sizes.vocabulary} words.")
        return sizes


def whole(value: Any, name: str, source: str, least: int = 1) -> int:
    """A whole number of a config.json."""
    if type(value) is not int or value < least:
        raise CheckpointError(f"{source}/config.json: {name} is {value!r}; a whole number above {least - 1} is needed.")
    return value


def _tower(config: Mapping[str, Any], name: str, timm: str, source: str) -> Tower:
    if name in config:
        with raised_as(CheckpointError, f"{source}/config.json: {name}", TypeError):
            tower = Tower(**config[name])
        for size in ("embed_dim", "depth", "num_heads", "patch"):
            whole(getattr(tower, size), f"{name}.{size}", source)
        if type(tower.mlp_ratio) not in (int, float) or not 0 < tower.mlp_ratio <= 64:
            raise CheckpointError(f"{source}/config.json: {name}.mlp_ratio is {tower.mlp_ratio!r}; expected: about 4.")
        whole(tower.reg_tokens, f"{name}.reg_tokens", source, least=0)
        return tower
    backbone = config.get("vision_backbone_id", "")
    ids = config.get("timm_model_ids") or ([*TIMM] if backbone == "dinosiglip-vit-so-224px" else [])
    if timm not in ids:
        found = ", ".join(ids) or f"vision_backbone_id {backbone!r}"
        raise CheckpointError(f"{source}: of its vision towers ({found}) none is {timm}.{near(timm, ids)}")
    return Tower(**TIMM[timm])


# --- pictures


def _of_towers(tower: Tower, image_size: int, attention: str) -> dict[str, Any]:
    """The arguments of both towers' configurations."""
    return dict(
        hidden_size=tower.embed_dim,
        num_hidden_layers=tower.depth - 1,
        num_attention_heads=tower.num_heads,
        image_size=image_size,
        patch_size=tower.patch,
        layer_norm_eps=_EPSILON,
        hidden_act="gelu",  # SigLIP's published tower is exact, transformers' default is not
        attn_implementation=attention,
    )


class DinoTower(nn.Module):
    """Patches of a picture before the last block, without class and register tokens."""

    def __init__(self, tower: Tower, image_size: int, attention: str) -> None:
        super().__init__()
        package = transformers()
        own = dict(mlp_ratio=round(tower.mlp_ratio), num_register_tokens=tower.reg_tokens)
        config = package.Dinov2WithRegistersConfig(**_of_towers(tower, image_size, attention), **own)
        model: Any = package.Dinov2WithRegistersModel(config)
        self.embeddings, self.encoder = model.embeddings, model.encoder
        self.embeddings.mask_token.requires_grad_(False)  # nothing is masked
        self.first = 1 + tower.reg_tokens

    def forward(self, pixels_B_C_H_W: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embeddings(pixels_B_C_H_W)).last_hidden_state
        return hidden[:, self.first :]


class SiglipTower(nn.Module):
    """Patches of a picture before the last block."""

    def __init__(self, tower: Tower, image_size: int, attention: str) -> None:
        super().__init__()
        package = transformers()
        own = dict(intermediate_size=int(tower.embed_dim * tower.mlp_ratio), vision_use_head=False)
        config = package.SiglipVisionConfig(**_of_towers(tower, image_size, attention), **own)
        model: Any = package.SiglipVisionModel(config)
        model = getattr(model, "vision_model", model)  # older releases have a level more
        self.embeddings, self.encoder = model.embeddings, model.encoder

    def forward(self, pixels_B_C_H_W: Tensor) -> Tensor:
        return self.encoder(inputs_embeds=self.embeddings(pixels_B_C_H_W)).last_hidden_state


class VisionBackbone(nn.Module):
    """Both towers' features of every view, one view after the other."""

    def __init__(self, sizes: OpenVLASizes, attention: str) -> None:
        super().__init__()
        self.featurizer = DinoTower(sizes.dinov2, sizes.image_size, attention)
        self.fused_featurizer = SiglipTower(sizes.siglip, sizes.image_size, attention)
        self.width = sizes.dinov2.embed_dim + sizes.siglip.embed_dim

    def forward(self, pixels_B_6V_H_W: Tensor) -> Tensor:
        """[B, V * patches, width]."""
        views = pixels_B_6V_H_W.unflatten(1, (-1, 6))
        flat = views.flatten(0, 1)
        features = torch.cat([self.featurizer(flat[:, :3]), self.fused_featurizer(flat[:, 3:])], dim=-1)
        return features.unflatten(0, views.shape[:2]).flatten(1, 2)


# --- the whole


class Projector(nn.Module):
    """Features of pictures as tokens of the language model."""

    def __init__(self, vision: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision, 4 * vision)
        self.fc2 = nn.Linear(4 * vision, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class ProprioProjector(nn.Module):
    """The state of the robot as one token."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class ActionHead(nn.Module):
    """Numbers of actions from what the trunk gives at their places (the L1 variant of OpenVLA-OFT)."""

    def __init__(self, action_dim: int, width: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(2)]
        self.action_dim = action_dim
        self.model = nn.ModuleDict(
            {
                "layer_norm1": nn.LayerNorm(action_dim * width),
                "fc1": nn.Linear(action_dim * width, width),
                "mlp_resnet_blocks": nn.ModuleList(nn.ModuleDict({"ffn": block}) for block in blocks),
                "layer_norm2": nn.LayerNorm(width),
                "fc2": nn.Linear(width, action_dim),
            }
        )

    def forward(self, hidden_B_N_D: Tensor) -> Tensor:
        """[B, actions, action_dim]."""
        part: Any = self.model
        x = hidden_B_N_D.unflatten(1, (-1, self.action_dim)).flatten(2)
        x = F.relu(part["fc1"](part["layer_norm1"](x)))
        for block in part["mlp_resnet_blocks"]:
            x = x + block["ffn"](x)
        return part["fc2"](part["layer_norm2"](x))


def rows(prompt_B_S: Tensor, length_B: Tensor, after_B_N: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids [B, S], and which are no pads: prompts of their own lengths, each followed by the same number of tokens.

    Tokens begin at the left, so that a row is in a batch what it is alone. Acting and learning both begin here.
    """
    width = int(length_B.max()) + after_B_N.shape[1]
    ids = prompt_B_S.new_full((len(prompt_B_S), width), pad_id)
    common = min(width, prompt_B_S.shape[1])
    ids[:, :common] = prompt_B_S[:, :common]
    places = length_B[:, None] + torch.arange(after_B_N.shape[1], device=ids.device)
    ids.scatter_(1, places, after_B_N.to(ids))
    valid = torch.arange(width, device=ids.device) < length_B[:, None] + after_B_N.shape[1]
    return torch.where(valid, ids, pad_id), valid


class OpenVLAModel(nn.Module):
    """Both towers, projector and LLaMA; ``proprio_dim`` 0 is without proprioception, ``head_dim`` 0 without a head of
    its own for actions."""

    PASSES = ("seen", "parallel_logits", "forced_logits", "decoded", "regressed")  # called from outside

    def __init__(self, sizes: OpenVLASizes, proprio_dim: int = 0, attention: str = "eager", head_dim: int = 0) -> None:
        super().__init__()
        package = transformers()
        self.sizes = sizes
        config = package.LlamaConfig(**sizes.text, attn_implementation=attention)
        self.vision_backbone = VisionBackbone(sizes, attention)
        self.projector = Projector(self.vision_backbone.width, config.hidden_size)
        self.proprio_projector = ProprioProjector(proprio_dim, config.hidden_size) if proprio_dim else None
        self.language_model: Any = package.LlamaForCausalLM(config)
        self.action_head = ActionHead(head_dim, config.hidden_size) if head_dim else None

    def blocks(self) -> list[nn.Module]:
        """The blocks of all three transformers."""
        towers: Any = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        of_towers = [getattr(tower.encoder, "layer", None) or tower.encoder.layers for tower in towers]
        return [block for layers in (*of_towers, self.language_model.model.layers) for block in layers]

    def seen(self, pixels_B_6V_H_W: Tensor, proprio_B_S: Tensor | None) -> Tensor:
        """The tokens [B, P, D] of what the robot sees and feels."""
        like = self.projector.fc1.weight
        tokens: Tensor = self.projector(self.vision_backbone(pixels_B_6V_H_W.to(like)))
        if self.proprio_projector is not None:
            assert proprio_B_S is not None
            tokens = torch.cat([tokens, self.proprio_projector(proprio_B_S.to(like))[:, None]], dim=1)
        return tokens

    def parallel_logits(self, seen_B_P_D: Tensor, prompt_B_S: Tensor, length_B: Tensor, num: int) -> Tensor:
        """Logits [B, num, vocabulary] of all actions at once: every token sees every other, and an action's logits
        stand one place before its placeholder."""
        return self.language_model.lm_head(self._at_actions(seen_B_P_D, prompt_B_S, length_B, num))

    def regressed(self, seen_B_P_D: Tensor, prompt_B_S: Tensor, length_B: Tensor, num: int) -> Tensor:
        """Normalised actions [B, actions, action_dim] of the head, from ``num`` places."""
        assert self.action_head is not None
        return self.action_head(self._at_actions(seen_B_P_D, prompt_B_S, length_B, num))

    def _at_actions(self, seen_B_P_D: Tensor, prompt_B_S: Tensor, length_B: Tensor, num: int) -> Tensor:
        """The trunk's output [B, num, D] where the logits of actions stand."""
        after = prompt_B_S.new_full((len(prompt_B_S), num + 1), PLACEHOLDER)
        after[:, num] = self.sizes.stop_id
        ids, valid = rows(prompt_B_S, length_B, after, self.sizes.pad_id)
        place = torch.arange(ids.shape[1], device=length_B.device) - length_B[:, None]
        is_placeholder = (place >= 0) & (place < num)
        embedded = self._embedded(ids) * ~is_placeholder[..., None]
        hidden = self._hidden(seen_B_P_D, embedded, valid, is_causal=False)
        return _after_prompts(hidden, seen_B_P_D.shape[1], length_B, num)

    def forced_logits(self, seen_B_P_D: Tensor, prompt_B_S: Tensor, length_B: Tensor, actions_B_N: Tensor) -> Tensor:
        """Logits [B, N, vocabulary] of actions that follow one another, each after the true ones before it."""
        ids, valid = rows(prompt_B_S, length_B, actions_B_N[:, :-1], self.sizes.pad_id)
        hidden = self._hidden(seen_B_P_D, self._embedded(ids), valid, is_causal=True)
        hidden = _after_prompts(hidden, seen_B_P_D.shape[1], length_B, actions_B_N.shape[1])
        return self.language_model.lm_head(hidden)

    def decoded(
        self,
        seen_B_P_D: Tensor,
        prompt_B_S: Tensor,
        length_B: Tensor,
        num: int,
        choose: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """Tokens [B, num] one after the other, each what ``choose(k, logits_B_V)`` gives; keys and values of all before
        are kept, so that each token passes the trunk once."""
        ids, valid = rows(prompt_B_S, length_B, prompt_B_S.new_zeros(len(prompt_B_S), 0), self.sizes.pad_id)
        cache, places = transformers().DynamicCache(), seen_B_P_D.shape[1] + length_B
        hidden = self._hidden(seen_B_P_D, self._embedded(ids), valid, True, cache)
        hidden = _after_prompts(hidden, seen_B_P_D.shape[1], length_B, 1)
        is_seen = valid.new_ones(seen_B_P_D.shape[:2])
        valid, chosen = torch.cat([is_seen, valid], dim=1), []  # rows are valid from the left
        for k in range(num):
            chosen.append(choose(k, self.language_model.lm_head(hidden[:, -1])))
            if k + 1 < num:
                valid = torch.cat([valid, valid.new_ones(len(valid), 1)], dim=1)
                mask = _bias(valid[:, None, None], hidden)
                token = self._embedded(chosen[-1][:, None])
                hidden = self._trunk(token, mask, (places + k)[:, None], cache)
        return torch.stack(chosen, dim=1)

    def _embedded(self, ids_B_S: Tensor) -> Tensor:
        return self.language_model.get_input_embeddings()(ids_B_S)

    def _hidden(
        self, seen_B_P_D: Tensor, embedded_B_S_D: Tensor, valid_B_S: Tensor, is_causal: bool, cache: Any = None
    ) -> Tensor:
        """The trunk over [BOS], what is seen, and the rest of the row."""
        embedded = torch.cat([embedded_B_S_D[:, :1], seen_B_P_D, embedded_B_S_D[:, 1:]], dim=1)
        is_seen = valid_B_S.new_ones(seen_B_P_D.shape[:2])
        valid = torch.cat([valid_B_S[:, :1], is_seen, valid_B_S[:, 1:]], dim=1)
        sees = valid[:, None, None, :].expand(-1, 1, valid.shape[1], -1)
        if is_causal:
            sees = sees & torch.ones_like(sees[0, 0]).tril()
        positions = torch.arange(valid.shape[1], device=valid.device)[None]
        return self._trunk(embedded, _bias(sees, embedded), positions, cache)

    def _trunk(self, embedded: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        arguments = dict(attention_mask=mask, position_ids=positions, past_key_values=cache)
        output = self.language_model.model(inputs_embeds=embedded, use_cache=cache is not None, **arguments)
        return output.last_hidden_state


def _after_prompts(hidden_B_S_D: Tensor, num_seen: int, length_B: Tensor, num: int) -> Tensor:
    """``num`` places from each prompt's last one on."""
    places = (num_seen + length_B - 1)[:, None] + torch.arange(num, device=length_B.device)
    return hidden_B_S_D.gather(1, places[..., None].expand(-1, -1, hidden_B_S_D.shape[-1]))


def _bias(sees: Tensor, like: Tensor) -> Tensor:
    """A bias for attention: hugely negative where a query does not see a key."""
    return torch.zeros_like(sees, dtype=like.dtype).masked_fill(~sees, torch.finfo(like.dtype).min)
