# SPDX-License-Identifier: Apache-2.0
"""A folder or file from elsewhere never runs code of its own, whatever it asks for and whatever is on the input."""

import ast
import contextlib
import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.guardrail.judges import SIGLIP, LlamaGuard, VideoFilter
from cosmos_predict2.guardrail.refiner import Reason1Refiner
from cosmos_predict2.rl.policies.openvla.inputs import Prompts
from cosmos_predict2.rl.policies.openvla.tiny import write_tiny
from cosmos_predict2.rl.rewards.local import REWARDS, build
from cosmos_predict2.text.reason1 import Reason1Encoder, load_reason1
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.text.tiny_reason1 import write_tiny_reason1
from imaginaire.errors import CheckpointError
from tests.guardrail.tiny_guards import make_llama_guard, make_video_filter
from tests.rl.rewards.tiny_judges import make_qwen3, make_reason1, make_video_align
from tests.text.folders import reason1_folder, t5_folder

ROOT = Path(__file__).parents[1]
PRODUCT = ("cosmos_predict2", "imaginaire", "scripts", "examples", "benchmarks", "ray_utils")
AUTO = ("AutoConfig", "AutoTokenizer", "AutoProcessor", "AutoModel", "AutoModelForCausalLM", "AutoModelForVision2Seq")


