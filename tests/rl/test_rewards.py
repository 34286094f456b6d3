# SPDX-License-Identifier: Apache-2.0
"""Verifiable rewards order clips as they should; scoring leaves out what failed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.rl.clips import scoring as scoring_module
from cosmos_predict2.rl.clips.scoring import ClipRewards, OneRank
from cosmos_predict2.rl.config import AdvantageConfig, RewardConfig, RLConfig
from cosmos_predict2.rl.interfaces import Clips, Judgement, RewardDefaults, Scores, Ticket
from cosmos_predict2.rl.rewards import toy, verifiable
from cosmos_predict2.rl.rewards.local import LocalReward, reward_of
from cosmos_predict2.toy_world.rendering import Detection
from imaginaire.config import L
from imaginaire.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def true() -> Tensor:
    data = ToyWorldVideos(num_episodes=4, mix="full_skill", num_steps=16, start=0)
    return torch.stack([data[i]["video"] for i in range(4)])


def _clips(video: Tensor) -> Clips:
    return Clips(video.float()[:, :, ::4, ::8, ::8] / 255, video, [""] * len(video), 10.0)


def _context(true: Tensor) -> dict[str, Any]:
    return {
        "true_latents": true.float()[:, :, ::4, ::8, ::8] / 255,
        "true_video": true,
        "num_conditional_frames": torch.ones(len(true), dtype=torch.long),
    }


def _flickering(video: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-40, 41, video.shape, generator=generator)
    changed = (video.int() + noise).clamp(0, 255).to(torch.uint8)
    return torch.cat([video[:, :, :1], changed[:, :, 1:]], dim=2)


def _still(video: Tensor) -> Tensor:
    return video[:, :, :1].expand_as(video).contiguous()


def _empty(video: Tensor) -> Tensor:
    """Everything gone after the first frame."""
    background = video.float().amax(dim=(3, 4), keepdim=True).expand_as(video).to(torch.uint8)
    return torch.cat([video[:, :, :1], background[:, :, 1:]], dim=2)


WORSE = {
    "agreement": (verifiable.Agreement, _still),
    "latents": (verifiable.LatentAgreement, _still),
    "background": (verifiable.StaticBackground, _flickering),
    "smoothness": (verifiable.Smoothness, _flickering),
    "motion": (verifiable.Motion, _still),
    "positions": (toy.Positions, _still),
    "permanence": (toy.Permanence, _empty),
}


@pytest.mark.parametrize("name", WORSE)
def test_the_true_clip_gets_more_than_a_worse_one(name: str, true: Tensor) -> None:
    reward, worse = WORSE[name]
    good, bad = (LocalReward(reward())._score(_clips(video), _context(true)) for video in (true, worse(true)))
    assert good.is_valid_B.all() and bad.is_valid_B.all()
    assert (good.value_B > bad.value_B).all()


def test_stillness_does_not_please_the_positions_and_nothing_pleases_chance(true: Tensor) -> None:
    near = LocalReward(toy.PuckNearRing())._score(_clips(true), _context(true)).value_B
    assert (near > -20).all()
    chance = LocalReward(verifiable.Random())
    first, again = (chance._score(_clips(true), _context(true)).value_B for _ in range(2))
    assert torch.equal(first, again) and len(set(first.tolist())) == 4


def test_a_reward_names_what_it_looks_at_and_was_not_given(true: Tensor) -> None:
    latents, pixels = Clips(torch.zeros(4, 1, 1, 1, 1), None, [""] * 4, 10.0), Clips(None, true, [""] * 4, 10.0)
    for reward, clips, told in [
        (verifiable.Smoothness(), latents, "needs_pixels"),
        (verifiable.LatentAgreement(), pixels, "media=latent"),
        (verifiable.Random(), pixels, "media=latent"),
    ]:
        with pytest.raises(DataError, match=told):
            reward(clips, _context(true))


def test_clips_in_which_nothing_moves_have_no_agreement(true: Tensor) -> None:
    still = _still(true)
    assert not LocalReward(verifiable.Agreement())._score(_clips(true), _context(still)).is_valid_B.any()


FAILING = f"{__name__}:_failing"


def _failing(clips: Clips, context: Mapping[str, Any]) -> Tensor:
    raise RuntimeError("the judge is ill")


def test_a_function_that_forgot_to_ask_for_pixels_learns_how(true: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    clips = Clips(torch.zeros(4, 1, 1, 1, 1), None, [""] * 4, 10.0)
    assert not LocalReward(lambda *of: brightness(*of))._score(clips, {}).is_valid_B.any()
    assert "needs_pixels = True" in caplog.text


def _first_invalid(clips: Clips, context: Mapping[str, Any]) -> Tensor:
    return torch.tensor([float("nan"), 1.0, 2.0, 3.0])


class Late(RewardDefaults):
    """A reward that never comes."""

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        return Ticket(request_id)

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        return Scores(torch.zeros(4), torch.zeros(4, dtype=torch.bool))


def _scoring(*makes: Any) -> ClipRewards:
    return ClipRewards(RLConfig(rewards={f"r{i}": RewardConfig(make=make) for i, make in enumerate(makes)}))


def _advantages(scoring: ClipRewards, true: Tensor, group_size: int = 4) -> tuple[Tensor, dict[str, float]]:
    tickets = [scoring.submit(_clips(true), _context(true))]
    return scoring.advantages(scoring.fetch(tickets, group_size))


def test_what_failed_has_no_advantage_and_is_counted(true: Tensor) -> None:
    advantage, facts = _advantages(_scoring(f"{__name__}:_first_invalid"), true)
    assert advantage[0, 0] == 0 and advantage[0, 1] < 0 < advantage[0, 3]
    assert facts["r0_valid_rate"] == 0.75
    for make in (FAILING, L(Late)()):
        advantage, facts = _advantages(_scoring(make), true)
        assert advantage.abs().max() == 0
        assert facts["r0_valid_rate"] == 0 and facts["groups_without_spread"] == 1


def test_a_deadline_is_one_for_all_clips_of_a_rollout_and_all_rewards(
    true: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(scoring_module.time, "monotonic", lambda: clock[0])

    class Waited(Late):
        def fetch(self, ticket: Ticket, deadline: float) -> Scores:
            clock[0] += max(deadline, 0.0)
            return super().fetch(ticket, deadline)

    scoring = _scoring(FAILING, FAILING)
    scoring.rewards = dict.fromkeys(scoring.rewards, Waited())
    scoring.fetch([scoring.submit(_clips(true), _context(true)) for _ in range(8)], 4)
    assert clock[0] == RewardConfig().deadline


def test_a_reward_elsewhere_is_probed_once(true: Tensor) -> None:
    probed = []

    class Remote(Late):
        def probe(self, clips: Clips, context: Mapping[str, Any], deadline: float) -> None:
            probed.append(deadline)

    scoring = _scoring(FAILING)
    assert not scoring.needs_probe
    scoring.rewards = {"r0": OneRank(Remote())}
    assert scoring.needs_probe
    scoring.probe(_clips(true), _context(true))
    assert probed == [RewardConfig().deadline] and not scoring.needs_probe


def test_a_sample_counts_only_where_all_rewards_are_valid(true: Tensor) -> None:
    advantage, _ = _advantages(_scoring(L(verifiable.Agreement)(), f"{__name__}:_first_invalid"), true)
    assert advantage[0, 0] == 0 and advantage[0, 1] < 0 < advantage[0, 3]


def test_rewards_count_by_their_weights_and_advantages_have_a_limit(true: Tensor) -> None:
    weights, values = {"up": 2.0, "down": 0.5}, {"up": (0.0, 1.0, 2.0, 9.0), "down": (9.0, 2.0, 1.0, 0.0)}
    makes = {name: L(_valued)(values=value) for name, value in values.items()}
    options = {name: RewardConfig(make=make, weight=weights[name]) for name, make in makes.items()}
    advantage, facts = _advantages(ClipRewards(RLConfig(rewards=options)), true)
    alone, _ = _advantages(_scoring(makes["up"]), true)
    assert facts["reward_mean"] == pytest.approx(3 * (2.0 + 0.5))
    torch.testing.assert_close(advantage, 2.0 * alone + 0.5 * alone.flip(1))
    limit = RLConfig(rewards={"up": options["up"]}, advantage=AdvantageConfig(adv_clip_max=0.5))
    limited, _ = _advantages(ClipRewards(limit), true)
    assert (limited.min(), limited.max()) == (-0.5, 0.5)
    for bound, teaches in ((7.6, False), (7.4, True)):  # the mean of 2 up + 0.5 down is 7.5
        within, _ = _advantages(ClipRewards(RLConfig(rewards=options, lower_bound=bound)), true)
        assert bool(within.any()) == teaches


def _valued(values: Any) -> Any:
    return lambda clips, context: torch.tensor(values)


def test_contact_within_the_frames_that_were_given_does_not_count(true: Tensor) -> None:
    """The last two of five given frames bear on the first generated one."""
    context = _context(true) | {"num_conditional_frames": torch.full((4,), 2)}

    def changed(frames: slice) -> Tensor:
        video = true.clone()
        video[:, :, frames] = 0
        return LocalReward(toy.Contact())._score(_clips(video), context).value_B

    own = changed(slice(0))
    assert torch.equal(changed(slice(0, 3)), own)
    assert (changed(slice(6, 7)) < own).all()


def test_figures_are_of_valid_scores(true: Tensor) -> None:
    """Groups of (10, 10.16, none, none) and of none: a deviation of .08, where zeros in their place gave 5."""
    valid = torch.tensor([[True, True, False, False], [False] * 4])
    scores = Scores(torch.where(valid, torch.tensor([10.0, 10.16, 0.0, 0.0]), 0.0), valid)
    scoring = _scoring(L(verifiable.Smoothness)())
    _, facts = scoring.advantages({"r0": scores})
    assert (facts["r0_std"], facts["reward_mean"]) == pytest.approx((0.08, 10.08), rel=1e-4)
    assert facts["r0_valid_rate"] == 0.25
    _, facts = scoring.advantages({"r0": Scores(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bool))})
    assert facts["r0_valid_rate"] == 0 and not {"r0", "r0_std", "r0_p10", "reward_mean"} & set(facts)


class Given(Late):
    """A reward that has its scores already, those of each request by its number."""

    def __init__(self, *scores: Scores) -> None:
        self.scores, self.num_asked = scores, 0

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        self.num_asked += 1
        return Ticket(str(self.num_asked - 1))

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        return self.scores[int(ticket.request_id)]


def test_scores_and_parts_of_a_reward_elsewhere_are_those_of_valid_clips(true: Tensor) -> None:
    """A number that is not finite is invalid whatever the reward says, and a part is there if all requests have it."""
    scoring = _scoring(FAILING)
    valid = torch.tensor([True, True, True, False])
    parts = {"often": torch.tensor([1.0, 2.0, 6.0, 900.0]), "once": torch.ones(4)}
    first = Scores(torch.tensor([1.0, torch.nan, 3.0, 700.0]), valid, parts)
    second = Scores(torch.arange(4.0), torch.ones(4, dtype=torch.bool), {"often": torch.full((4,), 3.0)})
    scoring.rewards = {"r0": Given(first, second)}
    found = scoring.fetch([scoring.submit(_clips(true), _context(true)) for _ in range(2)], 4)
    assert found["r0"].value_B.tolist() == [[1.0, 0.0, 3.0, 0.0], [0.0, 1.0, 2.0, 3.0]]
    assert found["r0"].is_valid_B.tolist() == [[True, False, True, False], [True] * 4]
    assert set(found["r0"].parts) == {"often"}
    advantage, facts = scoring.advantages(found)
    assert (advantage[0] != 0).tolist() == [True, False, True, False]
    assert facts["r0_often"] == pytest.approx((1 + 6 + 4 * 3) / 6)
    values = torch.tensor([1.0, 3.0, 0.0, 1.0, 2.0, 3.0])
    for percent in (10, 90):
        assert facts[f"r0_p{percent}"] == pytest.approx(float(values.quantile(percent / 100)))


def test_each_reward_is_compared_among_the_samples_that_count() -> None:
    """One reward of the first sample is invalid, so that the other one's value of it counts for nothing."""
    scoring = _scoring(FAILING, FAILING)
    everyone, others = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[False, True, True, True]])
    found = []
    for first in (-900.0, 900.0):
        scores = {"r0": Scores(torch.tensor([[first, 1.0, 2.0, 6.0]]), everyone)}
        scores["r1"] = Scores(torch.zeros(1, 4), others)
        found.append(scoring.advantages(scores)[0])
    assert torch.equal(*found) and found[0][0, 0] == 0 and found[0].any()


