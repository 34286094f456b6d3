# SPDX-License-Identifier: Apache-2.0
"""The pipeline on a GPU: attention kernels, half precision, captured graphs."""

from typing import Any

import pytest
import torch

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.evaluation.reports.action_evaluation import evaluate
from cosmos_predict2.nn.blocks import BACKENDS, check_attention, choose_attention
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.pipelines.evaluation_data import toy_recordings
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.world_model.cuda_graph import GraphedNetwork
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel
from tests.evaluation.metrics.test_imagined_episodes import model
from tests.models.parts import awaken
from tests.pipelines import test_video2world_action as with_actions
from tests.pipelines.test_video2world import frames, make_pipeline, text

pytestmark = pytest.mark.gpu
NET = dict(model_channels=256, num_blocks=2, num_heads=2, adaln_lora_dim=32, crossattn_emb_channels=64)


def inputs(device: str, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    values = {
        "x_B_C_T_H_W": torch.randn(2, 16, 3, 16, 16, generator=generator),
        "timesteps_B_T": torch.rand(2, 1, generator=generator),
        "crossattn_emb_B_S_E": torch.randn(2, 32, 64, generator=generator),
        "condition_mask_B_1_T_H_W": torch.zeros(2, 1, 3, 16, 16),
        "padding_mask_B_1_H_W": torch.zeros(2, 1, 128, 128),
    }
    return {name: value.to(device, dtype) for name, value in values.items()}


def network() -> Video2WorldDiT:
    torch.manual_seed(0)
    net = Video2WorldDiT(**NET).eval()
    awaken(net)
    return net


@pytest.mark.parametrize("name", sorted(set(BACKENDS) - {"natten"}))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_kernels_agree_with_plain_products(name: str, head_dim: int) -> None:
    try:
        choice = choose_attention(name, "cuda", torch.bfloat16, head_dim)
    except ImportError as error:
        pytest.skip(str(error))
    check_attention(choice.op, head_dim, "cuda", torch.bfloat16)


@torch.no_grad()
def test_half_precision_agrees_with_float32_on_the_host() -> None:
    net = network()
    expected = net(**inputs("cpu", torch.float32))
    net.attention = None
    found = net.to("cuda", torch.bfloat16)(**inputs("cuda", torch.bfloat16)).float().cpu()
    assert float((found - expected).norm() / expected.norm()) < 3e-2


@torch.no_grad()
def test_a_captured_network_gives_what_the_network_gives() -> None:
    net = network().to("cuda", torch.bfloat16)
    graphed = GraphedNetwork(net, torch.device("cuda"))
    for scale in (1.0, 0.5):  # the second call replays
        values = inputs("cuda", torch.bfloat16)
        values["x_B_C_T_H_W"] *= scale
        x, t, text = (values.pop(name) for name in ("x_B_C_T_H_W", "timesteps_B_T", "crossattn_emb_B_S_E"))
        assert torch.equal(graphed(x, t, text, prepared=None, **values), net(x, t, text, **values))


def test_a_graph_is_kept_for_chunks_and_read_anew() -> None:
    pipe = with_actions.make_pipeline()
    pipe.dit.to("cuda").attention = None
    pipe = Video2WorldActionConditionedPipeline(WorldModel(pipe.config, pipe.dit, pipe.world.tokenizer, device="cuda"))
    first, actions, seeds = with_actions.inputs(length=3 * with_actions.ACTIONS)
    for told in (actions, -actions):
        expected = pipe.rollout(first, told, seeds, as_float=True, batch_size=2, options=SamplingOptions(num_steps=2))
        found = pipe.rollout(
            first, told, seeds, as_float=True, batch_size=2, options=SamplingOptions(num_steps=2, use_cuda_graphs=True)
        )
        assert torch.allclose(found, expected, atol=1e-3)
    assert pipe.world._graphed is not None and len(pipe.world._graphed._kept) == 2  # of two samples, and of one


def test_a_video_on_the_gpu_is_like_the_one_on_the_host() -> None:
    pipe = make_pipeline()
    embedding = text(pipe, "push")
    options = SamplingOptions(num_steps=3, guidance=1.0)
    expected = pipe.generate(frames(), embedding, options=options)
    pipe.dit.to("cuda").attention = None
    on_device = Video2WorldPipeline(WorldModel(pipe.world.config, pipe.dit, pipe.world.tokenizer, device="cuda"))
    found = on_device.generate(frames(), embedding, options=options).cpu()
    assert torch.allclose(found, expected, atol=2e-2)


def test_a_model_with_actions_is_measured_on_the_gpu_as_on_the_host() -> None:
    on_host, on_device = model(), model(device="cuda")
    on_device.dit.load_state_dict(on_host.dit.state_dict())
    shown = toy_recordings("default", controller(4, scale=1.0), num=4, num_actions=12)
    host, found = (evaluate(pipe, shown, num_steps=1)[0] for pipe in (on_host, on_device))
    assert found.gap is not None and host.gap is not None
    assert found.gap.true == pytest.approx(host.gap.true, rel=2e-2)
    psnr = [report.likeness["PSNR (dB)"]["imagined"] for report in (found, host)]
    assert psnr[0] == pytest.approx(psnr[1], abs=0.2)
