# SPDX-License-Identifier: Apache-2.0
"""The start of the trained network: drawn, from a file, whole and in shards."""

import ctypes
import gc
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.models.config import Predict2ModelManagerConfig, Predict2Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.nn.layers import Start
from cosmos_predict2.world_model import assembly
from cosmos_predict2.world_model.assembly import add_trained_adapters, fill_network, network_of
from cosmos_predict2.world_model.config import EMAConfig, Video2WorldPipelineConfig
from imaginaire import distributed
from imaginaire.checkpoint import weights
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import full_tensor
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.training.model import require_memory, to_device
from tests.models.parts import PooledPixels, make_batch
from tests.multiprocess import run_distributed

# Widths that two ranks do not share evenly everywhere (the last linear has 68 rows, the norms 12 numbers).
NET = dict(model_channels=36, num_blocks=3, num_heads=3, adaln_lora_dim=7, crossattn_emb_channels=8)
LIMITS = dict(max_img_h=8, max_img_w=8, max_frames=4, extra_per_block_abs_pos_emb=True)
LORA = dict(train_architecture="lora", lora_rank=2, lora_alpha=4)


def config_of(path: str = "", shard: int = 0, **options: Any) -> Predict2Video2WorldModelConfig:
    return Predict2Video2WorldModelConfig(
        pipe_config=Video2WorldPipelineConfig(
            net=L(Video2WorldDiT)(**NET, **LIMITS), tokenizer=L(PooledPixels)(), state_t=3, ema=EMAConfig(enabled=True)
        ),
        model_manager_config=Predict2ModelManagerConfig(dit_path=path),
        **{"precision": "float32", "fsdp_shard_size": shard, **options},
    )


def trained_network(config: Any, dtype: torch.dtype) -> DiT:
    net = network_of(config.pipe_config.net).to(dtype)
    add_trained_adapters(net, config)
    return net


def filled(config: Any, seed: int = 3) -> DiT:
    net = trained_network(config, torch.float32)
    fill_network(net, config, "cpu", seed)
    return net


