# SPDX-License-Identifier: Apache-2.0
"""The settings of a PI0.5 checkpoint's config.json, with the sizes of the published variants.

A config.json names its two language models by variant, or gives their sizes (`vlm`, `expert`, `vision`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from cosmos_predict2.rl.policies.pi05.flow import METHODS
from cosmos_predict2.text import pretrained
from imaginaire.errors import CheckpointError, ConfigError, near, raised_as

MODEL_TYPE = "pi05"
MOST = 10_000  # of actions, tokens, pictures or steps: more is a damaged config.json


@dataclass(frozen=True)
class GemmaSizes:
    """One of the two transformers that share their attention."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int = 0  # of the language model alone


@dataclass(frozen=True)
class Vision:
    hidden: int = 1152
    layers: int = 27
    heads: int = 16
    intermediate: int = 4304
    image: int = 224
    patch: int = 14
    projection_dim: int = 2048
    act: str = "gelu_pytorch_tanh"


VARIANTS = {
    "gemma_2b": GemmaSizes(2048, 18, 16384, 8, 1, 256, 257152),
    "gemma_300m": GemmaSizes(1024, 18, 4096, 8, 1, 256),
}


@dataclass(frozen=True)
class Pi05Config:
    """Sizes, and how it decides. What a policy's caller sets besides ``path`` replaces the file's value."""

    vlm: GemmaSizes = VARIANTS["gemma_2b"]
    expert: GemmaSizes = VARIANTS["gemma_300m"]
    vision: Vision = field(default_factory=Vision)
    action_dim: int = 32
    action_horizon: int = 50
    action_chunk: int = 0  # actions of a decision that have a probability; 0: the horizon
    action_env_dim: int = 0  # numbers of an action that the environment takes; 0: all
    execute_steps: int = 0  # actions of a decision that are executed (openpi's replan_steps); 0: the chunk
    hold: int = 1  # environment steps that an action is repeated for
    num_steps: int = 10
    max_token_len: int = 200
    discrete_state_input: bool = True
    state_dim: int = 0  # of the state in a prompt, filled with zeros; 0: the numbers that the environment has
    num_images: int = 3
    asset_id: str = ""  # assets/<asset_id>/norm_stats.json is used, where there are several
    train_expert_only: bool = False
    noise_method: str = "flow_sde"
    noise_level: float = 0.5
    noise_anneal: bool = False
    noise_params: tuple[float, ...] = (0.7, 0.3, 400.0)
    noise_logvar_range: tuple[float, ...] = (0.08, 0.16)  # two standard deviations, in spite of the name
    correlation: float = 0.0  # of the noise of neighbouring actions of a decision
    joint_logprob: bool = False
    safe_get_logprob: bool = False
    ignore_last: bool | None = None  # never draw the last step; null: for flow_cps, whose last step draws nothing

    @property
    def chunk(self) -> int:
        return self.action_chunk or self.action_horizon

    @property
    def executed(self) -> int:
        return self.execute_steps or self.chunk

    @property
    def env_dim(self) -> int:
        return self.action_env_dim or self.action_dim

    @property
    def ignores_last(self) -> bool:
        return self.noise_method == "flow_cps" if self.ignore_last is None else self.ignore_last

    def problems(self) -> list[str]:
        """Settings that do not fit together, in sentences."""
        found = []
        if self.noise_method not in METHODS:
            found.append(f"noise_method={self.noise_method!r} must be one of: {', '.join(METHODS)}")
        if not 1 <= self.executed <= self.chunk <= self.action_horizon:
            found.append(
                f"execute_steps={self.executed}, action_chunk={self.chunk} and action_horizon={self.action_horizon}"
                " must be in this order, the smallest first"
            )
        for name in ("hold", "max_token_len", "num_images", "action_horizon", "action_dim", "num_steps"):
            if not 1 <= getattr(self, name) <= MOST:
                found.append(f"{name}={getattr(self, name)} must be from 1 to {MOST}")
        if len(self.noise_params) != 3 or self.noise_params[2] <= 0:
            found.append(f"noise_params={list(self.noise_params)} must be the first level, the last, and steps above 0")
        if len(self.noise_logvar_range) != 2 or not 0 < self.noise_logvar_range[0] <= self.noise_logvar_range[1]:
            found.append(
                f"noise_logvar_range={list(self.noise_logvar_range)} must be two deviations above 0, the smaller first"
            )
        if not 0 <= self.correlation < 1:
            found.append(f"correlation={self.correlation!r} must be at least 0, and below 1")
        if self.env_dim > self.action_dim:
            found.append(f"action_env_dim={self.env_dim} is above action_dim={self.action_dim}")
        if self.num_steps < 1 + (self.ignores_last and not self.joint_logprob):
            found.append(f"num_steps={self.num_steps} leaves no step that is drawn: raise it, or set ignore_last=False")
        if self.vlm.depth != self.expert.depth or self.vlm.head_dim != self.expert.head_dim:
            found.append("vlm and expert share their attention, so depth and head_dim of both must be the same")
        return found


