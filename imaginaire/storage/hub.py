# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face hub's client, and its failures in words that say what to do."""

from typing import Any

from imaginaire.errors import UserError, missing_package


def client() -> Any:
    """The module ``huggingface_hub``, imported only where something is fetched."""
    try:
        import huggingface_hub
    except ImportError:
        raise missing_package("huggingface_hub", "weights") from None
    return huggingface_hub


def explained(error: Exception, repository: str, *, revision: str | None, licence: str, kind: str = "") -> str:
    """One sentence on a failure of the hub; ``kind`` is "" for models and "datasets" for data sets.

    The client's error classes moved between its versions, so they are known by name.
    """
    name = type(error).__name__
    where = f"{repository} @ {revision or 'newest'}"
    page = "/".join(["https://huggingface.co", *([kind] if kind else []), repository])
    status = getattr(getattr(error, "response", None), "status_code", None)
    causes = [name, *(type(e).__name__ for e in (error.__cause__, error.__context__) if e is not None)]
    accept = f"accept the {licence or 'licence'} on {page}, then log in with 'hf auth login' or set HF_TOKEN"
    if "GatedRepoError" in causes or status == 403:
        return f"{repository} is gated: {accept} to a token with read access."
    if status == 401:  # without a token the hub answers so for absent, private and gated repositories alike
        return f"{repository} is not on the hub under that name, or it is private or gated. If it is gated, {accept}."
    if name in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return f"{where} has not got what was asked for ({page}/tree/{revision or 'main'})."
    if "RepositoryNotFoundError" in causes or status == 404:
        return f"{where} is not on the hub, or not for you to see ({name})."
    if isinstance(error, UserError):
        return f"{where}: {error}."
    no_answer = any(word in cause for word in ("Connect", "Timeout", "LocalEntry", "Offline") for cause in causes)
    cure = " Is there a network? HF_ENDPOINT names a mirror of the hub." if no_answer else ""
    text = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else "no message"
    return f"{repository}: {name}: {text}.{cure}"
