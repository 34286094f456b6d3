# SPDX-License-Identifier: Apache-2.0
"""A policy of the toy world learns by GRPO on a laptop: in its simulator, and in what the tiny world model imagines.

24 groups of 8 episodes of two decisions; the policy was cloned from 20 demonstrations. Its reward is how near the puck
ends to the goal, as the last picture shows it. Success is measured in the simulator, on starts that training never
sees. In imagination the world model is refined, too, on what the policy really does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from cosmos_predict2.configs.action_conditioned.defaults.model import predict2
from cosmos_predict2.configs.action_conditioned.experiment.toy import NET
from cosmos_predict2.configs.base.post_training import job
from cosmos_predict2.configs.rl.defaults.model import with_actions
from cosmos_predict2.data.toy.latents import ToyWorldLatents
from cosmos_predict2.released import TINY_ACTION, TINY_POLICY
from cosmos_predict2.rl.config import RewardConfig, RLConfig
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.config import PolicyLossConfig, RefinementConfig, VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.draw_episodes import DrawEpisodes
from cosmos_predict2.rl.episodes.episode_starts import EpisodeStarts
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.episodes.imagination_gap import ImaginationGap
from cosmos_predict2.rl.objectives import GroupAdvantageConfig
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.rl.rewards.verifiable import Agreement
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from imaginaire.config import PLACEHOLDER, L, register_experiment
from imaginaire.data.stream import ResumableLoader
from imaginaire.optim.adamw import adamw
from imaginaire.optim.muon import muon
from imaginaire.optim.schedules import lambda_linear

GROUPS, MEMBERS = 24, 8
UPDATES, MINIBATCHES = 4, 4
HELD_OUT = 200  # starts of a validation batch
SHOWN = 4  # of them, as videos
EPISODE = 24  # actions
PHASES, EVERY = 14, 6
NFT: dict[str, Any] = dict(
    objective="nft",
    transition="ode",
    sample_steps=4,
    num_timesteps=1,
    nft_beta=0.1,
    use_same_forward_noise=True,
    num_rollout=4,
    rollout_batch=64,
    data_beta=10.0,
    rewards=dict(agreement=RewardConfig(make=L(Agreement)())),
)
MUON = L(muon)(model=PLACEHOLDER, lr=0.015, adam_lr=1e-3, precision="auto")
ADAMW = L(adamw)(model=PLACEHOLDER, lr=2e-4, weight_decay=0.0)


def starts(num: int, batch_size: int, *, shuffle: bool, num_tasks: int | None = None) -> Any:
    data = L(EpisodeStarts)(num=num, num_tasks=num_tasks)
    return L(ResumableLoader)(dataset=data, batch_size=batch_size, shuffle=shuffle)


def learning(
    name: str,
    config: VLAGRPOConfig,
    train: Any,
    val: Any,
    *,
    length: int,
    every: int,
    log: int,
    rate: float = 3e-4,
    scheduler: str = "constant",
    **trainer: Any,
) -> dict[str, Any]:
    """The run of a policy, for ``length`` iterations, which are validated and saved after ``every`` of them."""
    return dict(
        defaults=[{"override /optimizer": "adamw"}, {"override /scheduler": scheduler}, "_self_"],
        job=job(name, group="reinforcement_learning"),
        model=L(VLAGRPOModel)(config=config, _recursive_=False),
        dataloader_train=train,
        dataloader_val=val,
        optimizer=dict(lr=rate, weight_decay=0.0, betas=[0.9, 0.999]),
        trainer=dict(max_iter=length, logging_iter=log, validation_iter=every, **trainer),
        checkpoint=dict(save_iter=every),
    )


def seeing_policy(label: str, path: str | None = "") -> Any:
    """A policy that sees pictures, of a folder of scripts.train_policy or a clone (None: to be given by a user); its
    class is imported here."""
    if label == "conv":
        from cosmos_predict2.rl.policies.conv import ConvPolicy

        return L(ConvPolicy)(path=path)
    path = f"checkpoints/policies/tiny_{label}" if path == "" else path
    if label == "pi05":
        from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy

        return L(Pi05Policy)(path=path, noise_method="flow_sde")
    from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy

    return L(OpenVLAPolicy)(path=path)


def world_model(node: Any) -> Any:
    """The shipped world model, as it was trained."""
    pipe = node.config.pipe_config
    pipe.net.update(NET)
    pipe.video_noise_factor = 25.0
    pipe.timestamps.nfe, pipe.timestamps.t_min = 1, 10.0
    node.config.precision = "bfloat16"
    node.config.model_manager_config.dit_path = TINY_ACTION
    return node


def supervised() -> Any:
    return world_model(predict2("tiny", "chunk")["model"])


def imagined(model: Any) -> dict[str, Any]:
    """The world model in place of the simulator, judged by the last picture of an episode."""
    return dict(
        world_model=model,
        env=L(WorldModelEnv)(
            starts=L(ToyStarts)(),
            reward=L(ToyDetectorReward)(),
            num_envs=GROUPS * MEMBERS,
            max_steps=EPISODE,
            scoring=Scoring(judge="last", reward_on="last"),
        ),
        true_env=L(ToyEnv)(num_envs=HELD_OUT, keep_frames=True, ring_elsewhere=0.75),
    )


def refinement(steps: int, optimizer: Any) -> RefinementConfig:
    """Training on true episodes of the policy, beside windows that the world model was trained on before."""
    falling = dict(warm_up_steps=[0], cycle_lengths=[steps], f_start=[1.0], f_max=[1.0], f_min=[0.0])
    old = dict(mix="mixed", captions=False, num_tokens=1, seed=0, split="train", least_travel=1.0)
    return RefinementConfig(
        every=EVERY,
        episodes=600,
        temperatures=[0.25, 0.75, 1.25, 1.75],
        steps=steps,
        newest=8,
        earlier=5,
        old=3,
        optimizer=optimizer,
        scheduler=L(lambda_linear)(**falling),
        data=L(ToyWorldLatents)(tokenizer=L(TinyTokenizer)(), num_episodes=1200, **old),
    )


def tiny(name: str, experiences: int, every: int, updates: int = UPDATES, **config: Any) -> dict[str, Any]:
    """A run of so many experiences of the policy, validated and saved after ``every`` of them."""
    refined, steps = config.get("refinement"), updates * MINIBATCHES
    per_check = every * steps + (0 if refined is None else every // refined.every * refined.steps)
    rl = VLARLConfig(
        group_size=MEMBERS,
        updates=updates,
        minibatches=MINIBATCHES,
        advantage=GroupAdvantageConfig(epsilon=0.05, correction=1),
        loss=PolicyLossConfig(ratio_level="chunk"),
    )
    eval_env = L(ToyEnv)(num_envs=HELD_OUT, split="val")
    config = {"compare": 50, "policy": L(ToyPolicy)(path=TINY_POLICY), **config}
    return learning(
        name,
        VLAGRPOConfig(eval_env=eval_env, rl=rl, **config),
        starts(100_000, GROUPS, shuffle=True),
        starts(4 * HELD_OUT, HELD_OUT, shuffle=False),
        length=experiences // every * per_check,
        every=per_check,
        log=steps,
        run_validation=True,
        distributed_parallelism="ddp",
        ddp=dict(static_graph=False),  # a step trains the policy or the world model
        callbacks=WATCH if "world_model" in config else {},
    )


WATCH = dict(
    imagination_gap=L(ImaginationGap)(limit=0.4),
    draw_episodes=L(DrawEpisodes)(true_env=L(ToyEnv)(num_envs=SHOWN), num_episodes=SHOWN),
)


def simulated(name: str) -> dict[str, Any]:
    return tiny(name, 200, 50, env=L(ToyEnv)(num_envs=GROUPS * MEMBERS))


def refined(name: str) -> dict[str, Any]:
    return tiny(name, PHASES * EVERY, EVERY, **imagined(supervised()), refinement=refinement(150, MUON))


def refined_by_nft(name: str) -> dict[str, Any]:
    """Refined by NFT, with a data term: clips are compared with what the policy's actions truly led to."""
    node = world_model(with_actions("tiny")["model"])
    node.config.rl = RLConfig(**NFT)
    return tiny(name, PHASES * EVERY, EVERY, **imagined(node), refinement=refinement(30, ADAMW))


