# SPDX-License-Identifier: Apache-2.0
"""The parts that experiments are put together from: a post-training run of a released model, and its tiny twin."""

from typing import Any

from cosmos_predict2.callbacks.draw_samples import DrawSamples
from imaginaire.config import L


def group_choices(model: str, data_train: str, data_val: str, **others: str) -> list[Any]:
    """The defaults list of an experiment: a model, its data, and the groups that all of them share."""
    chosen = {
        "model": model,
        "optimizer": "fusedadamw",
        "scheduler": "lambdalinear",
        "ckpt_type": "standard",
        "dataloader_train": data_train,
        "dataloader_val": data_val,
        **others,
    }
    return [*({f"override /{group}": name} for group, name in chosen.items()), "_self_"]


def job(name: str, group: str = "video2world") -> dict[str, str]:
    """The folder of the run, posttraining/GROUP/NAME: the same at every start, so that it resumes."""
    return dict(project="posttraining", group=group, name=name)


def linear(warm_up: int, cycle: int, f_max: float, f_min: float) -> dict[str, Any]:
    """One cycle of ``lambdalinear``: up to f_max, then down to f_min, as factors of the learning rate."""
    return dict(warm_up_steps=[warm_up], cycle_lengths=[cycle], f_max=[f_max], f_min=[f_min])


def trainer(max_iter: int, hit_thres: int) -> dict[str, Any]:
    """The length of a run, which reports its first ``hit_thres`` iterations singly."""
    return dict(max_iter=max_iter, callbacks=dict(iter_speed=dict(hit_thres=hit_thres)))


def model_config(*, ema: bool, **pipe_config: Any) -> dict[str, Any]:
    """The section ``model``: whether the weights are averaged, and values of the pipeline."""
    return dict(config=dict(pipe_config=dict(ema=dict(enabled=ema), **pipe_config)))


def lora(rank: int) -> dict[str, Any]:
    """Train adapters of this rank, which add their output as it is (alpha = rank)."""
    return dict(train_architecture="lora", lora_rank=rank, lora_alpha=rank)


def tiny_twin(
    name: str,
    data: str,
    *,
    numbers: dict[str, Any],
    optimizer: str = "muon",
    group: str = "video2world",
    model: str = "video2world",
    **config: Any,
) -> dict[str, Any]:
    """The same family on the toy world, by the tiny model: minutes on a CPU, no files needed.

    ``numbers`` are the sections of the run itself (optimizer, scheduler, trainer, checkpoint); ``config`` is the
    model's section.
    """
    pipe_config = {"video_noise_factor": 8.0, **config.pop("pipe_config", {})}
    return dict(
        defaults=group_choices(f"predict2_{model}_fsdp_tiny", data, data, optimizer=optimizer, ema="power"),
        job=job(name, group),
        # The toy world's dynamics show only near pure noise: at lower levels the noisy frames give the positions away.
        model=dict(config=dict(**config, pipe_config=pipe_config)),
        **numbers,
    )


def tiny_run(iterations: int, batch_size: int = 16, **optimizer: float) -> dict[str, Any]:
    """The numbers of a tiny run of that many iterations: it validates and saves five times, and draws samples four.

    The batch size is among them, so that other data leave it: every group of data has 1.
    """
    every = max(1, iterations // 5)
    return dict(
        dataloader_train=dict(batch_size=batch_size),
        dataloader_val=dict(batch_size=batch_size),
        optimizer=dict(optimizer),
        scheduler=dict(linear(20, iterations, 1.0, 0.0), f_start=[0.05]),
        trainer=dict(
            max_iter=iterations,
            logging_iter=20,
            validation_iter=every,
            run_validation=True,
            callbacks=dict(draw_samples=L(DrawSamples)(every_n=max(1, iterations // 4), num_sampling_step=20)),
        ),
        checkpoint=dict(save_iter=every),
    )
