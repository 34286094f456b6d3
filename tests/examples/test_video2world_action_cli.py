# SPDX-License-Identifier: Apache-2.0
"""examples/video2world_action.py: what it makes of recordings, and what it rejects."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.configs.action_conditioned.networks import get_cosmos_predict2_action_conditioned_pipeline
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.video import media
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.pipelines.action_inputs import LeRobotRecordings, find_annotations
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from cosmos_predict2.world_model.world_model import build_world_model
from examples import action_conditioned
from examples.video2world_action import NOT_RECORDED, main, parse
from imaginaire.config.lazy_config import to_yaml
from imaginaire.errors import ConfigError
from tests.checkpoints.nets import SMALL, transform_tensor
from tests.data import sources_lerobot as made
from tests.examples.records import frames_of, record_of
from tests.test_documentation import ROOT

FAST = ["--num_steps", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three recordings of 19 frames in the Bridge layout, with controller actions too."""
    folder = tmp_path_factory.mktemp("toy") / "bridge"
    write_folder(str(folder), ToyFolder(episodes=3, frames=19, form="bridge", val_fraction=1.0))
    return folder


def weights(
    folder: Path,
    transform: ActionTransform | None,
    network: str = "chunk",
    projection: int | None = None,
    **changes: Any,
) -> str:
    """A run's folder with random weights of the tiny model; the path of its checkpoint."""
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network=network)
    config.net.model_channels, config.net.num_blocks = 32, 1
    if projection is not None:
        config.net.crossattn_proj_in_channels = projection
    if transform is not None:
        config.net.action_dim = transform.dim * (12 if network == "flat" else 1)
    data = {"dataset": changes.pop("dataset", {})}
    for name, value in changes.items():
        setattr(config, name, value)
    net = build_world_model(config, dtype=torch.float32).load().net
    state: dict[str, Any] = {f"net.{name}": value for name, value in net.state_dict().items()}
    if transform is not None:
        state["action_transform"] = transform_tensor(transform)
    path = folder / "checkpoints/model/iter_000000010.pt"
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    run = {"model": {"config": {"pipe_config": config}}, "dataloader_train": data}
    (folder / "config.yaml").write_text(to_yaml(run))
    return str(path)


@pytest.fixture(scope="module")
def toy_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights(tmp_path_factory.mktemp("run") / "run", controller(4, 1.0))


@pytest.fixture(scope="module")
def pose_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights(tmp_path_factory.mktemp("run") / "run", relative_pose())


def annotation(bridge: Path, index: int = 0) -> Path:
    return sorted((bridge / "annotation/val").glob("*.json"))[index]


def test_one_chunk_of_a_recording(bridge: Path, toy_weights: str, tmp_path: Path, caplog: Any) -> None:
    out = tmp_path / "out.mp4"
    caplog.set_level("INFO")
    flags = ["--dit_path", toy_weights, "--input_annotation", str(annotation(bridge)), "--save_path", str(out)]
    assert main([*flags, *FAST, "--contact_sheet"]) == 0
    assert media.scan_video(out) == media.VideoInfo(num_frames=13, fps=10.0, height=48, width=48)
    record = record_of(out)
    assert record["actions"] == "rows of 'toy_actions'" and record["num_frames"] == 13
    assert record["action_transform"]["kind"] == "controller"
    assert (record["solver"], record["dtype"], record["resolution"]) == ("2ab", "float32", "48,48")
    assert "actions: rows of 'toy_actions', as controller of 4 numbers" in caplog.text
    assert media.read_image(out.with_suffix(".png")).shape[0] == 3