def test_a_group_has_spread_where_any_of_its_rewards_has() -> None:
    scoring = _scoring(FAILING, FAILING)
    scoring.advantage = AdvantageConfig(min_std=0.5)
    valid = torch.ones(4, 2, dtype=torch.bool)
    values = [[[0.0, 2.0], [0.0, 0.0], [0.0, 0.9], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0], [0.0, 0.9], [1.0, 1.0]]]
    _, facts = scoring.advantages({f"r{i}": Scores(torch.tensor(value), valid) for i, value in enumerate(values)})
    assert facts["groups_without_spread"] == 0.5


def test_requests_are_named_by_what_is_asked(true: Tensor) -> None:
    """The clips, as latents or decoded, and their prompts."""
    scoring = _scoring(L(verifiable.Smoothness)(), L(verifiable.LatentAgreement)())
    assert scoring.needs_pixels
    plain = _clips(true)
    assert plain.latents_B_C_T_H_W is not None
    others = [
        plain,
        replace(plain, video_B_C_F_H_W=_still(true)),
        replace(plain, latents_B_C_T_H_W=plain.latents_B_C_T_H_W + 1),
        replace(plain, prompts=["another", *plain.prompts[1:]]),
    ]
    named = [scoring.submit(clips, _context(true))["r0"].request_id for clips in (_clips(true), *others)]
    assert named[0] == named[1] and len(set(named)) == 4


