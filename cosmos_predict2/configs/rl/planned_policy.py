# SPDX-License-Identifier: Apache-2.0
"""The load of a policy's experiment on each GPU, read off its configuration."""

import logging
from dataclasses import asdict
from typing import Any

from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.tools.plan.policy_runs import SIZES, VIEWS, EmbodiedRun, SimulatedRun
from cosmos_predict2.tools.plan.workload import optimizer_of
from cosmos_predict2.world_model.config import PRECISIONS
from cosmos_predict2.world_model.options import UNGUIDED
from imaginaire.buildable import describe, path_of, target_of
from imaginaire.config.nodes import as_config
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError
from imaginaire.training.model import weight_dtype

log = logging.getLogger(__name__)

# By path: a plan imports no other policy or simulator than that of its run.
OPENVLA = "cosmos_predict2.rl.policies.openvla.policy:OpenVLAPolicy"
PI05 = "cosmos_predict2.rl.policies.pi05.policy:Pi05Policy"
LIBERO = "cosmos_predict2.rl.envs.simulators.libero:LiberoTask"
BEHAVIOR = "cosmos_predict2.rl.envs.simulators.behavior:BehaviorEnv"
IMAGINED_CHUNK, IMAGINED_SIZE = 12, (256, 320)  # of the published world model of LIBERO, the default
RECORDED_STEPS = 240  # of an episode that is as long as recordings, which are not read here; as RLinf's of LIBERO


def is_policy_run(config: Config) -> bool:
    """True for a configuration that trains a policy, and not a world model."""
    target = None if config.model is None else target_of(config.model, "model")
    return isinstance(target, type) and issubclass(target, VLAGRPOModel)


def read_policy_run(config: Config, num_gpus: int) -> SimulatedRun | EmbodiedRun | None:
    """The run of an experiment; None of a tiny policy of the toy world or of Lift, which fits everywhere."""
    model: VLAGRPOConfig = as_config(VLAGRPOConfig, config.model.config, "model.config")
    env, rl = model.env, model.rl
    place, policy = target_of(env, "model.config.env"), _policy(model)
    task = target_of(env.make, "model.config.env.make") if "make" in env else None
    is_toy = place is WorldModelEnv and target_of(env.starts, "model.config.env.starts") is ToyStarts
    is_behavior = path_of(place) == BEHAVIOR
    if policy is None or is_toy or not (place is WorldModelEnv or is_behavior or path_of(task) == LIBERO):
        return None
    episodes = config.dataloader_train.batch_size * rl.group_size
    views = int(model.policy.get("num_images_in_input") or model.policy.get("num_images") or 1)
    each, (kind, has_master) = weight_dtype(PRECISIONS[model.precision]).itemsize, optimizer_of(config.optimizer)
    kept = 2 * each if kind == "adamw" else 8 + 4 * (has_master and each < 4)
    precision: dict[str, Any] = dict(bytes_each=each, optimizer_bytes=kept, accumulates=rl.micro_batches > 1)
    if place is WorldModelEnv:
        given = env.get("sampling")
        sampling = asdict(ONE_EVALUATION) if given is None else {**asdict(UNGUIDED), **given}
        chunk = int(env.get("chunk") or (env.get("imagination") or {}).get("chunk_size") or IMAGINED_CHUNK)
        executed = int(rl.execute or model.policy.get("action_chunk") or chunk)
        decisions = -(-int(env.max_steps or RECORDED_STEPS) // executed)
        return EmbodiedRun(
            policy=SIZES[policy],
            gpus=num_gpus,
            envs=env.num_envs,
            rollouts=-(-episodes // env.num_envs),
            decisions=decisions,
            batch_size=int(env.get("batch_size") or env.num_envs),
            evaluations=int(sampling["num_steps"]) + bool(sampling["final_evaluation"]),
            chunk_size=chunk,
            image_size=tuple(env.starts.get("size") or IMAGINED_SIZE),  # type: ignore[arg-type]
            micro_batch=_micro_batch(episodes * decisions, rl),
            updates=rl.updates,
            offload=env.get("offload") == "phase",
            recomputes=model.recompute,
            **precision,
        )
    simulator = "b1k" if is_behavior else "libero"
    max_steps = int((env if task is None else env.make).get("max_steps") or _longest(env))
    decisions = -(-max_steps // int(rl.execute or env.chunk))
    return SimulatedRun(
        policy=policy,
        simulator=simulator,
        views=min(views, VIEWS[simulator]),
        gpus=num_gpus,
        players=0 if model.rollout is None else int(model.rollout.get("num_workers", 2)),
        shards=num_gpus if model.fsdp_shard_size == -1 else max(1, min(model.fsdp_shard_size, num_gpus)),
        envs=env.num_envs,
        episodes=episodes,
        decisions=decisions,
        max_steps=max_steps,
        chunk=_micro_batch(episodes * decisions, rl),
        updates=rl.updates,
        recomputes=model.recompute,
        samples_again=rl.max_rollouts > 1,
        steps=config.trainer.max_iter // (rl.updates * rl.minibatches),
        **precision,
    )


def _policy(model: VLAGRPOConfig) -> str | None:
    """The kind of published policy, as recipes of Cosmos-RL call it; None of another."""
    target = target_of(model.policy, "model.config.policy")
    if path_of(target) == PI05:
        return "pi05"
    if path_of(target) == OPENVLA:
        return "openvla" if model.policy.get("variant") == "autoregressive" else "openvla-oft"
    if target is not ToyPolicy:
        log.warning(
            "model.config.policy is a %s, whose size is not known here: it is planned as a tiny one", describe(target)
        )
    return None


def _micro_batch(decisions: int, rl: Any) -> int:
    """Decisions that pass the policy together."""
    return max(1, decisions // (rl.minibatches * rl.micro_batches))


def _longest(env: Any) -> int:
    if "make" not in env:
        raise ConfigError("model.config.env.max_steps is not set: how long is an episode?")
    from cosmos_predict2.rl.envs.simulators.libero import MAX_STEPS

    return MAX_STEPS.get(str(env.make.get("suite")), max(MAX_STEPS.values()))
