# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the published world-model environment, on its tiny twin."""

import re
from pathlib import Path

import pytest

from benchmarks import imagination, rollout
from benchmarks.rollout import published


def test_the_published_way_and_ours_imagine_the_same(tmp_path: Path) -> None:
    env = imagination.make_env("tiny", 2, tmp_path)
    ends = []
    for way in (None, rollout.WAYS[0]):
        if way is not None:
            env.imagination.generate_actions = published(env.imagination.world, way)  # type: ignore[method-assign]
        imagination.chunk(env)
        assert env._frames is not None
        ends.append(env._frames.clone())
    assert (ends[0].int() - ends[1].int()).abs().max() <= 1 and ends[0].float().std() > 1


def test_parts_operations_and_the_published_way_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(imagination, "ceiling", lambda: 1e10)  # a busy machine has a share of it, too
    imagination.measure_released("tiny", 1, 1)
    found = capsys.readouterr().out
    assert "FAILED" not in found and len(re.findall(r"decode \d+\.\d+ s", found)) == 2
    assert float(re.findall(r"([\d.]+) times ours", found)[0]) > 0
    share, rate = (float(re.findall(form, found)[0]) for form in (r"([\d.]+)% of the fastest", r"([\d.e-]+) TFLOP/s:"))
    assert share / 100 == pytest.approx(100 * rate, abs=1e-3) and share > 0


def test_operations_of_the_published_size() -> None:
    """16 environments with 1280 tokens each: 24 products of width by width and the attention among them."""
    config = rollout.get_cosmos_predict2_action_conditioned_pipeline(model_size="2B", network="chunk")
    tokens, width, blocks = 16 * 1280, 2048, 28
    linear, attention = blocks * tokens * 24 * width**2, blocks * tokens * 4 * 1280 * width
    assert imagination.step_flops(config, 16, "2B") == pytest.approx(linear + attention, rel=0.02)
