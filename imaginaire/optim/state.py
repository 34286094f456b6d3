# SPDX-License-Identifier: Apache-2.0
"""Optimizer state by parameter name: independent of parameter order, of sharding and of the number of processes.

Two forms are read: by name, as `named_state` writes it, and by position, as ``Optimizer.state_dict()`` gives it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imaginaire.distributed.parallel import copy_shard, full_tensor
from imaginaire.errors import CheckpointError, ConfigError, listed
from imaginaire.optim import moments
from imaginaire.optim.adamw import FusedAdamW

ADAM_KEYS = {"step", "exp_avg", "exp_avg_sq"}
# State that is shaped and sharded as its parameter.
ELEMENTWISE = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "momentum_buffer"}
# Entries of a parameter group that a user does not set or that change no number.
NOT_COMPARED = {"params", "initial_lr", "step", "foreach", "fused", "capturable", "differentiable"}
NOT_COMPARED |= {"decoupled_weight_decay", "master_weights"}

Saved = dict[str, dict[str, Any]]  # parameter name -> state key -> value


def named_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """``{"class", "state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``.

    Tensors are the optimizer's own, DTensors where the parameters are; everything else is plain Python, so that a file
    of it opens with ``torch.load(weights_only=True)``. Names are those of ``model.named_parameters()``, in the order of
    the groups: that of ``optimizer.state`` is another after resuming, and equal runs write equal files.
    """
    names = _names(optimizer, model)
    state = {
        names[param]: {key: value if isinstance(value, Tensor) else _plain(value) for key, value in values.items()}
        for group in optimizer.param_groups
        for param in group["params"]
        if (values := optimizer.state.get(param))
    }
    groups = [
        {key: [names[p] for p in value] if key == "params" else _plain(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "state": state, "param_groups": groups}


def load_named_state(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Put the saved state into the optimizer; the lines returned say what differs or could not be used.

    Every parameter of the optimizer must be in the saved groups and the reverse, with the right shapes; otherwise
    nothing is loaded. Full tensors are cut to the shard of this rank. Hyper-parameters stay the configured
    ones.
    """
    names = _names(optimizer, model)
    params = {names[param]: param for group in optimizer.param_groups for param in group["params"]}
    saved, saved_groups = _by_name(state, params)
    notes = _check(optimizer, params, saved, saved_groups, str(state.get("class", "")))
    num_lacking = 0
    for name, param in params.items():
        values = saved.get(name)
        if not values:
            optimizer.state.pop(param, None)  # it had no gradient yet when the state was saved
            continue
        wanted = _wanted_keys(optimizer, param)
        num_lacking += wanted is not None and "master" in wanted and "master" not in values
        kept = {key: value for key, value in values.items() if wanted is None or key in wanted}
        state_of_param: dict[str, Any] = {}
        for key, value in kept.items():
            if key in moments.KEYS and (isinstance(optimizer, FusedAdamW) or key + moments.SCALE in values):
                form, place = _kept(optimizer, param)
                state_of_param |= moments.loaded(values, key, param, form, place)
                if not isinstance(optimizer, FusedAdamW):
                    state_of_param[key] = state_of_param[key].to(param.dtype)
            elif not key.endswith(moments.SCALE):
                state_of_param[key] = _load_value(key, value, param, optimizer)
        optimizer.state[param] = state_of_param
    if others := sorted(_other_forms(optimizer, params, saved)):
        notes.append(f"optimizer.moments: they are {', '.join(others)} in the checkpoint, and are converted")
    if num_lacking:
        notes.append(f"optimizer: no float32 masters of {num_lacking} parameters in the file; rounded weights start")
    return notes + _hyperparameters(optimizer, names, saved_groups)


def reset_masters(optimizer: Optimizer) -> None:
    """Forget the masters, so that the next step clones them from the parameters, which were replaced."""
    for values in optimizer.state.values():
        values.pop("master", None)


def _names(optimizer: Optimizer, model: nn.Module) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    foreign = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in names]
    if foreign:
        raise ConfigError(
            f"The optimizer (optimizer) has parameters that are not the model's, of shapes {foreign[:5]}: give it those"
            " of model.named_parameters()."
        )
    return names


def _by_name(state: Mapping[str, Any], params: Mapping[str, Tensor]) -> tuple[Saved, list[dict[str, Any]]]:
    if not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), Sequence):
        raise CheckpointError(f"Not an optimizer state: found {list(state)}, expected 'state' and 'param_groups'.")
    groups = [dict(group) for group in state["param_groups"]]
    keys = [key for group in groups for key in group["params"]]
    if any(not isinstance(key, str) for key in keys):
        order = _order_of_positions(state["state"], keys, params)
        groups = [{**group, "params": [order[key] for key in group["params"]]} for group in groups]
        saved = {order[key]: dict(values) for key, values in state["state"].items()}
    else:
        saved = {name: dict(values) for name, values in state["state"].items()}
    for group in groups:  # apex counts steps per group
        for name in group["params"]:
            if "step" in group and name in saved:
                saved[name].setdefault("step", group["step"])
    return saved, groups


def _order_of_positions(state: Mapping[Any, Any], keys: list[Any], params: Mapping[str, Tensor]) -> dict[Any, str]:
    """Names of a state by position: in the model's order, or matrices first as cosmos-predict2 orders them."""
    if len(keys) != len(params):
        raise CheckpointError(f"The optimizer state is of {len(keys)} unnamed parameters; {len(params)} are trained.")
    for names in (list(params), sorted(params, key=lambda name: params[name].dim() < 2)):
        order = dict(zip(keys, names, strict=True))
        if not any(_wrong_shapes(values, params[order[key]]) for key, values in state.items()):
            return order
    raise CheckpointError("The optimizer state has no parameter names, and its shapes do not fit this model's.")


