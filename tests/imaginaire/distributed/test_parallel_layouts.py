# SPDX-License-Identifier: Apache-2.0
"""Every layout of processes trains what one process trains: losses, gradients, weights and their average.

The real model in float64, with what the trainer puts around it: accumulation, averaging of what is not sharded,
clipping, the optimizer, the weight average. Each world size is started once and runs all its layouts.
"""

import dataclasses
import itertools
import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.data.clip_dataset import TRANSFORM_KEY
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from cosmos_predict2.world_model.config import EMAConfig
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import GradientAverager, ParallelDims
from imaginaire.errors import ConfigError
from imaginaire.optim.adamw import adamw, fused_adamw
from imaginaire.optim.muon import muon
from imaginaire.training.model import PowerEMA, evaluating
from tests.models.parts import make_model
from tests.multiprocess import run_distributed

FRAMES = 4  # latent
BATCH = 8  # samples of a step
OPTIMIZERS = {"adamw": adamw, "fused_adamw": fused_adamw, "muon": muon}
# For each of two steps the kinds of its micro-batches. The second step has moments of the optimizer.
CLIPS = (("video",), ("video", "video"))  # of networks with actions, which take no pictures
PLAIN = (("video",), ("images",))
ACCUMULATED = (("video", "images"), ("images", "video"))


@dataclass(frozen=True)
class Layout:
    """Sizes of context parallelism and sharding (0: none, -1: the world), in a world of that many processes."""

    world: int
    cp: int
    shard: int


@dataclass(frozen=True)
class Case:
    lora: bool = False
    steps: tuple[tuple[str, ...], ...] = PLAIN
    sac: str = "none"
    compile: bool = False
    optimizer: str = "fused_adamw"
    precision: str = "float64"
    pos_emb_per_block: bool = False
    actions: str = ""  # of ACTIONS


LAYOUTS = {
    "replicated": Layout(2, 1, 0),
    "sharded": Layout(2, 1, -1),
    "spread": Layout(2, 2, 0),
    "spread and sharded": Layout(2, 2, 2),
    "hybrid": Layout(4, 1, 2),
    "pairs spread": Layout(4, 2, 0),
    "pairs spread, hybrid": Layout(4, 2, 2),
    "pairs spread, all sharded": Layout(4, 2, -1),
    "spread over four": Layout(4, 4, 0),
}
ACTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "flat": dict(network=FlatActionDiT, action_dim=3, num_action_per_chunk=4 * FRAMES - 4),
    "chunk": dict(network=ChunkActionDiT, action_dim=3, action_on_tokens=True, summed_action_dims=[0]),
}
TOGETHER = Case(lora=True, steps=ACCUMULATED, sac="predict2_2b_720")


def _batch(positions: list[int], kind: str) -> dict[str, Any]:
    """Samples that follow from their positions, with frame rates, padding and given frames of their own."""
    batch: dict[str, Any] = {}
    rows = []
    for position in positions:
        generator = torch.Generator().manual_seed(position)
        frames = 1 if kind == "images" else 4 * FRAMES - 3
        pixels = torch.rand(3, frames, 32, 32, generator=generator, dtype=torch.float64) * 2 - 1
        mask = torch.zeros(1, 32, 32)
        mask[:, 32 - 8 * (position % 3) :] = 1
        rows.append(
            {
                kind: pixels[:, 0] if kind == "images" else pixels,
                "t5_text_embeddings": torch.randn(5, 8, generator=generator),
                "fps": torch.tensor(10.0),
                "padding_mask": mask,
                "sample_position": torch.tensor(position),
            }
        )
    for key in rows[0]:
        batch[key] = torch.stack([row[key] for row in rows])
    return batch


