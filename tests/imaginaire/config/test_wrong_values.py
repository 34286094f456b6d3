# SPDX-License-Identifier: Apache-2.0
"""Values that cannot be meant, one table a program: arguments, exit code, and the key, flag or file that is named."""

import math
import re
import runpy
import sys
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
from imaginaire.config.schema import TrainerConfig
from imaginaire.data.stream import ResumableLoader
from imaginaire.errors import ConfigError
from imaginaire.training.trainer import ImaginaireTrainer
from scripts import train
from tests.data.video_files import write_stream

ROOT = Path(__file__).resolve().parents[3]
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
    tree = OmegaConf.create({name: {} for name in (*MEMBERS, "trainer")} | {"trainer": {"callbacks": {}}})
    for key, value in values.items():
        key = key.replace("__", ".")
        OmegaConf.update(tree, f"{key.rpartition('.')[0]}._target_", target)
        OmegaConf.update(tree, key, value)
    for name in MEMBERS:
        OmegaConf.update(tree, f"{name}._target_", tree[name].get("_target_", target))
    config_nodes.check_values(tree, MEMBERS)


MEMBERS = ("model", "optimizer", "dataloader_train", "dataloader_val")
OURS, FOREIGN = "torch.nn.Identity", "collections.UserDict"  # both take any argument


@pytest.mark.parametrize("key", NUMBERS)
def test_a_configuration_refuses_them(key: str) -> None:
    for value in NUMBERS[key]:
        with pytest.raises(ConfigError, match=re.escape(key)):
            checked(OURS, **{key.replace(".", "__"): value})


@pytest.mark.parametrize(("name", "value"), [("shuffle", "no"), ("num_workers", "two"), ("batch_size", "2**3")])
def test_text_is_refused_where_a_number_or_bool_is_declared(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='{re.escape(value)}' is text"):
        list(config_nodes._check_call("", OmegaConf.create({name: value}), ResumableLoader))


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


PROGRAMS = [  # program, arguments, what the message names; each ends with code 2
    ("scripts.make_toy_world", "--out OUT --seed -1", "--seed"),
    ("scripts.make_toy_world", f"--out OUT --seed {2**63}", "--seed"),
    ("scripts.make_toy_world", "--out OUT --episodes 0", "--episodes"),
    ("scripts.cache_latents", "--dataset_path DATA --tokenizer tiny --workers -1", "--workers"),
    ("scripts.cache_latents", "--dataset_path DATA --tokenizer tiny --size 0 0", "size=(0, 0)"),
    ("scripts.cache_latents", "--dataset_path DATA --tokenizer tiny --size 50 48", "size=(50, 48)"),
    ("scripts.get_t5_embeddings", "--dataset_path DATA --text_encoder bytes --width 0", "--text_width"),
    ("scripts.get_t5_embeddings", "--dataset_path DATA --text_encoder bytes --batch_size 0", "--batch_size"),
    ("scripts.encode_prompts", "--prompt x --text_encoder bytes --output OUT.safetensors --width -1", "width"),
    ("scripts.check_dataset", "DATA --video_size 0 0", "video_size"),
    ("scripts.caption_videos", "--dataset_path DATA --command {video} --timeout 0", "--timeout"),
    ("scripts.prepare_lerobot_data", "--repo_id me/.. --out OUT", "--repo_id"),
    ("scripts.prepare_agibot_fisheye_data", "--split_only --data_dir DATA --window_size nan", "--window_size"),
    ("scripts.prepare_agibot_fisheye_data", "--data_dir DATA --task_ids ../x", "--task_ids"),
    ("scripts.prepare_agibot_fisheye_data", "--data_dir DATA --camera ../x", "--camera"),
    ("scripts.convert", "RUN OUT.pt --merge-lora --lora_alpha nan", "--lora_alpha"),
    ("scripts.convert", "RUN OUT --to diffusers --rope_scale 0 1 1", "--rope_scale"),
    ("scripts.doctor", "--limit -1", "--limit"),
    ("scripts.fit_tiny_tokenizer", "--out OUT --minutes 0 --seed -1", "--seed"),
    ("scripts.fit_tiny_tokenizer", "--out OUT.json --minutes 0", "--out"),
    ("scripts.fit_tiny_tokenizer", "--data DATA --out OUT --video_size 50 64", "--video_size 50 64"),
    ("scripts.evaluate_world_model", "--dit_path RUN --num_clips 0", "--num_clips"),
    ("scripts.evaluate_world_model", "--dit_path RUN --out /proc/x/y", "/proc/x/y cannot be written"),
    ("examples.video2world", "--model_size tiny --input_path IN.png --prompt x --seed -1", "seed"),
]


@pytest.mark.parametrize(("program", "arguments", "named"), PROGRAMS)
def test_a_program_refuses_them(
    program: str,
    arguments: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "DATA/videos").mkdir(parents=True)
    write_stream(tmp_path / "DATA/videos/a.mp4", 5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program, *arguments.split()])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(f"{ROOT / program.replace('.', '/')}.py", run_name="__main__")
    code = left.value.code
    error = capsys.readouterr().err
    assert (code, named in error) == (2, True), (code, error)
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.mp4"]
