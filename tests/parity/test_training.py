# SPDX-License-Identifier: Apache-2.0
"""Windows and actions of recordings, the order of samples and learning rates of training, against golden values."""

import numpy
import pytest

from cosmos_predict2.actions.rotations import euler_to_matrix, matrix_to_euler
from cosmos_predict2.actions.transforms import ActionTransform, actions_from_field, pose_differences
from cosmos_predict2.data.clip_dataset import Windows
from cosmos_predict2.data.loaders import get_sampler
from cosmos_predict2.data.samples import FrameRule
from cosmos_predict2.tools.prepare.agibot.windows import WindowName, cut_windows
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import DataError
from imaginaire.optim.schedules import lambda_cosine, lambda_linear
from tests.goldens import Value

AREA = "training"
RATE = 30.0  # of consecutive frames any will do


def _draws(total: int, num_frames: int, count: int) -> list[list[int]]:
    rule = FrameRule(num_frames=num_frames, sampling="reference")
    return [rule.choose(total, RATE, numpy.random.randint) for _ in range(count)]


@pytest.mark.golden_cases("frame_selection.json", "video_dataset")
def test_the_reference_draws_are_repeated(case: Value) -> None:
    total, num_frames = case["total_frames"].use(), case["num_frames"].use()
    numpy.random.seed(case["numpy_seed"].use())
    draws: list[list[int]] = []
    if total < num_frames:
        with pytest.raises(DataError, match=f"{total} frames, but num_frames={num_frames} needs {num_frames}"):
            _draws(total, num_frames, 1)
    elif total == num_frames:  # where the reference fails, the one start that there is
        assert _draws(total, num_frames, 3) == 3 * [list(range(total))]
    else:
        draws = _draws(total, num_frames, len(case["start_frames"]))
        assert all(frames == list(range(frames[0], frames[0] + num_frames)) for frames in draws)
    case["start_frames"].compare([frames[0] for frames in draws])
    case["reference_error"].compare(None if total > num_frames else "ValueError")


@pytest.mark.golden_cases("frame_selection.json", "video_dataset")
def test_our_own_draw_reaches_every_start_and_no_other(case: Value) -> None:
    total, num_frames = case["total_frames"].use(), case["num_frames"].use()
    for start in range(total - num_frames + 1):

        def draw(count: int, start: int = start) -> int:
            assert count == total - num_frames + 1
            return start

        frames = FrameRule(num_frames=num_frames).choose(total, RATE, draw)
        assert frames == list(range(start, start + num_frames))


@pytest.mark.golden_cases("frame_selection.json", "action_windows")
def test_the_windows_of_an_annotation_match(case: Value) -> None:
    windows = windows_of(
        case["n_states"].use(),
        case["num_frames"].use(),
        case["sequence_interval"].use(),
        case["start_frame_interval"].use(),
    )
    case["count"].compare(len(windows))
    case["first"].compare(windows[0] if windows else None)
    case["last"].compare(windows[-1] if windows else None)
    case["all_starts"].compare([frames[0] for frames in windows])


def windows_of(num_states: int, num_frames: int, stride: int, every: int) -> list[list[int]]:
    """The frames of all windows of one recording."""
    try:
        windows = Windows([num_states], num_frames, stride, every, what="recording")
    except DataError:
        return []
    return [windows[i][1].tolist() for i in range(len(windows))]


SCALED = 2e-5  # float32 numbers up to 20 pi
AS_MATRICES = 1e-5
NEAR = 0.05  # radians from a pitch of +-pi/2, where rounding moves roll and yaw


def _compare(value: Value, actual: numpy.ndarray, scale: numpy.ndarray) -> None:
    """Numbers within the tolerance; angles near the singularity may be others of the same rotation."""
    expected = numpy.asarray(value.expected())
    assert actual.shape == expected.shape, value.entry
    differs = numpy.abs(actual - expected) > SCALED
    assert not differs[:, [0, 1, 2, *range(6, actual.shape[1])]].any(), value.entry
    for row in numpy.flatnonzero(differs.any(axis=1)):
        found, wanted = (actions[row, 3:6] / scale[3:6] for actions in (actual, expected))
        assert abs(abs(wanted[1]) - numpy.pi / 2) < NEAR, f"{value.entry}/{row}: {found}, expected {wanted}"
        assert numpy.allclose(euler_to_matrix(found), euler_to_matrix(wanted), rtol=0, atol=AS_MATRICES), value.entry


