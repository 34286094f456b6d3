# SPDX-License-Identifier: Apache-2.0
"""Experiment files that were written for the published code run unchanged once they lie in the experiment folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

import cosmos_predict2.configs.base.experiment as experiment_folder
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from imaginaire.config import registry
from imaginaire.config.compose import compose, experiment_names
from imaginaire.config.lazy_config import save_yaml, to_yaml
from imaginaire.errors import ConfigError
from imaginaire.training import preflight
from imaginaire.training.trainer import launch
from tests.programs import HANG_S, python

ROOT = Path(__file__).parent.parent.parent
BASE = "cosmos_predict2/configs/base/config.py"
TWIN = "predict2_video2world_training_tiny_groot_gr1_480"

TEMPLATE = """
from hydra.core.config_store import ConfigStore

your_custom_experiment = dict(
    defaults=[
        {"override /model": "predict2_video2world_fsdp_2b"},
        {"override /optimizer": "fusedadamw"},
        {"override /scheduler": "lambdalinear"},
        {"override /ckpt_type": "standard"},
        {"override /data_val": "mock"},
        "_self_",
    ],
    job=dict(project="your_project", group="your_group", name="your_experiment_name"),
)
ConfigStore.instance().store(
    group="experiment", package="_global_", name="your_custom_experiment", node=your_custom_experiment
)
"""

# In the form of the published files: a sampler by megatron's ranks, loaders written inline, names out of globals().
PUBLISHED_FORM = """
from hydra.core.config_store import ConfigStore
from megatron.core import parallel_state
from torch.utils.data import DataLoader, DistributedSampler

from cosmos_predict2.data.dataset_video import Dataset
from imaginaire.lazy_config import LazyCall as L

cs = ConfigStore.instance()


def get_sampler(dataset) -> DistributedSampler:
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=True, seed=0)


clips = L(Dataset)(dataset_dir="datasets/kitchen", num_frames=93, video_size=(704, 1280))
dataloader_kitchen = L(DataLoader)(
    dataset=clips,
    sampler=L(get_sampler)(dataset=clips),
    batch_size=1,
    drop_last=True,
    num_workers=8,
    pin_memory=True,
)
predict2_video2world_training_2b_kitchen = dict(
    defaults=[
        {"override /model": "predict2_video2world_fsdp_2b"},
        {"override /optimizer": "fusedadamw"},
        {"override /scheduler": "lambdalinear"},
        {"override /ckpt_type": "standard"},
        {"override /dataloader_val": "mock"},
        "_self_",
    ],
    job=dict(project="posttraining", group="video2world", name="2b_kitchen"),
    model=dict(
        config=dict(
            pipe_config=dict(
                ema=dict(enabled=True),
                prompt_refiner_config=dict(enabled=False),
                guardrail_config=dict(enabled=False),
            ),
        )
    ),
    model_parallel=dict(context_parallel_size=2),
    dataloader_train=dataloader_kitchen,
    trainer=dict(
        distributed_parallelism="fsdp",
        callbacks=dict(iter_speed=dict(hit_thres=10, step_size=1)),
        max_iter=1000,
    ),
    checkpoint=dict(save_iter=500),
    optimizer=dict(lr=2 ** (-14.5), weight_decay=0.2),
    scheduler=dict(warm_up_steps=[0], cycle_lengths=[1_000], f_max=[0.6], f_min=[0.0]),
)
small = L(Dataset)(dataset_dir="datasets/toy/train", num_frames=13, video_size=(48, 48), num_tokens=64)
dataloader_small = L(DataLoader)(
    dataset=small, sampler=L(get_sampler)(dataset=small), batch_size=2, drop_last=True, num_workers=1, pin_memory=True
)
predict2_video2world_training_tiny_kitchen = dict(
    defaults=[
        "/experiment/predict2_video2world_training_2b_kitchen",
        {"override /model": "predict2_video2world_fsdp_tiny"},
        "_self_",
    ],
    job=dict(name="tiny_kitchen"),
    model=dict(config=dict(fsdp_shard_size=2)),
    model_parallel=dict(context_parallel_size=1),
    dataloader_train=dataloader_small,
    trainer=dict(max_iter=3, logging_iter=1),
    checkpoint=dict(save_iter=2),
)

for _item in [predict2_video2world_training_2b_kitchen, predict2_video2world_training_tiny_kitchen]:
    experiment_name = [name.lower() for name, value in globals().items() if value is _item][0]
    cs.store(group="experiment", package="_global_", name=experiment_name, node=_item)
"""

# As a published file that registers its data set, under a name that is taken here, and one under no other's.
WITH_DATA = """
from hydra.core.config_store import ConfigStore
from torch.utils.data import DataLoader

