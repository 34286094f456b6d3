# SPDX-License-Identifier: Apache-2.0
"""Generation: reproducible, honest about what it was given, and clear about what it lacks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from cosmos_predict2.data.video import media
from cosmos_predict2.diffusion.solvers import Step
from cosmos_predict2.guardrail.runner import BlockedError, GuardrailRunner
from cosmos_predict2.interfaces import Verdict
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.world_model import world_model
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import Denoiser
from cosmos_predict2.world_model.options import VideoForm
from cosmos_predict2.world_model.parallelize import compile_blocks
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel, initial_noise, to_uint8
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.errors import CheckpointError, ConfigError
from tests.models.parts import LIMITS, NET, PooledPixels, awaken

TWO = SamplingOptions(num_steps=2)


def make_pipeline(**options: Any) -> Video2WorldPipeline:
    torch.manual_seed(0)
    net = Video2WorldDiT(**NET, **LIMITS)
    awaken(net, std=0.2)
    config = Video2WorldPipelineConfig(state_t=3, fps=10, resolution="48", precision="float32")
    encoder = options.pop("text_encoder", BytesEncoder(num_tokens=6, width=8))
    return Video2WorldPipeline(WorldModel(config, net.eval(), PooledPixels(), encoder), **options)


def frames(count: int = 1, size: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (size, 3, count, 32, 32), dtype=torch.uint8, generator=generator)


def text(pipe: Video2WorldPipeline, prompt: str) -> Tensor:
    return pipe.world.encode_text([prompt])


def test_equal_seeds_give_equal_videos_and_others_do_not() -> None:
    pipe = make_pipeline()
    embedding = text(pipe, "push the puck")
    first, second, other = (
        pipe.generate(frames(), embedding, seed=seed, options=SamplingOptions(num_steps=3, guidance=1.0))
        for seed in (0, 0, 1)
    )
    assert first.shape == (1, 3, 9, 32, 32)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert float(first.abs().max()) <= 1.0


def test_trained_or_averaged_weights_as_asked_for(tmp_path: Path) -> None:
    states = {kind: Video2WorldDiT(**NET, **LIMITS).state_dict() for kind in ("net", "net_ema")}
    path = str(tmp_path / "model.pt")
    torch.save({f"{kind}.{name}": value for kind, state in states.items() for name, value in state.items()}, path)
    config = make_pipeline().config
    config.net, config.tokenizer = L(Video2WorldDiT)(**NET, **LIMITS), L(PooledPixels)()
    for kind, is_averaged in (("net", False), ("net_ema", True)):
        pipe = Video2WorldPipeline.from_config(config, path, False, device="cpu", load_ema_to_reg=is_averaged)
        assert all(value.equal(states[kind][name]) for name, value in pipe.dit.state_dict().items())


def test_weights_that_are_not_there_fail_before_anything_is_built() -> None:
    config = make_pipeline().config
    config.net, config.tokenizer = L(Video2WorldDiT)(**NET, **LIMITS), L(PooledPixels)(unknown="argument")
    with pytest.raises(CheckpointError, match=r"absent\.pt"):
        Video2WorldPipeline.from_config(config, "absent.pt", device="cpu")
    config.prompt_refiner_config.checkpoint_dir = "absent"
    with pytest.raises(CheckpointError, match="prompt refiner has no weights: absent/nvidia"):
        Video2WorldPipeline.from_config(config, device="cpu", load_prompt_refiner=True)


def test_initial_noise_does_not_depend_on_the_device_or_torch() -> None:
    torch.manual_seed(5)
    noise = initial_noise((1, 2, 1, 1, 3), seed=0)
    expected = [1.7640524, 0.4001572, 0.9787380, 2.2408932, 1.8675580, -0.9772779]  # numpy.random.RandomState(0)
    assert torch.allclose(noise.flatten(), torch.tensor(expected))
    assert noise.dtype == torch.float32


@pytest.mark.parametrize("count", [1, 5])
def test_the_video_begins_with_what_was_given(count: int) -> None:
    pipe = make_pipeline()
    given = frames(count)
    latent = pipe.world.tokenizer.encode(given.float() / 127.5 - 1)
    video = pipe.generate(given, text(pipe, "x"), options=TWO)
    expected = pipe.world.tokenizer.decode(latent)
    assert torch.allclose(video[:, :, :count], expected, atol=1e-5)


def test_a_long_video_hands_frames_over_as_they_were_decoded(tmp_path: Path) -> None:
    pipe = make_pipeline()
    media.write_image(str(tmp_path / "a.png"), frames()[0, :, 0])
    form, one = VideoForm(size=(32, 32), num_frames=14, chunk_frames=9, overlap=5), dict(options=TWO, num_frames=9)
    video = pipe(str(tmp_path / "a.png"), "push", seed=3, options=TWO, form=form)
    embedding = text(pipe, "push")
    first = pipe.generate(frames(), embedding, seed=3, **one)
    second = pipe.generate(first[:, :, -5:], embedding, seed=4, **one)
    third = pipe.generate(second[:, :, -5:], embedding, seed=5, **one)
    assert torch.equal(video, torch.cat([first, second[:, :, 5:], third[:, :, 5:]], dim=2)[:, :, :14])
    media.write_video(tmp_path / "a.mp4", frames(5)[0], 10)
    five: dict[str, Any] = dict(num_conditional_frames=5, seed=3, options=TWO)
    usual, all_of_them, last = (
        pipe(str(tmp_path / "a.mp4"), "push", form=replace(form, overlap=overlap), **five) for overlap in (None, 5, 1)
    )
    assert torch.equal(usual, all_of_them) and not torch.equal(usual, last), "as many as the first chunk begins with"
    with pytest.raises(ConfigError, match="overlap"):
        VideoForm(num_frames=14).num_chunks(9, 0)


@pytest.mark.parametrize("flow", [None, FlowConfig()])
def test_an_edit_begins_at_the_level_of_its_strength(flow: FlowConfig | None) -> None:
    pipe = make_pipeline()
    config = attrs.evolve(pipe.config, flow=flow)
    world = WorldModel(config, pipe.dit, pipe.world.tokenizer)
    clip, options = frames(9), SamplingOptions(num_steps=8, strength=0.5)
    steps: list[Step] = []
    world.generate(
        clip[:, :, :1],
        text(pipe, "x"),
        options=options,
        edited_B_C_F_H_W=clip,
        on_step=lambda i, step: steps.append(step),
    )
    assert len(steps) == 4
    x0, noise = world.encode(clip), initial_noise(tuple(steps[0].x_B_C_T_H_W.shape), 0)
    level = steps[0].sigma
    expected = x0 + level * noise if flow is None else (1 - level) * x0 + level * noise
    torch.testing.assert_close(steps[0].x_B_C_T_H_W, expected.to(x0), rtol=1e-5, atol=1e-5)


def test_both_halves_of_the_guidance_in_one_batch_or_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipeline()
    positive, negative = text(pipe, "push"), text(pipe, "blurred")
    arguments: dict[str, Any] = dict(options=SamplingOptions(num_steps=3, guidance=3.0))
    together = pipe.generate(frames(), positive, negative, **arguments)
    repeatable = SamplingOptions(num_steps=3, guidance=3.0, is_repeatable=True)
    as_in_training = pipe.generate(frames(), positive, negative, options=repeatable)
    uneven = pipe.generate(frames(), positive, negative[:, :3], **arguments)
    monkeypatch.setattr(pipe.world, "_fits_doubled", lambda latent: False)
    apart = pipe.generate(frames(), positive, negative, **arguments)
    assert torch.allclose(together, apart, atol=1e-4)
    assert torch.equal(as_in_training, apart), "with memory for both"
    assert torch.equal(uneven, pipe.generate(frames(), positive, negative[:, :3], **arguments))
    no_negative = pipe.generate(frames(), positive, None, **arguments)
    assert not torch.equal(together, no_negative)
    zeros = torch.zeros_like(positive)  # the text that is dropped, and nothing else: the given frames stay
    assert torch.equal(no_negative, pipe.generate(frames(), positive, zeros, **arguments))


def test_the_network_runs_once_a_step_and_reads_its_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipeline()
    calls: list[int] = []
    run = Denoiser.__call__

    def counted(self: Denoiser, x: Tensor, *args: Any) -> Any:
        calls.append(x.shape[0])
        return run(self, x, *args[:2])  # without what was prepared

    with_cache = pipe.generate(frames(), text(pipe, "x"), options=TWO)
    monkeypatch.setattr(Denoiser, "__call__", counted)
    assert torch.allclose(with_cache, pipe.generate(frames(), text(pipe, "x"), options=TWO), atol=1e-5)
    assert calls == [1] * 3  # one more at the last level
    for guidance in (1.0, -1.0):  # below zero it leads away from the prompt
        calls.clear()
        pipe.generate(frames(), text(pipe, "x"), options=SamplingOptions(num_steps=2, guidance=guidance))
        assert calls == [2] * 3


def test_samples_of_a_batch_do_not_mix() -> None:
    pipe = make_pipeline()
    both = torch.cat([text(pipe, "push"), text(pipe, "pull")])
    given = frames(size=2)
    batch = pipe.generate(given, both, options=TWO)
    given[1] = 255 - given[1]
    changed = pipe.generate(given, both, options=TWO)
    assert torch.allclose(batch[0], changed[0], atol=1e-5)
    assert not torch.allclose(batch[1], changed[1], atol=1e-2)


def test_what_a_network_does_not_take_is_refused() -> None:
    pipe = make_pipeline()
    for count, options, named in (
        (1, SamplingOptions(solver="unipc"), "unipc"),
        (1, SamplingOptions(num_steps=0), "num_steps=0"),
        (2, TWO, "^2 frames"),
        (9, TWO, "^9 frames"),
    ):
        with pytest.raises(ConfigError, match=named):
            pipe.generate(frames(count), text(pipe, "x"), options=options)
    with pytest.raises(ConfigError, match="width 16"):
        make_pipeline(text_encoder=BytesEncoder(num_tokens=6, width=16))


def test_distinct_prompts_are_encoded_once_unless_their_embeddings_are_given() -> None:
    class Counting(BytesEncoder):
        seen: list[str] = []

        def encode(self, prompts: Any) -> Tensor:
            self.seen.extend(prompts)
            return super().encode(prompts)

    world, stored = make_pipeline(text_encoder=Counting(num_tokens=6, width=8)).world, torch.ones(6, 8)
    assert torch.equal(world.encode_text(["a", "b", "a", "c"], {"c": stored})[3], stored)
    assert Counting.seen == ["a", "b"]
    with pytest.raises(ConfigError, match="encode_prompts"):
        make_pipeline(text_encoder=None).world.encode_text(["push the puck"])


class NoPucks:
    name = "no pucks"

    def check_prompt(self, prompt: str) -> Verdict:
        return Verdict("puck" not in prompt, "it speaks of a puck")


class Rewriter:
    """Names the seed, and the mean of the frames that it sees."""

    def refine(self, prompt: str, frames_C_F_H_W: Tensor, seed: int) -> str:
        assert frames_C_F_H_W.dtype == torch.uint8
        return f"{prompt}, {seed}: {frames_C_F_H_W.float().mean():.3f}"


class Puck(Rewriter):
    def refine(self, prompt: str, frames_C_F_H_W: Tensor, seed: int) -> str:
        return "push the puck"


def test_a_guardrail_sees_the_prompt_before_and_after_refining() -> None:
    pipe = make_pipeline(guardrail=GuardrailRunner([NoPucks()]), refiner=Rewriter())
    assert pipe.checked_prompt("push the box", torch.ones(3, 1, 2, 2, dtype=torch.uint8), 4) == "push the box, 4: 1.000"
    assert pipe.checked_prompt("push the box") == "push the box"  # which are no frames to read
    with pytest.raises(BlockedError, match=r"The prompt was refused: no pucks: it speaks of a puck"):
        pipe.checked_prompt("push the puck")
    pipe.refiner = Puck()
    with pytest.raises(BlockedError, match="The refined prompt was refused"):
        pipe.checked_prompt("push the box", torch.ones(3, 1, 2, 2, dtype=torch.uint8))


def test_each_chunk_of_a_long_video_has_a_prompt_of_its_own_frames(tmp_path: Path) -> None:
    pipe = make_pipeline(refiner=Rewriter())
    media.write_image(str(tmp_path / "a.png"), frames()[0, :, 0])
    form = VideoForm(size=(32, 32), num_frames=13, chunk_frames=9, overlap=5)
    video, prompts = pipe(str(tmp_path / "a.png"), "push", seed=3, options=TWO, form=form, return_prompt=True)
    handed_over = to_uint8(video[0, :, 4:9])
    assert prompts == [f"push, {3 + i}: {of.float().mean():.3f}" for i, of in enumerate((frames()[0], handed_over))]
    first = pipe.generate(frames(), text(pipe, prompts[0]), seed=3, options=TWO, num_frames=9)
    second = pipe.generate(first[:, :, -5:], text(pipe, prompts[1]), seed=4, options=TWO, num_frames=9)
    assert torch.equal(video, torch.cat([first, second[:, :, 5:]], dim=2))
    short = replace(form, num_frames=9)
    assert pipe(str(tmp_path / "a.png"), "push", seed=3, options=TWO, form=short, return_prompt=True)[1] == prompts[0]


class Eyes:
    name = "eyes"

    def __init__(self, verdict: Verdict, edit: Any = lambda frames: frames) -> None:
        self.check_video, self.postprocess = (lambda frames: verdict), edit


def test_a_guardrail_sees_the_video_and_may_edit_it() -> None:
    pipe = make_pipeline()
    video = torch.rand(1, 3, 5, 16, 16) * 2.2 - 1.1
    assert pipe.checked_video(video) is video
    pipe.guardrail = GuardrailRunner([Eyes(Verdict(True))])
    assert pipe.checked_video(video) is video  # unchanged, and so not rounded
    pipe.guardrail = GuardrailRunner([Eyes(Verdict(True), torch.zeros_like)])
    edited = pipe.checked_video(video)
    assert edited.shape == video.shape and (edited == -1).all()
    pipe.guardrail = GuardrailRunner([Eyes(Verdict(False, "frame 3 shows drugs"))])
    with pytest.raises(BlockedError, match="The video was refused: eyes: frame 3 shows drugs"):
        pipe("assets/toy_world/first_frame.png", "push the puck", aspect_ratio="1:1", num_sampling_step=2)


def test_pixels_are_rounded_not_cut() -> None:
    levels = torch.arange(256)
    assert torch.equal(to_uint8(levels / 127.5 - 1), levels.to(torch.uint8))
    assert to_uint8(torch.tensor([-2.0, 2.0])).tolist() == [0, 255]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_ranks_that_share_weights_agree_on_how_often_the_network_runs(
    is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are gathered in every forward pass, so a rank with less memory than the others must not take two."""
    pipe = make_pipeline()
    monkeypatch.setattr(pipe.world, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(world_model.distributed, "all_reduce_", lambda x, op, group=None: x.zero_())  # another has none
    if is_sharded:
        monkeypatch.setattr(world_model, "is_fsdp", lambda net: isinstance(net, Video2WorldDiT))
    assert pipe.world._fits_doubled(torch.zeros(1, 16, 3, 4, 4)) == (not is_sharded)


@pytest.mark.long
def test_compiled_blocks_sample_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, and so from then on; without the compiler's own kernels, which take a minute."""
    counts: list[int] = []

    def compiled(net: Any) -> None:
        counts.append(1)
        compile_blocks(net, backend="eager")

    monkeypatch.setattr(world_model, "compile_blocks", compiled)
    pipe = make_pipeline()
    arguments = (frames(), text(pipe, "push"), text(pipe, "blurry"))
    options = SamplingOptions(num_steps=2, guidance=2.0)
    expected = pipe.generate(*arguments, options=options)
    for _ in range(2):
        found = pipe.generate(*arguments, options=replace(options, compile_network=True))
        assert torch.allclose(found, expected, atol=1e-4)
    assert counts == [1] and "compile_network" not in options.record()
