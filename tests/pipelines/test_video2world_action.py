# SPDX-License-Identifier: Apache-2.0
"""Batches and rollouts with actions: nothing mixed, nothing doubled, nothing lost, and nothing computed twice."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.actions.transforms import controller, relative_pose
from cosmos_predict2.conditioner import Condition
from cosmos_predict2.configs.action_conditioned.networks import get_cosmos_predict2_action_conditioned_pipeline
from cosmos_predict2.diffusion.solvers import sample
from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import Prepared
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.released import TINY_ACTION
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.trained_text import with_tokens
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldActionPipelineConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.imagination import check_bases, chunk_starts
from cosmos_predict2.world_model.objectives import Denoiser, Flow, distilled_times, objective_of
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel, initial_noise
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.errors import CheckpointError, ConfigError, DataError
from tests.models.parts import LIMITS, NET, PooledPixels, awaken

TWO, THREE = (SamplingOptions(num_steps=number) for number in (2, 3))
ACTIONS = 8
DIM = 3


def make_pipeline(kind: str = "chunk", **options: Any) -> Video2WorldActionConditionedPipeline:
    torch.manual_seed(0)
    net: ActionDiT = (
        ChunkActionDiT(action_dim=DIM, **NET, **LIMITS, **options)
        if kind == "chunk"
        else FlatActionDiT(action_dim=DIM, num_action_per_chunk=ACTIONS, **NET, **LIMITS, **options)
    )
    awaken(net, "action_embedder", std=0.2)
    return pipeline_of(net.eval(), PooledPixels(), ACTIONS)


def pipeline_of(net: Any, tokenizer: Any, chunk_size: int) -> Video2WorldActionConditionedPipeline:
    config = Video2WorldActionPipelineConfig(
        state_t=1 + chunk_size // 4,
        fps=10,
        precision="float32",
        action_transform=controller(DIM, 2.0).to_dict(),
        chunk_size=chunk_size,
    )
    return Video2WorldActionConditionedPipeline(WorldModel(config, net, tokenizer))


def inputs(size: int = 3, length: int = ACTIONS, given: int = 1) -> tuple[Tensor, Tensor, list[int]]:
    generator = torch.Generator().manual_seed(3)
    frames = torch.randint(0, 256, (size, 3, given, 32, 32), dtype=torch.uint8, generator=generator)
    return frames, torch.randn(size, length, DIM, generator=generator), [5, 0, 7][:size]


def imagined(pipe: Any, *inputs: Any, **more: Any) -> Tensor:
    found: Tensor = pipe.generate_actions(*inputs, **{"as_float": True, "options": TWO, **more})
    return found


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chunk", "flat"])
@pytest.mark.parametrize("given", [1, 5])
def test_a_batch_is_what_its_samples_are_alone(kind: str, given: int) -> None:
    pipe = make_pipeline(kind)
    frames, actions, seeds = inputs(given=given)
    together = imagined(pipe, frames, actions, seeds, options=THREE)
    assert together.shape == (3, 3, 1 + ACTIONS, 32, 32)
    in_parts = imagined(pipe, frames, actions, seeds, batch_size=2, options=THREE)
    assert torch.allclose(together, in_parts, atol=1e-5)
    for i in range(3):
        alone = imagined(pipe, frames[i : i + 1], actions[i : i + 1], seeds[i : i + 1], options=THREE)
        assert torch.allclose(together[i], alone[0], atol=1e-5)


def test_each_sample_has_the_noise_of_its_seed() -> None:
    shape = (2, 16, 3, 4, 4)
    both = initial_noise(shape, [4, 9])
    for i, seed in enumerate((4, 9)):
        assert torch.equal(both[i : i + 1], initial_noise((1, *shape[1:]), seed))
    with pytest.raises(ConfigError, match="3 seeds for a batch of 2"):
        initial_noise(shape, [0, 1, 2])


def test_samples_are_labelled_with_the_rate_of_the_model() -> None:
    pipe = make_pipeline()
    pipe.config.fps = 4
    assert pipe.imagination.batch({}, torch.zeros(2, ACTIONS, DIM), (32, 32))["fps"].tolist() == [4.0, 4.0]


def test_actions_seeds_and_frames_all_matter() -> None:
    pipe = make_pipeline()
    frames, actions, seeds = inputs(1)
    base = imagined(pipe, frames, actions, seeds)
    as_bytes = pipe.generate_actions(frames, actions, seeds, options=TWO)
    assert ((imagined(pipe, frames / 127.5 - 1, actions, seeds) + 1) * 127.5 - as_bytes).abs().max() <= 0.51
    for other in (
        imagined(pipe, frames, actions + 1, seeds),
        imagined(pipe, frames, actions, [6]),
        imagined(pipe, 255 - frames, actions, seeds),
    ):
        assert not torch.allclose(base, other, atol=1e-3)


def test_the_published_call_is_one_sample_in_floats() -> None:
    pipe = make_pipeline()
    for given in (1, 5):
        frames, actions, _ = inputs(1, given=given)
        pictures = frames[0].permute(1, 2, 3, 0).numpy()
        video = pipe(pictures if given > 1 else pictures[0], actions[0].numpy(), "", "", given, 7.0, 3, seed=5)
        expected = imagined(pipe, frames, actions, [5], options=THREE)
        assert torch.equal(video, expected) and video.shape == (1, 3, 1 + ACTIONS, 32, 32)
    text = torch.ones(4, 8)
    with_text = pipe(pictures, actions[0], num_conditional_frames=5, num_sampling_step=3, embeddings={"": text})
    assert not torch.allclose(with_text, pipe(pictures, actions[0], num_conditional_frames=5, num_sampling_step=3))
    with pytest.raises(DataError, match=r"first_frame is \[5, 32, 32, 3\].*uint8 \[H, W, 3\] is expected"):
        pipe(pictures, actions[0])
    with pytest.raises(ConfigError, match="no text encoder and no embedding of 'push'"):
        pipe(pictures[0], actions[0], "push")


def test_a_pipeline_of_a_config_requires_a_transform_that_is_that_of_its_weights() -> None:
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    with pytest.raises(CheckpointError, match=r"Random weights .*config\.action_transform"):
        Video2WorldActionConditionedPipeline.from_config(config, device="cpu")
    config.action_transform = controller(4, 20.0).to_dict()
    with pytest.raises(
        CheckpointError, match=r"was trained with actions .*scale 1, but config\.action_transform .* 20"
    ):
        Video2WorldActionConditionedPipeline.from_config(config, TINY_ACTION, device="cpu")


class Encoder(BytesEncoder):
    def __init__(self, dtype: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.dtype = dtype


@pytest.mark.parametrize(
    ("encoder", "downcast", "dtype"),
    [(Encoder, True, "bfloat16"), (Encoder, "int8", "int8"), (BytesEncoder, True, None)],
)
def test_the_text_encoder_is_downcast_where_it_has_weights(encoder: type, downcast: Any, dtype: str | None) -> None:
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    config.action_transform, config.text_encoder = controller(4, 1.0).to_dict(), L(encoder)(num_tokens=8, width=64)
    config.net.update(model_channels=32, num_blocks=1)
    pipe = Video2WorldActionConditionedPipeline.from_config(config, device="cpu", downcast_text_encoder=downcast)
    assert getattr(pipe.world.text_encoder, "dtype", None) == dtype


# ---- what is left out ------------------------------------------------------------------------------------------------


def test_guidance_costs_nothing_where_there_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipeline()
    frames, actions, seeds = inputs(2)
    calls: list[int] = []
    run = Denoiser.__call__

    def counted(self: Denoiser, x: Tensor, *args: Any) -> Any:
        calls.append(x.shape[0])
        return run(self, x, *args)

    monkeypatch.setattr(Denoiser, "__call__", counted)
    without = imagined(pipe, frames, actions, seeds, options=THREE)
    assert calls == [2] * 4
    calls.clear()
    guided = imagined(pipe, frames, actions, seeds, options=SamplingOptions(num_steps=3, guidance=7.0))
    assert calls == [2] * 4 and torch.equal(guided, without)
    calls.clear()
    text = torch.randn(1, 4, 8)
    pipe.generate_actions(frames, actions, seeds, text_B_S_E=text, options=SamplingOptions(num_steps=3, guidance=7.0))
    assert calls == [4] * 4  # a text has something that guidance can lead away from


@pytest.mark.parametrize("projection", [None, 12])
def test_no_text_is_a_text_of_any_number_of_zeros(projection: int | None) -> None:
    pipe = make_pipeline(crossattn_proj_in_channels=projection)
    frames, actions, seeds = inputs(2)
    without = imagined(pipe, frames, actions, seeds)
    zeros = torch.zeros(2, 7, projection or 8)
    assert torch.allclose(without, imagined(pipe, frames, actions, seeds, text_B_S_E=zeros), atol=1e-5)


def test_both_texts_are_cut_and_padded_as_in_training() -> None:
    pipe = make_pipeline()
    frames, actions, seeds = inputs(2)
    texts = torch.randn(1, 4, 8), torch.randn(1, 9, 8)

    def sample(text: Tensor, negative: Tensor) -> Tensor:
        guided = SamplingOptions(num_steps=2, guidance=3.0)
        return imagined(pipe, frames, actions, seeds, text_B_S_E=text, negative_text_B_S_E=negative, options=guided)

    expected = sample(*(with_tokens(text, 6) for text in texts))
    pipe.config.num_text_tokens = 6
    assert torch.equal(sample(*texts), expected)


def test_cross_attention_is_left_out_without_text_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipeline()
    frames, actions, seeds = inputs(2)
    seen: list[str] = []
    for block in pipe.dit._blocks():
        block.cross_attn.register_forward_hook(lambda *_: seen.append("cross"))
    without = imagined(pipe, frames, actions, seeds)
    assert not seen
    prepare = pipe.dit.prepare
    monkeypatch.setattr(pipe.dit, "prepare", lambda *a, **k: prepare(*a, **{**k, "skip_no_text": False}))
    assert torch.equal(without, imagined(pipe, frames, actions, seeds))
    assert seen


def test_one_text_for_all_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make_pipeline()
    frames, actions, seeds = inputs()
    rows: list[tuple[int, ...]] = []
    prepare = pipe.dit.prepare

    def counted(text: Tensor, **options: Any) -> Any:
        rows.append(tuple(text.shape[:2]))
        return prepare(text, **options)

    monkeypatch.setattr(pipe.dit, "prepare", counted)
    text = torch.randn(1, 4, 8)
    shared = imagined(pipe, frames, actions, seeds, text_B_S_E=text)
    each = imagined(pipe, frames, actions, seeds, text_B_S_E=text.repeat(3, 1, 1))
    assert rows == [(1, 4), (3, 4)]
    assert torch.allclose(shared, each, atol=1e-5)
    pipe.config.num_text_tokens = 6  # of the training; no text stays one token
    pipe.generate_actions(frames, actions, seeds, text_B_S_E=text, options=TWO)
    pipe.generate_actions(frames, actions, seeds, options=TWO)
    assert rows[2:] == [(1, 6), (1, 1)]


# ---- rollouts --------------------------------------------------------------------------------------------------------


class Codes:
    """A tokenizer of pictures of one colour, 4 frames to a latent frame, that forgets nothing."""

    latent_ch = 16
    spatial_compression_factor = 8
    temporal_compression_factor = 4
    dtype = torch.float32

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, video: Tensor) -> Tensor:
        self.encoded.append(video.shape[2])
        colours = video[:, 0, :, ::8, ::8]  # B F H W
        first = torch.cat([colours[:, :1]] * 4, dim=1)
        groups = torch.cat([first, colours[:, 1:]], dim=1).unflatten(1, (-1, 4)).movedim(2, 1)  # B 4 T H W
        return torch.cat([groups, groups.new_zeros(len(groups), 12, *groups.shape[2:])], dim=1)

    def decode(self, latent: Tensor) -> Tensor:
        colours = latent[:, :4].movedim(1, 2).flatten(1, 2)[:, 3:]
        pixels = colours.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
        return pixels[:, None].expand(-1, 3, -1, -1, -1)

    def to(self, device: Any) -> "Codes":
        return self


class Adding(nn.Module):
    """A network whose video brightens by each action's first number, by as many levels of the 255."""

    takes_actions, num_views, image_channels, extra_channels, state_head = True, 1, None, 0, None
    model_channels = text_channels = 1
    action_inputs = 12 * DIM
    dtype = torch.float32

    def prepare(self, *_: Any, latent_shape: tuple[int, int, int], **__: Any) -> Prepared:
        empty = torch.zeros(0)
        return Prepared(latent_shape, (empty, empty), None, ())

    def __call__(  # type: ignore[override]
        self, x: Tensor, times: Tensor, text: Any, *, condition_mask_B_1_T_H_W: Tensor, action_B_A_D: Tensor, **_: Any
    ) -> Tensor:
        given = int(condition_mask_B_1_T_H_W[0, 0, :, 0, 0].sum())
        start = x[:, 3, given - 1]  # the last given frame
        brighter = action_B_A_D[:, 4 * (given - 1) :, 0].cumsum(dim=1) * 2 / 255
        frames = start[:, None] + brighter[:, :, None, None]
        groups = frames.unflatten(1, (-1, 4)).movedim(2, 1)
        target = torch.zeros_like(x)
        target[:, :4, given:] = groups
        t = times.reshape(len(x), -1)[:, -1].view(-1, 1, 1, 1, 1)
        return torch.where(t > 0, (x - target) / t, x)  # x is (1 - t) x0 + t epsilon: this is epsilon - x0


