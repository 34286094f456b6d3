# SPDX-License-Identifier: Apache-2.0
"""A captured network: what is captured anew, and that whatever may change is where the graph reads it.

Without a GPU a captured pass is one over the tensors that it was captured with, in their place: as a graph, it sees
nothing else of later calls.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.world_model import cuda_graph, world_model
from cosmos_predict2.world_model.cuda_graph import MOST_KEPT, GraphedNetwork
from cosmos_predict2.world_model.world_model import SamplingOptions
from imaginaire.errors import ConfigError
from tests.pipelines import test_video2world_action as with_actions
from tests.pipelines.test_video2world import frames, make_pipeline, text


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every capture."""
    count: list[int] = []

    def capture(forward: Callable[[], Tensor], device: torch.device, pool: Any) -> Callable[[], Tensor]:
        count.append(len(count))
        output = forward()

        def replay() -> Tensor:
            return output.copy_(forward())

        return replay

    monkeypatch.setattr(cuda_graph, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    class Graphed(GraphedNetwork):
        def __init__(self, net: Any, device: torch.device) -> None:
            super().__init__(net, torch.device("cuda"))

    monkeypatch.setattr(world_model, "GraphedNetwork", Graphed)
    return count


TWO, GUIDED = SamplingOptions(num_steps=2), SamplingOptions(num_steps=2, guidance=2.0)
GRAPHED, GUIDED_GRAPHED = (replace(options, use_cuda_graphs=True) for options in (TWO, GUIDED))


def test_one_capture_serves_chunks_batches_and_prompts(captures: list[int]) -> None:
    pipe = with_actions.make_pipeline()
    first, actions, seeds = with_actions.inputs(length=3 * with_actions.ACTIONS)
    expected = pipe.rollout(first, actions, seeds, TWO, as_float=True)
    assert torch.equal(pipe.rollout(first, actions, seeds, GRAPHED, as_float=True), expected)
    other = pipe.rollout(255 - first, -actions, seeds, TWO, as_float=True)
    assert torch.equal(pipe.rollout(255 - first, -actions, seeds, GRAPHED, as_float=True), other)
    assert len(captures) == 1 and not torch.equal(other, expected)
    pipe.rollout(first, actions, seeds, GRAPHED, batch_size=2)  # 2 and 1, three times
    assert len(captures) == 3


@pytest.mark.parametrize("is_together", [True, False])
def test_another_prompt_is_read_without_another_capture(
    captures: list[int], monkeypatch: pytest.MonkeyPatch, is_together: bool
) -> None:
    """With the halves of the guidance apart, too, whose texts take turns at every step."""
    pipe = make_pipeline()
    monkeypatch.setattr(pipe.world, "_fits_doubled", lambda latent: is_together)
    negative, videos = text(pipe, "blurred"), []
    for prompt in ("push", "pull"):
        arguments: Any = (frames(), text(pipe, prompt), negative)
        videos.append(pipe.generate(*arguments, options=GUIDED))
        assert torch.equal(pipe.generate(*arguments, options=GUIDED_GRAPHED), videos[-1])
    assert len(captures) == 1 and not torch.equal(*videos)
    pipe.generate(frames(), text(pipe, "push"), None, options=GUIDED_GRAPHED)
    assert len(captures) == (1 if is_together else 2)  # a half without a text has nothing to read


def test_one_text_of_many_samples_is_kept_once(captures: list[int]) -> None:
    pipe = with_actions.make_pipeline()
    first, actions, seeds = with_actions.inputs()
    told = torch.randn(2, 6, 8)
    for embedding in told.split(1):
        expected = pipe.generate_actions(first, actions, seeds, TWO, text_B_S_E=embedding)
        found = pipe.generate_actions(first, actions, seeds, GRAPHED, text_B_S_E=embedding)
        assert torch.equal(found, expected)
    assert len(captures) == 1 and pipe.world._graphed is not None
    (captured,) = pipe.world._graphed._kept.values()
    assert captured.prepared is not None and captured.prepared.cross[0] is not None
    assert captured.prepared.cross[0][0].stride(0) == 0


def test_weights_that_moved_are_captured_anew_and_few_captures_are_kept(captures: list[int]) -> None:
    pipe = with_actions.make_pipeline()
    first, actions, _ = with_actions.inputs(1)
    for size in range(1, MOST_KEPT + 2):
        pipe.generate_actions(first.expand(size, -1, -1, -1, -1), actions.expand(size, -1, -1), range(size), GRAPHED)
    assert pipe.world._graphed is not None and len(pipe.world._graphed._kept) == MOST_KEPT
    count = len(captures)
    pipe.dit.double().float()
    with torch.no_grad():
        pipe.dit.final_layer.linear.weight.mul_(2)
    expected = pipe.generate_actions(first, actions, [0], TWO)
    found = pipe.generate_actions(first, actions, [0], GRAPHED)
    assert torch.equal(found, expected) and len(captures) == count + 1


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ConfigError, match="use_cuda_graphs"):
        GraphedNetwork(make_pipeline().dit, torch.device("cpu"))