def _with_actions(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with what was done between its frames; a picture has none."""
    if "video" not in batch:
        return batch
    numbers = batch["sample_position"][:, None, None] + torch.arange(3 * (4 * FRAMES - 4)).view(-1, 3)
    transforms = [controller(3, 1.0).to_json()] * len(numbers)
    return {**batch, "action": torch.sin(numbers.double()), TRANSFORM_KEY: transforms}


def _model(case: Case, dims: ParallelDims, shard: int) -> Video2WorldModel:
    """Ready to train, with weights that follow from their names."""
    options = dict(train_architecture="lora", lora_rank=2, lora_alpha=4) if case.lora else {}
    net = dict(
        model_channels=48,
        num_heads=4,
        sac_config=dict(mode=case.sac, every_n_blocks=1),
        extra_per_block_abs_pos_emb=case.pos_emb_per_block,
        rope_enable_fps_modulation=True,
    )
    actions = dict(ACTIONS[case.actions])
    if actions:
        options["network"] = actions.pop("network")
        net |= actions
    model = make_model(
        precision=case.precision,
        state_t=FRAMES,
        net=net,
        ema=EMAConfig(enabled=True, iteration_shift=5),
        max_num_conditional_frames=FRAMES - 1,
        fsdp_shard_size=shard,
        torch_compile=case.compile,
        **options,
    )
    model.on_train_start()
    model.parallelize(dims)
    for name, parameter in model.net.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15 + (parameter.ndim == 1)
        with torch.no_grad():
            parallel.to_local(parameter).copy_(_part(whole, parameter))
    model.ema = PowerEMA(model.net, rate=model.pipe_config.ema.rate, iteration_shift=5)
    return model


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of what every rank has, cut as ``like`` is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _train(case: Case, cp: int = 1, shard: int = 0) -> dict[str, Tensor]:
    """Two steps as the trainer takes them; all that must not depend on the layout."""
    dims = parallel.init_dims(cp)
    model = _model(case, dims, shard)
    averager = GradientAverager(model, static_graph=False, find_unused_parameters=True)
    optimizer = OPTIMIZERS[case.optimizer](model, lr=1e-3)
    found: dict[str, Tensor] = {}
    position = 0
    for step, kinds in enumerate(case.steps):
        losses = []
        for i, kind in enumerate(kinds):
            size = BATCH // len(kinds) // dims.dp_size
            first = position + dims.dp_rank * size
            position += size * dims.dp_size
            is_last = i == len(kinds) - 1
            parallel.set_gradient_sync(model, is_last)
            batch = _batch(list(range(first, first + size)), kind)
            batch = _with_actions(batch) if case.actions else batch
            _, loss = model.training_step(batch, step)
            (loss / len(kinds)).backward()
            losses.append(loss.detach())
        averager()
        found[f"{step}/loss"] = _mean(torch.stack(losses).mean())
        found |= {f"{step}/grad/{name}": value for name, value in _gradients(model).items()}
        found[f"{step}/norm"] = model.clip_grad_norm_(0.5)
        optimizer.step()
        model.on_before_zero_grad(optimizer, None, step)  # type: ignore[arg-type]
        optimizer.zero_grad()
    with torch.no_grad(), evaluating(model):
        model.training_step(batch, step)  # leaves the root of a sharded network gathered
    with model.ema_scope():
        found |= {f"averaged/{name}": p.detach().clone() for name, p in model.net.named_parameters()}
    return found | {name: value.detach().clone() for name, value in model.checkpoint_state().items()}


def _mean(value: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def _gradients(model: Video2WorldModel) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.net.named_parameters() if p.grad is not None}


def _loss_at_levels_of_frames(cp: int = 1, shard: int = 0) -> dict[str, Tensor]:
    """Loss and gradients with a noise level for each latent frame."""
    dims = parallel.init_dims(cp)
    model = _model(Case(), dims, shard)
    assert all(isinstance(p, DTensor) == (shard != 0) for p in model.net.parameters())
    size = 4 // dims.dp_size
    batch = _batch(list(range(dims.dp_rank * size, (dims.dp_rank + 1) * size)), "video")
    draws = model._generators(batch, "train")
    x0, condition = model.data_and_condition(batch, draws)
    epsilon, _ = model.draw_noise(x0, False, draws)
    sigma_B_T = draws.uniform(FRAMES, "levels") * 3 + 0.1
    output, loss = model.loss(x0, epsilon, sigma_B_T, condition)
    assert output["x0"].shape[2] == FRAMES // cp
    averager = GradientAverager(model, static_graph=False, find_unused_parameters=False)
    loss.backward()
    averager()
    return {"loss": _mean(loss.detach()), **_gradients(model)}


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Raise where this rank's part of a tensor is not that of the whole one which is expected."""
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        scale = float(whole.abs().max()) if whole.numel() and whole.is_floating_point() else 0.0
        value, part = parallel.to_local(found[name]), _part(whole, found[name])
        atol = tolerance * max(scale, 1e-3)
        assert_close(value, part, rtol=tolerance, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def _run(world: int, cases: list[Case], expected: list[dict[str, Tensor]], names: list[str]) -> None:
    """In every process: each case in each of the layouts, held against what one process found."""
    for case, of_one in zip(cases, expected, strict=True):
        for name in names:
            layout = LAYOUTS[name]
            assert layout.world == world
            tolerance = 1e-9 if case.precision == "float64" else 1e-5
            found = _train(case, layout.cp, layout.shard)
            if case.precision == "float32":  # Adam makes much of differences where gradients are next to nothing
                of_one = {key: value for key, value in of_one.items() if key.startswith(("0/loss", "0/grad"))}
                found = {key: found[key] for key in of_one}
            try:
                _compare(found, of_one, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}, {case}: {error}") from None


def _names(world: int) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout.world == world]


def _two(cases: list[Case], expected: list[dict[str, Tensor]], levels: dict[str, Tensor]) -> None:
    _run(2, cases[:1], expected[:1], _names(2))
    _run(2, cases[1:2], expected[1:2], ["replicated", "spread and sharded"])
    _run(2, cases[2:], expected[2:], ["spread"])
    _compare(_loss_at_levels_of_frames(2, 8), levels, 1e-9)  # more than there are processes: cut
    adapters = Case(lora=True, precision="bfloat16")  # in float32, in one unit with the frozen bfloat16 weights
    _compare(_train(adapters, 1, -1), _train(adapters, 1, 0), 1e-5)
    with pytest.raises(ConfigError, match="fsdp_shard_size=0, or use optimizer=fusedadamw"):
        _train(Case(optimizer="muon"), 2, 2)


@pytest.mark.slow
def test_two_processes() -> None:
    cases = [Case(optimizer="adamw", pos_emb_per_block=True), TOGETHER]
    cases += [Case(optimizer="muon"), Case(precision="float32")]
    expected = [_train(case) for case in cases]
    assert float(expected[0]["0/norm"]) > 0.5  # clipping has work to do
    run_distributed(_two, 2, args=(cases, expected, _loss_at_levels_of_frames()))


def _four(plain: dict[str, Tensor], together: dict[str, Tensor]) -> None:
    _run(4, [Case()], [plain], [name for name in _names(4) if name != "pairs spread, hybrid"])
    _run(4, [TOGETHER], [together], ["pairs spread, hybrid"])


@pytest.mark.slow
def test_four_processes() -> None:
    run_distributed(_four, 4, args=(_train(Case()), _train(TOGETHER)))


def _combinations() -> list[Case]:
    return [
        Case(lora=lora, steps=steps, sac=sac)
        for lora, steps, sac in itertools.product(
            (False, True), (PLAIN, ACCUMULATED), ("none", "block_wise", "predict2_2b_720")
        )
    ]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_every_combination(world: int) -> None:
    cases = _combinations()
    run_distributed(_run, world, args=(world, cases, [_train(case) for case in cases], _names(world)), timeout=1700)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_action_conditioned_networks(world: int) -> None:
    together = dataclasses.replace(TOGETHER, actions="chunk", steps=CLIPS)
    cases = [Case(actions="flat", steps=CLIPS), Case(actions="chunk", steps=CLIPS), together]
    expected = [_train(case) for case in cases]
    assert all(expected[0][f"0/grad/action_embedder_B_D.fc{i}.weight"].any() for i in (1, 2))
    run_distributed(_run, world, args=(world, cases, expected, _names(world)))


@pytest.mark.long
def test_generated_code_on_two_processes() -> None:
    cases = [Case(compile=True), dataclasses.replace(TOGETHER, compile=True)]
    expected = [_train(dataclasses.replace(case, compile=False)) for case in cases]
    run_distributed(_run, 2, args=(2, cases, expected, ["spread and sharded"]), timeout=1700)
