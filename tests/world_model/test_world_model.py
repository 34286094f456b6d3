# SPDX-License-Identifier: Apache-2.0
import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.evaluation.reports import action_evaluation
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.world_model import CLIPS_AT_ONCE, SamplingOptions, WorldModel
from tests.pipelines.test_video2world_action import inputs, make_pipeline

ROOT = Path(__file__).parents[2]
PARTS = ("net", "tokenizer", "node")  # what the lazy node of a network or tokenizer is called


def test_a_network_and_a_tokenizer_are_instantiated_in_one_place_each() -> None:
    """Whoever needs one calls `network_of`, `tokenizer_of` or `build_world_model`."""
    found = []
    for package in ("cosmos_predict2", "scripts", "examples", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("instantiate") and node.args:
                    argument = ast.unparse(node.args[0])
                    if argument.replace("']", "").split(".")[-1].split("['")[-1] in PARTS:
                        found.append(str(path.relative_to(ROOT)))
    assert found == ["cosmos_predict2/world_model/assembly.py", "cosmos_predict2/world_model/world_model.py"]


def test_a_tokenizer_of_yours_may_lack_what_is_optional() -> None:
    """Whole clips are decoded by it, of which the wanted frames are those that the shipped one decodes alone."""
    shipped = TinyTokenizer()

    class Own:
        latent_ch, spatial_compression_factor, temporal_compression_factor = 16, 8, 4
        dtype = torch.float32

        def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
            return shipped.decode(latent_B_C_T_H_W)

        def to(self, device: Any) -> "Own":
            return self

    latent = torch.randn(1, 16, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    net: Any = torch.nn.Identity()
    net.text_channels, net.num_views = 8, 1
    mine, theirs = (WorldModel(Video2WorldPipelineConfig(), net, part) for part in (Own(), shipped))  # type: ignore[arg-type]
    assert not mine.tokenizer.is_causal and mine.tokenizer.decode_groups is None
    for frames in (None, range(9), range(3), range(5, 8)):
        torch.testing.assert_close(mine.decode(latent, frames), theirs.decode(latent, frames))


# Free memory of a device ----------------------------------------------------------------------------------------------

GIB = 1 << 30


def clips_at_once(side: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", graphs: Any = None) -> int:
    world: Any = WorldModel.__new__(WorldModel)
    world.device, world.tokenizer, world._graphed = torch.device(device), SimpleNamespace(dtype=dtype), graphs
    return world.clips_at_once(13, side, side)


def gpu_with(monkeypatch: pytest.MonkeyPatch, free: int, unused: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: unused)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)


def test_clips_at_once_follow_their_pixels_and_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_with(monkeypatch, 40 * GIB)
    by_size = {side: clips_at_once(side) for side in (64, 256, 512, 1024, 4096)}
    assert by_size[64] > CLIPS_AT_ONCE > by_size[256] and by_size[4096] == 1
    assert 15 <= by_size[64] / by_size[256] <= 17 and 3.5 <= by_size[256] / by_size[512] <= 5
    assert clips_at_once(512, torch.float32) < by_size[512]
    gpu_with(monkeypatch, 10 * GIB, unused=30 * GIB)
    assert clips_at_once(512) == by_size[512]
    assert clips_at_once(512, graphs="captured") == max(1, by_size[512] // 4)
    assert clips_at_once(4096, device="cpu") == CLIPS_AT_ONCE


def test_videos_are_coded_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipeline()
    first, actions, seeds = inputs(3)
    options = SamplingOptions(num_steps=2)
    whole = pipe.generate_actions(first, actions, seeds, options=options)
    sizes: dict[str, list[int]] = {"encode": [], "decode": []}
    for name, found in sizes.items():
        run = getattr(pipe.world.tokenizer, name)

        def counted(x: torch.Tensor, run: object = run, found: list[int] = found) -> torch.Tensor:
            found.append(len(x))
            return run(x)  # type: ignore[operator, no-any-return]

        monkeypatch.setattr(pipe.world.tokenizer, name, counted)
    monkeypatch.setattr(pipe.world, "clips_at_once", lambda num_frames, height, width: 2)
    found = pipe.generate_actions(first, actions, seeds, options=options)
    assert torch.allclose(found.int(), whole.int(), atol=1)
    assert sizes == {"encode": [3], "decode": [2, 1]}  # given frames are not counted on a CPU
    action_evaluation._coded(pipe, whole)
    assert sizes == {"encode": [3, 2, 1], "decode": [2, 1, 2, 1]}
