# SPDX-License-Identifier: Apache-2.0
"""Files of others that are damaged: every reader names the file, none ends in a traceback, allocates or hangs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_predict2.actions.statistics import read_statistics
from cosmos_predict2.checkpoints.adapters import read_adapter
from cosmos_predict2.checkpoints.download import file_faults
from cosmos_predict2.checkpoints.networks import diffusers_net
from cosmos_predict2.data import dataset_latents
from cosmos_predict2.data.action_conditioned.recordings import read_annotation
from cosmos_predict2.data.dataset_prompts import read_prompts
from cosmos_predict2.data.lerobot.info import read_info
from cosmos_predict2.data.lerobot.layouts import LayoutV2
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.pipelines.requests import read_batch
from cosmos_predict2.rl.envs.recorded_starts import RecordedStart, RecordedStarts, write_starts
from cosmos_predict2.rl.policies.files import read_policy
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.openvla.tiny import write_tiny as tiny_openvla
from cosmos_predict2.rl.policies.pi05.policy import Pi05Policy
from cosmos_predict2.rl.policies.pi05.tiny import write_tiny as tiny_pi05
from cosmos_predict2.rl.rewards.judges.video_align import _settings
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, read_classifier, write_classifier
from cosmos_predict2.text.embeddings import folder as embeddings
from cosmos_predict2.tokenizers.tiny import SHIPPED, TinyTokenizer
from cosmos_predict2.tools.prepare.agibot.captions import read_task_info
from cosmos_predict2.world_model.options import VideoRequest
from imaginaire.checkpoint import weights
from imaginaire.errors import CheckpointError, UserError

ROOT = Path(__file__).parents[1]
LEROBOT = ROOT / "tests/data/fixtures/lerobot_v2_1"

# The file that is damaged, and what reads it.
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "action statistics": ("dataset_statistics.json", lambda f: read_statistics(f / "dataset_statistics.json")),
    "adapter": ("adapter_config.json", lambda f: read_adapter(str(f))),
    "annotation": ("a.json", lambda f: read_annotation(f / "a.json")),
    "batch": ("batch.json", lambda f: read_batch(str(f / "batch.json"), VideoRequest())),
    "batch of lines": ("batch.jsonl", lambda f: read_batch(str(f / "batch.jsonl"), VideoRequest())),
    "diffusers": ("config.json", lambda f: diffusers_net(str(f))),
    "embeddings": ("embeddings.json", embeddings.read_record),
    "episodes": ("meta/episodes.jsonl", lambda f: LayoutV2(read_info(f))),
    "info": ("meta/info.json", read_info),
    "judge": ("model_config.json", lambda f: _settings(str(f))),
    "latents": (dataset_latents.RECORD, dataset_latents.read_record),
    "modality": ("meta/modality.json", read_info),
    "prompts": ("prompts.jsonl", lambda f: read_prompts(str(f / "prompts.jsonl"))),
    "public policy": ("config.json", lambda f: read_policy(str(f))),
    "shards": ("model.safetensors.index.json", lambda f: weights.read(str(f))),
    "task info": ("task_1.json", lambda f: read_task_info(f / "task_1.json")),
    "tasks": ("meta/tasks.jsonl", lambda f: LayoutV2(read_info(f))),
}
DAMAGES = {
    "cut": '{"a": [1, 2',
    "deep": "[" * 100_000 + "]" * 100_000,
    "latin": '{"a": "é"}'.encode("latin-1"),
    "nan": '{"format": NaN}',
    "other": "[[1]]",
    "zeros": bytes(100),
}


@pytest.mark.parametrize("reader", READERS)
def test_damaged_json_is_named_by_each_reader(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    shutil.copytree(LEROBOT / "meta", tmp_path / "meta")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    for damage, content in DAMAGES.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(UserError) as raised:
            read(tmp_path)
        assert Path(name).name in str(raised.value), (damage, str(raised.value))
        assert damage == "other" or file_faults(tmp_path / name)[0]


@pytest.fixture(scope="module")
def openvla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openvla")
    tiny_openvla(folder, sentences=["push"], image_size=28, text_tokens=200)
    return folder


@pytest.fixture(scope="module")
def pi05(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pi05(tmp_path_factory.mktemp("pi05"))


def _changed(folder: Path, out: Path, name: str, *keys: Any, value: Any) -> Path:
    """A copy of a policy's folder in which one value of a JSON file is another."""
    shutil.copytree(folder, out)
    content = json.loads((out / name).read_text())
    inside = content
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    (out / name).write_text(json.dumps(content))
    return out


