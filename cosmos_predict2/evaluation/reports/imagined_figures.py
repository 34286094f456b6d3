# SPDX-License-Identifier: Apache-2.0
"""All that is measured of a model that imagines the toy world, in one call: `measure`. Nothing here is chosen after
training: episodes follow from a seed, windows from their numbers, noise from both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from cosmos_predict2.evaluation.metrics.controllability import ActionGap
from cosmos_predict2.evaluation.metrics.imagined_episodes import (
    Imagine,
    held_out_episodes,
    horizon_table,
    imagined,
    pictures,
    windows_of,
)
from cosmos_predict2.evaluation.metrics.imagined_success import (
    HEADER,
    WEAK_DRIVER,
    Agreement,
    actions_of,
    agreement,
    first_frames,
)
from cosmos_predict2.evaluation.reports.action_evaluation import gap_of
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.toy_world.episodes import Mix
from cosmos_predict2.world_model.sampling import SamplingOptions

MODEL, STANDSTILL = "model", "repeat first frame"
MIXTURE, WEAK = "held-out mixture", "weak driver"
DRIVERS: dict[str, str | Mix] = {MIXTURE: "mixed", WEAK: WEAK_DRIVER}


@dataclass(frozen=True)
class ImaginedFigures:
    """The figures that `measure` gives. PSNR is in dB, of frames 1, 2, ... after the first."""

    horizons: Mapping[str, Mapping[str, list[float]]]  # who imagines -> region -> PSNR
    gap: ActionGap | None
    ends: Mapping[str, Agreement]  # who drives -> how rollouts of whole episodes end
    detector: Mapping[str, Agreement]  # the same of true pictures
    num_steps: int

    def gain(self, horizon: int, over: str = STANDSTILL, region: str = "all") -> float:
        """The PSNR of the model above that of another, in dB, ``horizon`` frames after the first; 0: at the last."""
        return self.horizons[MODEL][region][horizon - 1] - self.horizons[over][region][horizon - 1]

    def as_text(self) -> str:
        """Tables to be read."""
        count = len(self.horizons[MODEL]["all"])
        rows = [" " * 35 + "".join(f"{h:>6d}" for h in range(1, count + 1)) + "   frames after the first, PSNR in dB"]
        for region in self.horizons[MODEL]:
            for who, table in self.horizons.items():
                rows.append(f"{region:<8} {who:<26}" + "".join(f"{value:>6.1f}" for value in table[region]))
        if self.gap is not None:
            rows.append("loss at sigma " + "".join(f"{sigma:>9g}" for sigma in self.gap.sigmas))
            for name, losses in (("true actions", self.gap.true), ("swapped", self.gap.swapped)):
                rows.append(f"{name:<14}" + "".join(f"{loss:>9.4f}" for loss in losses))
            ratios = "".join(f"{ratio:>9.2f}" for ratio in self.gap.ratios)
            rows.append(f"ratio         {ratios}   mean {self.gap.mean:.2f}")
        rows.append(f"{'whole episodes':<31} {HEADER}")
        for name, ends in self.ends.items():
            rows.append(f"{name:<31} {ends.as_row()}")
            rows.append(f"{name + ', true pictures':<31} {self.detector[name].as_row()}")
        return "\n".join(rows)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        gap = None if self.gap is None else self.gap.as_dict()
        return {**asdict(self), "gap": gap, "gain_1": self.gain(1), "gain_last": self.gain(0)}


def measure(
    pipe: Video2WorldActionConditionedPipeline,
    *,
    num_episodes: int = 400,
    setting: str = "default",
    size: int | None = None,
    tasks: Sequence[str] = ("push_puck",),
    num_steps: int = 1,
    seed: int = 0,
) -> ImaginedFigures:
    """The figures of a model on held-out episodes of the toy world."""
    dim = pipe.transform.dim
    world: dict[str, Any] = dict(seed=seed, setting=setting, size=size, tasks=tasks, action_dim=dim)
    driven = {name: held_out_episodes(num_episodes, mix=mix, **world) for name, mix in DRIVERS.items()}
    imagine = imagination(pipe, num_steps)
    windows = windows_of(driven[MIXTURE], pipe.config.chunk_size)
    first = windows.video_B_C_F_H_W[:, :, :1]
    videos = {MODEL: imagined(imagine, first, windows.action_B_A_D)}
    actions = pipe.transformed(windows.action_B_A_D.numpy())
    return ImaginedFigures(
        horizons=horizon_table(windows, videos, pipe.world),
        gap=gap_of(pipe, windows.video_B_C_F_H_W, actions),
        ends={name: agreement(e, imagined(imagine, first_frames(e), actions_of(e))) for name, e in driven.items()},
        detector={name: agreement(e, pictures(e.states[:, [0, -1]], e.size)) for name, e in driven.items()},
        num_steps=num_steps,
    )


def imagination(pipe: Video2WorldActionConditionedPipeline, num_steps: int) -> Imagine:
    """Imagination by a model, chunk by chunk; a chunk hands its last frames to the next one as decoded floats."""

    def imagine(first_B_C_1_H_W: Tensor, action_B_A_D: Tensor) -> Tensor:
        actions = pipe.transformed(action_B_A_D.numpy())
        seeds = list(range(len(actions)))
        return pipe.rollout(
            first_B_C_1_H_W, actions, seeds, SamplingOptions(num_steps=num_steps), float_hand_over=True
        ).cpu()

    return imagine