from cosmos_predict2.data.dataset_video import Dataset
from imaginaire.lazy_config import LazyCall as L

gr1 = L(DataLoader)(dataset=L(Dataset)(dataset_dir="datasets/my_gr1", num_frames=93, video_size=(432, 768)))
cs = ConfigStore.instance()
cs.store(group="GROUP", package="dataloader_train", name="gr1", node=gr1)
cs.store(group="callbacks", package="trainer.callbacks", name="mine", node=dict(iter_speed=dict(hit_thres=3)))
my_gr1 = dict(
    defaults=[
        {"override /model": "predict2_video2world_fsdp_2b"},
        {"override /GROUP": "gr1"},
        {"override /callbacks": ["basic", "mine"]},
        "_self_",
    ],
    job=dict(project="mine", group="mine", name="my_gr1"),
)
cs.store(group="experiment", package="_global_", name="my_gr1", node=my_gr1)
"""

Drop = Callable[..., None]


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drop]:
    """Puts files beside the experiments of the repository, for one test."""
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path / "out"))
    folder = tmp_path / "experiment"
    folder.mkdir()
    experiment_names(BASE)
    store = ConfigStore.instance()
    kept = {group: dict(store.repo[group]) for group in ("experiment", "dataloader_train", "callbacks")}
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(experiment_folder, "__path__", [*experiment_folder.__path__, str(folder)])
    modules = set(sys.modules)

    def write(**files: str) -> None:
        for name, text in files.items():
            file = folder / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)

    yield write
    store.repo |= kept
    registry.broken_modules.clear()
    for name in sorted(set(sys.modules) - modules, reverse=True):
        if name.startswith(experiment_folder.__name__):
            parent, _, own = name.rpartition(".")
            del sys.modules[name]
            delattr(sys.modules[parent], own)


def test_the_template_of_the_guide_composes_and_training_names_what_is_absent(drop: Drop) -> None:
    drop(mine=TEMPLATE)
    assert "your_custom_experiment" in experiment_names(BASE)
    assert registry.summary("your_custom_experiment") == "(model=predict2_video2world_fsdp_2b)"
    config = compose(BASE, ["experiment=your_custom_experiment"])
    assert config.job.path == "your_project/your_group/your_experiment_name"
    assert list(config.dataloader_val.datasets) == ["image_data", "video_data"] and config.optimizer.lr == 1e-4
    assert "dataloader_train is not set: this composes, but cannot train" in preflight.notes(config)
    with pytest.raises(ConfigError, match="dataloader_train is not set: there is nothing to train on"):
        preflight.check_launch(config)


def test_a_file_that_does_not_import_takes_only_its_own_experiments_away(
    drop: Drop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    drop(kitchen=PUBLISHED_FORM, slip="x = (1\n", mine=TEMPLATE)
    names = experiment_names(BASE)
    assert TWIN in names and "your_custom_experiment" in names and not any("kitchen" in name for name in names)
    assert compose(BASE, [f"experiment={TWIN}"]).job.name == "tiny_groot_gr1_480"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "once for each file"
    assert "kitchen" in warnings[0] and "pip install -e '.[compat]'" in warnings[0] and "kitchen.py:3" in warnings[0]
    assert "SyntaxError" in warnings[1] and "slip.py, line 1" in warnings[1]
    with pytest.raises(ConfigError) as error:
        compose(BASE, ["experiment=predict2_video2world_training_2b_kitchen"])
    assert "No experiment is called 'predict2_video2world_training_2b_kitchen'" in str(error.value)
    assert "pip install -e '.[compat]'" in str(error.value) and "slip.py, line 1" in str(error.value)


def test_a_copy_under_another_name_does_not_replace_an_experiment_unseen(
    drop: Drop, caplog: pytest.LogCaptureFixture
) -> None:
    copy = TEMPLATE.replace('name="your_custom_experiment"', f'name="{TWIN}"')
    drop(zz_copy=copy)
    assert compose(BASE, [f"experiment={TWIN}"]).job.name == "tiny_groot_gr1_480"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"Two experiments are called '{TWIN}'" in warning and "zz_copy" in warning and "groot" in warning


def test_a_file_that_registers_a_taken_entry_has_it_for_itself(drop: Drop, caplog: pytest.LogCaptureFixture) -> None:
    ours = compose(BASE, ["experiment=predict2_video2world_training_2b_groot_gr1_480"])
    child = TEMPLATE.replace("your_custom_experiment", "child")
    child = child.replace("defaults=[", 'defaults=["/experiment/my_gr1",')
    child = child.replace('{"override /scheduler": "lambdalinear"},', '{"override /dataloader_train": "gr1"},')
    drop(my_data=WITH_DATA.replace("GROUP", "data_train"), zz_child=child)
    for _ in range(2):  # composing again changes nothing
        same = compose(BASE, ["experiment=predict2_video2world_training_2b_groot_gr1_480"])
        assert to_yaml(same) == to_yaml(ours) and "my_gr1" not in to_yaml(ours)
        mine = compose(BASE, ["experiment=my_gr1"])
        assert mine.dataloader_train.dataset.dataset_dir == "datasets/my_gr1"
        assert mine.trainer.callbacks.iter_speed.hit_thres == 3
    assert compose(BASE, ["experiment=my_gr1", "dataloader_train=gr1"]).dataloader_train == ours.dataloader_train
    assert compose(BASE, ["experiment=child"]).dataloader_train == ours.dataloader_train, "what its own file sees"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "my_data registers dataloader_train=gr1" in warning and "configs.base.defaults.data" in warning
    own = f"dataloader_train=gr1@{experiment_folder.__name__}.my_data"
    of_2b = "experiment=predict2_video2world_training_2b_groot_gr1_480"
    assert own in warning and compose(BASE, [of_2b, own]).dataloader_train == mine.dataloader_train


def test_files_in_sub_folders_are_found(drop: Drop) -> None:
    drop(kitchen__mine=TEMPLATE, _parts="")
    assert "your_custom_experiment" in experiment_names(BASE)


def test_plain_dictionaries_may_hold_classes(drop: Drop) -> None:
    more = "    trainer=dict(type=MyTrainer, max_iter=7),\n    optimizer=dict(betas=(0.8, 0.9)),\n    job="
    trainer = (
        "from imaginaire.training.trainer import ImaginaireTrainer\n\n\nclass MyTrainer(ImaginaireTrainer):\n    pass\n"
    )
    drop(mine=trainer + TEMPLATE.replace("    job=", more))
    config = compose(BASE, ["experiment=your_custom_experiment"])
    assert config.trainer.type.__name__ == "MyTrainer" and config.trainer.max_iter == 7
    assert list(config.optimizer.betas) == [0.8, 0.9]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with the file in its experiment folder, and clips of the toy world."""
    pytest.importorskip("megatron.core", reason="pip install -e '.[compat]'")
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "cosmos_predict2", root / "cosmos_predict2", ignore=shutil.ignore_patterns("*.pyc.*"))
    for name in ("imaginaire", "scripts"):
        (root / name).symlink_to(ROOT / name)
    (root / "cosmos_predict2/configs/base/experiment/kitchen.py").write_text(PUBLISHED_FORM)
    toy = ToyFolder(episodes=8, val_fraction=0, text_encoder="bytes", num_tokens=64, text_width=64)
    write_folder(str(root / "datasets/toy"), toy)
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python(), *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=HANG_S, check=True
    )


