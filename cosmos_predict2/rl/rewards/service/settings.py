# SPDX-License-Identifier: Apache-2.0
"""The settings of a service, of its TOML file and flags; its queue and the version of each reward follow from them."""

import hashlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from cosmos_predict2.rl.rewards.local import path_of
from cosmos_predict2.rl.rewards.service.queue import Limits, Queue
from imaginaire.config.registry import load_toml
from imaginaire.errors import ConfigError, near
from imaginaire.listening import require_token

log = logging.getLogger(__name__)

TOKEN_VARIABLES = ("WFM_REWARD_TOKEN", "REMOTE_REWARD_TOKEN")
DEFAULT_QUEUE = f"{os.environ.get('IMAGINAIRE_OUTPUT_ROOT', 'checkpoints')}/reward_service/queue.sqlite3"

# Published fields that mean nothing here, with the reason.
_IGNORED = {
    **dict.fromkeys(("redis_host", "redis_port"), "use queue = 'redis://HOST:PORT'"),
    **dict.fromkeys(("max_uploads", "idle_s"), "bodies are received as they come"),
    "max_wait_s": "a portion has what waits when a worker is free",
    "no_latent_decoder": "latents are decoded where a reward needs pixels",
    "chunk_duration": "a clip is decoded in windows of temporal_window",
    "load_mean_std": "mean and deviation of the latents are those of the tokenizer",
    **dict.fromkeys(("wan2pt2_model_path", "wan2pt2_credential_path"), "Wan2.2 latents are not decoded"),
    "download_path": "models come from the hub's cache or from model_path",
    "setup_script": "nothing is run; install what the reward needs, and name its interpreter as venv_python",
    **dict.fromkeys(("work_dir", "tmp_dir"), "nothing is written"),
    **dict.fromkeys(("endpoint_url", "endpoint_api_key"), "no reward here asks another endpoint"),
}


@attrs.define(kw_only=True)
class DecodeSettings:
    """Decoder of latents to pixels."""

    model_path: str = ""  # the file of the Wan2.1 tokenizer, or "tiny"
    dtype: str = attrs.field(default="float32", validator=validators.in_(("float32", "float16", "bfloat16")))
    device: str = ""  # "": that of the reward
    temporal_window: int = attrs.field(default=4, validator=validators.ge(1))


@attrs.define(kw_only=True)
class RewardSettings:
    """One reward: what computes it, where, and in which portions."""

    reward_type: str
    make: str = ""  # module:Class; that of its name, where it has one here
    arguments: dict[str, Any] = attrs.field(factory=dict)  # of the class
    model_path: str = ""
    dtype: str = ""
    device: str | list[str] = ""  # "": a GPU where there is one; a list: a worker on each
    venv_python: str = ""  # an interpreter of another environment; it needs this project's packages
    max_batch: int = attrs.field(default=8, validator=validators.ge(1))  # jobs that are scored together
    timeout_s: float = attrs.field(default=120.0, validator=validators.gt(0))  # to decode a clip, or score a portion
    enable: bool = True

    def __attrs_post_init__(self) -> None:
        self.reward_type, self.make = path_of(f"{self.reward_type}={self.make}" if self.make else self.reward_type)


@attrs.define(kw_only=True)
class ServiceSettings:
    """The configuration of a service."""

    host: str = "127.0.0.1"
    port: int = attrs.field(default=8080, validator=[validators.ge(0), validators.le(65535)])
    queue: str = DEFAULT_QUEUE
    max_jobs: int = attrs.field(default=10_000, validator=validators.ge(1))
    max_queue_gb: float = attrs.field(default=20.0, validator=validators.gt(0))
    max_body_mb: float = attrs.field(default=512.0, validator=[validators.gt(0), validators.le(900)])
    max_wait_s: float = attrs.field(default=60.0, validator=validators.ge(0))  # of a pull with wait=SECONDS
    result_ttl_s: float = attrs.field(default=3600.0, validator=validators.gt(0))
    lease_s: float = attrs.field(default=30.0, validator=validators.gt(0))
    max_attempts: int = attrs.field(default=2, validator=validators.ge(2))  # the first may have been in company
    grace_s: float = attrs.field(default=30.0, validator=validators.ge(0))  # for running jobs, when it is stopped
    decode: DecodeSettings = attrs.field(factory=DecodeSettings)
    rewards: list[RewardSettings] = attrs.field(factory=list)
    token: str = attrs.field(default="", repr=False)

    def limits(self) -> Limits:
        return Limits(self.max_jobs, int(self.max_queue_gb * 1e9), self.result_ttl_s, self.max_attempts)

    def check(self) -> None:
        """Raise on what would start an unsafe or useless service."""
        if not self.rewards:
            raise ConfigError("The service has no reward: give --rewards NAME,... or [[reward_args]] in --config.")
        names = [reward.reward_type for reward in self.rewards]
        if odd := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name)]:
            raise ConfigError(f"The reward name '{odd[0]}' may have letters, digits, '_', '.' and '-' only.")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"The reward '{twice[0]}' is there twice. More workers for it: device = ['cuda:0', ...].")
        require_token(self.token, TOKEN_VARIABLES[0], self.host)


