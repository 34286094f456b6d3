# SPDX-License-Identifier: Apache-2.0
"""Values that cannot be meant, in configurations and what is built of them: the key is named."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cosmos_predict2.conditioner import DropoutConfig
from cosmos_predict2.models.config import Predict2p5Video2WorldModelConfig, Predict2Video2WorldModelConfig
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.world_model.config import EMAConfig, FlowConfig, SolverConfig, Video2WorldPipelineConfig
from imaginaire.config import nodes as config_nodes
from imaginaire.config.schema import LAZY_MEMBERS, TrainerConfig
from imaginaire.errors import ConfigError
from imaginaire.training.trainer import ImaginaireTrainer
from scripts import train

TINY = "experiment=predict2_video2world_training_tiny_groot_gr1_480"
LORA = "experiment=predict2_video2world_lora_training_tiny_cosmos_nemo_assets"

TRAIN = [  # overrides, what the message names
    ([TINY, "optimizer.lr=inf"], "ConfigError: optimizer.lr=inf"),
    ([TINY, "optimizer.lr=-1"], "ConfigError: optimizer.lr=-1"),
    ([TINY, "optimizer.betas=[0.9,nan]"], "ConfigError: optimizer.betas[1]=nan"),
    ([TINY, "scheduler.f_max=[-1]"], "- scheduler: scheduler.f_max has -1"),
    ([TINY, "trainer.callbacks.grad_clip.clip_norm=nan"], "ConfigError: trainer.callbacks.grad_clip.clip_norm=nan"),
    ([TINY, "dataloader_train.num_workers=-1"], "ConfigError: dataloader_train.num_workers=-1"),
    (
        [TINY, "dataloader_train.dataset.seed=-1"],
        "DataError: The run cannot start:\n  - dataloader_train.dataset: seed",
    ),
    ([LORA, "model.config.lora_alpha=inf"], "ConfigError: model.config.lora_alpha=inf"),
    ([TINY, "job.name=../x"], "ConfigError: job.name='../x'"),
    ([TINY, "job.project=."], "ConfigError: job.project='.'"),
]


@pytest.fixture(autouse=True)
def clean_process() -> None:
    """In place of the fixture of this folder: the experiments of the process stay registered."""


@pytest.mark.parametrize(("overrides", "named"), TRAIN)
def test_training_does_not_start(
    overrides: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path))
    monkeypatch.setattr(ImaginaireTrainer, "__init__", lambda self, config: pytest.fail("a trainer was made"))
    assert train.main(["--", *overrides]) == train.EXIT_USER_ERROR
    assert named in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


NUMBERS: dict[str, list[Any]] = {  # of what is built, under names that mean the same in every class
    **{f"optimizer.{name}": [-1, True, math.inf] for name in ("lr", "adam_lr", "weight_decay", "eps")},
    "dataloader_train.num_workers": [-1, 1.0, True],
    "dataloader_val.batch_size": [0, 1.5],
    "dataloader_train.prefetch_factor": [0],
    "dataloader_train.timeout": [-1, math.inf],
    "model.list": [[1.0, [math.nan]]],
    "trainer.callbacks.clip.norm": [math.nan],
}


def checked(target: str, **values: Any) -> None:
    """Check a tree whose lazy members are made by ``target``; ``values`` are by key, with ``__`` for a dot."""
    tree = OmegaConf.create({name: {} for name in (*LAZY_MEMBERS, "trainer")} | {"trainer": {"callbacks": {}}})
    for key, value in values.items():
        key = key.replace("__", ".")
        OmegaConf.update(tree, f"{key.rpartition('.')[0]}._target_", target)
        OmegaConf.update(tree, key, value)
    for name in LAZY_MEMBERS:
        OmegaConf.update(tree, f"{name}._target_", tree[name].get("_target_", target))
    config_nodes.check_values(tree)


OURS, FOREIGN = "torch.nn.Identity", "collections.UserDict"  # both take any argument


@pytest.mark.parametrize("key", NUMBERS)
def test_a_configuration_refuses_them(key: str) -> None:
    for value in NUMBERS[key]:
        with pytest.raises(ConfigError, match=re.escape(key)):
            checked(OURS, **{key.replace(".", "__"): value})


def test_what_may_be_meant_is_accepted() -> None:
    checked(OURS, trainer__callbacks__clip__norm=math.inf, optimizer__lr=0, optimizer__betas=[0.9, 0.99])
    checked(OURS, dataloader_train__batch_size=None)
    checked(FOREIGN, dataloader_train__dataset__timeout=-1, dataloader_train__dataset__fill=[math.nan])
    checked(FOREIGN, optimizer__betas=[0.98, 0.92, 0.99], optimizer__max_grad_norm=math.inf, model__mask=-math.inf)
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        checked(FOREIGN, optimizer__lr=math.inf)


SECTIONS: list[tuple[Callable[..., Any], dict[str, list[Any]]]] = [
    (TrainerConfig, {"seed": [-1, 2**63, 1.5e30], "grad_accum_iter": [0, math.nan], "max_iter": [-1, math.inf]}),
    (EMAConfig, {"rate": [0.0, 0.5, -0.1, math.nan]}),
    (DropoutConfig, {"dropout_rate": [-0.1, 1.1, math.nan]}),
    (SolverConfig, {"t_min": [0.0, -1.0, 80.0, math.nan], "t_max": [math.inf], "order": [0.0]}),
    (FlowConfig, {"shift": [0.0, math.inf], "timestep_scale": [0.0, -1.0], "conditional_frame_timestep": [1000.0]}),
    (FlowConfig, {"schedule": ["cosine"]}),
    (Video2WorldPipelineConfig, {"sigma_conditional": [-1.0, math.nan], "state_ch": [0], "state_t": [0], "fps": [0]}),
    (Video2WorldPipelineConfig, {"sigma_data": [0.0], "video_noise_factor": [0.0]}),
    (Video2WorldPipelineConfig, {"rectified_flow_t_scaling_factor": [0.0, math.inf]}),
    (Predict2Video2WorldModelConfig, {"loss_scale": [0.0, -1.0, math.inf], "high_sigma_ratio": [-0.1, 1.1]}),
    (Predict2Video2WorldModelConfig, {"lora_alpha": [-1.0, math.nan]}),
    (Predict2p5Video2WorldModelConfig, {"loss_scale": [0.0], "train_time_shift": [0.0, math.inf]}),
]


@pytest.mark.parametrize(("section", "wrong"), SECTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_section_refuses_them(section: Callable[..., Any], wrong: dict[str, list[Any]]) -> None:
    section()
    for key, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError, match=key):
                section(**{key: value})


TINY_NET: dict[str, Any] = dict(
    model_channels=24, num_blocks=1, num_heads=2, max_img_h=4, max_img_w=4, max_frames=4, adaln_lora_dim=4
)
SIZES: dict[str, list[Any]] = {
    "model_channels": [23],
    **{key: [0] for key in ("num_blocks", "num_heads", "in_channels", "adaln_lora_dim", "patch_spatial", "max_frames")},
    **{key: [-2] for key in ("crossattn_emb_channels", "crossattn_proj_in_channels")},
    **{key: [0.0, math.nan, math.inf] for key in ("rope_t_extrapolation_ratio", "mlp_ratio")},
}


def test_a_network_refuses_them() -> None:
    Video2WorldDiT(**TINY_NET)
    for key, values in SIZES.items():
        for value in values:
            with pytest.raises(ValueError, match=key):
                Video2WorldDiT(**{**TINY_NET, key: value})
    with pytest.raises(ValueError, match="hidden_dim_in_action_embedder"):
        ChunkActionDiT(action_dim=2, hidden_dim_in_action_embedder=-1, **TINY_NET)
