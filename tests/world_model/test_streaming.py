# SPDX-License-Identifier: Apache-2.0
"""Causal students: frame by frame is what the whole chunk at once is; so a latent frame depends on no later one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.blocks import FrameMemory
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.world_model.config import SolverConfig, Video2WorldActionPipelineConfig
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.objectives import Student
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.streaming import Stream
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.errors import ConfigError, DataError
from tests.models.parts import LIMITS, NET, awaken
from tests.models.test_action_model import OWN

OPTIONS: dict[str, Any] = {**NET, **LIMITS, "num_blocks": 3, "action_dim": 3, "extra_per_block_abs_pos_emb": True}


def make_net(**options: Any) -> ChunkActionDiT:
    torch.manual_seed(0)
    net = ChunkActionDiT(**{**OPTIONS, **options}).eval().requires_grad_(False)
    awaken(net, ".fc2.")
    return net


def make_imagination(num_steps: int = 1, *, causal: bool = True, **options: Any) -> Imagination:
    options = dict(action_on_tokens=True, summed_action_dims=[0], **options)
    config = Video2WorldActionPipelineConfig(
        state_t=4,
        fps=10,
        resolution="48",
        precision="float32",
        timestamps=SolverConfig(nfe=num_steps),
        action_transform=OWN.to_dict(),
        max_num_conditional_frames=1,
        objective=L(Student)(causal=causal),
    )
    return Imagination(WorldModel(config, make_net(**options), TinyTokenizer()))


def inputs(size: int = 2, length: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 256, (size, 3, 1, 32, 32), dtype=torch.uint8, generator=generator)
    return first, torch.randn(size, length, 3, generator=generator)


@pytest.mark.parametrize("backend", ["math", "torch"])
def test_keys_and_values_that_are_kept_give_what_all_frames_at_once_give(backend: str) -> None:
    net = make_net(atten_backend=backend)
    net.be_causal()
    x, text, action = torch.randn(2, 16, 4, 4, 4), torch.randn(2, 5, 8), torch.randn(2, 12, 3)
    t, mask = torch.rand(2, 4), torch.zeros(2, 1, 4, 4, 4)
    mask[:, :, 0] = 1
    whole = net(x, t, text, condition_mask_B_1_T_H_W=mask, action_B_A_D=action)
    for pieces in ([2, 1, 1], [1, 3], [4]):
        net.memory, made, at = FrameMemory(), [], 0
        for count in pieces:
            part = slice(at, at + count)
            at += count
            so_far = action[:, : 4 * (at - 1)] if at > 1 else None
            options: Any = dict(condition_mask_B_1_T_H_W=mask[:, :, part], action_B_A_D=so_far)
            made.append(net(x[:, :, part], t[:, part], text, **options))
        net.memory = None
        assert torch.allclose(torch.cat(made, dim=2), whole, atol=1e-5)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_pictures_that_leave_at_once_are_those_of_the_whole_chunk(num_steps: int) -> None:
    imagination, (first, actions) = make_imagination(num_steps), inputs()
    options = SamplingOptions(num_steps=num_steps)
    whole = imagination.generate_actions(first, actions, [5, 6], options, as_float=True)[:, :, 1:]
    for keeps in (True, False):
        stream = Stream(imagination, first, [5, 6], options, keeps=keeps)
        with pytest.raises(DataError, match="3 actions: a latent frame takes 4"):
            stream.advance(actions[:, :3])
        made = [stream.advance(part, as_float=True) for part in actions.split([4, 4, 4], dim=1)]
        assert torch.allclose(torch.cat(made, dim=2), whole, atol=1e-5)
        assert stream.left == 0 and imagination.world.net.memory is None
        with pytest.raises(DataError, match="room for 0"):
            stream.advance(actions[:, :4])


def test_each_frame_is_computed_once() -> None:
    imagination, (first, actions) = make_imagination(), inputs()
    frames: list[int] = []
    imagination.world.net.register_forward_pre_hook(lambda _, inputs: frames.append(inputs[0].shape[2]))
    for keeps, expected in ((True, [2, 1, 1]), (False, [2, 3, 4])):
        frames.clear()
        stream = Stream(imagination, first, [5, 6], SamplingOptions(num_steps=1), keeps=keeps)
        for part in actions.split(4, dim=1):
            stream.advance(part)
        assert frames == expected


def test_what_is_not_causal_makes_whole_chunks() -> None:
    imagination, (first, _) = make_imagination(causal=False), inputs()
    with pytest.raises(ConfigError, match="experiment=tiny_student_causal"):
        Stream(imagination, first, [5, 6], SamplingOptions(num_steps=1))
    with pytest.raises(ValueError, match="choose a chunk network"):
        FlatActionDiT(**{**OPTIONS, "action_dim": 36}).be_causal()
