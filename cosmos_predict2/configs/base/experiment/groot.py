# SPDX-License-Identifier: Apache-2.0
"""Post-training on GR00T-Dreams GR1 clips, and its tiny twin on the toy world."""

from imaginaire.compose import register_experiment

TINY = dict(
    defaults=[
        {"override /model": "predict2_video2world_fsdp_tiny"},
        {"override /optimizer": "muon"},
        {"override /scheduler": "lambdalinear"},
        {"override /ckpt_type": "standard"},
        {"override /dataloader_train": "toy"},
        {"override /dataloader_val": "toy"},
        {"override /ema": "power"},
        "_self_",
    ],
    job=dict(project="posttraining", group="video2world", name="tiny_groot_gr1_480"),
    # The toy world's dynamics show only near pure noise: at lower levels the noisy frames give the positions away.
    model=dict(config=dict(pipe_config=dict(video_noise_factor=8.0))),
    optimizer=dict(lr=0.03, adam_lr=2e-3),
    scheduler=dict(warm_up_steps=[20], cycle_lengths=[1500], f_start=[0.05], f_max=[1.0], f_min=[0.0]),
    trainer=dict(max_iter=1500, logging_iter=20, validation_iter=300, run_validation=True),
    checkpoint=dict(save_iter=300),
)

register_experiment("predict2_video2world_training_tiny_groot_gr1_480", TINY)
