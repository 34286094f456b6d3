# SPDX-License-Identifier: Apache-2.0
import ast
from pathlib import Path

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
