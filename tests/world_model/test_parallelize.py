# SPDX-License-Identifier: Apache-2.0
"""Degrees of parallelism that are refused, before anything is built."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.world_model.parallelize import (
    CONTEXT_KEY,
    POLICIES,
    apply_recompute,
    compile_blocks,
    degree_problems,
)
from imaginaire import distributed
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError
from imaginaire.optim import lora
from imaginaire.training import preflight
from tests.kept_bytes import kept_bytes as count_kept_bytes

CONFIG = "cosmos_predict2/configs/base/config.py"
GOOD = dict(world_size=8, context_parallel_size=2, num_heads=16, state_t=24, fsdp_shard_size=8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        (dict(fsdp_shard_size=32), []),
        (dict(fsdp_shard_size=-1), []),
        (dict(world_size=None, fsdp_shard_size=3), []),
        (dict(context_parallel_size=4, num_heads=6), [CONTEXT_KEY]),
        (dict(context_parallel_size=8, state_t=20), [CONTEXT_KEY]),
        (dict(world_size=9, fsdp_shard_size=0), [CONTEXT_KEY]),
        (dict(context_parallel_size=3), [CONTEXT_KEY, CONTEXT_KEY]),
        (dict(fsdp_shard_size=3), ["model.config.fsdp_shard_size"]),
    ],
)
def test_degrees_that_do_not_divide_are_named(change: dict[str, Any], named: list[str]) -> None:
    assert [key for key, _ in degree_problems(**{**GOOD, **change})] == named


EXPERIMENT = "experiment=predict2_video2world_training_tiny_groot_gr1_480"


def test_a_launch_with_wrong_degrees_stops_before_anything_is_built(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path))
    monkeypatch.setattr(distributed, "world_size", lambda: 6)
    wrong = ["model_parallel.context_parallel_size=3", "model.config.fsdp_shard_size=4"]
    config = compose(CONFIG, [EXPERIMENT, "trainer.distributed_parallelism=fsdp", *wrong])
    with pytest.raises(ConfigError) as caught:
        preflight.check_launch(config)
    assert "model_parallel.context_parallel_size: 3 does not divide" in str(caught.value)
    assert "model.config.fsdp_shard_size: 4 does not divide the 6 processes" in str(caught.value)
    notes = "\n".join(preflight.notes(config))
    assert "model_parallel.context_parallel_size: 3 does not divide" in notes
    assert "fsdp_shard_size" not in notes  # of how many processes is not known in a dry run


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.config.pipe_config.net=null", r"pipe_config\.net: not set.*model=NAME"),
        ("model.config.pipe_config.net.sac_config.mode=blockwise", r"sac_config\.mode is 'blockwise'.*block_wise"),
        ("+model.config.pipe_config.net.sac_config.every=2", r"sac_config\.every is no key of it.*every_n_blocks"),
        ("model.config.pipe_config.net.sac_config.every_n_blocks=0", r"every_n_blocks is 0"),
        ("model.config.pipe_config.net.num_heads=0", r"start:\n  - model\.config\.pipe_config\.net\.num_heads: 0"),
        ("checkpoint.type=torch.nn.Linear", r"checkpoint\.type is torch.*Linear, no class of checkpointers"),
    ],
)
def test_a_network_that_cannot_be_made_is_told_before_anything_is_built(
    override: str, text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match=text):
        preflight.check_launch(compose(CONFIG, [EXPERIMENT, override]))


def _net(**options: Any) -> Video2WorldDiT:
    sizes = dict(max_img_h=8, max_img_w=8, max_frames=4, model_channels=24, num_blocks=1, num_heads=2)
    return Video2WorldDiT(**{**sizes, "adaln_lora_dim": 4, "crossattn_emb_channels": 8, **options})


def test_a_part_has_the_positions_and_limits_of_the_whole_clip() -> None:
    net = _net(extra_per_block_abs_pos_emb=True)
    text, fps = torch.randn(1, 3, 8), torch.tensor([10.0])
    whole = net.prepare(text, latent_shape=(4, 4, 4), fps_B=fps)
    net.see_part(1, 2)
    part = net.prepare(text, latent_shape=(2, 4, 4), fps_B=fps)
    tokens = part.rope[0].shape[0]
    assert all(torch.equal(a, b[tokens:]) for a, b in zip(part.rope, whole.rope, strict=True))
    assert part.extra_1_T_H_W_D is not None and whole.extra_1_T_H_W_D is not None
    assert torch.equal(part.extra_1_T_H_W_D, whole.extra_1_T_H_W_D[:, 2:])
    with pytest.raises(ValueError, match=r"\(6, 4, 4\).*beyond max_frames=4"):
        net.prepare(text, latent_shape=(3, 4, 4), fps_B=fps)
    with pytest.raises(ValueError, match="no part 2 of 2"):
        net.see_part(2, 2)


# Recomputation --------------------------------------------------------------------------------------------------------

MODES = [mode for mode in POLICIES if mode != "none"]
BATCH, FRAMES, SIDE, WORDS, WIDTH, HEADS, BLOCKS = 2, 4, 6, 7, 64, 2, 2
TOKENS = FRAMES * (SIDE // 2) ** 2
ACTIONS: dict[str, Any] = dict(cls=ChunkActionDiT, action_dim=3, action_on_tokens=True)
TARGETS = "q_proj,k_proj,v_proj,output_proj,mlp.layer1,mlp.layer2"


@pytest.mark.parametrize("has_adapters", [False, True])
def test_every_mode_gives_the_gradients_of_none(has_adapters: bool) -> None:
    plain = network("none", has_adapters=has_adapters)
    for mode in {POLICIES[mode]: mode for mode in MODES}.values():  # several names mean one policy
        assert_same_gradients(plain, network(mode, has_adapters=has_adapters))


def test_adapters_may_come_after_the_policy() -> None:
    net = network("predict2_2b_720")
    kept_before = kept_bytes(network("predict2_2b_720", has_adapters=True))
    adapt(net)
    assert_same_gradients(network("none", has_adapters=True), net)
    assert kept_bytes(net) == kept_before


@pytest.mark.parametrize(
    "own",
    [
        {"dtype": torch.float32},  # which has linear maps and norms of its own on CPUs
        {"dtype": torch.bfloat16},
        ACTIONS,
        {**ACTIONS, "reads_text": False},
        {**ACTIONS, "use_wan_fp32_strategy": True, "dtype": torch.bfloat16},
    ],
)
def test_other_precisions_and_networks_too(own: dict[str, Any]) -> None:
    assert_same_gradients(network("none", **own), network("predict2_2b_720", **own))


def test_products_of_onednn_are_kept() -> None:
    sizes = dict(model_channels=256, dtype=torch.float32, side=16)  # large enough for oneDNN
    assert_same_gradients(network("none", **sizes), network("mm_only", **sizes), side=16)
    plain, mm_only = (kept_bytes(network(mode, **sizes), side=16) for mode in ("block_wise", "mm_only"))
    projections = 12 * 256 * (BATCH * FRAMES * 8 * 8) * 4  # 4 of self-attention, 2 of cross-attention, 1 + 4 + 1
    assert mm_only - plain > BLOCKS * projections


@pytest.mark.parametrize("has_adapters", [False, True])
def test_each_mode_keeps_what_it_names(has_adapters: bool) -> None:
    kept = {mode: kept_bytes(network(mode, has_adapters=has_adapters)) for mode in POLICIES}
    features, words, log_sums = (8 * BATCH * n for n in (TOKENS * WIDTH, WORDS * WIDTH, TOKENS * HEADS))
    attention = features + log_sums
    _720 = (1 + 1 + 2 + 4) * features + 2 * words + attention  # v, out, q and out, first of the MLP; k and v of text
    linears = (6 + 5) * features + 2 * words + 3 * 8 * BATCH * FRAMES * (16 + 3 * WIDTH)
    expected = {
        "mm_only": linears + 2 * attention,
        "linear_selfattn": linears + attention,
        "predict2_2b_720": _720,
        "predict2_14b_720": _720,
        "predict2_2b_720_aggressive": 2 * attention,
        "predict2_2b_720_aggressive_v2": 0,
        "predict2_14b_720_aggressive": 5 * features + words,
    }
    found = {mode: (kept[mode] - kept["block_wise"]) / BLOCKS for mode in expected}
    assert found == pytest.approx(expected, rel=2e-3)  # a few scalars besides
    assert kept["mm_only"] < 0.8 * kept["none"] and kept["block_wise"] < 0.15 * kept["none"]


def test_only_every_nth_block_recomputes() -> None:
    kept = {n: kept_bytes(network("block_wise", every_n_blocks=n, num_blocks=3)) for n in (1, 2, 3)}
    of_a_block = kept[2] - kept[1]
    assert kept[3] - kept[2] == of_a_block
    none = kept_bytes(network("none", num_blocks=3))
    assert none - kept[3] == pytest.approx(of_a_block, rel=0.15)  # and the final layer
    assert_same_gradients(network("none", num_blocks=3), network("block_wise", every_n_blocks=2, num_blocks=3))


def test_names_and_modules_stay() -> None:
    plain, net = network("none"), network("mm_only")
    compile_blocks(net)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [(name, type(m)) for name, m in net.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", pytest.param("block_wise", marks=pytest.mark.long), "predict2_2b_720"])
def test_one_block_is_compiled_for_all(mode: str) -> None:
    """The compiler gives up after eight, and then runs the other blocks as they are."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def compiled(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net = network(mode, num_blocks=3)
    compile_blocks(net, backend=compiled)
    assert_close_gradients(network("none", num_blocks=3), net)
    assert len(graphs) == 1


