# SPDX-License-Identifier: Apache-2.0
"""Environments of gymnasium: each way in which packages differ keeps the contract, or is refused with the cure."""

import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy
import pytest
import torch

from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.contract import check_environment
from cosmos_predict2.rl.envs.simulators import gym
from cosmos_predict2.rl.envs.simulators.gym import GymTask, averaged
from cosmos_predict2.rl.policies.cloning import CloneWindows, clone
from cosmos_predict2.rl.policies.conv import ConvPolicy
from cosmos_predict2.rl.policies.files import read_policy, write_policy
from imaginaire.errors import ConfigError, UserError
from tests.rl.runs import CONFIG
from tests.training import records, run_dir, train

POINT = "tests.rl.envs.gym_worlds:OurPoint-v0"


def task(**settings: Any) -> GymTask:
    return GymTask(POINT, **{"image_size": 24, **settings})


@pytest.mark.slow
def test_a_registered_environment_is_a_suite_in_processes_of_its_own() -> None:
    """One is registered by a path, one by a function without a name, which cannot travel to another process."""
    policy = SimpleNamespace(action_dim=2, chunk=3)
    made = suites.find(f"gym:{POINT.replace('Point', 'PointMade')}?image_size=24&sentence=push").env(1, policy)
    assert made.reset()[0]["full_image"].shape == (1, 24, 48, 3)
    place = suites.find(f"gym:{POINT}?image_size=24&repeat=2&sentence=to the goal")
    env = place.env(3, policy)
    assert env.metadata["max_steps"] == 6 and env.metadata["suite"] == "gym:OurPoint-v0"
    observed, _ = env.reset()
    assert observed["full_image"].shape == (3, 24, 48, 3) and observed["task_description"] == ["to the goal"] * 3
    check_environment(env)
    in_pixels = suites.find(f"gym:{POINT}?image_size=24&kind=absolute&actions=native")
    check_environment(in_pixels.env(3, SimpleNamespace(action_dim=2, chunk=3, sentences=())))
    unnamed = suites.find(f"gym:{POINT}?image_size=24")
    knowing = SimpleNamespace(action_dim=2, chunk=3, sentences=("to the goal",))
    assert unnamed.env(1, knowing).reset()[0]["task_description"] == ["to the goal"]
    with pytest.raises(ConfigError, match=r"cloned on 2 tasks.*\?sentence=to the goal', or another of"):
        unnamed.env(1, SimpleNamespace(action_dim=2, chunk=3, sentences=("to the goal", "away")))
    with pytest.raises(ConfigError, match=r"decides on 7 numbers per action, gym:OurPoint.*-v0 takes 2"):
        place.env(1, SimpleNamespace(action_dim=7, chunk=3))


def test_a_simulator_that_is_not_given_is_asked_for_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.config\.env is not set.*such as model\.config\.env=gym:"):
        train(tmp_path, ["experiment=vla_grpo_suite_conv"], config=CONFIG)
    for name, asks in (("conv", " is empty: give a clone"), ("pi05", ": the policy has no weights. A clone")):
        with pytest.raises(UserError, match=rf"model\.config\.policy\.path{asks}"):
            train(tmp_path, [f"experiment=vla_grpo_suite_{name}", "model.config.env=gym:ID"], config=CONFIG)


