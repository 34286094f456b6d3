# SPDX-License-Identifier: Apache-2.0
"""Runs that learn from rewards: exact ratios, exact resumption, the same on any number of processes."""

import itertools
import json
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosmos_predict2.data.dataset_prompts import PromptDataset
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.mock import MockVideos
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.data.video.media import iterate_frames, write_image
from cosmos_predict2.released import TINY_VIDEO2WORLD
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.scoring import check_data, lacks
from cosmos_predict2.rl.config import KEY, RewardConfig, RLConfig
from cosmos_predict2.rl.interfaces import Scores
from cosmos_predict2.rl.rewards import verifiable
from cosmos_predict2.rl.rewards.local import LocalReward
from cosmos_predict2.rl.rewards.verifiable import Agreement, LatentAgreement, Smoothness
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tools.plan.workload import read_workload
from cosmos_predict2.tools.prepare.latent_cache import cache_latents
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from imaginaire import distributed
from imaginaire.config import L
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError, DataError, TrainingError
from imaginaire.findings import CheckContext
from tests.multiprocess import run_distributed
from tests.rl.runs import CONFIG, LORA, NAME, RL, rl_options, run
from tests.training import difference, rewind, run_dir, saved, states, steps, train

FLOW_GRPO, DDRL, NFT = "tiny_flow_grpo_toy_world", "tiny_ddrl_toy_world", "tiny_nft_toy_world"
TWICE = [f"{RL}.updates=2", f"{RL}.minibatches=2", "trainer.grad_accum_iter=2"]  # four updates of one experience
PREDICT2P5 = [
    "model=predict2p5_video2world_rl_tiny",
    "model.config.pipe_config.state_t=4",
    "model.config.precision=bfloat16",
    "optimizer=fusedadamw",
]
FLOAT16 = [  # the states of the tiny base are too large for it
    "model.config.precision=float16",
    "trainer.grad_scaler_args.enabled=true",
    "model.config.model_manager_config.dit_path=",
]
OFFLOAD = f"{RL}.offload_trajectories=true"

VARIANTS: dict[str, list[str]] = {
    "grpo": rl_options(),
    "twice": rl_options(FLOW_GRPO, *TWICE),
    "reference": rl_options(FLOW_GRPO, f"{RL}.kl_beta=0.1", f"{RL}.update_ref_every_iter=1", OFFLOAD),
    "dapo": rl_options(FLOW_GRPO, *TWICE, f"{RL}.clip_ratio_high=2e-3", f"{RL}.dual_clip=3", f"{RL}.max_rollouts=2"),
    "adapters": rl_options(FLOW_GRPO, *LORA, f"{RL}.kl_beta=0.1", f"{RL}.objective=dppo"),
    "ddrl": rl_options(DDRL, f"{RL}.use_rl_sigma_and_noise=false", f"{RL}.exp_reward=true"),
    "churn": rl_options(DDRL, f"{RL}.transition=churn", f"{RL}.ratio_normalisation=cosmos_rl"),
    "window": rl_options(FLOW_GRPO, f"{RL}.transition=cps", f"{RL}.noise_on_trained_steps_only=true"),
    "guided": rl_options(FLOW_GRPO, f"{RL}.guidance=1.5", f"{RL}.objective=guard", f"{RL}.transition=dance"),
    "nft": rl_options(NFT, f"{RL}.weight_copy_decay_type=1", f"{RL}.kl_beta=0.1", *LORA),
    "awm": rl_options(NFT, f"{RL}.objective=awm", *TWICE),
    "predict2p5": rl_options(FLOW_GRPO, *PREDICT2P5),
    "float16": rl_options(DDRL, *FLOAT16, f"{RL}.kl_beta=0.1"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "twice" else pytest.mark.long) for name in VARIANTS]
)
def test_every_variant_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    """With several updates of an experience, saves wait for its end and later updates move the ratio."""
    options, whole, parts = [*VARIANTS[name], "optimizer.lr=1e-3"], tmp_path / "whole", tmp_path / "parts"
    each = 4 if set(TWICE) <= set(options) else 2
    options += [f"trainer.max_iter={2 * each}", f"checkpoint.save_iter={each - 1}"]
    records = run(whole, *options)
    models = run_dir(whole, NAME) / "checkpoints/model"
    wanted = [4, 8] if each == 4 else [1, 2, 3, 4]
    assert sorted(path.name for path in models.iterdir()) == [f"iter_{i:09d}.pt" for i in wanted]
    rewind(run_dir(whole, NAME), run_dir(parts, NAME), each)
    assert run(parts, *options)
    assert difference(saved(whole, NAME), saved(parts, NAME)) is None
    assert records[0]["train/agreement_valid_rate"] == 1
    if "train/log_prob_ratio" in records[0]:
        assert (records[0]["train/log_prob_ratio"], records[0]["train/ratio_std"]) == (1.0, 0.0)
        assert each == 2 or records[each - 1]["train/ratio_std"] > 0


