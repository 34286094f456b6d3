# SPDX-License-Identifier: Apache-2.0
"""A whole experience of a published policy in the published world model, on one GPU: seconds and memory by phase.

    python -m benchmarks.vla --released [--policies openvla pi05] [--adapters] [--experiences 2] [--envs 16]
    python -m benchmarks.vla --released --size tiny

The published configurations of OpenVLA-OFT and PI0.5 run in the trainer, in one process: 16 environments of the 2B
network with actions (256 x 320, 12 frames in 10 steps), rollout and update, and the world model leaves the GPU in
between. Episodes are a few decisions long in place of 32, and an experience is one rollout of all environments; neither
changes what is in memory at a time. Weights are random: policies are written in their published layout and loaded from
there, and rewards are not rounded, so that there is something to learn from.
"""

import argparse
import contextlib
import gc
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch

from benchmarks import machine, rollout
from cosmos_predict2.compat.rlinf.configurations import translate_embodiment
from cosmos_predict2.compat.rlinf.files import load_embodiment
from cosmos_predict2.rl.envs.recorded_starts import FILE, RecordedStart, write_starts
from cosmos_predict2.rl.episodes import grpo
from cosmos_predict2.rl.policies.openvla import tiny as openvla
from cosmos_predict2.rl.policies.openvla.model import OpenVLAModel
from cosmos_predict2.rl.policies.pi05 import tiny as pi05
from cosmos_predict2.rl.policies.pi05.config import VARIANTS, Vision
from cosmos_predict2.rl.policies.pi05.network import Pi05Network
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.training.callbacks import Callback

CONFIGS = str(machine.ROOT / "examples/embodiment/config")
NAMES = {"openvla": "cosmos_libero_spatial_grpo_openvlaoft", "pi05": "cosmos_libero_spatial_grpo_openpi05"}
NETWORKS: dict[str, type] = {"openvla": OpenVLAModel, "pi05": Pi05Network}
DECISIONS = {"openvla": 2, "pi05": 8}  # of an episode: with 16 environments a published micro-batch, 32 and 128
OPENVLA: dict[str, Any] = dict(
    image_size=224, width=4096, layers=32, mlp=11008, heads=32, vision=None, text_tokens=31_744
)
PI05: dict[str, Any] = dict(vlm=VARIANTS["gemma_2b"], expert=VARIANTS["gemma_300m"], vision=Vision(), action_dim=32)
ACTION_DIM = {"tiny": 4, "2B": 7}
EXPERIENCES = {"openvla": 2, "pi05": 1}
GOAL_GB = 50
BIAS = -2.0  # of the classifier: no episode ends early


class ExperienceClock(Callback):
    """Times the phases of the trainer and of the model that it trains."""

    phases: ClassVar[machine.Phases]
    facts: ClassVar[dict[str, float]] = {}

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        phases, env = self.phases, model.env
        phases.enter("between")
        for name, holder, method in (
            ("rollout: other", model, "collect"),
            ("rollout: policy", model.net, "act"),
            ("rollout: imagination", env.imagination, "generate_actions"),
            ("rollout: reward", env.reward, "judge"),
            ("offload: away", env, "offload"),
            ("offload: back", env, "onload"),
        ):
            phases.watch(name, holder, method)

    def on_before_forward(self, iteration: int = 0) -> None:
        self.phases.enter("update: forward")

    def on_after_forward(self, iteration: int = 0) -> None:
        self.phases.leave()

    def on_before_backward(self, model: Any, loss: Any, iteration: int = 0) -> None:
        self.phases.enter("update: backward")

    def on_after_backward(self, model: Any, iteration: int = 0) -> None:
        self.phases.leave()

    def on_before_optimizer_step(self, model: Any, *arguments: Any, **options: Any) -> None:
        self.phases.enter("update: optimizer")

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Any, iteration: int = 0) -> None:
        self.phases.leave()
        for name in ("draw_difference", "ratio_mean", "reward_std"):
            if name in output:
                self.facts[name] = float(output[name])


def random_imagination(dit_path: str, **_: Any) -> Imagination:
    """A replacement of `imagination_of`: the world model of this size with random weights in every part."""
    return Imagination(rollout.make_pipeline(dit_path, *machine.device_and_dtype()).world)


