# SPDX-License-Identifier: Apache-2.0
"""Predict whether a training run fits: memory of a GPU, time of an iteration and of the run, and what to change."""

import argparse
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.rl.envs.remote import address_of
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.tools.plan.advice import on_one_card
from cosmos_predict2.tools.plan.policies import SIZES, VIEWS, EmbodiedRun, SimulatedRun
from cosmos_predict2.tools.plan.report import CARDS, MARGIN, as_text, as_values, cards_text, cards_values, make_plan
from cosmos_predict2.tools.plan.speed import GPUS, find_gpu
from cosmos_predict2.tools.plan.workload import GB, optimizer_of, read_workload
from cosmos_predict2.world_model.config import PRECISIONS
from cosmos_predict2.world_model.options import UNGUIDED
from imaginaire import command_line
from imaginaire.buildable import describe, path_of, target_of
from imaginaire.config.compose import compose
from imaginaire.config.nodes import as_config
from imaginaire.config.registry import load_toml
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError
from imaginaire.training.model import weight_dtype

log = logging.getLogger(__name__)

DEFAULT_CONFIG = "cosmos_predict2/configs/base/config.py"
EMBODIED_CONFIGS = "examples/embodiment/config"
# By path: a plan imports no other policy or simulator than that of its run.
OPENVLA = "cosmos_predict2.rl.policies.openvla.policy:OpenVLAPolicy"
PI05 = "cosmos_predict2.rl.policies.pi05.policy:Pi05Policy"
LIBERO = "cosmos_predict2.rl.envs.simulators.libero:LiberoTask"
BEHAVIOR = "cosmos_predict2.rl.envs.simulators.behavior:BehaviorEnv"
IMAGINED_CHUNK, IMAGINED_SIZE = 12, (256, 320)  # of the published world model of LIBERO, the default
RECORDED_STEPS = 240  # of an episode that is as long as recordings, which are not read here; as RLinf's of LIBERO
_EPILOG = """\
Nothing is built, downloaded or read from the data: only the configuration counts, as for scripts.train. All figures
are estimates. Exit code: 0 it fits, 1 it does not, 2 the configuration cannot run.

examples:
  python -m scripts.plan --gpus 8 --gpu H100 -- experiment=predict2_video2world_training_2b_groot_gr1_480
  python -m scripts.plan --one_card -- experiment=predict2_video2world_training_2b_groot_gr1_480
  python -m scripts.plan --gpu RTX-4090 -- experiment=NAME model.config.train_architecture=lora
  python -m scripts.plan --gpus 4 --gpu A100 --embodied cosmos_libero_spatial_grpo_openvlaoft
  python -m scripts.plan --gpus 8 -- experiment=vla_grpo_openvla_oft_libero_10
  python -m scripts.plan --recipe configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r-colocate.toml
  python -m scripts.plan --gpus 2 --gpu_memory 24 --json plan.json -- experiment=NAME optimizer=adamw
"""

parser = command_line.parser("scripts.plan", __doc__, _EPILOG)
add = parser.add_argument
number = command_line.at_least(1, 100_000)
add("--gpus", type=number, help="how many GPUs the run gets, on all nodes together (default: 8, of RTX cards 1)")
add("--gpu", default="H100", help=f"which: {', '.join(GPUS)}")
add("--gpu_memory", type=command_line.above_zero, help="GB of one, as nvidia-smi counts (default: what the GPU has)")
add("--one_card", action="store_true", help=f"what fits one card of {', '.join(map(str, CARDS))} GB, and how")
add("--embodied", metavar="NAME", help=f"a policy in a world model, NAME.yaml of {EMBODIED_CONFIGS}")
add("--recipe", metavar="FILE", help="a policy in a simulator, by a recipe of Cosmos-RL, with its number of GPUs")
add("--config", default=DEFAULT_CONFIG, help="config file, or the saved config.yaml of a run")
add("--json", metavar="FILE", help="write the figures to this file too; - prints them in place of the table")
add("overrides", nargs="*", help="after --: experiment=NAME and dotted overrides, as for scripts.train")


