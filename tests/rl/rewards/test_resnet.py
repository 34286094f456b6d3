# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.rl.rewards import resnet
from cosmos_predict2.rl.rewards.resnet import ResnetReward, SuccessClassifier, read_classifier, write_classifier
from imaginaire.errors import CheckpointError, ConfigError

NARROW = (4, 4, 6, 6, 8)


def narrow() -> SuccessClassifier:
    torch.manual_seed(0)
    return SuccessClassifier(NARROW).eval()


def pictures(*shape: int) -> Tensor:
    return torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_the_published_size() -> None:
    model = SuccessClassifier()
    assert sum(p.numel() for p in model.parameters()) == 11_180_033
    names = set(model.state_dict())
    assert {"net.0.0.bias", "net.2.0.conv3.weight", "net.4.1.bn2.running_var", "net.7.weight"} <= names
    assert not any("conv3" in name for name in names if name.startswith("net.1.") or ".1.conv3" in name)


@pytest.mark.parametrize("size", [(48, 48), (40, 65), (256, 320)])
def test_a_picture_of_any_size_has_one_probability(size: tuple[int, int]) -> None:
    model = narrow()
    images = 3 * torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    found = model(images)
    assert found.shape == (2, 1) and (found > 0).all() and (found < 1).all()
    assert torch.equal(found, model(images.clamp(-1, 1)))


def test_every_picture_is_judged_by_itself_and_success_is_a_probability_of_at_least_the_threshold() -> None:
    frames = pictures(3, 5, 24, 32)
    reward = ResnetReward(model=narrow(), device="cpu")
    found = reward.judge(frames, {})
    assert found.value_E_F.shape == found.success_E_F.shape == (3, 5)
    alone = reward.judge(frames[1:2, 3:4], {}).value_E_F
    torch.testing.assert_close(alone[0, 0], found.value_E_F[1, 3])
    threshold = float(found.value_E_F.flatten().sort().values[7])
    at = ResnetReward(model=narrow(), threshold=threshold, rounded=True, device="cpu").judge(frames, {})
    assert int(at.success_E_F.sum()) == 8
    assert torch.equal(at.success_E_F, found.value_E_F >= threshold)
    assert torch.equal(at.value_E_F.bool(), at.success_E_F)


def test_pictures_are_judged_in_parts_by_a_model_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    model, frames = narrow(), pictures(2, 5, 24, 32)
    images = frames.flatten(0, 1).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        expected = model(images).reshape(2, 5)
    monkeypatch.setattr(resnet, "_AT_ONCE", 4)
    reward = ResnetReward(model=model.train(), device="cpu")
    assert not any(weight.requires_grad for weight in model.parameters())
    torch.testing.assert_close(reward.judge(frames, {}).value_E_F, expected)
    assert reward.to("meta") is reward and {weight.device.type for weight in model.parameters()} == {"meta"}
    for threshold in (0.0, 1.1, 2):
        with pytest.raises(ConfigError, match="threshold"):
            ResnetReward(model=narrow(), threshold=threshold)


@pytest.mark.parametrize("inside", [None, "model_state_dict"])
def test_published_files_are_read_by_name(tmp_path: Path, inside: str | None) -> None:
    model, path = narrow(), tmp_path / "resnet_rm.pth"
    torch.save(model.state_dict() if inside is None else {inside: model.state_dict(), "epoch": 3}, path)
    found, recorded = read_classifier(str(path))
    assert found.widths == NARROW and recorded == {} and not found.training
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


def test_our_files_record_their_threshold(tmp_path: Path) -> None:
    path = tmp_path / "reward_model.safetensors"
    write_classifier(path, narrow(), {"threshold": 0.625, "data": "toy"})
    assert ResnetReward(str(path)).threshold == 0.625
    assert ResnetReward(str(path), threshold=0.25).threshold == 0.25
    assert read_classifier(str(path))[1]["data"] == "toy"


def test_progress_is_paid_where_a_file_has_it_and_success_stays_the_same(tmp_path: Path) -> None:
    """A classifier without it judges bit for bit as it did: the second output adds a layer and changes none."""
    old, path, frames = narrow(), tmp_path / "reward_model.safetensors", pictures(2, 5, 24, 32)
    torch.manual_seed(0)
    model = SuccessClassifier(NARROW, progress=True).eval()
    write_classifier(path, model, {"outputs": ["success", "progress"]})
    expected = old(frames.flatten(0, 1).permute(0, 3, 1, 2) / 127.5 - 1)[:, 0].reshape(2, 5).detach()
    paid = ResnetReward(str(path), device="cpu").judge(frames, {})
    rounded = ResnetReward(str(path), device="cpu", value="success").judge(frames, {})
    assert torch.equal(ResnetReward(model=old, device="cpu").judge(frames, {}).value_E_F, expected)
    assert torch.equal(rounded.value_E_F, expected)
    assert torch.equal(paid.success_E_F, rounded.success_E_F) and not torch.equal(paid.value_E_F, rounded.value_E_F)
    assert ((paid.value_E_F > 0) & (paid.value_E_F < 1)).all()
    with pytest.raises(ConfigError, match="value is 'progress', but this classifier has success"):
        ResnetReward(model=narrow(), value="progress")


def test_what_is_no_classifier_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"net.0.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other.safetensors is no success classifier: it has no 'net\.0\.0"):
        ResnetReward(str(tmp_path / "other.safetensors"))
    state = narrow().state_dict()
    torch.save({name: value for name, value in state.items() if name != "net.7.bias"}, tmp_path / "short.pth")
    with pytest.raises(CheckpointError, match=r"net\.7\.bias"):
        ResnetReward(str(tmp_path / "short.pth"))
    with pytest.raises(ConfigError, match="either path"):
        ResnetReward()
    with pytest.raises(ConfigError, match="5 numbers of channels"):
        SuccessClassifier((4, 4))
