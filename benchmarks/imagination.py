# SPDX-License-Identifier: Apache-2.0
"""Imagined environment steps per second in the loop of a policy that learns, and where the time goes.

    python -m benchmarks.imagination [--envs 16 64] [--steps 24 48] [--groups_of 8] [--threads 1] [--rounds 3]

An iteration is the rollout of all environments (decisions of twelve actions, imagined by the tiny world model and
judged by the toy world's detector) and sixteen minibatches of the update. The first row of each table imagines as the
public code does (`benchmarks.rollout`: one environment after the other, guided by two equal halves, and so on), decodes
and judges every picture, and takes ten steps (eleven evaluations) a chunk. The rows below leave out what has no effect,
then the pictures that nobody looks at, then all evaluations but one, which changes pictures but hardly what is learnt
from them (the last column: how often a way and the first one call the same episodes successful). All ways take turns.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import machine, rollout
from cosmos_predict2.checkpoints.tiny_base import tiny_policy_path
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.rl.advantages import group_advantages
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.episodes.episodes import LocalRollout, Starts, Trajectories
from cosmos_predict2.rl.episodes.policy_losses import PolicyLossConfig, policy_loss
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.sampling import to_uint8
from cosmos_predict2.world_model.world_model import WorldModel

UPDATES, MINIBATCHES = 4, 4
EVERY = Scoring(judge="all", reward_on="last")
LAST = Scoring(judge="last", reward_on="last")
TEN = SamplingOptions(num_steps=10, guidance=rollout.GUIDANCE)  # whose halves are equal: the text is one of zeros
PUBLIC = "as the public code does"
WAYS = {
    PUBLIC: (EVERY, TEN),
    "without what has no effect": (EVERY, TEN),
    "+ the last picture alone": (LAST, TEN),
    "+ one evaluation": (LAST, ONE_EVALUATION),
}


class Shares:
    """Seconds by part; a part inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            self._inside.append(0.0)
            result = function(*arguments, **options)
            spent = time.perf_counter() - start
            self.seconds[name] += spent - self._inside.pop()
            if self._inside:
                self._inside[-1] += spent
            return result

        return call


def starts(num: int, members: int) -> Starts:
    groups = [i // members for i in range(num)]
    return Starts([0] * num, groups, groups, list(range(num)))


def update(policy: ToyPolicy, played: Trajectories, members: int) -> None:
    """The updates of one experience."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    record = {key: value.flatten(0, 1) for key, value in played.record.items()}
    mask = played.executed_M_E_A.flatten(0, 1)
    returns = played.return_E.unflatten(0, (-1, members))
    advantage = group_advantages(returns, torch.ones_like(returns, dtype=torch.bool), epsilon=0.05)
    advantage_B = advantage.flatten().repeat(len(played.reward_M_E_A))
    with torch.no_grad():
        old = policy.log_prob(record).log_prob_B_K_N
    for _ in range(UPDATES):
        for rows in torch.randperm(len(mask)).tensor_split(MINIBATCHES):
            found = policy.log_prob({key: value[rows] for key, value in record.items()})
            loss = policy_loss(found, old[rows], advantage_B[rows], mask[rows], PolicyLossConfig()).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def published(world: WorldModel) -> Callable[..., torch.Tensor]:
    """In place of `Imagination.generate_actions`: the same videos, made as the public code makes them."""
    pipe, way = Video2WorldActionConditionedPipeline(world), rollout.WAYS[0]

    def generate(
        first: torch.Tensor,
        actions: torch.Tensor,
        seeds: list[int],
        options: SamplingOptions,
        *,
        frames: range,
        **_: Any,
    ) -> torch.Tensor:
        inputs = rollout.Inputs(first, actions, seeds)
        video = rollout.imagine(pipe, way, inputs, options.num_steps, rollout.SETTINGS["tiny"][2])
        return to_uint8(video[:, :, frames.start : frames.stop])

    return generate


class Loop:
    """Iterations in one of the ways, with the seconds of their parts."""

    def __init__(self, way: str, num_envs: int, num_steps: int, members: int, precision: str) -> None:
        scoring, sampling = WAYS[way]
        self.policy, imagination = ToyPolicy(path=tiny_policy_path()), imagination_of(precision=precision)
        reward, self.shares, world = ToyDetectorReward(), Shares(), imagination.world
        if way == PUBLIC:
            imagination.generate_actions = published(world)  # type: ignore[method-assign]
        env = WorldModelEnv(imagination, ToyStarts(), reward, num_envs, num_steps, scoring=scoring, sampling=sampling)
        for part, holder, attribute in (
            ("policy", self.policy, "act"),
            ("encode", world, "given_latents"),
            ("imagine", imagination, "generate_actions"),
            ("decode", world, "decode"),
            ("reward", reward, "judge"),
        ):
            setattr(holder, attribute, self.shares.timed(part, getattr(holder, attribute)))
        self.source, self.starts, self.members = LocalRollout(self.policy, env), starts(num_envs, members), members
        self.learn = self.shares.timed("update", update)
        self.iterate = self.shares.timed("rest", self._iterate)
        played = self.source.collect(self.starts)
        self.success_E = played.success_E
        self.learn(self.policy, played, members)  # both warm
        self.shares.seconds.clear()

    def _iterate(self) -> None:
        self.learn(self.policy, self.source.collect(self.starts), self.members)


def measure(num_envs: int, num_steps: int, members: int, rounds: int, precision: str) -> None:
    print(f"\n{num_envs} environments, {num_steps} steps, groups of {members}")
    loops = {way: Loop(way, num_envs, num_steps, members, precision) for way in WAYS}
    seconds = machine.in_turns({way: loop.iterate for way, loop in loops.items()}, rounds)
    for way, loop in loops.items():
        times, speed = seconds.ratio(PUBLIC, way), num_envs * num_steps / seconds.median(way)
        alike = float((loop.success_E == loops[PUBLIC].success_E).float().mean())
        total = sum(loop.shares.seconds.values())
        parts = "  ".join(f"{part} {loop.shares.seconds[part] / total:.0%}" for part in PARTS)
        print(f"  {way:27} {speed:6.0f} steps/s {times:6.2f} x  {parts}  alike {alike:.3f}", flush=True)


PARTS = ("policy", "encode", "imagine", "decode", "reward", "update", "rest")


def main() -> None:
    parser = machine.parser(__doc__, "threads", "rounds", threads=1, rounds=3)
    parser.add_argument("--envs", nargs="*", type=int, default=[16, 64])
    parser.add_argument("--steps", nargs="*", type=int, default=[24], help="of an episode")
    parser.add_argument("--groups_of", nargs="*", type=int, default=[8])
    parser.add_argument("--precision", default="float32")
    asked = machine.parse(parser)
    device, _ = machine.device_and_dtype()
    print(f"{machine.described(device)}, {asked.precision}")
    for sizes in itertools.product(asked.envs, asked.steps, asked.groups_of):
        measure(*sizes, asked.rounds, asked.precision)


if __name__ == "__main__":
    main()