def frozen(name: str) -> dict[str, Any]:
    """The same world model throughout: the policy learns to exploit it."""
    return tiny(name, 60, 10, **imagined(supervised()))


def seeing_simulated(label: str, experiences: int, name: str) -> dict[str, Any]:
    """A run in the simulator with one update a rollout, since an update of such a policy costs more than a rollout."""
    env = L(ToyEnv)(num_envs=GROUPS * MEMBERS)
    return tiny(name, experiences, 20, updates=1, policy=seeing_policy(label), env=env)


def seeing_imagined(label: str, name: str) -> dict[str, Any]:
    learning = dict(**imagined(supervised()), refinement=refinement(150, MUON))
    return tiny(name, 10 * EVERY, EVERY, updates=1, policy=seeing_policy(label), **learning)


EXPERIMENTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "tiny_vla_grpo_simulator": simulated,
    "tiny_vla_grpo_world_model": refined,
    "tiny_vla_grpo_world_model_nft": refined_by_nft,
    "tiny_vla_grpo_world_model_frozen": frozen,
    "tiny_vla_grpo_openvla_oft_simulator": partial(seeing_simulated, "openvla_oft", 60),
    "tiny_vla_grpo_openvla_oft_world_model": partial(seeing_imagined, "openvla_oft"),
    "tiny_vla_grpo_pi05_simulator": partial(seeing_simulated, "pi05", 240),
    "tiny_vla_grpo_pi05_world_model": partial(seeing_imagined, "pi05"),
}
for name, build in EXPERIMENTS.items():
    register_experiment(name, partial(build, name))
