# SPDX-License-Identifier: Apache-2.0
"""The options of sampling, from the flags of a program to the sampler."""

from dataclasses import asdict, dataclass
from typing import Any

from imaginaire.command_line import at_least, flag


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options that all requests of a run share."""

    # away from the negative prompt, or without one from no text; at 0 the network runs once a step
    guidance: float = flag(0.0, "x = cond + guidance (cond - uncond), away from the negative prompt; 0: none")
    num_steps: int = flag(35, "sampling steps", type=at_least(1, 10_000))
    solver: str | None = flag(None, "default: that of the model's objective, 2ab, or unipc of Predict2.5")
    # Evaluate once more at the lowest noise level, where that is above 0; without it, num_steps 1 is one evaluation.
    final_evaluation: bool = True
    use_cuda_graphs: bool = flag(False, "capture the network's forward pass")
    compile_network: bool = flag(False, "compile the network's blocks: up to a minute at first, then faster")
    progress: bool = False  # show a bar
    is_repeatable: bool = False  # whatever memory is free: of training, whose later part must compute as the whole does

    def record(self) -> dict[str, Any]:
        """The options that change or describe a result, as plain values."""
        usual = {"final_evaluation": True, "compile_network": False}
        left_out = {"progress", "is_repeatable", *(key for key in usual if getattr(self, key) == usual[key])}
        return {key: value for key, value in asdict(self).items() if key not in left_out}


UNGUIDED = SamplingOptions()
GUIDED = SamplingOptions(guidance=7.0)  # the published scale, for prompts
