# SPDX-License-Identifier: Apache-2.0
"""Verifiable rewards are those of a plain loop over the frames of one clip, whatever is scored beside it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray

from cosmos_predict2.evaluation.metrics.video_quality import MOVES
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import action_following, frames, toy
from cosmos_predict2.rl.rewards.action_following import ActionFollowing
from cosmos_predict2.rl.rewards.verifiable import (
    Agreement,
    LatentAgreement,
    Motion,
    Random,
    Smoothness,
    StaticBackground,
)
from cosmos_predict2.toy_world.rendering import Detection

GIVEN = [1, 2, 0, 2]  # latent frames
FIRST = [1, 5, 0, 5]  # the first generated pixel frame
Frames = NDArray[numpy.float64]


def drawn() -> tuple[Clips, dict[str, Any]]:
    """Four clips of nine frames and three latent ones, and their true ones, in which half of the pixels rest."""
    generator = torch.Generator().manual_seed(0)
    video, true = torch.randint(0, 256, (2, 4, 3, 9, 4, 4), generator=generator).to(torch.uint8)
    true[..., 2:] = true[:, :, :1, :, 2:]
    latents, true_latents = torch.randn(2, 4, 2, 3, 2, 2, generator=generator)
    context = dict(true_video=true, true_latents=true_latents, num_conditional_frames=torch.tensor(GIVEN))
    return Clips(latents, video, [""] * 4, 10.0), context


def moves(true: Frames, first: int, k: int) -> Any:
    """The pixels of frame k in which a colour is far from the last conditioning frame."""
    return (numpy.abs(true[:, k] - true[:, max(0, first - 1)]) > MOVES).any(axis=0)


def agreement(video: Frames, true: Frames, first: int) -> float:
    errors = [((video[:, k] - true[:, k]) ** 2).mean(axis=0)[moves(true, first, k)] for k in range(first, 9)]
    return 10 * numpy.log10(255**2 / numpy.concatenate(errors).mean())


def resting(video: Frames, true: Frames, first: int) -> float:
    errors = [((video[:, k] - true[:, k]) ** 2).mean(axis=0)[~moves(true, first, k)] for k in range(first, 9)]
    return 10 * numpy.log10(255**2 / numpy.concatenate(errors).mean())


def background(video: Frames, true: Frames, first: int) -> float:
    errors = [numpy.abs(video[:, k] - true[:, k]).mean(axis=0)[~moves(true, first, k)] for k in range(first, 9)]
    return -numpy.concatenate(errors).mean()


def smoothness(video: Frames, true: Frames, first: int) -> float:
    jumps = [numpy.abs(video[:, k] - 2 * video[:, k - 1] + video[:, k - 2]) for k in range(max(2, first), 9)]
    return -numpy.mean(jumps)


def motion(video: Frames, true: Frames, first: int) -> float:
    own, wanted = (
        numpy.mean([numpy.abs(clip[:, k] - clip[:, k - 1]) for k in range(max(1, first), 9)]) for clip in (video, true)
    )
    return -abs(own / wanted - 1)


REWARDS: list[tuple[Any, str, Callable[[Frames, Frames, int], float]]] = [
    (Agreement(), "value", agreement),
    (Agreement(), "resting_psnr", resting),
    (StaticBackground(), "value", background),
    (Smoothness(), "value", smoothness),
    (Motion(), "value", motion),
]


@pytest.mark.parametrize(("reward", "name", "plain"), REWARDS, ids=[plain.__name__ for _, _, plain in REWARDS])
def test_a_reward_of_pixels_is_that_of_a_loop_over_generated_frames(reward: Any, name: str, plain: Any) -> None:
    clips, context = drawn()
    found = reward(clips, context)
    value = (found if isinstance(found, dict) else {"value": found})[name]
    assert clips.video_B_C_F_H_W is not None
    for i, first in enumerate(FIRST):
        video, true = (one[i].double().numpy() for one in (clips.video_B_C_F_H_W, context["true_video"]))
        assert float(value[i]) == pytest.approx(plain(video, true, first), rel=1e-4)


def test_agreement_of_latents_is_the_mean_over_generated_ones() -> None:
    clips, context = drawn()
    assert clips.latents_B_C_T_H_W is not None
    found = LatentAgreement()(clips, context)
    for i, given in enumerate(GIVEN):
        error = (clips.latents_B_C_T_H_W[i, :, given:] - context["true_latents"][i, :, given:]).square()
        assert float(found[i]) == pytest.approx(-float(error.mean()), rel=1e-5)


def test_followed_actions_are_summed_from_the_last_conditioning_frame_in_deviations() -> None:
    """Eight actions between nine frames; errors count at the ends of fours, from the first action that is generated."""
    generator = torch.Generator().manual_seed(0)
    read, wanted = torch.randn(2, 4, 8, 3, generator=generator, dtype=torch.float64)
    ours: Any = ActionFollowing.__new__(ActionFollowing)
    ours.probe = SimpleNamespace(numbers=[0, 2], read=lambda video: read[..., [0, 2]])
    ours.spread_D = torch.tensor([0.5, 2.0], dtype=torch.float64)
    clips, context = drawn()
    found = ours(clips, {**context, "actions": wanted})
    for i, start in enumerate([0, 4, 0, 4]):
        error = ((read - wanted)[i, start:, [0, 2]] / ours.spread_D).numpy()
        ends = [numpy.sqrt((error[: end - start].sum(axis=0) ** 2).mean()) for end in (4, 8) if end > start]
        assert float(found["value"][i]) == pytest.approx(-numpy.mean(ends))
        assert float(found["step_error"][i]) == pytest.approx(numpy.sqrt((error**2).mean()))
    assert action_following.SUMMED == 4


def shown(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Let the detector see these places in generated and in true clips."""
    for name, places in (("seen", found), ("_seen_truly", wanted)):
        detection = Detection(places, numpy.zeros((4, 9), dtype=bool))
        monkeypatch.setattr(toy, name, lambda *_, detection=detection: detection)


