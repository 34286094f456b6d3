# SPDX-License-Identifier: Apache-2.0
"""Training, learning from rewards, sampling and rollouts with everything on another device than the CPU
(`tests.far_device`): no tensor is made on the wrong one, the host waits for the device only where the lists here say
so, and the numbers are those of the CPU.

Each test has a process of its own, as a process can have one such device for good.
"""

import copy
import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.released import TINY_POLICY
from cosmos_predict2.rl.envs.first_frames import GivenStarts
from cosmos_predict2.rl.envs.replays import ZeroReward
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episodes import LocalRollout
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.imagined import check
from cosmos_predict2.rl.interfaces import Judgement
from cosmos_predict2.rl.policies.files import read_policy
from cosmos_predict2.rl.policies.openvla import tiny as tiny_openvla
from cosmos_predict2.rl.policies.pi05 import tiny as tiny_pi05
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.rl.rewards.resnet import ResnetReward, SuccessClassifier, write_classifier
from cosmos_predict2.toy_world.episodes import make_episodes
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.streaming import Stream
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel
from imaginaire import distributed
from imaginaire.config import L
from imaginaire.optim import adamw, frozen
from imaginaire.training import trainer as trainers
from tests.far_device import NAME, FarDevice, device, register
from tests.models.test_action_training import views_and_state
from tests.multiprocess import run_distributed
from tests.pipelines import test_video2world, test_video2world_action
from tests.rl import runs as rl_runs
from tests.rl import test_actions, vla_runs
from tests.rl.test_flow_grpo import VARIANTS
from tests.training import losses, records, run_dir, train
from tests.world_model import test_flow, test_streaming

Waits = dict[str, int]
Losses = list[tuple[int, float]]

FLOW = "predict2p5_video2world_training_tiny_groot_gr1_480"
ACTION = "predict2_video2world_tiny_action_conditioned_training"
CONFIG = "cosmos_predict2/configs/base/config.py"
RUN = ["job.project=tests", "job.group=engine", "job.name=far", "checkpoint.save_iter=100"]
RUN += [f"trainer.{key}" for key in ("logging_iter=100", "grad_accum_iter=2", "validation_iter=2", "max_val_iter=1")]
RUN += ["dataloader_train.batch_size=2", "dataloader_train.dataset.num_episodes=8"]
RUN += ["dataloader_val.dataset.num_episodes=4", "model.config.pipe_config.ema.enabled=True"]
RUN += [f"model.config.pipe_config.net.{key}" for key in ("num_blocks=1", "sac_config.mode=mm_only")]

# Where the host may wait in a training step, and how often: both look at the same moment, when backward is over.
WAITS_OF_A_STEP = {
    # a gradient that is not finite must be known before the step is applied
    "imaginaire/training/callbacks/train.py:on_before_optimizer_step reads a number": 1,
    # and so must a loss
    "imaginaire/training/trainer.py:_optimizer_step reads a number": 1,
}
# The last step of a run that is shorter than trainer.logging_iter is logged, as the first is.
REPORT = "imaginaire/training/callbacks/report.py:on_before_optimizer_step reads a number"
FOLD = "imaginaire/training/callbacks/report.py:_fold copies to the host"
WAITS_OF_THE_LAST_STEP = {REPORT: 1, FOLD: 5}
# A text must not be ignored in silence by a network that reads none: once a micro-batch.
UNREAD_TEXT = {"cosmos_predict2/nn/dit.py:require_readable reads a number": 2}

# Where the host may wait in a rollout of so many chunks. When a chunk begins nothing is queued, so that its inputs may
# as well be waited for, and whether a text says anything and guidance changes anything is worth a look at them.
CHUNKS = 3
WAITS_OF_A_ROLLOUT = {
    "cosmos_predict2/world_model/world_model.py:encode copies to the device and waits": 1,  # the first frames
    "cosmos_predict2/world_model/imagination.py:_rows copies to the device and waits": CHUNKS,  # the text
    "cosmos_predict2/conditioner.py:_is_same needs the shape of equal": CHUNKS,  # is there anything to guide by?
    "cosmos_predict2/nn/dit.py:prepare reads a number": CHUNKS,  # is there a text?
    # What is not finite must not become the next chunk's first frame.
    "cosmos_predict2/world_model/imagination.py:generate_actions reads a number": CHUNKS,
}
# Where it may wait in chunks of an environment, however many batches are imagined: where the reward looks at pictures,
# and what is not finite must not become the next chunk's first frame.
WAITS_OF_AN_ENVIRONMENT = {
    "cosmos_predict2/world_model/imagination.py:generate_actions reads a number": CHUNKS,
    "cosmos_predict2/rl/rewards/frames.py:judge copies to the host": CHUNKS,
}

