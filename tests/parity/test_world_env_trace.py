# SPDX-License-Identifier: Apache-2.0
"""The published environment over a made-up world model and classifier, held against a trace of the original."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionTransform, controller
from cosmos_predict2.compat.rlinf.environment import RLinfWorldModelEnv
from cosmos_predict2.rl.envs.recorded_starts import RecordedStarts
from cosmos_predict2.rl.interfaces import Judgement
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from cosmos_predict2.world_model.options import SamplingOptions
from tests.goldens import Golden

AREA = "action"
EDGE = dict(rtol=0.0, atol=1.0)  # of a pixel that lies where a value is cut to a byte
EXACT = dict(rtol=0.0, atol=0.0)


class Brightens:
    """A world model that adds a hundredth of the mean actions so far to the first picture."""

    def __init__(self, transform: ActionTransform, chunk_size: int) -> None:
        self.transform = transform
        self.config = Video2WorldActionPipelineConfig(chunk_size=chunk_size)
        self.world, self.views, self.state_head = SimpleNamespace(device=torch.device("cpu")), ("",), None
        self.calls: list[dict[str, Any]] = []
        self.actions: list[Tensor] = []

    def transformed(self, raw: Any) -> Tensor:
        return torch.from_numpy(self.transform.apply(raw)).float()

    def generate_actions(
        self, first: Tensor, actions: Tensor, seeds: Sequence[int] | int, options: SamplingOptions, **others: Any
    ) -> Tensor:
        row = dict(batch=len(first), guidance=options.guidance, num_steps=options.num_steps, seed=seeds)
        self.calls.append(row)
        self.actions.append(actions)
        start = first[:, :, -1:].float() / 127.5 - 1
        change = 0.01 * actions.mean(dim=2).cumsum(dim=1)
        video = torch.cat([start, (start + change[:, None, :, None, None]).clamp(-1, 1)], dim=2)
        frames = others["frames"]
        return video[:, :, frames[0] : frames[-1] + 1]


class Bright:
    """1 where the mean of a picture is above a threshold."""

    takes_floats = True

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        is_bright = frames_E_F_H_W_C.mean(dim=(2, 3, 4)) > self.threshold
        return Judgement(is_bright.float(), is_bright)


def test_the_trace_is_reproduced(golden: Golden, tmp_path: Path) -> None:
    about, tensors = golden.json("world_env_trace.json"), golden.tensors("world_env_trace.safetensors")
    config = {name: about["config"][name].use() for name in about["config"]}
    files = sorted(path for path in golden.folder.glob("init_states/*.npy"))
    about["dataset_files"].compare([golden.file(f"init_states/{path.name}").name for path in files])
    starts = RecordedStarts(str(golden.folder / "init_states"), by_task=False, cache_dir=str(tmp_path))
    calls = about["model_calls"].use()
    world = Brightens(controller(tensors["chunk0.model_actions_microbatch0"].use().shape[2]), config["cchunk"])
    env = RLinfWorldModelEnv(
        world,  # type: ignore[arg-type]
        starts,
        Bright(config["thr"]),
        num_envs=config["N"],
        group_size=config["gs"],
        seed=config["seed"],
        chunk=config["chunk"],
        max_episode_steps=config["maxsteps"],
        reward_coef=config["coef"],
        batch_size=max(call["batch"] for call in calls),
        guidance=calls[0]["guidance"],
        num_steps=calls[0]["num_steps"],
    )
    about["reset_state_ids"].compare(env.reset_state_ids.tolist())
    observed, _ = env.reset()
    about["reset.task_descriptions"].compare(observed["task_descriptions"])
    about["reset.states_shape"].compare(list(observed["states"].shape))
    assert not observed["states"].any() and tuple(observed["main_images"].shape[1:3]) == (config["H"], config["W"])
    tensors["reset.main_images"].compare(observed["main_images"], **EXACT)
    for i in range(config["nchunks"]):
        observed, rewards, terminations, truncations, info = env.chunk_step(tensors[f"chunk{i}.actions"].use().numpy())
        tensors[f"chunk{i}.main_images"].compare(observed["main_images"].int(), **EDGE)
        found = {"rewards": rewards, "terminations": terminations, "truncations": truncations, **info["episode"]}
        found["reward_metric"] = found.pop("reward")
        for name, value in found.items():
            tensors[f"chunk{i}.{name}"].compare(value.to(tensors[f"chunk{i}.{name}"].use().dtype), **EXACT)
    about["model_calls"].compare(world.calls)
    tensors["chunk0.model_actions_microbatch0"].compare(world.actions[0], rtol=1e-6)
