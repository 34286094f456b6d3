# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a video of the released size, on its tiny twin."""

import pytest

from benchmarks import inference
from cosmos_predict2.world_model.world_model import WorldModel


@pytest.mark.parametrize(("way", "printed"), [("product", "as one batch of two"), ("apart", "one after the other")])
def test_parts_of_a_video_are_timed_and_the_rest_is_said_to_be_computed(
    way: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inference.measure("tiny", "48", 3, way)
    text = capsys.readouterr().out
    assert printed in text and "; 4 evaluations" in text and "35 steps would take" in text
    assert min(found.values()) > 0
    assert found["whole"] >= found["encode"] + found["denoise"] + found["decode"]


def test_a_video_that_is_not_finite_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = WorldModel.decode
    monkeypatch.setattr(WorldModel, "decode", lambda self, latent: decode(self, latent) * float("nan"))
    with pytest.raises(SystemExit, match="tiny 48, --network_batch product: the video is not finite"):
        inference.measure("tiny", "48", 1, "product")