# Where the host may wait when it learns from rewards: rewards see clips there, and a ratio that is not 1 must be known
# before the first update. Noise is drawn on the host, the same on any number of processes, and sent without waiting.
WAITS_OF_REWARDS = {
    "cosmos_predict2/nn/dit.py:prepare reads a number",
    "cosmos_predict2/rl/clips/flow_grpo.py:_reward_context copies to the host",
    "cosmos_predict2/rl/clips/flow_grpo.py:_clips copies to the host",
    "cosmos_predict2/rl/clips/flow_grpo.py:_clips reads a number",  # frames a second
    "cosmos_predict2/rl/clips/flow_grpo.py:<listcomp> reads a number",  # and of each clip
    FOLD,
    *WAITS_OF_A_STEP,
}
WAITS_OF_RATIOS = {
    "cosmos_predict2/rl/clips/rollout.py:_watched reads a number",
    "cosmos_predict2/rl/learner.py:mapped copies to the host",  # offload_trajectories
}


# Where it may wait when a policy learns from decisions that were played before: once a minibatch, a pass of the policy.
WAITS_OF_DECISIONS = {
    "cosmos_predict2/rl/episodes/grpo.py:at_end_of_experience reads a number",  # of experiences, when one is over
    "cosmos_predict2/rl/episodes/grpo.py:at_end_of_experience copies and waits",
    FOLD,
    *WAITS_OF_A_STEP,
}
WAITS_OF_A_POLICY: dict[str, set[str]] = {
    "toy": set(),
    "openvla": {
        "cosmos_predict2/rl/policies/openvla/model.py:rows reads a number",  # the longest prompt's length
        "cosmos_predict2/rl/policies/openvla/inputs.py:<genexpr> copies to the device and waits",  # means
    },
    "pi05": {
        "cosmos_predict2/rl/policies/pi05/policy.py:_prefix reads a number",  # the longest prompt's length
        "cosmos_predict2/rl/policies/pi05/policy.py:_times copies to the device and waits",
        "cosmos_predict2/rl/policies/pi05/policy.py:replay reads a number",  # was anything drawn?
    },
}


# In bfloat16 the sums of the two devices, in other orders, differ by 1e-4, and an experience that begins with other
# pictures by 2 %: how far depends on the processor. In float32 they differed by 1e-6 on each.
IMAGINED_PRECISIONS = ("world_model.config.precision", "refinement.optimizer.precision")


# Two groups of four episodes, one update in two minibatches: an experience is two iterations.
DECIDED = ["trainer.run_validation=true", "trainer.validation_iter=2", "model.config.rl.updates=1"]
DECIDED += ["dataloader_train.batch_size=2", "dataloader_val.dataset.num=4", "dataloader_val.batch_size=4"]


def _trained(overrides: list[str], resumes: bool, root: Path) -> tuple[Waits, Losses, Losses]:
    """Causes of the host's waits in all steps but those that begin or resume the run, which check it besides; the
    losses of validation there, and those on the CPU."""
    waits: Waits = {}
    last = "trainer.max_iter=4" if resumes else "trainer.max_iter=2"
    train(root / "cpu", [*RUN, *overrides, last], config=CONFIG)
    for end in ["trainer.max_iter=2", last] if resumes else [last]:
        there = _on_the_device(train, root / NAME, [*RUN, *overrides, end], config=CONFIG)
        waits = dict(Counter(waits) + Counter(there))
    return waits, losses(root / NAME, "far", ("val/loss",)), losses(root / "cpu", "far", ("val/loss",))


def _on_the_device(trained: Callable[..., Any], *args: Any, **options: Any) -> Waits:
    """Train there; what made the host wait in all steps but those that begin or resume the run."""
    step = trainers.ImaginaireTrainer._step

    def watched(self: Any, *args: Any) -> Any:
        far.watching = self.iteration != self.resumed_iteration
        try:
            return step(self, *args)
        finally:
            far.watching = False

    with (
        FarDevice() as far,
        mock.patch("imaginaire.distributed.device", device),
        mock.patch.object(adamw, "FUSED_DEVICES", (*adamw.FUSED_DEVICES, NAME)),
        mock.patch.object(adamw, "CAPTURING_DEVICES", (NAME,)),
        mock.patch.object(trainers.ImaginaireTrainer, "_step", watched),
        mock.patch.object(frozen, "_disable_current_modes", nullcontext),  # the device is a mode itself
    ):
        trained(*args, **options)
    return dict(far.waits)


