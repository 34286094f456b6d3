# SPDX-License-Identifier: Apache-2.0
"""OpenVLA's network: pictures and a prompt give logits of action tokens, all at once (OFT) or one after the other.

Letters: B rows, S tokens of a row, N action tokens, D width, P tokens of pictures (and of proprioception).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmos_predict2.rl.policies.openvla.config import OpenVLASizes
from cosmos_predict2.rl.policies.openvla.vision import VisionBackbone
from cosmos_predict2.text.pretrained import transformers

PLACEHOLDER = 1  # the id that stands where an action will; its embedding counts as zero


class Projector(nn.Module):
    """Features of pictures as tokens of the language model."""

    def __init__(self, vision: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision, 4 * vision)
        self.fc2 = nn.Linear(4 * vision, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))
        return hidden


class ProprioProjector(nn.Module):
    """The state of the robot as one token."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return hidden


class ActionHead(nn.Module):
    """Numbers of actions from what the trunk gives at their places (the L1 variant of OpenVLA-OFT)."""

    def __init__(self, action_dim: int, width: int, num_blocks: int = 2) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(num_blocks)]
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
        numbers: Tensor = part["fc2"](part["layer_norm2"](x))
        return numbers


@dataclass(frozen=True)
class Rows:
    """Tokens from the left, pads on the right, so that a row is in a batch what it is alone."""

    ids_B_S: Tensor
    valid_B_S: Tensor  # bool
    length_B: Tensor  # of the prompts


def rows(prompt_B_S: Tensor, length_B: Tensor, after_B_N: Tensor, pad_id: int) -> Rows:
    """Prompts of their own lengths, each followed by the same number of tokens; acting and learning both begin here."""
    width = int(length_B.max()) + after_B_N.shape[1]
    ids = prompt_B_S.new_full((len(prompt_B_S), width), pad_id)
    common = min(width, prompt_B_S.shape[1])
    ids[:, :common] = prompt_B_S[:, :common]
    places = length_B[:, None] + torch.arange(after_B_N.shape[1], device=ids.device)
    ids.scatter_(1, places, after_B_N.to(ids))
    valid = torch.arange(width, device=ids.device) < length_B[:, None] + after_B_N.shape[1]
    return Rows(torch.where(valid, ids, pad_id), valid, length_B)


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
        """Of all three transformers."""
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
        logits: Tensor = self.language_model.lm_head(self._at_actions(seen_B_P_D, prompt_B_S, length_B, num))
        return logits

    def regressed(self, seen_B_P_D: Tensor, prompt_B_S: Tensor, length_B: Tensor, num: int) -> Tensor:
        """Normalised actions [B, actions, action_dim] of the head, from ``num`` places."""
        assert self.action_head is not None
        numbers: Tensor = self.action_head(self._at_actions(seen_B_P_D, prompt_B_S, length_B, num))
        return numbers

    def _at_actions(self, seen_B_P_D: Tensor, prompt_B_S: Tensor, length_B: Tensor, num: int) -> Tensor:
        """What the trunk gives [B, num, D] where the logits of actions stand."""
        after = prompt_B_S.new_full((len(prompt_B_S), num + 1), PLACEHOLDER)
        after[:, num] = self.sizes.stop_id
        batch = rows(prompt_B_S, length_B, after, self.sizes.pad_id)
        place = torch.arange(batch.ids_B_S.shape[1], device=length_B.device) - length_B[:, None]
        is_placeholder = (place >= 0) & (place < num)
        embedded = self._embedded(batch.ids_B_S) * ~is_placeholder[..., None]
        hidden = self._hidden(seen_B_P_D, embedded, batch.valid_B_S, is_causal=False)
        return _after_prompts(hidden, seen_B_P_D.shape[1], length_B, num)

    def forced_logits(self, seen_B_P_D: Tensor, prompt_B_S: Tensor, length_B: Tensor, actions_B_N: Tensor) -> Tensor:
        """Logits [B, N, vocabulary] of actions that follow one another, each after the true ones before it."""
        batch = rows(prompt_B_S, length_B, actions_B_N[:, :-1], self.sizes.pad_id)
        hidden = self._hidden(seen_B_P_D, self._embedded(batch.ids_B_S), batch.valid_B_S, is_causal=True)
        hidden = _after_prompts(hidden, seen_B_P_D.shape[1], length_B, actions_B_N.shape[1])
        logits: Tensor = self.language_model.lm_head(hidden)
        return logits

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
        batch = rows(prompt_B_S, length_B, prompt_B_S.new_zeros(len(prompt_B_S), 0), self.sizes.pad_id)
        cache, places = transformers().DynamicCache(), seen_B_P_D.shape[1] + length_B
        hidden = self._hidden(seen_B_P_D, self._embedded(batch.ids_B_S), batch.valid_B_S, True, cache)
        hidden = _after_prompts(hidden, seen_B_P_D.shape[1], length_B, 1)
        is_seen = batch.valid_B_S.new_ones(seen_B_P_D.shape[:2])
        valid, chosen = torch.cat([is_seen, batch.valid_B_S], dim=1), []  # rows are valid from the left
        for k in range(num):
            chosen.append(choose(k, self.language_model.lm_head(hidden[:, -1])))
            if k + 1 < num:
                valid = torch.cat([valid, valid.new_ones(len(valid), 1)], dim=1)
                mask = _bias(valid[:, None, None], hidden)
                token = self._embedded(chosen[-1][:, None])
                hidden = self._trunk(token, mask, (places + k)[:, None], cache)
        return torch.stack(chosen, dim=1)

    def _embedded(self, ids_B_S: Tensor) -> Tensor:
        embedded: Tensor = self.language_model.get_input_embeddings()(ids_B_S)
        return embedded

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
        hidden: Tensor = output.last_hidden_state
        return hidden


def _after_prompts(hidden_B_S_D: Tensor, num_seen: int, length_B: Tensor, num: int) -> Tensor:
    """``num`` places from each prompt's last one on."""
    places = (num_seen + length_B - 1)[:, None] + torch.arange(num, device=length_B.device)
    return hidden_B_S_D.gather(1, places[..., None].expand(-1, -1, hidden_B_S_D.shape[-1]))


def _bias(sees: Tensor, like: Tensor) -> Tensor:
    """What attention adds, where a query does not see a key."""
    return torch.zeros_like(sees, dtype=like.dtype).masked_fill(~sees, torch.finfo(like.dtype).min)