def read_settings(path: str | None, rewards: Sequence[str] = (), **flags: Any) -> ServiceSettings:
    """The settings of a TOML file under what the command line sets; the token is of the environment."""
    values = load_toml(path) if path else {}
    decode = _made(DecodeSettings, values.pop("decode_args", {}), "decode_args")
    rows = values.pop("reward_args", [])
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: reward_args is an array of tables: [[reward_args]].")
    made = [_made(RewardSettings, row, "reward_args") for row in rows]
    made = [row for row in made if row.enable]
    if rewards:
        by_name = {row.reward_type: row for row in made}
        named = [path_of(name)[0] if "=" in name or ":" in name or name not in by_name else name for name in rewards]
        made = [by_name.get(name) or RewardSettings(reward_type=one) for name, one in zip(named, rewards, strict=True)]
    values |= {name: value for name, value in flags.items() if value is not None}
    for name in ("decode", "rewards", "token"):
        if name in values:
            raise ConfigError(f"{path}: '{name}' is no field of the file. The token: {TOKEN_VARIABLES[0]}.")
    settings = _made(ServiceSettings, values, "")
    settings.decode, settings.rewards = decode, made
    settings.token = next((os.environ[name] for name in TOKEN_VARIABLES if os.environ.get(name)), "")
    settings.check()
    return settings


def _made(cls: type, values: Any, table: str) -> Any:
    """The class of a table; unknown fields are errors, published ones that do nothing here are noted."""
    where = table or "the top level"
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is a table, not {values!r}.")
    fields = {one.name: one for one in attrs.fields(cls) if one.init}
    given = {}
    for name, value in values.items():
        if name in fields:
            given[name] = _of_type(value, fields[name], where)
        elif name in _IGNORED:
            log.info("%s: '%s' is ignored: %s", where, name, _IGNORED[name])
        else:
            raise ConfigError(f"{where} has the unknown field '{name}'.{near(name, fields)}")
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: {error.args[0] if error.args else error}.") from error


def _of_type(value: Any, field: Any, where: str) -> Any:
    if field.type is float and type(value) is int:
        return float(value)
    if field.type == (str | list[str]):
        values = value if isinstance(value, list) and value else [value]
        good = all(isinstance(one, str) for one in values)
    else:
        good = type(value) is {int: int, float: float, str: str, bool: bool}.get(field.type, dict)
    if not good:
        raise ConfigError(f"{where}: {field.name} = {value!r} has the wrong type: expected {field.type}.")
    return value


def open_queue(place: str, limits: Limits) -> Queue:
    """The queue at ``place``: redis://HOST:PORT/DB (or rediss://, unix://), else a file of SQLite."""
    if place.startswith(("redis://", "rediss://", "unix://")):
        from cosmos_predict2.rl.rewards.service.redis_queue import RedisQueue

        return RedisQueue(place, limits)
    if "://" in place:
        raise ConfigError(f"--queue {place}: expected redis://HOST:PORT/DB, or the path of a file for SQLite.")
    from cosmos_predict2.rl.rewards.service.sqlite_queue import SQLiteQueue

    return SQLiteQueue(place, limits)


def version_of(reward: RewardSettings, decode: DecodeSettings) -> str:
    """A digest of what a reward's results follow from: class, arguments, weights, dtype, and how latents are decoded.

    Files among them, and the one with its code, count by size and time. Code that a reward imports and models of the
    hub, which are known by their names, do not.
    """
    parts = [reward.make, reward.arguments, reward.model_path, reward.dtype, attrs.asdict(decode)]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16)
    try:
        found = importlib.util.find_spec(reward.make.partition(":")[0])  # it is not imported
    except (ImportError, ValueError):  # the worker names it as unfit
        found = None
    texts = [found and found.origin, reward.model_path, decode.model_path, *reward.arguments.values()]
    for place in (Path(text) for text in texts if isinstance(text, str) and text and os.path.exists(text)):
        for file in sorted([place, *place.glob("*"), *place.glob("*/*")]):
            if os.path.isfile(file):  # False where it may not be looked at, too
                facts = file.stat()
                digest.update(f"{file} {facts.st_size} {facts.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()
