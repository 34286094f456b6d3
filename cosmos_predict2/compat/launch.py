# SPDX-License-Identifier: Apache-2.0
"""The run that a recipe was translated to is started: here, or by torchrun on the GPUs that it asks for."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence

import torch

from cosmos_predict2.compat.fields import Translation
from imaginaire import command_line
from imaginaire.errors import ConfigError

Train = Callable[[Sequence[str]], int]  # scripts.train.main


def start(
    translation: Translation,
    overrides: Sequence[str],
    train: Train,
    *,
    name: str,
    dryrun: bool,
    debug: bool,
    num_machines: int = 1,
    torchrun: Callable[[], list[str]] = lambda: ["--standalone"],  # its arguments, but for the number of processes
    is_logged: bool = False,
) -> int:
    """Train, or evaluate, and return the exit code; ``name`` is what the user calls the file that was translated."""
    is_first = os.environ.get("RANK", "0") == "0"
    for variable, value in translation.environment.items():
        os.environ.setdefault(variable, value)
    if is_first:
        for warning in translation.warnings:
            print(f"{name}: {warning}", file=sys.stderr)
    if translation.evaluation is not None:
        words = ["-m", "scripts.evaluate_policy", *translation.evaluation, *overrides]
        if not dryrun:
            _become(words)
        print(shlex.join(["python", *words]))
        return 0
    words = [*(["--debug"] if debug else []), "--", *translation.overrides, *overrides]
    if dryrun:
        code = train(["--dryrun", *words])
        if code == 0 and is_first:
            for sentence in translation.missing:
                print(f"note: {sentence}")
        return code
    if translation.missing:
        raise ConfigError("\n".join(translation.missing))
    if "RANK" not in os.environ:
        require_gpus(translation, num_machines)
        if translation.num_gpus > 1 or is_logged:
            processes = f"--nproc_per_node={translation.num_gpus // num_machines}"
            _become(["-m", "torch.distributed.run", *torchrun(), processes, "-m", "scripts.train", *words])
    return train(words)


def _become(words: Sequence[str]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words])


def require_gpus(translation: Translation, num_machines: int) -> None:
    """Raise where a machine has fewer GPUs than its part of the recipe asks for; one process runs without any."""
    here, wanted = torch.accelerator.device_count(), translation.num_gpus
    if wanted % num_machines:
        raise ConfigError(f"--num-workers {num_machines} does not divide the {wanted} processes of the recipe.")
    if wanted // num_machines > max(1, here):
        field = max(translation.gpu_fields, key=lambda name: translation.gpu_fields[name])
        raise ConfigError(
            f"The recipe asks for {wanted} GPUs ({translation.gpu_product}), and this machine has {here}. Lower"
            f" {field}, or start the command on several machines (--num-workers, --worker-idx, --node-ip-list)."
        )


def main(
    parser: command_line.Parser,
    run: Callable[[argparse.Namespace, Sequence[str]], int],
    arguments: Sequence[str] | None,
) -> int:
    """The exit code of a program whose overrides of scripts.train come after --."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    return command_line.main(parser, lambda args: run(args, words[cut + 1 :]), words[:cut])
