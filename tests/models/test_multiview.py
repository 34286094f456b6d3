# SPDX-License-Identifier: Apache-2.0
"""A multi-view model on the interfaces of the other models: training, several processes, inference, a view as given."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from einops import rearrange
from torch import Tensor

from cosmos_predict2.callbacks.fixed_clips import first_clips
from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.multiview_dit import MultiViewDiT
from cosmos_predict2.tokenizers.each_view import EachView
from cosmos_predict2.tools.plan.workload import read_workload
from cosmos_predict2.world_model.config import MultiviewPipelineConfig
from cosmos_predict2.world_model.world_model import SamplingOptions, initial_noise
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError
from imaginaire.training import preflight
from tests.models import parts
from tests.models.parts import PooledPixels
from tests.models.test_tiny_twin import CONFIG, SHORT
from tests.multiprocess import run_distributed
from tests.training import assert_resumes, run_dir

TWIN = "predict2_multiview_training_tiny_waymo5views"
V, S = 3, 5


def make_model(*locations: str) -> Video2WorldModel:
    return parts.make_model(
        pipeline=MultiviewPipelineConfig,
        network=MultiViewDiT,
        net=dict(view_ids=[4, 0, 2], max_frames=8),
        state_t=4,
        min_num_conditional_frames=0,
        max_num_conditional_frames=1,
        condition_locations=locations or ["first_random_n"],
    )


def batch(size: int = 2) -> dict[str, Tensor]:
    return parts.make_batch(size, 13, range(size), picture=(V * 32, 48), num_tokens=V * S)


def test_a_step_gives_the_first_frames_of_every_view() -> None:
    model = make_model()
    output, loss = model.training_step(batch(8), 1)
    mask_B_T_V = output["condition"].condition_mask_B_1_T_H_W[:, 0].unflatten(2, (V, -1))[..., 0, 0]
    assert set(mask_B_T_V.sum(dim=1).flatten().tolist()) == {0.0, 1.0} and not mask_B_T_V[:, 1:].any()
    assert all(len(set(views)) == 1 for views in mask_B_T_V[:, 0].tolist())
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.net.parameters())
    assert model.net.view_embeddings.weight.grad[[0, 2, 4]].any(dim=1).all()
    assert not model.net.view_embeddings.weight.grad[[1, 3, 5, 6]].any()


def test_no_latent_sees_two_cameras() -> None:
    class Whole(PooledPixels):
        decode_groups = "of whole pictures"

        def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
            self.seen = tuple(video_B_C_F_H_W.shape)
            return super().encode(video_B_C_F_H_W)

    inner, video = Whole(), batch()["video"].float()
    each = EachView(inner, V)
    latent = each.encode(video)
    assert inner.seen == (2, 3, 13, 32, 48) and latent.shape == (2, 16, 4, V * 4, 6)
    torch.testing.assert_close(latent, PooledPixels().encode(video))
    assert each.decode(latent).shape == (2, 3, 13, V * 32, 48) and each.latent_ch == 16
    assert each.decode_groups is None


def test_noise_is_drawn_view_after_view_as_published() -> None:
    noise = initial_noise((1, 16, 4, V * 4, 6), 3, V)
    published = initial_noise((1, 16, V * 4, 4, 6), 3)
    assert torch.equal(rearrange(noise, "b c t (v h) w -> b c (v t) h w", v=V), published)
    assert torch.equal(initial_noise((2, 16, 4, V * 4, 6), [5, 3], V)[1:], noise)


@pytest.mark.parametrize(("locations", "views"), [(["ref_cam"], {1}), (["any_cam", "first_random_n"], {0, 1, 2})])
def test_a_whole_view_can_be_given(locations: list[str], views: set[int]) -> None:
    """The front camera, which is 0 and here the second view, or a view that is drawn."""
    output, _ = make_model(*locations).training_step(batch(16), 1)
    mask_B_T_V = output["condition"].condition_mask_B_1_T_H_W[:, 0].unflatten(2, (V, -1))[..., 0, 0]
    whole = mask_B_T_V.all(dim=1)
    assert whole.sum(dim=1).eq(1).all() and {int(row.int().argmax()) for row in whole} == views
    assert bool(mask_B_T_V.sum(dim=1).eq(1).any()) == ("first_random_n" in locations)
    for wrong in (["front"], ["ref_cam", "any_cam"], ["no_cam", "first_random_n"]):
        with pytest.raises(ConfigError, match="condition_locations"):
            make_model(*wrong)


def test_a_given_view_stays_as_it_is_in_a_generated_clip() -> None:
    model, given = make_model(), batch()
    frames, text = given["video"][:, :, :1], torch.zeros(2, V * S, 8)
    options, is_given = SamplingOptions(num_steps=2, guidance=3.0), []
    mask = lambda *call: is_given.append(call[2]["condition_mask_B_1_T_H_W"].chunk(V, dim=3)[2].all())  # noqa: E731
    model.net.register_forward_pre_hook(mask, with_kwargs=True)
    model.world.config.condition_fps = 30.0
    with mock.patch.object(model.net, "prepare", wraps=model.net.prepare) as prepare:
        made = model.world.generate(frames, text, options=options, edited_B_C_F_H_W=given["video"], given_view=2)
    assert prepare.call_args.kwargs["fps_B"].tolist() == [30.0, 30.0]  # not the clip's rate
    true = model.world.decode(model.world.encode(given["video"])).chunk(V, dim=3)
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(made.chunk(V, dim=3), true)]
    assert same == [False, False, True]
    assert len(is_given) > 2 and all(is_given)  # in both halves of the guidance


@pytest.mark.parametrize("view_ids", [[0, 4, 2], [4, 2, 0]])
def test_a_sample_of_a_clip_is_given_the_view_that_training_gives(view_ids: list[int]) -> None:
    model = make_model("ref_cam")
    model.net.view_ids = tuple(view_ids)
    (clip,) = first_clips([batch(1)], model, 1)
    options, given = SamplingOptions(num_steps=2), clip.x0_1_C_T_H_W
    made = model.world.generate_latents(clip.conditions(), given, clip.num_given, options=options)
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(made.chunk(V, dim=3), given.chunk(V, dim=3))]
    assert clip.num_given == 0 and same == [camera == 0 for camera in view_ids]
    assert model.card().pipeline["condition_locations"] == ["ref_cam"]


def _of_two() -> tuple[float, dict[str, Tensor], Tensor]:
    return parts.loss_gradients_and_video(make_model("first_random_n", "any_cam"), batch(), 1, torch.ones(2, V * S, 8))


@pytest.mark.slow
def test_two_context_parallel_processes_equal_one() -> None:
    """Each has half of the frames of every view."""
    loss, grads, video = _of_two()
    for other_loss, other_grads, other_video in run_distributed(_of_two, world_size=2):
        assert other_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(other_grads, grads, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(other_video, video, rtol=1e-3, atol=1e-3)


def test_views_of_data_that_are_not_the_networks_show_before_anything_is_built() -> None:
    short = [f"experiment={TWIN}", *SHORT[1:]]
    assert not preflight.findings(config := compose(CONFIG, short))
    assert read_workload(config, 1).text_tokens == 2 * 64
    found = preflight.findings(compose(CONFIG, [*short, "dataloader_train.dataset.views=3"]))
    assert "it has 3 views, but the network 2" in str(found[0])
    released = "experiment=predict2_multiview_training_2b_480p_10fps_7views_29frames_waymo5views"
    key = "model.config.pipe_config.net.view_ids=[0,1,2,3,4]"
    found = preflight.findings(compose(CONFIG, [released, key]))
    assert any("cameras [4, 5, 0, 1, 2] (camera_to_view_id)" in str(one) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("twin", [TWIN, "predict2_text2image_training_tiny_cosmos_nemo_assets"])
def test_a_twin_resumes_as_if_it_had_not_stopped_and_records_its_network(tmp_path: Path, twin: str) -> None:
    options = [f"experiment={twin}", *SHORT[1:], "trainer.run_validation=False", "trainer.callbacks.draw_samples=null"]
    assert_resumes(tmp_path, [*options, "job.name=twin"], 2, 4, name="twin", config=CONFIG)
    card = read_card(str(run_dir(tmp_path / "whole", "twin")))
    assert card.family is not None and card.has_pipeline
    kinds = {"multiview": [0, 1], "Text2Image": None}
    assert card.net.get("view_ids") == kinds[card.family.kind] and (twin == TWIN) is (card.family.kind == "multiview")
