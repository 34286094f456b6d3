# SPDX-License-Identifier: Apache-2.0
"""Short runs of a policy that learns from rewards in the toy world's simulator; and one without a trainer."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.second_camera import CameraPolicy
from cosmos_predict2.configs.base.config import make_config as base
from cosmos_predict2.configs.rl.experiment import policy_recordings, policy_toy_world
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episode_starts import EpisodeStarts
from cosmos_predict2.rl.episodes.episodes import Starts, Trajectories
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.interfaces import FrameRewardDefaults, Judgement
from cosmos_predict2.rl.learner import Experience
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.config import L, register_experiment
from imaginaire.data.stream import ResumableLoader
from tests.training import records, run_dir, train

NAME = "vla"
POLICIES = "cosmos_predict2.rl.policies"
RL = "model.config.rl"


def experiment(policy: Any) -> dict[str, Any]:
    """Four groups of four episodes, two updates in two minibatches."""
    data = L(ResumableLoader)(dataset=L(EpisodeStarts)(num=64), batch_size=4, shuffle=True)
    rl = VLARLConfig(group_size=4, updates=2, minibatches=2, kl_beta=0.01)
    config = VLAGRPOConfig(policy=policy, env=L(ToyEnv)(num_envs=8), rl=rl)
    return dict(
        defaults=[{"override /optimizer": "adamw"}, {"override /scheduler": "constant"}, "_self_"],
        job=dict(project="tests", group="engine", name=NAME),
        model=L(VLAGRPOModel)(config=config, _recursive_=False),
        dataloader_train=data,
        dataloader_val=L(ResumableLoader)(dataset=L(EpisodeStarts)(num=8), batch_size=8, shuffle=False),
        optimizer=dict(lr=1e-3),
        trainer=dict(max_iter=8, logging_iter=1, distributed_parallelism="ddp"),
        checkpoint=dict(save_iter=100),
    )


SMALL = [  # of tiny_vla_grpo_world_model: two groups of two, a refinement of two steps before every experience
    *("job.project=tests", "job.group=engine", f"job.name={NAME}"),
    *("model.config.env.num_envs=4", "model.config.true_env.num_envs=4", "model.config.compare=2"),
    *(f"{RL}.group_size=2", f"{RL}.updates=1", f"{RL}.minibatches=2"),
    *(f"model.config.refinement.{word}" for word in ("every=1", "episodes=4", "steps=2", "keep=8", "newest=1")),
    *(f"model.config.refinement.{word}" for word in ("earlier=1", "old=1", "data.num_episodes=2")),
    *("dataloader_train.batch_size=2", "dataloader_val.batch_size=2", "dataloader_val.dataset.num=2"),
    *("trainer.logging_iter=1", "trainer.run_validation=false", "checkpoint.save_iter=100"),
    *(f"trainer.callbacks.{name}=null" for name in ("imagination_gap", "draw_episodes")),
]
IMAGINED = "tiny_vla_grpo_world_model"


class Brightness(FrameRewardDefaults):
    """The brighter the better, from 0 to 1, and success above a threshold; ``shown`` are the pictures of each call."""

    def __init__(self, threshold: float = 100 / 255) -> None:
        self.threshold, self.shown, self.place = threshold, list[Tensor](), None

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        self.shown.append(frames_E_F_H_W_C)
        value_E_F = frames_E_F_H_W_C.float().mean(dim=(2, 3, 4)) / 255
        return Judgement(value_E_F, value_E_F > self.threshold)

    def to(self, device: Any) -> None:
        self.place = device


def of_recordings() -> dict[str, Any]:
    """The small world model, refined by what lies in a folder; its reward needs nothing but pictures."""
    found = policy_toy_world.refined("of_recordings")
    found["model"].config.env.reward = L(Brightness)()
    return found


def of_views() -> dict[str, Any]:
    """A world model of several cameras, of a path, refined after each experience."""
    found = policy_recordings.refined("of_views", "pi05")
    found["job"] = dict(project="tests", group="engine", name=NAME)
    config = found["model"].config
    config.policy = L(CameraPolicy)()
    config.env.update(reward=L(Brightness)(), num_envs=4)
    config.refinement.scheduler = None
    found["trainer"]["callbacks"] = {}
    return found


EXPERIMENTS = {  # the same functions at each composition
    "toy_policy": lambda: experiment(L(ToyPolicy)(width=16, noise=1.0)),
    "pi05_policy": lambda: experiment(L(f"{POLICIES}.pi05.policy.Pi05Policy")(path="")),
    "openvla_policy": lambda: experiment(L(f"{POLICIES}.openvla.policy.OpenVLAPolicy")(path="")),
    "of_recordings": of_recordings,
    "of_views": of_views,
}


def make_config() -> Any:
    config = base()
    for name, build in EXPERIMENTS.items():
        register_experiment(name, build)
    return config


def run(root: Path, *options: str, name: str = "toy_policy") -> list[dict[str, Any]]:
    """Train; the records of its metrics."""
    assert train(root, [f"experiment={name}", *options], config="tests/rl/vla_runs.py") == 0
    return records(run_dir(root, NAME))


# --- without a trainer


def starts(num: int) -> Starts:
    return Starts([0] * num, list(range(num)), list(range(num)), list(range(num)))


def ended(played: Trajectories, success: str, valid: str) -> Trajectories:
    """With these outcomes, a figure of 0 or 1 for each of the episodes."""
    success_E, valid_E = (torch.tensor([figure == "1" for figure in text]) for text in (success, valid))
    return replace(played, success_E=success_E, is_valid_E=valid_E)


def tensors_of(played: Trajectories) -> dict[str, Tensor]:
    return {**played.record, **{name: value for name, value in vars(played).items() if isinstance(value, Tensor)}}


def model(policy: Any = None, **rl: Any) -> VLAGRPOModel:
    """It learns from groups of four episodes."""
    torch.manual_seed(0)
    policy = L(ToyPolicy)(width=16, noise=1.0) if policy is None else policy
    return VLAGRPOModel(VLAGRPOConfig(policy=policy, env=L(ToyEnv)(num_envs=8), rl=VLARLConfig(group_size=4, **rl)))


def batch(first: int = 0, size: int = 3) -> dict[str, Tensor]:
    return {"task_id": torch.zeros(size, dtype=torch.long), "trial_id": torch.arange(first, first + size)}


def collected(**rl: Any) -> tuple[VLAGRPOModel, Trajectories]:
    """A model, and twelve episodes of two decisions each that it played, in three groups."""
    one = model(**rl)
    return one, one.source.collect(one.starts(batch()))


def experience(one: VLAGRPOModel, played: Trajectories, advantage: Tensor | None = None) -> list[Any]:
    """The micro-batches of these episodes."""
    advantage = one._advantages(played, one.starts(batch())) if advantage is None else advantage
    found = Experience(played, advantage, advantage.any(dim=1), {"reward_mean": 1.0})
    return list(one.minibatches(found, batch())[1])