def _rewarded(options: list[str], root: Path) -> tuple[Waits, list[Any], list[Any]]:
    """Three iterations of reinforcement learning, resumed after the second: the waits of that one, and what was logged
    there and on the CPU."""
    end = ["trainer.max_iter=3", "checkpoint.save_iter=9"]
    rl_runs.run(root / "cpu", *options, *end)
    waits = _on_the_device(rl_runs.run, root / NAME, *options, "trainer.max_iter=2")
    _on_the_device(rl_runs.run, root / NAME, *options, *end)
    return waits, records(run_dir(root / NAME, rl_runs.NAME)), records(run_dir(root / "cpu", rl_runs.NAME))


def _decided(policy: str, root: Path) -> tuple[Waits, list[Any], list[Any]]:
    """Two experiences of a policy, resumed after the first, and validated: as `_rewarded`. Or one of a policy in what
    a world model imagines, which is refined before it."""
    if policy == "imagined":
        options = [*vla_runs.SMALL, *(f"model.config.{key}=float32" for key in IMAGINED_PRECISIONS)]
        return _there_and_here(root, vla_runs.IMAGINED, options, (4,))
    path = [] if policy == "toy" else [f"model.config.policy.path={root / policy}"]
    if policy == "openvla":
        tiny_openvla.write_tiny(root / policy, hold=3, action_chunk=4, action_dim=4, bins=32)
    elif policy == "pi05":
        tiny_pi05.write_tiny(root / policy, hold=3, action_horizon=4)
    return _there_and_here(root / "run", f"{policy}_policy", [*DECIDED, *path], (2, 4))


def _there_and_here(
    root: Path, name: str, options: list[str], ends: tuple[int, ...]
) -> tuple[Waits, list[Any], list[Any]]:
    last = [*options, f"trainer.max_iter={ends[-1]}"]
    expected = vla_runs.run(root / "cpu", *last, name=name)
    for end in ends:
        waits = _on_the_device(vla_runs.run, root / NAME, *last, f"trainer.max_iter={end}", name=name)
    return waits, records(run_dir(root / NAME, vla_runs.NAME)), expected


ADAPTERS = [f"experiment={ACTION}", "model.config.train_architecture=lora", "model.config.precision=float32"]
ADAPTERS += ["trainer.callbacks.action_following.sigmas=[1]"]  # at any level it is the same code
OWN = ["experiment=tiny_long_horizon", "model.config.precision=float32", "model.config.model_manager_config.dit_path="]
OWN += [f"model.config.own_frames.{key}" for key in ("share=1", "chunks=2", "minibatch=1", "noise=0.1")]
OWN += ["dataloader_train.dataset.num_frames=25", "trainer.callbacks.action_following.sigmas=[1]"]
# What an update begins with is on the host, as the loader's episodes are, from which it is cut.
WAITS_OF_OWN_FRAMES = {
    "cosmos_predict2/world_model/imagination.py:_check reads a number": 1,  # are the actions finite?
    "cosmos_predict2/world_model/imagination.py:generate_actions reads a number": 1,
    "cosmos_predict2/models/own_frames.py:_handed_on copies to the host": 1,
}
LOW = [f"experiment={FLOW}", "model.config.precision=bfloat16", "optimizer=fusedadamw", "~optimizer.adam_lr"]
SMALL = [f"experiment={FLOW}", "model.config.precision=float32", "optimizer=fusedadamw", "~optimizer.adam_lr"]
SMALL += ["model.config.train_architecture=lora", "model.config.pipe_config.net.sac_config.mode=block_wise"]
SMALL += ["model.config.frozen_weights=nf4", "model.config.swap_blocks=1", "optimizer.offload=True"]
SMALL += ["model.config.pipe_config.ema.offload=True"]
WAITS_OF_THE_HOST = {"imaginaire/training/model.py:update copies to the host": 1}  # for the average
STATES = torch.tensor([[10.0, 12.0, 0.0], [30.0, 20.0, 0.0]])  # the gripper: its place, and how closed
STUDENT = ["experiment=tiny_student", "model.config.pipe_config.net.num_blocks=4", "model.config.precision=float32"]
ENDS = WAITS_OF_A_STEP | WAITS_OF_THE_LAST_STEP


