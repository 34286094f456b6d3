# SPDX-License-Identifier: Apache-2.0
"""Files that hold an action-conditioned network: its sizes in the header, its weights, inputs and results."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import DiT
from imaginaire.checkpoint import weights
from tests.goldens import Golden, Value

VARIANTS: dict[str, type[ActionDiT]] = {"flat": FlatActionDiT, "chunk": ChunkActionDiT}
FPS = 4.0
# Entries of a header besides the arguments of a network; each test uses what it needs.
SETTINGS = {
    *("guidance", "num_steps", "order", "sigma_conditional", "sigma_max", "sigma_min", "state_t"),
    *("num_conditional_latents", "sampler_shift", "timestep_scale", "train_shift"),
}


@dataclass(frozen=True)
class ActionFile:
    """An opened file. ``settings`` are values of the header: a test takes those that it needs by ``use``."""

    tensors: Value
    settings: dict[str, Value]
    network: type[ActionDiT]
    arguments: dict[str, Any]  # of the network

    def build(self) -> ActionDiT:
        """The network with the weights of the file, every name accounted for."""
        net = self.network(**self.arguments)
        for name, value in net.pos_embedder.named_buffers():  # functions of the sizes, which a file may hold
            if f"net.pos_embedder.{name}" in self.tensors:
                self.tensors[f"net.pos_embedder.{name}"].compare(value, atol=1e-6)
        names = [name for name in self.tensors if name.startswith("net.")]
        source = {name.removeprefix("net."): self.tensors[name].use() for name in names}
        weights.load_into(net.state_dict(), source).require(weights.EXTRAS)
        return net.eval()

    def surroundings(self) -> dict[str, Tensor]:
        """Inputs of every call besides latents, time and text, by the names of the network's arguments."""
        batch, _, _, height, width = self.tensors["fwd.x"].use().shape
        return dict(
            padding_mask_B_1_H_W=torch.zeros(batch, 1, 8 * height, 8 * width),
            fps_B=torch.full((batch,), FPS),
            action_B_A_D=self.tensors["fwd.action"].use(),
        )

    def condition(self, text_B_S_E: Tensor, given_B_C_T_H_W: Tensor, mask_B_1_T_H_W: Tensor) -> Condition:
        """A condition with this text and these given latents, where the mask is 1."""
        return Condition(
            crossattn_emb_B_S_E=text_B_S_E,
            gt_frames_B_C_T_H_W=given_B_C_T_H_W,
            condition_mask_B_1_T_H_W=mask_B_1_T_H_W,
            **self.surroundings(),
        )


def open_action_file(golden: Golden, name: str) -> ActionFile:
    """The file of that name with its header sorted out; an unknown entry of the header fails."""
    file = f"{name}.safetensors"
    config = golden.metadata(file)["config"]
    network = VARIANTS[config["variant"].use() if "variant" in config else "flat"]
    known = {p for cls in (DiT, ActionDiT, network) for p in inspect.signature(cls).parameters} - {"network"}
    unknown = set(config) - known - SETTINGS - {"variant", "use_crossattn_projection"}
    assert not unknown, f"{file}: what are {sorted(unknown)} of its config?"
    arguments = {key: config[key].use() for key in config if key in known}
    projects = "use_crossattn_projection" in config and config["use_crossattn_projection"].use()
    if not projects:  # then the width before the projection has no meaning
        arguments.pop("crossattn_proj_in_channels", None)
    return ActionFile(golden.tensors(file), {key: config[key] for key in config if key in SETTINGS}, network, arguments)