SIZES: dict[str, list[tuple[str, ...]]] = {
    "openvla": [
        ("text_config", "num_hidden_layers"), ("text_config", "hidden_size"), ("text_config", "vocab_size"),
        ("text_config", "intermediate_size"), ("text_config", "num_attention_heads"), ("dinov2", "embed_dim"),
        ("dinov2", "depth"), ("siglip", "depth"), ("image_sizes",), ("action_chunk",), ("action_dim",), ("hold",),
        ("num_images_in_input",), ("n_action_bins",),
    ],
    "pi05": [
        *((stream, name) for stream in ("vlm", "expert") for name in ("width", "depth", "mlp_dim", "num_heads")),
        ("vlm", "vocab"), ("vision", "hidden"), ("vision", "layers"), ("vision", "image"), ("vision", "projection_dim"),
        ("action_horizon",), ("action_dim",), ("num_images",), ("max_token_len",), ("num_steps",), ("hold",),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("policy", "keys"), [(policy, keys) for policy in SIZES for keys in SIZES[policy]])
@pytest.mark.parametrize("value", [2**24, 10**30, -1, "many"])
def test_absurd_sizes_are_refused_at_once(
    policy: str, keys: Any, value: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    given = [value] if keys == ("image_sizes",) else value
    folder = _changed(request.getfixturevalue(policy), tmp_path / "policy", "config.json", *keys, value=given)
    with pytest.raises(UserError):
        read_policy(str(folder))


@pytest.mark.parametrize("content", [b"", b"\0" * 1000, b"{}", b"\x0a\xff\xff\xff\xff\x0f"])
def test_a_damaged_tokenizer_is_named(openvla: Path, pi05: Path, tmp_path: Path, content: bytes) -> None:
    shutil.copytree(pi05, tmp_path / "pi05")
    (tmp_path / "pi05/tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is damaged"):
        Pi05Policy(str(tmp_path / "pi05"))
    shutil.copytree(openvla, tmp_path / "openvla")
    (tmp_path / "openvla/tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        OpenVLAPolicy(str(tmp_path / "openvla"))


def test_statistics_that_cannot_be_are_refused(openvla: Path, pi05: Path, tmp_path: Path) -> None:
    of_pi05 = ("assets/toy/norm_stats.json", "norm_stats", "actions")
    numbers = len(json.loads((pi05 / of_pi05[0]).read_text())["norm_stats"]["actions"]["q01"])
    for i, (folder, place, count) in enumerate(
        [(openvla, ("dataset_statistics.json", "tiny", "action"), 7), (pi05, of_pi05, numbers)]
    ):
        for name, value, message in [
            ("q01", [9.0] * count, r"q01\[0\]=9 is above"),
            ("q99", ["x"], "lists of numbers"),
        ]:
            changed = _changed(folder, tmp_path / f"{i}{name}", *place, name, value=value)
            with pytest.raises(CheckpointError, match=message):
                read_policy(str(changed))


# --- numbers that are not finite: a network with one gives NaN for everything, and an evaluation then success 0


def _with_nan(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.ndim > 1)
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, path)


def _nan_policy(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "policy")
    _with_nan(tmp_path / "policy/model.safetensors")
    read_policy(str(tmp_path / "policy"))


def _nan_classifier(tmp_path: Path, _: Path) -> None:
    write_classifier(tmp_path / "model.safetensors", SuccessClassifier([4, 4, 4, 4, 4]), {})
    _with_nan(tmp_path / "model.safetensors")
    read_classifier(str(tmp_path / "model.safetensors"))


def _nan_tokenizer(tmp_path: Path, _: Path) -> None:
    shutil.copy(SHIPPED, tmp_path / "tiny.safetensors")
    _with_nan(tmp_path / "tiny.safetensors")
    TinyTokenizer(str(tmp_path / "tiny.safetensors"))


def _nan_starts(tmp_path: Path, _: Path) -> None:
    pictures = torch.zeros(1, 8, 8, 3, dtype=torch.uint8).numpy()
    start = RecordedStart("a", "push", pictures, None, context={"state": torch.tensor([0.0, torch.nan]).numpy()})
    write_starts(tmp_path / "starts.safetensors", [start])
    RecordedStarts(str(tmp_path))


@pytest.mark.parametrize("load", [_nan_policy, _nan_classifier, _nan_tokenizer, _nan_starts])
def test_numbers_that_are_not_finite_are_refused(load: Callable[..., None], pi05: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="NaN or infinite numbers"):
        load(tmp_path, pi05)


def test_a_report_of_loading_names_what_is_not_finite() -> None:
    target = {
        "a": torch.zeros(2, 2),
        "b": torch.zeros(3, dtype=torch.float16),
        "c": torch.zeros(0),
        "d": torch.zeros(2),
    }
    source = {"a": torch.full((2, 2), torch.inf), "b": torch.full((3,), 1e6), "c": torch.zeros(0), "d": torch.ones(2)}
    report = weights.load_into(target, source)
    assert report.not_finite == ("a", "b")  # 1e6 is infinite in half precision
    with pytest.raises(CheckpointError, match=r"m\.pt: 2 tensors hold NaN or infinite numbers \(a, b\)"):
        report.require(source="m.pt", allow_missing=["*"])


# --- LeRobot


def _lerobot(tmp_path: Path, **changes: Any) -> Path:
    shutil.copytree(LEROBOT, tmp_path / "set")
    path = tmp_path / "set/meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("../{episode_index:06d}.parquet", "leads out of the data set's folder"),
        ("/etc/passwd", "leads out of the data set's folder"),
        ("data/{episode_index.__class__}", "may only have fields such as"),
        ("data/{episode_index:>999999999}", "may only have fields such as"),
        ("data/{episode_index!r}", "may only have fields such as"),
        ("data/{0}", "names '0'"),
        ("data/{other:03d}", "names 'other'"),
        ("data/{episode_index", "may only have fields such as"),
    ],
)
def test_paths_of_a_data_set_stay_in_its_folder_and_are_no_programs(
    tmp_path: Path, template: str, message: str
) -> None:
    source = LeRobotSource.open(_lerobot(tmp_path, data_path=template))
    with pytest.raises(UserError, match=message):
        source.layout.rows(0)


def test_an_index_of_episodes_that_is_cut_is_refused(tmp_path: Path) -> None:
    root = _lerobot(tmp_path)
    path = root / "meta/episodes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match=rf"lists {len(lines) - 1} episodes, but .* total_episodes {len(lines)}"):
        LeRobotSource.open(root)
