# SPDX-License-Identifier: Apache-2.0
"""Predict whether a training run fits: memory of a GPU, time of an iteration and of the run, and what to change."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.compat.cosmos_rl.policies import num_gpus, read_recipe
from cosmos_predict2.compat.cosmos_rl.policies import sizes_of as sizes_of_recipe
from cosmos_predict2.compat.fields import read_fields
from cosmos_predict2.compat.rlinf.configurations import sizes_of
from cosmos_predict2.compat.rlinf.fields import FIELDS
from cosmos_predict2.compat.rlinf.files import load_embodiment
from cosmos_predict2.compat.rlinf.policies import precision_of
from cosmos_predict2.configs.rl.planned_policy import is_policy_run, read_policy_run
from cosmos_predict2.tools.plan.advice import on_one_card
from cosmos_predict2.tools.plan.policies import POLICIES
from cosmos_predict2.tools.plan.policy_runs import VIEWS, EmbodiedRun, SimulatedRun
from cosmos_predict2.tools.plan.report import CARDS, MARGIN, as_text, as_values, cards_text, cards_values, make_plan
from cosmos_predict2.tools.plan.speed import GB, GPUS, find_gpu
from cosmos_predict2.tools.plan.workload import read_workload
from cosmos_predict2.world_model.config import PRECISIONS
from imaginaire import command_line
from imaginaire.config.compose import compose
from imaginaire.config.files import load_toml
from imaginaire.errors import ConfigError, near

DEFAULT_CONFIG = "cosmos_predict2/configs/base/config.py"
EMBODIED_CONFIGS = "examples/embodiment/config"
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
    if args.embodied:
        return run_embodied(args, memory)
    if args.recipe:
        return run_recipe(args, memory)
    config = compose(args.config, args.overrides)
    num_gpus = gpu.usual_count if args.gpus is None else args.gpus
    if is_policy_run(config):
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


def run_embodied(args: argparse.Namespace, memory: float) -> int:
    """The plan of a configuration of RLinf; the overrides are the configuration's."""
    gpu = find_gpu(args.gpu)
    fields, _ = read_fields(load_embodiment(EMBODIED_CONFIGS, args.embodied, args.overrides), FIELDS)
    policy, sizes = fields["actor.model.model_type"], sizes_of(fields)
    if policy not in POLICIES:
        raise ConfigError(f'--embodied {args.embodied}: its policy is "{policy}".{near(policy, POLICIES)}')
    num_gpus = gpu.usual_count if args.gpus is None else args.gpus
    envs, rest = divmod(fields["env.train.total_num_envs"], num_gpus)
    if rest or not envs:
        raise ConfigError(f"env.train.total_num_envs = {num_gpus * envs + rest} is no multiple of --gpus {num_gpus}.")
    world, bytes_each = "env.train.world_model_cfg", PRECISIONS[precision_of(fields)].itemsize
    height, width = fields[f"{world}.image_size"]
    run = EmbodiedRun(
        policy=policy,
        gpus=num_gpus,
        envs=envs,
        rollouts=sizes.episodes // fields["env.train.total_num_envs"],
        decisions=sizes.decisions,
        batch_size=fields[f"{world}.cosmos.batch_size"],
        evaluations=fields[f"{world}.cosmos.num_steps"] + (fields[f"{world}.cosmos.num_steps"] > 1),
        chunk_size=fields[f"{world}.cosmos.chunk_size"],
        image_size=(height, width),
        micro_batch=sizes.micro_batch_size,
        updates=sizes.updates,
        offload=fields["env.enable_offload"],
        recomputes=fields["actor.fsdp_config.gradient_checkpointing"],
        bytes_each=bytes_each,
        optimizer_bytes=2 * bytes_each,  # AdamW without masters
        accumulates=sizes.episodes * sizes.decisions > num_gpus * sizes.minibatches * sizes.micro_batch_size,
    )
    return run_policy(args, run, memory)


def run_recipe(args: argparse.Namespace, memory: float) -> int:
    """The plan of a recipe of Cosmos-RL for a policy."""
    fields, warnings, policy, place = read_recipe(load_toml(args.recipe))
    if place.simulator == "toy":
        raise ConfigError(f"--recipe {args.recipe}: a tiny policy fits everywhere; give a recipe of a published one.")
    for warning in warnings:
        print(f"recipe: {warning}", file=sys.stderr)
    sizes, bytes_each = sizes_of_recipe(fields, place), PRECISIONS[fields["train.param_dtype"]].itemsize
    run = SimulatedRun(
        policy=policy,
        simulator=place.simulator,
        views=min(fields["vla.num_images_in_input"], VIEWS[place.simulator]),
        gpus=num_gpus(fields, "policy"),
        players=num_gpus(fields, "rollout") if fields["mode"] == "disaggregated" else 0,
        shards=fields["policy.parallelism.dp_shard_size"],
        envs=fields["vla.num_envs"],
        episodes=sizes.episodes,
        decisions=sizes.decisions,
        max_steps=sizes.max_steps,
        chunk=sizes.chunk,
        updates=sizes.updates,
        recomputes=fields["policy.model_gradient_checkpointing"],
        samples_again=fields["train.train_policy.variant"] == "dapo",
        steps=sizes.iterations,
        bytes_each=bytes_each,
        optimizer_bytes=2 * bytes_each,  # AdamW without masters
        accumulates=sizes.episodes * sizes.decisions > sizes.chunk,
    )
    return run_policy(args, run, memory)


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


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
