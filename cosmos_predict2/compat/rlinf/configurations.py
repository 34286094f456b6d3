# SPDX-License-Identifier: Apache-2.0
"""Translation of RLinf's configuration of a policy in a world model to an experiment with overrides.

content = load_embodiment("examples/embodiment/config", "tiny_toy_grpo")
compose(CONFIG, translate_embodiment(content).overrides)
"""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from cosmos_predict2.compat.cosmos_rl.policies import SUITES, WAIT
from cosmos_predict2.compat.fields import (
    Fields,
    Translation,
    overrides,
    read_fields,
    require_one_of,
    shown_value,
    workers,
)
from cosmos_predict2.compat.rlinf.fields import CONFIG, FIELDS, KL_KINDS, LOSS, PLACE, RL
from cosmos_predict2.compat.rlinf.policies import policy_settings
from cosmos_predict2.released import EMBODIED, describe_missing
from imaginaire import storage
from imaginaire.errors import ConfigError, near

ENV = f"{CONFIG}.env"
TOY_SUITES = ("push_puck",)
ALL_STARTS = 2**20  # groups of a run at most; environments take their numbers modulo the starts that there are
_ENVS = "cosmos_predict2.rl.envs"


def translate_embodiment(content: Mapping[str, Any], gpus_here: int = 0) -> Translation:
    """The run of a configuration on a machine with so many GPUs."""
    fields, warnings = read_fields(content, FIELDS)
    train, play = placement_of(fields, gpus_here)
    parts = _parts(fields, train)
    has_world_model = fields["env.train.env_type"] == "cosmos_wm"
    world = fields["env.train.wm_env_type"] if has_world_model else fields["env.train.env_type"]
    backends = fields["runner.logger.logger_backends"]
    if unknown := [name for name in backends if name not in ("tensorboard", "wandb")]:
        raise ConfigError(f"runner.logger.logger_backends has {unknown[0]}: there are tensorboard and wandb.")
    settings = {
        **fields.settings(),
        **policy_settings(fields, train, is_toy_world=world == "toy"),
        "optimizer.betas": [fields["actor.optim.adam_beta1"], fields["actor.optim.adam_beta2"]],
        **_epochs(fields, parts[f"{RL}.minibatches"] * fields["algorithm.update_epoch"]),
        **parts,
        **_loss(fields),
        **_environment(fields, train, warnings),
        **_evaluation(fields, train),
        **(workers(play, gpus_here) if play else {}),
        "job.group": "embodied",
        "job.wandb_mode": "online" if "wandb" in backends else "disabled",
        f"{CONFIG}.compare": 0,
        f"{CONFIG}.validation_draws": 1,  # there, each start is played once
        f"{CONFIG}.refinement": None,
        "trainer.callbacks.imagination_gap": None,
        "trainer.callbacks.draw_episodes": None,
    }
    policy = {"toy": "", "openpi": "pi05_"}.get(fields["actor.model.model_type"], "openvla_oft_")
    removed: list[str] = []
    if has_world_model and world == "libero":
        removed += [f"~{ENV}.starts.{name}" for name in ("setting", "tasks", "split", "seed")]
    if has_world_model and _has_classifier(fields):
        removed.append(f"~{ENV}.reward.setting")
    return Translation(
        [f"experiment=tiny_vla_grpo_{policy}{'world_model' if has_world_model else 'simulator'}"]
        + overrides(settings)
        + removed,
        {PLACE: train},
        {"IMAGINAIRE_OUTPUT_ROOT": str(fields["runner.logger.log_path"])},
        warnings,
        missing=tuple(fields.missing),
    )


# --- numbers


