# SPDX-License-Identifier: Apache-2.0
"""Records of weights about themselves are found wherever their file lies, and decide how they are used."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.checkpoints.card import (
    KEY,
    PIPELINE_KEY,
    TRANSFORM_KEY,
    ModelCard,
    card_in,
    card_tensors,
    card_texts,
    name_of,
    read_card,
    text_tensor,
)
from cosmos_predict2.checkpoints.dit_loading import parse_transform, require_transform, resume_differences
from cosmos_predict2.checkpoints.dit_weights import open_dit
from cosmos_predict2.configs.action_conditioned.networks import (
    choose_action_model,
    get_cosmos_predict2_action_conditioned_pipeline,
)
from cosmos_predict2.configs.rl.experiment.policy_toy_world import EXPERIMENTS
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.released import (
    TINY_ACTION,
    get_cosmos_predict2_action_conditioned_checkpoint,
    get_cosmos_predict25_checkpoint,
)
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.text.trained_text import TrainedText
from cosmos_predict2.world_model.options import ActionModel
from cosmos_predict2.world_model.world_model import SamplingOptions, build_world_model
from imaginaire.config.lazy_config import to_yaml
from imaginaire.errors import CheckpointError, ConfigError
from scripts import convert
from tests.checkpoints.nets import assert_same_parameters, filled, save

FEWEST = "min_num_conditional_frames"
INVISIBLE_ONES = {"summed_action_dims": [1, 2], "summed_action_scale": 0.5, "reads_text": False}
OWN = ActionTransform(kind="controller", scale=(1.0, 2.5, 1e-3), offset=(0.0, 0.1, -1 / 3))
FULL = ModelCard(
    pipeline={"net": {"_target_": name_of(Video2WorldDiT), "model_channels": 32}, "state_t": 4, "flow": {"shift": 5.0}},
    action_transform=OWN,
    texts=(TrainedText("bytes-v1-64x64", 64, 32, 64), TrainedText("none", 4, 4, 8, "empty.pt")),
    constant_text="empty.pt",
    video_size=(48, 64),
    frame_rate=12.5,
    input_crop="stretch",
    min_conditioning_frames=2,
    max_conditioning_frames=2,
    lora_alpha=8.0,
    lora_targets="q_proj",
    base="base.pt",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose network has what no shape shows, and samples from where its training began."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    config.net.update(INVISIBLE_ONES)
    config.fps, config.timestamps.t_min, config.state_t = 7, 5.0, 3
    net = filled(build_world_model(config, dtype=torch.float32).load().net)
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    state[TRANSFORM_KEY] = text_tensor(controller(4, 1.0).to_json())
    save(_checkpoint(folder).parent, state, _checkpoint(folder).name)
    tree = {"model": {"config": {"pipe_config": config}}, "dataloader_train": {"dataset": {"video_size": [48, 64]}}}
    (folder / "config.yaml").write_text(to_yaml(tree))
    return folder


def _checkpoint(folder: Path) -> Path:
    return folder / "checkpoints/model/iter_000000010.pt"


def _exported(source: Path | str, path: Path) -> str:
    convert.run(convert.parser.parse_args([str(source), str(path)]))
    return str(path)


def _saved(folder: Path, **tensors: Any) -> str:
    return save(folder, {"net.x": torch.zeros(1), **tensors})


def _pipeline(path: str) -> tuple[Any, Any]:
    choice = choose_action_model(ActionModel(dit_path=path))
    choice.config.guardrail_config.enabled = False
    pipe = Video2WorldActionConditionedPipeline.from_config(choice.config, path, use_text_encoder=False, device="cpu")
    return choice, pipe


# Writing and reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_actions", [True, False])
def test_a_checkpoint_keeps_every_field(takes_actions: bool) -> None:
    card = ModelCard(**{**vars(FULL), "has_action_embedders": takes_actions})
    written = card_tensors(ModelCard(**{**vars(card), "pipeline": {**card.pipeline, "net": {"_target_": "own.Net"}}}))
    assert set(written) == ({KEY, TRANSFORM_KEY, PIPELINE_KEY} if takes_actions else {KEY})
    assert all(value.dtype == torch.uint8 for value in written.values())
    found = card_in(written)
    assert found.pipeline["net"] == {"_target_": "own.Net"}
    assert vars(found) == {**vars(FULL), "pipeline": {**FULL.pipeline, "net": {"_target_": "own.Net"}}}


def test_weights_trained_with_five_pictures_are_not_imagined_from_one(run: Path, tmp_path: Path) -> None:
    one, other = run / "config.yaml", tmp_path / "run"
    assert "min_conditioning_frames" not in card_texts(read_card(str(run)))[KEY]
    shutil.copytree(run, other)
    (other / "config.yaml").write_text(one.read_text().replace("min_num_conditional_frames: 1", f"{FEWEST}: 2"))
    exported = _exported(_checkpoint(other), tmp_path / "alone.safetensors")
    for path in (str(_checkpoint(other)), exported):
        imagination = imagination_of(path, device="cpu")
        with pytest.raises(ConfigError, match=r"^1 conditioning frames.*5 at least.*starts\.history"):
            WorldModelEnv(imagination, ToyStarts(), ToyDetectorReward(), 1, 8)
        five = ToyStarts()
        five.history = 5
        WorldModelEnv(imagination, five, ToyDetectorReward(), 1, 8)
        frames = torch.zeros(1, 3, 5, 48, 48, dtype=torch.uint8)
        assert imagination.generate_actions(frames, torch.zeros(1, 8, 4), [0]).shape[2] == 9
        with pytest.raises(ConfigError, match=r"--num_conditional_frames"):
            imagination.generate_actions(frames[:, :, :1], torch.zeros(1, 8, 4), [0])


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_an_exported_file_far_from_its_run_is_the_same_model(suffix: str, run: Path, tmp_path: Path) -> None:
    path = _exported(_checkpoint(run), tmp_path / f"alone.{suffix}")
    (choice, pipe), (own_choice, own) = _pipeline(path), _pipeline(str(_checkpoint(run)))
    assert {name: pipe.config.net[name] for name in INVISIBLE_ONES} == INVISIBLE_ONES
    assert choice.video_size == own_choice.video_size == (48, 64)
    for name in ("state_t", "fps", "timestamps", "chunk_size", "conditioner", "action_transform"):
        assert getattr(pipe.config, name) == getattr(own.config, name), name
    assert (pipe.config.fps, pipe.config.timestamps.t_min, pipe.config.chunk_size) == (7, 5.0, 8)
    assert_same_parameters(pipe.dit, dict(own.dit.named_parameters()))
    frames, actions = torch.zeros(1, 3, 1, 48, 48, dtype=torch.uint8), torch.rand(1, 8, 4)
    videos = [each.generate_actions(frames, actions, [0], options=SamplingOptions(num_steps=2)) for each in (pipe, own)]
    assert torch.equal(*videos) and videos[0].float().std() > 0
    assert not {KEY, TRANSFORM_KEY, PIPELINE_KEY} & set(open_dit(path)), "they are none of the network's weights"


def test_an_export_of_an_export_records_the_same(run: Path, tmp_path: Path) -> None:
    first = _exported(_checkpoint(run), tmp_path / "first.safetensors")
    with safetensors.safe_open(first, framework="pt") as file:
        header = file.metadata()
    assert ActionTransform.from_json(header[TRANSFORM_KEY]) == controller(4, 1.0)
    assert json.loads(header[PIPELINE_KEY])["video_size"] == [48, 64], "as older versions read it"
    cards = [read_card(path) for path in (str(_checkpoint(run)), first, _exported(first, tmp_path / "again.pt"))]
    assert len({json.dumps(card.pipeline, sort_keys=True) for card in cards}) == 1
    for card in cards:
        assert (card.action_transform, card.video_size) == (controller(4, 1.0), (48, 64))


def test_the_tiny_model_can_be_copied_without_its_config(tmp_path: Path) -> None:
    copy = shutil.copy(TINY_ACTION, tmp_path)
    choice, pipe = _pipeline(str(copy))
    assert pipe.dit.summed_action_dims == [0, 1] and not pipe.dit.reads_text
    assert (choice.config.timestamps.nfe, choice.config.timestamps.t_min) == (1, 10.0)
    _, own = _pipeline(TINY_ACTION)
    assert yaml.safe_load(to_yaml(pipe.config)) == yaml.safe_load(to_yaml(own.config))


def test_the_world_model_of_a_policys_run_is_read_like_any_other(tmp_path: Path) -> None:
    """Its weights are below ``world_model.``, and its actions are those of the weights that it began with."""
    (tmp_path / "config.yaml").write_text(to_yaml({"model": EXPERIMENTS["tiny_vla_grpo_world_model"]("a")["model"]}))
    base = safetensors.torch.load_file(TINY_ACTION)
    refined = {f"world_model.{name}": 2 * tensor for name, tensor in base.items()}
    safetensors.torch.save_file(refined | {"net.mlp.0.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    imagination = imagination_of(str(tmp_path / "model.safetensors"))
    weights = imagination.world.net.state_dict()
    assert all(torch.equal(weights[name.removeprefix("net.")], 2 * tensor.float()) for name, tensor in base.items())
    assert imagination.transform == imagination_of().transform
    words = [str(tmp_path / "model.safetensors"), str(tmp_path / "alone.safetensors")]
    convert.run(convert.parser.parse_args(words))
    assert read_card(str(tmp_path / "alone.safetensors")).action_transform == imagination.transform


def test_weights_record_more_than_the_run_around_them(tmp_path: Path) -> None:
    config = {"pipe_config": {TRANSFORM_KEY: OWN.to_dict()}, "lora_alpha": 4, "text": {"constant_path": "run.pt"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"config": config}}))
    card = read_card(_saved(tmp_path / "checkpoints/model", lora_alpha=torch.tensor(8.0)))
    assert (card.action_transform, card.lora_alpha, card.constant_text) == (OWN, 8.0, "run.pt")
    card = read_card(str(tmp_path / "absent.pt"))
    assert (card.action_transform, card.lora_alpha) == (OWN, 4.0) and "absent.pt" in card.problem
    with pytest.raises(CheckpointError, match=r"absent\.pt"):
        card.opened()
    assert read_card("s3://nowhere/model.pt", fetch=False).problem and read_card("").problem
    assert str(card) == card.problem and "no network" in str(read_card(_saved(tmp_path / "other")))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (PIPELINE_KEY, "{"),
        (PIPELINE_KEY, '{"fps": 3}'),
        (PIPELINE_KEY, '{"net": {"max_frames": "${oc.env:HOME}"}}'),
        (TRANSFORM_KEY, "\udcff"),
        (TRANSFORM_KEY, '{"kind": "controller"}'),
        (KEY, "[]"),
        (KEY, '{"video_size": [1]}'),
        (KEY, '{"frame_rate": "fast"}'),
        (KEY, '{"texts": [{}]}'),
    ],
)
def test_a_record_in_weights_that_cannot_be_read_is_an_error(key: str, text: str, tmp_path: Path) -> None:
    data = torch.tensor(list(text.encode(errors="surrogateescape")), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        read_card(_saved(tmp_path, **{key: data}))


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (
            b"b0: &b0 [1, 1]" + b"".join(b"\nb%d: &b%d [*b%d, *b%d]" % (i, i, i - 1, i - 1) for i in range(1, 40)),
            "aliases",
        ),
        (b"\xff\xfe model", "UTF-8"),
        (b"model: [", "YAML"),
        (b"model: ${oc.env:HOME}", "interpolation"),
    ],
)
def test_a_config_beside_weights_that_cannot_be_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, cause: str
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    assert not read_card(str(tmp_path / "checkpoints" / "model" / "iter_000000001.pt")).run
    assert cause in caplog.text and str(tmp_path / "config.yaml") in caplog.text


def test_a_start_whose_command_had_an_interpolation_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_text("job: {name: mine}")
    (tmp_path / "runs.jsonl").write_text('{"command": ["train", "+a=${recorded_state_range:}"], "frame_rate": 20.0}')
    assert read_card(str(tmp_path / "checkpoints" / "model" / "iter_000000001.pt")).frame_rate == 20.0
    (tmp_path / "runs.jsonl").write_text('{"frame_rate": "${oc.env:HOME}"}')
    assert not read_card(str(tmp_path / "checkpoints" / "model" / "iter_000000001.pt")).starts
    assert caplog.text.count("interpolation") == 1


# Checks ---------------------------------------------------------------------------------------------------------------


def test_a_network_built_otherwise_is_refused(run: Path, tmp_path: Path) -> None:
    path = _exported(_checkpoint(run), tmp_path / "alone.safetensors")
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    config.guardrail_config.enabled = False
    with pytest.raises(CheckpointError, match=r"summed_action_dims=\[1, 2\].*summed_action_scale=0\.5"):
        Video2WorldActionConditionedPipeline.from_config(config, path, use_text_encoder=False, device="cpu")


@pytest.mark.parametrize(
    ("path", "transform"),
    [
        (get_cosmos_predict2_action_conditioned_checkpoint(root="x"), relative_pose(20)),
        (get_cosmos_predict25_checkpoint("2B/robot/action-cond", root="x"), relative_pose(20)),
        ("weights/libero-spatial-2b-19k.pt", controller(7, 20)),
        (get_cosmos_predict25_checkpoint("2B/post-trained", root="x"), None),
        ("mine/model-480p-4fps.pt", None),
    ],
)
def test_released_files_are_known_by_name(path: str, transform: ActionTransform | None) -> None:
    card = read_card(path)
    assert (card.action_transform, card.is_known_by_name) == (transform, transform is not None)
    assert ("scripts.download_checkpoints" in card.problem) == path.startswith("x/")
    with pytest.raises(CheckpointError, match=path):
        require_transform(card)


def test_the_recorded_transform_is_the_one_that_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silent, own = ModelCard(path="own.pt"), ModelCard(path="own.pt", action_transform=OWN)
    with pytest.raises(CheckpointError, match=r"--action_transform.*pipe_config\.action_transform"):
        require_transform(silent)
    for given in (OWN, OWN.to_dict(), OWN.to_json()):
        assert require_transform(silent, given) == require_transform(own, given) == require_transform(own) == OWN
    with pytest.raises(CheckpointError, match=r"own\.pt.*--action_transform .*scale 20"):
        require_transform(own, "controller:20x3")
    of_release = ModelCard(path="own.pt", action_transform=OWN, is_known_by_name=True)
    assert require_transform(of_release, "controller:20x3") == controller(3, 20) and "as asked" in caplog.text
    assert [*resume_differences(own, None)] == [*resume_differences(own, OWN)] == []
    assert len([*resume_differences(own, controller(3, 2.0))]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("relative_pose", relative_pose(20)),
        ("relative_pose:10", relative_pose(10)),
        ("controller", controller(7, 20)),
        ("controller:20x7", controller(7, 20)),
        ("controller:0.5x29", controller(29, 0.5)),
        ("relative_poses", "Did you mean relative_pose"),
        ("controller:x7", "controller:20x7"),
        ("controller:--x7", "controller:20x7"),
        ("relative_pose:20x7", "relative_pose:20"),
        ('{"kind": "controller"}', "scale"),
        ("{kind", "JSON"),
        ('{"kind": "controller", "scale": 5}', "5"),
        ('{"kind": "controller", "scale": ["a"]}', "numbers"),
    ],
)
def test_a_transform_has_a_short_name(text: str, expected: Any) -> None:
    if isinstance(expected, ActionTransform):
        assert parse_transform(text) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        parse_transform(text)