def brightness(clips: Clips, context: Mapping[str, Any]) -> Tensor:
    assert clips.video_B_C_F_H_W is not None
    return clips.video_B_C_F_H_W.float().mean(dim=(1, 2, 3, 4)) / 255


brightness.needs_pixels = True  # type: ignore[attr-defined]


def test_a_function_of_your_own_is_named_by_its_path(true: Tensor) -> None:
    scoring = _scoring(f"{__name__}:brightness", "smoothness")
    assert scoring.needs_pixels
    scores = scoring.fetch([scoring.submit(_clips(true), _context(true))], 4)
    assert torch.equal(scores["r0"].value_B[0], brightness(_clips(true), {}))
    for make, told in {
        f"{__name__}:darkness": "darkness",
        "smothness": "smoothness",
        "cosmos_predict2.rl.rewards.action_following:ActionFollowing": "data",
    }.items():
        with pytest.raises(ConfigError, match=told):
            _scoring(make)
    with pytest.raises(ConfigError, match=f"make={__name__}:brightness"):
        _scoring(L(brightness)())


class HowBright:
    """A judge of pictures, as environments that imagine have one."""

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        assert len(context["task_description"]) == len(frames_E_F_H_W_C)
        value = frames_E_F_H_W_C.float().mean(dim=(2, 3, 4)) / 255
        return Judgement(value, value > 0.5)


