# SPDX-License-Identifier: Apache-2.0
"""Remote file systems for ``imaginaire.storage``: credentials, failures that may pass, and failures explained."""

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from imaginaire.errors import CheckpointError, ConfigError, UserError, missing_package

log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]
T = TypeVar("T")

TRIES = 3
FIRST_WAIT_S = 0.5  # doubles with every further try

STANDARD_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
PROJECT_CREDENTIALS = ("PROD_S3_CHECKPOINT_ACCESS_KEY_ID", "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY")
STANDARD_ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
PROJECT_ENDPOINT = ("PROD_S3_CHECKPOINT_ENDPOINT_URL",)
STANDARD_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")
PROJECT_REGION = ("PROD_S3_CHECKPOINT_REGION_NAME",)

_THROTTLING = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout"}


def filesystem(path: StrPath) -> tuple[Any, str]:
    """The fsspec file system of a remote path, and the path inside it."""
    import fsspec

    text = os.fspath(path)
    if is_s3(text) and importlib.util.find_spec("s3fs") is None:
        raise missing_package("s3fs", "s3")
    try:
        fs, inner = fsspec.core.url_to_fs(text, **filesystem_options(text))
    except ImportError as error:
        raise ConfigError(f"{text}: fsspec cannot open this kind of address here: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{text}: {error}") from error
    if is_s3(text):
        from botocore.handlers import add_expect_header

        # aiohttp waits without limit for the "100 Continue" of a server that fell silent: bodies are sent at once
        fs.s3.meta.events.unregister("before-call.s3", add_expect_header)
        fs.retries = 2  # for a body that breaks off; requests are retried by botocore, whole operations by retry
    return fs, cast(str, inner)


def filesystem_options(path: StrPath) -> dict[str, Any]:
    """The arguments for fsspec to open ``path``: for S3 the credentials, endpoint and region of the environment.

    The standard AWS pair is taken first, then the project's. Endpoint and region come from the same family as the
    pair; from the other one only if that one has no pair of its own. Without a pair the AWS chain decides (profile,
    instance role).
    """
    if not is_s3(path):
        return {"use_listings_cache": False}
    standard, project = _pair(STANDARD_CREDENTIALS), _pair(PROJECT_CREDENTIALS)
    endpoints, regions = [STANDARD_ENDPOINT, PROJECT_ENDPOINT], [STANDARD_REGION, PROJECT_REGION]
    if standard is None and project is not None:
        endpoints.reverse()
        regions.reverse()
    if standard is not None and project is not None:
        endpoints, regions = endpoints[:1], regions[:1]
    key, secret = standard or project or (None, None)
    endpoint, region = _first_set(sum(endpoints, ())), _first_set(sum(regions, ()))
    config: dict[str, Any] = {"retries": {"mode": "standard", "total_max_attempts": 2}}
    if endpoint is not None:
        config["request_checksum_calculation"] = "when_required"  # other stores do not know Amazon's trailing checksums
    return {
        "key": key,
        "secret": secret,
        "token": os.environ.get("AWS_SESSION_TOKEN") if standard else None,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": region} if region else {},
        "config_kwargs": config,
        "use_listings_cache": False,
    }


def is_s3(path: StrPath) -> bool:
    return os.fspath(path).startswith(("s3://", "s3a://"))


def _pair(names: tuple[str, str]) -> tuple[str, str] | None:
    values = [os.environ.get(name) or None for name in names]
    if values[0] and values[1]:
        return values[0], values[1]
    if any(values):
        present, absent = names if values[0] else names[::-1]
        raise ConfigError(f"{present} is set, but {absent} is not. Set both, or neither.")
    return None


def _first_set(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def retry(path: StrPath, operation: Callable[[], T]) -> T:
    """The operation's result; failures that may pass are tried again, all others become a UserError."""
    for attempt in range(1, TRIES + 1):
        try:
            return operation()
        except UserError:
            raise
        except Exception as error:
            if not _may_pass(error):
                explanation = _explain(error, path)
                if explanation is None:
                    raise
                raise explanation from error
            if attempt == TRIES:
                raise CheckpointError(
                    f"{os.fspath(path)}: failed {TRIES} times, last with {_brief(error)}. {_credentials(path)}"
                ) from error
            wait = FIRST_WAIT_S * 2 ** (attempt - 1)
            log.warning("%s: %s (try %d of %d, next in %.1f s)", os.fspath(path), _brief(error), attempt, TRIES, wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def on_store(path: StrPath, operation: Callable[[Any, str], T]) -> T:
    """The result of an operation on a remote path's file system and the path inside it, with `retry`."""
    return retry(path, lambda: operation(*filesystem(path)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _response(error: BaseException) -> tuple[int, str]:
    """HTTP status and error code of an S3 answer anywhere in the chain, else (0, "")."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(response.get("Error", {}).get("Code", ""))
    return 0, ""


def _may_pass(error: Exception) -> bool:
    status, code = _response(error)
    if code in _THROTTLING or status in (408, 429) or status >= 500:
        return True
    if status:
        return False
    names = {(kind.__module__.split(".")[0], kind.__name__) for link in _chain(error) for kind in type(link).__mro__}
    passing = {
        ("botocore", "HTTPClientError"),  # time-outs and closed connections
        ("botocore", "ConnectionError"),  # no connection
        ("botocore", "IncompleteReadError"),
        ("botocore", "FlexibleChecksumError"),  # damaged on the way
        ("aiohttp", "ClientError"),
        ("builtins", "ConnectionError"),
        ("builtins", "TimeoutError"),
        ("asyncio", "TimeoutError"),
    }
    return bool(names & passing)


def _explain(error: Exception, path: StrPath) -> UserError | None:
    """An error with the cure of a permanent failure of a remote path; None if a user cannot cure it."""
    status, code = _response(error)
    text = os.fspath(path)
    kinds = {kind.__name__ for link in _chain(error) for kind in type(link).__mro__}
    if "NoCredentialsError" in kinds or "PartialCredentialsError" in kinds:
        return ConfigError(f"{text}: there are no credentials. {_credentials(path)}")
    if status in (401, 403) or isinstance(error, PermissionError):
        return CheckpointError(f"{text}: access was refused ({code or _brief(error)}). {_credentials(path)}")
    if code == "NoSuchBucket":
        return CheckpointError(f"{text}: this bucket does not exist at the endpoint asked. {_credentials(path)}")
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{text} does not exist.")
    if status:
        return CheckpointError(f"{text}: the store answered {status} {code}: {_brief(error)}. {_credentials(path)}")
    if "BotoCoreError" in kinds or "ParamValidationError" in kinds:
        return ConfigError(f"{text}: {_brief(error)}. {_credentials(path)}")
    return None


def raise_if_no_bucket(error: FileNotFoundError, path: StrPath) -> None:
    if _response(error)[1] == "NoSuchBucket":
        raise error


def _brief(error: BaseException) -> str:
    """Kind and text on one line, without a full stop: every message that holds it goes on."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(". :")


def _credentials(path: StrPath) -> str:
    """The variables that decide access, and whether they are set; never their values, the endpoint's apart."""
    if not is_s3(path):
        return ""
    names = [*STANDARD_CREDENTIALS, "AWS_PROFILE", *PROJECT_CREDENTIALS]
    states = ", ".join(f"{name} ({'set' if os.environ.get(name) else 'not set'})" for name in names)
    endpoint = filesystem_options(path)["endpoint_url"] or "Amazon's, since no endpoint variable is set"
    return f"Looked at {states}. Endpoint: {endpoint} ({', '.join(STANDARD_ENDPOINT + PROJECT_ENDPOINT)})."
