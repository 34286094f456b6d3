# SPDX-License-Identifier: Apache-2.0
import pytest

from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny policies in their public layouts, which no test changes: four actions of the toy world, each held thrice."""
    root = tmp_path_factory.mktemp("policies")
    sizes = dict(image_size=28, text_tokens=200, action_chunk=4, action_dim=4, hold=3)
    tiny_openvla.write_tiny(root / "openvla", sentences=["push the red disc to the ring", "push it"], **sizes)
    tiny_pi05.write_tiny(root / "pi05", action_horizon=4, hold=3)
    return {name: str(root / name) for name in ("openvla", "pi05")}
