# SPDX-License-Identifier: Apache-2.0
"""Rollouts that are made together: each with its own seed and actions, and as long as it was asked for."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.pipelines.action_inputs import Episode
from cosmos_predict2.pipelines.action_requests import ActionRequest, Job, imagine, prepare
from cosmos_predict2.world_model.options import Reading, RolloutSettings
from imaginaire.errors import DataError


def test_jobs_are_imagined_as_if_each_were_alone() -> None:
    jobs = []
    for seed, count in ((3, 15), (8, 24)):
        first = torch.full((3, 1, 4, 4), seed, dtype=torch.uint8)
        episode = Episode(first, torch.full((count, 1), float(seed)), "rows", "a.mp4", list(range(count + 1)))
        jobs.append(Job(ActionRequest("a.json", "a.mp4", seed=seed), episode))
    rollout = mock.Mock(return_value=torch.zeros(2, 3, 25, 4, 4, dtype=torch.uint8))
    pipe: Any = SimpleNamespace(
        rollout=rollout,
        transform=SimpleNamespace(dim=1),
        transformed=lambda rows: torch.tensor(rows) - 1,
        config=SimpleNamespace(chunk_size=12),
    )
    text, negative = torch.ones(1, 2, 8), torch.zeros(1, 2, 8)
    settings = RolloutSettings(history=2, float_hand_over=True)
    videos = imagine(pipe, jobs, settings, (text, negative))
    assert [video.shape[1] for video in videos] == [16, 25]
    (frames, actions, seeds, sampling), told = rollout.call_args
    assert frames[:, 0, 0, 0, 0].tolist() == seeds == [3, 8] and sampling is settings.sampling
    assert actions[:, :, 0].tolist() == [[3.0] * 15 + [-1.0] * 9, [8.0] * 24]
    assert told["text_B_S_E"] is text and told["negative_text_B_S_E"] is negative
    assert (told["history"], told["reference"], told["float_hand_over"]) == (2, False, True)


@pytest.mark.parametrize(("combine", "warns"), [(None, True), ("sum", False)])
def test_rows_that_are_summed_unasked_are_a_warning(
    combine: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reading = Reading(transform=controller(4, scale=1.0), stride=2, combine=combine)
    with pytest.raises(DataError):  # there is no request
        prepare([], reading, RolloutSettings())
    assert ("--combine_actions last" in caplog.text) == warns
