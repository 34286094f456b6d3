# SPDX-License-Identifier: Apache-2.0
"""The run of a recipe for policies (VLA): its experiment, policy, episodes, steps and validation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_predict2.compat.cosmos_rl import policy_fields
from cosmos_predict2.compat.cosmos_rl.policy_fields import CONFIG, POLICY, RL
from cosmos_predict2.compat.fields import (
    Fields,
    Translation,
    fields_at,
    overrides,
    read_fields,
    require_one_of,
    sharded,
    shown_value,
    workers,
)
from imaginaire.errors import ConfigError

TRIALS = {"libero": 50, "b1k": 10, "toy": 50}  # recorded starts of a task
SUITES = {  # the tasks of each suite of a simulator
    "libero": dict(
        libero_spatial=10, libero_object=10, libero_goal=10, libero_10=10, libero_90=90, libero_all=130
    ),
    "b1k": dict(b1k=50),
    "toy": dict(push_puck=1),
}  # fmt: skip
EXECUTED = {"openvla-oft": 8, "openvla": 1, "pi05": 10}  # actions of a decision, where a recipe has none
STEPS = {"libero": 512, "b1k": 2000, "toy": 24}  # of an episode, likewise; those of b1k as its experiment has them
SHORT = (
    f"vla.max_steps is missing: episodes end after {STEPS['b1k']:,} steps. BEHAVIOR-1K's own limit is about 26,000,"
    " twice what humans took: set it, with fewer episodes of a step (scripts.plan --recipe shows what they take)"
)
TOY_CHUNK = 12
WAIT = 15  # steps of LIBERO before an episode
TASK = {"libero": "make.", "b1k": "", "toy": ""}  # where the settings of a simulator's task are
WITHOUT_END = 2**20  # rollouts of an update at most
SCRIPTS = {  # of cosmos_rl.tools.dataset, for each simulator; the toy world stands in for any
    "libero": ("libero_grpo",),
    "b1k": ("b1k_grpo",),
    "toy": ("libero_grpo", "b1k_grpo"),
}
_ALGORITHM = "train.train_policy"
_DECIDING = (  # which policy it is, how it learns and where
    *("vla.vla_type", "policy.model_name_or_path", f"{_ALGORITHM}.trainer_type", f"{_ALGORITHM}.type"),
    *(f"{section}.dataset.{name}" for section in (_ALGORITHM, "validation") for name in ("name", "subset")),
)


@dataclass(frozen=True)
class RecipeSimulator:
    """The simulator and suites in which a recipe's policy acts."""

    simulator: str
    suite: str
    validation_suite: str


def translate_vla(content: Mapping[str, Any], gpus_here: int = 0) -> Translation:
    """The run of a recipe for policies, on a machine with so many GPUs."""
    fields, warnings, policy, place = read_recipe(content)
    scripts = SCRIPTS[place.simulator]
    if fields["rollout.n_generation"] == 1 and fields["validation.enable"]:  # groups of one teach nothing
        return Translation([], {}, {}, warnings, scripts, _evaluation(fields, policy, place))
    _require_trainer(fields, policy)
    again = fields[f"{_ALGORITHM}.max_retry_for_on_policy"]
    require_one_of(f"{_ALGORITHM}.variant", variant := fields[f"{_ALGORITHM}.variant"], ("grpo", "dapo"))
    settings = {
        **fields.settings(),
        **_policy(fields, policy),
        f"{RL}.max_rollouts": 1 if variant == "grpo" else again + 1 if again >= 0 else WITHOUT_END,
        # As there: each episode counts alike, and within it each number of an action.
        f"{RL}.loss.ratio_level": "element",
        f"{RL}.loss.aggregation": "episode-mean",
        f"{RL}.advantage.epsilon": 1e-6,
        f"{RL}.advantage.correction": 0,
        **_steps(fields, place),
        **_simulators(fields, place),
        **_players(fields, gpus_here),
        **sharded(fields["policy.parallelism.dp_shard_size"]),
        **logged(fields),
    }
    return Translation(
        [f"experiment={_experiment(fields, place)}", checkpoint_type(fields), "scheduler=lambdalinear"]
        + overrides(settings),
        {path: fields[path] for path in (f"policy.parallelism.{name}" for name in policy_fields.SIZES_OF_GPUS)},
        {},
        warnings,
        scripts,
    )


