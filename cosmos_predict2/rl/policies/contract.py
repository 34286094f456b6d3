# SPDX-License-Identifier: Apache-2.0
"""A check that a policy keeps the contract of `Policy`: for policies of yours as for those here.

    from cosmos_predict2.rl.policies.contract import check_policy

    def test_my_policy_keeps_the_contract():
        check_policy(MyPolicy(), MyEnv(num_envs=3).reset()[0])

Each function that begins with ``check_`` is one rule. A run compares the log-probabilities of each experience by the
same measure before it learns from them (`policies.network`: `difference`, `tolerance_of`).
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.rl import interfaces
from cosmos_predict2.rl.interfaces import ContractError, Decision, Observation, Policy, require, require_rules
from cosmos_predict2.rl.policies.network import difference, tolerance_of

ENOUGH = 1000  # elements that are drawn to compare their spread with the entropy
SIGMAS, OFF = 6.0, 0.05  # how far their mean may be off: by chance, and where rare tokens were not among them


def check_policy(
    policy: Policy, observation: Observation, *, tolerance: float | None = None, unreached: Sequence[str] = ()
) -> None:
    """Raise `ContractError` for the first rule that ``policy`` breaks where it sees this, of two rows or more.

    ``tolerance`` of log-probabilities in place of that of the weights' precision. ``unreached`` are patterns of weights
    that no decision depends on, as published networks have some. Draws are seeded and few; the rules hold for all.
    Gradients and the mode of a module are afterwards as they were.
    """
    case = _Case(policy, observation, tolerance_of(policy) if tolerance is None else tolerance, unreached)
    require_rules(RULES, case)


class _Case:
    """A policy and what it sees; modules are in evaluation mode, as episodes are played."""

    def __init__(self, policy: Policy, observation: Observation, tolerance: float, unreached: Sequence[str]) -> None:
        self.policy, self.observation = interfaces.completed(policy, interfaces.PolicyDefaults), observation
        self.tolerance, self.unreached = tolerance, unreached
        self.num = len(observation["full_image"])

    def act(
        self,
        mode: interfaces.Mode = "sample",
        rows: list[int] | None = None,
        seed: int = 0,
        observation: Observation | None = None,
    ) -> Decision:
        rows = list(range(self.num)) if rows is None else rows
        seen = interfaces.rows_of(observation or self.observation, rows)
        generators = [torch.Generator().manual_seed(1000 * seed + i) for i in rows]
        with _mode(self.policy, is_training=False):
            return self.policy.act(seen, mode=mode, generators=generators)

    def log_prob(self, record: Mapping[str, Tensor], *, is_training: bool = False) -> Tensor:
        with torch.no_grad(), _mode(self.policy, is_training=is_training):
            return self.policy.log_prob(record).log_prob_B_K_N

    def require_close(self, what: str, found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        away, limit = difference(found, expected), self.tolerance if tolerance is None else tolerance
        if not away <= limit:
            shapes = f", shapes {list(found.shape)} and {list(expected.shape)}" if away == float("inf") else ""
            raise ContractError(f"{what} differ by {away:.3g} on average ({limit:g} may be rounding){shapes}")


@contextmanager
def _mode(policy: Any, *, is_training: bool) -> Iterator[None]:
    """Inside, a module is in training or evaluation mode."""
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules[:1]:
            module.train(is_training)
        yield
    finally:
        for module, was_training in zip(modules, modes):
            module.training = was_training


def _drawn(decision: Decision) -> Tensor:
    if decision.log_prob_E_K_N is None:
        raise ContractError("Decision.log_prob_E_K_N of a sampled decision is None: what was it drawn with?")
    return decision.log_prob_E_K_N


# --- rules


def check_decision(case: _Case) -> None:
    """A decision has finite actions [E, A, D] and a record with a row for each environment; where it is sampled, also
    the log-probability [E, K, N] that it was drawn with, where K divides A. None of them carries a gradient."""
    require(case.num >= 2, f"the observation has {case.num} rows: check it with 2 at least")
    for mode in ("sample", "greedy"):
        decision = case.act(mode)  # type: ignore[arg-type]
        actions = decision.actions_E_A_D
        _require_tensor(f"actions ({mode})", actions, 3, case.num)
        require(bool(decision.record), f"the record ({mode}) is empty")
        for name, value in decision.record.items():
            is_tensor = isinstance(value, Tensor) and value.ndim >= 1 and len(value) == case.num
            require(is_tensor, f"record['{name}'] ({mode}) has no row for each of {case.num} environments")
            require(not value.requires_grad, f"record['{name}'] ({mode}) carries a gradient: act without one")
    drawn = _drawn(case.act())
    _require_tensor("Decision.log_prob_E_K_N", drawn, 3, case.num)
    steps, rows = actions.shape[1], drawn.shape[1]
    require(rows > 0 and steps % rows == 0, f"log_prob_E_K_N has {rows} rows, which do not divide {steps} actions")


def check_seeds(case: _Case) -> None:
    """The same generators decide the same, greedily and where it samples, whatever the generator of torch; others
    sample something else."""
    for mode in ("greedy", "sample"):
        found = []
        for seed in (1, 2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                found.append(case.act(mode).actions_E_A_D)  # type: ignore[arg-type]
        require(torch.equal(*found), f"the same generators gave other actions ({mode}): it draws from elsewhere")
    other = case.act(seed=1).actions_E_A_D
    require(not torch.equal(other, found[0]), "other generators sample the same actions: nothing is drawn")


def check_company(case: _Case) -> None:
    """An environment decides alone as among others and in another order: each row has its own draw and record."""
    whole = case.act()
    for rows in ([case.num - 1], list(range(case.num))[::-1]):
        part = case.act(rows=rows)
        case.require_close(
            f"actions of rows {rows}, decided apart,", part.actions_E_A_D, whole.actions_E_A_D[rows], 0.05
        )
        case.require_close(f"log-probabilities of rows {rows}, decided apart,", _drawn(part), _drawn(whole)[rows])


def check_log_prob(case: _Case) -> None:
    """log_prob of a record is what the decision was drawn with, element by element, also after other decisions."""
    for seed in range(2):
        decision = case.act(seed=seed)
        case.act(seed=9)
        found = case.log_prob(decision.record)
        case.require_close("what act drew with and log_prob of its record", found, _drawn(decision))


def check_rows_of_records(case: _Case) -> None:
    """Decisions are learnt from in other batches than they were made in: in any order, together and alone."""
    first, second = (case.act(seed=seed).record for seed in (0, 1))
    record = {name: torch.cat([value, second[name]]) for name, value in first.items()}
    whole = case.log_prob(record)
    shuffled = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    for rows in (shuffled, shuffled[:1], shuffled[1:3]):
        found = case.log_prob({name: value[rows.to(value.device)] for name, value in record.items()})
        case.require_close(f"log_prob of rows {rows.tolist()} of a record and of the whole", found, whole[rows])


def check_training_mode(case: _Case) -> None:
    """A module computes the same log-probabilities in training mode: nothing such as dropout comes between."""
    record = case.act().record
    found = [case.log_prob(record, is_training=is_training) for is_training in (False, True, True)]
    for other in found[1:]:
        case.require_close("log_prob in evaluation and in training mode", other, found[0])


def check_spread(case: _Case) -> None:
    """Draws are as spread as the entropy claims: its mean log-probability is minus the entropy.

    Policies without an entropy are not judged by it.
    """
    off: list[Tensor] = []
    while sum(map(len, off)) < ENOUGH:
        record = case.act(seed=100 + len(off)).record
        with torch.no_grad(), _mode(case.policy, is_training=False):
            found = case.policy.log_prob(record)
        if found.entropy_B_K_N is None:
            return
        require(
            found.entropy_B_K_N.shape == found.log_prob_B_K_N.shape,
            "entropy_B_K_N has another shape than log_prob_B_K_N",
        )
        off.append((-found.log_prob_B_K_N - found.entropy_B_K_N).float().flatten())
    all_off = torch.cat(off)
    mean, limit = float(all_off.mean()), OFF + SIGMAS * float(all_off.std()) / len(all_off) ** 0.5
    require(
        abs(mean) <= limit,
        f"on average log_prob of draws is {-mean:.3g} above minus the entropy (up to {limit:.2g} may be chance): act"
        " draws with another spread than log_prob and entropy speak of",
    )


def check_gradients(case: _Case) -> None:
    """The gradient of log_prob reaches every weight that is trained, and is finite."""
    record = case.act().record
    _require_gradients(case, "log_prob", lambda: case.policy.log_prob(record).log_prob_B_K_N)


def check_velocities(case: _Case) -> None:
    """The velocities of a flow have the rows and elements of log_prob, unit noise from the given generators alone, and
    do not depend on a row's company or the mode of a module; their gradient is that of `check_gradients`."""
    velocities = case.policy.velocities
    if velocities is None or not case.policy.flow_times:
        return
    times, record = torch.tensor(tuple(case.policy.flow_times), dtype=torch.float32), case.act().record
    require(bool(((times > 0) & (times <= 1)).all()), f"flow_times are {times.tolist()}, but lie above 0, up to 1")

    def found(rows: list[int], *, is_training: bool = False) -> interfaces.Velocities:
        some = {name: value[rows] for name, value in record.items()}
        generators = [torch.Generator().manual_seed(i) for i in rows]
        with _mode(case.policy, is_training=is_training):
            return velocities(some, times.expand(len(rows), -1), generators)

    every = list(range(case.num))
    with torch.no_grad():
        whole = found(every)
        shape = case.policy.log_prob(record).log_prob_B_K_N.shape
        of_times = (shape[0], len(times), *shape[1:])
        for name, value, wanted in (
            ("x0_B_K_N", whole.x0_B_K_N, shape),
            ("noise_B_L_K_N", whole.noise_B_L_K_N, of_times),
            ("velocity_B_L_K_N", whole.velocity_B_L_K_N, of_times),
        ):
            require(value.shape == wanted, f"{name} has the shape {list(value.shape)}, expected {list(wanted)}")
            require(bool(value.isfinite().all()), f"{name} has numbers that are not finite")
        square, limit = float(whole.noise_B_L_K_N.square().mean()), SIGMAS * (2 / whole.noise_B_L_K_N.numel()) ** 0.5
        require(abs(square - 1) <= limit, f"the mean square of the noise is {square:.3g}, and of unit noise 1")
        again, last, training = found(every), found(every[-1:]), found(every, is_training=True)
    require(torch.equal(again.noise_B_L_K_N, whole.noise_B_L_K_N), "the same generators gave other noise")
    require(torch.equal(last.noise_B_L_K_N, whole.noise_B_L_K_N[-1:]), "a row alone has other noise than among others")
    case.require_close("velocities of a row alone and among others", last.velocity_B_L_K_N, whole.velocity_B_L_K_N[-1:])
    case.require_close("velocities in evaluation and training mode", training.velocity_B_L_K_N, whole.velocity_B_L_K_N)
    _require_gradients(case, "velocities", lambda: found(every, is_training=True).velocity_B_L_K_N)


