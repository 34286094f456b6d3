# SPDX-License-Identifier: Apache-2.0
"""Training with actions: what of a batch is required, what it starts from, and the transform that it keeps."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionContract, ActionTransform, controller, relative_pose
from cosmos_predict2.checkpoints.card import TRANSFORM_KEY as KEY
from cosmos_predict2.data.dataset_latents import LATENTS_KEY
from cosmos_predict2.data.mock import MockImages, MockVideos
from cosmos_predict2.models.config import Predict2ModelManagerConfig, Predict2Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.world_model.assembly import settle_attention
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from imaginaire import distributed
from imaginaire.data.facts import DataFacts
from imaginaire.errors import CheckpointError, ConfigError, DataError
from imaginaire.findings import Finding
from tests.checkpoints.nets import transform_tensor
from tests.findings import checked_model
from tests.models import parts
from tests.models.parts import LIMITS, NET, awaken, make_batch

OWN = controller(3, 1.0)
NETS = {
    "chunk": dict(network=ChunkActionDiT, net=dict(action_dim=3)),
    "flat": dict(network=FlatActionDiT, net=dict(action_dim=3, num_action_per_chunk=8)),
}


def make_config(kind: str = "chunk", dit_path: str = "", **options: Any) -> Predict2Video2WorldModelConfig:
    given = dict(min_num_conditional_frames=1, max_num_conditional_frames=1)
    start = Predict2ModelManagerConfig(dit_path=dit_path)
    options = {**NETS[kind], **given, "model_manager_config": start, **options}
    return parts.make_config(pipeline=Video2WorldActionPipelineConfig, **options)


def make_model(kind: str = "chunk", dit_path: str = "", **options: Any) -> Video2WorldModel:
    torch.manual_seed(0)
    model = Video2WorldModel(make_config(kind, dit_path, **options))
    if not dit_path:
        awaken(model.net, ".fc2.")
    return model


def action_batch(
    size: int = 2, frames: int = 9, transform: ActionTransform | None = OWN, **more: Any
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    batch = make_batch(size, frames, list(range(size)))
    batch["action"] = torch.randn(size, frames - 1, 3, generator=generator)
    if transform is not None:
        batch["action_transform"] = [transform.to_json()] * size
    return {**batch, **more}


def loss_of(model: Video2WorldModel, batch: dict[str, Any]) -> Tensor:
    return model.training_step(batch, 0)[1]


@pytest.mark.parametrize("network", NETS)
def test_gradient_reaches_every_parameter_and_actions_matter(network: str) -> None:
    model = make_model(network)
    batch = action_batch()
    loss = loss_of(model, batch)
    loss.backward()
    assert [n for n, p in model.net.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert not torch.equal(loss, loss_of(model, {**batch, "action": batch["action"].flip(0)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": None}, "has no 'action'"),
        ({"action": torch.zeros(2, 9, 3)}, r"9 frames, but its 'action' is \[2, 9, 3\]: \[2, 8, numbers\]"),
        ({"action": torch.zeros(2, 24)}, r"is \[2, 24\]"),
        ({"action": torch.zeros(2, 8, 7)}, "have 7 numbers, but the network reads 3 in each of its 8"),
    ],
)
@pytest.mark.parametrize("network", NETS)
def test_actions_of_another_shape_are_refused(network: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        loss_of(make_model(network), action_batch(**changes))


def test_a_longer_clip_is_cut_with_its_actions() -> None:
    """Frame k shows k, and row k of the action is k: wherever it is cut, they begin alike."""
    model = make_model()
    batch = action_batch(size=8, frames=30)
    batch["video"] = torch.arange(30, dtype=torch.uint8)[None, None, :, None, None].expand(8, 3, 30, 32, 32)
    batch["action"] = torch.arange(29.0)[None, :, None].expand(8, 29, 3)
    cut = model._cut(batch, model._generators(batch, "train"))
    starts = cut["video"][:, 0, 0, 0, 0]
    assert cut["video"].shape[2] == 9 and cut["action"].shape[1] == 8
    assert torch.equal(cut["action"][:, :, 0], starts[:, None] + torch.arange(8.0)) and len(set(starts.tolist())) > 3
    _, condition = model.data_and_condition(batch, model._generators(batch, "train"))
    assert condition.action_B_A_D is not None and torch.equal(condition.action_B_A_D, cut["action"])
    pixels, _, of_clip = model.clean_clips(batch)
    assert pixels is not None and of_clip.action_B_A_D is not None
    shown = ((pixels[:, 0, 0, 0, 0] + 1) * 127.5).round()
    assert torch.equal(of_clip.action_B_A_D[:, 0, 0], shown)
    with pytest.raises(DataError, match="30 frames, but the model takes 9"):
        loss_of(make_model(resize_online=False), batch)
    model.actions.transform = relative_pose(accumulate="window")
    relative = {**batch, "action_transform": None}
    for path in (lambda: model.training_step(relative, 0), lambda: model.clean_clips(relative)):
        with pytest.raises(DataError, match=r"cannot be cut.*accumulate window.*num_frames=9"):
            path()


def test_pictures_are_refused_before_and_in_training() -> None:
    data = dict(_target_=MockImages, num_tokens=4, width=8)
    (problem,) = checked_model(Video2WorldModel, make_config(), [data])
    assert problem.level == "error" and "they are pictures" in problem.text
    clips = dict(_target_=MockVideos, num_tokens=4, width=8, num_frames=9, action_shape=[8, 3])
    assert checked_model(Video2WorldModel, make_config(), [clips]) == []
    batch = action_batch()
    batch["images"] = batch.pop("video")[:, :, 0].float() / 255
    with pytest.raises(DataError, match="'images': they are pictures"):
        loss_of(make_model(), batch)


def test_cached_latents_keep_the_actions_of_their_frames() -> None:
    model = make_model()
    batch = action_batch(frames=17)
    batch[LATENTS_KEY] = torch.randn(2, 16, 5, 4, 4)
    del batch["video"]
    cut = model._cut(batch, model._generators(batch, "train"))
    assert cut[LATENTS_KEY].shape[2] == 3 and torch.equal(cut["action"], batch["action"][:, :8])


# --- the transform ---


def test_the_datas_transform_is_taken_over_and_saved(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    assert KEY not in model.checkpoint_state()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            loss_of(model, action_batch())
    assert caplog.text.count("as the training data has them") == 1
    assert torch.equal(model.checkpoint_state()[KEY], transform_tensor(OWN))


def test_data_under_another_transform_are_refused() -> None:
    model = make_model(action_transform=controller(3, 20.0).to_dict())
    with pytest.raises(DataError, match=r"scale 1, but model.config.pipe_config.action_transform has .* scale 20"):
        loss_of(model, action_batch())
    mixed = action_batch()
    mixed["action_transform"] = [OWN.to_json(), controller(3, 2.0).to_json()]
    with pytest.raises(DataError, match=r"the training data has .* for validation too"):
        loss_of(make_model(), mixed)


PROPOSED = attrs.evolve(controller(3, 0.25), proposed=True)


def proposed_batches(model: Video2WorldModel, *proposed: ActionTransform) -> list[Any]:
    """`action_batch` by data sets that propose these transforms, in a mixture that the model was shown."""
    sets = [SimpleNamespace(action_transform=one) for one in proposed]
    model.on_data(SimpleNamespace(dataset=SimpleNamespace(members=SimpleNamespace(datasets=sets))))
    batches = [action_batch(transform=one.action_transform) for one in sets]
    return [
        {**batch, "action": torch.from_numpy(one.action_transform.apply(OWN.undo(batch["action"]))).float()}
        for one, batch in zip(sets, batches)
    ]


def test_what_data_propose_is_taken_over_by_a_new_run_only() -> None:
    new = make_model()
    grown = attrs.evolve(controller(3, 2.0), proposed=True)  # by other statistics
    loss, of_another_set = (loss_of(new, batch) for batch in proposed_batches(new, PROPOSED, grown))
    assert new.actions.transform == PROPOSED and not new.actions.transform.proposed and of_another_set == loss
    assert b"proposed" not in bytes(new.checkpoint_state()[KEY].tolist())
    resumed = make_model()
    resumed.load_checkpoint_state(new.checkpoint_state())
    for batch in proposed_batches(resumed, grown, PROPOSED):
        assert torch.equal(loss_of(resumed, batch), loss), "the same bits, whatever is proposed later"
    told = SimpleNamespace(action_transform=controller(3, 2.0))
    with pytest.raises(DataError, match="the checkpoint has"):  # though another data set proposes the same
        resumed.on_data(SimpleNamespace(dataset=[SimpleNamespace(action_transform=grown), told]))
    with pytest.raises(DataError, match="the checkpoint has"):
        proposed_batches(resumed, attrs.evolve(controller(4), proposed=True))
    told = make_model(action_transform=OWN.to_dict())
    loss_of(told, *proposed_batches(told, PROPOSED))
    assert told.actions.transform == OWN
    beside = make_model()  # a data set that was told one
    assert [loss_of(beside, batch) for batch in proposed_batches(beside, PROPOSED, OWN)] == [
        loss_of(told, action_batch())
    ] * 2


def test_processes_with_other_actions_are_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all: list[Any] = [controller(3, 2.0)]
    monkeypatch.setattr(distributed, "all_gather_object", lambda own: [own, *of_all])
    model = make_model()
    loss_of(model, action_batch())  # of data sets that `on_data` did not find
    with pytest.raises(DataError, match=r"scale 2, the first one controller of 3 numbers, scale 1.*\(model.config"):
        model.on_after_backward()
    of_all[0] = attrs.evolve(OWN, stats={"mean": [0.0] * 3})  # a note alone
    model = make_model()
    loss_of(model, action_batch())
    model.on_after_backward()
    monkeypatch.setattr(distributed, "all_gather_object", None)
    model.on_after_backward()  # compared once


def test_a_run_that_starts_from_weights_with_actions_keeps_their_transform(tmp_path: Path) -> None:
    path = _saved(make_model().net, tmp_path / "action.pt", **{KEY: transform_tensor(OWN)})
    model = make_model(dit_path=path)
    assert torch.equal(loss_of(model, *proposed_batches(model, PROPOSED)), loss_of(make_model(), action_batch()))
    assert model.actions.transform == OWN


def test_names_and_rate_are_those_of_the_data_though_the_weights_had_others(tmp_path: Path) -> None:
    begun = attrs.evolve(OWN, stats={"mean": [0.0] * 3, "names": ["a", "b", "c"], "rate": 15.0})
    path = _saved(make_model().net, tmp_path / "action.pt", **{KEY: transform_tensor(begun)})
    for stats, known in (({"rate": 30.0}, {"rate": 30.0}), (None, {})):
        model = make_model(dit_path=path)
        proposed_batches(model, attrs.evolve(PROPOSED, stats=stats))
        assert model.actions.transform == OWN and model.actions.transform.stats == {"mean": [0.0] * 3, **known}


def test_another_order_of_actions_is_refused_by_a_run_and_warned_of_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run goes on with the numbers that it began with; start weights and a mixture may be of other robots."""
    ours, other, faster = (
        PROPOSED.with_contract(ActionContract(names, rate, ("p", "q")))
        for names, rate in ((("x", "y", "z"), 10.0), (("y", "x", "z"), 10.0), (("x", "y", "z"), 30.0))
    )
    swapped = PROPOSED.with_contract(ActionContract(state_names=("q", "p")))
    turned = PROPOSED.with_contract(ActionContract(units=("", "degrees", "")))
    ours = ours.with_contract(replace(ours.contract, units=("m", "radians", "m")))
    new = make_model()
    proposed_batches(new, ours)
    orders = (other, r"\(x, y, z\), but the data have \(y, x, z\)"), (swapped, r"state \(p, q\).*\(q, p\).*state,")
    units = (turned, "takes y in radians, but the data have degrees.*dataset.*units")
    for wrong, words in (*orders, units, (faster, "10 actions.* 30")):
        resumed = make_model()
        resumed.load_checkpoint_state(new.checkpoint_state())
        with pytest.raises(ConfigError, match=words):
            proposed_batches(resumed, wrong)
    resumed = make_model()
    resumed.load_checkpoint_state(new.checkpoint_state())
    proposed_batches(resumed, ours, PROPOSED)
    assert not any("takes" in record.message for record in caplog.records)
    proposed_batches(make_model(), ours, other)
    path = _saved(make_model().net, tmp_path / "action.pt", **{KEY: transform_tensor(ours)})
    proposed_batches(make_model(dit_path=path), other)
    for who in ("The run", path):
        assert f"{who} takes the actions (x, y, z), but" in caplog.text


