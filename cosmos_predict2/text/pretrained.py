# SPDX-License-Identifier: Apache-2.0
"""Text networks of the transformers package from a public folder: what must be there, and weights with an account."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.text import eight_bit
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import shape_of
from imaginaire.errors import CheckpointError, ConfigError, first_line, optional_module

CONFIG = "config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
    if isinstance(dtype, str) and dtype not in (known := (*DTYPES, eight_bit.NAME)):
        raise ConfigError(f"dtype='{dtype}': expected one of {', '.join(known)}, or None.")
    return torch.int8 if dtype == eight_bit.NAME else dtype_of(dtype)


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
        source = eight_bit.replace_linears(model, source)
    model = model.to_empty(device=device)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()  # to_empty gave tied parameters memory of their own
    weights.load_into(model.state_dict(), source).require(allow_missing=allow_missing, source=path)
    return model.eval().requires_grad_(False)


def dtype_name(model: Any) -> str:
    """The dtype in the name of an encoder with this network."""
    is_8_bit = any(isinstance(module, eight_bit.EightBitLinear) for module in model.modules())
    return eight_bit.NAME if is_8_bit else str(model.dtype).removeprefix("torch.")


def fingerprint(model: nn.Module) -> str:
    """Eight digits that differ between two sets of weights, from some values of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:SAMPLE].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:8]
