# SPDX-License-Identifier: Apache-2.0
"""Distil a world model's run: a student of one to four steps learns what the run's weights make in many."""

import argparse
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from imaginaire.errors import ConfigError

_EPILOG = """\
It is a training (scripts.train) with the data, the network and the optimizer of the run, whose command it prints;
overrides come after a bare '--'. The same command again resumes. It begins at the run's newest weights.

examples:
  python -m scripts.distill --world_model checkpoints/posttraining/video2world/my_run
  python -m scripts.distill --world_model RUN --causal --iterations 2000 -- optimizer.lr=0.01
  torchrun --nproc_per_node=8 -m scripts.distill --world_model RUN --steps 4 --guidance 3
"""

parser = command_line.parser("scripts.distill", __doc__, _EPILOG)
add = parser.add_argument
add("--world_model", required=True, metavar="RUN", help="the teacher: the folder of a run, or one of its checkpoints")
add("--name", default="", help="of the student's run (default: that of RUN, and _student)")
add("--steps", type=command_line.at_least(1, 4), default=1, help="of the student for a chunk")
add("--teacher_steps", type=command_line.at_least(1), default=8, help="of the teacher for a chunk")
add("--guidance", type=float, default=0.0, help="of the teacher, away from no text; the student has it in its weights")
add("--causal", action="store_true", help="each latent frame of those before it alone, for drive --stream")
add("--iterations", type=command_line.at_least(1), default=1000, help="of the training")
add("--dryrun", action="store_true", help="print the composed configuration, build nothing")
add("overrides", nargs="*", metavar="OVERRIDE", help="of the run's configuration, after --")


def run(args: argparse.Namespace) -> int:
    from cosmos_predict2.checkpoints.card import run_folder, run_tree, section_of
    from imaginaire.config.compose import quoted
    from scripts import train

    if not (folder := run_folder(args.world_model)):
        raise ConfigError(
            f"{args.world_model} lies in no run's folder (none has a config.yaml). The tiny model that ships is the"
            " teacher of python -m scripts.train -- experiment=tiny_student"
        )
    tree = run_tree(folder)
    noise_alone = 1e6  # a level, as the only step begins
    pipe, teacher = "model.config.pipe_config", quoted(args.world_model)
    words = [
        f"job.name={args.name or Path(folder).name + '_student'}",
        f"{pipe}.objective={{_target_: cosmos_predict2.world_model.objectives.Student}}",
        f"+{pipe}.objective.teacher={teacher}",
        f"+{pipe}.objective.teacher_steps={args.teacher_steps}",
        f"+{pipe}.objective.guidance={args.guidance}",
        f"+{pipe}.objective.causal={args.causal}",
        f"{pipe}.timestamps.nfe={args.steps}",
        f"model.config.model_manager_config.dit_path={teacher}",
        f"model.config.validation_sigmas=[{noise_alone:g}]",
        f"trainer.max_iter={args.iterations}",
    ]
    if section_of(tree, "trainer", "callbacks").get("draw_samples"):
        words.append(f"trainer.callbacks.draw_samples.num_sampling_step={args.steps}")
    imports = [word for name in getattr(args, "import") for word in ("--import", name)]
    flags = [*imports, *(["--dryrun"] if args.dryrun else [])]
    command = [*flags, "--config", f"{folder}/config.yaml", "--", *words, *args.overrides]
    if os.environ.get("RANK", "0") == "0":
        print(shlex.join(["python", "-m", "scripts.train", *command]), flush=True)
    return train.main(command)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