def _parts(fields: Fields, number: int) -> dict[str, Any]:
    """The groups of an epoch's episodes and the minibatches of its decisions, of which each process has a part."""
    envs, group = fields.at_least_1("env.train.total_num_envs"), fields.at_least_1("algorithm.group_size")
    episodes = envs * fields.at_least_1("algorithm.rollout_epoch")
    if group < 2:
        raise ConfigError(f"algorithm.group_size = {group}, but GRPO compares the episodes of a group: 2 at least.")
    fields.require_same("env.train.group_size", "algorithm.group_size")
    if envs % group:
        raise ConfigError(f"env.train.total_num_envs = {envs} is no multiple of algorithm.group_size = {group}.")
    steps = fields.at_least_1("env.train.max_episode_steps")
    execute = fields.at_least_1("actor.model.num_action_chunks")
    fields.require_same("env.train.max_steps_per_rollout_epoch", "env.train.max_episode_steps")
    if fields["env.train.env_type"] == "cosmos_wm":
        fields.require_same("env.train.world_model_cfg.chunk", "actor.model.num_action_chunks")
        if execute > fields["env.train.world_model_cfg.cosmos.chunk_size"]:
            raise ConfigError(
                f"actor.model.num_action_chunks = {execute}, but the world model imagines"
                f" {fields['env.train.world_model_cfg.cosmos.chunk_size']} actions at once (cosmos.chunk_size)."
            )
    decisions = math.ceil(steps / execute)
    batch, micro = fields.at_least_1("actor.global_batch_size"), fields.at_least_1("actor.micro_batch_size")
    minibatches, rest = divmod(episodes * decisions, batch)
    if rest or not minibatches:
        raise ConfigError(
            f"actor.global_batch_size = {batch} does not divide the {episodes * decisions} decisions of an epoch:"
            f" {episodes} episodes (total_num_envs x rollout_epoch) of {decisions} (max_episode_steps /"
            " num_action_chunks)."
        )
    groups, per_process = episodes // group, batch / number
    if groups % number:
        raise ConfigError(
            f"{groups} groups of an epoch (total_num_envs x rollout_epoch / group_size) are not divided by the"
            f" {number} processes of {PLACE}."
        )
    if per_process % micro:
        raise ConfigError(
            f"actor.micro_batch_size = {micro} does not divide the {per_process:g} decisions that each of {number}"
            f" processes has of actor.global_batch_size = {batch:g}."
        )
    micro_batches = int(per_process) // micro
    return {
        "dataloader_train.batch_size": groups // number,
        "dataloader_train.dataset.num": ALL_STARTS,
        f"{RL}.execute": execute,
        f"{RL}.minibatches": minibatches,
        f"{RL}.micro_batches": micro_batches,
        "trainer.grad_accum_iter": micro_batches,
        f"{ENV}.max_steps": steps,
    }


def placement_of(fields: Fields, gpus_here: int) -> tuple[int, int]:
    """How many GPUs train (processes where there are none), and how many play apart from them; 0: those that train."""
    given = fields[PLACE]
    if given is None:
        return max(1, gpus_here), 0
    if not isinstance(given, Mapping):
        raise ConfigError(f"{PLACE} = {given!r}, but it is a section, such as 'actor,env,rollout: all'.")
    places = {part.strip(): _gpus(value, gpus_here) for names, value in given.items() for part in str(names).split(",")}
    if unknown := set(places) - {"actor", "env", "rollout"}:
        raise ConfigError(
            f"{PLACE}: no part is called '{min(unknown)}'.{near(min(unknown), ('actor', 'env', 'rollout'))}"
        )
    if missing := {"actor", "env", "rollout"} - set(places):
        raise ConfigError(f"{PLACE} does not place {', '.join(sorted(missing))}.")
    if places["env"] != places["rollout"]:
        raise ConfigError(f"{PLACE}: env and rollout have one place here, since the policy acts where it is answered.")
    train, play = places["actor"], places["rollout"]
    if train == play:
        return len(train), 0
    if train & play or len(play) % len(train):
        raise ConfigError(
            f"{PLACE}: env and rollout share all GPUs with actor, or have others, a multiple of actor's"
            f" {len(train)}, such as actor: 0 and env,rollout: 1-3."
        )
    return len(train), len(play)


def _gpus(value: Any, gpus_here: int) -> set[int]:
    text = str(value).strip()
    if text == "all":
        return set(range(max(1, gpus_here)))
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(f"{PLACE} has '{text}', but it is all, or GPUs such as 0-3 or 0,2.")
    ends = [part.split("-") for part in text.split(",")]
    return {number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)}


# --- settings of the experiment


def _epochs(fields: Fields, steps: int) -> dict[str, Any]:
    """Ends, saves, evaluations and beginnings; iterations here are steps of the optimizer, so many of an epoch."""
    limits = [number for number in (fields["runner.max_epochs"], fields["runner.max_steps"]) if number > 0]
    if not limits:
        raise ConfigError("runner.max_epochs = -1 and runner.max_steps = -1: the run has no end. Set one.")
    every, save = fields["runner.val_check_interval"], fields["runner.save_interval"]
    found: dict[str, Any] = {
        "trainer.max_iter": min(limits) * steps,
        "trainer.logging_iter": steps,
        "trainer.run_validation": every > 0,
        "checkpoint.save_iter": (save if save > 0 else min(limits)) * steps,
    }
    if every > 0:
        found["trainer.validation_iter"] = every * steps
    resume, weights = fields["runner.resume_dir"], fields["runner.ckpt_path"]
    if resume and weights:
        raise ConfigError("runner.resume_dir and runner.ckpt_path: a run goes on, or begins with weights. Give one.")
    if resume or weights:
        found |= {"checkpoint.load_path": resume or weights, "checkpoint.load_training_state": bool(resume)}
    return found


