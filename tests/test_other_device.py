# SPDX-License-Identifier: Apache-2.0
"""Training, sampling and rollouts with everything on another device than the CPU (`tests.far_device`): no tensor is
made on the wrong one, the host waits for the device only where the lists here say so, and the numbers are those of the
CPU.

Each test has a process of its own, as a process can have one such device for good.
"""

import copy
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.world_model.sampling import SamplingOptions
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire import distributed
from imaginaire.optim import adamw
from imaginaire.training import trainer as trainers
from tests.far_device import NAME, FarDevice, device, register
from tests.multiprocess import run_distributed
from tests.pipelines import test_video2world, test_video2world_action
from tests.training import losses, train
from tests.world_model import test_flow

Waits = dict[str, int]
Losses = list[tuple[int, float]]

FLOW = "predict2p5_video2world_training_tiny_groot_gr1_480"
ACTION = "predict2_video2world_tiny_action_conditioned_training"
CONFIG = "cosmos_predict2/configs/base/config.py"
RUN = [
    "job.project=tests",
    "job.group=engine",
    "job.name=far",
    "trainer.logging_iter=100",
    "trainer.grad_accum_iter=2",
    "trainer.validation_iter=2",
    "trainer.max_val_iter=1",
    "dataloader_train.batch_size=2",
    "dataloader_train.dataset.num_episodes=8",
    "dataloader_val.dataset.num_episodes=4",
    "checkpoint.save_iter=100",
    "model.config.pipe_config.ema.enabled=True",
    "model.config.pipe_config.net.num_blocks=1",
    "model.config.pipe_config.net.sac_config.mode=mm_only",
]

# Where the host may wait in a training step, and how often: both look at the same moment, when backward is over.
WAITS_OF_A_STEP = {
    # a gradient that is not finite must be known before the step is applied
    "imaginaire/training/callbacks/train.py:on_before_optimizer_step reads a number": 1,
    # and so must a loss
    "imaginaire/training/trainer.py:_optimizer_step reads a number": 1,
}
# A text must not be ignored in silence by a network that reads none: once a micro-batch.
UNREAD_TEXT = {"cosmos_predict2/nn/dit.py:require_readable reads a number": 2}

# Where the host may wait in a rollout of so many chunks. When a chunk begins nothing is queued, so that its inputs may
# as well be waited for, and whether a text says anything and guidance changes anything is worth a look at them.
CHUNKS = 3
WAITS_OF_A_ROLLOUT = {
    "cosmos_predict2/world_model/world_model.py:encode copies to the device and waits": 1,  # the first frames
    "cosmos_predict2/world_model/world_model.py:<dictcomp> copies to the device and waits": CHUNKS,  # the actions
    "cosmos_predict2/world_model/imagination.py:_rows copies to the device and waits": CHUNKS,  # the text
    "cosmos_predict2/world_model/world_model.py:generate_latents copies to the device and waits": CHUNKS,  # the noise
    "cosmos_predict2/conditioner.py:_is_same needs the shape of equal": CHUNKS,  # is there anything to guide by?
    "cosmos_predict2/nn/dit.py:prepare reads a number": CHUNKS,  # is there a text?
    # What is not finite must not become the next chunk's first frame.
    "cosmos_predict2/world_model/imagination.py:_pixels reads a number": CHUNKS,
}


def _trained(overrides: list[str], resumes: bool, root: Path) -> tuple[Waits, Losses, Losses]:
    """What made the host wait in all steps but those that begin or resume the run, which check it besides; the losses
    of validation there, and those on the CPU."""
    waits: Counter[str] = Counter()
    step = trainers.ImaginaireTrainer._step

    def watched(self: Any, *args: Any) -> Any:
        far.watching = self.iteration != self.resumed_iteration
        try:
            return step(self, *args)
        finally:
            far.watching = False

    last = "trainer.max_iter=4" if resumes else "trainer.max_iter=2"
    train(root / "cpu", [*overrides, *RUN, last], config=CONFIG)
    for end in ["trainer.max_iter=2", last] if resumes else [last]:
        with (
            FarDevice() as far,
            mock.patch("imaginaire.distributed.device", device),
            mock.patch.object(adamw, "FUSED_DEVICES", (*adamw.FUSED_DEVICES, NAME)),
            mock.patch.object(adamw, "CAPTURING_DEVICES", (NAME,)),
            mock.patch.object(trainers.ImaginaireTrainer, "_step", watched),
        ):
            train(root / NAME, [*overrides, *RUN, end], config=CONFIG)
        waits += far.waits
    return dict(waits), losses(root / NAME, "far"), losses(root / "cpu", "far")


