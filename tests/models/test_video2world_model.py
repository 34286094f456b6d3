# SPDX-License-Identifier: Apache-2.0
"""The training step: what it draws, what it trains, and what it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from cosmos_predict2.checkpoints.card import KEY
from cosmos_predict2.conditioner import TEXT_KEY
from cosmos_predict2.models.config import (
    Predict2ModelManagerConfig,
    Predict2p5Video2WorldModelConfig,
    Predict2Video2WorldModelConfig,
)
from cosmos_predict2.models.text import (
    TrainingText,
    TrainingTextConfig,
    check_text,
    encoder_text_width,
    text_of_config,
)
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.layers import Start
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.reason1 import Reason1Encoder, Strategy, combine
from cosmos_predict2.text.tiny_reason1 import TINY, write_tiny_reason1
from cosmos_predict2.text.trained_text import ENCODERS, TrainedText
from cosmos_predict2.world_model.assembly import follow_text
from cosmos_predict2.world_model.config import EMAConfig, FlowConfig
from imaginaire.checkpoint import weights
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.config.lazy_config import instantiate
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import CheckpointError, ConfigError, DataError
from tests.findings import checked_model
from tests.models.parts import make_batch, make_model, part
from tests.text.folders import Letters, reason1_folder


def test_gradient_reaches_every_parameter() -> None:
    model = make_model()
    _, loss = model.training_step(make_batch(positions=[0, 1]), 0)
    loss.backward()
    # The condition does not reach the keys of a text that the dropout took away from the whole batch; two samples do.
    assert [n for n, p in model.net.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_network_without_texts_refuses_a_batch_that_has_them() -> None:
    model = make_model(net=dict(reads_text=False))
    batch = make_batch(positions=[0, 1])  # at one of the two places the dropout leaves the text
    with pytest.raises(DataError, match=r"texts of zeros.*reads_text=true"):
        model.training_step(batch, 0)
    model.training_step({**batch, "t5_text_embeddings": torch.zeros(2, 4, 8)}, 0)


def test_draws_follow_from_the_sample_not_from_its_batch() -> None:
    model = make_model()
    batch = make_batch(size=2, positions=[7, 40])
    together, _ = model.training_step(batch, 0)
    alone = [model.training_step(part(batch, i), 0)[0] for i in range(2)]
    for key in ("sigma", "xt"):
        assert torch.equal(together[key], torch.cat([output[key] for output in alone])), key
    assert not torch.equal(together["sigma"][0], together["sigma"][1])


def test_a_float64_network_stays_float64() -> None:
    model = make_model(precision="float64")
    model.on_train_start()
    output, loss = model.training_step(make_batch(positions=[0, 1]), 0)
    assert {loss.dtype, output["x0"].dtype, output["xt"].dtype, output["x0_pred"].dtype} == {torch.float64}
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.net.parameters())


def test_given_frames_have_no_error() -> None:
    model = make_model()
    output, _ = model.training_step({**make_batch(positions=[0, 1]), "num_conditional_frames": 2}, 0)
    assert (output["edm_loss_per_frame"][:, :2] == 0).all()
    assert (output["edm_loss_per_frame"][:, 2:] > 0).all()


def test_noise_of_videos_grows_with_their_length_unless_a_factor_says_otherwise() -> None:
    batch = make_batch(size=64, frames=1, positions=list(range(64)))
    x0 = torch.zeros(64, 16, 1, 4, 4)
    levels = {}
    for name, options in {"sqrt": {"state_t": 3}, "factor": {"video_noise_factor": 25.0}}.items():
        model = make_model(**options)
        levels[name] = model.draw_noise(x0, False, model._generators(batch, "train"))[1]
    assert torch.allclose(levels["sqrt"] / 3**0.5, levels["factor"] / 25.0, rtol=1e-5)
    model = make_model()
    image = model.draw_noise(x0, True, model._generators(batch, "train"))[1]
    assert torch.allclose(image * 3**0.5, levels["sqrt"], rtol=1e-5)
    for switch in (model.config, model.pipe_config):
        switch.adjust_video_noise = False  # either switches it off
        assert torch.equal(model.draw_noise(x0, False, model._generators(batch, "train"))[1], image)
        switch.adjust_video_noise = True


def test_a_longer_clip_is_cut_everywhere() -> None:
    model = make_model()
    starts = set()
    for position in range(24):
        batch = make_batch(size=1, frames=12, positions=[position])
        batch["video"] = torch.arange(12, dtype=torch.uint8).reshape(1, 1, 12, 1, 1).expand(1, 3, 12, 8, 8)
        pixels = model._pixels(model._cut(batch, model._generators(batch, "train")))
        frames = ((pixels[0, 0, :, 0, 0] + 1) * 127.5).round().int().tolist()
        assert frames == list(range(frames[0], frames[0] + 9))
        starts.add(frames[0])
    assert starts == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(video=torch.zeros(2, 3, 5, 32, 32, dtype=torch.uint8)), "num_frames=9"),
        (dict(video=torch.full((2, 3, 9, 32, 32), 200.0)), r"\[-1, 1\]"),
        (dict(images=torch.zeros(2, 3, 32, 32)), "both"),
        (dict(fps=None), "'fps'"),
        (dict(video=torch.zeros(2, 3, 9, 32, 28, dtype=torch.uint8)), "video_size"),
        (dict(t5_text_embeddings=torch.zeros(2, 4, 16)), "have width 16, but the network takes 8"),
        (dict(t5_text_embeddings=None), r"model\.config\.text\.encoder"),
    ],
)
def test_batches_that_cannot_be_trained_on(change: dict[str, Any], text: str) -> None:
    batch = {key: value for key, value in {**make_batch(), **change}.items() if value is not None}
    with pytest.raises(DataError, match=text):
        make_model().training_step(batch, 0)


def test_images_train_without_given_frames() -> None:
    model = make_model()
    batch = make_batch(positions=[0, 1])
    batch["images"] = batch.pop("video")[:, :, 0] / 127.5 - 1
    output, loss = model.training_step(batch, 0)
    assert torch.isfinite(loss)
    assert output["condition"].is_image
    assert output["condition"].condition_mask_B_1_T_H_W is None
    assert int(model.net.accum_image_sample_counter) == 2


def test_samples_are_counted_in_training_only() -> None:
    model = make_model()
    model.training_step(make_batch(positions=[0, 1]), 0)
    model.eval()
    model.validation_step(make_batch(positions=[0, 1]), 0)
    assert int(model.net.accum_video_sample_counter) == 2
    assert int(model.net.accum_iteration) == 1


def test_a_training_step_drops_the_texts_that_are_drawn_and_validation_none() -> None:
    model, count = make_model(), 60
    batch = make_batch(count, positions=list(range(count)))
    keep = model.world.conditioner.draw_keep(model._generators(batch, "train").each("condition"))["text"].bool()
    assert 4 <= int((~keep).sum()) <= 20  # one in five
    output, _ = model.training_step(batch, 0)
    text = output["condition"].crossattn_emb_B_S_E
    assert torch.equal(text.any(dim=2).any(dim=1), keep) and torch.equal(text[keep], batch["t5_text_embeddings"][keep])
    _, condition = model.data_and_condition(batch, model._generators(batch, "validation"), is_fixed=True)
    assert torch.equal(condition.crossattn_emb_B_S_E, batch["t5_text_embeddings"])


def test_lora_trains_adapters_alone_and_keeps_them_in_float32() -> None:
    model = make_model(train_architecture="lora", lora_rank=2, lora_alpha=4, precision="bfloat16")
    before = {name: value.clone() for name, value in model.net.state_dict().items() if "lora_A" in name}
    model.on_train_start()
    trained = {name: p for name, p in model.net.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 20  # two blocks of ten linears, two factors each
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for name, p in model.net.named_parameters() if name not in trained} == {torch.bfloat16}
    assert all(torch.equal(model.net.state_dict()[name], value) for name, value in before.items())
    _, loss = model.training_step(make_batch(positions=[0, 1]), 0)
    loss.backward()
    assert all(p.grad is not None for p in trained.values())


def test_adapters_of_another_alpha_are_no_load_path(tmp_path: Path) -> None:
    adapted = make_model(train_architecture="lora", lora_rank=2, lora_alpha=4)
    state = {**adapted.checkpoint_state(), "lora_alpha": torch.tensor(8.0)}
    torch.save({name: value for name, value in state.items() if name != KEY}, tmp_path / "eight.pt")
    with pytest.raises(CheckpointError, match=r"alpha 8, the network's have 4.*lora_alpha=8"):
        adapted.on_load_path(str(tmp_path / "eight.pt"))
    make_model(train_architecture="lora", lora_rank=2, lora_alpha=8).on_load_path(str(tmp_path / "eight.pt"))


@pytest.mark.parametrize("options", [dict(lora_rank=0), dict(lora_alpha=0), dict(lora_target_modules=" , ")])
def test_lora_settings_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="lora_rank"):
        Predict2Video2WorldModelConfig(train_architecture="lora", **options)


def test_checkpoints_hold_the_network_its_average_and_their_card() -> None:
    model = make_model(ema=EMAConfig(enabled=True))
    model.on_train_start()
    model.parallelize(ParallelDims())
    names = set(model.checkpoint_state()) - {KEY}
    own = set(model.net.state_dict())
    assert names == {f"net.{name}" for name in own} | {f"net_ema.{name}" for name in own}


def test_the_check_names_missing_weights_and_impossible_frames() -> None:
    path = "checkpoints/nvidia/Cosmos-Predict2-2B-Video2World/model-480p-10fps.pt"
    config = make_model(max_num_conditional_frames=3).config
    config.model_manager_config = Predict2ModelManagerConfig(dit_path=path)
    missing, frames = map(str, checked_model(Video2WorldModel, config))
    assert "download_checkpoints" in missing and "--model_sizes 2B" in missing
    assert "state_t=3" in frames


def test_weights_that_a_file_gives_are_not_drawn_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = make_model().net.state_dict()
    path = tmp_path / "model.pt"
    torch.save({f"net.{name}": value for name, value in given.items()}, path)
    monkeypatch.setattr(Start, "draw_", None)
    net = make_model(model_manager_config=Predict2ModelManagerConfig(dit_path=str(path))).net
    found = net.state_dict()
    assert all(torch.equal(found[name], value) for name, value in given.items())
    assert next(net.parameters()).requires_grad


@pytest.mark.parametrize("change", ["none", "image", "flow with a given frame"])
def test_the_first_loss_of_trained_weights_is_below_that_of_no_prediction(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_flow = change.startswith("flow")
    model = make_model(**dict(family=Predict2p5Video2WorldModelConfig, flow=FlowConfig()) if is_flow else {})
    batch = make_batch(positions=[0, 1]) | ({"num_conditional_frames": 1} if is_flow else {})
    if change == "image":
        batch["images"] = batch.pop("video")[:, :, 0] / 127.5 - 1
    assert model.expected_first_loss({}) is None  # random weights
    model.config.model_manager_config.dit_path = "somewhere.pt"
    assert model.expected_first_loss({}) is None  # a small network
    monkeypatch.setattr("cosmos_predict2.models.video2world_model.SMALLEST_RELEASED", 1)
    torch.nn.init.zeros_(model.net.final_layer.linear.weight)  # an empty network, which predicts nothing
    output, loss = model.training_step(batch, 0)
    low, high = model.expected_first_loss(output) or (0.0, 0.0)
    assert low == 0.0
    assert high == pytest.approx(0.95 * loss.item(), rel=1e-5), "nothing is taken off what no prediction gets"


@pytest.mark.parametrize("zero_b", [True, False])
def test_adapters_that_begin_at_random_have_no_expected_first_loss(
    zero_b: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_predict2.models.video2world_model.SMALLEST_RELEASED", 1)
    model = make_model(train_architecture="lora", lora_rank=2, lora_alpha=4, init_lora_weights=zero_b)
    model.config.model_manager_config.dit_path = "somewhere.pt"
    output, _ = model.training_step(make_batch(positions=[0, 1]), 0)
    assert (model.expected_first_loss(output) is not None) == zero_b
    model._has_trained_adapters = True  # those of the file are no noise
    assert model.expected_first_loss(output) is not None


LEVELS = [0.5, 4.0, 80.0]


def test_each_level_has_the_loss_of_that_level() -> None:
    model = make_model(validation_sigmas=LEVELS)
    batch = make_batch(positions=[0, 1])
    output, loss = model.validation_step(batch, 0)
    generators = model._generators(batch, "validation")
    x0, condition = model.data_and_condition(batch, generators, is_fixed=True)
    epsilon, _ = model.draw_noise(x0, False, generators)
    singly = [model.loss(x0, epsilon, torch.full((2, 1), sigma), condition)[1] for sigma in LEVELS]
    found = [output[name] for name in ("loss_sigma_0.5", "loss_sigma_4", "loss_sigma_80")]
    assert torch.equal(torch.stack(found), torch.stack(singly))
    assert torch.equal(loss, torch.stack(singly).mean())
    assert len({value.item() for value in found}) == 3


def test_every_validation_and_every_batch_draws_the_same_for_a_sample() -> None:
    model = make_model(validation_sigmas=LEVELS)
    batch = make_batch(positions=[7, 40])
    first, again = (model.validation_step(batch, iteration)[1] for iteration in (0, 5))
    alone = [model.validation_step(part(batch, i), 0)[1] for i in range(2)]
    assert torch.equal(first, again)
    torch.testing.assert_close(first, torch.stack(alone).mean())
    assert not torch.equal(first, model.validation_step({**batch, "sample_position": torch.tensor([8, 40])}, 0)[1])


def test_as_few_frames_are_given_as_the_config_allows_or_as_the_batch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(validation_sigmas=LEVELS, max_num_conditional_frames=2)
    given: list[int] = []
    loss = model.loss

    def watched(x0: Any, epsilon: Any, sigma: Any, condition: Any) -> Any:
        given.append(int(condition.condition_mask_B_1_T_H_W[:, 0, :, 0, 0].sum()))
        return loss(x0, epsilon, sigma, condition)

    monkeypatch.setattr(model, "loss", watched)
    for position in range(8):
        model.validation_step(make_batch(size=1, positions=[position]), 0)
    assert set(given) == {1}
    model.validation_step({**make_batch(size=1, positions=[0]), "num_conditional_frames": 2}, 0)
    assert given[-1] == 2
    given.clear()
    for position in range(8):
        model.training_step(make_batch(size=1, positions=[position]), 0)
    assert set(given) == {1, 2}, "training draws every number, the largest too"


def test_without_levels_they_are_drawn_as_in_training() -> None:
    model = make_model(validation_sigmas=[])
    batch = make_batch(positions=[0, 1])
    output, loss = model.validation_step(batch, 0)
    assert output["sigma"].shape == (2, 1)
    assert output["sigma"][0] != output["sigma"][1]
    assert torch.equal(loss, model.validation_step(batch, 3)[1])


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("levels", [LEVELS, []], ids=["fixed", "drawn"])
def test_samples_of_weight_zero_do_not_count(reduce: str, levels: list[float]) -> None:
    model = make_model(validation_sigmas=levels, loss_reduce=reduce)
    batch = make_batch(positions=[3, 0])
    weighted, loss = model.validation_step({**batch, "sample_weight": torch.tensor([1.0, 0.0])}, 0)
    single, expected = model.validation_step(part(batch, 0), 0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(weighted["edm_loss"], single["edm_loss"])
    nothing, none = model.validation_step({**batch, "sample_weight": torch.zeros(2)}, 0)
    assert none == 0 and torch.isfinite(nothing["edm_loss"])


@pytest.mark.parametrize(
    ("levels", "text"), [([0.0, 1.0], "above 0"), ([1.0, float("inf")], "above 0"), ([2.0, 2.0], "a level twice")]
)
def test_levels_that_are_none_are_refused(levels: list[float], text: str) -> None:
    with pytest.raises(ConfigError, match=f"validation_sigmas.*{text}"):
        make_model(validation_sigmas=levels)


CPU = torch.device("cpu")


def added(config: TrainingTextConfig, batch: dict[str, Any], size: int = 2) -> Any:
    return TrainingText(config).added_to(batch, size, CPU)[TEXT_KEY]


def test_one_embedding_is_that_of_every_sample_whatever_the_data_carry(tmp_path: Path) -> None:
    embedding = torch.randn(1, 5, 6).bfloat16()
    torch.save(embedding, tmp_path / "empty.pt")
    text = added(TrainingTextConfig(constant_path=str(tmp_path / "empty.pt")), {TEXT_KEY: torch.zeros(3, 1, 1)}, 3)
    assert torch.equal(text, embedding.expand(3, 5, 6)) and text.dtype == torch.bfloat16 and text.stride(0) == 0


def test_an_encoder_replaces_what_the_data_carry() -> None:
    training = TrainingText(TrainingTextConfig(encoder=L(BytesEncoder)(num_tokens=8, width=4)))
    text = training.added_to({TEXT_KEY: torch.zeros(2, 1, 1), "ai_caption": ["push", ""]}, 2, CPU)[TEXT_KEY]
    assert torch.equal(text, BytesEncoder(8, 4).encode(["push", ""]))
    assert training.encoder_name == BytesEncoder(8, 4).name  # for the card


def test_the_real_encoder_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason1_folder(tmp_path)
    passes: list[int] = []
    from cosmos_predict2.text import reason1

    embed = reason1.embed
    monkeypatch.setattr(reason1, "embed", lambda *arguments: passes.append(1) or embed(*arguments))
    text = TrainingText(TrainingTextConfig(encoder=L(Reason1Encoder)(path=str(tmp_path), max_length=160)))
    batch = {"ai_caption": ["push the box"] * 3}
    first = text.added_to(batch, 3, CPU)[TEXT_KEY]
    assert first.shape == (3, 160, 96) and torch.equal(first, text.added_to(batch, 3, CPU)[TEXT_KEY])
    assert len(passes) == 1


def test_the_tiny_twin_is_the_folder_that_it_writes_in_the_public_layout(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    write_tiny_reason1(tmp_path)
    names = set(weights.read(str(tmp_path)))
    assert {"model.layers.1.mlp.up_proj.weight", "visual.patch_embed.proj.weight", "lm_head.weight"} <= names
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    twin, read = (Reason1Encoder(path, max_length=160) for path in (TINY, str(tmp_path)))
    assert twin.name == read.name and twin.width == Reason1Encoder.declared_width(TINY) == 64
    ids = torch.tensor([twin.token_ids("push the red puck")])
    with torch.no_grad():
        states = whole(input_ids=ids, output_hidden_states=True).hidden_states[1:]
    torch.testing.assert_close(twin.encode("push the red puck"), combine(states, "full_concat"), rtol=1e-4, atol=1e-4)
    text = TrainingText(TrainingTextConfig(encoder=L(Reason1Encoder)(path=TINY, max_length=160)))
    batch = {"ai_caption": ["push the red puck", "push the blue puck"]}
    first, second = text.added_to(batch, 2, CPU)[TEXT_KEY]
    assert torch.equal(first, twin.encode("push the red puck")[0]) and not torch.equal(first, second)


def test_a_run_of_the_tiny_twin_is_followed_at_inference() -> None:
    node = L(Reason1Encoder)(path=TINY, max_length=160)
    made = text_of_config(TrainingTextConfig(encoder=node))
    assert made is not None and (made.encoder, made.num_tokens, made.width) == ("reason1", 160, 64)
    config = SimpleNamespace(text_encoder=L(BytesEncoder)(num_tokens=64, width=64))
    recorded = {**node, "_target_": "cosmos_predict2.text.reason1.Reason1Encoder"}  # as a config.yaml has it
    follow_text(config, made, "a run", recorded)
    assert (config.text_encoder["path"], config.text_encoder["max_length"]) == (TINY, 160)


def test_an_encoder_of_ones_own_is_followed_at_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, "letters", Letters)
    config = SimpleNamespace(text_encoder=L(BytesEncoder)(num_tokens=64, width=64))
    follow_text(config, TrainedText("letters-v1-5x8", encoder_tokens=5, num_tokens=2, width=8), "a run")
    assert instantiate(config.text_encoder).name == "letters-v1-5x8"


@pytest.mark.parametrize("captions", [None, "push", ["push"]])
def test_captions_that_are_not_one_a_sample_are_an_error_of_the_data(captions: Any) -> None:
    config = TrainingTextConfig(encoder=L(BytesEncoder)(num_tokens=8, width=4))
    with pytest.raises(DataError, match=r"a list of 2 texts"):
        added(config, {"ai_caption": captions})


def test_two_sources_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="choose one"):
        TrainingTextConfig(encoder=L(BytesEncoder)(), constant_path="x.pt")


def test_a_file_that_is_not_there_shows_before_anything_is_built() -> None:
    assert list(check_text({"constant_path": ""}, {})) == []
    (problem,) = check_text({"constant_path": "no/such.pt"}, {})
    assert str(problem).startswith("model.config.text.constant_path: no/such.pt does not exist")


def test_an_encoder_tells_its_width_before_it_is_built(tmp_path: Path) -> None:
    assert encoder_text_width(L(BytesEncoder)()) == BytesEncoder().width
    assert encoder_text_width(L(BytesEncoder)(width=4)) == 4
    reason1_folder(tmp_path)
    assert encoder_text_width(L(Reason1Encoder)(path=str(tmp_path / "none"))) is None
    for strategy in get_args(Strategy):
        node = L(Reason1Encoder)(path=str(tmp_path), strategy=strategy, n_layers_per_group=2)
        assert encoder_text_width(node) == Reason1Encoder(str(tmp_path), strategy=strategy, n_layers_per_group=2).width
