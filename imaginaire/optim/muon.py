# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of a network's blocks, AdamW for everything else, as one optimizer.

For a matrix W of r rows and c columns with gradient G::

    M = momentum M + (1 - momentum) G          N = momentum M + (1 - momentum) G   (Nesterov; else N = M)
    W = (1 - lr weight_decay) W - lr sqrt(max(1, r / c)) orthogonal(N)

``orthogonal`` brings all singular values close to 1 by five Newton-Schulz steps (Jordan et al. 2024). State and
arithmetic are float32, with masters for parameters of lower precision; only those steps may be in bfloat16. It suits
small networks that every process holds whole: an orthogonalised matrix needs all of its gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from imaginaire.distributed.parallel import in_runs, is_dtensor
from imaginaire.errors import ConfigError, near
from imaginaire.optim.adamw import CAST_NUMEL, FusedAdamW, state_dtype

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at 0; singular values settle between 0.68 and 1.13
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}  # None: as the state, which is float64 for float64
AUTO = "auto"
BLOCKS = "blocks"  # a part of the names of parameters that Muon may take


def muon(
    model: nn.Module,
    lr: float = 0.02,
    adam_lr: float = 2e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    precision: str = "float32",
    weight_decay: float = 0.0,
    betas: Sequence[float] = (0.9, 0.99),
    eps: float = 1e-8,
    master_weights: bool = True,
    capturable: bool = True,
) -> "Muon":
    """The optimizer of every parameter of ``model`` that requires a gradient.

    Muon takes those with two dimensions that lie in a list of blocks (``blocks`` is a part of their name) at ``lr``;
    AdamW takes the rest at ``adam_lr``. Both decay weights by ``weight_decay`` times their own rate. ``precision`` is
    of the Newton-Schulz steps: "bfloat16", as published, is faster on GPUs and on CPUs with instructions for it; "auto"
    takes it there, and "float32" elsewhere.
    """
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if sharded := [name for name, param in named if is_dtensor(param)]:
        raise ConfigError(
            f"optimizer muon orthogonalises whole matrices, and {len(sharded)} parameters are sharded (such as "
            f"{sharded[0]}). Set model.config.fsdp_shard_size=0, or use optimizer=fusedadamw with a learning rate of "
            "its own (optimizer.lr=1e-3, say), and ~optimizer.adam_lr where the experiment sets that."
        )
    matrices = [param for name, param in named if param.dim() == 2 and BLOCKS in name.split(".")]
    if not matrices:
        raise ConfigError(f"muon: no trainable matrix in a '{BLOCKS}' of {type(model).__name__}; use optimizer=adamw.")
    taken = set(matrices)
    others = [param for _, param in named if param not in taken]
    groups = [{"params": matrices, "lr": float(lr), "orthogonal": True}]
    if others:
        groups.append({"params": others, "lr": float(adam_lr), "orthogonal": False})
    adam: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    adam |= {"master_weights": master_weights, "capturable": capturable}
    return Muon(groups, momentum=momentum, nesterov=nesterov, precision=precision, **adam)


class Muon(FusedAdamW):
    """Updates groups with ``orthogonal`` by the formula of the module's docstring, the others as `FusedAdamW` does."""

    def __init__(
        self,
        params: Iterable[Any],
        momentum: float = 0.95,
        nesterov: bool = True,
        precision: str = "float32",
        lr: float = 0.02,
        **adam: Any,
    ) -> None:
        if precision not in (*PRECISIONS, AUTO):
            raise ConfigError(f"optimizer.precision is '{precision}'.{near(precision, (*PRECISIONS, AUTO))}")
        if not 0 <= momentum < 1:
            raise ConfigError(f"optimizer.momentum is {momentum}; expected a number of 0 or more and below 1.")
        groups = [dict(group) for group in params]
        for group in groups:
            if not group.get("lr", lr) >= 0:
                raise ConfigError(f"optimizer.lr and adam_lr are numbers of 0 or more; found {group['lr']}.")
            group.setdefault("orthogonal", True)
            if group["orthogonal"]:
                group["params"] = list(group["params"])
                if precision == AUTO:
                    precision = "bfloat16" if has_fast_bfloat16(group["params"][0].device) else "float32"
                group.update(momentum=float(momentum), nesterov=nesterov, precision=precision)
        super().__init__(groups, lr=lr, **adam)

    def _step_group(self, group: dict[str, Any]) -> None:
        if not group["orthogonal"]:
            super()._step_group(group)
            return
        alike: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None:
                alike.setdefault((param.shape, param.dtype, param.device), []).append(param)
        for matrices in alike.values():
            for run in in_runs(matrices, Tensor.numel, CAST_NUMEL):
                self._update_matrices(run, group)

    def _update_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step of matrices of one shape, dtype and device, orthogonalised in one batch."""
        weights, directions = [], []
        for param in params:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param, dtype=state_dtype(param))
            if group["master_weights"] and "master" not in state and param.dtype != state_dtype(param):
                state["master"] = param.to(state_dtype(param))
            assert param.grad is not None
            grad, average = param.grad.to(state_dtype(param)), state["momentum_buffer"]
            average.lerp_(grad, 1 - group["momentum"])
            directions.append(grad.lerp(average, group["momentum"]) if group["nesterov"] else average)
            weights.append(state.get("master", param))
        rows, columns = params[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        updates = orthogonal(torch.stack(directions), PRECISIONS[group["precision"]])
        for param, weight, update in zip(params, weights, updates, strict=True):
            stepped = weight * (1 - group["lr"] * group["weight_decay"]) - (group["lr"] * scale) * update
            weight.copy_(stepped)
            if weight is not param:
                param.copy_(stepped)


def has_fast_bfloat16(device: torch.device) -> bool:
    """True if products in bfloat16 are faster than in float32 there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())


def orthogonal(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[..., rows, columns] with the singular vectors of each matrix and singular values near 1; zero stays zero.

    The steps are computed in ``dtype``, by default that of the matrices, which the result has.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.reshape(-1, *matrices.shape[-2:])
    x = x.mT if is_tall else x
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype or matrices.dtype)
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype).reshape(matrices.shape)
