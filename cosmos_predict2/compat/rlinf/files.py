# SPDX-License-Identifier: Apache-2.0
"""RLinf's YAML files, composed by Hydra: defaults lists, interpolations, search paths and overrides as there."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cosmos_predict2.compat.cosmos_rl.policies import SUITES
from cosmos_predict2.compat.fields import require_fit, require_one_of, unknown_field
from cosmos_predict2.compat.rlinf.fields import FIELDS
from imaginaire.config.registry import forgiving_store
from imaginaire.errors import ConfigError, near

POLICIES = {"toy": "toy", "openvla_oft": "openvla_oft", "openvla": "openvla", "openpi": "pi05"}  # -> as called here
ENVIRONMENTS = ("cosmos_wm", "toy")
_WORLD_MODELS = {"wan_wm": "Wan", "opensora_wm": "OpenSora"}


def load_embodiment(folder: str, name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The content of the configuration ``name`` of a folder, without Hydra's own settings."""
    place = Path(folder).expanduser().absolute()
    names = sorted(path.stem for path in place.glob("*.yaml"))
    if name.removesuffix(".yaml") not in names:
        if not place.is_dir():
            raise ConfigError(f"--config-path {folder}: there is no such folder.")
        raise ConfigError(f"--config-name {name}: {folder} has no {name}.yaml.{near(name, names)}")
    os.environ.setdefault("EMBODIED_PATH", str(place.parent))  # published files look for their groups below it
    os.environ.setdefault("REPO_PATH", os.getcwd())
    try:
        with forgiving_store(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of defaults lists without _self_, which published files have
            with hydra.initialize_config_dir(config_dir=str(place), version_base=None):
                tree = hydra.compose(name.removesuffix(".yaml"), overrides=list(overrides))
        require_known(lambda path: OmegaConf.select(tree, path))
        _fill_model_dir(tree)
        content = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file)
        group = place / missing.rpartition("/")[0]
        known = [f"{missing.rpartition('/')[0]}/{path.stem}" for path in group.glob("*.yaml")]
        raise ConfigError(
            f"{name}: its defaults have '{missing}', which {folder} has not.{near(missing, known)}"
        ) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name}: {error.full_key}: {str(error.msg).splitlines()[0]}.") from None
    except HydraException as error:
        raise _explained(name, overrides, error) from None
    except yaml.YAMLError as error:  # which names the file
        raise ConfigError(f"{name}, or a file of its defaults, is not valid YAML: {error}.") from error
    except UnicodeDecodeError as error:
        found = next((file for file in sorted(place.rglob("*.yaml")) if error.object in file.read_bytes()), place)
        raise ConfigError(f"{found} is not text in UTF-8: {error}. Save it as UTF-8.") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name} is no configuration with sections.")
    return {str(key): value for key, value in content.items()}


def require_known(value_at: Callable[[str], Any]) -> None:
    """Raise for an environment, an algorithm or a policy that is not here; ``value_at`` gives the configuration's value
    at a path, or None.

    The environment comes first, then the algorithm, then the policy, all before any other field counts: a file of
    another environment has fields of its own, which would otherwise be refused one by one.
    """
    section = "env.train"
    kind = str(value_at(f"{section}.env_type") or value_at(f"{section}.simulator_type") or ENVIRONMENTS[0])
    policy = str(value_at("actor.model.model_type") or "openvla_oft")
    if kind not in ENVIRONMENTS:
        other = "" if policy in POLICIES else f' There is no policy "{policy}" here either.'
        instead = _alternative(kind, policy, str(value_at(f"{section}.task_suite_name")))
        raise ConfigError(f'{section}.env_type = "{kind}": {instead}{other}')
    for path in ("algorithm.adv_type", "algorithm.loss_type"):
        if (value := value_at(path)) is not None:
            require_fit(path, value, FIELDS[path])
    require_one_of("actor.model.model_type", policy, POLICIES, ": no policy is called so")


def _alternative(kind: str, policy: str, suite: str) -> str:
    """Advice in place of an environment that is not here: the experiment that plays in a simulator, with the usual
    policy or suite for unknown ones."""
    suite = suite.replace("libero_130", "libero_all")
    name = POLICIES.get(policy, "openvla_oft").replace("toy", "openvla_oft")
    experiment = f"vla_grpo_{name}_{suite if suite in SUITES['libero'] else 'libero_spatial'}"
    if kind == "behavior":
        experiment = "vla_grpo_pi05_b1k"
    simulated = f"python -m scripts.train -- experiment={experiment} model.config.policy.path=FOLDER"
    if kind in ("libero", "behavior"):
        place = "LIBERO's simulator" if kind == "libero" else "BEHAVIOR-1K"
        return f"a policy that learns in {place} is an experiment here, without this file: {simulated}"
    if kind in _WORLD_MODELS:
        return (
            f"there is no {_WORLD_MODELS[kind]} environment here. Cosmos imagines LIBERO:"
            f" cosmos_libero_spatial_grpo_openvlaoft, env_type: cosmos_wm. In its simulator: {simulated}"
        )
    close = near(kind, ENVIRONMENTS)
    if close.startswith(" Did you mean"):
        return f"no environment is called so.{close}"
    return f"there is no such environment here. There are {' and '.join(ENVIRONMENTS)}."


def _fill_model_dir(tree: DictConfig) -> None:
    """Set the world model's folder, which other paths refer to, where a file names its weights alone."""
    section = "env.train"
    weights = OmegaConf.select(tree, f"{section}.cosmos_ckpt_path")
    if weights is None or OmegaConf.select(tree, f"{section}.cosmos_model_dir") is not None:
        return
    OmegaConf.update(tree, f"{section}.cosmos_model_dir", os.path.dirname(str(weights)) or ".", force_add=True)
    OmegaConf.update(tree, f"{section}.world_model_cfg.cosmos.ckpt_path", weights, force_add=True)


def _explained(name: str, overrides: Sequence[str], error: HydraException) -> ConfigError:
    """The error for an override of a field that the files have not, or else with Hydra's message."""
    cause = error.__cause__
    key = getattr(cause, "full_key", None)
    item = next((one for one in overrides if key and one.lstrip("+~").startswith(f"{key}=")), None)
    if item is not None and key not in FIELDS:
        return unknown_field(str(key), FIELDS)
    if item is not None:
        return ConfigError(f"{item}: {name} does not have this field. To add it write +{item}.")
    return ConfigError(f"{name}: {str(error).splitlines()[0]}.")
