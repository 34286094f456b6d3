# SPDX-License-Identifier: Apache-2.0
"""Bodies: what goes out comes back, and whatever is malformed is a DataError."""

import contextlib
import io
import json
import pickle
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import wire
from imaginaire.errors import DataError


def npy(array: numpy.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, array, **options)
    return file.getvalue()


def parsed(data: bytes | bytearray) -> Any:
    return wire.parse(data)


def body(array: numpy.ndarray | None = None, **meta: Any) -> bytes:
    array = numpy.zeros((1, 4, 1, 2, 2), numpy.float32) if array is None else array
    whole = {"prompts": ["a"], "reward_fn": {"x": 1.0}, **meta}
    return json.dumps({k: v for k, v in whole.items() if v is not ...}).encode() + b"\n" + npy(array)


GOOD = body()
LATENT = numpy.zeros((1, 4, 1, 2, 2), numpy.float32)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "newline"),
        (GOOD.replace(b"\n", b" ", 1), ""),
        (b"[1]\n" + npy(LATENT), "object"),
        (b"[" * 100_000 + b"\n", "JSON"),
        (b'{"prompts": NaN}\n', "JSON"),
        (b"\xff\n" + npy(LATENT), "JSON"),
        (body(prompts=...), "prompts"),
        (body(prompts=[]), "prompts"),
        (body(prompts="a"), "prompts"),
        (body(prompts=["a", "b"]), "2 prompts"),
        (body(prompts=["a"] * 2000), "1024"),
        (body(reward_fn=...), "reward_fn"),
        (body(reward_fn={"x": 0}), "weight"),
        (body(reward_fn={"x": "1"}), "reward_fn"),
        (body(media_type="audio"), "media_type"),
        (body(video_infos=[{}, {}]), "video_infos"),
        (body(video_infos=[{"video_fps": 0}]), "video_fps"),
        (body(video_infos=[{"video_fps": True}]), "video_fps"),
        (body(request_id="a b"), "request_id"),
        (body(context={"k": [1, 2]}), "context"),
        (body(arrays=[{"name": "true_latents"}]), "true_latents"),
        (body(more="x" * (5 << 20)), "newline"),
        (body(numpy.zeros((2, 4, 1, 2, 2), numpy.float32)), "2 clips"),
        (body(numpy.zeros((1, 2, 2, 3), numpy.float32), media_type="image"), "uint8"),
        (body(arrays=[{"name": "k"}]) + npy(numpy.zeros((2, 3), numpy.float32)), "2 rows"),
        (body(arrays=[{"name": "k"}] * 2) + 2 * npy(numpy.zeros((1, 3), numpy.float32)), "occurs once"),
        (body(arrays=[{"name": f"k{k}"} for k in range(17)]) + 17 * npy(numpy.zeros((1, 3), numpy.float32)), "16"),
        (GOOD[:-1], "bytes"),
        (GOOD + b"x", "follow"),
        (body(numpy.zeros((1, 4, 1, 2, 3), numpy.uint8)), "bfloat16"),
        (body(LATENT.astype(">f4")), "dtype"),
        (body(LATENT.astype(numpy.complex64)), "dtype"),
        (body(LATENT[0]), "[B, C, T, H, W]"),
        (body(numpy.zeros((1, 3, 1, 2, 2), numpy.float32), media_type="video"), "uint8"),
        (body(numpy.zeros((1, 4, 2, 2), numpy.uint8), media_type="image"), "image"),
        (body(LATENT[:0]), "at least 1"),
        (GOOD.replace(b"(1, 4, 1, 2, 2)", b"(-1, 4, 1, 2, 2)").replace(b" \n", b"\n", 1), ""),
        (b'{"prompts": ["a"], "reward_fn": {"x": 1}}\n' + pickle.dumps(LATENT), ".npy"),
        (b'{"prompts": ["a"], "reward_fn": {"x": 1}}\n' + npy(numpy.array([{}]), allow_pickle=True), "pickle"),
        (b'{"prompts": ["a"], "reward_fn": {"x": 1}}\n\x93NUMPY\x03\x00\x04\x00\x00\x00{}  ', ".npy"),
    ],
)  # fmt: skip
def test_a_malformed_body_is_named(data: bytes, named: str) -> None:
    with pytest.raises(DataError) as error:
        wire.parse(data)
    assert named in str(error.value)
    assert len(str(error.value)) < 500


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, len(GOOD)), st.integers(0, 40))
def test_no_bytes_raise_anything_else(noise: bytes, place: int, gap: int) -> None:
    for data in (noise, GOOD[:place] + noise + GOOD[place + gap :]):
        with contextlib.suppress(DataError):
            assert wire.parse(data).prompts


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text() | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ),
    st.sampled_from(["prompts", "reward_fn", "media_type", "video_infos", "request_id", "context", "arrays"]),
)
def test_no_json_raises_anything_else(value: Any, name: str) -> None:
    with contextlib.suppress(DataError):
        wire.parse(body(**{name: value}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_clips_and_context_come_back(dtype: torch.dtype) -> None:
    latents = torch.randn(2, 4, 2, 3, 4).to(dtype)
    clips = Clips(latents, None, ["a", "ü\n\ud83d"], 10.0)
    context = dict(true_latents=latents + 1, num_conditional_frames=torch.tensor([1, 2]), actions=torch.ones(2, 3, 4))
    request = parsed(wire.encode(clips, {"x": 1.0}, media="latent", context=context, request_id="a/b-1"))
    assert request.prompts == clips.prompts
    assert request.fps == [10.0, 10.0]
    assert request.request_id == "a/b-1"
    assert torch.equal(request.latents(), latents) and request.latents().dtype == dtype
    assert torch.equal(request.context["true_latents"], latents + 1)
    assert torch.equal(request.context["actions"], context["actions"])
    assert request.context["num_conditional_frames"] == [1, 2]


def test_what_is_just_within_the_limits_is_read() -> None:
    many = wire.parse(body(numpy.zeros((1024, 1, 1, 1, 1), numpy.float32), prompts=["a"] * 1024))
    assert many.fps == [16.0] * 1024
    names = [{"name": f"k{k}"} for k in range(16)]
    infos = [{"video_fps": 8, "fps": 9}]
    found = wire.parse(
        body(arrays=names, video_infos=infos, reward_fn={"x": 1, "y": -1, "z": 0})
        + b"".join(npy(numpy.full((1, 3), k, numpy.float32)) for k in range(16))
    )
    assert [float(found.context[f"k{k}"][0, 0]) for k in range(16)] == list(range(16))
    assert (found.rewards, found.fps) == (("x",), [8.0])


def test_what_is_read_may_be_written_and_only_latents_change_their_type() -> None:
    data = bytearray(body(numpy.ones((1, 4, 1, 2, 2), numpy.float32)))
    before = bytes(data)
    parsed(data).latents().zero_()
    assert data == before
    clips = Clips(torch.ones(1, 4, 1, 2, 2), torch.full((1, 3, 1, 8, 8), 7, dtype=torch.uint8), ["a"], 16.0)
    video = parsed(wire.encode(clips, {"x": 1.0}, media="video", latent_dtype=torch.float16)).video()
    assert torch.equal(video, clips.video_B_C_F_H_W)  # type: ignore[arg-type]


def test_arrays_in_fortran_order_are_read() -> None:
    latents = numpy.random.default_rng(0).random((1, 4, 2, 3, 4), numpy.float32)
    assert (parsed(body(numpy.asfortranarray(latents))).latents().numpy() == latents).all()


def test_a_picture_is_a_video_of_one_frame() -> None:
    pixels = numpy.random.default_rng(0).integers(0, 255, (1, 6, 8, 3), numpy.uint8)
    video = parsed(body(pixels, media_type="image")).video()
    assert video.shape == (1, 3, 1, 6, 8)
    assert (video[0, :, 0].permute(1, 2, 0).numpy() == pixels[0]).all()


def test_scores_are_summed_clipped_and_scaled() -> None:
    response = {"scores": {"x": [1.0, 5.0, 9.0], "y": [1.0, 1.0, None], "x+z": [3.0, 3.0, 3.0]}}
    assert wire.read_scores(response, "x+y", (2.5, 4.0), 10.0) == ([25.0, 40.0, 0.0], [True, True, False])
    assert wire.read_scores(response, "x+z") == ([3.0] * 3, [True] * 3)  # a name of its own


def test_invalid_scores_are_never_numbers() -> None:
    response = {"scores": {"x": [1.0, None, 3.0, 4.0]}, "valid": [True, False, False, True]}
    assert wire.read_scores(response, "x") == ([1.0, 0.0, 0.0, 4.0], [True, False, False, True])
    with pytest.raises(DataError, match="torn"):
        wire.read_scores({"scores": None, "error": "torn"}, "x")
    with pytest.raises(DataError, match="'y'"):
        wire.read_scores(response, "x+y")
    assert wire.read_scores({**response, "valid": None}, "x")[1] == [True, False, True, True]
    with pytest.raises(DataError, match="'valid' is True"):
        wire.read_scores({**response, "valid": True}, "x")
