# SPDX-License-Identifier: Apache-2.0
"""AdamW in float32, whatever the precision of the parameters.

For weight w, gradient g and step t (from 1)::

    m = b1 m + (1 - b1) g          u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
    v = b2 v + (1 - b2) g^2        w = w - lr u

m, v and w are float32, m and v on request in fewer bytes. A bfloat16 parameter keeps w as its master in the optimizer's
state and receives the rounded value, so that updates below its resolution add up. Sharded parameters (DTensor) are
updated shard by shard.
"""

import copy
import importlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw as torch_adamw

from imaginaire.distributed.parallel import in_runs, is_dtensor, to_local
from imaginaire.errors import ConfigError, near
from imaginaire.optim import moments as forms

log = logging.getLogger(__name__)

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")  # where torch has a fused AdamW kernel
CAPTURING_DEVICES = ("cuda",)  # where a graph can hold a step, which then reads its rate from the device
CAST_NUMEL = 1 << 26  # elements whose temporary float32 copies (gradients of bf16 parameters) exist at a time
OPEN_NUMEL = 1 << 22  # elements whose state is on the device and in float32 at a time, if it is kept otherwise


def fused_adamw(
    model: nn.Module,
    lr: float = 1e-4,
    weight_decay: float = 0.1,
    betas: Sequence[float] = (0.9, 0.99),
    eps: float = 1e-8,
    optim_type: str = "fusedadam",
    master_weights: bool = True,
    capturable: bool = True,
    decay_1d: bool = True,
    moments: str = "float32",
    offload: bool = False,
) -> Optimizer:
    """The optimizer of every parameter of ``model`` that requires a gradient.

    ``decay_1d=False`` exempts parameters of fewer than two dimensions (norms, biases) from weight decay; the published
    runs decay all. ``optim_type="adamw"`` gives torch's AdamW: state in the parameters' precision and no masters.
    ``moments`` is a form of `imaginaire.optim.moments`; ``offload`` keeps moments and masters on the host.
    """
    if optim_type not in ("fusedadam", "adamw"):
        raise ConfigError(f"optimizer.optim_type is '{optim_type}'.{near(optim_type, ('fusedadam', 'adamw'))}")
    if optim_type == "adamw":
        if moments != "float32" or offload:
            raise ConfigError(
                f"optimizer.optim_type=adamw keeps torch's state on the device, but optimizer.moments={moments} and"
                f" optimizer.offload={offload} are set: take optimizer.optim_type=fusedadam."
            )
        return adamw(model, lr, weight_decay, betas, eps, decay_1d)
    groups = _parameter_groups(model, weight_decay, decay_1d)
    kept: dict[str, Any] = dict(master_weights=master_weights, capturable=capturable, moments=moments, offload=offload)
    return FusedAdamW(groups, lr=lr, betas=betas, eps=eps, **kept)


def adamw(
    model: nn.Module,
    lr: float = 1e-4,
    weight_decay: float = 0.1,
    betas: Sequence[float] = (0.9, 0.99),
    eps: float = 1e-8,
    decay_1d: bool = True,
) -> Optimizer:
    """torch's AdamW, fused where the device has the kernel, of every parameter that requires a gradient; no masters."""
    groups = _parameter_groups(model, weight_decay, decay_1d)
    _check_hyperparameters(lr, betas, eps, weight_decay)
    params = [param for group in groups for param in group["params"]]
    if low := {param.dtype for param in params} - {torch.float32, torch.float64}:
        names = ", ".join(sorted(str(dtype) for dtype in low))
        log.warning("AdamW has no float32 masters of %s parameters: small updates get lost; fusedadamw has them", names)
    fused = params[0].device.type in FUSED_DEVICES
    beta1, beta2 = map(float, betas)
    return AdamW(groups, lr=float(lr), betas=(beta1, beta2), eps=float(eps), fused=fused)


