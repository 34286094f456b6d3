# SPDX-License-Identifier: Apache-2.0
"""Imagined environment steps per second in the loop of a policy that learns, and where the time goes.

    python -m benchmarks.imagination [--envs 16 64] [--steps 24 48] [--groups_of 8] [--threads 1] [--rounds 3]
    python -m benchmarks.imagination --released [--envs 16] [--rounds 2] [--size tiny]

An iteration is the rollout of all environments (decisions of twelve actions, imagined by the tiny world model and
judged by the toy world's detector) and sixteen minibatches of the update. The first row of each table imagines as the
public code does (`benchmarks.rollout`: one environment after the other, guided by two equal halves, and so on), decodes
and judges every picture, and takes ten steps (eleven evaluations) a chunk. The rows below leave out what has no effect,
then the pictures that nobody looks at, then all evaluations but one, which changes pictures but hardly what is learnt
from them (the last column: how often a way and the first one call the same episodes successful). All ways take turns.
`--released` measures chunks of the published sizes in place of all this: `benchmarks.released_imagination`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import machine, released_imagination, rollout
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.released import tiny_policy_path
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.episodes.config import VLAGRPOConfig, VLARLConfig
from cosmos_predict2.rl.episodes.grpo import VLAGRPOModel
from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.world_model.options import SamplingOptions
from imaginaire.config import L

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


Parts = Iterator[tuple[str, Any, str]]  # what is timed: the part, an object and its method
PARTS = ("policy", "encode", "imagine", "decode", "reward", "update")


class Loop:
    """Iterations of a policy in an environment, as the trainer makes them, with the seconds of their parts."""

    def __init__(self, policy: Any, env: Any, groups: int, rl: VLARLConfig, parts: Callable[[Any], Parts]) -> None:
        self.model = VLAGRPOModel(VLAGRPOConfig(policy=policy, env=env, eval_env=L(ToyEnv)(num_envs=1), rl=rl))
        self.model.to(machine.device_and_dtype()[0]).train()
        trials = torch.arange(groups)
        self.starts = {"task_id": torch.zeros_like(trials), "trial_id": trials}
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-6)
        self.shares = machine.Phases()
        for part, holder, name in parts(self.model):
            object.__setattr__(holder, name, self.shares.timed(part, getattr(holder, name)))
        self.iterate = self.shares.timed("update", self._iterate)
        self.iterate()  # warm
        self.shares.seconds.clear()

    def _iterate(self) -> None:
        for decisions in self.model.train_batches([self.starts]):
            _, loss = self.model.training_step(decisions, 0)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def imagined(way: str, num_envs: int, num_steps: int) -> WorldModelEnv:
    """The tiny world model as an environment that imagines in this way."""
    (scoring, sampling), imagination = WAYS[way], imagination_of()
    if way == PUBLIC:
        imagination.generate_actions = rollout.published(imagination.world)  # type: ignore[method-assign]
    reward = ToyDetectorReward()
    return WorldModelEnv(imagination, ToyStarts(), reward, num_envs, num_steps, scoring=scoring, sampling=sampling)


def parts_of(model: Any) -> Parts:
    imagination = model.env.imagination
    yield "policy", model.net, "act"
    yield "encode", imagination.world, "given_latents"
    yield "imagine", imagination, "generate_actions"
    yield "decode", imagination.world, "decode"
    yield "reward", model.env.reward, "judge"


def measure(num_envs: int, num_steps: int, members: int, rounds: int) -> None:
    print(f"\n{num_envs} environments, {num_steps} steps, groups of {members}")
    rl = VLARLConfig(group_size=members, updates=4, minibatches=4)
    envs = {way: L(imagined)(way=way, num_envs=num_envs, num_steps=num_steps) for way in WAYS}
    policy = L(ToyPolicy)(path=tiny_policy_path())
    loops = {way: Loop(policy, env, num_envs // members, rl, parts_of) for way, env in envs.items()}
    success = {way: loop.model.source.collect(loop.model.starts(loop.starts)).success_E for way, loop in loops.items()}
    for loop in loops.values():
        loop.shares.seconds.clear()
    seconds = machine.in_turns({way: loop.iterate for way, loop in loops.items()}, rounds)
    for way, loop in loops.items():
        times, speed = seconds.ratio(PUBLIC, way), num_envs * num_steps / seconds.median(way)
        alike = float((success[way] == success[PUBLIC]).float().mean())
        total = sum(loop.shares.seconds.values())
        parts = "  ".join(f"{part} {loop.shares.seconds[part] / total:.0%}" for part in PARTS)
        print(f"  {way:27} {speed:6.0f} steps/s {times:6.2f} x  {parts}  alike {alike:.3f}", flush=True)


def main() -> None:
    parser = machine.parser(__doc__, "threads", "rounds")
    parser.add_argument("--envs", nargs="*", type=int, help="default: 16 64, of --released 16")
    parser.add_argument("--steps", nargs="*", type=int, default=[24], help="of an episode")
    parser.add_argument("--groups_of", nargs="*", type=int, default=[8])
    parser.add_argument("--released", action="store_true", help="chunks of the published sizes, with random weights")
    parser.add_argument("--size", default="2B", choices=list(rollout.SETTINGS), help="of --released; 2B needs a GPU")
    args = machine.parse(parser)
    if args.released:
        for num_envs in args.envs or [16]:
            released_imagination.measure(args.size, num_envs, args.rounds or 2)
        return
    torch.set_num_threads(args.threads or 1)
    device, _ = machine.device_and_dtype()
    print(f"{machine.described(device)}")
    for sizes in itertools.product(args.envs or [16, 64], args.steps, args.groups_of):
        measure(*sizes, args.rounds or 3)


if __name__ == "__main__":
    main()