def run(args: argparse.Namespace) -> int:
    gpu = find_gpu(args.gpu)
    memory = gpu.memory if args.gpu_memory is None else args.gpu_memory
    num_gpus = gpu.usual_count if args.gpus is None else args.gpus
    if args.embodied or args.recipe:
        return run_policy(args, read_translated(args, num_gpus), memory)
    config = compose(args.config, args.overrides)
    target = None if config.model is None else target_of(config.model, "model")
    if isinstance(target, type) and issubclass(target, VLAGRPOModel):
        if args.one_card:
            raise ConfigError("--one_card plans world models; of a policy's experiment give --gpus 1 and --gpu.")
        return run_policy(args, read_policy_run(config, num_gpus), memory)
    if args.one_card:
        work = read_workload(config, config.model_parallel.context_parallel_size)
        cards = {size: find_gpu(name) for size, name in CARDS.items()}
        found = {size: on_one_card(work, card, (1 - MARGIN) * card.memory * GB) for size, card in cards.items()}
        return show(cards_text(found), cards_values(found), args.json, fits=any(fits for _, fits in found.values()))
    plan = make_plan(read_workload(config, num_gpus), args.gpu, gpu, memory)
    return show(as_text(plan), as_values(plan), args.json, fits=plan.fits)


def read_translated(args: argparse.Namespace, num_gpus: int) -> SimulatedRun | EmbodiedRun:
    """The run of a configuration of RLinf, to which the overrides belong, or of a recipe of Cosmos-RL, as the
    experiment that it is translated to."""
    if args.embodied:
        from cosmos_predict2.compat.rlinf.configurations import translate_embodiment
        from cosmos_predict2.compat.rlinf.files import load_embodiment

        content, what = load_embodiment(EMBODIED_CONFIGS, args.embodied, args.overrides), f"--embodied {args.embodied}"
        translation: Any = translate_embodiment(content, num_gpus)
    else:
        from cosmos_predict2.compat.cosmos_rl.policies import translate_vla

        translation, what = translate_vla(load_toml(args.recipe)), f"--recipe {args.recipe}"
        for warning in translation.warnings:
            print(f"recipe: {warning}", file=sys.stderr)
    if translation.evaluation is not None:
        raise ConfigError(f"{what}: with rollout.n_generation = 1 it evaluates a policy, and trains none.")
    run = read_policy_run(compose(DEFAULT_CONFIG, translation.overrides), translation.num_gpus)
    if run is None:
        raise ConfigError(f"{what}: a tiny policy fits everywhere; give one of a published policy.")
    return run


def run_policy(args: argparse.Namespace, run: SimulatedRun | EmbodiedRun | None, memory: float) -> int:
    """The plan of a policy in a simulator or in a world model, or of a tiny one."""
    if run is None:
        return show("A tiny policy fits everywhere, a laptop too.", {"fits": True}, args.json, fits=True)
    found = {form: run.estimate(find_gpu(args.gpu), form) for form in run.forms}
    values = run.as_values(args.gpu, memory, found)
    return show(run.as_text(args.gpu, memory, found), values, args.json, fits=run.fits(found, memory))


def show(text: str, values: dict[str, Any], path: str | None, *, fits: bool) -> int:
    """Print the text, or write the values; the exit code."""
    content = json.dumps(values, indent=2)
    print(content if path == "-" else text)
    if path and path != "-":
        try:
            Path(path).write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {path} cannot be written: {error.strerror}.") from error
    return int(not fits)


# --- the load of a policy's experiment on each GPU, read off its configuration


def read_policy_run(config: Config, num_gpus: int) -> SimulatedRun | EmbodiedRun | None:
    """The run of an experiment; None of a tiny policy of the toy world or of Lift, which fits everywhere."""
    model: VLAGRPOConfig = as_config(VLAGRPOConfig, config.model.config, "model.config")
    env, rl = model.env, model.rl
    if address := address_of(env):
        raise ConfigError(f"model.config.env={address}: a server imagines, with memory of its own: it is not planned.")
    if env is None or isinstance(env, str):
        raise ConfigError(f"model.config.env={env}: what its simulator needs is not known here: it is not planned.")
    place, policy = target_of(env, "model.config.env"), _policy(model)
    task = target_of(env.make, "model.config.env.make") if "make" in env else None
    is_toy = place is WorldModelEnv and target_of(env.starts, "model.config.env.starts") is ToyStarts
    is_behavior = path_of(place) == BEHAVIOR
    if policy is None or is_toy or not (place is WorldModelEnv or is_behavior or path_of(task) == LIBERO):
        return None
    episodes = config.dataloader_train.batch_size * rl.group_size
    views = int(model.policy.get("num_images_in_input") or model.policy.get("num_images") or 1)
    each, (kind, has_master) = weight_dtype(PRECISIONS[model.precision]).itemsize, optimizer_of(config.optimizer)
    of_moments = 4 if config.optimizer.get("moments", "float32") == "bfloat16" else 8
    if config.optimizer.get("moments") == "int8":
        of_moments = 2  # and a sixty-fourth for scales
    kept = 2 * each if kind == "adamw" else of_moments + 4 * (has_master and each < 4)
    kept = 0 if config.optimizer.get("offload") else kept
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
        lora_rank=int(model.policy.get("lora_rank") or 0),
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


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