OWN_FRAMES = {**ENDS, **UNREAD_TEXT, **WAITS_OF_OWN_FRAMES, REPORT: 2, FOLD: 7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "resumes", "expected_waits", "rel"),
    [
        (ADAPTERS, False, {**ENDS, **UNREAD_TEXT, REPORT: 2}, 1e-4),  # the rates of two groups of parameters
        pytest.param(OWN, False, OWN_FRAMES, 1e-4, marks=pytest.mark.long),
        (LOW, False, ENDS, 2e-2),
        pytest.param(LOW, True, {at: 2 * count for at, count in ENDS.items()}, 2e-2, marks=pytest.mark.long),
        (SMALL, True, {place: 2 * count for place, count in (ENDS | WAITS_OF_THE_HOST).items()}, 1e-4),
        pytest.param(STUDENT, False, {**ENDS, **UNREAD_TEXT, REPORT: 2}, 1e-3, marks=pytest.mark.long),
    ],
    ids=["adapters", "own frames", "low precision", "low precision, resumed", "a small card, resumed", "student"],
)
def test_training_stays_on_the_device(
    overrides: list[str], resumes: bool, expected_waits: Waits, rel: float, tmp_path: Path
) -> None:
    waits, found, expected = _alone(_trained, overrides, resumes, tmp_path)
    assert waits == expected_waits
    assert found == [(at, pytest.approx(loss, rel=rel)) for at, loss in expected]


@pytest.mark.slow
def test_views_and_the_state_stay_on_the_device(tmp_path: Path) -> None:
    """Recordings of two cameras, of which one episode lacks one, with a state; and an environment that shows it."""
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")
    waits, found, expected, states = _alone(_seen, tmp_path)
    assert waits == {**ENDS, **dict.fromkeys(UNREAD_TEXT, 1), REPORT: 2, FOLD: 6} and len(found) == len(expected) == 2
    assert found == [(at, pytest.approx(loss, rel=1e-4)) for at, loss in expected]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(states[1], STATES)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        pytest.param("reference", WAITS_OF_REWARDS | WAITS_OF_RATIOS, marks=pytest.mark.long),
        pytest.param("nft", WAITS_OF_REWARDS, marks=pytest.mark.long),
        pytest.param("chunks", WAITS_OF_REWARDS | {*UNREAD_TEXT, *WAITS_OF_OWN_FRAMES}, marks=pytest.mark.long),
    ],
)
def test_learning_from_rewards_stays_on_the_device(name: str, allowed: set[str], tmp_path: Path) -> None:
    """The distance to a copy of the weights, or to the model without its adapters; a policy that lags; a data term;
    branches of a history that was imagined."""
    chunks = [*test_actions.options("nft"), "model.config.own_frames.share=1"]
    waits, found, expected = _alone(_rewarded, VARIANTS.get(name, chunks), tmp_path)
    assert set(waits) == allowed
    assert len(found) == len(expected) == 3
    for key in ("train/reward_mean", "train/grad_norm", "train/loss"):  # a loss of ratios is 0 before the first update
        values = [[one[key] for one in records] for records in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5), key
    if name == "reference":
        assert [(one["train/log_prob_ratio"], one["train/ratio_std"]) for one in found] == [(1, 0)] * 3


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("toy", marks=pytest.mark.long),
        pytest.param("openvla", marks=pytest.mark.long),
        pytest.param("pi05", marks=pytest.mark.long),
        pytest.param("imagined", marks=pytest.mark.slow),
    ],
)
def test_policies_that_learn_stay_on_the_device(policy: str, tmp_path: Path) -> None:
    waits, found, expected = _alone(_decided, policy, tmp_path)
    if policy in WAITS_OF_A_POLICY:
        assert set(waits) == WAITS_OF_DECISIONS | WAITS_OF_A_POLICY[policy]
    assert len(found) == len(expected) >= 4
    for one, other in zip(found, expected):
        for key in ("train/reward_mean", "train/grad_norm", "train/edm_loss", "val/greedy_return"):
            assert (key in one) == (key in other), key
            assert one.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-3), key


@pytest.mark.slow
def test_sampling_and_rollouts_stay_on_the_device() -> None:
    for what, (waits, found, expected) in _alone(_imagined).items():
        assert waits == (WAITS_OF_A_ROLLOUT if what == "rollout" else {}), what
        assert float((found.float() - expected.float()).abs().max()) <= (1 if what == "rollout" else 1e-3), what


