# SPDX-License-Identifier: Apache-2.0
"""Published policies learn by reinforcement in simulators: vla_{grpo,dapo}_{policy}_{suite} in LIBERO's, and
vla_{grpo,dapo}_pi05_b1k in BEHAVIOR-1K. And tiny ones in robosuite's Lift, and in simulators of the user's.

A rank plays 16 episodes of an update, two groups of one start each; 8 ranks have the 128 episodes of the published
recipes. So many decisions pass the policy together that each episode has one among them; an OpenVLA, all of which is
trained, is sharded over the processes, and its blocks are recomputed. DAPO plays on until the groups of an update have
spread. `model.config.policy.path` are the weights. A PI0.5 draws by the flow_sde of the published recipes, or by the
method that is in its name.

In BEHAVIOR-1K a rank has one scene, and plays the 16 episodes of its groups one after the other;
`model.config.env.num_envs` is how many are played together, as far as the GPU's memory goes. Humans took about 13,000
steps of a task, and the challenge gives twice as many; here an episode ends after `BEHAVIOR_STEPS`, by which memory and
micro-batches are sized. Longer ones need max_steps of both environments, as many micro-batches more, and fewer episodes
of an update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from cosmos_predict2.configs.rl.experiment.policy_toy_world import learning, seeing_policy, starts
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv
from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episode_starts import EpisodeStarts
from imaginaire.config import L, register_experiment
from imaginaire.data.stream import ResumableLoader

NUM_TASKS = {f"libero_{suite}": 10 for suite in ("spatial", "object", "goal", "10")}
NUM_TASKS |= {"libero_90": 90, "libero_all": 130}
TRIALS = 50
GROUPS, MEMBERS = 2, 8
MAX_STEPS, WAIT = 512, 15  # of an episode of LIBERO, and before it
BEHAVIOR_STEPS = 2000  # enough for the shortest tasks
AGAIN = 8  # rollouts of an update at most, with DAPO


@dataclass(frozen=True)
class Kind:
    """A policy, and how it is trained."""

    node: Any
    chunk: int  # actions of a decision
    is_whole: bool  # all its weights are trained, so that they are sharded
    dual_clip: float | None = None


def openvla(label: str) -> Kind:
    from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy

    variant, chunk = ("oft", 8) if label == "openvla_oft" else ("autoregressive", 1)
    return Kind(L(OpenVLAPolicy)(variant=variant, path="", unnorm_key="", temperature=1.6), chunk, is_whole=True)


def pi05(noise_method: str = "flow_sde", num_numbers: int = 7) -> Kind:
    """A PI0.5 whose actions have so many numbers."""
    from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy

    sizes = dict(path="", action_chunk=10, action_env_dim=num_numbers, num_steps=5, train_expert_only=True)
    return Kind(L(Pi05Policy)(noise_method=noise_method, **sizes), 10, is_whole=False, dual_clip=3.0)


POLICIES: dict[str, Callable[[], Kind]] = {
    "openvla": partial(openvla, "openvla"),
    "openvla_oft": partial(openvla, "openvla_oft"),
    "pi05": pi05,
    "pi05_flow_cps": partial(pi05, "flow_cps"),
    "pi05_flow_noise": partial(pi05, "flow_noise"),
}


def libero(suite: str, chunk: int, **task: Any) -> Any:
    from cosmos_predict2.rl.envs.simulators.libero import LiberoTask

    return L(WorkerEnv)(
        make=L(LiberoTask)(suite=suite, **task), num_envs=MEMBERS, render="auto", chunk=chunk, _recursive_=False
    )


def in_a_simulator(
    name: str, kind: Kind, env: Any, eval_env: Any, num_tasks: int, trials: int, max_steps: int, is_dapo: bool
) -> dict[str, Any]:
    """A policy that learns in a simulator from ``trials`` starts of each task, and is judged by them."""
    num, decisions = trials * num_tasks, -(-max_steps // kind.chunk)
    again: dict[str, Any] = dict(max_rollouts=AGAIN, lower_bound=0.1, upper_bound=0.9) if is_dapo else {}
    rl = VLARLConfig(
        group_size=MEMBERS,
        **again,
        micro_batches=decisions,
        ratio_tolerance=0.1,  # bfloat16
        dual_clip=kind.dual_clip,
        loss=PolicyLossConfig(ratio_level="element", aggregation="episode-mean"),
    )
    config = VLAGRPOConfig(
        policy=kind.node,
        env=env,
        eval_env=eval_env,
        precision="bfloat16",
        fsdp_shard_size=-1 if kind.is_whole else 0,
        recompute=kind.is_whole,
        validation_draws=1,  # as published evaluations have it; more would take hours
        rl=rl,
    )
    data = (starts(num, size, shuffle=shuffle, num_tasks=num_tasks) for size, shuffle in ((GROUPS, True), (64, False)))
    how: dict[str, Any] = dict(grad_accum_iter=decisions, distributed_parallelism="fsdp" if kind.is_whole else "ddp")
    run = learning(name, config, *data, length=300, every=20, log=1, run_validation=True, **how)
    return {**run, "optimizer": dict(lr=5e-6, weight_decay=0.01)}


def in_libero(name: str, policy: str, suite: str, algorithm: str) -> dict[str, Any]:
    kind = POLICIES[policy]()
    places = (  # the second as published evaluations have it
        libero(suite, kind.chunk, max_steps=MAX_STEPS, num_steps_wait=WAIT),
        libero(suite, kind.chunk),
    )
    return in_a_simulator(name, kind, *places, NUM_TASKS[suite], TRIALS, MAX_STEPS, algorithm == "dapo")


def behavior(chunk: int) -> Any:
    from cosmos_predict2.rl.envs.simulators.behavior import BehaviorEnv

    return L(BehaviorEnv)(num_envs=1, chunk=chunk, max_steps=BEHAVIOR_STEPS)


def in_behavior(name: str, algorithm: str) -> dict[str, Any]:
    from cosmos_predict2.rl.envs.simulators.behavior import ACTION_DIM
    from cosmos_predict2.rl.envs.simulators.omnigibson import NUM_TASKS, TRIALS

    kind = pi05(num_numbers=ACTION_DIM)
    places = behavior(kind.chunk), behavior(kind.chunk)
    return in_a_simulator(name, kind, *places, NUM_TASKS, TRIALS, BEHAVIOR_STEPS, algorithm == "dapo")


EXPERIMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    **{
        f"vla_{algorithm}_{policy}_{suite}": partial(in_libero, policy=policy, suite=suite, algorithm=algorithm)
        for policy, suite, algorithm in product(POLICIES, NUM_TASKS, ("grpo", "dapo"))
    },
    **{f"vla_{algorithm}_pi05_b1k": partial(in_behavior, algorithm=algorithm) for algorithm in ("grpo", "dapo")},
}
for full_name, make in EXPERIMENTS.items():
    register_experiment(full_name, partial(make, full_name))

# --- tiny policies in robosuite's Lift, paid for how near the hand comes to the cube: four groups of 8 episodes of 48
# actions, in four workers. A clone of the toy world's expert is a policy to begin with:
#     train_policy --policy openvla_oft --action_dim 7 --knots 12 --out checkpoints/policies/tiny_openvla_oft_7

LIFT_GROUPS, MINIBATCHES = 4, 2
WORKERS, EPISODE, CHUNK = 4, 48, 12


def in_lift(name: str, label: str) -> dict[str, Any]:
    from cosmos_predict2.rl.envs.simulators.lift import LiftTask

    task = L(LiftTask)(image_size=64, max_steps=EPISODE)
    env = L(WorkerEnv)(make=task, num_envs=WORKERS, chunk=CHUNK, render="auto", _recursive_=False)
    policy = seeing_policy(label, f"checkpoints/policies/tiny_{label}_7")
    rl = VLARLConfig(group_size=MEMBERS, minibatches=MINIBATCHES)
    data = starts(100_000, LIFT_GROUPS, shuffle=True), starts(8, 8, shuffle=False)
    numbers: dict[str, Any] = dict(length=40 * MINIBATCHES, every=10 * MINIBATCHES, log=MINIBATCHES)
    return learning(name, VLAGRPOConfig(policy=policy, env=env, rl=rl), *data, **numbers)


for label in ("openvla_oft", "pi05"):
    full_name = f"tiny_vla_grpo_{label}_lift"
    register_experiment(full_name, partial(in_lift, full_name, label))

# --- a clone of a user's recordings in a simulator of the user's: vla_grpo_suite{_conv,_pi05,}

HELD_OUT, EXPERIENCES = 64, 40  # starts of a validation, the first ones; and how often 24 groups of 8 are played
LEARNT_FROM = 1_000_000  # the first start of training: none that evaluate_policy, collect and improve_policy begin with
RATES, KLS = {"conv": 2e-4}, {"conv": 0.01}  # of draws as narrow as its the same change is a larger distance


def in_suite(name: str, label: str) -> dict[str, Any]:
    """``model.config.env``, the suite's name as --suite takes it, and ``policy.path``, a clone, are to be given."""
    rl = VLARLConfig(
        group_size=MEMBERS,
        minibatches=MINIBATCHES,
        kl_beta=KLS.get(label, 0.1),
        loss=PolicyLossConfig(ratio_level="chunk"),
    )
    learnt = L(ResumableLoader)(dataset=L(EpisodeStarts)(num=100_000, first=LEARNT_FROM), batch_size=24, shuffle=True)
    data = learnt, starts(HELD_OUT, HELD_OUT, shuffle=False)
    config = VLAGRPOConfig(policy=seeing_policy(label, None), rl=rl)
    numbers: dict[str, Any] = dict(length=EXPERIENCES * MINIBATCHES, every=10 * MINIBATCHES, log=MINIBATCHES)
    numbers |= dict(rate=RATES.get(label, 3e-4), scheduler="rising")
    return learning(name, config, *data, **numbers, run_validation=True, distributed_parallelism="ddp")


for label, suffix in (("openvla_oft", ""), ("pi05", "_pi05"), ("conv", "_conv")):
    register_experiment(f"vla_grpo_suite{suffix}", partial(in_suite, f"vla_grpo_suite{suffix}", label))
