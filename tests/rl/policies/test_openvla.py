# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from cosmos_predict2.rl.policies.files import read_policy, write_policy
from cosmos_predict2.rl.policies.openvla import layout
from cosmos_predict2.rl.policies.openvla.inputs import (
    Preprocessor,
    Resize,
    Statistics,
    center_crop,
    statistics_for,
    token_log_probs,
)
from cosmos_predict2.rl.policies.openvla.policy import OpenVLAPolicy
from cosmos_predict2.rl.policies.openvla.tiny import write_tiny
from imaginaire.errors import CheckpointError, ConfigError, DataError
from tests.rl.policies.seen import SENTENCES, generators, observation

SMALL = dict(image_size=28, sentences=SENTENCES, text_tokens=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openvla")
    write_tiny(path, num_images_in_input=2, proprio_dim=5, gripper="libero", shard=100_000, **SMALL)
    return path


def _observation(num: int = 3, size: tuple[int, int] = (40, 32)) -> Any:
    return observation(num, size=size, state=5)


@pytest.mark.parametrize(("variant", "temperature"), [("oft", 1.6), ("autoregressive", 0.7)])
def test_training_computes_the_probabilities_that_were_drawn_with(
    folder: Path, variant: str, temperature: float
) -> None:
    policy, seen = OpenVLAPolicy(str(folder), variant, temperature=temperature), _observation()
    decision = policy.act(seen, mode="sample", generators=generators())
    record = decision.record
    assert len(set(record["length"].tolist())) == 3 and record["pixels"].dtype == torch.uint8
    assert record["pixels"].shape == (3, 2, 1, 3, 28, 28) and record["proprio"].shape == (3, 5)
    found = policy.log_prob(record)
    assert found.log_prob_B_K_N.shape == (3, policy.num_actions, 7) and found.entropy_B_K_N is not None
    assert decision.actions_E_A_D.shape == (3, policy.chunk, 7)
    for i in (2, 0, 1):  # a row alone, and among others that are longer or shorter, is the same
        alone = policy.log_prob({name: value[i : i + 1] for name, value in record.items()})
        torch.testing.assert_close(alone.log_prob_B_K_N[0], found.log_prob_B_K_N[i], rtol=0, atol=1e-5)
    greedy = policy.act(seen, mode="greedy", generators=[]).record["responses"]
    changed = {**record, "responses": (greedy + 100) % 256}
    of_greedy, of_other = (policy.log_prob(one).log_prob_B_K_N for one in ({**record, "responses": greedy}, changed))
    assert of_greedy.sum() > found.log_prob_B_K_N.sum() and of_greedy.sum() > of_other.sum()
    if variant == "oft":
        assert (of_greedy.sum(dim=(1, 2)) > of_other.sum(dim=(1, 2))).all()
    for name in ("pixels", "proprio", "ids"):  # each is looked at
        other = {**record, name: record[name].flip(0)}
        assert not torch.allclose(policy.log_prob(other).log_prob_B_K_N, found.log_prob_B_K_N, atol=1e-4)
    found.log_prob_B_K_N.sum().backward()
    still = [name for name, weight in policy.named_parameters() if weight.grad is None and weight.requires_grad]
    assert not still


def test_without_transformers_the_cure_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="'transformers' is not installed"):
        write_tiny(tmp_path / "policy", **SMALL)
    assert not (tmp_path / "policy").exists()