def adding() -> Video2WorldActionConditionedPipeline:
    return pipeline_of(Adding(), Codes(), 12)


def colours(video: Tensor) -> list[list[float]]:
    levels = video[:, 0, :, 0, 0]
    levels = levels.float() if video.dtype == torch.uint8 else (levels + 1) * 127.5
    return [[round(float(level), 2) for level in row] for row in levels]


def counting(length: int, starts: Sequence[int] = (10, 50)) -> tuple[Tensor, Tensor, list[list[float]]]:
    """Frames, actions that are all different, and the colours that they lead to."""
    frames = torch.tensor(starts, dtype=torch.uint8).view(-1, 1, 1, 1, 1).expand(-1, 3, 1, 16, 16)
    actions = torch.zeros(len(starts), length, DIM)
    actions[:, :, 0] = (torch.arange(length) % 5 + 1).float()
    actions[1:, :, 0] += 1
    sums = torch.cat([torch.zeros(len(starts), 1), actions[:, :, 0].cumsum(dim=1)], dim=1)
    return frames, actions, (sums + torch.tensor(starts)[:, None]).tolist()


@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("float_hand_over", [False, True])
@pytest.mark.parametrize("length", [7, 30, 36])
def test_a_rollout_has_every_frame_once_and_every_action_in_its_place(
    history: int, float_hand_over: bool, length: int
) -> None:
    pipe = adding()
    frames, actions, expected = counting(length)
    video = pipe.rollout(frames, actions, [0, 1], history=history, float_hand_over=float_hand_over, options=TWO)
    assert video.shape == (2, 3, 1 + length, 16, 16) and video.dtype == torch.uint8
    assert colours(video) == expected
    assert set(pipe.world.tokenizer.encoded) <= {1, 4 * history - 3}  # type: ignore[attr-defined]


