# SPDX-License-Identifier: Apache-2.0
"""Small networks of the family with random weights, for the tests of their files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.checkpoints.adapters import FILE_FORMAT
from cosmos_predict2.checkpoints.card import text_tensor
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from imaginaire.optim import lora

SMALL: dict[str, Any] = dict(
    model_channels=32,
    num_blocks=2,
    num_heads=2,
    adaln_lora_dim=8,
    crossattn_emb_channels=16,
    max_img_h=16,
    max_img_w=16,
    max_frames=8,
    rope_t_extrapolation_ratio=20 / 24,
    rope_h_extrapolation_ratio=2.0,
    rope_w_extrapolation_ratio=3.0,
)

RANK, ALPHA = 3, 12.0  # of adapters


def random_net(seed: int = 0, is_image: bool = False, **changes: Any) -> DiT:
    return filled((DiT if is_image else Video2WorldDiT)(**{**SMALL, **changes}), seed)


def filled(net: Any, seed: int = 0) -> Any:
    """The network, in which every weight differs from zero and from those by another seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return net.eval()


def parameters_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def released_state(net: nn.Module, prefix: str = "net.", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A state as a released file holds it, with Transformer Engine's extra state and the counters."""
    state: dict[str, Any] = {f"{prefix}{name}": tensor.to(dtype) for name, tensor in parameters_of(net).items()}
    state[f"{prefix}pos_embedder.seq"] = torch.arange(8.0)
    state[f"{prefix}accum_iteration"] = torch.tensor(7)
    state[f"{prefix}blocks.0.self_attn.q_norm._extra_state"] = None
    return state


def save(folder: Path, state: Any, name: str = "model.pt") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / name)
    return str(folder / name)


def adapted(net: nn.Module, targets: str, rank: int = RANK, alpha: float = ALPHA) -> Any:
    """The network with adapters that change its output."""
    lora.init_adapters(lora.inject(net, rank, alpha, targets), seed=4, init=False)
    return net


def save_run(folder: Path, net: nn.Module, **config: Any) -> str:
    """The checkpoint of a run with this ``model.config``; its averaged adapters are twice the trained ones."""
    state = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    for name, tensor in list(state.items()):
        state[name.replace("net.", "net_ema.", 1)] = 2 * tensor if ".lora_B" in name else tensor
    folder.mkdir(parents=True, exist_ok=True)
    if config:
        (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"config": config}}))
    return save(folder / "checkpoints/model", state, "iter_000000010.pt")


def write_adapter(path: Path, net: nn.Module) -> str:
    """A file of a network's adapters alone, as older versions wrote it."""
    spec = lora.lora_spec(net)
    assert spec is not None
    header = {"format": FILE_FORMAT, "rank": str(spec.rank), "alpha": repr(spec.alpha), "base": ""}
    safetensors.torch.save_file(lora.adapter_state(net), path, header)
    return str(path)


def assert_same_parameters(net: nn.Module, expected: dict[str, Tensor]) -> None:
    found = parameters_of(net)
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different, different[:5]


@dataclass(frozen=True)
class Inputs:
    """One fixed random input of two latent frames."""

    x: Tensor
    timesteps: Tensor
    text: Tensor
    condition_mask: Tensor
    padding_mask: Tensor


def inputs_of(net: DiT, seed: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 16, 2, 4, 4, generator=generator)
    text = torch.randn(1, 5, net.text_channels, generator=generator)
    condition_mask = torch.zeros(1, 1, 2, 4, 4)
    condition_mask[:, :, 0] = 1
    return Inputs(x, torch.tensor([0.3]), text, condition_mask, torch.zeros(1, 1, 32, 32))


def call(net: DiT, seed: int = 1) -> Tensor:
    """The output for a fixed random input."""
    inputs = inputs_of(net, seed)
    masks = dict(condition_mask_B_1_T_H_W=inputs.condition_mask, padding_mask_B_1_H_W=inputs.padding_mask)
    with torch.no_grad():
        return net(inputs.x, inputs.timesteps, inputs.text, **masks)


def transform_tensor(transform: ActionTransform) -> Tensor:
    """``action_transform`` of a checkpoint."""
    return text_tensor(transform.to_json())
