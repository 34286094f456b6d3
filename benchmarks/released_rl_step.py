# SPDX-License-Identifier: Apache-2.0
"""One experience of the published recipes of reinforcement learning on the 2B network at 480p, with random weights.

    python -m benchmarks.rl_step --released [--experiment NAME ...] [--architecture lora base] [--steps 1]
    python -m benchmarks.rl_step --released --size tiny [-- model.config.rl.num_rollout=4]

The trainer itself runs the registered experiments in one process, on random clips, with agreement of latents as the
reward in place of the service. Fewer clips, steps and trained steps make an experience short; what was reduced is
printed, and overrides after ``--`` come last. Printed are seconds by phase, memory beside what plan predicts, and the
seconds of a clip's rollout beside those of the plain sampler for it. An experiment that fails does not stop the others;
the exit code is 1 then.
"""

import argparse
import gc
import itertools
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from benchmarks import machine
from cosmos_predict2.diffusion.transitions import FLOW_KINDS
from cosmos_predict2.models.passes import Passes
from cosmos_predict2.rl.clips.rollout import LEVEL_SOLVER
from cosmos_predict2.rl.config import ANY, RLConfig, rl_of
from cosmos_predict2.tools.plan.memory import Memory, predict_memory
from cosmos_predict2.tools.plan.speed import GPUS, predict_speed
from cosmos_predict2.tools.plan.workload import Workload, read_workload
from cosmos_predict2.world_model.options import SamplingOptions
from imaginaire.config.compose import compose
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError, UserError
from imaginaire.training.callbacks import Callback

CONFIG = "cosmos_predict2/configs/base/config.py"
RL = "model.config.rl"
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
PIPE = "model.config.pipe_config"


def passes_of(work: Workload) -> Passes:
    """The passes of an experience; raises for an experiment that makes none."""
    if work.passes is None:
        raise ConfigError(
            "The experiment makes no clips to learn from. --experiment takes one that learns from rewards of clips,"
            " such as tiny_flow_grpo_toy_world."
        )
    return work.passes


class PhaseClock(Callback):
    """Seconds of each phase of each step, and of the whole step."""

    steps: ClassVar[list[dict[str, float]]] = []

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self._mark = time.perf_counter()

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Any, iteration: int = 0) -> None:
        machine.wait()
        phases, now = self.trainer.timers.read_and_reset(), time.perf_counter()
        self.steps.append({**phases, "all": now - self._mark})
        self._mark = now


class Clock(PhaseClock):
    """Phases of each experience, seconds of a rollout and of the plain sampler, and the memory of training."""

    rollouts: ClassVar[list[tuple[float, int]]] = []  # seconds of a batch of clips, and evaluations of the network
    plain: ClassVar[tuple[float, int]] = (0.0, 0)
    memory: ClassVar[tuple[int, int]] = (0, 0)

    @classmethod
    def forget(cls) -> None:
        for kept in (cls.steps, cls.rollouts):
            kept.clear()

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        super().on_train_start(model, iteration)
        self.evaluations = 0
        self.hook = model.net.register_forward_pre_hook(self._count)
        roll_out = model._roll_out

        def timed(*arguments: Any) -> Any:
            found: list[Any] = []
            self.rollouts.append(self._measured(lambda: found.append(roll_out(*arguments))))
            return found[0]

        model._roll_out = timed

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Any, iteration: int = 0) -> None:
        super().on_training_step_end(model, batch, output, loss, iteration)
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


# --- what is run


def settings(experiment: str, size: str, architecture: str) -> list[str]:
    """The registered experiment in one process, without files, at 480p."""
    family = experiment.partition("_2b")[0]
    is_tiny = size == "tiny"
    found = [f"experiment={experiment}", *QUIET, "dataloader_train=mock_video", "dataloader_val=mock_video"]
    found += [f"model={family}_video2world_rl_tiny", f"{PIPE}.state_t=4"] if is_tiny else []
    found += ["model_parallel.context_parallel_size=1", "model.config.fsdp_shard_size=0"]
    found += ["model.config.model_manager_config.dit_path=''"]
    config = compose(CONFIG, found)
    if family == "predict2p5":
        width = config.model.config.pipe_config.net["crossattn_proj_in_channels"]
        found += ["model.config.text.encoder=null", f"dataloader_train.dataset.width={width}"]
    elif is_tiny:
        found += [f"dataloader_train.dataset.width={config.model.config.pipe_config.net['crossattn_emb_channels']}"]
    found += [f"dataloader_train.dataset.video_size={[48, 48] if is_tiny else [432, 768]}"]
    if not is_tiny:
        found += [f"{PIPE}.resolution='480'", f"{PIPE}.tokenizer.vae_pth=''", f"{PIPE}.tokenizer.allow_random=True"]
    if config.model.config.train_architecture != architecture:
        found += [f"model.config.train_architecture={architecture}"]
        if architecture == "lora":
            found += [f"model.config.lora_rank={RANK}", f"model.config.lora_alpha={RANK}"]
    others = [f"trainer.callbacks.{name}=null" for name in config.trainer.callbacks if name != "grad_clip"]
    clock = "+trainer.callbacks.clock={_target_: benchmarks.released_rl_step.Clock}"
    return [*found, *others, clock, *reduced(rl_of(config.model["config"]))]


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


def with_length(overrides: list[str], experiences: int) -> tuple[Config, list[str]]:
    """The overrides with as many micro-batches and updates as they make, and what they compose to."""
    config = compose(CONFIG, overrides)
    rl = rl_of(config.model["config"])
    parts = config.dataloader_train.batch_size * rl.num_rollout // rl.rollout_batch
    whole = [
        *overrides,
        f"trainer.grad_accum_iter={parts // rl.minibatches * rl.num_trained}",
        f"trainer.max_iter={experiences * rl.updates * rl.minibatches}",
    ]
    return compose(CONFIG, whole), whole