@pytest.mark.slow
def test_an_imagined_environment_waits_once_a_chunk_and_for_its_reward() -> None:
    waits, pictures, expected, places, gates = _alone(_environment)
    assert waits == WAITS_OF_AN_ENVIRONMENT
    assert gates[0] == pytest.approx(gates[1], abs=1e-3), "a gate's values of a policy"
    assert (pictures.int() - expected.int()).abs().max() <= 1
    assert places == [NAME, "cpu", NAME, "cpu"]  # beside workers that have their own it is there for validation alone


def _seen(root: Path) -> tuple[Waits, Losses, Losses, list[Tensor]]:
    """As `_trained`, of two iterations on recordings; and the state after two chunks of the world model, as an
    environment shows it there and here."""
    options = [*views_and_state(root / "data"), "model.config.precision=float32", "trainer.max_iter=2"]
    train(root / "cpu", options, config=CONFIG)
    waits = _on_the_device(train, root / NAME, options, config=CONFIG)
    imagination = imagination_of(str(run_dir(root / "cpu", "actions")), device="cpu")
    pictures = torch.randint(0, 256, (2, 64, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    actions_E_A_D = torch.rand(2, 12, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1

    def play(imagination: Imagination) -> Tensor:
        env = WorldModelEnv(imagination, GivenStarts(pictures, states_E_S=STATES), ZeroReward(), 2, 24)
        env.reset(options={"trial_ids": range(2), "seeds": range(2)})
        state: Tensor = [env.chunk_step(actions_E_A_D)[0]["state"] for _ in range(2)][-1]
        return state.cpu()

    here, world = play(imagination), imagination.world
    with FarDevice():
        net, tokenizer = (copy.deepcopy(part).to(device()) for part in (world.net, world.tokenizer))
        there = play(Imagination(WorldModel(world.config, net, tokenizer, device=device()), imagination.views))
    runs = [losses(root / place, "actions", ("train/loss",)) for place in (NAME, "cpu")]
    return waits, runs[0], runs[1], [there, here]


def _environment() -> tuple[Waits, Tensor, Tensor, list[str], list[list[float]]]:
    """Causes of the host's waits in chunks of an environment; its pictures there and on the CPU; the place of the world
    model in a process that trains a policy while others play: at first, in a rollout, in validation and after it; and
    a gate's figures there and on the CPU."""
    imagination = imagination_of(device="cpu")
    actions = torch.rand(CHUNKS, 5, 12, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def play(imagination: Imagination, far: FarDevice | None = None) -> Tensor:
        scoring = Scoring(judge="last", reward_on="last")
        env = WorldModelEnv(imagination, ToyStarts(), ToyDetectorReward(), 5, 36, scoring=scoring, batch_size=2)
        env.reset(options={"trial_ids": range(5), "seeds": range(5)})
        for chunk in actions:
            if far is not None:
                far.watching = True
            observed = env.chunk_step(chunk)[0]
            if far is not None:
                far.watching = False
        return observed["full_image"].cpu()

    expected, gate_here = play(imagination), _gate(imagination)
    with FarDevice() as far:
        world = imagination.world
        net, tokenizer = (copy.deepcopy(part).to(device()) for part in (world.net, world.tokenizer))
        moved = WorldModel(world.config, net, tokenizer, device=device())
        pictures = play(Imagination(moved), far)
        waits = dict(far.waits)
        gates = [_gate(Imagination(moved)), gate_here]
        return waits, pictures, expected, _places(Imagination(moved)), gates


def _gate(imagination: Imagination) -> list[float]:
    """Values of a policy in an imagination, by recordings of the toy world."""
    made = make_episodes(3, 0, mix="outcomes", first=2**19)
    films = [torch.from_numpy(made.render(i)) for i in range(3)]
    actions = [torch.from_numpy(made.actions[i]).float() for i in range(3)]
    recorded = check.OutcomeEpisodes(
        torch.stack([film[0] for film in films]), films, films, actions, made.success, ["push"] * 3
    )
    policy = read_policy(TINY_POLICY)[0].to(imagination.world.device)
    with TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)
        path = Path(folder) / "reward_model.safetensors"
        write_classifier(path, SuccessClassifier((4, 4, 4, 4, 4)), {})
        reward = ResnetReward(str(path)).to(imagination.world.device)
    figures = check.policy_figures(policy, imagination, reward, recorded, recorded)
    return [figures[name].value for name in ("greedy_value", "sampled_value")]


def _places(imagination: Imagination) -> list[str]:
    def place() -> str:
        (found,) = {weight.device.type for weight in imagination.world.net.parameters()}
        return found

    def elsewhere(env: Any, **options: Any) -> Any:
        found: Any = LocalRollout(env=ToyEnv(4), **options)
        found.is_elsewhere = True
        found.sync = lambda policy: places.append(place())
        return found

    def judge(self: Any, frames: Tensor, context: Any) -> Judgement:
        places.append(place())
        return judged(self, frames, context)

    places, judged = [place()], ToyDetectorReward.judge
    env = L(WorldModelEnv)(imagination=imagination, starts=L(ToyStarts)(), reward=L(ToyDetectorReward)(), num_envs=2)
    env.max_steps = 12
    parts: Any = dict(policy=L(ToyPolicy)(width=8), env=env, rollout=L(elsewhere)(), rl=VLARLConfig(group_size=2))
    one = VLAGRPOModel(VLAGRPOConfig(**parts))
    trials = torch.arange(2)
    batch = {"task_id": trials * 0, "trial_id": trials}
    next(one.train_batches([batch]))
    with mock.patch.object(ToyDetectorReward, "judge", judge):
        one.validation_step(batch, 0)
    return [*places, place()]


def _imagined() -> dict[str, tuple[Waits, Tensor, Tensor]]:
    """By solver, and of a rollout: what made the host wait, and the video there and on the CPU.

    Sampling is watched from the end of its first step to its last, a rollout as a whole.
    """
    levels, flow = test_video2world.make_pipeline(), test_flow.make_pipeline(conditional_frame_timestep=0.1)
    texts = {pipe: torch.randn(2, 2, 6, pipe.dit.text_channels) for pipe in (levels, flow)}
    frames, actions, seeds = test_video2world_action.inputs(length=CHUNKS * test_video2world_action.ACTIONS)
    text = torch.randn(1, 4, 8)

    def generate(pipe: Any, on: Any, solver: str, on_step: Any = None) -> Tensor:
        options: dict[str, Any] = dict(
            options=SamplingOptions(num_steps=4, guidance=3.0, solver=solver), on_step=on_step
        )
        video: Tensor = _moved(pipe, on).generate(test_flow.frames(), *texts[pipe], **options).cpu()
        return video

    found = {}
    for pipe, solver in ((levels, "2ab"), (flow, "unipc"), (flow, "distilled")):
        expected = generate(pipe, "cpu", solver)
        with FarDevice() as far:

            def watch(i: int, step: Any, far: FarDevice = far) -> None:
                far.watching = i < 3

            found[solver] = generate(pipe, device(), solver, watch), expected
        found[solver] = (dict(far.waits), *found[solver])
    pipe = test_video2world_action.make_pipeline()
    options: dict[str, Any] = dict(options=SamplingOptions(guidance=2.0, num_steps=3), text_B_S_E=text)
    expected = pipe.rollout(frames, actions, seeds, **options)
    with FarDevice() as far:
        pipe = _moved(pipe, device())
        far.watching = True
        video = pipe.rollout(frames, actions, seeds, **options)
        far.watching = False
        found["rollout"] = (dict(far.waits), video.cpu(), expected)
    imagination, inputs = test_streaming.make_imagination(), test_streaming.inputs()
    expected = _streamed(imagination, *inputs)
    with FarDevice() as far:
        world = imagination.world
        net, tokenizer = (copy.deepcopy(part).to(device()) for part in (world.net, world.tokenizer))
        moved = Imagination(WorldModel(world.config, net, tokenizer, device=device()))
        found["stream"] = ({}, _streamed(moved, *inputs).cpu(), expected)
    return found


def _streamed(imagination: Imagination, first: Tensor, actions: Tensor) -> Tensor:
    stream = Stream(imagination, first, [5, 6], SamplingOptions(num_steps=1))
    return torch.cat([stream.advance(part, as_float=True) for part in actions.split(4, dim=1)], dim=2)


def _moved(pipe: Any, on: Any) -> Any:
    return type(pipe)(WorldModel(pipe.config, copy.deepcopy(pipe.dit).to(on), pipe.world.tokenizer, device=on))


def _alone(fn: Callable[..., Any], *args: Any) -> Any:
    """The value of a function that runs in a process of its own."""
    (value,) = run_distributed(_without_group, 1, (fn, args))
    return value


def _without_group(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    distributed.shutdown()
    register()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return fn(*args)
