# SPDX-License-Identifier: Apache-2.0
"""A policy learns by GRPO in a world model of your recordings, without a simulator.

Every part is a path, of the programs that make it: documentations/your_robot.md shows all steps. Validation is
imagined, too, on starts that training never has. The number of starts, the length of an episode and the range of
actions are read from the file of starts; nothing is set for a robot.
"""

from functools import partial
from typing import Any

from cosmos_predict2.configs.rl.experiment.policy_toy_world import learning, seeing_policy
from cosmos_predict2.configs.rl.imagination import imagination_of, training_data_of, world_model_of
from cosmos_predict2.rl.envs.recorded_starts import RecordedStarts
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.config import PolicyLossConfig, RefinementConfig, VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episode_starts import RecordedEpisodeStarts
from cosmos_predict2.rl.objectives import OF_RECORDINGS, GroupAdvantageConfig
from cosmos_predict2.rl.rewards.resnet import ResnetReward
from imaginaire.config import PLACEHOLDER, L, register_experiment
from imaginaire.data.stream import ResumableLoader
from imaginaire.optim.muon import muon
from imaginaire.optim.schedules import lambda_linear

NAME = "vla_grpo_recordings"
# Small steps near the clone decide the sign of what is learnt: with a learning rate of 3e-4, 8 groups, 4 minibatches
# and no distance to the clone, the same world model and reward took a policy from .27 to .06 of true success.
GROUPS, MEMBERS = 24, 8
MINIBATCHES, LEARNING_RATE, KL = 2, 5e-5, 0.1
RATES, KLS, LARGEST_KL = {"conv": 1e-4}, {"conv": 0.03}, {"conv": 0.2}  # as narrow draws make a change a large distance
# Of groups whose values differ: a lever's policy had .19 and .86 of true success, then 0 and .62; behind .94 one rose.
LEAST_GROUPS = 0.1
EXPERIENCES, EVERY = 40, 10  # and those between two validations
PHASES, ROUND, STEPS = 2, 20, 150  # refinements, experiences before each and after the last, steps of one


def starts(part: str, batch_size: int) -> Any:
    data = L(RecordedEpisodeStarts)(starts="${model.config.env.starts}", part=part)
    return L(ResumableLoader)(dataset=data, batch_size=batch_size, shuffle=part == "train")


def recordings(name: str, label: str) -> dict[str, Any]:
    env = L(WorldModelEnv)(
        imagination=L(imagination_of)(dit_path="outputs/my_world_model"),
        starts=L(RecordedStarts)(  # of all tasks, in the size of the pictures that the world model was trained on
            path="outputs/my_starts", by_task=False, size="${picture_size_of:${model.config.env.imagination.dit_path}}"
        ),
        reward=L(ResnetReward)(path="outputs/my_reward/reward_model.safetensors"),
        num_envs=GROUPS * MEMBERS,
        max_steps=None,  # as long as the recordings
        scoring=Scoring(judge="last", reward_on="last"),  # the value, which survives imagination where success does not
        clip_actions="recorded",
    )
    rl = VLARLConfig(
        group_size=MEMBERS,
        minibatches=MINIBATCHES,
        kl_beta=KLS.get(label, KL),
        advantage=GroupAdvantageConfig(**OF_RECORDINGS),
        loss=PolicyLossConfig(ratio_level="chunk"),
    )
    return learning(
        name,
        VLAGRPOConfig(policy=seeing_policy(label, None), env=env, card="outputs/my_card.json", rl=rl),
        starts("train", GROUPS),
        starts("held_out", GROUPS * MEMBERS),
        length=EXPERIENCES * MINIBATCHES,
        every=EVERY * MINIBATCHES,
        log=MINIBATCHES,
        rate=RATES.get(label, LEARNING_RATE),
        scheduler="rising",
        run_validation=True,
        distributed_parallelism="ddp",
        callbacks=dict(imagination_watch=watch(LARGEST_KL.get(label, 0.06))),
    )


def watch(largest_kl: float) -> Any:
    """The callback that ends a run which leaves what its imagination can be trusted in."""
    from cosmos_predict2.rl.imagined.watch import ImaginationWatch, Limit  # optional: other experiments need none

    limits = dict(  # approx_kl and spread were measured; the others are guesses
        approx_kl=Limit(
            most=largest_kl,
            why="steps of .06 to .18 destroyed a working policy, those below .03 did not; lower optimizer.lr",
        ),
        spread=Limit(least=LEAST_GROUPS, why="nearly all that is imagined is worth the same, so nothing true is paid"),
        obedience=Limit(fall=0.5, only_warns=True, why="the world model shows less of what these actions do"),
        noise_agreement=Limit(fall=0.5, why="what is paid is the noise of the world model, not what the policy does"),
        pictures_outside=Limit(rise=0.3, why="there world model and reward have seen nothing"),
        noise_is_paid=Limit(
            most=0.2, only_warns=True, why="sampled actions succeed less than greedy ones, so the reward pays for noise"
        ),
    )
    return L(ImaginationWatch)(limits=limits, data="my_data")


def refined(name: str, label: str) -> dict[str, Any]:
    """The same with a world model that is refined twice, on what a robot does with the policy of then."""
    run = recordings(name, label)
    config, path = run["model"].config, "model.config.world_model.dit_path"
    del config.env["imagination"]  # it is given that of the world model
    config.world_model = L(world_model_of)(dit_path="outputs/my_world_model")
    config.env.starts.size = f"${{picture_size_of:${{{path}}}}}"
    # what the world model was trained on
    root, split_file, camera = (f"${{trained_on:${{{path}}},{name}}}" for name in ("root", "split_file", "camera"))
    run["trainer"]["callbacks"]["imagination_watch"].update(data=root, split=split_file, camera=camera)
    falling = dict(warm_up_steps=[0], cycle_lengths=[STEPS], f_start=[1.0], f_max=[1.0], f_min=[0.0])
    config.refinement = RefinementConfig(
        every=ROUND,
        recordings="outputs/my_robot",
        episodes=100,
        steps=STEPS,
        optimizer=L(muon)(model=PLACEHOLDER, lr=0.015, adam_lr=1e-3, precision="auto"),
        scheduler=L(lambda_linear)(**falling),
        data=L(training_data_of)(dit_path=f"${{{path}}}"),
    )
    per_round = ROUND * MINIBATCHES + STEPS
    run["trainer"].update(
        max_iter=PHASES * per_round + ROUND * MINIBATCHES,
        validation_iter=per_round,
        ddp=dict(static_graph=False),  # a step trains the policy or the world model
    )
    run["checkpoint"].update(save_iter=per_round)
    return run


def served(name: str, label: str) -> dict[str, Any]:
    """The same where a server imagines (scripts.serve_world_model), which has the recordings: none are watched here."""
    run = recordings(name, label)
    config = run["model"].config
    config.env, config.card = "wfm://127.0.0.1:8100", "${model.config.env}"
    for loader in ("dataloader_train", "dataloader_val"):
        run[loader].dataset.starts = "${model.config.env}"
    del run["trainer"]["callbacks"]
    return run


for label, suffix in (("openvla_oft", ""), ("pi05", "_pi05"), ("conv", "_conv")):
    register_experiment(f"{NAME}{suffix}", partial(recordings, f"{NAME}{suffix}", label))
    register_experiment(f"{NAME}_refined{suffix}", partial(refined, f"{NAME}_refined{suffix}", label))
    register_experiment(f"vla_grpo_served{suffix}", partial(served, f"vla_grpo_served{suffix}", label))