@pytest.mark.slow
def test_a_clone_learns_in_a_simulator_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "AT_ONCE", 2)  # processes
    policy = ConvPolicy(actions={"q01": [-1, -1], "q99": [1, 1]}, tasks=["to the goal"], chunk=3, num_knots=3, size=16)
    path = write_policy(tmp_path / "clone", policy, {"sentences": ["to the goal"]})
    words = ["experiment=vla_grpo_suite_conv", f"model.config.policy.path={path}", "trainer.max_iter=2"]
    words += [
        "+model.config.policy.noise=1",
        "job.project=tests",
        "job.group=engine",
        "job.name=named",
        "trainer.logging_iter=1",
    ]
    words += ["dataloader_train.batch_size=2", "dataloader_val.dataset.num=2", "dataloader_val.batch_size=2"]
    env = f"gym:{POINT}?image_size=24&repeat=2&success=reward>=-0.3"
    assert train(tmp_path, [*words, f'model.config.env="{env}"', "checkpoint.save_iter=2"], config=CONFIG) == 0
    names = {name for record in records(run_dir(tmp_path, "named")) for name in record}
    assert {"train/success", "val/greedy_success"} <= names, "it is not imagined"
    learnt, card = read_policy(str(run_dir(tmp_path, "named")))
    assert not torch.equal(learnt.out.bias, policy.out.bias) and card.about["sentences"] == ["to the goal"]
    with pytest.raises(ConfigError, match="imagines nothing here"):
        suites.environment(env, policy, imagination=None)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_clone_of_clumsy_drivers_becomes_better_in_the_simulator(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the settings of the experiment."""
    monkeypatch.setattr(suites, "AT_ONCE", 2)
    torch.manual_seed(seed)
    draws, one, pictures, actions = numpy.random.default_rng(seed), task(), list[Any](), list[Any]()
    for trial in range(40):
        pictures.append(one.reset(0, 500_000 + trial, 0)["full_image"])
        to_go = one._env.unwrapped.goal - one._env.unwrapped.place
        for _ in range(3):
            actions.append(numpy.clip(to_go / 0.2 + draws.normal(0, 0.5, 2), -1, 1))
            to_go = to_go - 0.2 * actions[-1]
    one.close()
    chunks = torch.from_numpy(numpy.array(actions)).float().unflatten(0, (-1, 3))
    windows = CloneWindows(torch.from_numpy(numpy.stack(pictures)), chunks, ["to the goal"] * len(chunks))
    policy = ConvPolicy(actions={"q01": [-1, -1], "q99": [1, 1]}, tasks=["to the goal"], chunk=3, num_knots=3, size=24)
    clone(policy, windows, steps=100, lr=2e-3, batch_size=32, seed=seed)
    path = write_policy(tmp_path / "clone", policy, {"sentences": ["to the goal"]})
    words = ["experiment=vla_grpo_suite_conv", f"model.config.policy.path={path}", f"trainer.seed={seed}"]
    words += ["job.project=tests", "job.group=engine", "job.name=named"]
    words += ["dataloader_val.dataset.num=256", "dataloader_val.batch_size=256"]
    env = f'"gym:{POINT}?image_size=24&success=reward>=-0.06"'
    assert train(tmp_path, [*words, f"model.config.env={env}"], config=CONFIG) == 0
    rates = [row["val/greedy_success"] for row in records(run_dir(tmp_path, "named")) if "val/greedy_success" in row]
    assert rates[-1] >= rates[0] + 0.1, rates


@pytest.mark.parametrize(
    "kind", ["own", "global", "absolute", "pixels", "nested", "floats", "alpha", "sized", "rendered"]
)
def test_starts_pictures_and_actions_of_packages_that_differ(kind: str) -> None:
    """They draw from their own numbers or NumPy's, are commanded in pixels, render nothing, draw in a given size, in
    floats with channels first, or with transparency."""
    one = task(kind=kind)
    first = one.reset(0, 3, 0)["full_image"]
    assert first.shape == ((24, 24, 3) if kind in ("sized", "rendered") else (24, 48, 3)) and first.dtype == numpy.uint8
    moved, _, _ = one.step(numpy.array([1.0, 0.0], numpy.float32))
    lowest = [numpy.nonzero(picture[..., 0].max(axis=1))[0].max() for picture in (first, moved["full_image"])]
    assert lowest[1] - lowest[0] in (4, 5)  # .2 of the height, wherever its bounds are
    assert numpy.array_equal(one.reset(0, 3, 9)["full_image"], first)
    assert not numpy.array_equal(one.reset(0, 4, 0)["full_image"], first)
    one.close()


def test_actions_in_the_unit_of_the_environment_are_as_they_are() -> None:
    scaled, native = task(kind="absolute"), task(kind="absolute", actions="native")
    for one in (scaled, native):
        one.reset(0, 3, 0)
    moved = [scaled.step(numpy.array([0.5, 0.0]))[0], native.step(numpy.array([384.0, 256.0]))[0]]
    assert numpy.array_equal(*(one["full_image"] for one in moved))
    assert (native.metadata["action_low"], native.metadata["action_high"]) == ([0.0, 0.0], [512.0, 512.0])
    assert scaled.metadata["scaled_high"] == [512.0, 512.0] and "action_high" not in scaled.metadata


def test_a_closed_environment_is_freed_at_once_and_an_episode_may_fade() -> None:
    """A renderer that is freed later takes the context of the next one."""
    one = task(kind="fades")
    one.reset(0, 0, 0)
    point = one._env.unwrapped
    point.renderer = [point]  # as one of MuJoCo and its environment
    for _ in range(6):
        seen = one.step(numpy.clip((point.goal - point.place) / 0.2, -1, 1).astype(numpy.float32))[0]
    assert not seen["full_image"].any()
    left = weakref.ref(point)
    del point
    one.close()
    assert left() is None
    one.close()


def test_success_is_what_info_the_end_or_the_reward_say() -> None:
    def played(**settings: Any) -> list[tuple[float, bool]]:
        one = task(**settings)
        one.reset(0, 0, 0)
        point = one._env.unwrapped
        found = []
        for _ in range(6):
            action = numpy.clip((point.goal - point.place) / 0.2, -1, 1).astype(numpy.float32)
            found.append(one.step(action)[1:])
        return found

    by_info = played()
    assert by_info[-1][1] and not by_info[0][1]
    assert [s for _, s in played(success="reward>=-0.15")] == [s for _, s in by_info]
    assert [s for _, s in played(success="return>=1e-9")] == [False] * 6
    with pytest.raises(ConfigError, match="return>=-300 holds before anything is done"):
        task(success="return>=-300")
    ended = played(kind="terminates", success="terminated")
    assert [s for _, s in ended] == [s for _, s in by_info]  # its end stays a success
    assert ended[-1] == (1.0, True)
    assert [paid for paid, _ in by_info] == [float(s) for _, s in by_info]
    assert played(reward="own")[0][0] < 0
    with pytest.raises(ConfigError, match=r"info\['is_success'\] of a step is 'no'; True or False is expected"):
        played(kind="words")
    with pytest.raises(ConfigError, match=r"reward=owm: success or own\. Did you mean own"):
        task(reward="owm")


def test_success_that_info_has_at_the_end_alone_is_an_array_of_one() -> None:
    one = task(kind="late")
    one.reset(0, 0, 0)
    point = one._env.unwrapped
    towards = [one.step(numpy.clip((point.goal - point.place) / 0.2, -1, 1).astype(numpy.float32)) for _ in range(12)]
    assert [is_success for _, _, is_success in towards] == [False] * 11 + [True]


def test_an_action_is_held_and_the_policy_reads_named_entries() -> None:
    one = task(repeat=3, state=["goal", "agent"], reward="own")
    before = one.reset(0, 1, 0)["state"].copy()
    observed, reward, _ = one.step(numpy.array([0.5, 0.0], numpy.float32))
    assert observed["state"][:2].tolist() == before[:2].tolist() and one.max_steps == 4
    assert observed["state"][2] == pytest.approx(min(before[2] + 0.3, 0.99), abs=1e-6) and reward < 0


def test_a_wrist_camera_is_a_picture_of_the_observation_or_a_camera_of_the_model() -> None:
    seen = task(kind="pixels", wrist="pixels").reset(0, 1, 0)
    assert seen["wrist_image"].shape == (1, 24, 48, 3) and numpy.array_equal(seen["wrist_image"][0], seen["full_image"])
    nested = task(kind="nested", wrist="pixels.hand").reset(0, 1, 0)
    assert numpy.array_equal(nested["wrist_image"][0], nested["full_image"][::-1])
    one, drawn = task(), []
    model = SimpleNamespace(ncam=2, camera=lambda i: SimpleNamespace(name=("side", "hand")[i]))
    renderer = SimpleNamespace(model=model, camera_id=0)
    renderer.render = lambda mode: drawn.append(renderer.camera_id) or numpy.zeros((24, 48, 3), numpy.uint8)
    one._env.unwrapped.mujoco_renderer, one._wrist = renderer, ["hand", "side"]
    assert one.reset(0, 1, 0)["wrist_image"].shape == (2, 24, 48, 3)
    assert drawn == [1, 0] and renderer.camera_id == 0, "its own camera is drawn again"


def test_a_first_picture_shows_what_the_reset_has_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MetaWorld's reset moves bodies of its model, and what is drawn of them is where they were until the next step."""
    one = task()
    own, true = one._env.unwrapped, [one.reset(0, trial, 0)["full_image"].copy() for trial in (1, 2)]
    data = SimpleNamespace(place=own.place)
    stale = SimpleNamespace(model=own, data=data)
    monkeypatch.setitem(sys.modules, "mujoco", SimpleNamespace(mj_forward=lambda m, d: setattr(d, "place", m.place)))
    monkeypatch.setattr(type(own), "mujoco_renderer", stale, raising=False)
    drawn = type(own)._picture
    at = lambda self: drawn(SimpleNamespace(**{**vars(self), "place": data.place}))  # noqa: E731
    monkeypatch.setattr(type(own), "_picture", at)
    for trial, picture in zip((1, 2), true):
        assert numpy.array_equal(one.reset(0, trial, 0)["full_image"], picture), "not the place of the start before"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(sucess="touched"), "Did you mean success"),
        (dict(kind="silent"), r"no success or is_success, only \[\].*success=return>=NUMBER"),
        (dict(success="done"), r"no done, only \['is_success'\]"),
        (dict(kind="unseeded"), "begins otherwise each time with the same seed"),
        (dict(kind="black"), "draws black pictures"),
        (dict(kind="unbounded"), "give finite low and high"),
        (dict(kind="discrete"), r"its actions are Discrete\(3\).*wrapper of yours"),
        (dict(success=["a"]), r"no \['a'\], only"),
        (dict(render_mode="human"), "render_mode=human: it is rgb_array here"),
        (dict(state=["agnet"]), "no 'agnet'. Did you mean agent"),
        (dict(wrist="hand"), "wrist=hand is no picture of its observation, and no camera of its model"),
        (dict(wrist="agent"), "wrist=agent is no picture of its observation"),
        (dict(wrist=2), "wrist=2 is no picture of its observation"),
        (dict(repeat=0), "repeat=0 is not a whole number"),
        (dict(repeat="x"), "repeat=x is not"),
        (dict(max_steps=0), "max_steps=0 is not"),
        (
            dict(max_steps=7, repeat=2),
            r"but it ends after 12 steps, 6 actions.*max_episode_steps=14 besides",
        ),
        (dict(image_size="big"), "image_size=big is not"),
        (dict(actions="natve"), "actions=natve: scaled or native. Did you mean native"),
        (dict(speed=3), "cannot be built with .*speed"),
    ],
)
def test_what_cannot_be_played_is_refused_when_it_is_built(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(**settings)


def test_unknown_and_endless_environments_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no environment 'OurPiont-v0'.*gym:MODULE:ID"):
        suites.find("gym:OurPiont-v0")
    with pytest.raises(ConfigError, match="has gym: before its name, gym:some_module:OurPoint-v0"):
        suites.find("some_module:OurPoint-v0?repeat=2")
    with pytest.raises(ConfigError, match=r"Point is a class of gymnasium.*gym:tests\.rl\.envs\.gym_worlds:ID"):
        suites.find("tests.rl.envs.gym_worlds:Point")
    with pytest.raises(ConfigError, match="OurPointEndless-v0 has no longest episode: give max_steps"):
        GymTask("tests.rl.envs.gym_worlds:OurPointEndless-v0")
    with pytest.raises(ConfigError, match="OurPointVector-v0 is registered as a vector of environments alone"):
        suites.find("gym:tests.rl.envs.gym_worlds:OurPointVector-v0")
    sized = GymTask("tests.rl.envs.gym_worlds:OurPointEndless-v0", max_steps=5, image_size=[16, 40])
    assert sized.image_size == (16, 40)
    assert task(max_steps=7, repeat=2, max_episode_steps=14).max_steps == 7


def test_a_module_that_is_missing_is_named_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's own module is found by its folder; a package that it imports is to be installed."""
    with pytest.raises(ConfigError, match=r"no environment 'nowhere_at_all:X-v0': No module.*PYTHONPATH"):
        suites.find("gym:nowhere_at_all:X-v0")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_more.py").write_text("import not_installed")
    with pytest.raises(ConfigError, match=r"No module named 'not_installed'\. Install it"):
        suites.find("gym:needs_more:X-v0")
    gymnasium.register("NeedsMore-v0", entry_point="needs_more:X", max_episode_steps=5)
    try:
        with pytest.raises(ConfigError, match="NeedsMore-v0 cannot be built: No module named 'not_installed'"):
            GymTask("NeedsMore-v0")
    finally:
        gymnasium.registry.pop("NeedsMore-v0")


def test_a_suite_draws_as_the_recordings_were_drawn_unless_its_name_has_a_size() -> None:
    assert suites.size_of_recordings("gym:OurPoint-v0?repeat=2", 96) == {"image_size": 96}
    assert suites.size_of_recordings("gym:OurPoint-v0?image_size=24", 96) == {}
    assert suites.size_of_recordings("libero_10", 96) == {}  # which draws in the published size


def test_an_unbounded_environment_is_played_within_given_bounds() -> None:
    one = task(kind="unbounded", low=-1, high=[1, 0.5])
    assert one._scaled(numpy.array([1.0, 1.0])).tolist() == [1.0, 0.5]


def test_a_picture_in_another_size_keeps_its_mean() -> None:
    picture = numpy.random.default_rng(0).integers(0, 256, (15, 21, 3)).astype(numpy.uint8)
    assert numpy.array_equal(averaged(picture, (15, 21)), picture)
    small = averaged(picture, (5, 7))
    assert numpy.array_equal(small, numpy.rint(picture.reshape(5, 3, 7, 3, 3).mean(axis=(1, 3))))
    assert averaged(picture, (4, 8)).mean() == pytest.approx(picture.mean(), abs=0.5)


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"gymnasium.*\[gym\]"):
        gym.spec_of("OurPoint-v0")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("Nope-v0", "`Nope` doesn't exist. Install the package that registers it, and name its module"),
        ("nopes/Nope-v0", "nopes not found. Install the package that registers it"),
        (POINT.replace("Point", "Poimt"), "Did you mean OurPoint-v0?"),
    ],
)
def test_an_unknown_environment_is_not_taken_for_another(name: str, cure: str) -> None:
    with pytest.raises(ConfigError) as error:
        gym.spec_of(name)
    assert cure in str(error.value) and "Hopper" not in str(error.value)
