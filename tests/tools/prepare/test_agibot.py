# SPDX-License-Identifier: Apache-2.0
"""AgiBotWorld-Alpha: fetched from a hub on this machine, cleaned, cut into windows and captioned."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cosmos_predict2.data.video.media import probe_video, read_video
from cosmos_predict2.tools.prepare.agibot import episodes as agibot
from cosmos_predict2.tools.prepare.agibot.captions import read_task_info, write_captions
from cosmos_predict2.tools.prepare.agibot.episodes import AgibotSource
from cosmos_predict2.tools.prepare.agibot.windows import WindowName, cut_windows, split
from imaginaire.errors import ConfigError, DataError
from scripts import prepare_agibot_fisheye_data as command
from tests.checkpoints.hub_server import Hub
from tests.data import sources_agibot as sources
from tests.data.sources_agibot import CAMERA, EPISODES
from tests.programs import HANG_S
from tests.tools.prepare.conftest import names

REPOSITORY = Path(__file__).parents[3]
WINDOW = "task_327_episode_{}_window_0_frame_0-59"


def _source(tmp_path: Path, camera: str = CAMERA) -> AgibotSource:
    return AgibotSource(tmp_path / "agibot", ("327",), camera)


def _run(tmp_path: Path, *flags: str) -> int:
    return command.run(command.parser.parse_args(["--source", str(tmp_path / "agibot"), "--workers", "0", *flags]))


# Fetching -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(hub: Hub) -> Hub:
    hub.repositories[agibot.REPOSITORY] = sources.repository()
    return hub


KEPT = {f"observations/327/{episode}/videos/{CAMERA}.mp4" for episode in EPISODES} | {"task_info/task_327.json"}
ARCHIVES = {f"observations/327/{episode}-{episode}.tar" for episode in EPISODES}
MARKERS = {f"observations/327/.unpacked/{episode}-{episode}.tar.json" for episode in EPISODES}


def test_one_camera_of_every_episode_arrives_and_a_second_call_fetches_nothing(hub: Hub, tmp_path: Path) -> None:
    assert _run(tmp_path) == 0
    assert names(tmp_path / "agibot") == KEPT | MARKERS
    assert not any("328" in name or "README" in name for name in hub.asked)
    hub.asked.clear()
    assert _run(tmp_path) == 0 and not hub.asked
    (tmp_path / "agibot/observations/327/685393/videos" / f"{CAMERA}.mp4").unlink()
    assert _run(tmp_path) == 0 and [name.rpartition("/")[2] for name in hub.asked] == ["685393-685393.tar"]
    assert names(tmp_path / "agibot") == KEPT | MARKERS


def test_archives_stay_where_asked(hub: Hub, tmp_path: Path) -> None:
    assert _run(tmp_path, "--keep_tar") == 0
    assert names(tmp_path / "agibot") == KEPT | MARKERS | ARCHIVES
    hub.asked.clear()
    assert _run(tmp_path) == 0 and not hub.asked  # and without the flag they go
    assert names(tmp_path / "agibot") == KEPT | MARKERS


def test_a_dry_run_only_says_what_would_be_fetched(hub: Hub, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    assert _run(tmp_path, "--dry_run") == 0
    assert "would fetch and unpack observations/327/685393-685393.tar" in caplog.text and "of disk" in caplog.text
    assert not hub.asked and not (tmp_path / "agibot").exists()


def test_a_wrong_camera_is_told_before_anything_is_unpacked_or_deleted(hub: Hub, tmp_path: Path, caplog: Any) -> None:
    assert _run(tmp_path, "--camera", "head_center_fisheye") == 1
    assert f"Did you mean {CAMERA}?" in caplog.text
    assert names(tmp_path / "agibot") == ARCHIVES | {"task_info/task_327.json"}


def test_an_episode_without_the_camera_keeps_all_it_has(hub: Hub, tmp_path: Path, caplog: Any) -> None:
    files = sources.episode_files(("1",)) | sources.episode_files(("2",), cameras=("head_color",))
    hub.repositories[agibot.REPOSITORY]["observations/327/1-2.tar"] = sources.archive(files)
    assert _run(tmp_path) == 1
    assert f"observations/327/2/videos/{CAMERA}.mp4 is missing" in caplog.text and "head_color" in caplog.text
    there = {name for name in names(tmp_path / "agibot/observations/327") if name.startswith("2/")}
    assert there == {name for name in files if name.startswith("2/")}


def test_a_malicious_archive_is_refused_whole_and_the_others_are_unpacked(
    hub: Hub, tmp_path: Path, caplog: Any
) -> None:
    evil = sources.archive({**sources.episode_files(("9",)), "../../../evil": b"x"})
    hub.repositories[agibot.REPOSITORY]["observations/327/9-9.tar"] = evil
    assert _run(tmp_path) == 1
    assert "member '../../../evil' is refused" in caplog.text
    there = names(tmp_path / "agibot")
    assert there >= KEPT and not any("/9/" in name or "evil" in name for name in there)
    assert not (tmp_path / "evil").exists()


def test_an_archive_does_not_write_among_the_others(hub: Hub, tmp_path: Path) -> None:
    forged = {f".unpacked/{episode}-{episode}.tar.json": b"{}" for episode in EPISODES}
    files = sources.episode_files(("9",)) | forged | {"685393-685393.tar": b"x", "9/note.txt": b"kept"}
    hub.repositories[agibot.REPOSITORY]["observations/327/9-9.tar"] = sources.archive(files)
    assert _run(tmp_path, "--keep_tar") == 0
    place = tmp_path / "agibot/observations/327"
    assert all(json.loads((place / name).read_text())["episodes"] for name in forged)
    assert (place / "685393-685393.tar").stat().st_size > 1 and (place / "9/note.txt").read_bytes() == b"kept"


def test_another_layout_in_an_archive_is_named(hub: Hub, tmp_path: Path, caplog: Any) -> None:
    files = {f"327/5/videos/{CAMERA}.mp4": b"x"}
    hub.repositories[agibot.REPOSITORY]["observations/327/5-5.tar"] = sources.archive(files)
    assert _run(tmp_path) == 1
    assert f"Expected <episode>/videos/<camera>.mp4, found 327/5/videos/{CAMERA}.mp4" in caplog.text


def test_a_full_disk_shows_first_and_the_need_is_not_that_of_all_archives(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imaginaire.storage.free_bytes", lambda path: 10**6)
    with pytest.raises(DataError, match="Make room"):
        _run(tmp_path)
    assert not hub.asked
    listing = agibot.repositories.Listing("r", "main", "dataset", "", {f"{i}.tar": 10 * 10**9 for i in range(10)})
    todo = [agibot._Archive(listing, name, _source(tmp_path), False) for name in listing.sizes]
    assert agibot._needed_bytes(todo, 2, keep_tar=False) == 25 * 10**9 + agibot.repositories.RESERVE
    assert agibot._needed_bytes(todo, 2, keep_tar=True) == 105 * 10**9 + agibot.repositories.RESERVE
    assert agibot._needed_bytes([], 2, keep_tar=True) == 0


def test_a_command_stopped_while_it_unpacked_goes_on(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(agibot, "extract_checked", stopped)
        _run(tmp_path)
    hub.asked.clear()
    assert _run(tmp_path) == 0
    assert names(tmp_path / "agibot") == KEPT | MARKERS
    assert [name.rpartition("/")[2] for name in hub.asked] == ["685393-685393.tar"]  # the first one had arrived


# Cleaning -------------------------------------------------------------------------------------------------------------


def test_cleaning_leaves_one_camera_and_can_be_repeated(tmp_path: Path) -> None:
    sources.write_tree(tmp_path)
    before = names(tmp_path)
    assert _run(tmp_path, "--delete_only", "--dry-run") == 0 and names(tmp_path) == before
    for _ in range(2):
        assert _run(tmp_path, "--delete_only") == 0
        assert names(tmp_path / "agibot") == KEPT
        assert not (tmp_path / "agibot/observations/327/685393/depth").exists()


def test_cleaning_touches_no_episode_without_the_camera(tmp_path: Path, caplog: Any) -> None:
    files = sources.episode_files(("1",)) | sources.episode_files(("2",), cameras=("head_color",))
    files |= sources.episode_files(("3",)) | {f"3/videos/{CAMERA}.mp4": b""}
    sources.write_tree(tmp_path, files)
    assert _run(tmp_path, "--delete_only") == 1
    there = names(tmp_path / "agibot/observations/327")
    assert {n for n in there if not n.startswith("1/")} == {n for n in files if not n.startswith("1/")}
    assert {n for n in there if n.startswith("1/")} == {f"1/videos/{CAMERA}.mp4"}
    assert f"2/videos/{CAMERA}.mp4 is missing" in caplog.text and f"3/videos/{CAMERA}.mp4 is empty" in caplog.text


def test_cleaning_does_not_follow_links(tmp_path: Path) -> None:
    sources.write_tree(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file.mp4").write_bytes(b"mine")
    episode = tmp_path / "agibot/observations/327/685393"
    (episode / "linked").symlink_to(tmp_path / "mine")
    (episode / "videos/linked").symlink_to(tmp_path / "mine")
    assert _run(tmp_path, "--delete_only") == 0
    assert (tmp_path / "mine/file.mp4").exists() and not (episode / "linked").is_symlink()


@pytest.mark.parametrize(
    ("flags", "error", "named"),
    [
        ("--val_episode_ids 1", ConfigError, "--split_only"),
        ("--split_only --window_size 8", ConfigError, "--window_size"),
        ("--split_only --task_ids 372", DataError, "327"),
        ("--delete_only --source absent", DataError, "absent/observations/327"),
    ],
)
def test_wrong_flags_are_named(flags: str, error: type[Exception], named: str, tmp_path: Path) -> None:
    sources.write_tree(tmp_path)
    with pytest.raises(error, match=named):
        _run(tmp_path, *flags.split())


# Windows --------------------------------------------------------------------------------------------------------------


def test_windows_follow_each_other_and_cover_the_episode() -> None:
    draw = random.Random(0)
    for _ in range(300):
        size = draw.uniform(0.5, 10)
        last = draw.uniform(size, 3 * size)
        duration = draw.uniform(0.1, 60)
        windows = cut_windows(duration, size, last)
        assert windows[0].start == 0 and windows[-1].end == duration
        assert all(a.end == b.start for a, b in pairwise(windows))
        assert all(abs(window.end - window.start - size) < 1e-9 for window in windows[:-1])
        assert windows[-1].start < windows[-1].end <= windows[-1].start + last
    assert cut_windows(0.0) == []


def test_an_episode_is_cut_at_the_frames_that_the_names_say(tmp_path: Path) -> None:
    sources.write_tree(tmp_path, sources.episode_files(("685393",), seconds=3.5))
    outcome = split(_source(tmp_path), window_size=1.0, min_last=1.2, workers=0)
    (cut,) = outcome.results
    assert [clip.stem.partition("frame_")[2] for clip in cut.clips] == ["0-29", "30-59", "60-89", "90-104"]
    for stem in (clip.stem for clip in cut.clips):
        _has_its_frames(tmp_path / f"agibot_{CAMERA}/train/videos/{stem}.mp4", of=105)


@pytest.mark.parametrize(("seconds", "num_short"), [(5.0, 0), (8.0, 1)])
def test_windows_that_are_too_short_to_train_on_are_named(
    seconds: float, num_short: int, tmp_path: Path, caplog: Any
) -> None:
    sources.write_tree(tmp_path, sources.episode_files(("685393",), seconds=seconds))
    assert _run(tmp_path, "--split-only", "--min_last_window", "5") == 0
    told = [record.getMessage() for record in caplog.records if "fewer than the 93 frames" in record.getMessage()]
    assert len(told) == num_short
    for line in told:
        assert "1 of 2 windows" in line and "_window_1_frame_150-239.mp4" in line and "skip_bad_samples" in line


def _has_its_frames(path: Path, of: int) -> None:
    """The bytes may differ from one encoding to the next: x264 reads memory that nobody wrote."""
    clip = WindowName.of(path.stem)
    assert clip is not None and clip.stem == path.stem
    video, fps = read_video(path)
    expected = sources.episode_frames(of)[:, clip.first : clip.last + 1].float()
    assert fps == 30 and video.shape == expected.shape
    error = (video.float() - expected).square().mean()
    assert 10 * torch.log10(255**2 / error) > 35  # one frame further: 17


def test_a_second_split_cuts_nothing_and_what_is_missing_is_cut_alone(tmp_path: Path) -> None:
    sources.write_tree(tmp_path, sources.episode_files(("685393",), seconds=3))
    how = dict(window_size=1.0, min_last=1.0, workers=0)
    assert split(_source(tmp_path), **how).results[0].num_written == 3
    videos = sorted((tmp_path / f"agibot_{CAMERA}/train/videos").iterdir())
    times = [path.stat().st_mtime_ns for path in videos]
    videos[1].unlink()
    assert split(_source(tmp_path), **how, dry_run=True).results[0].num_written == 1
    assert not videos[1].exists()
    assert split(_source(tmp_path), **how).results[0].num_written == 1
    _has_its_frames(videos[1], of=90)
    assert [videos[i].stat().st_mtime_ns for i in (0, 2)] == [times[0], times[2]]


def test_validation_episodes_go_to_val_and_move_when_the_choice_changes(tmp_path: Path) -> None:
    sources.write_tree(tmp_path)
    output = tmp_path / f"agibot_{CAMERA}"
    train, val = (WINDOW.format(episode) for episode in EPISODES)
    assert _run(tmp_path, "--split_only", "--val_episode_ids", "685393") == 0
    assert names(output) == {
        f"train/videos/{train}.mp4", f"train/metas/{train}.txt", f"val/videos/{val}.mp4", f"val/metas/{val}.txt",
    }  # fmt: skip
    (output / "val/t5_xxl").mkdir()
    (output / f"val/t5_xxl/{val}.pickle").write_bytes(b"embedding")
    assert _run(tmp_path, "--split_only", "--val_episode_ids", "648642") == 0
    assert names(output) == {
        f"val/videos/{train}.mp4", f"val/metas/{train}.txt", f"train/videos/{val}.mp4", f"train/metas/{val}.txt",
    }  # fmt: skip


def test_an_unknown_validation_episode_is_a_fault_and_the_rest_is_cut(tmp_path: Path, caplog: Any) -> None:
    sources.write_tree(tmp_path)
    assert _run(tmp_path, "--split_only", "--val_episode_ids", "685394") == 1
    assert "there is no episode 685394. Did you mean 685393" in caplog.text
    assert len(names(tmp_path / f"agibot_{CAMERA}/train/videos")) == 2


def test_windows_of_other_settings_are_not_mixed(tmp_path: Path, caplog: Any) -> None:
    sources.write_tree(tmp_path)
    assert _run(tmp_path, "--split_only") == 0
    assert _run(tmp_path, "--split_only", "--window_size", "1", "--min_last_window", "1") == 1
    assert "was cut with other settings than --window_size 1 --min_last_window 1" in caplog.text
    assert len(names(tmp_path / f"agibot_{CAMERA}/train/videos")) == 2


def test_a_broken_a_short_and_a_missing_video_are_named_and_the_others_cut(tmp_path: Path, caplog: Any) -> None:
    whole = sources.video_bytes(60)
    files = sources.episode_files(("1", "2", "3")) | sources.episode_files(("4",), cameras=("head_color",))
    files[f"2/videos/{CAMERA}.mp4"] = whole[: len(whole) // 2]
    files[f"3/videos/{CAMERA}.mp4"] = b"not a video"
    sources.write_tree(tmp_path, files)
    assert _run(tmp_path, "--split_only") == 1
    for episode in ("2", "3", "4"):
        assert f"observations/327/{episode}/videos/{CAMERA}.mp4" in caplog.text
    assert names(tmp_path / f"agibot_{CAMERA}/train/videos") == {f"{WINDOW.format('1')}.mp4"}


def test_odd_rates_keep_every_frame_once(tmp_path: Path) -> None:
    data_dir = sources.write_tree(tmp_path, {})
    path = data_dir / "observations/327/7/videos" / f"{CAMERA}.mp4"
    path.parent.mkdir(parents=True)
    path.write_bytes(sources.video_bytes(75, fps=29.97))
    (cut,) = split(_source(tmp_path), window_size=1.0, min_last=1.0, workers=0).results
    bounds = [(clip.first, clip.last) for clip in cut.clips]
    assert bounds[0][0] == 0 and bounds[-1][1] == 74 and all(a[1] + 1 == b[0] for a, b in pairwise(bounds))
    for clip in cut.clips:
        info = probe_video(tmp_path / f"agibot_{CAMERA}/train/videos/{clip.stem}.mp4")
        assert info.num_frames == clip.last + 1 - clip.first and abs(info.fps - 29.97) < 1e-3


# Captions -------------------------------------------------------------------------------------------------------------


def _cut(tmp_path: Path, info: bytes | None = None) -> AgibotSource:
    sources.write_tree(tmp_path, info=info)
    for i, episode in enumerate(EPISODES):
        videos = tmp_path / f"agibot_{CAMERA}" / ("train", "val")[i] / "videos"
        videos.mkdir(parents=True)
        (videos / f"{WINDOW.format(episode)}.mp4").write_bytes(b"")
    return _source(tmp_path)


def _captions(source: AgibotSource) -> dict[str, str]:
    return {path.relative_to(source.output).as_posix(): path.read_text() for path in source.output.rglob("*.txt")}


def _write_list(source: AgibotSource, *lines: Any) -> None:
    path = source.output.parent / f"agibot_{CAMERA}.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")


def _line(episode: str, caption: str, episode_id: Any = None) -> dict[str, Any]:
    return {"video_clip": WINDOW.format(episode), "caption": caption, "episode_id": episode_id or int(episode)}


@pytest.mark.parametrize("label", ["label_info", "lable_info"])
def test_captions_come_from_the_task_where_there_is_no_list(label: str, tmp_path: Path) -> None:
    source = _cut(tmp_path, sources.task_info(label=label))
    assert write_captions(source) == []
    assert _captions(source) == {
        f"{split}/metas/{WINDOW.format(episode)}.txt": (
            f"The robot of {episode} is in front of a shelf. It takes a mushroom. It places the mushroom."
        )
        for split, episode in zip(("train", "val"), EPISODES)
    }


def test_only_actions_of_the_window_are_in_its_caption(tmp_path: Path) -> None:
    path = tmp_path / "task_327.json"
    path.write_bytes(sources.task_info())
    episode = read_task_info(path)["685393"]
    assert "takes" in episode.caption(0, 19) and "places" not in episode.caption(0, 19)
    assert "places" in episode.caption(0, 20) and "takes" not in episode.caption(20, 40)
    assert episode.caption(60, 90) == "The robot of 685393 is in front of a shelf."


@pytest.mark.parametrize("as_number", [True, False])
def test_a_list_comes_first_whether_episodes_are_numbers_or_text(as_number: bool, tmp_path: Path) -> None:
    source = _cut(tmp_path)
    line = _line("685393", "From the list.", 685393 if as_number else "685393")
    _write_list(source, line, _line("111", "Of no window."))
    assert write_captions(source) == []
    captions = _captions(source)
    assert captions[f"val/metas/{WINDOW.format('685393')}.txt"] == "From the list."
    assert captions[f"train/metas/{WINDOW.format('648642')}.txt"].startswith("The robot of 648642")
    _write_list(source, _line("685393", "Corrected."))
    write_captions(source)
    assert _captions(source)[f"val/metas/{WINDOW.format('685393')}.txt"] == "Corrected."


def test_texts_changed_by_hand_stay(tmp_path: Path) -> None:
    source = _cut(tmp_path)
    write_captions(source)
    path = source.output / f"val/metas/{WINDOW.format('685393')}.txt"
    path.write_text("By hand.")
    assert write_captions(source) == [] and path.read_text() == "By hand."


def test_broken_lines_of_the_list_are_named(tmp_path: Path) -> None:
    source = _cut(tmp_path)
    _write_list(
        source, "{", _line("685393", "x", 648642), {"video": "x", "text": "y"}, _line("648642", " "),
        _line("685393", "Good."),
    )  # fmt: skip
    faults = write_captions(source)
    assert [fault.partition(".jsonl:")[2].partition(" ")[0].rstrip(":") for fault in faults] == ["1", "2", "3", "4"]
    assert "expected an object with the keys video_clip" in faults[2] and "is empty" in faults[3]
    assert _captions(source)[f"val/metas/{WINDOW.format('685393')}.txt"] == "Good."


def test_no_caption_at_all_is_a_fault(tmp_path: Path) -> None:
    source = _cut(tmp_path, json.dumps([{"episode": 1, "text": "no"}]).encode())
    faults = write_captions(source)
    assert len(faults) == 2 and "expected an object with the keys episode_id" in faults[0]
    assert "No window has a caption" in faults[1] and not _captions(source)
    source.task_info("327").unlink()
    (fault,) = write_captions(source)
    assert "No window has a caption" in fault


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"327": []}, "a list of episodes"),
        ([{"episode_id": 1, "init_scene_text": "s", "label_info": {"actions": []}}], "action_config"),
        (
            [{"episode_id": 1, "init_scene_text": "s", "label_info": {"action_config": [
                {"start_frame": "a", "end_frame": 2, "action_text": "x"}]}}],
            "are not frame numbers",
        ),
    ],
)  # fmt: skip
def test_another_layout_of_the_description_is_told(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "task_1.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_task_info(path)


# A kill ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_split_leaves_whole_windows_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = tuple(str(i) for i in range(4))
    (tmp_path / "datasets").mkdir()
    files = sources.episode_files(episodes, seconds=10)
    sources.write_tree(tmp_path / "datasets", files, sources.task_info(episodes))
    flags = ["--split_only", "--window_size", "1", "--min_last_window", "1"]
    script = str(REPOSITORY / "scripts" / "prepare_agibot_fisheye_data.py")
    videos = tmp_path / f"datasets/agibot_{CAMERA}/train/videos"
    running = subprocess.Popen([sys.executable, script, *flags, "--workers", "2"], cwd=tmp_path, start_new_session=True)
    deadline = time.monotonic() + HANG_S
    while not list(videos.glob("*.mp4")) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = psutil.Process(running.pid).children(recursive=True)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    psutil.wait_procs(workers, timeout=30)  # the files of one that is still about to end would be left alone
    there = {path: path.stat().st_mtime_ns for path in videos.glob("*.mp4")}
    assert 0 < len(there) < 40
    assert all(probe_video(path).num_frames == 30 for path in there)
    monkeypatch.chdir(tmp_path)
    assert command.run(command.parser.parse_args([*flags, "--workers", "0"])) == 0
    windows = sorted(videos.iterdir())
    assert len(windows) == 40 and all(probe_video(path).num_frames == 30 for path in windows)  # and no temporary file
    assert all(path.stat().st_mtime_ns == when for path, when in there.items())
