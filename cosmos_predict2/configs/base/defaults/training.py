# SPDX-License-Identifier: Apache-2.0
"""Groups of what trains a model: ``optimizer``, ``scheduler``, ``ema``, ``ckpt_type`` and ``callbacks``.

``callbacks=[basic,long]`` takes those of both; ``trainer.callbacks.NAME=null`` drops one.
"""

from cosmos_predict2.callbacks.action_following import ActionFollowing
from cosmos_predict2.callbacks.draw_samples import DrawSamples
from imaginaire.checkpoint.checkpointer import DistributedCheckpointer, DummyCheckpointer, StandardCheckpointer
from imaginaire.config import PLACEHOLDER, L, register_group
from imaginaire.optim.adamw import adamw, fused_adamw
from imaginaire.optim.muon import muon
from imaginaire.optim.schedules import constant, lambda_cosine, lambda_linear
from imaginaire.training.callbacks.monitor import DeviceMonitor
from imaginaire.training.callbacks.report import HeartBeat, IterSpeed, LossLog, ProgressBar
from imaginaire.training.callbacks.self_checks import SelfChecks
from imaginaire.training.callbacks.train import GradClip, LowPrecision, ManualGarbageCollection

OPTIMIZERS = {  # the model is given when one is built
    "fusedadamw": L(fused_adamw)(  # float32 masters when the parameters are bfloat16
        model=PLACEHOLDER,
        lr=1e-4,
        weight_decay=0.1,
        betas=[0.9, 0.99],
        eps=1e-8,
        optim_type="fusedadam",
        master_weights=True,
        capturable=True,
        decay_1d=True,
    ),
    "adamw": L(adamw)(model=PLACEHOLDER, lr=1e-4, weight_decay=0.1, betas=[0.9, 0.99], eps=1e-8),
    # For small networks: the matrices of the blocks by Muon, the rest by AdamW.
    "muon": L(muon)(model=PLACEHOLDER, lr=0.03, adam_lr=2e-3, precision="auto"),
}
CYCLES = dict(  # one entry per cycle
    warm_up_steps=[1000],
    cycle_lengths=[10_000_000_000_000],
    f_start=[1e-6],
    f_max=[1.0],
    f_min=[1.0],
    verbosity_interval=0,
)
SCHEDULERS = {  # multipliers of the learning rate
    "lambdalinear": L(lambda_linear)(**CYCLES),
    "lambdacosine": L(lambda_cosine)(**CYCLES),
    # Of clones that learn on. By whole steps from the first on, that one took a clone of sweep-into-v3 1.3 nats a chunk
    # away: Adam's moves each weight by all of the rate.
    "rising": L(lambda_linear)(**{**CYCLES, "warm_up_steps": [10], "cycle_lengths": [10], "f_start": [0.1]}),
    "constant": L(constant)(rate=1.0),
}
POWER = dict(enabled=True, rate=0.1, iteration_shift=0)  # of the weights, averaged
CKPT_TYPES = {  # how training state is written
    "standard": L(StandardCheckpointer)(),  # four .pt files with full tensors
    "dcp": L(DistributedCheckpointer)(),  # torch.distributed.checkpoint folders, every rank its shards
    "dummy": L(DummyCheckpointer)(),  # nothing
}
BASIC = dict(
    low_prec=L(LowPrecision)(config=PLACEHOLDER, trainer=PLACEHOLDER, update_iter=1),
    iter_speed=L(IterSpeed)(every_n="${trainer.logging_iter}"),
    device_monitor=L(DeviceMonitor)(every_n="${trainer.logging_iter}"),
    manual_gc=L(ManualGarbageCollection)(every_n=5),
    loss_log=L(LossLog)(logging_iter_multipler=1),
    grad_clip=L(GradClip)(clip_norm=1.0),
    self_checks=L(SelfChecks)(),
    action_following=L(ActionFollowing)(),  # of networks that take actions
    progress_bar=L(ProgressBar)(),
)
CALLBACKS = {
    "basic": BASIC,
    "long": dict(heart_beat=L(HeartBeat)()),
    "progress_bar": dict(progress_bar=BASIC["progress_bar"]),  # for configurations that name it
    "viz_online_sampling": dict(draw_samples=L(DrawSamples)(every_n=5000)),
}
DEBUG = dict(  # the profiler and the memory snapshots join by these switches
    trainer=dict(profiling=dict(enable_profiling=True, enable_memory_snapshot=True, profile_freq=10))
)


def register() -> None:
    register_group("optimizer", OPTIMIZERS)
    register_group("scheduler", SCHEDULERS)
    register_group("ema", {"power": POWER}, package="model.config.pipe_config.ema")
    register_group("ckpt_type", CKPT_TYPES, package="checkpoint.type")
    register_group("callbacks", CALLBACKS, package="trainer.callbacks")
    register_group("callbacks", {"debug": DEBUG}, package="_global_")