def test_states_that_float16_cannot_hold_end_the_run_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="bfloat16"):
        train(tmp_path, [*rl_options(), *FLOAT16[:2]], config=CONFIG)


def _spread(root: Path, ranks: dict[int, list[int]], *options: str) -> list[bool]:
    """For each iteration but the first: did it change the weights, where the groups of a rollout have spread on these
    ranks alone."""
    score, number = FlowGRPOModel._score, itertools.count()

    def patched(self: FlowGRPOModel, tickets: Any) -> Any:
        advantage, teaches, facts = score(self, tickets)
        advantage[:, ::2], advantage[:, 1::2] = 1.0, -1.0
        if distributed.rank() not in ranks.get(next(number), [0, 1]):
            advantage = torch.zeros_like(advantage)
        return advantage, teaches, facts

    with mock.patch.object(FlowGRPOModel, "_score", patched), states() as found:
        run(root, *options, "trainer.max_iter=3")
    return steps(found)


def test_an_update_without_spread_leaves_weights_and_moments(tmp_path: Path) -> None:
    assert _spread(tmp_path, {1: []}, *rl_options()) == [False, True]


@pytest.mark.slow
def test_all_ranks_take_a_step_where_one_has_spread_and_none_where_none_has(tmp_path: Path) -> None:
    args = (tmp_path, {1: [1], 2: []}, *rl_options(FLOW_GRPO, "dataloader_train.batch_size=2"))
    assert run_distributed(_spread, world_size=2, args=args, timeout=900) == [[True, False]] * 2


Trained = tuple[dict[str, Tensor], dict[str, Any]]


def _trained(root: str, layouts: dict[str, list[str]]) -> dict[str, Trained]:
    """Weights and the first record of a run of each layout."""
    found = {}
    for layout, options in layouts.items():
        records = run(Path(root) / layout, *options)
        found[layout] = (saved(Path(root) / layout, NAME)["model"], records[0])
    return found


LAYOUTS = {
    "whole groups": ["dataloader_train.batch_size=1", "model.config.fsdp_shard_size=2"],
    "shared groups": [f"{RL}.ranks_per_group=2"],
    "context parallel": ["model_parallel.context_parallel_size=2", f"{RL}.rollout_batch=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", pytest.param("nft", marks=pytest.mark.long)])
def test_one_process_and_all_layouts_of_two_agree(name: str, tmp_path: Path) -> None:
    """Two ranks have a group each and half of the weights, half of both groups each, or a part of each clip."""
    options = [item for item in VARIANTS[name] if item not in LORA]
    options += [f"{RL}.kl_beta=0.1", f"{RL}.advantage.norm=global", "trainer.grad_accum_iter=2"]
    options += ["trainer.max_iter=1", "checkpoint.save_iter=1"]
    alone, record = _trained(str(tmp_path), {"one": [*options, f"{RL}.rollout_batch=4"]})["one"]
    base = load_file(TINY_VIDEO2WORLD)
    layouts = {layout: [*options, *more] for layout, more in LAYOUTS.items()}
    for layout, (weights, other) in run_distributed(_trained, 2, (str(tmp_path), layouts))[0].items():
        for key in ("train/reward_mean", "train/agreement", "train/positions", "train/advantage_abs"):
            assert other[key] == pytest.approx(record[key], rel=1e-4), (layout, key)
        assert _distance(alone, weights) < 0.02 * _distance(alone, base), layout


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Distance of the trained weights; Adam's first steps are as long where gradients are next to nothing."""
    keys = [key for key in a if key in b and a[key].is_floating_point() and key.startswith("net.")]
    assert keys
    return float(torch.stack([(a[key].double() - b[key].double()).square().sum() for key in keys]).sum().sqrt())