def _asks_for_code(folder: Path, name: str) -> None:
    """Its classes become ones that only its own ``evil.py`` has, which leaves a file when it is imported."""
    code = f"import pathlib\npathlib.Path({str(folder / 'it_ran')!r}).touch()\nclass Evil: pass\n"
    (folder / name).parent.joinpath("evil.py").write_text(code)
    content = json.loads((folder / name).read_text())
    content |= {"auto_map": dict.fromkeys(AUTO, "evil.Evil"), "model_type": "evil", "tokenizer_class": "Evil"}
    content["auto_map"]["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]
    (folder / name).write_text(json.dumps(content))


def _judge(name: str, folder: Path, **arguments: Any) -> Any:
    return build(REWARDS[name], arguments, model_path=str(folder), device="cpu")


# what is made, which file of it asks for code, what reads it, and whether that is refused: where transformers has
# a class of its own for the folder's model, it takes that one
CALLS: dict[str, tuple[Callable[[Path], Any], str, Callable[[Path], Any], bool]] = {
    "openvla": (
        lambda folder: write_tiny(folder, sentences=["push"], image_size=28, text_tokens=200),
        "tokenizer_config.json",
        lambda folder: Prompts(str(folder), 32, 3),
        True,
    ),
    "reason1_tokenizer": (reason1_folder, "tokenizer_config.json", lambda folder: Reason1Encoder(str(folder)), False),
    "reason1_config": (reason1_folder, "config.json", lambda folder: load_reason1(str(folder)), True),
    "t5_tokenizer": (t5_folder, "config.json", lambda folder: T5Encoder(str(folder)), False),
    "judge_tokenizer": (make_reason1, "tokenizer_config.json", lambda folder: _judge("cosmos_reason1", folder), False),
    "judge_model": (make_reason1, "config.json", lambda folder: _judge("cosmos_reason1", folder), False),
    "topreward_config": (make_qwen3, "config.json", lambda folder: _judge("topreward", folder), False),
    "llama_guard_tokenizer": (
        make_llama_guard,
        "meta-llama/Llama-Guard-3-8B/tokenizer_config.json",
        lambda folder: LlamaGuard(str(folder / "meta-llama" / "Llama-Guard-3-8B")),
        False,
    ),
    "refiner_tokenizer": (
        write_tiny_reason1,
        "tokenizer_config.json",
        lambda folder: Reason1Refiner(str(folder)),
        False,
    ),
    "video_filter_config": (
        make_video_filter,
        f"nvidia/Cosmos-Guardrail1/video_content_safety_filter/{SIGLIP}/snapshots/abc/config.json",
        lambda folder: VideoFilter(str(folder / "nvidia/Cosmos-Guardrail1/video_content_safety_filter")),
        False,
    ),
    "video_align_tokenizer": (
        make_video_align,
        "checkpoint-7/tokenizer/tokenizer_config.json",
        lambda folder: _judge("dance_grpo", folder, base_path=str(folder / "base")),
        False,
    ),
    "video_align_config": (
        make_video_align,
        "base/config.json",
        lambda folder: _judge("dance_grpo", folder, base_path=str(folder / "base")),
        True,
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_folder_that_asks_for_code_of_its_own_runs_none(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, name, read, is_refused = CALLS[call]
    make(tmp_path)
    _asks_for_code(tmp_path, name)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    refusal = pytest.raises(CheckpointError, match="needs Python code of its own")
    with refusal if is_refused else contextlib.suppress(CheckpointError):
        read(tmp_path)
    assert not list(tmp_path.rglob("it_ran"))


# Files that read what this process, its own children or this repository wrote.
OWN_CHANNELS = {
    "cosmos_predict2/rl/envs/simulators/worker_process.py",
    "cosmos_predict2/rl/episodes/ray_rollout.py",
    "imaginaire/data/workers.py",
    "scripts/list_config_fields.py",
}
# The callee and the keyword without which it may run code; None: never.
GUARDED: dict[str, tuple[str, object] | None] = {
    "from_pretrained": ("trust_remote_code", False),
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "np.load": ("allow_pickle", False),
    "npy.read_array": ("allow_pickle", False),
    "pickle.load": None,
    "pickle.loads": None,
    "pickle.Unpickler": None,
    "yaml.load": None,
    "yaml.full_load": None,
    "yaml.unsafe_load": None,
    "torch.hub.load": None,
    "joblib.load": None,
    "eval": None,
    "exec": None,
}


NAMED = re.compile(r"\b(?:" + "|".join({name.rpartition(".")[2] for name in GUARDED}) + r")\(")  # also json.load


def _unguarded(node: ast.Call) -> bool:
    callee = ast.unparse(node.func)
    name = callee if callee in GUARDED else callee.rpartition(".")[2]
    if name not in GUARDED or (name in ("eval", "exec") and callee != name):
        return False
    given = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
    guard = GUARDED[name]
    return guard is None or given.get(guard[0]) is not guard[1]


@functools.cache
def _calls() -> list[tuple[str, ast.Call]]:
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    named = ((path, text) for path in files if NAMED.search(text := path.read_text()))
    nodes = ((path, node) for path, text in named for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return [(path.relative_to(ROOT).as_posix(), node) for path, node in nodes]


def test_no_call_of_the_tree_may_run_code_of_a_file() -> None:
    found = [(name, ast.unparse(node)) for name, node in _calls() if name not in OWN_CHANNELS and _unguarded(node)]
    assert not found
    for wrong in ("A.from_pretrained(x)", "torch.load(f)", "yaml.load(x)", "numpy.load(f, allow_pickle=True)"):
        assert _unguarded(next(node for node in ast.walk(ast.parse(wrong)) if isinstance(node, ast.Call)))


def test_json_of_others_has_one_reader() -> None:
    """Answers of own processes, and of the service and its clients, which read each their own way, are no files."""
    others = {"imaginaire/foreign_json.py", "imaginaire/distributed/places.py"}
    service = [f"service/{name}" for name in ("running", "server", "supervisor", "worker")]
    others |= {f"cosmos_predict2/rl/{name}.py" for name in ("clips/scoring", "rewards/remote", "rewards/wire")}
    others |= {f"cosmos_predict2/rl/rewards/{name}.py" for name in service}
    others |= {"cosmos_predict2/data/shards/dataset_shards.py"}  # an index that this process has made
    own = {"json.loads(json.dumps(about))", "json.loads(json.dumps(wanted))"}
    of_packages = [(name, node) for name, node in _calls() if name.startswith(("cosmos_predict2/", "imaginaire/"))]
    found = [
        (name, call)
        for name, node in of_packages
        if ast.unparse(node.func) in ("json.load", "json.loads")
        and name not in others
        and (call := ast.unparse(node)) not in own
    ]
    assert not found and len(of_packages) > 1_000
