# SPDX-License-Identifier: Apache-2.0
"""A world model to learn in out of one folder, as one is published for LIBERO.

DIR/*.pt                       the world model's weights (or one .safetensors)
DIR/tokenizer/tokenizer.pth    its tokenizer
DIR/resnet_rm.pth              the success classifier
DIR/dataset/*.npy              recorded first states, or starts.safetensors
DIR/dataset_statistics.json    of the actions it was trained on
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.released import EMBODIED
from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStarts
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.rewards.resnet import ResnetReward
from imaginaire.errors import CheckpointError, DataError, near

ACTION_TRANSFORM = "controller:20x7"  # of the published weights, which do not record it
SIZE = (256, 320)  # height and width of the published pictures
MAX_STEPS = 256


def find_parts(cosmos_model_dir: str) -> dict[str, str]:
    """The paths of the parts by name; raises for the first that is missing, with what brings it."""
    folder = Path(cosmos_model_dir)
    by_repository = {repository: name for name, (repository, _) in EMBODIED.items()}
    name = by_repository.get(cosmos_model_dir, "cosmos_libero_spatial")
    fetch = f"python -m scripts.download_checkpoints --embodied {name}"
    if not folder.is_dir():
        found = [str(path) for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise CheckpointError(f"There is no folder {folder} (cosmos_model_dir).{near(str(folder), found)} {fetch}")

    def require(path: Path, what: str, cure: str) -> str:
        if not path.exists():
            raise CheckpointError(f"{path} is missing (cosmos_model_dir): {what}. {cure}")
        return str(path)

    weights = sorted(folder.glob("*.pt")) or sorted(folder.glob("*.safetensors"))
    if len(weights) != 1:
        listed = ", ".join(path.name for path in weights) or "none"
        raise CheckpointError(f"{folder} (cosmos_model_dir) has {listed} of *.pt, weights: one is expected. {fetch}")
    starts = folder / "dataset"
    if not any(starts.glob("*.npy")) and not (starts / FILE).is_file():
        own = f"python -m scripts.make_reset_states --dataset RECORDINGS --out {starts}"
        raise DataError(f"{starts} has no recorded first states, *.npy or {FILE} (cosmos_model_dir). {fetch}, or {own}")
    return dict(
        weights=str(weights[0]),
        tokenizer=require(folder / "tokenizer" / "tokenizer.pth", "the world model's tokenizer", fetch),
        reward=require(folder / "resnet_rm.pth", "the success classifier", f"{fetch}, or scripts.train_reward_model"),
        starts=str(starts),
        # for policies: the published transform of the world model needs none
        statistics=require(folder / "dataset_statistics.json", "statistics of its actions", fetch),
    )


def from_model_dir(
    cosmos_model_dir: str,
    num_envs: int,
    max_steps: int = MAX_STEPS,
    *,
    action_transform: str = ACTION_TRANSFORM,
    size: Sequence[int] | None = SIZE,
    history: int = 1,
    device: str | None = None,
    precision: str | None = None,
    scoring: Scoring | None = None,
    **options: Any,
) -> WorldModelEnv:
    """The environment that a folder holds. The classifier's verdict on each picture is relatively rewarded, as
    published, unless ``scoring`` is set; ``options`` are those of `WorldModelEnv`."""
    parts = find_parts(cosmos_model_dir)
    imagination = imagination_of(
        parts["weights"],
        action_transform=action_transform,
        tokenizer_path=parts["tokenizer"],
        device=device,
        precision=precision,
    )
    starts = RecordedStarts(parts["starts"], history=history, size=size)
    reward = ResnetReward(parts["reward"], rounded=True, device=str(imagination.world.device))
    scoring = scoring or Scoring(use_rel_reward=True, terminate_on_success=True)
    return WorldModelEnv(imagination, starts, reward, num_envs, max_steps, scoring=scoring, **options)
