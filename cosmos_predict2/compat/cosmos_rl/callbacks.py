# SPDX-License-Identifier: Apache-2.0
"""The callbacks of Cosmos-RL's recipes for world models, and our counterpart of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_predict2.callbacks.draw_samples import DrawSamples
from imaginaire.errors import ConfigError, near

KEY = "trainer.callbacks"
_SAMPLES = (
    *("every_n", "step_size", "n_viz_sample", "num_sampling_step", "guidance", "is_sample", "is_x0", "n_x0_level"),
    *("is_ema", "fps"),
)
STORED = ("save_s3", "save_s3_every_log_n", "upload_every_n_mul", "save_logging_iter_multipler")  # unused anywhere
Settings = dict[str, Any]


@dataclass(frozen=True)
class Counterpart:
    """Ours by its name (none: no callback is needed), the arguments that both have, and those without effect."""

    ours: str = ""
    same: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    reason: str = ""


def _samples(arguments: Settings) -> Settings:
    """The added callback's node; nothing where it would draw nothing."""
    if arguments.get("use_negative_prompt"):
        raise ConfigError(f"{KEY}: use_negative_prompt = true, but samples are drawn against no text. Leave it out.")
    is_sample = bool(arguments.get("is_sample", True) and arguments.get("guidance", [0.0]))
    if not is_sample and not arguments.get("is_x0", True):
        return {}
    given = {name: arguments[name] for name in _SAMPLES if name in arguments and name != "guidance"}
    guidance = {"guidance": arguments.get("guidance", [0.0])} if is_sample else {}
    target = f"{DrawSamples.__module__}.{DrawSamples.__qualname__}"
    return {"_target_": target, **given, **guidance, "is_sample": is_sample}


_LOGS = ("logging_iter_multipler",)
_DRAWN = Counterpart(
    same=_SAMPLES,
    unused=("n_sample_to_save", "use_negative_prompt", "show_all_frames"),
    reason="draw_samples, under the recipe's name: all clips that are drawn are saved, whole",
)
CALLBACKS: Mapping[str, Counterpart] = {
    "grad_clip": Counterpart("grad_clip", ("clip_norm", "force_finite")),
    "low_prec": Counterpart("low_prec", ("update_iter",)),
    "iter_speed": Counterpart("iter_speed", ("hit_thres", "every_n", "step_size")),
    "heart_beat": Counterpart("heart_beat", ("update_interval_in_minute", "every_n", "step_size")),
    "device_monitor": Counterpart("device_monitor", ("every_n", "step_size", "log_memory_detail")),
    "manual_gc": Counterpart("manual_gc", ("warm_up", "every_n", "step_size")),
    "every_n_sample_reg": _DRAWN,
    "every_n_sample_ema": _DRAWN,
    "param_count": Counterpart(reason="every run logs its parameters"),
    "compile_tokenizer": Counterpart(
        unused=("enabled", "compile_after_iterations", "dynamic"), reason="the tokenizer is not compiled here"
    ),
    "frame_loss_log": Counterpart(unused=_LOGS, reason="metrics.jsonl has the losses"),
    "wandb": Counterpart(unused=_LOGS, reason="job.wandb_mode switches it on; trainer.logging_iter is how often"),
    "wandb_10x": Counterpart(unused=_LOGS, reason="see wandb"),
    "dataloader_speed": Counterpart(unused=("every_n", "step_size"), reason="iter_speed has the time for data"),
    "reward_callback": Counterpart(unused=_LOGS, reason="metrics.jsonl has every reward"),
    "verify_data_batch_keys": Counterpart(unused=("check_first_n",), reason="the model checks each batch"),
}


def callback_settings(listed: Sequence[Mapping[str, Any]], warnings: list[str]) -> Settings:
    """The settings of ours that the callbacks of a recipe become, by key."""
    settings: Settings = {}
    for entry in listed:
        name = str(entry.get("name", ""))
        if name not in CALLBACKS:
            raise ConfigError(f"{KEY}: no callback is called '{name}'.{near(name, CALLBACKS)}")
        place, counterpart, arguments = f"{KEY}.{name}", CALLBACKS[name], dict(entry.get("args", {}))
        for other in sorted(set(entry) - {"name", "args"}):
            if other != "step_size":  # in published files, beside args
                raise ConfigError(f"{place}.{other}: a callback has a name and args. Did you mean args.{other}?")
            warnings.append(f"{place}.{other}: Cosmos-RL ignores this field, and so does this run; args.{other} counts")
        known = (*counterpart.same, *counterpart.unused, *STORED)
        for argument in arguments:
            if argument not in known:
                raise ConfigError(f"{place}.args.{argument}: '{name}' has no such argument.{near(argument, known)}")
        if counterpart is not _DRAWN:
            ours = f"{KEY}.{counterpart.ours}"
            settings |= {f"{ours}.{key}": arguments[key] for key in counterpart.same if key in arguments}
        elif node := _samples(arguments):
            settings[f"+{place}"] = node
    if listed and not any(entry.get("name") == "grad_clip" for entry in listed):
        settings[f"{KEY}.grad_clip"] = None
        warnings.append(f"{KEY}: without grad_clip, gradients are not clipped")
    return settings
