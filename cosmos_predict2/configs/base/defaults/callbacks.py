# SPDX-License-Identifier: Apache-2.0
"""Group ``callbacks``: ``callbacks=[basic,long]`` takes those of both; ``trainer.callbacks.NAME=null`` drops one."""

from hydra.core.config_store import ConfigStore

from cosmos_predict2.callbacks.action_following import ActionFollowing
from cosmos_predict2.callbacks.draw_samples import DrawSamples
from imaginaire.config.lazy_config import PLACEHOLDER
from imaginaire.config.lazy_config import LazyCall as L
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
    store = ConfigStore.instance().store
    entries = {
        "basic": BASIC,
        "long": LONG,
        "progress_bar": PROGRESS_BAR,
        "viz_online_sampling": VIZ_ONLINE_SAMPLING,
    }
    for name, node in entries.items():
        store(group="callbacks", package="trainer.callbacks", name=name, node=node)
    store(group="callbacks", package="_global_", name="debug", node=DEBUG)