def _loss(fields: Fields) -> dict[str, Any]:
    kind = fields["algorithm.kl_penalty"]
    require_one_of("algorithm.kl_penalty", kind, KL_KINDS)
    low, high = fields["algorithm.rewards_lower_bound"], fields["algorithm.rewards_upper_bound"]
    is_filtered = fields["algorithm.filter_rewards"]
    return {
        f"{LOSS}.ratio_level": fields["algorithm.logprob_type"],
        f"{LOSS}.aggregation": fields["algorithm.loss_agg_func"],
        f"{LOSS}.kl_kind": KL_KINDS[kind],
        f"{RL}.lower_bound": low if is_filtered else None,
        f"{RL}.upper_bound": high if is_filtered else None,
        f"{RL}.advantage.epsilon": 1e-6,
        f"{RL}.shared_noise": False,  # there, each environment has noise of its own
    }


def _environment(fields: Fields, ranks: int, warnings: list[str]) -> dict[str, Any]:
    kind, suite = fields["env.train.env_type"], fields["env.train.task_suite_name"]
    total = fields["env.train.total_num_envs"]
    num_envs, rest = divmod(total, ranks)
    if rest or not num_envs:
        raise ConfigError(f"env.train.total_num_envs = {total} is no multiple of the {ranks} processes of {PLACE}.")
    if kind == "toy":
        require_one_of("env.train.task_suite_name", suite, TOY_SUITES, " of the toy world")
        return {f"{ENV}.num_envs": num_envs, f"+{ENV}.tasks": [suite]}
    imagined = fields["env.train.wm_env_type"]
    if imagined == "toy":
        require_one_of("env.train.task_suite_name", suite, TOY_SUITES, " of the toy world")
        _require_tiny(fields)
        parts: dict[str, Any] = {f"+{ENV}.starts.tasks": [suite]}
        if _has_classifier(fields):
            path = "world_model_cfg.reward_model.from_pretrained"
            parts[f"+{ENV}.reward"] = _classifier(_file(fields, f"env.train.{path}", FILES[path]))
    else:
        require_one_of("env.train.wm_env_type", imagined, ("libero", "toy"))
        parts = _libero(fields)
    world = "env.train.world_model_cfg.cosmos"
    if fields[f"{world}.guidance"]:
        warnings.append(
            f"{world}.guidance = {fields[f'{world}.guidance']:g} changes nothing where there is no text: the second"
            " pass of each step is left out"
        )
    sampling = {
        "_target_": "cosmos_predict2.world_model.options.SamplingOptions",
        "num_steps": fields[f"{world}.num_steps"],
    }
    if fields[f"{world}.num_steps"] == 1:
        sampling["final_evaluation"] = False
    scoring = dict(
        judge="all",
        reward_on="each",
        use_rel_reward=fields["env.train.use_rel_reward"],
        reward_coef=float(fields["env.train.reward_coef"]),
        terminate_on_success=not fields["env.train.ignore_terminations"],
    )
    if "env.train.success_reward_threshold" in fields.given:
        scoring["success_threshold"] = fields["env.train.success_reward_threshold"]
    return {
        **parts,
        f"{ENV}.num_envs": num_envs,
        f"+{ENV}.sampling": sampling,
        f"{ENV}.scoring": scoring,
        f"+{ENV}.batch_size": fields.at_least_1(f"{world}.batch_size"),
        f"+{ENV}.offload": "phase" if fields["env.enable_offload"] else "never",
    }


def _require_tiny(fields: Fields) -> None:
    for name in ("cosmos_model_dir", "cosmos_ckpt_path", "world_model_cfg.cosmos.ckpt_path"):
        if fields[f"env.train.{name}"] not in (None, "tiny"):
            raise ConfigError(
                f'env.train.{name} = "{fields[f"env.train.{name}"]}", but the toy world is imagined by the model'
                " that is shipped: tiny. For another, an override of scripts.train: model.config.world_model."
            )


FILES = {  # of a world model's folder, by the field that names each
    "world_model_cfg.cosmos.ckpt_path": "the world model's weights",
    "world_model_cfg.cosmos.tokenizer_path": "its tokenizer",
    "world_model_cfg.reward_model.from_pretrained": "the reward model's weights",
    "initial_image_path": "the recorded starts",
}