def _check(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    saved: Mapping[str, Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    saved_class: str,
) -> list[str]:
    saved_names = {name for group in saved_groups for name in group["params"]} | saved.keys()
    problems = []
    if missing := [name for name in params if name not in saved_names]:
        problems.append(f"missing: {listed(missing)}")
    if unexpected := sorted(saved_names - params.keys()):
        problems.append(f"unexpected: {listed(unexpected)}")
    if wrong := [
        f"{name}.{key} {found} instead of {tuple(param.shape)}"
        for name, param in params.items()
        for key, found in _wrong_shapes(saved.get(name, {}), param)
    ]:
        problems.append(f"wrong shape: {listed(wrong)}")
    if problems:
        raise CheckpointError(
            f"The optimizer state does not fit the parameters that are trained ({'; '.join(problems)}). Resume with "
            "the checkpoint's architecture and trainable parameters, or load its weights only (checkpoint.load_path)."
        )
    current = type(optimizer).__name__
    if saved_class and _family(saved_class) != _family(current):
        raise CheckpointError(
            f"The optimizer state is of {saved_class}, this run configures {current}. Resume with that optimizer, "
            "or load the weights only (checkpoint.load_path)."
        )
    dropped: set[str] = set()
    for name, param in params.items():
        found, wanted = set(saved.get(name, {})), _wanted_keys(optimizer, param)
        if not found or wanted is None:
            continue
        if lacking := ADAM_KEYS - found:
            raise CheckpointError(
                f"The optimizer state of '{name}' has {', '.join(sorted(found))} but no {', '.join(sorted(lacking))}, "
                f"which {current} needs. Resume with the optimizer that wrote it, or load the weights only."
            )
        dropped |= {key for key in found - wanted if not key.endswith(moments.SCALE)}
    return [f"optimizer: '{key}' of the checkpoint is not used by {current}" for key in sorted(dropped)]


def _wanted_keys(optimizer: Optimizer, param: Tensor) -> set[str] | None:
    """State keys that the optimizer uses for the parameter; None where any are taken as they are."""
    if _family(type(optimizer).__name__) != "Adam":
        return None
    group = next(group for group in optimizer.param_groups if any(param is other for other in group["params"]))
    extra = {"max_exp_avg_sq"} if group.get("amsgrad") else set()
    if group.get("master_weights") and param.dtype not in (torch.float32, torch.float64):
        extra = extra | {"master"}
    return ADAM_KEYS | extra


def _other_forms(optimizer: Optimizer, params: Mapping[str, Tensor], saved: Saved) -> set[str]:
    """Forms of saved moments that this run keeps in another."""
    found = {name: moments.form_in(saved[name]) for name in params if "exp_avg" in saved.get(name, {})}
    kept = {name: moments.form_of(params[name].shape, _kept(optimizer, params[name])[0]) for name in found}
    is_ours = isinstance(optimizer, FusedAdamW)
    return {form for name, form in found.items() if (is_ours or form == "int8") and form != kept[name]}


def _kept(optimizer: Optimizer, param: Tensor) -> tuple[str, torch.device]:
    """The form and the place of the moments and masters of a parameter."""
    if isinstance(optimizer, FusedAdamW):
        return optimizer.moments, optimizer.place(param)
    return "float32", param.device


def _family(class_name: str) -> str:
    return "Adam" if class_name in ("FusedAdamW", "FusedAdam", "AdamW", "Adam") else class_name


def _wrong_shapes(values: Mapping[str, Any], param: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (key, tuple(value.shape))
        for key, value in values.items()
        if key in ELEMENTWISE and isinstance(value, Tensor) and value.shape != param.shape
    ]


def _load_value(key: str, value: Any, param: Tensor, optimizer: Optimizer) -> Any:
    if key == "step":
        groups = optimizer.param_groups
        on_device = any("master_weights" in g or g.get("fused") or g.get("capturable") for g in groups)
        step = full_tensor(torch.as_tensor(value))
        return step.detach().to(dtype=torch.float32, device=param.device if on_device else "cpu", copy=True).reshape(())
    if not isinstance(value, Tensor):
        return value
    if key not in ELEMENTWISE:
        return value.detach().to(device=param.device, copy=True)
    place = _kept(optimizer, param)[1]
    if isinstance(optimizer, FusedAdamW):
        target = moments.empty(param.detach(), "float32", key, place)[key]
    else:  # torch's Adam has all in the parameter's dtype
        is_adam = _family(type(optimizer).__name__) == "Adam"
        target = torch.empty_like(param.detach(), dtype=param.dtype if is_adam else value.dtype)
    copy_shard(target, value.detach())
    return target


def _hyperparameters(
    optimizer: Optimizer, names: Mapping[Tensor, str], saved_groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    group_of = {name: group for group in saved_groups for name in group["params"]}
    notes: set[str] = set()
    for group in optimizer.param_groups:
        for saved in {id(group_of[names[p]]): group_of[names[p]] for p in group["params"]}.values():
            for key in group.keys() & saved.keys() - NOT_COMPARED:
                old, new = _plain(saved[key]), _plain(group[key])
                if key == "lr":  # the scheduled rate moves; the configured one is compared
                    old, new = _plain(saved.get("initial_lr", old)), _plain(group.get("initial_lr", new))
                if old == new or (key == "lr" and math.isclose(old, new, rel_tol=1e-6)):  # a rate may have been float32
                    continue
                found = f"checkpoint {_shown(old)}, config {_shown(new)}"
                notes.add(f"optimizer.{key}: {found}; using the config's from now on")
    return sorted(notes)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
