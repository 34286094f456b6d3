# SPDX-License-Identifier: Apache-2.0
"""Bodies and responses of reward services against golden ones."""

import base64
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import wire
from imaginaire.errors import DataError
from tests.goldens import Golden, Value

AREA = "rl"


def bodies(golden: Golden) -> list[tuple[str, Value]]:
    file = golden.json("reward_wire.json")
    return [(name, file[name]) for name in file if name not in ("pull_response", "reward_reading")]


def test_good_bodies_are_parsed_and_bad_ones_are_rejected(golden: Golden) -> None:
    for name, case in bodies(golden):
        body = base64.b64decode(case["body_b64"].use())
        if "meta" not in case:
            with pytest.raises(DataError):
                wire.parse(body)
            continue
        request = wire.parse(body)
        assert request.meta == case["meta"].expected(), name  # whole objects: empty lists and numbers as they are
        case["shape" if "shape" in case else "wire_shape"].compare(list(request.array.shape))
        if "dtype" in case:
            case["dtype"].compare(str(request.array.dtype))
        served = [k for k, weight in case["meta"]["reward_fn"].expected().items() if weight > 0]
        assert list(request.rewards) == (
            case["served_reward_fns"].expected() if "served_reward_fns" in case else served
        )
        if "latent_shape" in case:
            latents = request.latents()
            assert latents is not None
            assert latents.dtype == torch.bfloat16
            case["latent_shape"].compare(list(latents.shape))
            case["decoded_first8"].compare(latents.flatten()[:8].float())


def test_what_we_send_is_the_same_body(golden: Golden) -> None:
    """Our client's body differs from the published client's in the order of fields and in what we add, only."""
    for name, case in bodies(golden):
        if "meta" not in case or "video_infos" not in case["meta"]:
            continue
        request = wire.parse(base64.b64decode(case["body_b64"].use()))
        clips = Clips(request.latents(), request.video(), request.prompts, request.fps[0])
        sent = wire.parse(wire.encode(clips, request.meta["reward_fn"], media=request.media))
        assert sent.meta == {"media_type": "latent", **request.meta}, name
        assert sent.array.dtype == request.array.dtype
        assert (sent.array == request.array).all()


def test_scores_are_read_as_published(golden: Golden) -> None:
    file = golden.json("reward_wire.json")
    response: dict[str, Any] = file["pull_response"].use()
    for case in file["reward_reading"]:
        options = {name: case[name].use() for name in ("clip", "scale") if name in case}
        values, is_valid = wire.read_scores(response, case["score_key"].use(), **options)
        case["reward"].compare(values, atol=1e-9)
        assert all(is_valid)