def read_recipe(content: Mapping[str, Any]) -> tuple[Fields, list[str], str, RecipeSimulator]:
    """The fields of a recipe for policies, warnings, which policy it is and where it acts."""
    if "vla" not in content:
        raise ConfigError("The recipe has no [vla]: it is none of a policy.")
    kind = fields_at(content, policy_fields.FIELDS, _DECIDING)
    policy = str(kind["vla.vla_type"])
    require_one_of("vla.vla_type", policy, policy_fields.VLA_TYPES, ": no policy is called so here")
    if not kind["policy.model_name_or_path"]:
        raise ConfigError("policy.model_name_or_path is missing: a folder in the public layout, or a hub repository.")
    place = _place(kind)
    if f"{_ALGORITHM}.trainer_type" in kind.given:
        _require_trainer(kind, policy)
    fields, warnings = read_fields(content, policy_fields.FIELDS)
    _require_numbers(fields)
    if place.simulator == "b1k" and fields["vla.max_steps"] is None:
        warnings.append(SHORT)
    return fields, warnings, policy, place


def _require_trainer(fields: Fields, policy: str) -> None:
    kind = fields[f"{_ALGORITHM}.trainer_type"]
    if kind != (own := policy_fields.TRAINERS[policy]):
        raise ConfigError(f'{_ALGORITHM}.trainer_type = "{kind}", but that of vla_type = "{policy}" is "{own}".')


def _require_numbers(fields: Fields) -> None:
    """Raise for shares, betas and a precision that are none."""
    bounds = {path: fields.given.get(path) for path in ("vla.filter_lower_bound", "vla.filter_upper_bound")}
    for path, value in bounds.items():
        if value is not None and not (type(value) in (int, float) and 0 <= value <= 1):
            raise ConfigError(f"{path} = {shown_value(value)}, but it is a share of successes, 0 to 1.")
    low, high = bounds.values()
    if low is not None and high is not None and low > high:
        raise ConfigError(f"vla.filter_lower_bound = {low} is above filter_upper_bound = {high}: no group is left.")
    betas = fields["train.optm_betas"]
    if len(betas) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
        raise ConfigError(f"train.optm_betas = {betas}, but it is two numbers from 0 to below 1, such as [0.9, 0.999].")
    precisions = ("bfloat16", "float32")
    require_one_of("train.param_dtype", fields["train.param_dtype"], precisions, ": weights have another")


# --- which experiment


def _place(fields: Fields) -> RecipeSimulator:
    """The place of a recipe. Cosmos-RL builds simulators by [validation], so a recipe may name them there alone."""
    trained, judged = f"{_ALGORITHM}.dataset", "validation.dataset"
    simulator = fields[f"{trained}.name"] or fields[f"{judged}.name"]
    if not simulator:
        raise ConfigError(f"{trained}.name is missing: the simulator, {', '.join(SUITES)}.")
    named = trained if fields[f"{trained}.name"] else judged
    require_one_of(f"{named}.name", simulator, SUITES, ": no simulator is called so")
    if fields[f"{judged}.name"] not in ("", simulator):
        raise ConfigError(f'{judged}.name = "{fields[f"{judged}.name"]}" must be {trained}.name = "{simulator}".')
    suites = [fields[f"{section}.subset"] for section in (trained, judged)]
    for section, suite in zip((trained, judged), suites, strict=True):
        if suite:
            require_one_of(f"{section}.subset", suite, SUITES[simulator], f": {simulator} has no such suite")
    if not any(suites):
        raise ConfigError(f"{trained}.subset is missing: {' or '.join(SUITES[simulator])}.")
    return RecipeSimulator(simulator, suites[0] or suites[1], suites[1] or suites[0])


def _experiment(fields: Fields, place: RecipeSimulator) -> str:
    policy = policy_fields.VLA_TYPES[fields["vla.vla_type"]]
    if place.simulator == "b1k" and policy != "pi05":
        raise ConfigError('vla.vla_type must be "pi05" for b1k: OpenVLA has no statistics of its 23 numbers.')
    if place.simulator != "toy":
        return f"vla_{fields[f'{_ALGORITHM}.variant']}_{policy}_{place.suite}"
    for name in ("max_steps", "height", "width"):
        if f"vla.{name}" in fields.given:
            raise ConfigError(f"vla.{name}: the toy world has its own. Leave it out.")
    return f"tiny_vla_grpo_{'pi05' if policy == 'pi05' else 'openvla_oft'}_simulator"


# --- parts of the run


