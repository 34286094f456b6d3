# SPDX-License-Identifier: Apache-2.0
"""A tiny world model of a user's own LeRobot recordings, in minutes on a CPU, for a policy to learn in.

    python -m scripts.train -- experiment=world_model_recordings \\
        dataloader_train.dataset.root=datasets/my_robot dataloader_train.dataset.split_file=outputs/my_split.json

Numbers of an action, which of them are moves, and the size of pictures are read from the recordings; the validation
data are the same ones' part that is held out. Noise levels are those at which dynamics are learnt and at which one
evaluation imagines a chunk. Training goes on while the figures on held-out recordings improve.
"""

from typing import Any

from cosmos_predict2.callbacks.stop_rule import StopRule
from cosmos_predict2.configs.action_conditioned.experiment.toy import NET
from cosmos_predict2.configs.action_conditioned.recorded import ACTION, LENGTHS, MOVES, SIZE
from cosmos_predict2.configs.base.post_training import group_choices, job, tiny_run
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from imaginaire.config import L, register_experiment

NAME = "world_model_recordings"
ITERATIONS = 1200
EVERY = 100  # iterations between validations
SAME = (  # of validation as of training
    *("root", "split_file", "val_fraction", "video_size", "camera", "action_keys", "embodiment", "action_transform"),
    *("stride", "frame_rate", "combine_actions", "skip_bad_samples"),
)
VAL_EVERY = 12  # frames between windows of validation
# Of height and width. Few recordings show things at few places: with shifts the imagined ends of a clone's attempts at
# plate-slide had an area under the curve of .61 in place of .47, at drawer-open of .86 in place of .84.
SHIFT = 1 / 16


def recordings() -> dict[str, Any]:
    run = tiny_run(ITERATIONS, batch_size=8, lr=0.03, adam_lr=2e-3)
    train, val = run["dataloader_train"], run["dataloader_val"]
    # At the full rate until the stop rule, or three quarters of the run, and then down to zero.
    run["scheduler"] = dict(
        warm_up_steps=[20, 0], cycle_lengths=LENGTHS, f_start=[0.05, 1.0], f_max=[1.0, 1.0], f_min=[1.0, 0.0]
    )
    run["trainer"].update(validation_iter=EVERY, max_val_iter=4)
    run["trainer"]["callbacks"].update(stop_rule=L(StopRule)())
    run["checkpoint"].update(save_iter=EVERY)
    train.update(num_workers=2, dataset=dict(root="datasets/my_robot", split_file="outputs/my_split.json"))
    train["dataset"].update(video_size=SIZE, random_shift=SHIFT)
    val.update(num_workers=1, dataset={key: f"${{dataloader_train.dataset.{key}}}" for key in SAME})
    val["dataset"].update(start_interval=VAL_EVERY)
    net = dict(NET, action_dim=ACTION, summed_action_dims=MOVES)
    pipe_config = dict(
        net=net,
        tokenizer=L(TinyTokenizer)(weights="outputs/my_tokenizer.safetensors"),
        video_noise_factor=25.0,
        timestamps=dict(nfe=1, t_min=10.0),
    )
    return dict(
        defaults=group_choices(
            "predict2_v2w_tiny_action_conditioned", "lerobot_train", "lerobot_val", optimizer="muon", ema="power"
        ),
        job=job(NAME),
        model=dict(config=dict(precision="bfloat16", pipe_config=pipe_config)),
        **run,
    )


register_experiment(NAME, recordings)