def test_rewards_of_the_toy_world_are_those_of_a_loop_over_generated_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    random = numpy.random.RandomState(0)
    found, wanted = ({name: random.uniform(8, 40, (4, 9, 2)) for name in ("puck", "gripper")} for _ in range(2))
    found["puck"][0, 3], wanted["gripper"][1, 6] = numpy.nan, numpy.nan  # not seen; not there
    shown(monkeypatch, found, wanted)
    clips, context = drawn()
    clips = replace(clips, video_B_C_F_H_W=torch.zeros(4, 3, 9, 48, 44, dtype=torch.uint8))
    motion = random.uniform(-1, 1, (4, 8, 4))
    of_positions = toy.Positions()(clips, context)
    permanence = toy.Permanence()(clips, context)
    path = toy.CommandedPath(speed=2.0)(clips, {**context, "actions": torch.from_numpy(motion)})
    for i, first in enumerate(FIRST):
        means = []
        for name in ("puck", "gripper"):
            far = numpy.linalg.norm(found[name][i] - wanted[name][i], axis=-1)
            is_lost = numpy.isnan(found[name][i, :, 0])
            far = numpy.where(is_lost, toy.LOST_PX, far)[first:]
            means.append(numpy.nanmean(far))
            assert float(of_positions[f"{name}_px"][i]) == pytest.approx(means[-1])
        assert float(of_positions["value"][i]) == pytest.approx(-numpy.mean(means))
        gone = [
            any(numpy.isnan(found[n][i, k, 0]) and not numpy.isnan(wanted[n][i, k, 0]) for n in found)
            for k in range(first, 9)
        ]
        assert float(permanence[i]) == pytest.approx(1 - numpy.mean(gone))
        gripper, place, errors = found["gripper"][i], found["gripper"][i, max(0, first - 1)], []
        for k in range(max(1, first), 9):
            wall = numpy.array([44, 48]) - toy.GRIPPER_RADIUS
            place = numpy.clip(place + 2.0 * motion[i, k - 1, :2], toy.GRIPPER_RADIUS, wall)
            errors.append(numpy.linalg.norm(gripper[k] - place))
        assert float(path[i]) == pytest.approx(-numpy.mean(errors))