def test_a_judge_of_pictures_scores_a_clip_by_its_last_one(true: Tensor) -> None:
    scoring = _scoring(L(HowBright)())
    scores = scoring.fetch([scoring.submit(_clips(true), _context(true))], 4)["r0"]
    last = brightness(_clips(true[:, :, -1:]), {})
    torch.testing.assert_close(scores.value_B[0], last)
    assert torch.equal(scores.parts["success"][0], (last > 0.5).float())


def test_what_the_config_has_already_made_is_the_reward() -> None:
    """As nodes inside a lazy call that builds its arguments, too."""
    made = verifiable.Smoothness()
    assert reward_of(made) is made and reward_of(brightness) is brightness


def test_wrong_rewards_are_refused(true: Tensor) -> None:
    with pytest.raises(ConfigError, match="r0"):
        _scoring(L(dict)(a=1))
    with pytest.raises(ConfigError, match="make"):
        _scoring(None)
    with pytest.raises(DataError, match="4 clips"):
        _advantages(_scoring(lambda clips, context: torch.zeros(1)), true)


def test_contact_is_the_depth_of_the_gripper_in_the_puck_and_the_motion_of_an_untouched_puck() -> None:
    gripper = numpy.array([[[0.0, 0], [0, 0], [2, 0]], [[0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0], [0, 0]]])
    puck = numpy.array([[[10.0, 0], [10, 0], [9, 0]], [[30, 0], [30, 0], [32, 0]], [[11, 0], [11, 0], [13, 0]]])
    found = Detection({"gripper": gripper, "puck": puck}, numpy.zeros((3, 3), dtype=bool))
    overlap, untouched = toy.contact(found, numpy.ones((3, 3), dtype=bool))
    assert overlap == pytest.approx([(toy.CONTACT_PX - toy.BLUR_PX - 7) / 2, 0, 0])
    assert untouched == pytest.approx([0, 1, 0])


def test_true_clips_have_contact_zero(true: Tensor) -> None:
    parts = toy.Contact()(_clips(true), _context(true))
    assert parts["value"].abs().max() < 0.02