def write_world(folder: Path, size: str, num_envs: int) -> None:
    """First pictures and a success classifier, where a published folder of a world model has them."""
    height = rollout.SETTINGS[size][0]
    generator = numpy.random.default_rng(0)
    pictures = [generator.integers(0, 256, (1, height, height, 3), dtype=numpy.uint8) for _ in range(num_envs)]
    write_starts(folder / "dataset" / FILE, (RecordedStart(f"{i}", "a task", one) for i, one in enumerate(pictures)))
    torch.manual_seed(0)
    classifier = SuccessClassifier()
    head: Any = classifier.net[-2]
    torch.nn.init.constant_(head.bias, BIAS)
    torch.save(classifier.state_dict(), folder / "resnet_rm.pth")


def write_policy(folder: Path, policy: str, size: str) -> None:
    """A random policy in its published layout, of the published sizes or a tiny one."""
    dim, (device, dtype) = ACTION_DIM[size], machine.device_and_dtype()
    if policy == "openvla":
        released: dict[str, Any] = {} if size == "tiny" else dict(OPENVLA, dtype=dtype, device=device)
        openvla.write_tiny(folder, action_dim=dim, sentences=["a task"], **released)
        return
    low, high = [-1.0] * dim, [1.0] * dim
    statistics = {name: {"q01": low, "q99": high} for name in ("state", "actions")}
    released = {} if size == "tiny" else dict(PI05, dtype=dtype, device=device)
    horizon = dict(action_horizon=10, max_token_len=200, num_steps=3, action_env_dim=dim)
    pi05.write_tiny(folder, norm_stats=statistics, sentences=["a task"], **horizon, **released)  # type: ignore[arg-type]


