# SPDX-License-Identifier: Apache-2.0
"""Group ``callbacks``: ``callbacks=[basic,long]`` takes those of both; ``trainer.callbacks.NAME=null`` drops one."""

from cosmos_predict2.callbacks.action_following import ActionFollowing
from cosmos_predict2.callbacks.draw_samples import DrawSamples
from imaginaire.config import PLACEHOLDER, L, register_group
from imaginaire.training.callbacks.monitor import DeviceMonitor
from imaginaire.training.callbacks.report import HeartBeat, IterSpeed, LossLog, ProgressBar
from imaginaire.training.callbacks.self_checks import SelfChecks
from imaginaire.training.callbacks.train import GradClip, LowPrecision, ManualGarbageCollection

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
LONG = dict(heart_beat=L(HeartBeat)())
VIZ_ONLINE_SAMPLING = dict(draw_samples=L(DrawSamples)(every_n=5000))
PROGRESS_BAR = dict(progress_bar=BASIC["progress_bar"])  # for configurations that name it
DEBUG = dict(  # the profiler and the memory snapshots join by these switches
    trainer=dict(profiling=dict(enable_profiling=True, enable_memory_snapshot=True, profile_freq=10))
)


def register() -> None:
    entries = {"basic": BASIC, "long": LONG, "progress_bar": PROGRESS_BAR, "viz_online_sampling": VIZ_ONLINE_SAMPLING}
    register_group("callbacks", entries, package="trainer.callbacks")
    register_group("callbacks", {"debug": DEBUG}, package="_global_")