def _policy(fields: Fields, name: str) -> dict[str, Any]:
    precision, options = fields["train.param_dtype"], _policy_options(fields, name)
    found = {f"{POLICY}.path": fields["policy.model_name_or_path"], f"{CONFIG}.precision": precision}
    if precision == "bfloat16":
        found[f"{RL}.ratio_tolerance"] = 0.1  # rows of another batch are rounded otherwise
    if name != "pi05":
        drawn, trained = fields["rollout.sampling_config.temperature"], fields[f"{_ALGORITHM}.temperature"]
        if drawn != trained:
            raise ConfigError(
                f"rollout.sampling_config.temperature = {drawn} must be {_ALGORITHM}.temperature = {trained}: the"
                " probabilities that are trained are those that were drawn with."
            )
        options["temperature"] = float(trained)
    if fields.has("policy.lora"):
        rank, alpha = fields["policy.lora.r"], fields["policy.lora.lora_alpha"]
        if alpha != rank:
            raise ConfigError(
                f"policy.lora.lora_alpha = {alpha} must be policy.lora.r = {rank}: adapters count as they are."
            )
        options |= {"lora_rank": rank, "lora_path": fields["policy.lora.lora_path"] or ""}
    return {**found, **{f"++{POLICY}.{key}": value for key, value in options.items()}}


def _policy_options(fields: Fields, name: str) -> dict[str, Any]:
    """Arguments of the policy's class, in training and in an evaluation."""
    given = _pi05_settings(fields)
    if name == "pi05":
        return given | fields.options("vla", {"num_images_in_input": "num_images"})
    if given:
        raise ConfigError(f'custom.{min(given)} belongs to vla_type = "pi05", but it is "{name}".')
    own = ("num_images_in_input", "use_proprio", "unnorm_key")
    variant = "oft" if name == "openvla-oft" else "autoregressive"
    return {"variant": variant, **fields.options("vla", dict(zip(own, own, strict=True)))}


def _pi05_settings(fields: Fields) -> dict[str, Any]:
    """The settings of [custom.pi05] or [custom]."""
    names = {name: name for name in (*policy_fields.PI05_SIZES, *policy_fields.PI05_OPTIONS)}
    found = fields.options("custom", names) | fields.options("custom.pi05", names)
    if (method := found.get("noise_method")) is not None:
        from cosmos_predict2.rl.policies.pi05.flow import METHODS

        require_one_of("custom.pi05.noise_method", method, METHODS)
    return found


def num_gpus(fields: Fields, part: str) -> int:
    """The number of GPUs that train ("policy"), or that play ("rollout") where these are others."""
    return math.prod(fields[f"{part}.parallelism.{name}"] for name in policy_fields.SIZES_OF_GPUS)


