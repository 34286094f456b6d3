# SPDX-License-Identifier: Apache-2.0
"""Imagined environment steps per second in the loop of a policy that learns, and where the time goes.

    python -m benchmarks.imagination [--envs 16 64 192] [--groups_of 8] [--threads 1] [--rounds 3] [--precision float32]

An iteration is the rollout of all environments (two decisions of twelve actions, imagined by the tiny world model and
judged by the toy world's detector) and sixteen minibatches of the update. The first row of each table decodes and
judges every picture and evaluates the network twice a chunk, as inference does; the rows below leave out the pictures
that nobody looks at, then the second evaluation, which changes pictures but not what is learnt from
them (the last column: how often both call the same episodes successful). What the exact shortcuts inside a chunk buy
against the published way is in `benchmarks.rollout`.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import machine
from cosmos_predict2.checkpoints.tiny_base import tiny_policy_path
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.advantages import group_advantages
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.rl.vla.episodes import LocalRollout, Starts, Trajectories
from cosmos_predict2.rl.vla.policy_losses import PolicyLossConfig, policy_loss
from cosmos_predict2.world_model.options import SamplingOptions

EPISODE, UPDATES, MINIBATCHES = 24, 4, 4
EVERY = Scoring(judge="all", reward_on="last")
LAST = Scoring(judge="last", reward_on="last")
WAYS = [
    ("every picture, two evaluations", EVERY, SamplingOptions(num_steps=1)),
    ("+ the last picture alone", LAST, SamplingOptions(num_steps=1)),
    ("+ one evaluation", LAST, ONE_EVALUATION),
]


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


def measure(num_envs: int, members: int, rounds: int, precision: str) -> None:
    reference: torch.Tensor | None = None
    first: float | None = None
    for name, scoring, sampling in WAYS:
        policy, imagination = ToyPolicy(path=tiny_policy_path()), imagination_of(precision=precision)
        reward, shares, world = ToyDetectorReward(), Shares(), imagination.world
        env = WorldModelEnv(imagination, ToyStarts(), reward, num_envs, EPISODE, scoring=scoring, sampling=sampling)
        for part, holder, attribute in (
            ("policy", policy, "act"),
            ("encode", world, "given_latents"),
            ("denoise", world, "generate_latents"),
            ("decode", world, "decode"),
            ("reward", reward, "judge"),
        ):
            setattr(holder, attribute, shares.timed(part, getattr(holder, attribute)))
        source = LocalRollout(policy, env)
        learn = shares.timed("update", update)
        whole = shares.timed("rest", _iteration)
        played = source.collect(starts(num_envs, members))
        learn(policy, played, members)  # both warm
        shares.seconds.clear()
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            whole(source, learn, policy, starts(num_envs, members), members)
            seconds.append(time.perf_counter() - start)
        speed = num_envs * EPISODE / statistics.median(seconds)
        reference = played.success_E if reference is None else reference
        first = speed if first is None else first
        alike = float((played.success_E == reference).float().mean())
        total = sum(shares.seconds.values())
        parts = "  ".join(f"{part} {shares.seconds[part] / total:.0%}" for part in PARTS)
        row = f"{num_envs:5d} {name:32} {speed:7.0f} steps/s  {speed / first:4.2f}x  {parts}  alike {alike:.3f}"
        print(row, flush=True)


PARTS = ("policy", "encode", "denoise", "decode", "reward", "update", "rest")


def _iteration(source: LocalRollout, learn: Callable[..., Any], policy: ToyPolicy, some: Starts, members: int) -> None:
    learn(policy, source.collect(some), members)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="*", type=int, default=[16, 64, 192])
    parser.add_argument("--groups_of", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="float32")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    device, _ = machine.device_and_dtype()
    print(f"{machine.described(device)}, {asked.precision}")
    for num_envs in asked.envs:
        measure(num_envs, asked.groups_of, asked.rounds, asked.precision)


if __name__ == "__main__":
    main()
