# SPDX-License-Identifier: Apache-2.0
"""Group ``model``: a model with its size, resolution and frame rate, and the weights that it starts from."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from cosmos_predict2.configs.base.config_multiview import get_cosmos_predict2_multiview_pipeline, get_multiview_dit_path
from cosmos_predict2.configs.base.config_text2image import (
    get_cosmos_predict2_text2image_pipeline,
    get_text2image_dit_path,
)
from cosmos_predict2.configs.base.config_video2world import (
    TINY_SHIFT,
    get_cosmos_predict2_video2world_pipeline,
    get_cosmos_predict2p5_video2world_pipeline,
    get_dit_path,
    get_predict2p5_dit_path,
    predict2p5_text_encoder,
)
from cosmos_predict2.models.config import (
    RELEASED_SIGMAS,
    TINY_SIGMAS,
    Predict2ModelManagerConfig,
    Predict2p5Video2WorldModelConfig,
    Predict2Video2WorldModelConfig,
)
from cosmos_predict2.models.text import TrainingTextConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.text.reason1 import Reason1Encoder
from cosmos_predict2.text.tiny_reason1 import TINY
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from imaginaire.config import L, register_group

KINDS: dict[str, tuple[Callable[..., Any], Callable[..., str]]] = {
    "video2world": (get_cosmos_predict2_video2world_pipeline, get_dit_path),
    "text2image": (get_cosmos_predict2_text2image_pipeline, get_text2image_dit_path),
    "multiview": (get_cosmos_predict2_multiview_pipeline, get_multiview_dit_path),
}
SHARD_SIZE = {"2B": 8, "14B": 32}  # of the groups without resolution and rate in their names; those that have them: 8


def training_entry(
    config_class: type[Predict2Video2WorldModelConfig],
    pipe_config: Video2WorldPipelineConfig,
    *,
    is_tiny: bool,
    dit_path: str,
    model: type[Video2WorldModel] = Video2WorldModel,
    **options: Any,
) -> dict[str, Any]:
    """The group entry of a model that trains from these weights, its pipeline without what only inference uses."""
    pipe_config.guardrail_config.enabled = False
    pipe_config.text_encoder = None  # training reads embeddings from its data, or has an encoder of its own
    if not is_tiny:
        pipe_config.tokenizer.tile_size = None  # tiles change latents a little, which training must never see
    config = config_class(
        precision=pipe_config.precision,
        validation_sigmas=list(TINY_SIGMAS if is_tiny else RELEASED_SIGMAS),
        model_manager_config=Predict2ModelManagerConfig(dit_path=dit_path),
        pipe_config=pipe_config,
        **options,
    )
    return dict(
        trainer=dict(distributed_parallelism="ddp" if is_tiny else "fsdp"),
        model=L(model)(config=config, _recursive_=False),
    )


def predict2(kind: str, model_size: str, fsdp_shard_size: int, **variant: Any) -> dict[str, Any]:
    """The group entry of one variant of a kind. The tiny ones begin at random weights, to show that training works."""
    get_pipeline, get_path = KINDS[kind]
    is_tiny = model_size == "tiny"
    return training_entry(
        Predict2Video2WorldModelConfig,
        get_pipeline(model_size=model_size, **variant),
        is_tiny=is_tiny,
        dit_path="" if is_tiny else get_path(model_size=model_size, **variant),
        fsdp_shard_size=fsdp_shard_size,
        high_sigma_ratio=0.0 if kind == "text2image" else 0.05,
    )


def predict2p5_video2world(
    model_size: str,
    fsdp_shard_size: int,
    config_class: type[Predict2p5Video2WorldModelConfig] = Predict2p5Video2WorldModelConfig,
    model: type[Video2WorldModel] = Video2WorldModel,
    text_encoder: Any = None,
) -> dict[str, Any]:
    """The group entry of one size of Predict2.5, whose training goes on from the pre-trained weights.

    Captions are encoded on the way, equal ones once.
    """
    is_tiny = model_size == "tiny"
    pipe_config = get_cosmos_predict2p5_video2world_pipeline(model_size=model_size)
    pipe_config.prompt_refiner_config.enabled = False
    return training_entry(
        config_class,
        pipe_config,
        is_tiny=is_tiny,
        dit_path="" if is_tiny else get_predict2p5_dit_path(model_size=model_size, release="pre-trained"),
        model=model,
        fsdp_shard_size=fsdp_shard_size,
        train_time_shift=TINY_SHIFT if is_tiny else 5.0,
        text=TrainingTextConfig(encoder=text_encoder or predict2p5_text_encoder(model_size)),
    )


def entries() -> dict[str, Any]:
    found = {}
    for size, shard_size in {"tiny": 0, **SHARD_SIZE}.items():
        name = f"predict2_video2world_fsdp_{size.lower()}"
        found[name] = partial(predict2, "video2world", size, shard_size)
        found[name.replace("predict2_", "predict2p5_")] = partial(predict2p5_video2world, size, shard_size)
        for resolution, fps in product(("480", "720"), (10, 16)) if size != "tiny" else ():
            variant = dict(resolution=resolution, fps=fps)
            found[f"{name}_{resolution}p_{fps}fps"] = partial(predict2, "video2world", size, 8, **variant)
    reason1 = L(Reason1Encoder)(path=TINY, max_length=160)  # its template has 93 tokens
    found["predict2p5_video2world_fsdp_tiny_reason1"] = partial(predict2p5_video2world, "tiny", 0, text_encoder=reason1)
    for size, shard_size in {"tiny": 0, "2B": 1, "14B": 8}.items():
        found[f"predict2_text2image_fsdp_{size.lower()}"] = partial(predict2, "text2image", size, shard_size)
    for name, size, shard_size in (("tiny", "tiny", 0), ("2b_720p_10fps_7views_29frames", "2B", 8)):
        found[f"predict2_multiview_fsdp_{name}"] = partial(predict2, "multiview", size, shard_size)
    return found


def register() -> None:
    register_group("model", entries(), package="_global_")