WRONG = {  # of options, of what fits the run, of a value, and a key that is none
    f"{RL}.transition=ode": "transition",
    f"{RL}.minibatches=3": "minibatches",
    f"{RL}.objective=ppo": "objective",
    f"{RL}.learning=1": "learning",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_does_not_fit_together_is_refused_by_its_key(override: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=WRONG[override]):
        train(tmp_path, rl_options(FLOW_GRPO, override), config=CONFIG)


def test_rewards_compare_with_the_part_of_the_clip_that_was_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips that are longer than the model's are cut once, for conditions and rewards alike."""
    found = []

    def score(self: Any, clips: Any, context: Any) -> Any:
        found.append((clips.video_B_C_F_H_W, context["true_video"]))
        return original(self, clips, context)

    original = verifiable.Agreement.__call__
    monkeypatch.setattr(verifiable.Agreement, "__call__", score)
    records = run(tmp_path, *rl_options(FLOW_GRPO, "trainer.max_iter=1", "model.config.pipe_config.state_t=3"))
    video, true = found[0]
    assert video.shape == true.shape
    assert (video[:, :, 0].float() - true[:, :, 0].float()).abs().mean() < 8  # the conditioning frame
    assert records[0]["train/agreement_valid_rate"] == 1


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
@pytest.mark.parametrize("name", [pytest.param("latents", marks=pytest.mark.long), "shards", "prompts", "frames"])
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


CASES = {
    "churn, reference, data, guidance": (
        "tiny_ddrl_toy_world",
        [f"{RL}.transition=churn", f"{RL}.kl_beta=0.1", f"{RL}.guidance=1.5"],
    ),
    "nft": ("tiny_nft_toy_world", [f"{RL}.weight_copy_decay_type=1", f"{RL}.kl_beta=0.1"]),
    "flow model, twice, data once": (
        "tiny_ddrl_toy_world",
        [
            "model=predict2p5_video2world_rl_tiny",
            "model.config.pipe_config.state_t=4",
            f"{RL}.updates=2",
            f"{RL}.minibatches=2",
            "trainer.grad_accum_iter=2",
            "trainer.max_iter=4",
            f"{RL}.data_on_first_only=true",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_counts_the_passes_of_a_real_iteration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that all passes without a gradient come before rewards are fetched."""
    clips = {False: 0, True: 0}  # by whether there is a gradient
    at_fetch: list[dict[bool, int]] = []
    parallelize, fetch = FlowGRPOModel.parallelize, LocalReward.fetch

    def count(net: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = arguments[0] if arguments else keywords["x_B_C_T_H_W"]
        clips[torch.is_grad_enabled()] += len(x)

    def counted(self: FlowGRPOModel, dims: Any) -> None:
        parallelize(self, dims)
        self.net.register_forward_pre_hook(count, with_kwargs=True)

    def fetched(self: LocalReward, *arguments: Any) -> Scores:
        at_fetch.append(dict(clips))
        return fetch(self, *arguments)

    monkeypatch.setattr(FlowGRPOModel, "parallelize", counted)
    monkeypatch.setattr(LocalReward, "fetch", fetched)
    experiment, more = CASES[name]
    options = rl_options(experiment, *more)
    config = compose(CONFIG, options)
    passes = read_workload(config, 1).passes
    assert passes is not None
    options = [*options, f"trainer.max_iter={passes.updates}", f"checkpoint.save_iter={passes.updates}"]
    run(tmp_path, *options)
    assert clips[False] == passes.without_gradient * passes.clips == at_fetch[0][False]
    assert clips[True] == passes.with_gradient * passes.clips
    assert at_fetch[0][True] == 0