def _libero(fields: Fields) -> dict[str, Any]:
    """The world model of a folder, its reward, and its starts."""
    paths = {name: _file(fields, f"env.train.{name}", what) for name, what in FILES.items()}
    world, scale = "env.train.world_model_cfg", fields["env.train.world_model_cfg.cosmos.action_scaler"]
    named, used = fields["env.train.cosmos_ckpt_path"], paths["world_model_cfg.cosmos.ckpt_path"]
    if named and os.path.normpath(str(named)) != os.path.normpath(used):
        raise ConfigError(
            f"env.train.cosmos_ckpt_path = {named}, but {world}.cosmos.ckpt_path = {used}, which follows from"
            " cosmos_model_dir: leave one of them out."
        )
    imagination = {
        "_target_": "cosmos_predict2.configs.rl.imagination.imagination_of",
        "dit_path": used,
        "tokenizer_path": paths["world_model_cfg.cosmos.tokenizer_path"],
        "action_transform": f"controller:{scale:g}x{fields['actor.model.action_dim']}",
        "chunk_size": fields[f"{world}.cosmos.chunk_size"],
    }
    starts = {
        "_target_": f"{_ENVS}.recorded_starts.RecordedStarts",
        "path": paths["initial_image_path"],
        "keyframes": fields["env.train.enable_kir"],
        "by_task": False,
        "size": fields[f"{world}.image_size"],
    }
    return {
        f"{CONFIG}.world_model": None,
        f"{CONFIG}.true_env": None,
        f"+{ENV}.imagination": imagination,
        f"+{ENV}.starts": starts,
        f"+{ENV}.reward": _classifier(paths["world_model_cfg.reward_model.from_pretrained"]),
    }


def _has_classifier(fields: Fields) -> bool:
    """True where pictures are judged by a trained network, not by the toy world's detector."""
    return bool(fields["env.train.world_model_cfg.reward_model.type"] == "ResnetRM")


def _classifier(path: str) -> dict[str, Any]:
    """A reward of 0 or 1, as published."""
    return {"_target_": "cosmos_predict2.rl.rewards.resnet.ResnetReward", "path": path, "rounded": True}


def _file(fields: Fields, path: str, what: str) -> str:
    value = fields[path]
    folder = fields["env.train.cosmos_model_dir"]
    if not value or str(value).startswith("None/"):
        raise ConfigError(
            f"{path} = {shown_value(value)}: {what} have no path, since env.train.cosmos_model_dir ="
            f" {shown_value(folder)}. Set it to the world model's folder, such as"
            " models/Cosmos-Predict2.5-LIBERO-Spatial."
        )
    repositories = {repository: name for name, (repository, _) in EMBODIED.items()}
    if folder in repositories and not os.path.isdir(folder):
        raise ConfigError(
            f"env.train.cosmos_model_dir = {shown_value(folder)}: fetch this repository, then give its folder below"
            f" models/: python -m scripts.download_checkpoints --embodied {repositories[folder]}"
        )
    if not storage.exists(value) and not os.path.isdir(value):
        fields.missing.append(f"{path}: {describe_missing(value).rstrip('.')}. A relative path is below {os.getcwd()}.")
    return str(value)


def _evaluation(fields: Fields, ranks: int) -> dict[str, Any]:
    """The environments in which the policy is judged, if it is; each of the ranks that train has its part of them."""
    if fields["runner.val_check_interval"] <= 0:
        return {}
    kind, suite = fields["env.eval.env_type"], fields["env.eval.task_suite_name"]
    if kind not in ("toy", "libero"):
        raise ConfigError(
            f'env.eval.env_type = "{kind}": policies are evaluated in libero or toy. Or never:'
            " runner.val_check_interval = -1."
        )
    total = fields.at_least_1("env.eval.total_num_envs")
    num_envs = -(-total // ranks)
    found: dict[str, Any] = {f"{CONFIG}.eval_env.num_envs": num_envs}
    if kind == "libero":
        require_one_of("env.eval.task_suite_name", suite, SUITES["libero"], " of LIBERO")
        num_tasks = SUITES["libero"][suite]
        found = {
            f"{CONFIG}.eval_env": None,  # nothing of the toy world's is left
            f"++{CONFIG}.eval_env": _simulator(fields, num_envs),
            "dataloader_val.dataset.num_tasks": num_tasks,
        }
    else:
        require_one_of("env.eval.task_suite_name", suite, TOY_SUITES, " of the toy world")
    return {
        **found,
        "dataloader_val.batch_size": num_envs,
        "dataloader_val.dataset.num": total * fields.at_least_1("algorithm.eval_rollout_epoch"),
    }


def _simulator(fields: Fields, num_envs: int) -> dict[str, Any]:
    """LIBERO's own, each environment a process; an episode ends with its success, which counts once."""
    section = "env.eval"
    task = {
        "_target_": f"{_ENVS}.simulators.libero.LiberoTask",
        "suite": fields[f"{section}.task_suite_name"],
        "height": fields[f"{section}.init_params.camera_heights"],
        "width": fields[f"{section}.init_params.camera_widths"],
        "num_steps_wait": WAIT,
        "max_steps": fields.at_least_1(f"{section}.max_episode_steps"),
    }
    return {
        "_target_": f"{_ENVS}.simulators.workers.WorkerEnv",
        "_recursive_": False,
        "make": task,
        "num_envs": num_envs,
        "render": "auto",
        "chunk": fields.at_least_1("actor.model.num_action_chunks"),
    }
