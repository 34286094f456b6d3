# SPDX-License-Identifier: Apache-2.0
"""One request and its answer in JSON, with the standard library alone."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LARGEST_ANSWER = 64 << 20


class NoAnswer(Exception):
    """Nothing that could be used came back."""


@dataclass(frozen=True)
class Answer:
    status: int
    content: dict[str, Any]
    retry_after: float | None = None

    def message(self) -> str:
        """The message of the service about a failure."""
        return str(self.content.get("message") or self.content.get("detail") or self.content.get("error") or "")[:300]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token goes to the address that was configured, and to no other."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def ask(url: str, body: bytes | None, headers: Mapping[str, str], timeout: float) -> Answer:
    """The answer to a POST, or to a GET without a body, whatever its status; NoAnswer where there is none."""
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="GET" if body is None else "POST")
    is_near = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    handlers: list[Any] = [_NoRedirects(), *([urllib.request.ProxyHandler({})] if is_near else [])]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as response:
            return _answer(response.status, response.read(LARGEST_ANSWER), response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, _rest(error), error.headers)
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{urlsplit(url).netloc} does not answer: {getattr(error, 'reason', error)}") from error


def _rest(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(1 << 20)
    except (OSError, http.client.HTTPException):
        return b""


def _answer(status: int, body: bytes, headers: Any) -> Answer:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        if status == 200:
            raise NoAnswer("the answer is no JSON object")
        content = {"message": body[:200].decode(errors="replace")}
    return Answer(status, content, _seconds(headers.get("Retry-After")))


def _seconds(text: str | None) -> float | None:
    try:
        return min(max(float(text), 0.0), 300.0) if text else None
    except ValueError:  # a date: our own waits do
        return None
