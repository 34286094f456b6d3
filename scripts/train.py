# SPDX-License-Identifier: Apache-2.0
"""Train: compose a configuration from a config file, an experiment and overrides, and run it."""

import argparse
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from imaginaire import command_line
from imaginaire.errors import ConfigError, UserError

log = logging.getLogger(__name__)

DEFAULT_CONFIG = "cosmos_predict2/configs/base/config.py"
OTHER_TREE = "cosmos_predict2/_src/"  # where guides of Predict2.5 have their configurations
EXIT_USER_ERROR = 2
EXIT_KEYBOARD = 130  # as a shell counts SIGINT
EPILOG = """\
overrides, after a bare '--' (the flags come before it):
  experiment=NAME            choose an experiment; --list shows them
  group=NAME                 choose an entry of a group, such as optimizer=adamw or ckpt_type=dcp
  a.b.c=VALUE                set a value; a list is given whole: scheduler.f_max=[0.5]
  +a.b=VALUE                 add an argument that the target takes but the configuration does not show
  key=null                   set to nothing, or switch off: trainer.callbacks.manual_gc=null
  ~a.b, ~dataloader_val      remove an argument, or a whole loader
  'key="a,b"'                a comma, '=' or bracket in a value: quotes of its own inside the shell's

examples:
  python -m scripts.train --list --long
  python -m scripts.train --config=examples/minimal/config.py --list
  python -m scripts.train --config=examples/minimal/config.py --dryrun -- experiment=minimal trainer.max_iter=10
  python -m scripts.train --config=examples/minimal/config.py -- experiment=minimal optimizer.lr=1e-4
  torchrun --nproc_per_node=2 --master_port=12341 -m scripts.train \\
      --config=examples/minimal/config.py -- experiment=minimal
  python -m scripts.train --config=checkpoints/examples/minimal/minimal/config.yaml -- trainer.max_iter=800

exit codes:
  0    done
  1    an unexpected exception, with its traceback
  2    something that you can mend, in one message
  70   no progress in trainer.timeout_period seconds
  75   stopped by SIGTERM, SIGUSR1, SIGHUP or Ctrl-C with its state saved: the same command goes on
  130  Ctrl-C before training began, or a second one

Runs go to $IMAGINAIRE_OUTPUT_ROOT (default: checkpoints)/project/group/name; the same command again resumes there.
"""


class _Parser(command_line.Parser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="python -m scripts.train",
        usage="%(prog)s [--import MODULE] [--config PATH] [--list [--long] | --dryrun] [--debug] [-- OVERRIDE ...]",
        description="Train a model: compose a configuration and run it. One process, or as many as torchrun starts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.older = {"--dry_run": "--dryrun"}
    config = "a Python file with make_config(), or the config.yaml of an earlier run (default: %(default)s)"
    made.add_argument("--config", metavar="PATH", default=DEFAULT_CONFIG, help=config)
    action = made.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="print the names of all experiments, one per line")
    long = "with --list: a line on each, with its model, data and length"
    made.add_argument("--long", action="store_true", help=long)
    dryrun = "print the composed configuration, write it to the run folder as config.yaml, build nothing"
    action.add_argument("--dryrun", action="store_true", help=dryrun)
    made.add_argument("--debug", action="store_true", help="show the traceback of an error, not its message alone")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments or os.environ.get("IMAGINAIRE_DEBUG", "") not in ("", "0")
    try:
        return run(arguments)
    except UserError as error:
        log_to_run(f"{type(error).__name__}: {error}")
        return report(error, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_KEYBOARD
    except Exception as error:
        log_to_run("stopped by an unexpected exception", error)
        raise


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        parser().parse_args(arguments[:1])  # before the slow imports
    from imaginaire.config import compose, registry

    flags, overrides = compose.split_arguments(arguments)
    args, unknown = parser().parse_known_args(flags)
    if unknown:
        raise compose.unknown_flag(unknown[0], overrides)
    if OTHER_TREE in args.config and not os.path.exists(args.config):
        print(f"--config={args.config}: its experiments are in {DEFAULT_CONFIG} here, which is read", file=sys.stderr)
        args.config = DEFAULT_CONFIG
    if args.long and not args.list:
        raise ConfigError("--long is an option of --list: python -m scripts.train --list --long")
    if args.list:
        names = compose.experiment_names(args.config)
        sys.stdout.write("".join(f"{name}  {registry.summary(name)}\n" if args.long else f"{name}\n" for name in names))
        if not names:
            print(f"no experiments in {args.config}", file=sys.stderr)
        return 0
    config = compose.compose(args.config, overrides)
    if args.dryrun:
        return dryrun(config, overrides)
    from imaginaire.training import provenance, trainer

    if os.environ.get("RANK", "0") == "0":
        for line in provenance.foreign_packages():
            log.warning("%s", line)
    return trainer.launch(config)


def dryrun(config: Any, overrides: Sequence[str]) -> int:
    """Print and save the configuration; what this machine lacks for the run is a note, never an error.

    The ``config.yaml`` of a run that has started stays what that run used.
    """
    from imaginaire import storage
    from imaginaire.config.lazy_config import to_yaml
    from imaginaire.training import preflight, provenance

    text = to_yaml(config)
    if os.environ.get("RANK", "0") != "0":
        return 0
    print(text, end="")
    for override in overrides:
        print(f"# override: {override}")
    world_size = os.environ.get("WORLD_SIZE", "1")
    notes = [f"{world_size} processes here"] if world_size != "1" else []
    notes += [*provenance.foreign_packages(), *preflight.notes(config)]
    run_dir, path = config.job.path_local, ""
    try:
        started = any(storage.exists(storage.join(run_dir, name)) for name in ("runs.jsonl", "checkpoints"))
        path = storage.join(run_dir, "config.dryrun.yaml" if started else "config.yaml")
        storage.write_text(path, text)
        if started:
            notes.append(f"a run has started in {run_dir}: its config.yaml is left as it is")
    except (OSError, UserError) as error:
        notes.append(f"nothing was written: {error}")
        path = ""
    for note in notes:
        print(f"note: {note}")
    if path:
        print(f"config: {path}")
    return 0


def log_to_run(message: str, error: BaseException | None = None) -> None:
    """Keep what ended the program in the log file of the run, if that is open; stderr gets it in any case."""
    trace = (type(error), error, error.__traceback__) if error is not None else None
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "%s", (message,), trace, "main")
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def report(error: UserError, debug: bool) -> int:
    """Print on stderr what to mend. The first process of a machine prints first: torchrun then ends the others."""
    rank, local_rank = os.environ.get("RANK"), os.environ.get("LOCAL_RANK", "0")
    if local_rank != "0":
        time.sleep(3)
    if debug:
        traceback.print_exception(error)
    prefix = f"[rank {rank}] " if rank is not None and rank != "0" else ""
    print(f"{prefix}{type(error).__name__}: {error}", file=sys.stderr)
    return EXIT_USER_ERROR


def leave(code: int) -> NoReturn:
    """End the process. One of several goes at once: everything is closed, and now and then torch's own teardown of a
    process group's threads would abort a run that has finished."""
    if "RANK" in os.environ:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if "imaginaire.training.trainer" not in sys.modules:  # nothing has run
        gc.freeze()  # else Python's last collections look through all of torch, for half a second
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
