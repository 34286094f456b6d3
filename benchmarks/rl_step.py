# SPDX-License-Identifier: Apache-2.0
"""An experience of a published recipe of world models that learn from rewards: seconds by phase, and memory.

    python -m benchmarks.rl_step --released [--experiment NAME ...] [--architecture lora base] [--steps 1] [--size tiny]

One experience of each recipe of the 2B network at 480p in one process, on random clips and with random weights, with
agreement of latents as the reward in place of the service. Fewer clips, steps and trained steps make it short; what was
reduced is printed, and overrides after ``--`` come last. Printed are seconds by phase, memory beside what plan
predicts, and the seconds of a clip's rollout beside those of the plain sampler for it. An experiment that fails does
not stop the others; the exit code is 1 then.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from benchmarks import machine
from cosmos_predict2.diffusion.transitions import FLOW_KINDS
from cosmos_predict2.models.config import Passes
from cosmos_predict2.rl.clips.rollout import LEVEL_SOLVER
from cosmos_predict2.rl.config import ANY, RLConfig, rl_of
from cosmos_predict2.tools.plan.memory import Memory, predict_memory
from cosmos_predict2.tools.plan.speed import GPUS, predict_speed
from cosmos_predict2.tools.plan.workload import Workload, read_workload
from cosmos_predict2.world_model.options import SamplingOptions
from imaginaire.config.compose import compose
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError
from imaginaire.training.callbacks import Callback

RL, PIPE = "model.config.rl", "model.config.pipe_config"
QUIET = ["ckpt_type=dummy", "trainer.run_validation=false"]
ROWS = {  # what is shown -> phases of the trainer
    "data": ("data",),
    "rollout": ("rollout",),
    "reward": ("reward", "reward_wait"),
    "gradient": ("forward", "backward", "comm"),
    "update": ("optimizer",),
}
EXPERIMENTS = ("predict2p5_2b_flow_grpo", "predict2p5_2b_ddrl", "predict2p5_2b_nft")
ARCHITECTURES = {"lora": "adapters", "base": "all weights"}
RANK = 32  # of adapters where the recipe has none
CLIPS, SAMPLE_STEPS, TRAINED = 2, 4, 1  # of an experience, in place of those of the recipe
LOOSE = f"{RL}.ratio_tolerance=1e9"
GOAL_MEMORY, GOAL_ROLLOUT = 0.05, 1.05


# --- what is measured


class Clock(Callback):
    """Seconds of each phase of each step, of a rollout and of the plain sampler, and the memory of training."""

    steps: ClassVar[list[dict[str, float]]] = []
    rollouts: ClassVar[list[tuple[float, int]]] = []  # seconds of a batch of clips, and evaluations of the network
    plain: ClassVar[tuple[float, int]] = (0.0, 0)
    memory: ClassVar[tuple[int, int]] = (0, 0)

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self._mark = time.perf_counter()
        self.rollouts.clear()
        self.evaluations = 0
        self.hook = model.net.register_forward_pre_hook(self._count)
        roll_out = model._roll_out

        def timed(*arguments: Any) -> Any:
            found: list[Any] = []
            self.rollouts.append(self._measured(lambda: found.append(roll_out(*arguments))))
            return found[0]

        model._roll_out = timed

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Any, iteration: int = 0) -> None:
        machine.wait()
        phases, now = self.trainer.timers.read_and_reset(), time.perf_counter()
        self.steps.append({**phases, "all": now - self._mark})
        self._mark = now
        self.clip = batch.condition, batch.noise_B_C_T_H_W

    def on_train_end(self, model: Any, iteration: int = 0) -> None:
        """Sample a clip of the last micro-batch as the product samples, with as many steps."""
        type(self).memory = machine.peak_memory()
        rl, (condition, noise) = model.rl, self.clip
        solver = None if rl.transition in FLOW_KINDS else LEVEL_SOLVER
        options = SamplingOptions(guidance=rl.guidance, num_steps=rl.sample_steps, solver=solver, is_repeatable=True)
        with torch.no_grad(), model.autocast(model.world.device):
            type(self).plain = self._measured(lambda: model.world.sample(condition, condition, noise, options))
        self.hook.remove()
        del self.clip, model._roll_out  # what holds the model holds its memory

    def _count(self, *_: Any) -> None:
        self.evaluations += 1

    def _measured(self, run: Callable[[], Any]) -> tuple[float, int]:
        before = self.evaluations
        return machine.seconds(run), self.evaluations - before


def measure(overrides: list[str], updates: int, experiences: int) -> tuple[float, dict[str, float]]:
    """Run so many experiences of these updates, after one that is not timed. Mean seconds of an iteration, and of what
    is shown of it; ``other`` is the rest."""
    Clock.steps.clear()
    machine.launch(machine.CONFIG, [*overrides, f"trainer.max_iter={(experiences + 1) * updates}"])
    timed = Clock.steps[updates:]
    rows = {row: sum(step.get(phase, 0.0) for step in timed for phase in phases) for row, phases in ROWS.items()}
    whole = sum(step["all"] for step in timed)
    rows["other"] = whole - sum(rows.values())
    return whole / len(timed), {row: seconds / len(timed) for row, seconds in rows.items()}


def passes_of(work: Workload) -> Passes:
    """The passes of an experience; raises for an experiment that makes none."""
    if work.passes is None:
        raise ConfigError(
            "The experiment makes no clips to learn from. --experiment takes one that learns from rewards of clips,"
            " such as tiny_flow_grpo_toy_world."
        )
    return work.passes


def timed(overrides: list[str]) -> list[str]:
    """The overrides with nothing but their steps, and the clock."""
    names = compose(machine.CONFIG, overrides).trainer.callbacks
    others = [f"trainer.callbacks.{name}=null" for name in names if name != "grad_clip"]
    return [*overrides, *others, f"+trainer.callbacks.clock={{_target_: {__name__}.Clock}}"]


# --- published recipes, reduced


def settings(experiment: str, size: str, architecture: str) -> list[str]:
    """The registered experiment in one process, without files, at 480p."""
    family = experiment.partition("_2b")[0]
    is_tiny = size == "tiny"
    found = [f"experiment={experiment}", *QUIET, "dataloader_train=mock_video", "dataloader_val=mock_video"]
    found += [f"model={family}_video2world_rl_tiny", f"{PIPE}.state_t=4"] if is_tiny else []
    found += ["model_parallel.context_parallel_size=1", "model.config.fsdp_shard_size=0"]
    found += ["model.config.model_manager_config.dit_path=''"]
    config = compose(machine.CONFIG, found)
    net = config.model.config.pipe_config.net
    if family == "predict2p5":
        width = net["crossattn_proj_in_channels"]
        found += ["model.config.text.encoder=null", f"dataloader_train.dataset.width={width}"]
    elif is_tiny:
        found += [f"dataloader_train.dataset.width={net['crossattn_emb_channels']}"]
    found += [f"dataloader_train.dataset.video_size={[48, 48] if is_tiny else [432, 768]}"]
    if not is_tiny:
        found += [f"{PIPE}.resolution='480'", f"{PIPE}.tokenizer.vae_pth=''", f"{PIPE}.tokenizer.allow_random=True"]
    if config.model.config.train_architecture != architecture:
        found += [f"model.config.train_architecture={architecture}"]
        if architecture == "lora":
            found += [f"model.config.lora_rank={RANK}", f"model.config.lora_alpha={RANK}"]
    return [*timed(found), *reduced(rl_of(config.model["config"]))]


def reduced(rl: RLConfig) -> list[str]:
    """A short experience, with a reward that needs no service."""
    rewards = [f"{RL}.rewards.{name}=null" for name in rl.rewards]
    make = "{make: {_target_: cosmos_predict2.rl.rewards.verifiable.LatentAgreement}}"
    found = [*rewards, f"+{RL}.rewards.agreement={make}"]
    found += [f"{RL}.num_rollout={CLIPS}", f"{RL}.rollout_batch=1", f"{RL}.sample_steps={SAMPLE_STEPS}"]
    if rl.is_ratio:
        steps = rl.train_on if ANY in rl.train_on else [k for k in rl.train_on if k < SAMPLE_STEPS - 1]
        return [*found, f"{RL}.train_on={steps[:TRAINED]}"]
    return [*found, f"{RL}.num_timesteps={TRAINED}"]


def run_released(arguments: argparse.Namespace) -> None:
    machine.require_gpu(arguments.size)
    device, dtype = machine.device_and_dtype()
    print(f"{machine.described(device)}, {dtype}", flush=True)
    attempt = machine.Attempts()
    names = arguments.experiment or EXPERIMENTS
    for experiment, architecture in itertools.product(names, arguments.architecture or ARCHITECTURES):
        print(f"\n{experiment}, {ARCHITECTURES[architecture]}, {arguments.size}", flush=True)
        attempt(experiment, measure_released, experiment, architecture, arguments)
        if "ratio_tolerance" in attempt.error:  # a finding of its own, which keeps nothing from being timed
            print(f"  once more, with {LOOSE}", flush=True)
            attempt(experiment, measure_released, experiment, architecture, arguments, LOOSE)
    attempt.end()


def measure_released(experiment: str, architecture: str, arguments: argparse.Namespace, *others: str) -> None:
    """Run so many experiences after one that is not timed, and print what they took."""
    overrides = [*settings(experiment, arguments.size, architecture), *arguments.overrides, *others]
    config = compose(machine.CONFIG, overrides)
    rl = rl_of(config.model["config"])
    parts = config.dataloader_train.batch_size * rl.num_rollout // rl.rollout_batch
    overrides.append(f"trainer.grad_accum_iter={parts // rl.minibatches * rl.num_trained}")
    recipe, ours = (compose(machine.CONFIG, words) for words in ([f"experiment={experiment}"], overrides))
    print(f"  {differences(recipe, ours)}", flush=True)
    machine.forget_peak_memory()
    work = read_workload(ours, 1)
    passes = passes_of(work)
    clips, updates = passes.clips, passes.updates
    whole, rows = measure(overrides, updates, arguments.steps)
    shown = "  ".join(f"{row} {updates * value:.2f} s ({value / whole:.0%})" for row, value in rows.items())
    print(f"  an experience of {clips} clips: {updates * whole:.2f} s   {shown}")
    flops = predict_speed(work, GPUS["H100"]).model_flops_per_gpu
    rate = flops / whole
    share = machine.of_data_sheet(rate)
    print(f"  {flops / 1e12:.4g} TFLOP, {rate / 1e12:.4g} TFLOP/s, {share} of the data sheet's peak", flush=True)
    report_memory(predict_memory(work), *Clock.memory)
    rollouts = Clock.rollouts[len(Clock.rollouts) // (arguments.steps + 1) :]
    mean = sum(seconds for seconds, _ in rollouts) / len(rollouts)
    sampled, evaluations = Clock.plain
    print(
        f"  a clip's rollout {mean:.3f} s ({rollouts[-1][1]} evaluations), sampled plainly {sampled:.3f} s"
        f" ({evaluations}): {mean / sampled:.2f} times (goal {GOAL_ROLLOUT})",
        flush=True,
    )


def differences(recipe: Config, ours: Config) -> str:
    """The settings of the recipe that were reduced, as a sentence."""
    text = recipe.model.config.get("text")
    rows = [("text by", "its encoder" if text and text.get("encoder") else "embeddings", "random embeddings")]
    for name in ("num_rollout", "sample_steps", "train_on", "num_timesteps", "rollout_batch"):
        rows.append((name, *(getattr(rl_of(config.model["config"]), name) for config in (recipe, ours))))
    for name in ("resolution", "state_t"):
        rows.append((name, *(config.model.config.pipe_config[name] for config in (recipe, ours))))
    rows.append(("trained", recipe.model.config.train_architecture, ours.model.config.train_architecture))
    changed = [f"{name} {before} -> {now}" for name, before, now in rows if before != now]
    return f"of the recipe is changed: {'; '.join(changed)}; reward: agreement of latents"


def report_memory(planned: Memory, used: int, taken: int) -> None:
    if not torch.cuda.is_available():
        print(f"  peak memory of the process {used / 1e9:.2f} GB; plan is about a GPU's")
        return
    for name, found, expected in (("in use", used, planned.total - planned.overhead), ("taken", taken, planned.total)):
        away = f"{found / expected - 1:+.1%} (goal: within {GOAL_MEMORY:.0%})"
        print(f"  peak memory {name:6s} {found / 1e9:7.2f} GB, plan {expected / 1e9:7.2f} GB: {away}", flush=True)


def main() -> None:
    parser = machine.parser(__doc__, "threads", "experiment", "overrides")
    parser.add_argument("--released", action="store_true", help="accepted: nothing else is measured")
    parser.add_argument("--architecture", nargs="*", choices=("lora", "base"), help="default: both")
    parser.add_argument("--size", default="2B", choices=("2B", "tiny"), help="2B needs a GPU")
    parser.add_argument("--steps", type=int, default=1, help="timed experiences, after one that is not")
    arguments = machine.parse(parser)
    machine.quiet_trainer()
    run_released(arguments)


if __name__ == "__main__":
    main()
