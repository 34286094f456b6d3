# SPDX-License-Identifier: Apache-2.0
"""Action-conditioned networks against golden values: what the MLPs give, and one call."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.conditioner import conditioning_frames_mask
from tests.goldens import Golden
from tests.parity.action_files import ActionFile, compare_close, open_action_file

AREA = "action"
MLP, FORWARD = 2e-6, 2e-5


def _call(file: ActionFile, net: nn.Module, timesteps: Tensor, text: Tensor | None, **changes: Any) -> Tensor:
    x, mask = file.tensors["fwd.x"].use(), file.tensors["fwd.mask"].use()
    out: Tensor = net(x, timesteps, text, condition_mask_B_1_T_H_W=mask, **file.surroundings(), **changes)
    return out


def _embeddings(net: nn.Module) -> dict[str, Tensor]:
    """What the MLPs give at the next call, by the width that they are named for."""
    found: dict[str, Tensor] = {}
    for width in ("B_D", "B_3D"):

        def note(module: nn.Module, inputs: object, output: Tensor, width: str = width) -> None:
            found[width] = output

        net.get_submodule(f"action_embedder_{width}").register_forward_hook(note)
    return found


@torch.no_grad()
def test_network_of_predict2(golden: Golden) -> None:
    file = open_action_file(golden, "predict2_action_dit")
    net, stored = file.build(), file.tensors
    found = _embeddings(net)
    timesteps_B_T, text = stored["fwd.timesteps_B_T"].use(), stored["fwd.text"].use()
    compare_close(stored["fwd.out"], _call(file, net, timesteps_B_T, text), FORWARD)
    for width in ("B_D", "B_3D"):
        compare_close(stored[f"fwd.action_emb_{width}"], found[width], MLP)
    no_text = torch.zeros_like(text)
    with_zeros = _call(file, net, timesteps_B_T[:, 1:2], no_text)
    compare_close(stored["fwd.out_shared_t_zero_text"], with_zeros, FORWARD)

    prepared = net.prepare(no_text, latent_shape=tuple(stored["fwd.x"].use().shape[2:]), skip_no_text=True)
    assert all(keys_values is None for keys_values in prepared.cross)
    assert torch.equal(_call(file, net, timesteps_B_T[:, 1:2], None, prepared=prepared), with_zeros)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["chunk", "flat"])
def test_networks_of_predict25(variant: str, golden: Golden) -> None:
    file = open_action_file(golden, f"predict25_action_{variant}")
    net, stored, scale = file.build(), file.tensors, file.settings["timestep_scale"].use()
    assert net.crossattn_proj is not None
    found, text = _embeddings(net), stored["fwd.text"].use()
    given = torch.full((len(text),), file.settings["num_conditional_latents"].use())
    stored["fwd.mask"].compare(conditioning_frames_mask(given, stored["fwd.x"].use()))
    for timesteps, out in (("timesteps_B_1", "out"), ("timesteps_B_T", "out_per_frame_t")):
        compare_close(stored[f"fwd.{out}"], _call(file, net, stored[f"fwd.{timesteps}"].use() * scale, text), FORWARD)
        for width in ("B_D", "B_3D"):
            compare_close(stored[f"fwd.action_emb_{width}_raw"], found[width], MLP)
    no_text = torch.zeros_like(text)  # the projection adds its bias: nothing may be left out
    prepared = net.prepare(no_text, latent_shape=tuple(stored["fwd.x"].use().shape[2:]), skip_no_text=True)
    assert None not in prepared.cross
