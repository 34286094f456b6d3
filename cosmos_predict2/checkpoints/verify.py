# SPDX-License-Identifier: Apache-2.0
"""A form that was written compared with its source: names, values, settings and outputs, by our code and, where the
package is installed, by diffusers' own classes."""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2.checkpoints.adapters import Adapter, merge_lora_state, read_adapter
from cosmos_predict2.checkpoints.dit_weights import quiet
from cosmos_predict2.checkpoints.export import Export, cast_to, network_of_job
from cosmos_predict2.checkpoints.networks import CONFIG, Config, Network, open_network, read_config
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.nn.layers import BASE_FPS
from cosmos_predict2.nn.wan_dit import WanDiT
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.layout import KINDS, CheckpointSet
from imaginaire.errors import CheckpointError, ConfigError, listed

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3}  # of diffusers' outputs, of the largest number; half precision: .05


def verify_network(job: Export) -> None:
    """Raise unless the destination of an export holds the network of its source."""
    with quiet():
        source, written = network_of_job(job), open_network(job.destination)
    problems = [*differences(source.tensors, written.tensors, job.dtype)]
    if job.form in ("diffusers", "original"):
        config = source.config if job.form == "diffusers" else source.original_config
        problems += other_settings(config() if config else {}, read_config(job.destination))
    refuse(job, problems)
    log.info("verified: %d tensors are those of %s", len(source.tensors), job.source)
    _compare_outputs(job, source, written)


def verify_adapter(job: Export, adapter: Adapter | None = None) -> None:
    """Raise unless the destination holds the adapters of the source, with their scales."""
    expected = adapter or read_adapter(job.source, alpha=job.lora_alpha, which=job.which)
    found = read_adapter(job.destination)
    problems = [*differences(_factors(expected), _factors(found), job.dtype)]
    for layer in expected.layers.keys() & found.layers.keys():
        scales = [each.layers[layer].scaling for each in (found, expected)]
        if not math.isclose(*scales, rel_tol=1e-6):
            problems.append(f"{layer} is added with a scale of {scales[0]:g}, in the source with {scales[1]:g}")
    refuse(job, problems)
    log.info("verified: the adapters of %d layers and their scales are those of %s", len(found.layers), job.source)


def verify_set(source: CheckpointSet, written: CheckpointSet) -> None:
    """Raise unless a training state in the other layout is the same."""
    trees = [
        {f"{kind}.{name}": value for kind in KINDS for name, value in _leaves(each.read(kind))}
        for each in (source, written)
    ]
    plain = [{n: v for n, v in tree.items() if not isinstance(v, Tensor)} for tree in trees]
    tensors = [{n: v for n, v in tree.items() if isinstance(v, Tensor)} for tree in trees]
    problems = [*differences(tensors[0], tensors[1]), *other_settings(plain[0], plain[1], "the state")]
    if problems:
        raise CheckpointError(f"{written.folder} is not {source.folder}: {'; '.join(problems)}.")
    log.info("verified: %d tensors and %d other values are those of %s", len(tensors[0]), len(plain[0]), source.folder)