def changes(policy: str, size: str, args: argparse.Namespace) -> dict[str, Any]:
    """The settings that are smaller than in the published configuration, which is of four GPUs, by its names."""
    steps, envs = 8 * (args.decisions or DECISIONS[policy]), args.envs
    micro = min({"openvla": 32, "pi05": 128}[policy], envs * steps // 8)
    found: dict[str, Any] = {
        "env.train.total_num_envs": envs,
        "env.train.world_model_cfg.cosmos.batch_size": envs,
        "env.train.max_episode_steps": steps,
        "env.train.max_steps_per_rollout_epoch": steps,
        "algorithm.rollout_epoch": 1,
        "algorithm.group_size": args.groups_of,
        "algorithm.filter_rewards": False,
        "actor.global_batch_size": envs * steps // 8,
        "actor.micro_batch_size": micro,
        "runner.max_epochs": args.experiences or EXPERIENCES[policy],
    }
    if args.adapters:
        found |= {"actor.model.is_lora": True}
    if size == "tiny":
        found |= {"actor.model.action_dim": ACTION_DIM[size], "env.train.world_model_cfg.image_size": "[48,48]"}
    return found


def overrides_of(policy: str, size: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """The trainer's overrides: the published configuration's, on what lies in the folder."""
    own = {
        **changes(policy, size, args),
        "env.train.cosmos_model_dir": folder,
        "actor.model.model_path": folder / policy,
        "rollout.model.model_path": folder / policy,
    }
    if policy == "openvla":
        own["actor.model.unnorm_key"] = "tiny"
    content = load_embodiment(CONFIGS, NAMES[policy], [f"{name}={value}" for name, value in own.items()])
    env = "model.config.env"
    return [
        *translate_embodiment(content, 1).overrides,
        f"{env}.imagination._target_={__name__}.random_imagination",
        f"{env}.imagination.dit_path={size}",
        f"{env}.reward.rounded=False",
        "model.config.rl.draw_tolerance=1.0",  # random weights; what it is, is printed
        "model.config.rl.ratio_tolerance=1.0",
        "ckpt_type=dummy",
        "trainer.callbacks.progress_bar=null",
        f"+trainer.callbacks.phases={{_target_: {__name__}.ExperienceClock}}",
        *args.overrides,
    ]


@contextlib.contextmanager
def without_drawing(network: Any) -> Iterator[None]:
    """Build a network without random numbers in this context: its file replaces all of them, and they take a minute."""
    original, skipped = network.__init__, importlib.import_module("transformers.initialization").no_init_weights

    def build(self: Any, *arguments: Any, **options: Any) -> None:
        with skipped():
            original(self, *arguments, **options)

    network.__init__ = build
    try:
        yield
    finally:
        network.__init__ = original


def planned(policy: str, size: str, args: argparse.Namespace) -> dict[str, Any]:
    """The estimates of scripts.plan for the published configuration with these changes, by what is trained."""
    words = [f"{name}={value}" for name, value in changes(policy, size, args).items()]
    found = machine.planned("--embodied", NAMES[policy], "--", *words)
    if "error" in found:
        print(f"  plan: {found['error']}")
    forms: dict[str, Any] = found.get("forms", {})
    return forms


def measure(policy: str, size: str, args: argparse.Namespace) -> None:
    """Run the trainer and print its table."""
    print(f"\n{policy}, {size}: {NAMES[policy]}, changed:")
    print("\n".join(f"    {name} = {value}" for name, value in changes(policy, size, args).items()), flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        folder = Path(place)
        write_world(folder, size, args.envs)
        took = machine.seconds(lambda: write_policy(folder / policy, policy, size))
        written = sum(file.stat().st_size for file in (folder / policy).rglob("*"))
        print(f"  {written / 1e9:.2f} GB of random weights written in {took:.1f} s", flush=True)
        gc.collect()
        overrides = overrides_of(policy, size, args, folder)
        log_probs = grpo.log_probs
        ExperienceClock.facts.clear()
        ExperienceClock.phases = phases = machine.Phases()
        machine.forget_peak_memory()
        phases.enter("load")
        grpo.log_probs = phases.timed("update: probabilities", log_probs)
        try:
            with without_drawing(NETWORKS[policy]):
                machine.launch(machine.CONFIG, overrides)
        finally:
            grpo.log_probs = log_probs
            if len(phases.seconds) > 1:
                report(phases, planned(policy, size, args))


def report(phases: machine.Phases, plan: dict[str, Any]) -> None:
    """The table of what ran, complete or not, beside the plan."""
    total = sum(phases.seconds.values())
    print(f"  {'':24}{'seconds':>10}{'share':>8}{'GB in use':>12}{'GB taken':>12}")
    for name, spent in sorted(phases.seconds.items()):
        used, taken = phases.memory[name]
        print(f"  {name:24}{spent:>10.2f}{spent / total:>8.1%}{used / 1e9:>12.2f}{taken / 1e9:>12.2f}")
    used, taken = phases.peak()
    print(f"  {'whole':24}{total:>10.2f}{'':>8}{used / 1e9:>12.2f}{taken / 1e9:>12.2f}   goal: {GOAL_GB} GB")
    for form, one in plan.items():
        parts = {name: value for name, value in one.items() if name not in ("fits", "total", "hours_per_epoch")}
        listed = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in parts.items())
        print(f"  plan, {form:18}{one['total'] / 1e9:>30.2f} GB in all: {listed}")
    print("  " + ", ".join(f"{name} {value:.3g}" for name, value in ExperienceClock.facts.items()), flush=True)


def run(args: argparse.Namespace) -> int:
    """All policies; the exit code."""
    machine.require_gpu(args.size)
    machine.quiet_trainer()
    print(f"{machine.described(machine.device_and_dtype()[0])}; random weights, rewards not rounded")
    attempt = machine.Attempts()
    for policy in args.policies:
        attempt(policy, measure, policy, args.size, args)
        machine.forget_peak_memory()
    return int(attempt.num_failed > 0)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--released", action="store_true", help="accepted: nothing else is measured")
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--groups_of", type=int, default=8)
    parser.add_argument("--policies", nargs="*", default=["openvla", "pi05"], choices=("openvla", "pi05"))
    parser.add_argument("--size", default="2B", choices=("tiny", "2B"), help="of policies and world model")
    parser.add_argument("--adapters", action="store_true", help="train adapters of rank 32 in place of the weights")
    parser.add_argument("--experiences", type=int, help="rollouts with updates; default: 2 of openvla, 1 of pi05")
    parser.add_argument("--decisions", type=int, help="of an episode; default: 2 of openvla, 8 of pi05")
    parser.add_argument("--folder", help="where policies are written for a while; default: the temporary folder")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of the configuration")
    raise SystemExit(run(machine.parse(parser)))


if __name__ == "__main__":
    main()