def test_a_whole_recording_beside_its_true_video(bridge: Path, pose_weights: str, tmp_path: Path, caplog: Any) -> None:
    out = tmp_path / "out.mp4"
    caplog.set_level("INFO")
    flags = ["--dit_path", pose_weights, "--input_annotation", str(annotation(bridge)), "--save_path", str(out)]
    assert main([*flags, *FAST, "--autoregressive", "--side_by_side", "--save_fps", "4"]) == 0
    assert media.scan_video(out) == media.VideoInfo(num_frames=19, fps=4.0, height=48, width=48)
    assert media.scan_video(tmp_path / "out_side_by_side.mp4").width == 96
    assert "actions: differences of 'state', gripper of 'continuous_gripper_state'" in caplog.text
    both, _ = media.read_video(tmp_path / "out_side_by_side.mp4")
    true, _ = media.read_video(bridge / "videos/val" / annotation(bridge).stem / "rgb.mp4")
    assert (both[..., :48].float() - true.float()).abs().mean() < 6  # the same pictures, encoded once more


def test_a_folder_gives_what_its_recordings_give_alone(bridge: Path, toy_weights: str, tmp_path: Path) -> None:
    flags = ["--dit_path", toy_weights, *FAST]
    folder = ["--input_root", str(bridge), "--input_json_sub_folder", "annotation/val"]
    assert main([*flags, *folder, "--save_root", str(tmp_path / "all"), "--end", "2"]) == 0
    made = sorted((tmp_path / "all").glob("*.mp4"))
    assert [path.stem for path in made] == [annotation(bridge, i).stem for i in range(2)]
    assert find_annotations(str(bridge), "annotation/val", 1, 2) == [str(annotation(bridge, 1))]
    alone = tmp_path / "alone.mp4"
    single = ["--input_annotation", str(annotation(bridge, 1)), "--save_path", str(alone), "--autoregressive"]
    assert main([*flags, *single]) == 0
    difference = media.read_video(alone)[0].float() - media.read_video(made[1])[0].float()
    assert difference.abs().mean() < 0.5  # rounding of sums, before a lossy encoder
    before = made[0].stat().st_mtime_ns
    assert main([*flags, *folder, "--save_root", str(tmp_path / "all")]) == 0  # the third is new
    assert made[0].stat().st_mtime_ns == before and len(list((tmp_path / "all").glob("*.mp4"))) == 3


