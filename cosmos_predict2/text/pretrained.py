# SPDX-License-Identifier: Apache-2.0
"""Text networks of the transformers package from a public folder: what must be there, and weights with an account."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import LazyTensors, shape_of
from imaginaire.errors import CheckpointError, ConfigError, first_line, optional_module

CONFIG = "config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EIGHT_BIT = "int8"  # in place of a dtype's name: weights of linear layers, see EightBitLinear
LARGEST, SMALLEST = 127, 1e-30  # of a row of zeros the scale is no zero
MOST, MOST_LAYERS = 2**31, 1000  # of a number of a config.json, and of a number of layers there
SMALL = 2**26  # numbers of parts that weights may lack: heads that a policy begins anew
SAMPLE = 64  # values of each parameter that go into a fingerprint


def transformers() -> Any:
    """The package, or an error with the command that installs it."""
    return optional_module("transformers", "weights")


def from_folder(part: Any, folder: str, **options: Any) -> Any:
    """``part.from_pretrained`` of a folder: a tokenizer, a configuration or a model. No code of the folder is run.

    Without ``trust_remote_code`` the package asks on the terminal, and a "y" on the input runs it.
    """
    try:
        return part.from_pretrained(folder, trust_remote_code=False, **options)
    except ImportError:  # an optional package, which the message names
        raise
    except Exception as error:  # a damaged file raises nearly anything, of four packages
        if "custom code" in str(error):
            raise CheckpointError(
                f"{folder} needs Python code of its own (auto_map of its *config.json), and no code of a checkpoint is"
                " run. Give a folder that transformers reads with its own classes."
            ) from error
        kind = part.__name__.removeprefix("Auto").lower()
        raise CheckpointError(f"{folder}: its {kind} cannot be read ({first_line(error)}).") from error


def config_of(part: Any, path: str) -> Any:
    """The configuration of a folder, of which a network may be built."""
    config = from_folder(part, path)
    refuse_absurd(config.to_dict(), f"{path}/{CONFIG}")
    return config


def refuse_absurd(sizes: Any, where: str) -> None:
    """Raise for sizes of a config.json by which building a network would not end."""
    for name, value in sizes.items() if isinstance(sizes, Mapping) else ():
        most = MOST_LAYERS if str(name).endswith(("layers", "depth")) else MOST
        if type(value) is int and abs(value) > most:
            raise CheckpointError(f"{where}: {name} is {value}, above {most}, which no network of this kind has.")
        refuse_absurd(value, where)


def refuse_larger(network: nn.Module, source: Mapping[str, Tensor], path: str) -> None:
    """Raise where a network on the meta device is far larger than its weights are, before it takes memory."""
    wanted = sum(tensor.numel() for tensor in network.state_dict().values())
    found = sum(math.prod(shape_of(source, name)) for name in source)
    if wanted > 2 * found + SMALL:
        raise CheckpointError(
            f"{path}: its {CONFIG} describes a network of {wanted} numbers, but the weights have {found}. They are not"
            " of one checkpoint, or one of them is damaged."
        )


def problems_of(path: str, tokenizer_files: Sequence[str], download: str) -> list[str]:
    """Problems that keep the folder of an encoder from being used, each with its cure; nothing is loaded."""
    if not storage.is_folder(path):
        if path.startswith("hf://") or storage.is_remote(path):
            return [f"{path}: a text encoder is read from a local folder. {download}"]
        return [f"The text encoder's folder {path} does not exist. {download}"]
    names = set(storage.listdir(path))
    problems = []
    if CONFIG not in names:
        problems.append(f"{path} has no {CONFIG}, so it is no folder of a text encoder. {download}")
    if not names.intersection(tokenizer_files):
        problems.append(f"{path} has no tokenizer ({' or '.join(tokenizer_files)}). {download}")
    try:
        weights.read(path)
    except CheckpointError as error:
        problems.append(f"{error} {download}")
    return problems


def encoder_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The same of an encoder, whose linear layers may have weights of 8 bits."""
    if isinstance(dtype, str) and dtype not in (known := (*DTYPES, EIGHT_BIT)):
        raise ConfigError(f"dtype='{dtype}': expected one of {', '.join(known)}, or None.")
    return torch.int8 if dtype == EIGHT_BIT else dtype_of(dtype)


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype by its name in a config; None stays None (as in the checkpoint)."""
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ConfigError(f"dtype='{dtype}': expected one of {', '.join(DTYPES)}, or None.")
        return DTYPES[dtype]
    return dtype


def load(
    make: Callable[[], nn.Module],
    source: Mapping[str, Tensor],
    path: str,
    *,
    allow_missing: Iterable[str] = (),
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> nn.Module:
    """The network that ``make`` gives with the weights of ``source``, for inference; never in memory twice.

    ``path`` names them in messages. Buffers that are in no file are for the caller to fill. Of ``dtype`` int8 are the
    weights of linear layers, the rest is float32.
    """
    with torch.device("meta"):
        model = make()
    weights.account(model.state_dict(), source).require(allow_missing=allow_missing, source=path)
    if dtype is None:
        dtype = next(tensor.dtype for tensor in map(source.__getitem__, source) if tensor.is_floating_point())
    is_8_bit = dtype == torch.int8
    model = model.to(torch.float32 if is_8_bit else dtype)
    if is_8_bit:
        source = _with_eight_bits(model, source)
    model = model.to_empty(device=device)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()  # to_empty gave tied parameters memory of their own
    weights.load_into(model.state_dict(), source).require(allow_missing=allow_missing, source=path)
    return model.eval().requires_grad_(False)


def dtype_name(model: Any) -> str:
    """The dtype in the name of an encoder with this network."""
    is_8_bit = any(isinstance(module, EightBitLinear) for module in model.modules())
    return EIGHT_BIT if is_8_bit else str(model.dtype).removeprefix("torch.")


def fingerprint(model: nn.Module) -> str:
    """Eight digits that differ between two sets of weights, from some values of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:SAMPLE].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:8]


# Weights of 8 bits ----------------------------------------------------------------------------------------------------


class EightBitLinear(nn.Module):
    """y = scale * (weight x) + bias: each row of the weight is int8, times its largest magnitude / 127 in float32.

    A quarter of the bytes of float32. Inputs and sums stay in float32.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        shape, device = linear.weight.shape, linear.weight.device
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device=device), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(shape[0], device=device), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


def quantized(weight_O_I: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [O, I], float32 [O]): rows divided by a 127th of their largest magnitude, rounded."""
    weight_O_I = weight_O_I.float()
    scale_O = weight_O_I.abs().amax(dim=1).clamp(min=SMALLEST) / LARGEST
    return (weight_O_I / scale_O[:, None]).round().to(torch.int8), scale_O


def _with_eight_bits(model: nn.Module, source: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Give the model, on the meta device, such layers; its weights, quantized when they are read."""
    found = {f"{name}.weight": name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name in found.values():
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, EightBitLinear(getattr(owner, child)))
    halves = _Halves(source)
    places: dict[str, tuple[Mapping[str, Tensor] | _Halves, str]] = {}
    for name in source:
        if name in found:
            places |= {name: (halves, name), f"{found[name]}.scale": (halves, f"{name}/scale")}
        else:
            places[name] = (source, name)
    return LazyTensors(places)


class _Halves:
    """Weights in 8 bits and their scales; the last one read is kept for its other half."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        self._source, self._name = source, ""

    def __getitem__(self, key: str) -> Tensor:
        name, _, is_scale = key.partition("/")
        if self._name != name:
            self._name, (self._weight, self._scale) = name, quantized(self._source[name])
        return self._scale if is_scale else self._weight