class FusedAdamW(Optimizer):
    """AdamW with float32 state and masters; the formula is in the module's docstring.

    Masters are cloned from the parameters at their first step, unless a loaded state brought them. With ``capturable``
    on CUDA the learning rate lies in a tensor on the device, so that a captured graph follows the schedule.

    ``moments`` other than float32, or ``offload``: the state is kept in fewer bytes, or on the host, and is opened on
    the device a few million numbers at a time. Offloading changes no number.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        master_weights: bool = True,
        capturable: bool = True,
        moments: str = "float32",
        offload: bool = False,
    ) -> None:
        _check_hyperparameters(lr, betas, eps, weight_decay)
        if moments not in forms.FORMS:
            raise ConfigError(f"optimizer.moments is '{moments}'.{near(moments, forms.FORMS)}")
        if master_weights and not capturable:
            raise ConfigError(
                "optimizer.master_weights=True needs optimizer.capturable=True, which is False; "
                "set capturable=True or master_weights=False."
            )
        defaults = {"lr": float(lr), "betas": tuple(map(float, betas)), "eps": float(eps)}
        defaults |= {"weight_decay": float(weight_decay), "master_weights": master_weights, "capturable": capturable}
        super().__init__(params, defaults)
        self.moments, self.offload = moments, offload
        self._draws: torch.Generator | None = None  # of the roundings of a step
        trained = [param for group in self.param_groups for param in group["params"]]
        if offload and any(map(is_dtensor, trained)):
            raise ConfigError(
                "optimizer.offload=True keeps the state of one card's weights on its host, but parameters are sharded:"
                " set model.config.fsdp_shard_size=0, or optimizer.offload=False (shards need less memory each)."
            )
        if moments != "float32" and any(param.dtype == torch.float64 for param in trained):
            raise ConfigError(f"optimizer.moments={moments}, but float64 parameters have float64 moments.")
        for group in self.param_groups:
            device = group["params"][0].device
            if capturable and device.type in CAPTURING_DEVICES:
                _put_lr_on(device, group)
        self._kernel = _choose_kernel(self.param_groups[0]["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._draws = None
        for group in self.param_groups:
            self._step_group(group)
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # the host may read what was copied to it
        return loss

    def place(self, param: Tensor) -> torch.device:
        """The device of a parameter's moments and master."""
        return torch.device("cpu") if self.offload else param.device

    def _step_group(self, group: dict[str, Any]) -> None:
        buckets: dict[tuple[torch.device, torch.dtype], list[_Row]] = {}
        for param in group["params"]:
            if param.grad is not None:
                row = self._row(param, param.grad, group["master_weights"])
                buckets.setdefault((row.param.device, row.param.dtype), []).append(row)
        for rows in buckets.values():
            if self.moments == "float32" and not self.offload:
                self._kernel(rows, group)
                continue
            if self.moments != "float32" and self._draws is None:
                self._draws = forms.draws(int(rows[0].step), rows[0].param.device)
            parts = (part for row in rows for part in row.parts(OPEN_NUMEL))
            for run in in_runs(parts, lambda row: row.grad.numel(), OPEN_NUMEL):
                opened = [row.opened() for row in run]
                self._kernel(opened, group)
                for row, found in zip(run, opened, strict=True):
                    row.keep(found, self._draws)

    def _row(self, param: Tensor, grad: Tensor, master_weights: bool) -> "_Row":
        if grad.layout is not torch.strided:
            raise RuntimeError(f"FusedAdamW takes dense gradients; one of shape {tuple(param.shape)} is sparse.")
        state = self.state[param]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for key in forms.KEYS:
                state |= forms.empty(param, self.moments, key, self.place(param))
        if master_weights and "master" not in state and param.dtype != state_dtype(param):
            state["master"] = forms.empty(param, "float32", "master", self.place(param))["master"].copy_(param)
        return _Row(param, grad, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts the state to the parameter's dtype, which would round float32 moments and masters to bfloat16.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    place = param.device if name == "step" else self.place(param)
                    self.state[param][name] = value.detach().to(device=place, copy=True)


class _Row:
    """One parameter's tensors of an update, all local; ``weight`` is the master, or the parameter itself."""

    __slots__ = ("exp_avg", "exp_avg_sq", "grad", "param", "scales", "step", "weight")

    def __init__(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        self.param, self.grad, self.weight = param, grad, state.get("master", param)
        self.exp_avg, self.exp_avg_sq, self.step = state["exp_avg"], state["exp_avg_sq"], state["step"]
        self.scales = [None if (s := state.get(key + forms.SCALE)) is None else to_local(s) for key in forms.KEYS]
        if is_dtensor(param):
            assert is_dtensor(grad) and grad.placements == param.placements, "gradient and parameter differ"
            self.param, self.grad = to_local(param), to_local(grad)
            self.weight = to_local(state["master"]) if "master" in state else self.param
            self.exp_avg, self.exp_avg_sq = to_local(self.exp_avg), to_local(self.exp_avg_sq)

    def parts(self, numel: int) -> Iterator["_Row"]:
        """Rows of the parameter, as many at a time as have so many numbers; each part counts the same step."""
        length = max(1, numel * max(1, len(self.param)) // max(1, self.param.numel())) if self.param.dim() else 1
        if self.param.dim() == 0 or length >= len(self.param):
            yield self
            return
        steps = self.step.clone()
        for start in range(0, len(self.param), length):
            part = copy.copy(self)
            for name in ("param", "grad", "weight", "exp_avg", "exp_avg_sq"):
                setattr(part, name, getattr(self, name)[start : start + length])
            part.weight = part.param if self.weight is self.param else part.weight
            part.scales = [None if scale is None else scale[start : start + length] for scale in self.scales]
            part.step = self.step if start == 0 else steps.clone()
            yield part

    def opened(self) -> "_Row":
        """The row with its state in float32 on the parameter's device."""
        row, device = copy.copy(self), self.param.device
        row.exp_avg = forms.opened(self.exp_avg, self.scales[0], signed=True, device=device)
        row.exp_avg_sq = forms.opened(self.exp_avg_sq, self.scales[1], signed=False, device=device)
        row.weight = self.weight.to(device, non_blocking=True)
        return row

    def keep(self, found: "_Row", draws: torch.Generator | None) -> None:
        """Write back what a step made of the opened row."""
        forms.keep(self.exp_avg, self.scales[0], found.exp_avg, signed=True, generator=draws)
        forms.keep(self.exp_avg_sq, self.scales[1], found.exp_avg_sq, signed=False, generator=draws)
        if found.weight is not self.weight:
            self.weight.copy_(found.weight, non_blocking=True)


def _put_lr_on(device: torch.device, group: dict[str, Any]) -> None:
    """The rate as a tensor; schedulers still start from the exact number."""
    group["initial_lr"] = group["lr"]
    group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)


def state_dtype(param: Tensor) -> torch.dtype:
    """float32, or float64 for a float64 parameter."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _update_with_torch(rows: list[_Row], group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    numbers: dict[str, Any] = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
    numbers |= {"weight_decay": group["weight_decay"], "amsgrad": False, "maximize": False}
    is_cast = any(row.grad.dtype != row.exp_avg.dtype or row.weight.dtype != row.exp_avg.dtype for row in rows)
    for chunk in in_runs(rows, lambda row: row.grad.numel(), CAST_NUMEL if is_cast else math.inf):
        weights = [row.weight.to(row.exp_avg.dtype) for row in chunk]  # copies only low precision without master
        grads = [_dense_like(row.grad, weight) for row, weight in zip(chunk, weights, strict=True)]
        exp_avgs, exp_avg_sqs = [row.exp_avg for row in chunk], [row.exp_avg_sq for row in chunk]
        steps = [row.step for row in chunk]
        if weights[0].device.type in FUSED_DEVICES:
            one = torch.ones((), device=steps[0].device)  # on CPU a number costs four times as much
            torch._foreach_add_(steps, one, alpha=1.0)
            torch._fused_adamw_(weights, grads, exp_avgs, exp_avg_sqs, [], steps, **numbers)
        else:
            torch_adamw(weights, grads, exp_avgs, exp_avg_sqs, [], steps, foreach=True, **numbers)
        if rounded := [i for i, row in enumerate(chunk) if row.param is not weights[i]]:
            torch._foreach_copy_([chunk[i].param for i in rounded], [weights[i] for i in rounded])


class _UpdateWithApex:
    """The update through apex's capturable kernels, which read bf16 gradients and write bf16 parameters in one pass."""

    def __init__(self, kernels: Any, applier: Any) -> None:
        self._kernels = kernels
        self._applier = applier
        self._in_step: dict[tuple[int, torch.dtype], list[Tensor]] = {}  # step counters known to be equal

    def __call__(self, rows: list[_Row], group: dict[str, Any]) -> None:
        first = rows[0]
        has_master = first.weight is not first.param
        fits = has_master or first.param.dtype == torch.float32
        if not fits or not self._same_step(rows, group) or any(row.grad.dtype != row.param.dtype for row in rows):
            return _update_with_torch(rows, group)
        torch._foreach_add_([row.step for row in rows], 1.0)
        lists = [[_dense_like(row.grad, row.param) for row in rows], [row.param for row in rows]]
        lists += [[row.exp_avg for row in rows], [row.exp_avg_sq for row in rows]]
        if has_master:
            lists.append([row.weight for row in rows])
        name = "multi_tensor_adam_capturable_master" if has_master else "multi_tensor_adam_capturable"
        device = first.param.device
        self._applier(
            getattr(self._kernels, name),
            torch.zeros(1, dtype=torch.int32, device=device),  # overflow flag: never set here
            lists,
            torch.as_tensor(group["lr"], dtype=torch.float32, device=device),
            *group["betas"],
            group["eps"],
            first.step.to(torch.int32).reshape(1),
            1,  # decoupled weight decay
            1,  # bias correction
            group["weight_decay"],
            torch.ones(1, dtype=torch.float32, device=device),  # inverse gradient scale
        )

    def _same_step(self, rows: list[_Row], group: dict[str, Any]) -> bool:
        """apex takes one step count per call. Counters that advance together stay equal, so they are read only once."""
        key = (id(group), rows[0].param.dtype)
        steps = [row.step for row in rows]
        known = self._in_step.get(key, [])
        if len(known) == len(steps) and all(a is b for a, b in zip(known, steps, strict=True)):
            return True
        self._in_step.pop(key, None)
        if len(set(torch.stack(steps).tolist())) > 1:
            return False
        self._in_step[key] = steps
        return True


def _choose_kernel(device: torch.device) -> Callable[[list[_Row], dict[str, Any]], None]:
    if device.type == "cuda":
        try:
            kernels = importlib.import_module("amp_C")
            applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        except ImportError:
            pass  # apex is optional, and its Python part can be there without the extension
        else:
            log.info("optimizer kernel: apex")
            return _UpdateWithApex(kernels, applier)
    log.info("optimizer kernel: torch %s on %s", "fused" if device.type in FUSED_DEVICES else "foreach", device.type)
    return _update_with_torch


def _dense_like(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient in the dtype and memory order of the weight, since the kernels walk plain memory."""
    if grad.stride() == weight.stride():
        return grad.to(weight.dtype)
    return torch.empty_like(weight).copy_(grad)


def _parameter_groups(model: nn.Module, weight_decay: float, decay_1d: bool) -> list[dict[str, Any]]:
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ConfigError(f"No parameter of {type(model).__name__} requires a gradient: there is nothing to optimize.")
    if decay_1d:
        return [{"params": params, "weight_decay": float(weight_decay)}]
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": float(weight_decay)},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_hyperparameters(lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"optimizer.{name} is {value}; expected a finite number of 0 or more.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optimizer.betas is {list(betas)}; expected two numbers of 0 or more and below 1.")