def run(arguments: argparse.Namespace) -> None:
    machine.require_gpu(arguments.size)
    device, dtype = machine.device_and_dtype()
    print(f"{machine.described(device)}, {dtype}", flush=True)
    failed = 0
    names = arguments.experiment or EXPERIMENTS
    for experiment, architecture in itertools.product(names, arguments.architecture or ARCHITECTURES):
        print(f"\n{experiment}, {ARCHITECTURES[architecture]}, {arguments.size}", flush=True)
        error = attempt(experiment, architecture, arguments)
        if "ratio_tolerance" in error:  # a finding of its own, which keeps nothing from being timed
            print(f"  once more, with {LOOSE}", flush=True)
            attempt(experiment, architecture, arguments, LOOSE)
        failed += bool(error)
    if failed:
        raise SystemExit(1)


def attempt(experiment: str, architecture: str, arguments: argparse.Namespace, *overrides: str) -> str:
    """Measure one recipe; what went wrong, which is printed, so that the others are measured whatever it is."""
    start, found = time.perf_counter(), ""
    try:
        measure(experiment, architecture, arguments, *overrides)
    except Exception as error:
        found = str(error) or "no message"
        lines = [line for line in found.splitlines() if line.strip()][:4]
        print(f"  FAILED, {type(error).__name__}: " + "\n    ".join(lines), flush=True)
        if not isinstance(error, UserError):
            print("    " + "    ".join(traceback.format_tb(error.__traceback__)[-3:]), flush=True)
    gc.collect()  # what exception and callbacks held
    print(f"  {time.perf_counter() - start:.0f} s in all", flush=True)
    return found


def measure(experiment: str, architecture: str, arguments: argparse.Namespace, *others: str) -> None:
    """Run so many experiences after one that is not timed, and print what they took."""
    plain = compose(CONFIG, [f"experiment={experiment}"])
    overrides = [*settings(experiment, arguments.size, architecture), *arguments.overrides, *others]
    config, overrides = with_length(overrides, arguments.steps + 1)
    print(f"  {differences(plain, config)}", flush=True)
    work = read_workload(config, 1)
    passes = passes_of(work)
    Clock.forget()
    machine.forget_peak_memory()
    machine.launch(CONFIG, overrides)
    timed = Clock.steps[passes.updates :]
    seconds = {
        name: sum(step.get(name, 0.0) for step in timed) / arguments.steps for name in {*itertools.chain(*timed)}
    }
    report_phases(work, passes.clips, seconds)
    report_memory(predict_memory(work), *Clock.memory)
    of_experience = len(Clock.rollouts) // (arguments.steps + 1)
    report_rollout(Clock.rollouts[of_experience:], Clock.plain)


# --- what is printed


def differences(recipe: Config, ours: Config) -> str:
    """The settings of the recipe that were reduced, as a sentence."""
    rows = [("text by", "its encoder" if encodes_text(recipe) else "embeddings", "random embeddings")]
    for name in ("num_rollout", "sample_steps", "train_on", "num_timesteps", "rollout_batch"):
        before, now = (getattr(rl_of(config.model["config"]), name) for config in (recipe, ours))
        rows.append((name, before, now))
    for name in ("resolution", "state_t"):
        before, now = (config.model.config.pipe_config[name] for config in (recipe, ours))
        rows.append((name, before, now))
    rows.append(("trained", recipe.model.config.train_architecture, ours.model.config.train_architecture))
    changed = [f"{name} {before} -> {now}" for name, before, now in rows if before != now]
    return f"of the recipe is changed: {'; '.join(changed)}; reward: agreement of latents"


def encodes_text(config: Config) -> bool:
    text = config.model.config.get("text")
    return bool(text and text.get("encoder"))


def report_phases(work: Workload, clips: int, seconds: Mapping[str, float]) -> None:
    rows = {row: sum(seconds.get(phase, 0.0) for phase in phases) for row, phases in ROWS.items()}
    whole, assumed = seconds["all"], GPUS["H100"]
    rows["other"] = whole - sum(rows.values())
    parts = "  ".join(f"{row} {value:.2f} s ({value / whole:.0%})" for row, value in rows.items())
    print(f"  an experience of {clips} clips: {whole:.2f} s   {parts}")
    flops = predict_speed(work, assumed).model_flops_per_gpu
    rate = flops / whole
    share = machine.of_data_sheet(rate)
    print(f"  {flops / 1e12:.4g} TFLOP, {rate / 1e12:.4g} TFLOP/s, {share} of the data sheet's peak", flush=True)


def report_memory(planned: Memory, used: int, taken: int) -> None:
    if not torch.cuda.is_available():
        print(f"  peak memory of the process {used / 1e9:.2f} GB; plan is about a GPU's")
        return
    for name, found, expected in (("in use", used, planned.total - planned.overhead), ("taken", taken, planned.total)):
        away = f"{found / expected - 1:+.1%} (goal: within {GOAL_MEMORY:.0%})"
        print(f"  peak memory {name:6s} {found / 1e9:7.2f} GB, plan {expected / 1e9:7.2f} GB: {away}", flush=True)


def report_rollout(rollouts: list[tuple[float, int]], plain: tuple[float, int]) -> None:
    mean, evaluations = sum(seconds for seconds, _ in rollouts) / len(rollouts), rollouts[-1][1]
    print(
        f"  a clip's rollout {mean:.3f} s ({evaluations} evaluations), sampled plainly {plain[0]:.3f} s"
        f" ({plain[1]}): {mean / plain[0]:.2f} times (goal {GOAL_ROLLOUT})",
        flush=True,
    )