def _require_gradients(case: _Case, name: str, of: Callable[[], Tensor]) -> None:
    """The gradient of what a policy computes reaches every weight that is trained, and is finite."""
    if not isinstance(case.policy, nn.Module):
        return
    weights = dict(case.policy.named_parameters())
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    require(bool(trained), "no parameter requires a gradient: there is nothing to train")
    with torch.enable_grad(), _mode(case.policy, is_training=True):
        total = of().sum()
        require(total.requires_grad, f"{name} carries no gradient")
        found: list[Tensor | None] = [*torch.autograd.grad(total, list(trained.values()), allow_unused=True)]
    gradients = {weight: gradient for weight, gradient in zip(trained, found) if gradient is not None}
    missing = [weight for weight in trained if weight not in gradients]
    missing = [weight for weight in missing if not any(fnmatch.fnmatchcase(weight, one) for one in case.unreached)]
    text = "does not reach {}: train them, freeze them, or name them in unreached"
    require(not missing, f"the gradient of {name} {text.format(', '.join(missing[:3]))}")
    bad = [weight for weight, gradient in gradients.items() if not gradient.isfinite().all()]
    require(not bad, f"the gradient of {name} is not finite in {', '.join(bad[:3])}")
    require(any(bool(gradient.any()) for gradient in gradients.values()), f"the gradient of {name} is 0 everywhere")


RULES: list[Callable[[_Case], None]] = [
    rule for name, rule in [*globals().items()] if name.startswith("check_") and rule is not check_policy
]


def _require_tensor(name: str, value: Any, dimensions: int, rows: int) -> None:
    """A floating tensor of finite numbers, without a gradient."""
    is_right = (
        isinstance(value, Tensor) and value.is_floating_point() and value.ndim == dimensions and len(value) == rows
    )
    found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    require(is_right, f"{name} is {found}; floating numbers of {dimensions} dimensions, {rows} rows")
    require(bool(value.isfinite().all()), f"{name} has numbers that are not finite")
    require(not value.requires_grad, f"{name} carries a gradient: act without one")