def test_a_clip_that_is_given_continues() -> None:
    _, actions, expected = counting(30)
    clip = torch.tensor([row[:5] for row in expected]).to(torch.uint8).view(2, 1, 5, 1, 1).expand(-1, 3, -1, 16, 16)
    for history in (1, 2):
        assert colours(adding().rollout(clip, actions, [0, 1], TWO, history=history)) == expected


def test_a_chunk_that_is_not_full_may_be_left_out() -> None:
    frames, actions, expected = counting(30)
    video = adding().rollout(frames, actions, [0, 1], last_chunk="drop", options=TWO)
    assert colours(video) == [row[:25] for row in expected]


def test_half_levels_survive_only_a_hand_over_in_floats() -> None:
    frames, actions, _ = counting(24)
    actions[:, :, 0] = 1 / 8
    arguments = dict(options=TWO, as_float=True)
    exact = adding().rollout(frames, actions, [0, 1], float_hand_over=True, **arguments)  # type: ignore[arg-type]
    rounded = adding().rollout(frames, actions, [0, 1], **arguments)  # type: ignore[arg-type]
    assert colours(exact)[0][-1] == 13.0
    assert colours(rounded)[0][12] == 11.5 and colours(rounded)[0][-1] in (12.5, 13.5)


def recorded_chunks(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, list[int]]]:
    """Frames, actions and seeds of every chunk that is imagined from now on."""
    chunks: list[tuple[Tensor, Tensor, list[int]]] = []
    generate = pipe.imagination.generate_actions

    def recorded(frames: Tensor, actions: Tensor, seeds: list[int], *options: Any, **more: Any) -> Tensor:
        chunks.append((frames, actions, seeds))
        return generate(frames, actions, seeds, *options, **more)

    monkeypatch.setattr(pipe.imagination, "generate_actions", recorded)
    return chunks


