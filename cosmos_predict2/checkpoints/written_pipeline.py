# SPDX-License-Identifier: Apache-2.0
"""What weights with actions say themselves of the pipeline that they belong to, where their run's folder is far away.

    facts = written_pipeline("exported.safetensors")    # as model.config.pipe_config in a run's config.yaml; or None

Shapes do not tell all: which numbers of an action are summed, what a text does, how large a patch is in time and space.
A training checkpoint and an exported ``.pt`` have it as the bytes of its JSON under ``action_pipeline``, a safetensors
file in its metadata.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.checkpoints.dit_weights import inside_a_pipeline
from cosmos_predict2.checkpoints.runs import run_config, run_tree, safetensors_metadata
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.config.lazy_yaml import refuse_interpolations
from imaginaire.errors import CheckpointError

KEY = "action_pipeline"  # in checkpoints and in metadata; of pipe_config what follows
FACTS = (
    "net",
    "tokenizer",
    "state_t",
    "fps",
    "resolution",
    "conditioning_strategy",
    "sigma_conditional",
    "sigma_data",
    "rectified_flow_t_scaling_factor",
    "timestamps",
    "flow",
    "conditioner",
)
SIZE = "video_size"  # [height, width] of the clips, beside them, where the data say so
OF_THE_MACHINE = ("atten_backend", "sac_config")  # of the network's arguments: another machine chooses anew
# Arguments of a network that neither names nor shapes of its weights tell, and what they are where nothing is said.
UNTOLD: dict[str, Any] = {"summed_action_dims": [], "summed_action_scale": 1.0, "reads_text": True}


def pipeline_facts(pipe: Mapping[str, Any], video_size: tuple[int, int] | None = None) -> dict[str, Any]:
    """Of a pipeline's config as plain data, what makes its weights mean what they meant in training."""
    found = {key: pipe[key] for key in FACTS if pipe.get(key) is not None}
    found["net"] = {key: value for key, value in dict(pipe["net"]).items() if key not in OF_THE_MACHINE}
    return found if video_size is None else {**found, SIZE: list(video_size)}


def recorded_pipeline(path: str) -> dict[str, Any] | None:
    """The facts that weights say themselves, or that their run's config.yaml says; else None."""
    if (written := written_pipeline(path)) is not None:
        return written
    pipe = (run_config(path) or {}).get("pipe_config")
    if not isinstance(pipe, dict) or not isinstance(pipe.get("net"), dict):
        return None
    return pipeline_facts(pipe, next(video_sizes((run_tree(path) or {}).get("dataloader_train")), None))


def written_pipeline(path: str) -> dict[str, Any] | None:
    """The facts that are written in the weights; None where there are none, or no file that is here already."""
    if not path or storage.is_remote(path) or not storage.exists(path):
        return None
    text = safetensors_metadata(path).get(KEY)
    if text is None and not path.endswith(".safetensors"):
        try:
            source = weights.read(inside_a_pipeline(path))
        except CheckpointError:
            return None  # loading says why
        text = bytes(source[KEY].to(torch.uint8).tolist()).decode(errors="replace") if KEY in source else None
    if text is None:
        return None
    try:
        facts = json.loads(text)
        refuse_interpolations(facts, KEY)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its '{KEY}' cannot be read: {error}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("net"), dict):
        raise CheckpointError(f"{path}: its '{KEY}' is not of a pipeline: an object with 'net' is expected.")
    return facts


def facts_json(facts: Mapping[str, Any]) -> str:
    """One line, as metadata have it."""
    return json.dumps(facts, separators=(",", ":"))


def facts_tensor(facts: Mapping[str, Any]) -> Tensor:
    """The bytes of that line, as a checkpoint holds them."""
    return torch.frombuffer(bytearray(facts_json(facts).encode()), dtype=torch.uint8).clone()


def untold_differences(path: str, net: Mapping[str, Any]) -> list[str]:
    """Where a network's lazy node differs from the one of the weights in what shapes do not tell, in words; nothing
    where they do not say."""
    facts = recorded_pipeline(path)
    if facts is None:
        return []
    pairs = [(name, facts["net"].get(name), net.get(name)) for name in UNTOLD]
    told = [(name, *(UNTOLD[name] if value is None else value for value in values)) for name, *values in pairs]
    return [
        f"{name}={_plain(theirs)}, here {_plain(ours)}" for name, theirs, ours in told if _plain(theirs) != _plain(ours)
    ]


def video_sizes(tree: Any) -> Iterator[tuple[int, int]]:
    """Every ``video_size`` (height, width) of the data sets in a loader's section."""
    if isinstance(tree, dict):
        size = tree.get("video_size")
        if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size):
            yield size[0], size[1]
        for value in tree.values():
            yield from video_sizes(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else list(value)
