# SPDX-License-Identifier: Apache-2.0
"""Wan2.1 on the interfaces of the other models: training, adapters, several processes, inference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.checkpoints.dit_weights import describe
from cosmos_predict2.conditioner import EXTRA_KEY
from cosmos_predict2.configs.base.config_wan2pt1 import get_wan2pt1_pipeline
from cosmos_predict2.models.config import Predict2p5Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.released import WAN_NETWORKS
from cosmos_predict2.world_model.config import FlowConfig, WanPipelineConfig
from cosmos_predict2.world_model.world_model import SamplingOptions
from imaginaire.config.compose import compose
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.errors import ConfigError, DataError
from imaginaire.training import preflight
from tests.models.parts import PooledPixels, loss_gradients_and_video, make_batch
from tests.models.test_tiny_twin import CONFIG, LAYOUTS, SHORT
from tests.models.test_tiny_twin import _train_layouts as train_layouts
from tests.multiprocess import run_distributed
from tests.training import losses, run_dir, train

NET = dict(model_channels=32, num_blocks=2, num_heads=2, ffn_channels=48, crossattn_emb_channels=8, time_channels=16)
I2V = {**NET, "in_channels": 36, "image_channels": 12}
RELEASED = ["t2v_1pt3b", "t2v_14b", "i2v_14b"]


class Corners:
    """Features of a picture: its corners, a row each."""

    def encode(self, picture_B_C_H_W: Tensor) -> Tensor:
        return picture_B_C_H_W[:, :, ::47, ::47].flatten(2).transpose(1, 2).repeat(1, 1, 4)

    def to(self, device: torch.device | str) -> "Corners":
        return self


def make_model(net: dict[str, Any], **options: Any) -> Video2WorldModel:
    torch.manual_seed(0)
    pipe_config = WanPipelineConfig(
        net=L(WanDiT)(**net),
        tokenizer=L(PooledPixels)(),
        image_encoder=L(Corners)(),
        state_t=4,
        min_num_conditional_frames=0,
        max_num_conditional_frames=0,
        flow=FlowConfig(timestep_scale=1.0, replace_given_frames=False),
    )
    config = dict(precision="float32", pipe_config=pipe_config, conditional_frames_probs=None, **options)
    model = Video2WorldModel(Predict2p5Video2WorldModelConfig(**config))
    with torch.no_grad():
        for parameter in model.net.parameters():  # some begin at zero
            parameter.normal_(std=0.2)
    return model


def batch() -> dict[str, Tensor]:
    return make_batch(2, 13, [0, 1], picture=(48, 48), num_tokens=5)


def test_image_to_video_sees_the_first_frame_and_makes_all_of_them() -> None:
    model = make_model(I2V)
    output, loss = model.training_step(batch(), 1)
    condition = output["condition"]
    assert condition.extra_B_C_T_H_W.shape == (2, 20, 4, 6, 6) and condition.image_B_S_E.shape == (2, 4, 12)
    assert condition.extra_B_C_T_H_W[:, :4, 0].all() and not condition.extra_B_C_T_H_W[:, :4, 1:].any()
    assert not condition.condition_mask_B_1_T_H_W.any()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.net.parameters())
    video = model.world.generate(batch()["video"][:, :, :1], torch.zeros(2, 5, 8), options=SamplingOptions(num_steps=2))
    assert video.shape == (2, 3, 13, 48, 48) and torch.isfinite(video).all()
    with pytest.raises(ConfigError, match="begins with a picture"):
        model.world.generate(batch()["video"][:, :, :0], torch.zeros(2, 5, 8))
    with pytest.raises(DataError, match="use pixels"):
        latents = model.world.encode(batch()["video"])
        model.training_step({**{k: v for k, v in batch().items() if k != "video"}, "latents": latents}, 1)


def test_text_to_video_is_given_no_frame() -> None:
    model = make_model(NET)
    assert EXTRA_KEY not in model.world.image_features(torch.zeros(1, 3, 48, 48))
    assert model.world.generate(batch()["video"][:, :, :0], torch.zeros(2, 5, 8)).shape == (2, 3, 13, 48, 48)
    with pytest.raises(ConfigError, match="text alone"):
        model.world.generate(batch()["video"][:, :, :1], torch.zeros(2, 5, 8))


def test_adapters_alone_are_trained() -> None:
    targets = "q,k,v,o,ffn.0,ffn.2"
    model = make_model(I2V, train_architecture="lora", lora_rank=2, lora_target_modules=targets)
    trained = [name for name, parameter in model.net.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 10 and all(".lora_" in name for name in trained)


def _of_two(net: dict[str, Any]) -> tuple[float, dict[str, Tensor], Tensor]:
    return loss_gradients_and_video(make_model(net), batch(), int("image_channels" in net), torch.ones(2, 5, 8))


@pytest.mark.slow
@pytest.mark.parametrize("net", [NET, I2V], ids=["t2v", "i2v"])
def test_two_context_parallel_processes_equal_one(net: dict[str, Any]) -> None:
    loss, grads, video = _of_two(net)
    for found, of_two, video_of_two in run_distributed(_of_two, 2, (net,)):
        assert found == pytest.approx(loss, rel=1e-5)
        assert (video_of_two - video).abs().max() < 1e-4
        for name, grad in grads.items():
            assert torch.allclose(of_two[name], grad, atol=1e-5 * max(1.0, float(grad.abs().max()))), name


@pytest.mark.long
def test_spread_and_sharded_training_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """Losses alone: the network begins with a velocity of zero, and Adam makes much of gradients that are rounding."""
    layout = {"spread_and_sharded": LAYOUTS["spread_and_sharded"]}
    run_distributed(train_layouts, 2, (tmp_path, layout, "experiment=tiny_wan2pt1_i2v"))
    train_layouts(tmp_path, {"one": []}, "experiment=tiny_wan2pt1_i2v")
    one, two = ([value for _, value in losses(tmp_path, name)] for name in ("one", "spread_and_sharded"))
    assert one and one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize(
    ("network", "count"),
    [("1.3B Wan2.1 T2V", 1_418_996_800), ("14B Wan2.1 T2V", 14_288_491_584), ("14B Wan2.1 I2V", 16_394_878_784)],
)
def test_released_networks_are_known_by_their_shapes(network: str, count: int) -> None:
    with torch.device("meta"):
        net = WanDiT(**WAN_NETWORKS[network])
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    family = describe(dict(net.named_parameters()))
    assert family is not None and family.network == network
    assert WAN_NETWORKS[network].items() <= family.net_arguments.items()


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_compose(name: str) -> None:
    by_lora = compose(CONFIG, [f"experiment=wan2pt1_{name}_lora_training"])
    whole = compose(CONFIG, [f"experiment=wan2pt1_{name}_training"])
    config = by_lora.model["config"]
    assert (config["train_architecture"], whole.model["config"]["train_architecture"]) == ("lora", "base")
    assert config["model_manager_config"]["dit_path"].endswith("-Diffusers")
    assert (config["pipe_config"]["image_encoder"] is None) == name.startswith("t2v")
    assert any("Wan-AI" in str(one) for one in preflight.findings(by_lora))  # the weights are not here


def test_the_original_repository_is_taken_where_it_alone_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_PREDICT2_ARGS", f"--checkpoints {tmp_path}")
    own = tmp_path / "Wan-AI/Wan2.1-I2V-14B-480P"
    for suffix, folder in (("", own), ("-Diffusers", Path(f"{own}-Diffusers"))):
        folder.mkdir(parents=True)
        config = get_wan2pt1_pipeline(kind="i2v", model_size="14B")
        found = [config.text_encoder.path, config.tokenizer.vae_pth, config.image_encoder.path]
        parts = ("", "/vae", "/image_encoder") if suffix else ("", "/Wan2.1_VAE.pth", "")
        assert found == [f"{own}{suffix}{part}" for part in parts]


@pytest.mark.slow
def test_a_twin_trains_whole_then_adapters_then_by_rewards(tmp_path: Path) -> None:
    options = ["experiment=tiny_wan2pt1_i2v", *SHORT[1:], "job.name=wan"]
    assert train(tmp_path, [*options, "trainer.max_iter=2"], config=CONFIG) == 0
    weights = run_dir(tmp_path, "wan") / "checkpoints/model/iter_000000002.pt"
    adapted = [*options[:-1], "job.name=lora", "model.config.train_architecture=lora"]
    adapted += [f"model.config.model_manager_config.dit_path={weights}", "trainer.max_iter=1"]
    quiet = ["trainer.run_validation=False", "trainer.callbacks.draw_samples=null"]
    assert train(tmp_path, [*adapted, *quiet], config=CONFIG) == 0
    rl = [
        "experiment=tiny_wan2pt1_flow_grpo_toy_world",
        *options[1:3],
        "job.name=rl",
        adapted[-2],
        "trainer.max_iter=1",
    ]
    rl += ["dataloader_train.dataset.num_episodes=8", "dataloader_train.batch_size=2"]
    rl += ["model.config.rl.num_rollout=2", "model.config.rl.rollout_batch=4"]
    assert train(tmp_path, [*rl, *quiet, "trainer.callbacks.quality_alarm=null"], config=CONFIG) == 0