def values(net: torch.nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value) for name, value in net.state_dict().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in several layouts, a run with adapters, and the weights as they are."""
    from safetensors.torch import save_file

    from cosmos_predict2.checkpoints.diffusers_names import to_diffusers_name

    root = tmp_path_factory.mktemp("weights")
    state = {name: value for name, value in values(filled(config_of(), seed=1)).items() if not weights.is_extra(name)}
    torch.save(state, root / "plain.pt")
    torch.save({f"net.{name}": value for name, value in state.items()}, root / "run.pt")
    torch.save({f"net_ema.{name}": value for name, value in state.items()}, root / "averaged.pt")
    save_file(state, root / "plain.safetensors")
    (root / "diffusers").mkdir()
    renamed = {to_diffusers_name(name): value for name, value in state.items()}
    save_file(renamed, root / "diffusers/diffusion_pytorch_model.safetensors")
    adapted = config_of(**LORA, init_lora_weights=False)
    torch.save({f"net.{name}": value for name, value in values(filled(adapted, 7)).items()}, root / "lora.pt")
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("name", ["plain.pt", "run.pt", "averaged.pt", "plain.safetensors", "diffusers"])
def test_every_layout_of_a_file_gives_its_weights(files: dict[str, Path], name: str) -> None:
    same(values(filled(config_of(str(files[name])))), values(filled(config_of(), seed=1)))


def test_a_seed_repeats_and_what_is_drawn_does_not_depend_on_adapters() -> None:
    plain, adapted = (values(filled(config_of(**options))) for options in ({}, LORA))
    same(plain, values(filled(config_of())))
    base = {name.replace(".base_layer", ""): value for name, value in adapted.items() if ".lora_" not in name}
    same({name: base[name] for name in plain}, plain)
    other = values(filled(config_of(), seed=4))
    assert not torch.equal(plain["x_embedder.proj.1.weight"], other["x_embedder.proj.1.weight"])
    q, k = (plain[f"blocks.0.self_attn.{name}_proj.weight"] for name in "qk")
    assert not torch.equal(q, k)


def test_large_parameters_are_drawn_in_parts_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "DRAWN_NUMEL", 5 * 36)
    weight = values(filled(config_of()))["blocks.0.mlp.layer1.weight"]
    assert len(weight.view(-1).unique()) > 0.99 * weight.numel() and abs(float(weight.std()) * 6 - 0.9866) < 0.05


def test_adapters_change_nothing_at_first_and_those_of_a_file_go_on(files: dict[str, Path]) -> None:
    fresh = values(filled(config_of(str(files["plain.pt"]), **LORA)))
    assert all(not value.any() for name, value in fresh.items() if ".lora_B." in name)
    assert all(bool(value.any()) for name, value in fresh.items() if ".lora_A." in name)
    drawn = filled(config_of(**LORA, init_lora_weights=False), 7)
    same(values(filled(config_of(str(files["lora.pt"]), **LORA))), values(drawn))


def test_the_log_has_what_the_start_weights_are(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    filled(config_of(str(files["plain.pt"]), **LORA))
    count = len(dict(trained_network(config_of(), torch.float32).named_parameters()))
    assert f"plain.pt ({count} of {count} weights of the network matched; adapters begin anew)" in caplog.text
    filled(config_of(**LORA))
    assert "adapters on them learn little" in caplog.text


@pytest.mark.parametrize("options", [{}, LORA])
def test_a_weight_of_the_base_that_the_file_lacks_is_fatal(
    files: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    state = torch.load(files["plain.pt"])
    del state["blocks.1.self_attn.q_proj.weight"]
    torch.save(state, tmp_path / "less.pt")
    with pytest.raises(CheckpointError, match=r"blocks\.1\.self_attn\.q_proj\.(base_layer\.)?weight"):
        filled(config_of(str(tmp_path / "less.pt"), **options))


class Shifted(Video2WorldDiT):
    begins_anew = ("shift",)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.shift = torch.nn.Parameter(torch.empty(3))
        self.init_weights()

    def starts(self) -> dict[str, Start]:
        return {"shift": Start(0.25)}


def test_a_parameter_of_ones_own_begins_anew_beside_the_weights_of_a_file(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(str(files["plain.pt"]))
    config.pipe_config.net["_target_"] = Shifted
    state = values(filled(config))
    assert state.pop("shift").tolist() == [0.25] * 3
    same(state, values(filled(config_of(), seed=1)))
    adapted = config_of(**LORA)
    adapted.pipe_config.net["_target_"] = Shifted
    parameters = trained_network(adapted, torch.float32).named_parameters()
    assert {name for name, value in parameters if value.requires_grad and ".lora_" not in name} == {"shift"}
    monkeypatch.setattr(Shifted, "begins_anew", "shift*")  # without a comma: its "*" alone would match every weight
    for own in (config, adapted):
        with pytest.raises(ConfigError, match=r"begins_anew of Shifted is the text 'shift\*'"):
            filled(own)
    monkeypatch.setattr(Shifted, "begins_anew", ())
    with pytest.raises(CheckpointError, match=r"(?s)shift.*begins_anew"):
        filled(config)


def test_the_network_is_built_without_memory_and_in_the_dtype_of_the_run() -> None:
    net = trained_network(config_of(**LORA), torch.bfloat16)
    assert all(tensor.is_meta for tensor in [*net.parameters(), *net.buffers()])
    assert {p.dtype for name, p in net.named_parameters() if ".lora_" in name} == {torch.float32}
    assert {p.dtype for name, p in net.named_parameters() if ".lora_" not in name} == {torch.bfloat16}
    wide = trained_network(config_of(**LORA), torch.float64)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}


def test_a_plain_mapping_makes_a_model_with_the_same_checks() -> None:
    config = config_of()
    plain = {"precision": "float32", "pipe_config": {"net": config.pipe_config.net, "state_t": 3}}
    pipe = Video2WorldModel({**plain, "pipe_config": {**plain["pipe_config"], "tokenizer": None}}).pipe_config
    assert (pipe.state_t, pipe.ema.enabled) == (3, False)
    for wrong, text in [
        ({"precision": "float31"}, r"model\.config\.precision='float31'"),
        ({"pipe_config": {"state": 3}}, r"Unknown key model\.config\.pipe_config\.state.*state_t"),
        ({"lora_rank": "many"}, r"model\.config\.lora_rank='many'"),
        ({}, r"model\.config\.pipe_config\.net: not set"),
    ]:
        with pytest.raises(ConfigError, match=text):
            Video2WorldModel(wrong)
    with pytest.raises(ConfigError, match=r"model\.config is null"):
        Video2WorldModel(None)


# --- in shards


def trained(config: Any) -> Video2WorldModel:
    """A model as the trainer makes one ready."""
    torch.manual_seed(0)
    model = Video2WorldModel(config)
    is_meta = {tensor.is_meta for tensor in [*model.net.parameters(), *model.net.buffers()]}
    assert is_meta == {distributed.world_size() > 1}
    to_device(model, distributed.device(), torch.preserve_format)
    model.on_train_start()
    parallel.synchronise_replicas(model)
    model.parallelize(parallel.current_dims())
    require_memory(model)
    return model


def cases(root: Path) -> dict[str, Predict2Video2WorldModelConfig]:
    plain, adapted = str(root / "plain.safetensors"), str(root / "lora.pt")
    return {
        "drawn": config_of(shard=-1),
        "of a .pt": config_of(str(root / "run.pt"), shard=2),
        "of safetensors": config_of(plain, shard=2),
        "adapters that begin": config_of(plain, shard=2, **LORA),
        "adapters, B drawn too": config_of(plain, shard=2, init_lora_weights=False, **LORA),
        "adapters that go on": config_of(adapted, shard=2, **LORA),
        "half precision": config_of(plain, shard=2, precision="bfloat16"),
        "adapters of half precision": config_of(plain, shard=2, precision="bfloat16", **LORA),
    }


def state_and_loss(config: Any) -> tuple[dict[str, Tensor], float]:
    model = trained(config)
    state = {name: full_tensor(value).clone() for name, value in model.checkpoint_state().items()}
    with torch.no_grad():
        _, loss = model.training_step(make_batch(positions=[0, 1]), 0)
    return state, float(loss)


def _in_shards_and_memory(root: Path) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    parallel.init_dims()
    found = {name: state_and_loss(config) for name, config in cases(root).items()}
    names = ("large.pt", "large.safetensors", "")
    return found, {name: _memory(name and str(root / name)) for name in names}


LARGE = dict(model_channels=768, num_blocks=3, num_heads=4, adaln_lora_dim=32, crossattn_emb_channels=64)


def _memory(path: str) -> tuple[int, int]:
    """The most bytes that filling a large network took, of memory and of mapped files."""
    config = config_of(path, shard=2)
    config.pipe_config.net = L(Video2WorldDiT)(**LARGE)
    config.pipe_config.ema.enabled = False
    model = Video2WorldModel(config)
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what others have freed would be used again, and not be counted
    before = _resident()
    peak, done = dict(before), threading.Event()

    def watch() -> None:
        while True:  # once at the end, too: on a busy machine this thread may have had no turn before
            is_last = done.wait(0.001)
            peak.update({kind: max(size, peak[kind]) for kind, size in _resident().items()})
            if is_last:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    model.parallelize(parallel.current_dims())
    done.set()
    watcher.join()
    return peak["RssAnon"] - before["RssAnon"], peak["RssFile"] - before["RssFile"]


def _resident() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}


@pytest.mark.slow
def test_shards_are_filled_alike_and_no_rank_reads_more_than_its_own(files: dict[str, Path]) -> None:
    from safetensors.torch import save_file

    root = files["plain.pt"].parent
    net = Video2WorldDiT(**LARGE)
    state = {name: value for name, value in net.state_dict().items() if not weights.is_extra(name)}
    torch.save(state, root / "large.pt")
    save_file(state, root / "large.safetensors")
    whole = sum(value.numel() * value.element_size() for value in state.values())

    parallel.init_dims()
    ranks = run_distributed(_in_shards_and_memory, 2, (root,))
    for name, config in cases(root).items():
        state, loss = state_and_loss(config)
        for found, _ in ranks:
            same(found[name][0], state)
            assert found[name][1] == pytest.approx(loss, rel=1e-5 if "half" not in name else 1e-2), name
    for _, memory in ranks:
        for name, (peak, mapped) in memory.items():
            assert 0.25 * whole < peak < 0.9 * whole, (name, peak / whole)  # its half, less what was free, and gaps
            assert mapped < 0.85 * whole, (name, mapped / whole)
    for name in ("large.pt", "large.safetensors"):  # a moment of both, which one of them may have had no turn to see
        assert max(memory[name][1] for _, memory in ranks) > 0.25 * whole, name


class Table(torch.nn.Module):
    """A module with a buffer, as fixed frequencies are, that it writes itself or leaves unwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0), persistent=False)


class WrittenTable(Table):
    def reset_buffers(self) -> None:
        self.table.copy_(torch.arange(6.0))


class ZeroLinear(torch.nn.Linear):
    def starts(self) -> dict[str, Start]:
        return {"weight": Start(), "bias": Start()}


class OwnParts(Video2WorldDiT):
    def __init__(self, *, part: type[torch.nn.Module], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.part_of_mine, self.zero = part(), ZeroLinear(4, 4)
        self.init_weights()


def test_buffers_and_starts_of_own_parts_are_written_after_the_network_has_memory() -> None:
    config = config_of()
    config.pipe_config.net = L(OwnParts)(part=WrittenTable, **NET, **LIMITS)
    net: Any = filled(config)
    assert net.part_of_mine.table.tolist() == [0, 1, 2, 3, 4, 5]
    assert not net.zero.weight.any() and not net.zero.bias.any()


def test_a_buffer_that_nothing_would_write_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"part_of_mine.table of Table.*reset_buffers"):
        assembly.network_of(L(OwnParts)(part=Table, **NET, **LIMITS))
