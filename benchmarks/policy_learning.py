# SPDX-License-Identifier: Apache-2.0
"""Learning of a policy of the toy world, in imagination or the simulator: greedy success before and after, by seed.

    python -m benchmarks.policy_learning                                      # both, seeds 0, 1 and 2
    python -m benchmarks.policy_learning --experiment tiny_vla_grpo_world_model_frozen --seeds 0 -- trainer.max_iter=160
    python -m benchmarks.policy_learning --windows all --least 0.08           # from a stronger clone
    python -m benchmarks.policy_learning --experiment tiny_vla_grpo_pi05_world_model   # another policy

Every seed has a clone of its own, by scripts.train_policy, and a run of its own. Success is that of 800 held-out starts
in the simulator (standard error .017), which no run looks at to stop or to choose weights: the last ones count. Core-
seconds are those of the run with its checks at start and end alone. ``gap`` is imagined less true success of actions
that the policy drew in imagination, at the end. ``--curve`` draws success over core-seconds, from runs that check after
every refinement.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine

EXPERIMENTS = ("tiny_vla_grpo_world_model", "tiny_vla_grpo_simulator")
LEAST = {"tiny_vla_grpo_world_model": 0.14, "tiny_vla_grpo_simulator": 0.40}  # gain on each seed
MEAN = {
    "tiny_vla_grpo_world_model": 0.18,
    "tiny_vla_grpo_openvla_oft_simulator": 0.15,
    "tiny_vla_grpo_openvla_oft_world_model": 0.08,
    "tiny_vla_grpo_pi05_simulator": 0.15,
    "tiny_vla_grpo_pi05_world_model": 0.08,
}
SUCCESS = "val/greedy_success"
AT_THE_END = {"tiny_vla_grpo_world_model": 0.60}


@dataclass(frozen=True)
class LearningRun:
    """One run; ``curve`` has (core-seconds, success) of every check."""

    experiment: str
    seed: int
    before: float
    after: float
    seconds: float
    gap: float | None
    curve: list[tuple[float, float]]

    @property
    def gain(self) -> float:
        return self.after - self.before

    def __str__(self) -> str:
        gap = "" if self.gap is None else f"  gap {self.gap:+.3f}"
        return (
            f"{self.experiment:36} seed {self.seed}  {self.before:.3f} -> {self.after:.3f} ({self.gain:+.3f})"
            f"  {self.seconds:.0f} core-s{gap}"
        )


def policy_of(experiment: str) -> str:
    """The kind of policy that it trains, as scripts.train_policy calls it."""
    return next((name for name in ("openvla_oft", "pi05") if name in experiment), "toy")


@functools.cache
def clone(policy: str, seed: int, root: Path, windows: str = "") -> Path:
    """The policy that a run begins with: a clone by the defaults of the policy, or of other ``windows``."""
    path = root / f"clone_{policy}_{windows.replace(',', '_')}_{seed}"
    command = ["scripts.train_policy", "--policy", policy, "--seed", str(seed), "--out", str(path), "--overwrite"]
    machine.program(root, *command, *(["--windows", windows] if windows else []))
    return path / "policy.safetensors" if policy == "toy" else path


def learn(experiment: str, seed: int, policy: Path, root: Path, overrides: Sequence[str] = ()) -> LearningRun:
    """One run from a clone."""
    options = [f"trainer.seed={seed}", f"model.config.policy.path={policy}", "checkpoint.keep_last=1"]
    folder, seconds = machine.train(root, f"{experiment}_{seed}", experiment, *options, *overrides)
    checks = machine.metrics(folder, SUCCESS)
    last = max(1, checks[-1]["iteration"])
    curve = [(seconds * check["iteration"] / last, check[SUCCESS]) for check in checks]
    return LearningRun(experiment, seed, curve[0][1], curve[-1][1], seconds, checks[-1].get("val/gap"), curve)


def missed(rows: Sequence[LearningRun], least: float | None = None) -> list[str]:
    """The goals that the runs of one experiment have not reached."""
    name = rows[0].experiment
    found = []
    wanted = LEAST.get(name) if least is None else least
    if wanted is not None and (low := [row.seed for row in rows if row.gain < wanted]):
        found.append(f"+{wanted:.2f} on seeds {low}")
    if least is None and name in MEAN and sum(row.gain for row in rows) / len(rows) < MEAN[name]:
        found.append(f"+{MEAN[name]:.2f} on average")
    if least is None and name in AT_THE_END and (low := [row.seed for row in rows if row.after < AT_THE_END[name]]):
        found.append(f"{AT_THE_END[name]:.2f} at the end on seeds {low}")
    return found


def main() -> int:
    flags = ("experiment", "seeds", "output", "overrides")
    parser = machine.parser(__doc__, *flags, experiment=list(EXPERIMENTS), seeds=[0, 1, 2])
    parser.add_argument("--windows", default="", help="of the demonstrations; all: a stronger clone of the toy policy")
    parser.add_argument("--least", type=float, default=None, help="the gain that is wanted of each run")
    parser.add_argument("--curve", default="", help="a .png")
    arguments = machine.parse(parser)
    root = Path(arguments.output)
    checks = [] if arguments.curve else ["trainer.validation_iter=1000000000"]  # at the start and at the end
    rows, verdicts = [], []
    for experiment in arguments.experiment:
        of_one = []
        for seed in arguments.seeds:
            policy = clone(policy_of(experiment), seed, root, arguments.windows)
            of_one.append(learn(experiment, seed, policy, root, [*checks, *arguments.overrides]))
            print(of_one[-1], flush=True)
        verdicts.append(f"{experiment}: misses {', '.join(missed(of_one, arguments.least)) or 'nothing'}")
        rows += of_one
    print("", *rows, *verdicts, sep="\n")
    if arguments.curve:
        lines = {f"{row.experiment.removeprefix('tiny_vla_grpo_')}, seed {row.seed}": row.curve for row in rows}
        machine.draw(arguments.curve, "core-seconds", {"greedy success in the simulator": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