@pytest.mark.slow
def test_training_adapters_stays_on_the_device(tmp_path: Path) -> None:
    overrides = [f"experiment={ACTION}", "model.config.train_architecture=lora", "model.config.precision=float32"]
    waits, found, expected = _alone(_trained, overrides, False, tmp_path)
    assert waits == {**WAITS_OF_A_STEP, **UNREAD_TEXT}
    assert found == [(at, pytest.approx(loss, rel=1e-4)) for at, loss in expected]


@pytest.mark.slow
def test_training_in_low_precision_and_resuming_stay_on_the_device(tmp_path: Path) -> None:
    overrides = [f"experiment={FLOW}", "model.config.precision=bfloat16", "optimizer=fusedadamw", "~optimizer.adam_lr"]
    waits, found, expected = _alone(_trained, overrides, True, tmp_path)
    assert waits == {place: 2 * count for place, count in WAITS_OF_A_STEP.items()}
    assert found == [(at, pytest.approx(loss, rel=2e-2)) for at, loss in expected]


@pytest.mark.slow
def test_sampling_and_rollouts_stay_on_the_device() -> None:
    for what, (waits, found, expected) in _alone(_imagined).items():
        assert waits == (WAITS_OF_A_ROLLOUT if what == "rollout" else {}), what
        assert float((found.float() - expected.float()).abs().max()) <= (1 if what == "rollout" else 1e-3), what


def _imagined() -> dict[str, tuple[Waits, Tensor, Tensor]]:
    """By solver, and of a rollout: what made the host wait, and the video there and on the CPU.

    Sampling is watched from the end of its first step to its last, a rollout as a whole.
    """
    levels, flow = test_video2world.make_pipeline(), test_flow.make_pipeline(conditional_frame_timestep=0.1)
    texts = {pipe: torch.randn(2, 2, 6, pipe.dit.text_channels) for pipe in (levels, flow)}
    frames, actions, seeds = test_video2world_action.inputs(length=CHUNKS * test_video2world_action.ACTIONS)
    text = torch.randn(1, 4, 8)

    def generate(pipe: Any, on: Any, solver: str, on_step: Any = None) -> Tensor:
        options: dict[str, Any] = dict(
            options=SamplingOptions(num_steps=4, guidance=3.0, solver=solver), on_step=on_step
        )
        video: Tensor = _moved(pipe, on).generate(test_flow.frames(), *texts[pipe], **options).cpu()
        return video

    found = {}
    for pipe, solver in ((levels, "2ab"), (flow, "unipc"), (flow, "distilled")):
        expected = generate(pipe, "cpu", solver)
        with FarDevice() as far:

            def watch(i: int, step: Any, far: FarDevice = far) -> None:
                far.watching = i < 3

            found[solver] = generate(pipe, device(), solver, watch), expected
        found[solver] = (dict(far.waits), *found[solver])
    pipe = test_video2world_action.make_pipeline()
    options: dict[str, Any] = dict(options=SamplingOptions(guidance=2.0, num_steps=3), text_B_S_E=text)
    expected = pipe.rollout(frames, actions, seeds, **options)
    with FarDevice() as far:
        pipe = _moved(pipe, device())
        far.watching = True
        video = pipe.rollout(frames, actions, seeds, **options)
        far.watching = False
        found["rollout"] = (dict(far.waits), video.cpu(), expected)
    return found


def _moved(pipe: Any, on: Any) -> Any:
    return type(pipe)(WorldModel(pipe.config, copy.deepcopy(pipe.dit).to(on), pipe.world.tokenizer, device=on))


def _alone(fn: Callable[..., Any], *args: Any) -> Any:
    """The value of a function that runs in a process of its own."""
    (value,) = run_distributed(_without_group, 1, (fn, args))
    return value


def _without_group(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    distributed.shutdown()
    register()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return fn(*args)