def test_nothing_is_recorded_without_gradients() -> None:
    net = network("predict2_2b_720")
    with torch.no_grad():
        assert not net(**inputs(net)).requires_grad
    assert_same_gradients(network("none"), net)  # and the marks are in order afterwards


def test_a_network_recomputes_by_one_policy() -> None:
    net = network("block_wise")
    with pytest.raises(ConfigError, match="once"):
        apply_recompute(net, "mm_only")


@pytest.mark.long
@pytest.mark.parametrize("has_adapters", [False, True])
def test_compiled_blocks_keep_the_gradients_and_the_policy(has_adapters: bool) -> None:
    plain = network("none", has_adapters=has_adapters)
    for mode in POLICIES:
        torch._dynamo.reset()
        net = network(mode, has_adapters=has_adapters)
        eager = kept_bytes(net)
        # Traced, split into forward and backward and run without generated code; one mode goes the whole way.
        compile_blocks(net, backend="inductor" if mode == "predict2_2b_720" else "aot_eager_decomp_partition")
        assert_close_gradients(plain, net)
        assert kept_bytes(net) <= 1.15 * eager, mode


@pytest.mark.long
def test_compiled_blocks_of_a_network_with_actions() -> None:
    """With a text, and with none, which the blocks are told by a context of None."""
    for own in ({}, {"reads_text": False}, {"use_wan_fp32_strategy": True, "dtype": torch.bfloat16}):
        torch._dynamo.reset()
        options = {**ACTIONS, **own}
        net = network("predict2_2b_720", **options)
        compile_blocks(net, backend="aot_eager_decomp_partition")
        expected, found = gradients(network("none", **options)), gradients(net)
        tolerance = 2e-2 if "dtype" in own else 1e-9
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert float((found[name] - value).norm()) <= tolerance * float(value.norm()) + 1e-12, name