@pytest.mark.golden_cases("actions.json", "cases")
def test_windows_and_actions_match(case: Value) -> None:
    annotation = case["annotation"].use()
    states, gripper = (numpy.asarray(annotation[key]) for key in ("state", "continuous_gripper_state"))
    accumulate = "window" if case["accumulate_action"].use() else None
    transform = ActionTransform(kind="relative_pose", scale=case["scale"].use(), accumulate=accumulate)
    windows = windows_of(
        len(states), case["num_frames"].use(), case["sequence_interval"].use(), case["start_frame_interval"].use()
    )
    assert len(windows) == len(case["samples"])
    for frames, sample in zip(windows, case["samples"]):
        sample["frame_ids"].compare(frames)
        raw = pose_differences(states[frames], gripper[frames], accumulate=accumulate)
        _compare(sample["action"], transform.apply(raw), numpy.asarray(transform.scale))


@pytest.mark.golden_cases("actions.json", "cases")
def test_the_recorded_actions_match(case: Value) -> None:
    annotation = case["annotation"].use()
    scale = case["scale"].use()
    actions = actions_from_field(
        annotation["action"], annotation["continuous_gripper_state"], scale=scale[0], gripper_scale=scale[-1]
    )
    case["inference_actions_from_action_field"].compare(actions, atol=SCALED)


@pytest.mark.golden_cases("actions.json", "rotations")
def test_rotations_match(case: Value) -> None:
    matrix = euler_to_matrix(case["euler"].use())
    case["rotm"].compare(matrix, atol=1e-9)
    case["euler_back"].compare(matrix_to_euler(matrix), atol=1e-9)


@pytest.mark.golden_cases("frame_selection.json", "agibot_windows")
def test_windows_and_their_names_match(case: Value) -> None:
    fps = case["fps"].use()
    windows = cut_windows(case["duration"].use(), case["window_size"].use(), case["min_last_window"].use())
    assert len(windows) == len(case["windows"])
    for i, (window, golden) in enumerate(zip(windows, case["windows"])):
        golden["file"].compare(f"{WindowName('327', '685393', i, *window.frames(fps)).stem}.mp4")
        golden["start"].compare(window.start, atol=1e-9)
        golden["length"].compare(window.end - window.start, atol=1e-9)
        clip = WindowName.of(golden["file"].use().removesuffix(".mp4"))
        assert clip is not None and (clip.first, clip.last) == window.frames(fps)


@pytest.mark.golden_cases("frame_selection.json", "distributed_sampler")
def test_ranks_get_these_samples(case: Value, monkeypatch: pytest.MonkeyPatch) -> None:
    num_replicas, by_rank = case["num_replicas"].use(), case["indices_by_rank"]
    assert sorted(map(int, by_rank)) == list(range(num_replicas))
    for rank in by_rank:
        monkeypatch.setattr(parallel, "_current", ParallelDims(world_size=num_replicas, rank=int(rank)))
        sampler = get_sampler(range(case["dataset_len"].use()))
        case["seed"].compare(sampler.seed)
        sampler.set_epoch(case["epoch"].use())
        by_rank[rank].compare(list(sampler))


SCHEDULES = {"lambdalinear": lambda_linear, "cosine": lambda_cosine}
SAME_FORMULA = dict(rtol=1e-9, atol=1e-15)


@pytest.mark.golden_cases("lr_schedules.json", "cases")
def test_multipliers_match(case: Value) -> None:
    schedule = SCHEDULES[case["kind"].use()](**case["params"].use())
    case["multiplier"].compare([schedule(n) for n in case["iterations"].use()], **SAME_FORMULA)


@pytest.mark.golden_cases("lr_schedules.json", "cases")
def test_the_optimizer_has_the_rate_times_the_multiplier_of_each_step(case: Value) -> None:
    schedule, in_effect = SCHEDULES[case["kind"].use()](**case["params"].use()), case["lr_in_effect_first_steps"]
    in_effect.compare([case["base_lr"].use() * schedule(n) for n in range(len(in_effect))], **SAME_FORMULA)
