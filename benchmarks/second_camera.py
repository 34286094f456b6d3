# SPDX-License-Identifier: Apache-2.0
"""The worth of a second camera: world models of the covered table, and policies that learn in them, of both views and
of the camera above alone. A second twin sees the camera above alone in the imagination of both, with its reward.

    python -m benchmarks.second_camera --seeds 0 1 2 --output outputs/second_camera

All of the same 2,000 recordings. World model and reward are shared by the seeds; each seed has a clone and a run of its
own. Success is greedy, true, and of 400 held-out starts. The policy is a small one, so that all takes about an
hour of a core. Likeness and state are those of 128 held-out clips of two chunks.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from benchmarks import machine
from cosmos_predict2.rl.interfaces import Observation
from cosmos_predict2.rl.policies.cloning import CloneStart
from cosmos_predict2.rl.policies.files import load_weights
from cosmos_predict2.rl.policies.toy import ToyPolicy
from imaginaire.buildable import buildable

CAMERAS = {"both": "front+wrist", "front": "front", "wrist": "wrist"}
RECORDINGS, ITERATIONS, CLONING, EXPERIENCES = 2000, 1600, 600, 20
SIDE = 16  # of a view as the policy sees it


@buildable("policy", "camera_policy")
class CameraPolicy(ToyPolicy):
    """A `ToyPolicy` that sees coarse pictures of each view, by convolutions, in place of the places of things."""

    def __init__(self, action_dim: int = 4, chunk: int = 12, num_views: int = 2, path: str = "") -> None:
        super().__init__(action_dim, chunk)
        self.num_views = num_views
        self.arguments = dict(action_dim=action_dim, chunk=chunk, num_views=num_views)
        self.mlp = nn.Sequential(
            *(nn.Conv2d(3 * num_views, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.SiLU()),
            *(nn.Flatten(), nn.Linear(32 * (SIDE // 2) ** 2, 128), nn.SiLU(), nn.Linear(128, self.num_knots * 2)),
        )
        if path:
            load_weights(self, path)

    @classmethod
    def to_clone(cls, start: CloneStart, action_dim: int, chunk: int, num_views: int = 0) -> "CameraPolicy":
        """A policy of all views of the recordings, or of the first so many."""
        return cls(action_dim, chunk, num_views or len(start.windows.views))

    def see(self, observation: Observation) -> Tensor:
        views = [observation["full_image"], *observation["wrist_image"].unbind(1)][: self.num_views]
        pictures = torch.cat(views, dim=-1).permute(0, 3, 1, 2).to(self.shares) / 127.5 - 1
        return adaptive_avg_pool2d(pictures, SIDE)


# --- the way


def record(root: Path) -> None:
    """Recordings with both cameras, and their split."""
    make = ["scripts.make_toy_world", "--form", "lerobot", "--setting", "covered", "--val_fraction", "0"]
    machine.program(root, *make, "--episodes", str(RECORDINGS), "--out", f"{root}/data")
    machine.program(
        root, "scripts.split_recordings", f"{root}/data", "--camera", CAMERAS["both"], "--out", f"{root}/split.json"
    )


def imagine(root: Path, name: str) -> Path:
    """The run of a world model of these cameras; all have the same number of iterations."""
    data = [f"dataloader_train.dataset.{key}" for key in ("root", "split_file", "camera", "video_size")]
    values = [f"{root}/data", f"{root}/split.json", CAMERAS[name], "[32,32]"]
    fixed = [f"trainer.max_iter={ITERATIONS}", "trainer.callbacks.stop_rule=null", "checkpoint.keep_last=1"]
    own = ["model.config.pipe_config.tokenizer.weights=null", "model.config.pipe_config.state=observation.state"]
    given = [f"{key}={value}" for key, value in zip(data, values, strict=True)]
    return machine.train(root, name, "world_model_recordings", *given, *fixed, *own)[0]


def measure(root: Path, world: Path) -> dict[str, Any]:
    """The figures of a world model on held-out recordings."""
    where = ["--out", f"{root}/page_{world.name}", "--json", f"{root}/{world.name}.json"]
    machine.program(root, "scripts.evaluate_world_model", "--dit_path", str(world), "--num_clips", "128", *where)
    found: dict[str, Any] = json.loads((root / f"{world.name}.json").read_text())
    return found


def prepare(root: Path, world: Path) -> None:
    """Starts, and a reward that sees the whole picture. Of the front alone it is no better than chance: it is written
    nevertheless."""
    own = ["--split", f"{root}/split.json", "--camera", CAMERAS[world.name]]
    machine.program(
        root, "scripts.make_reset_states", "--dataset", f"{root}/data", *own, "--out", f"{root}/starts_{world.name}"
    )
    words = ["--data", f"{root}/data", *own, "--world_model", str(world), "--steps", "500"]
    least = ["--least_precision", "0", "--least_recall", "0", "--least_area", "0"]
    machine.program(root, "scripts.train_reward_model", *words, *least, "--out", f"{root}/reward_{world.name}")


def learn(root: Path, world: Path, seed: int, num_views: int) -> tuple[float, float]:
    """True success of a clone that sees the first so many views, and of what it learns in imagination."""
    place, name = world.name, f"{world.name}_{num_views}"
    own = ["scripts.train", "--import", "benchmarks.second_camera", "--", f"trainer.seed={seed}"]
    data = dict(path=f"{root}/data", split_file=f"{root}/split.json", camera=CAMERAS[place])
    cloned = ["experiment=clone_recordings", f"job.name=clone_{name}_{seed}", f"trainer.max_iter={CLONING}"]
    cloned += ["model.config.policy=camera_policy", "model.config.shift=0"]
    cloned += [f"+model.config.arguments.num_views={num_views}"]
    machine.program(root, *own, *cloned, *(f"dataloader_train.dataset.{key}={value}" for key, value in data.items()))
    (clone,) = root.glob(f"*/cloning/clone_{name}_{seed}/policy")
    policy = f"{{_target_:benchmarks.second_camera.CameraPolicy,path:{clone},action_dim:4,num_views:{num_views}}}"
    env = {"imagination.dit_path": world, "starts.path": root / f"starts_{place}"}
    env["reward.path"] = root / f"reward_{place}" / "reward_model.safetensors"
    learnt = ["experiment=vla_grpo_recordings", f"job.name=learnt_{name}_{seed}", f"trainer.max_iter={2 * EXPERIENCES}"]
    learnt += ["model.config.policy=null", f"++model.config.policy={policy}", "optimizer.lr=2e-4"]
    learnt += ["model.config.allow_unchecked=true", "trainer.callbacks.imagination_watch=null"]
    learnt += ["trainer.run_validation=false", *(f"model.config.env.{key}={value}" for key, value in env.items())]
    machine.program(root, *own, *learnt)
    (run,) = root.glob(f"*/reinforcement_learning/learnt_{name}_{seed}")
    return truth(root, clone), truth(root, run)


def truth(root: Path, policy: Path) -> float:
    words = ["--import", "benchmarks.second_camera", "--suite", "toy_covered", "--episodes", "400", "--draws", "1"]
    out = root / "truth" / policy.parent.name / policy.name
    machine.program(root, "scripts.evaluate_policy", *words, "--policy", str(policy), "--out", str(out))
    return float(json.loads((out / "evaluation.json").read_text())["success"]["rate"])


def main() -> int:
    arguments = machine.parse(machine.parser(__doc__, "seeds", "output", seeds=[0, 1, 2]))
    root = Path(arguments.output)
    record(root)
    worlds = {name: imagine(root, name) for name in CAMERAS}
    for name, world in worlds.items():
        print(name, measure(root, world), flush=True)
    for name, views in {"both": (2, 1), "front": (1,)}.items():
        prepare(root, worlds[name])
        for num_views in views:
            for seed in arguments.seeds:
                before, after = learn(root, worlds[name], seed, num_views)
                row = f"{name}, {num_views} seen, seed {seed}: {before:.3f} -> {after:.3f} ({after - before:+.3f})"
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
