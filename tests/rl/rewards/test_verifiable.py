# SPDX-License-Identifier: Apache-2.0
"""Verifiable rewards, and those of the toy world, against plain loops over clips, frames and pixels."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import action_following, frames, toy, verifiable
from cosmos_predict2.toy_world.detector import Detection

SHAPE = (3, 9, 4, 5)  # of a clip: colours, frames, height, width
NUMBERS = (1, 2, 3, 0)  # of conditioning frames of the clips, latent ones
FIRST = (1, 5, 9, 0)  # the first generated frames


def clip(draws: numpy.random.Generator, spread: int) -> numpy.ndarray:
    """A picture, and what changes of it from frame to frame."""
    picture = draws.integers(100, 150, (3, 1, 4, 5))
    return (picture + draws.integers(-spread, spread + 1, SHAPE)).astype(numpy.uint8)


@pytest.fixture(scope="module")
def given() -> tuple[Clips, dict[str, Any]]:
    draws = numpy.random.default_rng(0)
    video, true = (torch.from_numpy(numpy.stack([clip(draws, 40) for _ in NUMBERS])) for _ in range(2))
    latents, true_latents = torch.randn(2, 4, 2, 3, 2, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    numbers = torch.tensor(NUMBERS)
    context = {"true_video": true, "true_latents": true_latents, "num_conditional_frames": numbers}
    return Clips(latents, video, ["a"] * 4, 10.0), context


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def decibels(error: float) -> float:
    return min(10 * math.log10(255**2 / error) if error > 0 else 60.0, 60.0)


def by_loops(name: str, video: Any, true: Any, first: int) -> Any:
    """The reward of one clip, whose frames from ``first`` on are generated."""
    colours, length, height, width = video.shape
    pixels = [*product(range(length), range(height), range(width))]
    last = max(0, first - 1)
    moving, resting, change = [], [], []
    for f, y, x in pixels[first * height * width :]:
        moves = max(abs(float(true[c, f, y, x]) - float(true[c, last, y, x])) for c in range(colours)) > 32
        differences = [float(video[c, f, y, x]) - float(true[c, f, y, x]) for c in range(colours)]
        (moving if moves else resting).append(mean([one**2 for one in differences]))
        if not moves:
            change.append(mean([abs(one) for one in differences]))
    if name == "Agreement":
        return decibels(mean(moving)), decibels(mean(resting)) if resting else 60.0
    if name == "StaticBackground":
        return -mean(change)
    flow = lambda one, f: numpy.abs(one[:, f] - one[:, f - 1]).mean()  # noqa: E731
    if name == "Motion":
        amounts = [mean([flow(one, f) for f in range(max(first, 1), length)]) for one in (video, true)]
        return -abs(amounts[0] / max(amounts[1], 1e-3) - 1)
    jumps = [numpy.abs(video[:, f] - 2 * video[:, f - 1] + video[:, f - 2]) for f in range(max(first, 2), length)]
    return -mean([float(jump.mean()) for jump in jumps])


@pytest.mark.parametrize("name", ["Agreement", "StaticBackground", "Motion", "Smoothness"])
def test_a_reward_of_pixels_is_what_its_loops_give(name: str, given: tuple[Clips, dict[str, Any]]) -> None:
    clips, context = given
    found: Any = getattr(verifiable, name)()(clips, context)
    video, true = clips.video_B_C_F_H_W.double().numpy(), context["true_video"].double().numpy()  # type: ignore
    for i in (0, 1, 3):
        expected = by_loops(name, video[i], true[i], FIRST[i])
        if name == "Agreement":
            assert (float(found["value"][i]), float(found["resting_psnr"][i])) == pytest.approx(expected, rel=1e-5)
        else:
            assert float(found[i]) == pytest.approx(expected, rel=1e-5)
    value = found["value"] if name == "Agreement" else found
    assert value[2].isnan()  # all of its frames were given
    if name == "Agreement":
        assert found["resting_psnr"][2] == 60
        same = verifiable.Agreement()(Clips(None, context["true_video"], clips.prompts, 10.0), context)
        assert same["value"][:2].tolist() == [60, 60]


def test_agreement_of_latents_is_that_of_generated_frames_in_full_precision(
    given: tuple[Clips, dict[str, Any]],
) -> None:
    clips, context = given
    found = verifiable.LatentAgreement()(clips, context)
    error = (clips.latents_B_C_T_H_W.double() - context["true_latents"].double()) ** 2  # type: ignore[union-attr]
    assert found.tolist() == pytest.approx(
        [-float(error[i, :, n:].mean()) if n < 3 else 0 for i, n in enumerate(NUMBERS)]
    )
    chance = verifiable.Random()(clips, context)
    assert (chance >= 0).all() and (chance < 1).all() and len({*chance.tolist()}) == 4


def positions(**things: list[Any]) -> Detection:
    """[B, F, 2] of each thing."""
    found = {name: numpy.array(where, dtype=float) for name, where in things.items()}
    return Detection(found, numpy.zeros(next(iter(found.values())).shape[:2], dtype=bool))


def toy_given(monkeypatch: pytest.MonkeyPatch, found: Detection, true: Detection) -> tuple[Clips, dict[str, Any]]:
    """Clips of six frames, five of them given, of which this is seen."""
    video = torch.zeros(len(found.is_closed), 3, found.is_closed.shape[1], 30, 40, dtype=torch.uint8)
    truth = video + 1

    def seen(pictures: Tensor, things: Any = toy.THINGS) -> Detection:
        detection = true if pictures.float().mean() == 1 else found
        last = slice(-pictures.shape[2], None)
        return Detection(
            {name: where[:, last] for name, where in detection.position.items() if name in things},
            detection.is_closed[:, last],
        )

    monkeypatch.setattr(toy, "seen", seen)
    monkeypatch.setattr(toy, "_seen_truly", lambda context, things=toy.THINGS: seen(context["true_video"], things))
    numbers = torch.full((len(video),), 2)
    return Clips(None, video, ["a"] * len(video), 10.0), {"true_video": truth, "num_conditional_frames": numbers}


NAN = [math.nan, math.nan]


def test_positions_are_compared_where_a_thing_truly_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [[9.0, 9.0]] * 5
    found = positions(puck=[[*here, [3, 4], NAN, [1, 1]]], gripper=[[*here, [0, 0], [0, 0], [6, 8]]])
    true = positions(puck=[[[0.0, 0.0]] * 7 + [NAN]], gripper=[[[0.0, 0.0]] * 8])
    clips, context = toy_given(monkeypatch, found, true)
    parts = toy.Positions()(clips, context)
    assert parts["puck_px"].tolist() == pytest.approx([(5 + toy.LOST_PX) / 2])
    assert parts["gripper_px"].tolist() == pytest.approx([10 / 3])
    assert parts["value"].tolist() == pytest.approx([-((5 + 12) / 2 + 10 / 3) / 2])
    kept = toy.Permanence()(clips, context)
    assert kept.tolist() == pytest.approx([2 / 3])  # the puck is lost in one of the three generated frames


def test_a_true_clip_is_looked_at_once_and_belongs_to_its_own_clips() -> None:
    true = torch.stack([torch.full((3, 2, 48, 48), level, dtype=torch.uint8) for level in (0, 0, 255)])
    seen: list[Any] = []

    def detect(pictures: Any, things: Any) -> Detection:
        seen.append(len(pictures))
        levels = pictures[..., 0, 0, 0].astype(float)
        return Detection({"puck": numpy.stack([levels, levels], axis=-1)}, levels > 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "detect", detect)
        found = toy._seen_truly({"true_video": true}, ("puck",))
    assert seen == [2]
    assert found.position["puck"][:, 0, 0].tolist() == [0, 0, 255] and found.is_closed[:, 0].tolist() == [0, 0, 1]


def test_a_path_goes_on_from_where_it_was_led_and_stays_within_the_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = 40 - toy.GRIPPER_RADIUS  # to the right; the clip is 40 wide and 30 high
    path = [[9.0, 9.0]] * 4 + [[10.0, 9.0], [12.0, 9.0], NAN, [wall, 9.0]]
    clips, context = toy_given(monkeypatch, positions(gripper=[path]), positions(gripper=[path]))
    actions = torch.zeros(1, 7, 3)
    actions[0, 4:, 0] = torch.tensor([1.0, 1.0, 30.0])
    found = toy.CommandedPath(speed=2.0)(clips, {**context, "actions": actions})
    assert found.tolist() == pytest.approx([-(0 + toy.LOST_PX + 0) / 3])
    none = {**context, "actions": actions, "num_conditional_frames": torch.zeros(1, dtype=torch.long)}
    # without conditioning frames the path begins at the first: led to 9, 9, 9, 9, 9, 11, 13, 40
    assert toy.CommandedPath(speed=2.0)(clips, none).tolist() == pytest.approx([-(0 * 3 + 1 + 1 + 12 + 0) / 7])


def test_the_puck_near_the_ring_is_that_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = positions(puck=[[[0, 0], [3, 4]], [[0, 0], NAN]], ring=[[[9, 9], [0, 0]], [[0, 0], [0, 0]]])
    clips, context = toy_given(monkeypatch, found, found)
    assert toy.PuckNearRing()(clips, context).tolist() == [-5, -12]


def test_the_dense_reward_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    where = numpy.array([[[3.0, 4.3], [30.0, 0.0], NAN, [0.0, 0.0]]])
    monkeypatch.setattr(frames, "detect", lambda pictures, things: SimpleNamespace(position={"puck": where}))
    pictures, context = torch.zeros(1, 4, 8, 8, 3, dtype=torch.uint8), {"goal": torch.tensor([[0.0, 0.0]])}
    away = math.hypot(3, 4.3)
    found = frames.ToyDetectorReward().judge(pictures, context)
    assert found.success_E_F.tolist() == [[False, False, False, True]]
    assert found.value_E_F.tolist()[0] == pytest.approx([-away / 12, -1, -1, 1])
    distances = [frames.ToyDetectorReward(name).setting.success_distance for name in ("default", "hard")]
    assert distances[0] < distances[1]


def test_what_was_commanded_is_compared_from_the_last_conditioning_frame_on() -> None:
    """One and two latent frames were given; errors are summed, and counted at the end of each latent frame."""
    actions = torch.zeros(2, 8, 1)
    read = torch.arange(16.0).reshape(2, 8, 1) / 8
    reward: Any = object.__new__(action_following.ActionFollowing)
    reward.probe = SimpleNamespace(numbers=[0], read=lambda video: read.double())
    reward.spread_D = torch.tensor([0.5]).double()
    video = torch.zeros(2, 3, 9, 4, 4, dtype=torch.uint8)
    context = {"actions": actions, "num_conditional_frames": torch.tensor([1, 2])}
    found = reward(Clips(None, video, ["a", "b"], 10.0), context)
    errors = [[2 * float(read[i, k, 0]) for k in range(8)] for i in range(2)]
    assert found["value"].tolist() == pytest.approx([-(sum(errors[0][:4]) + sum(errors[0])) / 2, -sum(errors[1][4:])])
    squares = [mean([one**2 for one in errors[0]]), mean([one**2 for one in errors[1][4:]])]
    assert found["step_error"].tolist() == pytest.approx([math.sqrt(one) for one in squares])


def test_a_regression_is_fitted_without_touching_the_runs_numbers() -> None:
    class Drawn:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            shift = int(numpy.random.randint(0, 3))
            video = torch.zeros(3, 5, 16, 16, dtype=torch.uint8)
            for f in range(5):
                video[:, f, 4:8, 2 + shift * f // 2 : 6 + shift * f // 2] = 200
            return {"video": video, "action": torch.full((4, 2), float(shift)) + torch.randn(4, 2)}

    numpy.random.seed(5)
    before = numpy.random.get_state()[1].tolist()
    made = [action_following.ActionFollowing(Drawn(), num_clips=8, seed=seed) for seed in (0, 0)]
    assert numpy.random.get_state()[1].tolist() == before
    assert torch.equal(made[0].spread_D, made[1].spread_D)