@pytest.mark.slow  # megatron-core takes seconds to import
def test_a_published_file_composes_and_trains_on_two_processes_and_goes_on_alone(
    checkout: Path, drop: Drop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in this process, which may have imported megatron-core for another test."""
    name = "experiment=predict2_video2world_training_tiny_kitchen"
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--standalone"]
    run(checkout, *torchrun, "-m", "scripts.train", "--", name, "trainer.max_iter=2")
    drop(kitchen=PUBLISHED_FORM)
    config = compose(BASE, ["experiment=predict2_video2world_training_2b_kitchen"])
    data = config.dataloader_train
    assert data.dataset.dataset_dir == data.sampler.dataset.dataset_dir == "datasets/kitchen"
    assert (data.drop_last, data.num_workers, list(data.dataset.video_size)) == (True, 8, [704, 1280])
    assert config.model_parallel.context_parallel_size == 2 and config.optimizer.lr == 2**-14.5
    assert config.trainer.callbacks.iter_speed.hit_thres == 10
    save_yaml(config, tmp_path / "config.yaml")
    assert to_yaml(compose(str(tmp_path / "config.yaml"))) == (tmp_path / "config.yaml").read_text()
    assert preflight.findings(config)[-1].key != "dataloader_train", "a torch DataLoader is nothing wrong"
    monkeypatch.chdir(checkout)
    assert launch(compose(str(ROOT / BASE), [name])) == 0
    run_dir = tmp_path / "out/posttraining/video2world/tiny_kitchen"
    assert (run_dir / "checkpoints/latest_checkpoint.txt").read_text().strip() == "iter_000000003.pt"
    log = (run_dir / "stdout.log").read_text()
    assert "resumed from iter 2" in log and "cpu x2" in log