def test_what_fills_the_last_chunk_are_raw_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = adding()
    pipe.config.action_transform = {**controller(DIM, 2.0).to_dict(), "offset": [5.0, 6.0, 7.0]}
    frames, actions, _ = counting(13)
    chunks = recorded_chunks(pipe, monkeypatch)
    pipe.rollout(frames, actions, [3, 8], options=SamplingOptions(num_steps=1))
    assert [seeds for _, _, seeds in chunks] == [[3, 8], [15, 20]]  # a chunk's noise is that of its first action
    assert torch.equal(chunks[1][1][:, :1], actions[:, 12:])
    assert chunks[1][1][:, 1:].unique(dim=1).squeeze(1).tolist() == [[5.0, 6.0, 7.0]] * 2


def test_the_first_picture_may_be_kept_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = adding()
    frames, actions, expected = counting(30)
    chunks = recorded_chunks(pipe, monkeypatch)
    video = pipe.rollout(frames, actions, [0, 1], history=2, reference=True, options=TWO)
    assert colours(video) == expected
    row = expected[0]
    assert [colours(given)[0] for given, *_ in chunks] == [
        row[:1],
        *([row[0], *row[end - 3 : end + 1]] for end in (12, 20, 28)),
    ]


@pytest.mark.parametrize(
    ("accumulate", "chunk", "history", "error"),
    [
        (None, 12, 2, ""),
        ("window", 12, 1, ""),
        ("window", 12, 2, "history=2"),
        (4, 12, 1, ""),
        (4, 12, 2, ""),
        (6, 12, 1, ""),
        (6, 12, 2, "every 6 frames.*chunk_size=12 with history=2"),
        (5, 12, 1, "every 5 frames.*chunk_size=12 with history=1"),
    ],
)
def test_chunks_begin_at_frames_that_actions_are_relative_to(
    accumulate: Any, chunk: int, history: int, error: str
) -> None:
    transform = relative_pose(accumulate=accumulate)
    with pytest.raises(ConfigError, match=error) if error else nullcontext():
        check_bases(transform, chunk, history)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((30, 12), [0, 12, 24]), ((24, 12), [0, 12]), ((5, 12), [0]), ((30, 12, 4), [0, 8, 16, 24]), ((12, 12, 4), [0])],
)
def test_chunks_begin_where_the_last_one_ended(arguments: tuple[int, ...], expected: list[int]) -> None:
    assert chunk_starts(*arguments) == expected


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(last_chunk="padd"), "last_chunk.*'padd'"),
        (dict(last_chunk="drop", length=7), "7 actions"),
        (dict(history=4), "history=4"),
        (dict(history=0), "history=0"),
        (dict(reference=True), "history=1"),
    ],
)
def test_a_rollout_that_cannot_be_meant_is_refused(options: dict[str, Any], named: str) -> None:
    frames, actions, _ = counting(options.pop("length", 30))
    with pytest.raises((ConfigError, DataError), match=named):
        adding().rollout(frames, actions, [0, 1], **options, options=TWO)