def _leaves(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a training state by their places; not the fingerprint of its files."""
    if isinstance(tree, Mapping | list | tuple):
        for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            if (place, name) != ("", "files"):
                yield from _leaves(value, f"{place}.{name}" if place else str(name))
    else:
        yield place, tree


def refuse(job: Export, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{job.destination} is not {job.source}: {'; '.join(problems)}. Write it again: --overwrite."
        )


# Names, values and settings -------------------------------------------------------------------------------------------


def _factors(adapter: Adapter) -> dict[str, Tensor]:
    return {
        f"{layer}.{ab}": factor for layer, each in adapter.layers.items() for ab, factor in zip("AB", each.factors())
    }


def differences(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[str]:
    if missing := [name for name in expected if name not in found]:
        yield f"{len(missing)} names are missing: {listed(missing)}"
    if others := [name for name in found if name not in expected]:
        yield f"{len(others)} names are not in the source: {listed(others)}"
    wrong = []
    for name in expected:
        if name not in found:
            continue
        ours, theirs = cast_to(expected[name], dtype), found[name]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            wrong.append(f"{name} ({theirs.dtype} {list(theirs.shape)}, not {ours.dtype} {list(ours.shape)})")
        elif not torch.equal(ours, theirs):
            wrong.append(f"{name} (by up to {(ours.double() - theirs.double()).abs().max():.2g})")
    if wrong:
        yield f"{len(wrong)} tensors differ: {listed(wrong)}"


def other_settings(expected: Config, found: Config, where: str = CONFIG) -> Iterator[str]:
    for name in expected:
        ours, theirs = (json.dumps(each.get(name), default=str, sort_keys=True) for each in (expected, found))
        if ours != theirs:
            yield f"{where} has {name}={found.get(name)}, the source {expected[name]}"


# Outputs --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _compare_outputs(job: Export, source: Network, written: Network) -> None:
    try:
        expected, dtype = _output(source, job.dtype)
        found, _ = _output(written)
    except ConfigError as error:
        log.info("outputs are not compared: %s", error)
        return
    if not (expected.isfinite().all() and found.isfinite().all()):
        refuse(job, ["outputs are not finite, so that they cannot be compared"])
    if not torch.equal(expected, found):
        refuse(job, [f"its outputs differ by up to {(expected - found).abs().max():.2g}: its card has other settings"])
    log.info("verified: the outputs of both are equal")
    if job.form != "diffusers":
        return
    try:
        theirs, name = _output_of_diffusers(job.destination, written, dtype), written.config()["_class_name"]
    except ImportError as error:
        log.info("not compared with diffusers' own class: %s", error)
        return
    difference = ((theirs - expected).abs().max() / expected.abs().max()).item()
    if not difference <= TOLERANCE.get(dtype, 0.05):
        refuse(job, [f"{name} of diffusers gives outputs that differ by {difference:.2g} of the largest"])
    log.info("verified: the outputs of diffusers' %s differ by %.2g of the largest", name, difference)


def _output(network: Network, dtype: torch.dtype | None = None) -> tuple[Tensor, torch.dtype]:
    """The output for fixed inputs, as float32, and the dtype that it was computed in."""
    merged = merge_lora_state(network.tensors, network.card.lora_alpha or 1.0)
    tensors = {name: cast_to(merged[name], dtype) for name in merged}
    computed = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    computed = torch.float32 if computed == torch.float16 else computed  # activations leave its range
    if not network.prefix:
        tokenizer: WanTokenizer = network.build().to(dtype=computed)
        weights.load_into(tokenizer.net.state_dict(), tensors).require(source=network.source)
        return tokenizer.encode(_video(computed)).float(), computed
    with torch.device("meta"):
        net = network.build()
    net = net.to(computed).to_empty(device="cpu").eval()
    net.reset_buffers()
    weights.load_into(net.state_dict(), tensors).require(allow_missing=weights.EXTRAS, source=network.source)
    given, ours, _ = _inputs(net, computed)
    return net(*given, **ours).float(), computed


def _video(dtype: torch.dtype) -> Tensor:
    return (torch.rand(1, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(dtype)


def _inputs(net: DiT, dtype: torch.dtype) -> tuple[list[Tensor], Config, Config]:
    """Latents, time and text; the rest by our names, and by diffusers'. With actions a picture, which needs none."""
    generator = torch.Generator().manual_seed(0)
    frames, side = 1 if net.takes_actions else 2 * net.patch_temporal, 4 * net.patch_spatial
    x_B_C_T_H_W = torch.randn(1, net.in_channels, frames, side, side, generator=generator)
    text_B_S_E = torch.randn(1, 512, net.text_channels, generator=generator)
    given = [x_B_C_T_H_W, torch.tensor([300.0 if isinstance(net, WanDiT) else 0.3]), text_B_S_E]
    given = [each.to(dtype) for each in given]
    if isinstance(net, WanDiT):
        shape = 1, 5, net.image_channels or 1
        image = torch.randn(shape, generator=generator).to(dtype) if net.image_channels else None
        return given, {"image_B_S_E": image}, {"encoder_hidden_states_image": image}
    padding, mask = torch.zeros(1, 1, 8 * side, 8 * side, dtype=dtype), torch.zeros_like(given[0][:, :1])
    mask[:, :, 0] = 1
    ours: Config = {
        "condition_mask_B_1_T_H_W": mask,
        "padding_mask_B_1_H_W": padding,
        "fps_B": torch.tensor([BASE_FPS]),
    }
    masks = {"condition_mask": mask if net.has_condition_channel else None, "padding_mask": padding}
    return given, ours, {**masks, "fps": BASE_FPS}


def _output_of_diffusers(folder: str, network: Network, dtype: torch.dtype) -> Tensor:
    """The output for the same inputs by the class that the network has there; every name accounted for."""
    import accelerate  # type: ignore[import-untyped]  # noqa: F401  # without which it does not load these classes
    import diffusers

    config = network.config()
    options: Config = dict(torch_dtype=dtype, output_loading_info=True, local_files_only=True, use_safetensors=True)
    part, report = getattr(diffusers, config["_class_name"]).from_pretrained(folder, trust_remote_code=False, **options)
    if any(report.values()):
        raise CheckpointError(f"{folder}: diffusers' {config['_class_name']} does not take it as it is: {report}.")
    if not network.prefix:
        mean, std = (torch.tensor(config[f"latents_{each}"]).view(1, -1, 1, 1, 1) for each in ("mean", "std"))
        return (part.encode(_video(dtype)).latent_dist.mode().float() - mean) / std
    stand_in_for_torchvision()
    with torch.device("meta"):
        net = network.build()
    given, _, theirs = _inputs(net, dtype)
    output: Tensor = part(*given, **theirs, return_dict=False)[0]
    return output.float()


def stand_in_for_torchvision() -> None:
    """diffusers' transformer needs torchvision for one resize of the padding mask, and fails only when it runs."""
    from diffusers.models.transformers import transformer_cosmos

    if not hasattr(transformer_cosmos, "transforms"):
        stand_in: Any = SimpleNamespace(InterpolationMode=SimpleNamespace(NEAREST="nearest"))
        stand_in.functional = SimpleNamespace(resize=lambda mask, size, interpolation: F.interpolate(mask, size))
        transformer_cosmos.transforms = stand_in