def _steps(fields: Fields, place: RecipeSimulator) -> dict[str, Any]:
    """The part of each process in an iteration, which is a step of the optimizer, and the length of the run."""
    group, replicas = fields["rollout.n_generation"], fields["policy.parallelism.n_init_replicas"]
    gpus = num_gpus(fields, "policy") // replicas  # of a replica
    batch, updates = fields["train.train_batch_per_replica"], fields[f"{_ALGORITHM}.mu_iterations"]
    if group < 2:
        raise ConfigError(
            f"rollout.n_generation = {group}, but GRPO compares the episodes of a group: 2 at least. With 1 a recipe is"
            " an evaluation: validation.enable = true."
        )
    if batch % (gpus * group):
        raise ConfigError(
            f"train.train_batch_per_replica = {batch}: each of {gpus} GPUs (policy.parallelism.dp_shard_size times"
            f" dp_replicate_size) needs a multiple of rollout.n_generation = {group} episodes."
        )
    starts = TRIALS[place.simulator] * SUITES[place.simulator][place.suite]
    steps = fields["train.epoch"] * starts * group // (batch * replicas)
    if (limit := fields["train.max_num_steps"]) is not None:
        steps = min(steps, limit)
    executed = _pi05_settings(fields).get("action_chunk") or EXECUTED[fields["vla.vla_type"]]
    if place.simulator == "toy":
        executed = TOY_CHUNK  # of which the policy's actions are held for several steps
    decisions = math.ceil((fields["vla.max_steps"] or STEPS[place.simulator]) / executed)  # of a whole episode
    chunk = fields["vla.training_chunk_size"]
    micro_batches = math.ceil(batch // gpus * decisions / chunk)
    return {
        f"{RL}.group_size": group,
        f"{RL}.minibatches": 1,
        f"{RL}.micro_batches": micro_batches,
        f"{RL}.loss.slice_decisions": chunk,
        "trainer.grad_accum_iter": micro_batches,
        "trainer.max_iter": max(1, steps) * updates,
        "trainer.logging_iter": 1,
        "dataloader_train.batch_size": batch // gpus // group,
        "checkpoint.save_iter": fields["train.ckpt.save_freq"] * updates,
        "trainer.validation_iter": fields["validation.freq"] * updates,
    }


def _simulators(fields: Fields, place: RecipeSimulator) -> dict[str, Any]:
    """The environments in which the policy learns and in which it is judged: alike, as there."""
    found: dict[str, Any] = {
        "trainer.run_validation": fields["validation.enable"],
        "dataloader_val.batch_size": fields["validation.batch_size"] or fields["vla.num_envs"],
    }
    task = fields.options("vla", dict(max_steps="max_steps", height="height", width="width"))
    if place.simulator == "libero":
        num_tasks = SUITES["libero"][place.validation_suite]
        found |= {
            f"{CONFIG}.eval_env.make.suite": place.validation_suite,
            "dataloader_val.dataset.num": TRIALS["libero"] * num_tasks,
            "dataloader_val.dataset.num_tasks": num_tasks,
        }
        task = {"num_steps_wait": WAIT, **task}
    if place.simulator != "toy":  # what micro-batches are sized for
        task = {"max_steps": STEPS[place.simulator], **task}
    chunk = _pi05_settings(fields).get("action_chunk") if place.simulator != "toy" else None
    for env in ("env", "eval_env"):
        found[f"{CONFIG}.{env}.num_envs"] = fields["vla.num_envs"]
        found |= {f"++{CONFIG}.{env}.{TASK[place.simulator]}{name}": value for name, value in task.items()}
        found |= {} if chunk is None else {f"{CONFIG}.{env}.chunk": chunk}
    return found


def _players(fields: Fields, gpus_here: int) -> dict[str, Any]:
    """Rollouts on workers of Ray, where GPUs of their own play."""
    require_one_of("mode", fields["mode"], ("colocated", "disaggregated"))
    if fields["mode"] == "colocated":
        return {}
    train, play = (num_gpus(fields, part) for part in ("policy", "rollout"))
    if play < train:
        raise ConfigError(
            f"rollout.parallelism: {play} GPUs play, but {train} train, each of which needs at least one that plays for"
            ' it. Raise it, or set mode = "colocated".'
        )
    return workers(play, gpus_here)


def _evaluation(fields: Fields, policy: str, place: RecipeSimulator) -> list[str]:
    """The arguments of scripts.evaluate_policy."""
    suite = place.validation_suite
    trials = fields["custom.trials_per_task"] or TRIALS[place.simulator]
    episodes = trials * SUITES[place.simulator][suite]
    where = ["--suite", "toy", "--tasks", suite] if place.simulator == "toy" else ["--suite", suite]
    if place.simulator == "libero":
        where += ["--num_steps_wait", str(WAIT), "--max_steps", str(fields["vla.max_steps"] or STEPS["libero"])]
    if "vla.height" in fields.given or "vla.width" in fields.given:
        if fields["vla.height"] != fields["vla.width"]:
            raise ConfigError("vla.height and vla.width must be the same in an evaluation.")
        where += ["--image_size", str(fields["vla.height"])]
    words = [*where, "--policy", fields["policy.model_name_or_path"], "--episodes", str(episodes)]
    words += ["--draws", "1"]  # as published: each start is played once
    words += ["--batch_size", str(fields["vla.num_envs"]), "--out", fields["train.output_dir"]]
    words += ["--videos", str(episodes)] if fields["vla.save_video"] else []
    options = overrides(_policy_options(fields, policy))
    return [*words, "--options", *options] if options else words


# --- of DiffusionNFT's recipes too


def logged(fields: Fields) -> dict[str, Any]:
    """The run's name, and whether Weights & Biases follows it."""
    name = fields["logging.experiment_name"]
    named = {} if name in (None, "None") else {"job.name": name}
    return {"job.wandb_mode": "online" if "wandb" in fields["logging.logger"] else "disabled", **named}


def checkpoint_type(fields: Fields) -> str:
    return f"ckpt_type={'standard' if fields['train.ckpt.enable_checkpoint'] else 'dummy'}"