def test_actions_of_another_shape_are_refused() -> None:
    frames, actions, seeds = inputs()
    pipe, flat = make_pipeline(), make_pipeline("flat")
    for model, pictures, wrong, of_samples, named in (
        (pipe, frames, actions[:, :6], seeds, "6 actions"),
        (pipe, frames, actions[..., :2], seeds, "2 numbers.* 3"),
        (flat, frames, actions[:, :4], seeds, "3 numbers.* 24"),
        (pipe, frames, actions[:2], seeds, "one batch"),
        (pipe, frames, actions, seeds[:2], "2 seeds"),
        (pipe, frames, actions / 0, seeds, "not finite"),
        (pipe, frames.repeat(1, 1, 1, 4, 4), actions, seeds, "max_img_h=8"),
    ):
        with pytest.raises((ConfigError, DataError), match=named):
            imagined(model, pictures, wrong, of_samples)


def test_actions_are_transformed_as_the_config_says() -> None:
    pipe = make_pipeline()
    assert pipe.transformed([[1.0, 2.0, 3.0]]).tolist() == [[2.0, 4.0, 6.0]]
    pipe.config.action_transform = None
    with pytest.raises(ConfigError, match="action_transform is not set"):
        pipe.transformed([[1.0, 2.0, 3.0]])