def test_episodes_of_a_lerobot_data_set_are_imagined_beside_their_true_clips(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")
    cls = f"{LeRobotActionDataset.__module__}.LeRobotActionDataset"
    dataset = dict(_target_=cls, root="gone", camera="front", video_size=[32, 48])
    path = weights(tmp_path / "run", controller(3, 1.0), dataset=dataset)
    flags = ["--dit_path", path, "--input_root", str(ROOT / "tests/data/fixtures/lerobot_v3"), *FAST, "--side_by_side"]
    caplog.set_level("INFO")
    assert main([*flags, "--save_root", str(tmp_path / "out"), "--episodes", "2", "0"]) == 0
    video = tmp_path / "out/episode_000002.mp4"
    assert media.scan_video(video) == media.VideoInfo(num_frames=9, fps=10.0, height=32, width=48)
    both, _ = media.read_video(tmp_path / "out/episode_000000_side_by_side.mp4")
    greys = both[..., :48].float().mean((0, 2, 3)).tolist()
    assert greys == pytest.approx([made.grey(0, k) for k in range(7)], abs=6)
    record = record_of(video)
    assert record["episode"] == 2 and record["video"].endswith(".mp4") and 0 < record["psnr"] < 60
    assert "rows of 'action', camera 'observation.images.front'" in record["actions"]
    assert re.search(r"beside the true clips: [\d.]+ dB .*the first picture for all frames: [\d.]+ dB", caplog.text)
    monkeypatch.setattr(LeRobotRecordings, "chosen", lambda *_: [2, 1, 0])
    assert main([*flags, "--save_root", str(tmp_path / "some"), "--start", "1", "--end", "2"]) == 0
    assert [path.stem for path in (tmp_path / "some").glob("*0?.mp4")] == ["episode_000001"]


def test_a_broken_recording_of_a_folder_is_named_and_the_others_are_made(
    bridge: Path, toy_weights: str, tmp_path: Path, caplog: Any
) -> None:
    root = tmp_path / "data"
    (root / "annotation/val").mkdir(parents=True)
    (root / "videos").symlink_to(bridge / "videos")
    (root / "annotation/val/a.json").write_text("{}")
    (root / "annotation/val/b.json").write_text(annotation(bridge).read_text())
    flags = ["--dit_path", toy_weights, *FAST, "--input_root", str(root), "--input_json_sub_folder", "annotation/val"]
    assert main([*flags, "--single_chunk", "--save_root", str(tmp_path / "out")]) == 1
    assert [path.name for path in (tmp_path / "out").glob("*.mp4")] == ["b.mp4"]
    assert "a.json: " in caplog.text


@pytest.mark.parametrize("network", ["flat", "chunk"])
def test_a_bare_file_tells_which_network_it_is_of(
    network: str, bridge: Path, tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    run = weights(tmp_path / "run", relative_pose(), network, state_t=4)
    file = tmp_path / "weights.pt"
    state = torch.load(run)
    torch.save({key: value for key, value in state.items() if key != "action_transform"}, file)
    flags = ["--model_size", "tiny", "--dit_path", str(file), "--input_annotation", str(annotation(bridge)), *FAST]
    flags += ["--save_path", str(tmp_path / "out.mp4")]
    assert main(flags) == 2
    assert "does not record the transform of the actions" in capsys.readouterr().err
    caplog.set_level("INFO")
    assert main([*flags, "--action_transform", "relative_pose:20"]) == 0
    kind = {"flat": "FlatActionDiT", "chunk": "ChunkActionDiT"}[network]
    assert f"network: {kind} of Predict2" in caplog.text


def test_a_bare_file_of_predict2p5_is_sampled_by_flow_times(bridge: Path, tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "weights.pt"
    torch.save(torch.load(weights(tmp_path / "run", relative_pose(), projection=24)), file)
    torch.save(torch.randn(1, 5, 24), tmp_path / "cr1_empty_string_text_embeddings.pt")
    flags = ["--model_size", "tiny", "--dit_path", str(file), "--input_annotation", str(annotation(bridge)), *FAST]
    caplog.set_level("INFO")
    shas = {frames_of(tmp_path / f"{name}.mp4", main, *flags, "--solver", name) for name in ("unipc", "distilled")}
    assert "network: ChunkActionDiT of Predict2.5" in caplog.text
    assert "text: " in caplog.text and "cr1_empty_string_text_embeddings.pt" in caplog.text
    assert len(shas) == 2
    (tmp_path / "cr1_empty_string_text_embeddings.pt").unlink()
    assert main([*flags, "--save_path", str(tmp_path / "zeros.mp4")]) == 0
    assert "text: zeros" in caplog.text


def test_the_last_rounding_may_be_left_out_and_solvers_chosen(bridge: Path, toy_weights: str, tmp_path: Path) -> None:
    flags = ["--dit_path", toy_weights, "--input_annotation", str(annotation(bridge)), *FAST, "--autoregressive"]
    videos = {}
    for name, more in (
        ("float", ["--float_hand_over"]),
        ("heun", ["--float_hand_over", "--solver", "2heun_edm"]),
        ("five", ["--num_conditional_frames", "5", "--keep_reference"]),
        ("drop", ["--last_chunk", "drop"]),
    ):
        out = tmp_path / f"{name}.mp4"
        assert main([*flags, *more, "--save_path", str(out)]) == 0, name
        videos[name] = media.read_video(out)[0]
    lengths = {name: video.shape[1] for name, video in videos.items()}
    assert lengths == {"float": 19, "heun": 19, "five": 19, "drop": 13}
    assert not torch.equal(videos["float"], videos["heun"])


RECORDED = {  # by flag: another value than the usual one
    "start_frame_idx": "2", "fps_downsample_ratio": "2", "num_conditional_frames": "5", "keep_reference": None,
    "action_source": "action", "action_key": "toy_actions", "resolution": "64,48", "last_chunk": "drop", "seed": "3",
    "solver": "2heun_edm", "num_steps": "3", "chunk_size": "8", "float_hand_over": None, "dtype": "bfloat16",
}  # fmt: skip


def test_the_record_is_enough_to_repeat_a_video(bridge: Path, tmp_path: Path) -> None:
    video = str(bridge / "videos/val" / annotation(bridge).stem / "rgb.mp4")
    path = weights(tmp_path / "run", controller(4, 1.0))
    flags = [text for name, value in RECORDED.items() for text in ((f"--{name}", value) if value else (f"--{name}",))]
    flags += ["--input_annotation", str(annotation(bridge)), "--input_video", video]
    assert main(["--dit_path", path, *flags, "--device", "cpu", "--save_path", str(tmp_path / "one.mp4")]) == 0
    record = record_of(tmp_path / "one.mp4")
    assert media.probe_video(tmp_path / "one.mp4").fps == record["fps"] == 5  # every second frame of 10 in a second
    assert {name for name, value in vars(parse([])).items() if name not in record} == NOT_RECORDED
    assert all(str(record[name]) == (value or "True") for name, value in RECORDED.items())
    known = [name for name in vars(parse([])) if name in record and record[name] not in (None, "", False, [])]
    again = action_conditioned.flags_of({name: record[name] for name in known}, "record")
    again += ["--input_annotation", record["annotation"], "--input_video", record["video"], "--dit_path", path]
    assert frames_of(tmp_path / "two.mp4", main, *again) == record["frames_sha256"]


def test_what_the_weights_were_not_trained_with_is_a_warning(
    bridge: Path, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    def built(*_: Any, **__: Any) -> None:
        raise ConfigError("far enough")

    monkeypatch.setattr(Video2WorldActionConditionedPipeline, "from_config", built)
    path = weights(tmp_path / "run", controller(4, 1.0), dataset={"video_size": [48, 48]})
    five = weights(tmp_path / "five", controller(4, 1.0), max_num_conditional_frames=2)
    flags = ["--input_annotation", str(annotation(bridge)), "--save_path", str(tmp_path / "out.mp4")]
    for more, named in (
        (["--dit_path", path], ""),
        (["--dit_path", path, "--num_conditional_frames", "5"], "max_num_conditional_frames=1"),
        (["--dit_path", path, "--resolution", "64,64"], "frames of 64,64 .*trained at 48,48"),
        (["--dit_path", five, "--num_conditional_frames", "5", "--keep_reference"], ""),
    ):
        caplog.clear()
        assert main([*flags, *more]) == 2
        found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(found) == bool(named) and re.search(named, "".join(found))


# ---- what a user can get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "either --input_annotation FILE or --input_root DIR"),
        (["--input_annotation", "LEROBOT"], "either --input_annotation FILE or --input_root DIR"),
        (["--input_root", "absent"], "absent/annotation/test"),
        (["--input_root", "x", "--start", "-5"], "--start -5"),
        (["--input_root", "x", "--episodes", "3"], r"--episodes \[3\]"),
        (["--input_root", "ABOVE", "--episodes", "3"], "fixtures/lerobot_v"),
        (["--input_root", "ABOVE"], "annotation/test does not exist. .*fixtures/lerobot_v"),
        (["--input_root", "LEROBOT", "--camera_id", "1"], "--camera_id 1"),
        (["--input_root", "LEROBOT", "--action_source", "state"], "--action_source state"),
        (["--input_root", "LEROBOT", "--camera", "front"], "3 numbers, but this model was trained with 4"),
        (["A", "absent.json"], "absent.json"),
        (["A", "ANNOTATION", "--chunk_size", "10"], "--chunk_size 10"),
        (["A", "ANNOTATION", "--num_gpus", "2"], "--num_gpus 2"),
        (["A", "ANNOTATION", "--num_latent_conditional_frames", "0"], "--num_latent_conditional_frames 0"),
        (["A", "ANNOTATION", "--action_source", "state"], "--action_source state"),
        (["A", "ANNOTATION", "--action_key", "state"], "takes actions of 4 numbers.*'state' of 6"),
        (["A", "ANNOTATION", "--action_transform", "relative_pose"], "was trained with actions"),
        (["A", "ANNOTATION", "--use_quat", "--action_transform", "controller"], "--use_quat: give one of them"),
        (["A", "ANNOTATION", "--input_video", "absent.mp4"], "There is no input file absent.mp4"),
        (["A", "ANNOTATION", "--input_video", "SHORT"], "18 rows of 'toy_actions'.*short.mp4 has 7. "),
        (["A", "ANNOTATION", "--input_video", "PICTURE", "--side_by_side"], "--side_by_side"),
        (["A", "ANNOTATION", "--save_path", "a_file/x.mp4"], "no file can be made in the folder a_file"),
        (["A", "ANNOTATION", "--camera_id", "3"], "camera 3 is asked for.*--camera_id"),
        (["A", "ANNOTATION", "--start_frame_idx", "18"], "--start_frame_idx 18"),
        (["A", "ANNOTATION", "--resolution", "40,40"], "multiples of 16"),
        (["A", "ANNOTATION", "--resolution", "big"], "--resolution big"),
        (["A", "ANNOTATION", "--prompt", "push"], "encode_prompts"),
        (["A", "ANNOTATION", "--solver", "unipc"], "--solver unipc"),
        (["A", "ANNOTATION", "--input_video", "VIDEO", "--save_path", "VIDEO"], "would replace"),
        (["A", "ANNOTATION", "--action_load_fn", "absent.f"], "--action_load_fn absent.f"),
        (["A", "ANNOTATION", "--action_load_fn", "os.getcwd"], "--action_load_fn os.getcwd"),
        (["A", "ANNOTATION", "--keep_reference"], "--keep_reference"),
        (["A", "ANNOTATION", "--model_size", "2B"], "--model_size 2B"),
    ],
)
def test_mistakes_are_errors_before_anything_is_built(
    flags: list[str], words: str, bridge: Path, tiny_run: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("the pipeline was built")

    monkeypatch.setattr(Video2WorldActionConditionedPipeline, "from_config", built)
    monkeypatch.chdir(tmp_path)
    named = {"A": "--input_annotation", "ANNOTATION": str(annotation(bridge))}
    named |= {"LEROBOT": str(ROOT / "tests/data/fixtures/lerobot_v3"), "ABOVE": str(ROOT / "tests/data/fixtures")}
    named |= {"SHORT": str(tmp_path / "short.mp4"), "PICTURE": str(tmp_path / "first.png")}
    named["VIDEO"] = str(bridge / "videos/val" / annotation(bridge).stem / "rgb.mp4")
    media.write_video(named["SHORT"], torch.zeros(3, 7, 48, 48, dtype=torch.uint8), 10)
    media.write_image(named["PICTURE"], torch.zeros(3, 48, 48, dtype=torch.uint8))
    (tmp_path / "a_file").touch()
    assert main(["--dit_path", tiny_run, *[named.get(flag, flag) for flag in flags]]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error), error


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of a network as large as the tiny model's."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    path = weights(folder, controller(4, 1.0))
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    net = build_world_model(config, dtype=torch.float32).load().net
    state: dict[str, Any] = {f"net.{name}": value for name, value in net.state_dict().items()}
    torch.save({**state, "action_transform": transform_tensor(controller(4, 1.0))}, path)
    (folder / "config.yaml").write_text(to_yaml({"model": {"config": {"pipe_config": config}}}))
    return path


def test_weights_without_actions_are_refused_before_a_transform_is_asked_for(
    bridge: Path, tmp_path: Path, capsys: Any
) -> None:
    net = Video2WorldDiT(**SMALL)
    torch.save({f"net.{name}": value for name, value in net.state_dict().items()}, tmp_path / "weights.pt")
    flags = ["--model_size", "tiny", "--input_annotation", str(annotation(bridge))]
    assert main([*flags, "--dit_path", str(tmp_path / "weights.pt"), "--save_path", str(tmp_path / "out.mp4")]) == 2
    error = capsys.readouterr().err
    assert "without actions: use examples/video2world.py" in error and "--action_transform" not in error


def test_settings_in_a_file_are_the_same_flags(bridge: Path, pose_weights: str, tmp_path: Path, capsys: Any) -> None:
    settings = {
        "name": "toy", "input_root": str(bridge), "input_json_sub_folder": "annotation/val", "end": 1, "guidance": 0,
        "single_chunk": True, "reverse": False, "num_latent_conditional_frames": 1, "resolution": "none",
        "action_load_fn": "cosmos_predict2.action_conditioned.load_default_action_fn", "save_fps": 5,
    }  # fmt: skip
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings))
    flags = ["-i", str(file), "-o", str(tmp_path / "out"), "--dit_path", pose_weights, *FAST]
    assert action_conditioned.main(flags) == 0
    made = next((tmp_path / "out").glob("*.mp4"))
    assert (made.stem, media.scan_video(made).fps) == (annotation(bridge).stem, 5.0)
    file.write_text(json.dumps({**settings, "chunksize": 12}))
    assert action_conditioned.main(flags) == 2
    assert re.search("has the key 'chunksize'.*chunk_size", capsys.readouterr().err)


def test_lists_and_objects_of_settings_are_flags_too() -> None:
    settings = {"resolution": [256, 320], "lora": ["a", "b:0.5"], "action_transform": {"kind": "controller"}, "seed": 0}
    flags = parse(action_conditioned.flags_of({**settings, "prompt": "--lift", "overwrite": True}, "x.json"))
    assert (flags.resolution, flags.lora, flags.prompt, flags.overwrite) == ("256,320", ["a", "b:0.5"], "--lift", True)
    assert json.loads(flags.action_transform) == {"kind": "controller"}
    with pytest.raises(ConfigError, match=r"'overwrite' is .false.; true or false"):
        action_conditioned.flags_of({"overwrite": "false"}, "x.json")
    published = action_conditioned.flags_of({"model": "2B/robot/action-cond"}, "x.json")
    assert published == ["--save_fps=20", "--action_source=state"], "where a file says nothing"
    with pytest.raises(ConfigError, match="has the model 2B/robot/multiview-agibot, which is not here"):
        action_conditioned.flags_of({"model": "2B/robot/multiview-agibot"}, "x.json")


def test_code_that_settings_name_is_run_only_where_that_is_confirmed(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"input_root": "none", "action_load_fn": "my_actions.loader"}))
    assert action_conditioned.main(["-i", str(file)]) == 2
    assert "action_load_fn my_actions.loader, code that would be run" in capsys.readouterr().err
    assert action_conditioned.main(["-i", str(file), "--trust_action_load_fn"]) == 2
    assert "none" in (error := capsys.readouterr().err) and "my_actions" not in error  # it went on to look for the data
    file.write_text(json.dumps({"import": ["my_actions"]}))
    assert action_conditioned.main(["-i", str(file), "--trust_action_load_fn"]) == 2
    assert "'import'" in capsys.readouterr().err


def test_code_of_ones_own_may_give_the_actions(
    bridge: Path, toy_weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_actions.py").write_text(
        "import numpy\n"
        "def loader():\n"
        "    def load(annotation, video_path, args):\n"
        "        frame = numpy.full((48, 48, 3), 90, numpy.uint8)\n"
        "        return {'actions': numpy.zeros((14, 4)), 'initial_frame': frame, 'video_path': video_path}\n"
        "    return load\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out.mp4"
    flags = ["--dit_path", toy_weights, "--input_annotation", str(annotation(bridge)), *FAST, "--autoregressive"]
    assert main([*flags, "--save_path", str(out), "--action_load_fn", "my_actions.loader"]) == 0
    assert media.scan_video(out).num_frames == 15