@pytest.mark.parametrize(("factor", "words"), [(1.0, None), (0.0, None), (100.0, "drown"), (0.015, "hardly sees")])
def test_actions_far_from_the_order_of_one_are_a_warning_at_the_first_step(
    factor: float, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = make_model(), action_batch()
    batch["action"] *= factor / batch["action"].abs().max()
    for _ in range(2):
        loss_of(model, batch)
    warnings = [record.message for record in caplog.records if "largest action of the batch" in record.message]
    assert len(warnings) == (words is not None)
    assert all(str(words) in warning for warning in warnings)


def test_data_that_do_not_say_it_need_a_config_that_does() -> None:
    with pytest.raises(DataError, match=r"pipe_config\.action_transform is not set"):
        loss_of(make_model(), action_batch(transform=None))
    model = make_model(action_transform=OWN.to_dict())
    loss_of(model, action_batch(transform=None))
    assert torch.equal(model.checkpoint_state()[KEY], transform_tensor(OWN))


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_resumed_model_has_the_transform_of_its_checkpoint(is_in_place: bool) -> None:
    first = make_model()
    loss_of(first, action_batch())
    state = first.checkpoint_state()

    def load(model: Video2WorldModel) -> Any:
        return (model.account_checkpoint_state if is_in_place else model.load_checkpoint_state)(state)

    second = make_model()
    load(second).require()
    assert second.actions.transform == OWN
    with pytest.raises(DataError, match="the checkpoint has"):
        loss_of(second, action_batch(transform=controller(3, 2.0)))
    load(make_model(action_transform=OWN.to_dict())).require()
    with pytest.raises(CheckpointError, match=r"The checkpoint was trained with actions .*scale 1, but .*scale 2"):
        load(make_model(action_transform=controller(3, 2.0).to_dict()))


# --- what it starts from ---


def _saved(net: torch.nn.Module, path: Path, **more: Tensor) -> str:
    torch.save({**{f"net.{name}": value for name, value in net.state_dict().items()}, **more}, path)
    return str(path)


def test_beside_adapters_new_embedders_are_trained(tmp_path: Path) -> None:
    lora = dict(train_architecture="lora", lora_rank=4, lora_alpha=4)
    base = Video2WorldDiT(**LIMITS, **NET)
    model = make_model(dit_path=_saved(base, tmp_path / "base.pt"), **lora)
    trained = {name for name, p in model.net.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {
        name for name, _ in model.net.named_parameters() if name.startswith("action_embedder_")
    }
    known = make_model(dit_path=_saved(make_model().net, tmp_path / "action.pt"), **lora)
    assert all(".lora_" in name for name, p in known.net.named_parameters() if p.requires_grad)


# --- what is told before anything is built ---


def _told(**options: Any) -> str:
    return "\n".join(map(str, checked_model(Video2WorldModel, make_config(**options))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(network=Video2WorldDiT, net=None), "is Video2WorldDiT, which takes no actions"),
        (dict(state_t=4, kind="flat"), "reads 8 actions of 3 numbers, but a clip of 13 frames (state_t=4) has 12"),
        (dict(kind="flat", net=dict(action_dim=30)), "reads 30 numbers, but a clip of 9 frames"),
        (dict(net=dict(action_dim=3, temporal_compression_ratio=2)), "but 4 actions lead to each"),
        (dict(action_transform=relative_pose().to_dict()), "is of 7 numbers, but the network reads 3"),
        (dict(action_transform={"kind": "controler", "scale": [1.0]}), "Did you mean controller"),
        (dict(chunk_size=12), ""),  # what stands where nobody sets it: state_t says the length
        (dict(chunk_size=8), ""),
        (dict(chunk_size=16), "chunk_size: 16, but a clip of 9 frames (state_t=3) has 8 actions"),
        (dict(state_t=4), ""),
        (dict(kind="flat", action_transform=OWN.to_dict()), ""),
    ],
)
def test_a_network_that_does_not_fit_the_clips_is_told(options: dict[str, Any], message: str) -> None:
    told = _told(**options)
    assert message in told if message else told == ""


@pytest.mark.parametrize("name", ["transformer_engine", "flash"])
def test_attention_that_this_device_has_not_is_told(name: str) -> None:
    found = _told(net=dict(action_dim=3, atten_backend=name))
    assert f"net.atten_backend: atten_backend='{name}' works on CUDA" in found
    with pytest.raises(ConfigError, match="works on CUDA"):  # whoever did not ask beforehand
        settle_attention(
            ChunkActionDiT(**LIMITS, **NET, action_dim=3, atten_backend=name), torch.device("cpu"), torch.float32
        )


def test_a_network_without_actions_is_refused() -> None:
    with pytest.raises(ConfigError, match="Video2WorldDiT, which takes no actions"):
        make_model(network=Video2WorldDiT, net=None)


def _start(load_path: str = "", data: ActionTransform | None = OWN, **options: Any) -> list[Finding]:
    """The findings on the weights that a run with these actions starts from."""
    shape = None if data is None else [8, data.dim]
    sizes = dict(num_tokens=4, width=8, num_frames=9)
    nodes = [dict(_target_=MockVideos, **sizes), dict(_target_=MockVideos, **sizes, action_shape=shape)]
    return checked_model(Video2WorldModel, make_config(**options), nodes, start_path=load_path)


def _exported(path: Path, transform: ActionTransform) -> str:
    """As scripts.convert writes it: the transform stands in the metadata alone."""
    net = {f"net.{name}": value for name, value in make_model().net.state_dict().items()}
    save_file(net, path, {KEY: transform.to_json()})
    return str(path)


def test_weights_of_other_actions_are_no_load_path(tmp_path: Path) -> None:
    path = _exported(tmp_path / "exported.safetensors", controller(3, 9.0))
    (problem,) = _start(path)
    assert (problem.key, problem.level) == ("checkpoint.load_path", "error")
    assert "scale 9, the data have controller of 3 numbers, scale 1" in problem.text and "dit_path" in problem.text
    assert _start(path, data=None) == [] == _start(_exported(tmp_path / "own.safetensors", OWN))
    (by_config,) = _start(path, data=None, action_transform=OWN.to_dict())
    assert by_config == problem


def test_a_header_says_the_transform_when_its_weights_are_loaded(tmp_path: Path) -> None:
    path = _exported(tmp_path / "exported.safetensors", controller(3, 9.0))
    model = make_model()
    model.on_load_path(path)
    with pytest.raises(DataError, match=r"scale 1, but the checkpoint has .*scale 9"):
        loss_of(model, action_batch())
    with pytest.raises(CheckpointError, match=r"trained with actions .*scale 9, but .*scale 1"):
        make_model(action_transform=OWN.to_dict()).on_load_path(path)


def test_a_start_from_other_actions_is_a_warning_before_anything_is_built(tmp_path: Path) -> None:
    (note,) = _start(dit_path=_exported(tmp_path / "bridge.safetensors", controller(3, 9.0)))
    assert (note.key, note.level) == ("model.config.model_manager_config.dit_path", "warning")
    assert "scale 9, the data have controller of 3 numbers, scale 1" in note.text
    assert _start(dit_path=_exported(tmp_path / "own.safetensors", OWN)) == []
    assert "none.pt does not exist" in str(*_start(dit_path=str(tmp_path / "none.pt")))


@pytest.mark.parametrize(
    ("training", "validation", "message"),
    [
        (dict(scale=[1.0] * 3), dict(scale=[1.0] * 3), ""),
        (dict(scale=[1.0] * 3), dict(scale=[20.0] * 3), "scale 20, but those of dataloader_train.0 controller"),
        (dict(scale=[1.0] * 4), dict(scale=[1.0] * 3), "4 numbers, but the network reads 3. Set model.config.pipe"),
    ],
)
def test_actions_of_data_that_do_not_fit_are_found(
    training: dict[str, Any], validation: dict[str, Any], message: str
) -> None:
    sizes = dict(_target_=Declaring, num_frames=9, num_tokens=4, width=8)
    found = checked_model(Video2WorldModel, make_config(), [{**sizes, **training}], [{**sizes, **validation}])
    assert message in str(found[0]) if message else found == []


class Declaring(MockVideos):
    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        scale = arguments["scale"]
        return DataFacts(kind="declaring", transform=controller(len(scale), scale[0]))