_KINDS: dict[str, type] = {str(kind): kind for kind in (int, float, bool, str)}
_TYPES = {one.name: one.type for one in fields(Pi05Config)}


def _sizes(kind: type, given: Mapping[str, Any], where: str) -> Any:
    with raised_as(CheckpointError, f"{where} in config.json", TypeError):
        sizes = kind(**given)
    for one in fields(sizes):
        if one.type is int and (type(value := getattr(sizes, one.name)) is not int or value < (one.name != "vocab")):
            raise CheckpointError(f"{where}.{one.name} in config.json is {value!r}; a whole number is expected.")
    return sizes


_SIZES: dict[str, Any] = {"vlm": GemmaSizes, "expert": GemmaSizes, "vision": Vision}
_LEROBOT = {  # its names of ours
    "chunk_size": "action_horizon",
    "max_action_dim": "action_dim",
    "n_action_steps": "execute_steps",
    "num_inference_steps": "num_steps",
    "tokenizer_max_length": "max_token_len",
}
_VARIANT_KEYS = {"paligemma_variant": "vlm", "action_expert_variant": "expert"}


def read_config(content: Mapping[str, Any], source: str, options: Mapping[str, Any]) -> Pi05Config:
    """The config of a file's content, and of a caller's ``options`` before it; other keys of the file are not ours."""
    pretrained.refuse_absurd(content, source)
    if unknown := [name for name in options if name not in _TYPES.keys() - _SIZES.keys()]:
        raise ConfigError(f"policy.{unknown[0]}: PI0.5 has no such option.{near(unknown[0], _TYPES)}")
    if not content.get("pi05", True):
        raise CheckpointError(f"{source} is of PI0 (pi05: false); PI0.5 alone is supported.")
    kind = str(content.get("model_type", content.get("type", MODEL_TYPE)))
    if "pi05" not in content and kind != MODEL_TYPE:
        raise CheckpointError(f"{source} is of a model of type '{kind}', not PI0.5: give a PI0.5 folder.")
    content = {**{_LEROBOT[name]: value for name, value in content.items() if name in _LEROBOT}, **content}
    values = {name: value for name, value in content.items() if name in _TYPES and value is not None}
    for key, name in _VARIANT_KEYS.items():
        if name not in values and key in content:
            variant = str(content[key]).removesuffix("_lora")
            if variant not in VARIANTS:
                raise CheckpointError(f"{source}: {key}={variant!r} is not known.{near(variant, VARIANTS)}")
            values[name] = VARIANTS[variant]
    values = {**values, **{name: value for name, value in options.items() if value is not None}}
    for name, kind in _SIZES.items():
        if isinstance(values.get(name), Mapping):
            values[name] = _sizes(kind, values[name], f"{source}: {name}")
    for name in ("noise_params", "noise_logvar_range"):
        if name in values:
            values[name] = tuple(float(value) for value in values[name])
    for name, value in values.items():
        wanted = _KINDS.get(str(_TYPES[name]))
        kinds = (int, float) if wanted is float else (wanted,)  # true and false are no numbers
        if wanted is not None and type(value) not in kinds:
            raise ConfigError(f"{source}: {name}={value!r} must be of type {wanted.__name__}.")
    config = Pi05Config(**values)
    if "vision" not in values:
        config = replace(config, vision=replace(config.vision, projection_dim=config.vlm.width))
    if problems := config.problems():
        raise ConfigError(f"{source}: {problems[0]}.")
    return config