def test_true_clips_that_follow_each_other_may_be_the_same_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at once, and each clip is compared with its own."""
    clips, context = drawn()
    true = context["true_video"][[0, 0, 1, 0]]
    monkeypatch.setattr(
        toy,
        "seen",
        lambda video, things=(): Detection(
            {"puck": video[:, :2, :, 0, 0].double().permute(0, 2, 1).numpy()},
            numpy.zeros(video.shape[:1] + video.shape[2:3], dtype=bool),
        ),
    )
    found = toy.Positions(("puck",))(clips, {**context, "true_video": true})["value"]
    for i in range(4):
        one = Clips(None, clips.video_B_C_F_H_W[i : i + 1], [""], 10.0)  # type: ignore[index]
        alone = dict(true_video=true[i : i + 1], num_conditional_frames=torch.tensor(GIVEN[i : i + 1]))
        assert float(found[i]) == pytest.approx(float(toy.Positions(("puck",))(one, alone)["value"][0]))


def test_clips_that_are_right_or_wholly_given() -> None:
    clips, context = drawn()
    same = Clips(clips.latents_B_C_T_H_W, context["true_video"], clips.prompts, 10.0)
    found = Agreement()(same, context)
    assert found["value"].tolist() == found["resting_psnr"].tolist() == [60.0] * 4
    given = {**context, "num_conditional_frames": torch.full((4,), 3)}
    for reward in (StaticBackground(), Smoothness(), Motion()):
        assert reward(clips, given).isnan().all()  # so that the score is invalid
    assert Agreement()(clips, given)["value"].isnan().all()
    assert LatentAgreement()(clips, given).tolist() == [0.0] * 4
    assert clips.latents_B_C_T_H_W is not None
    half = Clips(clips.latents_B_C_T_H_W.bfloat16(), None, clips.prompts, 10.0)
    of_half = LatentAgreement()(half, {**context, "true_latents": context["true_latents"].bfloat16()})
    error = (half.latents_B_C_T_H_W.double() - context["true_latents"].bfloat16().double())[2].square()  # type: ignore
    assert float(of_half[2]) == pytest.approx(-float(error.mean()), rel=1e-6)
    chance = Random()(clips, context)
    assert (chance >= 0).all() and (chance < 1).all()
    assert MOVES == 32  # of 255


def test_the_puck_near_the_ring_is_that_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    puck, ring = numpy.array([[[3.0, 4]], [[numpy.nan] * 2]]), numpy.zeros((2, 1, 2))
    found = Detection({"puck": puck, "ring": ring}, numpy.zeros((2, 1), dtype=bool))
    looks: list[Any] = []
    monkeypatch.setattr(toy, "seen", lambda video, things: looks.append(video) or found)
    video = torch.arange(9, dtype=torch.uint8)[None, None, :, None, None].expand(2, 3, 9, 4, 4)
    assert toy.PuckNearRing()(Clips(None, video, [""] * 2, 10.0), {}).tolist() == [-5, -12]
    assert looks[0].unique().tolist() == [8]


def test_the_dense_reward_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    where = numpy.array([[[3.0, 4.3], [30.0, 0.0], [numpy.nan] * 2, [0.0, 0.0]]])
    monkeypatch.setattr(frames, "detect", lambda pictures, things: SimpleNamespace(position={"puck": where}))
    pictures, context = torch.zeros(1, 4, 8, 8, 3, dtype=torch.uint8), {"goal": torch.tensor([[0.0, 0.0]])}
    found = frames.ToyDetectorReward().judge(pictures, context)
    assert found.success_E_F.tolist() == [[False, False, False, True]]
    assert found.value_E_F.tolist()[0] == pytest.approx([-float(numpy.hypot(3, 4.3)) / 12, -1, -1, 1])
    distances = [frames.ToyDetectorReward(name).setting.success_distance for name in ("default", "hard")]
    assert distances[0] < distances[1]


def test_a_regression_is_fitted_without_touching_the_runs_numbers() -> None:
    class Drawn:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            shift = int(numpy.random.randint(0, 3))
            video = torch.zeros(3, 5, 16, 16, dtype=torch.uint8)
            for f in range(5):
                video[:, f, 4:8, 2 + shift * f // 2 : 6 + shift * f // 2] = 200
            return {"video": video, "action": torch.full((4, 2), float(shift)) + 0.1 * numpy.random.randn()}

    numpy.random.seed(5)
    before = numpy.random.get_state()[1].tolist()
    made = [ActionFollowing(Drawn(), num_clips=8, seed=seed) for seed in (0, 0, 1)]
    assert numpy.random.get_state()[1].tolist() == before
    assert torch.equal(made[0].spread_D, made[1].spread_D) and not torch.equal(made[0].spread_D, made[2].spread_D)
    numpy.random.seed(0)
    actions = torch.stack([Drawn()[i]["action"] for i in range(8)]).double().flatten(0, 1)
    torch.testing.assert_close(made[0].spread_D, actions.std(dim=0)[made[0].probe.numbers])
