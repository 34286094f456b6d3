# SPDX-License-Identifier: Apache-2.0
"""diffusers' CosmosTransformer3DModel with our weights gives our outputs."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from benchmarks.dit import diffusers_twin
from cosmos_predict2.checkpoints.diffusers_names import diffusers_config, frame_rate_note
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from tests.nn.networks import LATENT, SIZES, inputs, small_net

CASES: dict[str, dict[str, Any]] = {
    "2B ratios": dict(rope_h_extrapolation_ratio=3.0, rope_w_extrapolation_ratio=3.0),
    "14B ratios": dict(
        rope_h_extrapolation_ratio=2.0, rope_w_extrapolation_ratio=2.0, rope_t_extrapolation_ratio=20 / 24
    ),
    "frame rates": dict(rope_enable_fps_modulation=True),
    "learned positions": dict(extra_per_block_abs_pos_emb=True),
    "projection": dict(crossattn_emb_channels=12, crossattn_proj_in_channels=16),
    "patches over frames": dict(patch_temporal=2),
    "no padding mask": dict(concat_padding_mask=False),
}


pytestmark = pytest.mark.slow  # importing diffusers takes seconds


@pytest.mark.parametrize("is_per_frame", [False, True], ids=["one time", "a time per frame"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_video2world(options: dict[str, Any], is_per_frame: bool) -> None:
    if is_per_frame and "patch_temporal" in options:
        pytest.skip("times per frame are defined for patches of one frame")
    _compare(small_net(**options), options, is_per_frame)


def test_text2image() -> None:
    _compare(small_net(DiT), {}, is_per_frame=False)


def test_a_network_that_ignores_frame_rates_needs_the_one_that_its_note_asks_for() -> None:
    from diffusers import Cosmos2_5_PredictBasePipeline, Cosmos2VideoToWorldPipeline

    assert "fps" not in inspect.signature(Cosmos2_5_PredictBasePipeline.__call__).parameters
    default = inspect.signature(Cosmos2VideoToWorldPipeline.__call__).parameters["fps"].default
    note = frame_rate_note(diffusers_config(SIZES))
    found = re.search(r"fps=(\d+) by default\. Call it with fps=(\d+)", note)
    assert found is not None and found[1] == str(default)
    _compare(small_net(), {}, is_per_frame=False, fps=int(found[2]))
    with pytest.raises(AssertionError, match="not close"):
        _compare(small_net(), {}, is_per_frame=False, fps=default)


@torch.no_grad()
def _compare(net: DiT, options: dict[str, Any], is_per_frame: bool, fps: int | None = None) -> None:
    # In float64, but for diffusers' learned positions, which are float32 only.
    dtype = torch.float32 if options.get("extra_per_block_abs_pos_emb") else torch.float64
    net, given = net.to(dtype), inputs(dtype)
    if not is_per_frame:
        given["timesteps_B_T"] = given["timesteps_B_T"][:, :1]
    given["padding_mask_B_1_H_W"] = given["padding_mask_B_1_H_W"][:1]
    twin = diffusers_twin(net, {**SIZES, **options})
    is_video = isinstance(net, Video2WorldDiT)
    times = given["timesteps_B_T"]
    theirs = twin(
        given["x_B_C_T_H_W"],
        times[:, None, :, None, None] if is_per_frame else times[:, 0],
        given["crossattn_emb_B_S_E"],
        condition_mask=given["condition_mask_B_1_T_H_W"] if is_video else None,
        padding_mask=given["padding_mask_B_1_H_W"],
        fps=10 if options.get("rope_enable_fps_modulation") else fps,
        return_dict=False,
    )[0]
    assert theirs.shape == (2, 16, *LATENT)
    assert_close(net(**given), theirs, rtol=1e-5, atol=1e-5)  # its tables of positions and times are float32