# ---- few steps -------------------------------------------------------------------------------------------------------


def test_times_of_distilled_networks() -> None:
    assert torch.allclose(distilled_times(4), torch.tensor([1, 15 / 16, 5 / 6, 5 / 8, 0]).double())
    assert distilled_times(2).tolist() == distilled_times(4).tolist()[:2] + [0]
    assert len(distilled_times(8)) == 9


def test_a_distilled_network_is_given_its_first_noise_again() -> None:
    x0, noise = (torch.randn(2, 3, 2, 2, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    seen = []

    def velocity(x: Tensor, timesteps_B: Tensor) -> Tensor:
        t = (timesteps_B / 1000).view(-1, 1, 1, 1, 1)
        seen.append(float((x - (1 - t) * x0 - t * noise).abs().max()))  # how far from the line to the first noise
        return (x - x0) / t

    flow = Flow(Video2WorldPipelineConfig(flow=FlowConfig()))
    path = flow.sampling_path(lambda _: velocity, Condition(torch.zeros(2, 1, 1)), noise, "distilled", 4)
    found = path.finish(sample(path.denoise, noise, path.sigmas, path.stepper))
    assert torch.allclose(found, x0, atol=1e-5)
    assert len(seen) == 4 and max(seen) < 1e-5


def test_a_pipeline_of_flow_times_takes_every_solver() -> None:
    pipe = make_pipeline()
    pipe.config.flow = FlowConfig()
    pipe.world.objective = objective_of(pipe.config)
    pipe.world.denoiser = pipe.world.objective.denoiser(pipe.world.net)
    frames, actions, seeds = inputs(2)
    expected = pipe.world.decode(pipe.world.given_latents(frames, 3))[:, :, :1]
    for solver in (None, "distilled", "2ab"):
        options = SamplingOptions(num_steps=3, solver=solver)
        video = imagined(pipe, frames, actions, seeds, options=options)
        assert torch.allclose(video[:, :, :1], expected, atol=1e-4), solver
        alone = imagined(pipe, frames[1:], actions[1:], seeds[1:2], options=options)
        assert torch.allclose(video[1:], alone, atol=1e-4), solver
