# SPDX-License-Identifier: Apache-2.0
"""The gain of playing on until enough groups teach something (DAPO), where most groups all succeed or all fail.

    python -m benchmarks.dynamic_sampling                # ten minutes of a core
    python -m benchmarks.dynamic_sampling --seeds 0 1 2

The small policy of the toy world is first trained with the dense reward. Then it is paid for success alone and draws
little, so that the episodes of most groups end alike: once with one rollout for an update (GRPO), once with as many as
it takes (``model.config.rl.max_rollouts``). Printed is the success on 3,200 held-out starts after every third
experience, and after how many each first has what GRPO has at best.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks import machine
from benchmarks.policy_learning import SUCCESS

EXPERIMENT = "tiny_vla_grpo_simulator"
STEPS = 16  # of the optimizer, for an experience
EVERY = 3  # experiences between two checks
WARM_UP, EXPERIENCES = 80, 30  # with the dense reward, then with the sparse one
WANTED = 2 / 3  # of GRPO's experiences at most


def checks(root: str, name: str, policy: Path, seed: int, rollouts: int) -> list[float]:
    """Success after every third experience, the first before all."""
    folder, _ = machine.train(
        *(root, name, EXPERIMENT, f"model.config.policy.path={policy}", "+model.config.policy.noise=0.05"),
        *("+model.config.env.sparse=true", f"model.config.rl.max_rollouts={rollouts}", "optimizer.lr=1e-4"),
        *("dataloader_val.dataset.num=3200", f"trainer.seed={seed}", f"trainer.max_iter={EXPERIENCES * STEPS}"),
        *(f"trainer.validation_iter={EVERY * STEPS}", f"checkpoint.save_iter={EXPERIENCES * STEPS}"),
    )
    return [record[SUCCESS] for record in machine.metrics(folder, SUCCESS)]


def first(values: list[float], least: float) -> int | None:
    """The experiences after which it is reached."""
    return next((EVERY * k for k, value in enumerate(values) if value >= least), None)


def main() -> int:
    arguments = machine.parser(__doc__, "seeds", seeds=[5]).parse_args()
    root = tempfile.mkdtemp(prefix="dynamic_sampling_")
    warm = [f"trainer.max_iter={WARM_UP * STEPS}", f"checkpoint.save_iter={WARM_UP * STEPS}"]
    policy, _ = machine.train(root, "warm", EXPERIMENT, *warm, "trainer.run_validation=false")
    for seed in arguments.seeds:
        curves = {
            name: checks(root, f"{name}_{seed}", policy, seed, rollouts)
            for name, rollouts in (("grpo", 1), ("dapo", 16))
        }
        best = max(curves["grpo"])
        needed = {name: first(curve, best) for name, curve in curves.items()}
        for name, curve in curves.items():
            print(f"seed {seed} {name}: {' '.join(f'{value:.3f}' for value in curve)}; {best:.3f} after {needed[name]}")
        by_grpo, by_dapo = needed["grpo"], needed["dapo"]
        is_met = by_dapo is not None and by_grpo is not None and by_dapo <= WANTED * by_grpo
        print(f"seed {seed}: a third fewer experiences to equal success: {'yes' if is_met else 'no'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
