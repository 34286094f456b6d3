# SPDX-License-Identifier: Apache-2.0
"""Policies in the order of what a world model imagines of them, and how far that order is to be trusted.

A policy that learnt in this world model, or from this reward, has learnt to be valued by them: it is not judged by
them, unless its true success is known, which then counts. Where true success of several policies is known, the values
are calibrated by it, each policy's by the others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy

from cosmos_predict2.checkpoints.card import mappings, run_folder, run_tree, start_facts
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.split import SUCCESS_COLUMN, read_split, recorded_outcomes
from cosmos_predict2.evaluation.metrics.agreement import (
    Estimate,
    as_floats,
    bootstrapped,
    line,
    misordered,
    pearson,
    rank_violation,
    spearman,
)
from cosmos_predict2.rl.remote.connections import is_policy
from cosmos_predict2.rl.trust import LEARNT_IN
from imaginaire import storage
from imaginaire.checkpoint.weight_files import latest
from imaginaire.errors import DataError

LEAST_KNOWN = 4  # policies of known true success: fewer make no correlation
LEAST_PEARSON = 0.8  # below it values do not follow truth: at .60 ten pairs of 20 policies were misordered, at .89 none
GAP = 0.15  # of true success: no better policy should stand below one that is worse by more


@dataclass(frozen=True)
class Ranked:
    """A policy: its imagined value, the true success where it is known, and why it is not judged, or ""."""

    policy: str
    value: Estimate
    truth: Estimate | None = None
    refused: str = ""


@dataclass(frozen=True)
class Ranking:
    """Policies from the best to the worst, those that are not judged last; figures where truth is known."""

    rows: tuple[Ranked, ...]
    expected: Mapping[str, float]  # true success by the calibration, where there is one
    figures: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""  # why the order is not to be trusted

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {
                "policy": row.policy,
                "value": row.value,
                "true_success": row.truth,
                "expected_success": self.expected.get(row.policy),
                "refused": row.refused,
            }
            for row in self.rows
        ]
        return {"policies": rows, "figures": self.figures, "problem": self.problem}


def refusal(policy: str, inputs: Mapping[str, Collection[str]], places: Mapping[str, str]) -> str:
    """The reason not to judge a policy by a world model and a reward (their digests and paths); "" for none.

    A run records the digests of what it learnt in, and its configuration the paths: of one that was trained on since,
    the digest is another one.
    """
    if is_policy(policy) or not (folder := run_folder(latest(policy))):
        return ""
    known = start_facts(folder).get(LEARNT_IN) or {}
    env = run_tree(folder).get("model", {}).get("config", {}).get("env") or {}
    env = env if isinstance(env, Mapping) else {}  # of a server: no path is of here
    used = {"world_model": env.get("imagination", {}).get("dit_path"), "reward": env.get("reward", {}).get("path")}
    taught = [name for name in inputs if known.get(name) in inputs[name] or _is_same(used[name], places[name])]
    return f"it learnt from this {' and this '.join(taught)}".replace("_", " ") if taught else ""


def _is_same(used: str | None, place: str) -> bool:
    """True for a path in the run, or in the folder, that another one lies in."""
    if not used or (not storage.exists(used) and not storage.is_folder(used)):
        return False
    one, other = ((run_folder(path) or path.rstrip("/")) for path in (used, place))
    return one == other or one.startswith(f"{other}/")


def have_failures(world_model: str) -> bool | None:
    """True if recordings that a world model's run learnt from failed, by its split or their column of success; None
    where that is not known."""
    folder = run_folder(latest(world_model))
    found: list[bool | None] = []
    for node in mappings(run_tree(folder).get("dataloader_train") if folder else None):
        root, split_file = node.get("root"), node.get("split_file")
        with suppress(DataError):  # data that are gone, or record no success
            if split_file:
                split = read_split(split_file)
                found += [split.outcomes[i] for i in split.train]
            elif root:
                found += recorded_outcomes(LeRobotSource.open(root), SUCCESS_COLUMN)
    return False in found if found else None


def ranked(rows: Sequence[Ranked], has_failures: bool | None) -> Ranking:
    """The order by value of those that are judged; with ``has_failures`` false, or where the values of policies of
    known success do not follow it, it has a ``problem``."""
    judged = [row for row in rows if not row.refused]
    known = [row for row in judged if row.truth is not None]
    value_P = as_floats([row.value.value for row in known])
    true_P = as_floats([row.truth.value for row in known if row.truth])
    figures: dict[str, Any] = {}
    expected: dict[str, float] = {}
    problem = ""
    if has_failures is False:
        problem = "the recordings have no failures: a world model of them imagines success alone"
    if len(known) >= LEAST_KNOWN:
        follows = bootstrapped(lambda rows: pearson(value_P[rows], true_P[rows]), len(known))
        wrong = misordered(value_P, true_P, GAP)
        figures = {
            "pearson": follows,
            "spearman": bootstrapped(lambda rows: spearman(value_P[rows], true_P[rows]), len(known)),
            "rank_violation": rank_violation(value_P, true_P),
            "misordered": [[known[i].policy, known[j].policy] for i, j in wrong],
        }
        if not follows.value >= LEAST_PEARSON:
            problem = problem or (
                f"values do not follow true success: Pearson {follows.as_text()} over {len(known)} policies,"
                f" {LEAST_PEARSON} is needed"
            )
        else:
            figures["calibrated_pearson"], expected = _calibrated(judged, known, value_P, true_P)
    order = sorted(judged, key=lambda row: (math.isnan(row.value.value), -row.value.value))  # unknown ones last
    others = sorted((row for row in rows if row.refused), key=lambda row: -row.truth.value if row.truth else 0.0)
    return Ranking((*order, *others), expected, figures, problem)


def _calibrated(
    judged: Sequence[Ranked], known: Sequence[Ranked], value_P: Any, true_P: Any
) -> tuple[float, dict[str, float]]:
    """Expected true success of each policy by a line through the others of known success, and its correlation with the
    truth."""
    found = {}
    for row in judged:
        others = numpy.array([other is not row for other in known])
        slope, offset = line(value_P[others], true_P[others])
        found[row.policy] = min(1.0, max(0.0, offset + slope * row.value.value))
    return pearson(as_floats([found[row.policy] for row in known]), true_P), found


def table(ranking: Ranking) -> str:
    """The policies, a line each."""
    width = max(len(row.policy) for row in ranking.rows)
    lines = [f"  {'policy':{width}s}  {'imagined value':18s} {'expected':9s} true success"]
    for row in ranking.rows:
        expected = ranking.expected.get(row.policy, math.nan)
        lines.append(
            f"  {row.policy:{width}s}  {'not judged' if row.refused else row.value.as_text():18s}"
            f" {'-' if math.isnan(expected) else f'{expected:.2f}':9s} {row.truth.as_text() if row.truth else '-'}"
            + (f"  ({row.refused})" if row.refused else "")
        )
    return "\n".join(lines)