def network(
    mode: str,
    *,
    has_adapters: bool = False,
    every_n_blocks: int = 1,
    dtype: torch.dtype = torch.float64,
    cls: type[Video2WorldDiT] = Video2WorldDiT,
    **sizes: Any,
) -> Video2WorldDiT:
    numbers = dict(model_channels=WIDTH, num_blocks=BLOCKS, num_heads=HEADS, adaln_lora_dim=16)
    numbers |= {name: value for name, value in sizes.items() if name != "side"}
    net = cls(**numbers, crossattn_emb_channels=32, max_img_h=16, max_img_w=16, max_frames=16)
    generator = torch.Generator().manual_seed(0)
    net.init_weights(generator)
    with torch.no_grad():  # modulations begin at zero, which would hide the blocks
        for parameter in net.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    net.to(dtype)
    if has_adapters:
        adapt(net)
    apply_recompute(net, mode, every_n_blocks)
    return net


def adapt(net: Video2WorldDiT) -> None:
    lora.init_adapters(lora.inject(net, 4, 4, TARGETS), seed=1, init=False)
    for adapter in lora.adapters(net).values():
        adapter.to(net.dtype)


def inputs(net: Video2WorldDiT, side: int = SIDE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, mask = (torch.randn(BATCH, c, FRAMES, side, side, generator=generator) for c in (16, 1))
    times, text = torch.rand(BATCH, FRAMES, generator=generator), torch.randn(BATCH, WORDS, 32, generator=generator)
    if not net.reads_text:
        text = torch.zeros_like(text)
    found = dict(x_B_C_T_H_W=x, timesteps_B_T=times, crossattn_emb_B_S_E=text, condition_mask_B_1_T_H_W=mask)
    if net.takes_actions:
        found["action_B_A_D"] = torch.randn(BATCH, 4 * FRAMES - 4, 3, generator=generator)
    return {name: tensor.to(net.dtype) for name, tensor in found.items()}


def gradients(net: Video2WorldDiT, side: int = SIDE) -> dict[str, Tensor]:
    net.zero_grad()
    net(**inputs(net, side)).square().sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def assert_same_gradients(plain: Video2WorldDiT, net: Video2WorldDiT, side: int = SIDE) -> None:
    torch.testing.assert_close(gradients(net, side), gradients(plain, side), rtol=0, atol=0)


def assert_close_gradients(plain: Video2WorldDiT, net: Video2WorldDiT) -> None:
    expected, found = gradients(plain), gradients(net)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12 * float(value.abs().max()))


def kept_bytes(net: Video2WorldDiT, side: int = SIDE) -> int:
    given = inputs(net, side)
    return count_kept_bytes(lambda: net(**given), [*given.values(), *net.parameters(), *net.buffers()])
