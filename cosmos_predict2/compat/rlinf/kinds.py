# SPDX-License-Identifier: Apache-2.0
"""Environment, algorithm and policy of RLinf's configuration: what is not here is said before any other field counts.

A file of another environment has fields of its own, which would otherwise be refused one by one.
"""

from collections.abc import Callable
from typing import Any

from cosmos_predict2.compat.cosmos_rl.policies import SUITES
from cosmos_predict2.compat.fields import require_fit
from cosmos_predict2.compat.rlinf.fields import FIELDS
from imaginaire.errors import ConfigError, near

POLICIES = {"toy": "toy", "openvla_oft": "openvla_oft", "openvla": "openvla", "openpi": "pi05"}  # -> as called here
ENVIRONMENTS = ("cosmos_wm", "toy")
_WORLD_MODELS = {"wan_wm": "Wan", "opensora_wm": "OpenSora"}
_SUITES = {"libero_130": "libero_all"}  # -> as called here


def require_known(value_at: Callable[[str], Any]) -> None:
    """Raise where the configuration, of which ``value_at`` gives the value at a path or None, is for what is not here.

    The environment comes first, then the algorithm, then the policy.
    """
    section = "env.train"
    kind = str(value_at(f"{section}.env_type") or value_at(f"{section}.simulator_type") or ENVIRONMENTS[0])
    policy = str(value_at("actor.model.model_type") or "openvla_oft")
    suite = str(value_at(f"{section}.task_suite_name"))
    if kind not in ENVIRONMENTS:
        other = "" if policy in POLICIES else f' There is no policy "{policy}" here either.'
        raise ConfigError(f'{section}.env_type = "{kind}": {_not_here(kind, policy, suite)}{other}')
    for path in ("algorithm.adv_type", "algorithm.loss_type"):
        if (value := value_at(path)) is not None:
            require_fit(path, value, FIELDS[path])
    if policy not in POLICIES:
        raise ConfigError(f'actor.model.model_type = "{policy}": no policy is called so.{near(policy, POLICIES)}')


def _not_here(kind: str, policy: str, suite: str) -> str:
    simulated = (
        f"python -m scripts.train -- experiment={_experiment(kind, policy, suite)} model.config.policy.path=FOLDER"
    )
    if kind == "libero":
        return f"a policy that learns in LIBERO's simulator is an experiment here, without this file: {simulated}"
    if kind == "behavior":
        return f"a policy that learns in BEHAVIOR-1K is an experiment here, without this file: {simulated}"
    if kind in _WORLD_MODELS:
        return (
            f"there is no {_WORLD_MODELS[kind]} environment here. Cosmos imagines LIBERO:"
            f" cosmos_libero_spatial_grpo_openvlaoft, env_type: cosmos_wm. In its simulator: {simulated}"
        )
    close = near(kind, ENVIRONMENTS)
    if close.startswith(" Did you mean"):
        return f"no environment is called so.{close}"
    return f"there is no such environment here. There are {' and '.join(ENVIRONMENTS)}."


def _experiment(kind: str, policy: str, suite: str) -> str:
    """The experiment of scripts.train that plays in a simulator; an unknown policy or suite has the usual one."""
    if kind == "behavior":
        return "vla_grpo_pi05_b1k"
    name = POLICIES.get(policy, "openvla_oft").replace("toy", "openvla_oft")
    suite = _SUITES.get(suite, suite)
    return f"vla_grpo_{name}_{suite if suite in SUITES['libero'] else 'libero_spatial'}"
