# SPDX-License-Identifier: Apache-2.0
import ast
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.world_model import WorldModel

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
    net.text_channels = 8
    mine, theirs = (WorldModel(Video2WorldPipelineConfig(), net, part) for part in (Own(), shipped))  # type: ignore[arg-type]
    assert not mine.tokenizer.is_causal and mine.tokenizer.decode_groups is None
    for frames in (None, range(9), range(3), range(5, 8)):
        torch.testing.assert_close(mine.decode(latent, frames), theirs.decode(latent, frames))