def test_tokens_that_follow_one_another_have_the_logits_of_the_whole_row(folder: Path) -> None:
    policy, logits = OpenVLAPolicy(str(folder), "autoregressive"), []

    def choose(k: int, of_token: Tensor) -> Tensor:
        logits.append(of_token)
        return of_token.argmax(dim=-1)

    with torch.no_grad():
        record = policy.act(_observation(), mode="greedy", generators=generators()).record
        prompt = (policy._seen(record), record["ids"], record["length"])
        whole = policy.model.forced_logits(*prompt, policy.model.decoded(*prompt, 7, choose))
    torch.testing.assert_close(torch.stack(logits, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_a_cold_draw_is_the_greedy_decision(folder: Path) -> None:
    policy, seen = OpenVLAPolicy(str(folder)), _observation()
    cold = policy.act(seen, mode="sample", generators=generators(), temperature=1e-4).record["responses"]
    assert torch.equal(cold, policy.act(seen, mode="greedy", generators=generators()).record["responses"])


@pytest.mark.parametrize(("variant", "temperature"), [("oft", 1.6), ("autoregressive", 0.7)])
def test_tokens_are_drawn_by_the_probabilities_that_training_computes(
    folder: Path, variant: str, temperature: float
) -> None:
    """A uniform number lies between what all tokens before the drawn one have together, and that with it."""
    policy = OpenVLAPolicy(str(folder), variant, temperature=temperature)
    with torch.no_grad():
        policy.model.language_model.lm_head.weight *= 20  # so that the temperature matters
        record = policy.act(_observation(), mode="sample", generators=generators()).record
        chosen = record["responses"].flatten(1).long()
        prompt = (policy._seen(record), record["ids"], record["length"])
        if variant == "oft":
            logits = policy.model.parallel_logits(*prompt, chosen.shape[1])
        else:
            logits = policy.model.forced_logits(*prompt, chosen + policy.tokens.ids.start)
    every = torch.arange(policy.tokens.bins)
    of_each = torch.stack([token_log_probs(logits[..., policy.tokens.ids], one.expand_as(chosen), temperature)[0]
                           for one in every], dim=-1).exp()  # fmt: skip
    reached = of_each.cumsum(dim=-1).gather(-1, chosen[..., None])[..., 0]
    draws = torch.stack([torch.rand(chosen.shape[1], generator=each) for each in generators()])
    assert (draws <= reached + 1e-4).all()
    assert (draws >= reached - of_each.gather(-1, chosen[..., None])[..., 0] - 1e-4).all()
    entropy = policy.log_prob(record).entropy_B_K_N
    assert entropy is not None
    torch.testing.assert_close(entropy.flatten(1), torch.special.entr(of_each).sum(dim=-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("hold", [1, 2])
def test_a_demonstrator_is_recorded_as_the_nearest_tokens_of_the_mean_of_what_is_held(folder: Path, hold: int) -> None:
    policy, seen = OpenVLAPolicy(str(folder), gripper="as_is", hold=hold), _observation()
    wanted = torch.rand(3, policy.chunk, 7, generator=torch.Generator().manual_seed(0)) * 1.9 - 0.95
    record = policy.record_of(seen, wanted)
    held = policy.actions(record["responses"]).unflatten(1, (-1, hold))
    assert (held - wanted.unflatten(1, (-1, hold)).mean(dim=2, keepdim=True)).abs().max() < 1 / 255 + 1e-6
    policy.cloning_loss(record, torch.Generator()).backward()


def test_draws_of_neighbouring_actions_go_together_and_each_is_as_likely_as_before(folder: Path) -> None:
    """So hot that all tokens are alike: a token is the draw that chose it."""
    policy = OpenVLAPolicy(str(folder), temperature=1e6, correlation=0.9)
    draws = policy._draws(generators(1000)).unflatten(1, (policy.num_actions, policy.action_dim))
    normal = torch.special.ndtri(draws.double())
    assert abs(float(normal.mean())) < 0.05 and abs(float(normal.std()) - 1) < 0.02
    for apart in (1, 3):
        found = float((normal[:, apart:] * normal[:, :-apart]).mean())
        assert found == pytest.approx(0.9**apart, abs=0.03), apart
    assert abs(float((normal[:, :, 1:] * normal[:, :, :-1]).mean())) < 0.05, "numbers of an action have their own"
    decision = policy.act(_observation(), mode="sample", generators=generators())
    close = decision.record["responses"].diff(dim=1).abs().float().mean()
    far = OpenVLAPolicy(str(folder), temperature=1e6).act(_observation(), mode="sample", generators=generators())
    assert close < 0.6 * far.record["responses"].diff(dim=1).abs().float().mean()
    assert decision.log_prob_E_K_N is not None
    again = policy.log_prob(decision.record).log_prob_B_K_N
    torch.testing.assert_close(again, decision.log_prob_E_K_N, rtol=0, atol=1e-4)


def test_a_folder_keeps_the_temperature_of_its_draws(folder: Path, tmp_path: Path) -> None:
    OpenVLAPolicy(str(folder), temperature=0.3).save(tmp_path)
    assert "temperature" not in json.loads((tmp_path / CONFIG).read_text()), "which transformers reads as its own"
    assert [OpenVLAPolicy(str(path)).temperature for path in (folder, tmp_path)] == [1, 0.3]
    assert OpenVLAPolicy(str(tmp_path), temperature=0.7).temperature == 0.7


def test_numbers_are_outside_below_and_above_their_range() -> None:
    statistics = Statistics(numpy.array([0.0, 0.0]), numpy.array([2.0, 2.0]), numpy.array([True, False]))
    values = torch.tensor([[-0.1, -0.5], [0.0, -1.5], [2.0, 0.0], [2.1, 1.5]])
    assert statistics.is_outside(values).tolist() == [[True, False], [False, True], [False, False], [True, True]]


def test_towers_see_each_view_by_their_own_mean_and_deviation() -> None:
    """The channels of a view are those of the first tower and then of the second."""
    resize = Resize("resize-naive", 1, "bicubic", (0, 0, 0))
    other = replace(resize, interpolation="bilinear")
    made = Preprocessor((resize, other), ((0.0, 0.1, 0.2), (0.5, 0.5, 0.5)), ((1.0, 2.0, 4.0), (0.5, 0.25, 0.5)))
    given = torch.tensor([[[51, 102, 153], [0, 51, 255]], [[255, 255, 255], [102, 0, 51]]], dtype=torch.uint8)
    found = made.normalized(given.reshape(1, 2, 2, 3, 1, 1)).flatten()
    first = [
        [(v / 255 - m) / s for v, m, s in zip(view[0].tolist(), (0.0, 0.1, 0.2), (1.0, 2.0, 4.0))] for view in given
    ]
    second = [[(v / 255 - 0.5) / s for v, s in zip(view[1].tolist(), (0.5, 0.25, 0.5))] for view in given]
    torch.testing.assert_close(found, torch.tensor([*first[0], *second[0], *first[1], *second[1]]))


def test_a_folder_is_written_as_it_was_read(folder: Path, tmp_path: Path) -> None:
    OpenVLAPolicy(str(folder)).save(tmp_path / "again")
    before, after = (_tensors(path) for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys() and len(list(folder.glob("model-0*-of-*.safetensors"))) > 1
    assert any("attn_pool" in name for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json", "dataset_statistics.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    first, second = OpenVLAPolicy(str(folder)), OpenVLAPolicy(str(tmp_path / "again"))
    act = [one.act(_observation(), mode="greedy", generators=generators()).actions_E_A_D for one in (first, second)]
    assert torch.equal(*act)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_a_folder_of_half_precision_is_written_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    half = {name: value.bfloat16() for name, value in _tensors(folder).items()}
    OpenVLAPolicy(str(folder)).save(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    save_file(half, tmp_path / "model.safetensors")
    OpenVLAPolicy(str(tmp_path), lora_rank=2).save(tmp_path / "again")  # adapters that begin at zero
    after = _tensors(tmp_path / "again")
    assert after.keys() == half.keys() and {value.dtype for value in after.values()} == {torch.bfloat16}
    assert not [name for name, value in half.items() if not torch.equal(after[name], value)]


def test_proprioception_beside_the_model_is_read(folder: Path, tmp_path: Path) -> None:
    OpenVLAPolicy(str(folder)).save(tmp_path)
    tensors = _tensors(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    of_proprio = {name: value for name, value in tensors.items() if name.startswith("proprio_projector.")}
    others = {name: value for name, value in tensors.items() if name not in of_proprio}
    save_file(others, tmp_path / "model.safetensors")
    stored = {f"module.{name.partition('.')[2]}": value for name, value in of_proprio.items()}
    torch.save(stored, tmp_path / "proprio_projector--100_checkpoint.pt")
    first, second = OpenVLAPolicy(str(folder)), OpenVLAPolicy(str(tmp_path))
    assert all(torch.equal(*pair) for pair in zip(first.state_dict().values(), second.state_dict().values()))
    second.save(tmp_path)  # over what it came from
    assert "proprio_projector.fc1.weight" not in _tensors(tmp_path)
    with torch.no_grad():
        second.model.proprio_projector.fc1.bias += 1
    second.save(tmp_path)
    again = torch.load(tmp_path / "proprio_projector--100_checkpoint.pt", weights_only=True)
    assert again.keys() == stored.keys() and torch.equal(again["module.fc1.bias"], stored["module.fc1.bias"] + 1)
    assert torch.equal(OpenVLAPolicy(str(tmp_path)).model.proprio_projector.fc1.bias, again["module.fc1.bias"])


def test_weights_of_an_earlier_model_do_not_stay_in_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = OpenVLAPolicy(str(folder))
    write_tiny(tmp_path, seed=1, num_images_in_input=2, proprio_dim=5, shard=100_000, **SMALL)
    before = _tensors(tmp_path)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(layout.safetensors.torch, "save_file", full)
        policy.save(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in _tensors(tmp_path).items())
    assert sorted(OpenVLAPolicy(str(tmp_path)).state_dict()) == sorted(policy.state_dict())
    policy.save(tmp_path)  # one file where there were shards and an index
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    found = OpenVLAPolicy(str(tmp_path)).state_dict()
    assert all(torch.equal(found[name], value) for name, value in policy.state_dict().items())
    shutil.copyfile(tmp_path / "model.safetensors", tmp_path / "copy.safetensors")
    with pytest.raises(CheckpointError, match="several files of weights"):
        OpenVLAPolicy(str(tmp_path))


def test_the_head_for_numbers_is_read_evaluated_and_cloned(folder: Path, tmp_path: Path) -> None:
    first = OpenVLAPolicy(str(folder), "l1", lora_rank=2)  # a new head, trained whole beside adapters
    OpenVLAPolicy(str(folder)).save(tmp_path)
    state = first.model.action_head.state_dict()
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "action_head--1_checkpoint.pt")
    policy, seen = OpenVLAPolicy(str(tmp_path), "l1"), _observation()
    hidden = torch.randn(2, 8 * 7, 64, generator=torch.Generator().manual_seed(0))
    rows = hidden.reshape(2, 8, 7 * 64)
    x = (F.layer_norm(rows, [7 * 64]) @ state["model.fc1.weight"].T + state["model.fc1.bias"]).relu()
    for i in range(2):
        block = f"model.mlp_resnet_blocks.{i}.ffn.1"
        x = x + (F.layer_norm(x, [64]) @ state[f"{block}.weight"].T + state[f"{block}.bias"]).relu()
    expected = F.layer_norm(x, [64]) @ state["model.fc2.weight"].T + state["model.fc2.bias"]
    torch.testing.assert_close(policy.model.action_head(hidden), expected)

    decision = policy.act(seen, mode="greedy", generators=generators())
    assert decision.actions_E_A_D.shape == (3, 8, 7)
    assert set(decision.actions_E_A_D[..., 6].unique().tolist()) <= {-1.0, 1.0}  # as the simulator takes the gripper
    record = policy.record_of(seen, decision.actions_E_A_D)
    assert policy.cloning_loss(record, torch.Generator()) < policy.cloning_loss(
        {**record, "actions": record["actions"] + 0.5}, torch.Generator()
    )
    for refused in (lambda: policy.act(seen, mode="sample", generators=generators()), lambda: policy.log_prob(record)):
        with pytest.raises(ConfigError, match=r"policy\.variant=l1.*policy\.variant=oft"):
            refused()
    write_policy(tmp_path / "again", policy, {})
    again, _ = read_policy(str(tmp_path / "again"))
    assert torch.equal(again.act(seen, mode="greedy", generators=generators()).actions_E_A_D, decision.actions_E_A_D)
    with pytest.raises(CheckpointError, match=r"action_head policy\.variant=l1"):
        OpenVLAPolicy(str(tmp_path))


def test_what_it_sees_and_does_has_the_published_order_and_units(tmp_path: Path) -> None:
    of_actions: dict[str, Any] = dict(q01=[-0.5] * 7, q99=[0.5] * 7, min=[-2.0] * 7, max=[2.0] * 7)
    statistics = {
        "action": {**of_actions, "mask": [True] * 6 + [False]},
        "proprio": dict(q01=[-2.0] * 5, q99=[2.0] * 5, min=[-9.0] * 5, max=[9.0] * 5),
    }
    sizes = dict(num_images_in_input=2, proprio_dim=5, hold=3, action_chunk=2, gripper="libero", **SMALL)
    write_tiny(tmp_path, statistics=statistics, **sizes)
    policy, seen = OpenVLAPolicy(str(tmp_path)), _observation(size=(28, 28))
    record = policy._inputs(seen)
    views = torch.stack([seen["full_image"], seen["wrist_image"][:, 0]], dim=1)  # the scene, then the hand
    assert torch.equal(record["pixels"][:, :, 0], views.permute(0, 1, 4, 2, 3))
    torch.testing.assert_close(record["proprio"], (seen["state"] / 2).clamp(-1, 1))
    another = {**seen, "wrist_image": torch.cat([seen["wrist_image"], seen["full_image"][:, None]], dim=1)}
    assert torch.equal(policy._inputs(another)["pixels"], record["pixels"])  # as many views as it was trained with
    alone = OpenVLAPolicy(str(tmp_path), num_images_in_input=1)._inputs(seen)["pixels"]
    assert torch.equal(alone, record["pixels"][:, :1])
    ids = policy.prompts.ids(SENTENCES[0])
    assert ids == policy.prompts.ids(SENTENCES[0].title())  # in small letters, as in training
    assert ids[-1] == policy.prompts.tokenizer.convert_tokens_to_ids("▁") != ids[-2]

    tokens = torch.randint(256, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    normalized = policy.tokens.decode(tokens + policy.tokens.ids.start).float()
    for bounds, scale in (("q99", 0.5), ("minmax", 2.0)):
        found = OpenVLAPolicy(str(tmp_path), bounds=bounds).actions(tokens).unflatten(1, (2, 3))
        torch.testing.assert_close(found[..., :6], scale * normalized[:, :, None, :6].expand(-1, -1, 3, -1))
        assert torch.equal(found[:, :, 0, 6], -torch.sign(2 * normalized[..., 6] - 1))  # no statistics; -1 is open
    policy.gripper = "as_is"
    record = policy.record_of(seen, policy.actions(tokens))
    assert ((record["responses"] - tokens).abs() <= 1).all()  # the two largest bins share a centre


def test_pictures_are_cropped_unless_the_checkpoint_says_otherwise(folder: Path, tmp_path: Path) -> None:
    OpenVLAPolicy(str(folder)).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["center_crop"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    picture = _observation(1, size=(28, 28))["full_image"]
    cropped = torch.from_numpy(center_crop(picture[0].numpy(), 28).copy()).permute(2, 0, 1)
    for policy, is_cropped in (
        (OpenVLAPolicy(str(tmp_path)), True),
        (OpenVLAPolicy(str(folder)), False),
        (OpenVLAPolicy(str(folder), center_crop=True), True),
    ):
        found = policy.preprocessor.resized(picture[:, None])[0, 0, 0]
        assert torch.equal(found, cropped) == is_cropped


def test_of_statistics_of_two_chunks_side_by_side_the_first_count() -> None:
    twice = {"q01": [0.0] * 7 + [5.0] * 7, "q99": [1.0] * 7 + [6.0] * 7, "mask": [True] * 6 + [False] * 8}
    found = Statistics.of(twice, "q99", 7)
    assert (found.low == 0).all() and (found.high == 1).all() and found.mask.tolist() == [True] * 6 + [False]


def test_statistics_are_those_of_the_named_data() -> None:
    entries = {name: {"action": name} for name in ("bridge", "libero_10", "libero_10_no_noops")}
    for key, name in (("libero_10", "libero_10"), ("bridge", "bridge"), ("", "libero_10_no_noops")):
        assert statistics_for(entries, key, "here") == (name, entries[name])
    del entries["libero_10"]
    assert statistics_for(entries, "libero_10", "here")[0] == "libero_10_no_noops"
    with pytest.raises(CheckpointError, match=r"no statistics of 'libero_10_no_noops'.*bridge, kuka"):
        statistics_for({"bridge": {}, "kuka": {}}, "", "here")


@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
def test_pictures_are_brought_to_size(strategy: str) -> None:
    settings = dict(
        image_resize_strategy=strategy,
        input_sizes=[[3, 28, 28]] * 2,
        interpolations=["bicubic", "bilinear"],
        means=[[0.25] * 3, [0.5, 0.25, 0.0]],  # a letterbox is filled with the last tower's
        stds=[[0.5] * 3, [0.5] * 3],
    )
    preprocessor = Preprocessor.of(settings, "settings")
    picture = torch.zeros(1, 1, 40, 80, 3, dtype=torch.uint8)
    picture[:, :, :, 40:] = 255
    resized = preprocessor.resized(picture)
    assert resized.shape == (1, 1, 2, 3, 28, 28)  # the towers' interpolations differ
    assert (resized[..., 14, 0] == 0).all() and (resized[..., 14, 27] == 255).all()
    corner = resized[0, 0, 0, :, 0, 0].tolist()
    assert corner == ([127, 63, 0] if strategy == "letterbox" else [0, 0, 0])
    seen = preprocessor.normalized(resized)
    for tower, mean in enumerate(settings["means"]):  # each has its own interpolation
        of_tower = (resized[0, 0, tower] / 255 - torch.tensor(mean)[:, None, None]) / 0.5
        torch.testing.assert_close(seen[0, 3 * tower : 3 * tower + 3], of_tower)
    assert not torch.equal(*resized[0, 0])
    assert seen.shape == (1, 6, 28, 28)
    for picture, x in ((1.0, 27), (0.0, 0)):
        expected = (picture - torch.tensor(settings["means"]).flatten()) / 0.5
        torch.testing.assert_close(seen[0, :, 14, x], expected)


def test_the_longer_side_of_a_crop_is_rounded_as_torchvision_does() -> None:
    picture = torch.randint(256, (40, 45, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8).numpy()
    found = Resize("resize-crop", 224, "bicubic", (0, 0, 0))(picture)
    resized = Image.fromarray(picture).resize((252, 224), Image.Resampling.BICUBIC)  # not 251
    left = round((resized.width - 224) / 2)
    assert (found == numpy.asarray(resized.crop((left, 0, left + 224, 224)))).all()


def test_a_published_folder_is_a_policy_with_a_card(folder: Path, tmp_path: Path) -> None:
    policy, card = read_policy(str(folder))
    assert card.arguments == {"path": str(folder)} and policy.num_views == 2
    sampled = OpenVLAPolicy(str(folder), temperature=1.6)
    with torch.no_grad():
        sampled.model.projector.fc1.bias += 1
    write_policy(tmp_path / "cloned", sampled, {"seed": 4})
    found, card = read_policy(str(tmp_path / "cloned"))
    assert found.temperature == 1.6 and card.about["seed"] == 4
    assert torch.equal(found.model.projector.fc1.bias, sampled.model.projector.fc1.bias)
    with pytest.raises(ConfigError, match="give a folder"):
        write_policy(tmp_path / "cloned.safetensors", sampled, {})
    (tmp_path / "config.json").write_text('{"model_type": "openvlo"}')
    with pytest.raises(CheckpointError, match=r"type 'openvlo'.*Did you mean openvla"):
        read_policy(str(tmp_path))


def _edited(file: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return edit


def _without_quantiles(content: Any) -> None:
    for name in ("q01", "q99"):
        del content["tiny"]["proprio"][name]


def _quantised(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({name: value.to(torch.int8) for name, value in load_file(file).items()}, file)


CONFIG, STATISTICS, PICTURES = "config.json", "dataset_statistics.json", "preprocessor_config.json"
DEEPER = _edited(CONFIG, lambda content: content["text_config"].update(num_hidden_layers=4))
REFUSED: list[tuple[Callable[[Path], Any], dict[str, Any], str]] = [  # a change of the folder, options, the error
    (lambda folder: (folder / CONFIG).unlink(), {}, r"no config.json.*\n.*train_policy --policy openvla_oft"),
    (lambda folder: (folder / STATISTICS).unlink(), {}, r"has no dataset_statistics\.json"),
    (lambda folder: (folder / PICTURES).unlink(), {}, r"preprocessor_config\.json has no 'image_resize_strategy'"),
    (_edited(CONFIG, lambda content: content.update(model_type="pi05")), {}, "model of type 'pi05', not OpenVLA"),
    (_edited(STATISTICS, lambda content: content["tiny"].pop("action")), {}, "no statistics of actions in 'tiny': pro"),
    (_edited(STATISTICS, _without_quantiles), {}, "no q01 and q99"),
    (DEEPER, {}, "missing in the file"),
    (_quantised, {}, r"torch\.int8 in the file, which is quantised"),
    (str, dict(variant="of"), r"variant='of'.*oft"),
    (str, dict(unnorm_key="libero_10"), r"unnorm_key to one of its tiny"),
    (str, dict(use_proprio=False), "tensors that this policy does not know: proprio_projector"),
    (str, dict(action_dim=6), "statistics are of 7 numbers, but the policy has 6"),
    (str, dict(action_chunk=0), r"policy\.action_chunk=0 must be a whole number from 1 to"),
    (str, dict(hold=0), r"policy\.hold=0"),
    (str, dict(correlation=1.0), r"policy\.correlation=1\.0 must be at least 0, and below 1"),
    (_edited(CONFIG, lambda content: content.update(correlation="0.9")), {}, r"policy\.correlation='0\.9'"),
    (str, dict(temperature=0), r"policy\.temperature=0 must be above 0"),
    (_edited(CONFIG, lambda content: content.update(sampling_temperature="1")), {}, r"policy\.temperature='1'"),
    (str, dict(gripper="liberoo"), r"gripper='liberoo'.*Did you mean libero"),
    (str, dict(attention="flashy"), r"policy\.attention='flashy'"),
]


@pytest.mark.parametrize(("change", "options", "named"), REFUSED, ids=[named for *_, named in REFUSED])
def test_what_does_not_fit_is_refused(
    change: Callable[[Path], Any], options: dict[str, Any], named: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "policy")
    change(tmp_path / "policy")
    with pytest.raises((CheckpointError, ConfigError), match=named):
        OpenVLAPolicy(str(tmp_path / "policy"), **options)


def test_what_it_is_shown_must_fit(folder: Path) -> None:
    with pytest.raises(DataError, match=r"policy.max_tokens=9: raise it"):
        OpenVLAPolicy(str(folder), max_tokens=9).act(_observation(), mode="greedy", generators=generators())
    policy = OpenVLAPolicy(str(folder))
    for size in (1, 8):  # one number would be taken for each
        state = torch.zeros(3, size)
        with pytest.raises(ConfigError, match=rf"state has {size} numbers, the statistics of 'tiny' are of 5"):
            policy.act({**_observation(), "state": state}, mode="greedy", generators=generators())
