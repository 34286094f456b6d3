# SPDX-License-Identifier: Apache-2.0
"""Data of runs that learn from rewards: cached latents, shards, prompts; what a reward lacks is said at the start."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.data.dataset_prompts import PromptDataset
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.mock import MockVideos
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.data.video.media import iterate_frames, write_image
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.scoring import check_data, lacks
from cosmos_predict2.rl.config import KEY, RewardConfig, RLConfig
from cosmos_predict2.rl.rewards.verifiable import Agreement, LatentAgreement, Smoothness
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tools.prepare.latent_cache import cache_latents
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from imaginaire.config import L
from imaginaire.errors import DataError
from imaginaire.findings import CheckContext
from tests.rl.runs import RL, rl_options, run

EXPERIMENT = "tiny_flow_grpo_toy_world"
TEXT = (
    "model.config.text.encoder={_target_: cosmos_predict2.text.bytes_encoder.BytesEncoder, num_tokens: 64, width: 64}"
)
SMOOTH = [
    *(f"{RL}.rewards.{name}=null" for name in ("agreement", "positions", "background")),
    f"+{RL}.rewards.smooth={{make: {{_target_: cosmos_predict2.rl.rewards.verifiable.Smoothness}}}}",
]
DATA = "dataloader_train.dataset"
BYTES = [f"{DATA}.text_encoder=bytes", f"{DATA}.num_tokens=64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pushes as clips with embeddings, their latents, a shard, prompts, and first frames with prompts."""
    root = tmp_path_factory.mktemp("toy")
    settings = ToyFolder(episodes=4, frames=17, mix="full_skill", val_fraction=0, text_encoder="bytes", num_tokens=64,
                         text_width=64)  # fmt: skip
    write_folder(str(root), settings)
    data = root / "train"
    cache_latents(data, TinyTokenizer(), num_frames=13, size=(48, 48))
    with tarfile.open(root / "0.tar", "w") as archive:
        for path in sorted((*data.glob("videos/*.mp4"), *data.glob("metas/*.txt"), *data.glob("t5_xxl/*.pickle"))):
            archive.add(path, path.name)
    lines = []
    for path in sorted(data.glob("videos/*.mp4")):
        write_image(root / f"{path.stem}.png", next(iter(iterate_frames(path))))
        lines.append({"prompt": (data / f"metas/{path.stem}.txt").read_text(), "image": f"{path.stem}.png"})
    (root / "frames.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (root / "prompts.txt").write_text("\n".join(line["prompt"] for line in lines))
    return root


def _options(name: str, folder: Path) -> list[str]:
    no_frames = [f"{RL}.{which}_num_conditional_frames=0" for which in ("min", "max")]
    return {
        "latents": ["data_train=latents", f"{DATA}.dataset_dir={folder}/train", *BYTES],
        "shards": ["data_train=shards", f"{DATA}.shards=[{folder}/0.tar]", f"{DATA}.index_dir={folder}/index", *BYTES],
        "prompts": ["data_train=prompts", f"{DATA}.path={folder}/prompts.txt", TEXT, *SMOOTH, *no_frames],
        "frames": ["data_train=prompts", f"{DATA}.path={folder}/frames.jsonl", TEXT, *SMOOTH],
    }[name] + ["dataloader_train.num_workers=0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latents", "shards", "prompts", "frames"])
def test_runs_learn_from_other_data(name: str, folder: Path, tmp_path: Path) -> None:
    options = [item for item in rl_options() if "num_episodes" not in item]
    record = run(tmp_path, *options, *_options(name, folder))[0]
    reward = "smooth" if name in ("prompts", "frames") else "background"
    assert record["train/log_prob_ratio"] == 1 and record[f"train/{reward}_valid_rate"] == 1
    assert record[f"train/{reward}_std"] > 0 and record["train/grad_norm"] > 0


def test_prompts_without_true_clips_stop_a_run_that_compares(folder: Path, tmp_path: Path) -> None:
    options = [item for item in rl_options() if "num_episodes" not in item] + _options("prompts", folder)
    with pytest.raises(DataError, match="supervised loss compares"):
        run(tmp_path, *options, f"{RL}.data_beta=0.1")


def _context(**data: Any) -> CheckContext:
    return CheckContext("model", training={"dataloader_train.dataset": data})


def test_a_reward_and_the_data_that_it_cannot_be_used_with_are_named(folder: Path) -> None:
    makes = {"agreement": L(Agreement)(), "latents": L(LatentAgreement)(), "smooth": L(Smoothness)()}
    rl = RLConfig(rewards={name: RewardConfig(make=make) for name, make in makes.items()})
    clips, path = dict(_target_=Dataset, dataset_dir="x"), f"{folder}/frames.jsonl"
    assert not list(check_data(rl, _context(**clips)))
    prompts = _context(_target_=PromptDataset, path=path)
    found = list(check_data(rl, prompts))
    assert [finding.key for finding in found] == [f"{KEY}.rewards.agreement", f"{KEY}.rewards.latents"]
    assert all("PromptDataset (dataloader_train.dataset)" in finding.text for finding in found)
    (finding,) = check_data(RLConfig(rewards={}, max_num_conditional_frames=2), prompts)
    assert finding.key == f"{KEY}.max_num_conditional_frames"


def test_a_deadline_that_ranks_and_watchdog_do_not_wait_for_is_refused() -> None:
    rl = RLConfig(rewards={"smooth": RewardConfig(make=L(Smoothness)(), deadline=1800.0)})
    (finding,) = check_data(rl, _context())
    assert finding.key == f"{KEY}.rewards.smooth.deadline"


def test_which_data_are_known_to_have_no_actions() -> None:
    mock = dict(_target_=MockVideos)
    assert lacks(dict(_target_=Dataset), "actions") and lacks(mock, "actions")
    assert not lacks({**mock, "action_shape": [12, 7]}, "actions") and not lacks(dict(_target_=dict), "actions")
    assert not lacks(dict(_target_=ToyWorldVideos), "actions")
    config = dict(rl=RLConfig(rewards={}, data_beta=1.0))
    context = CheckContext("model", training={"a": mock}, validation={"b": mock})
    assert set(FlowGRPOModel.compared_data(config, context)) == {"a", "b"}
    assert set(FlowGRPOModel.compared_data(dict(rl=RLConfig(rewards={})), context)) == {"b"}
