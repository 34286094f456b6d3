# SPDX-License-Identifier: Apache-2.0
"""Sockets that servers listen on, and who may reach them: this machine alone, or others with a token."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

from imaginaire.errors import ConfigError


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens; a port that is taken is an error, not a reason to take another."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror}.") from error
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise ConfigError(
                f"Port {port} of {host} cannot be listened on: {error.strerror}. Stop what holds it, or give --port."
            ) from error
        yield listener


def in_address(host: str) -> str:
    """The host as addresses have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_of(variable: str, host: str) -> str:
    """The token of the environment, without which a host that other machines reach is refused."""
    token = os.environ.get(variable, "")
    require_token(token, variable, host)
    return token


def require_token(token: str, variable: str, host: str) -> None:
    """Raise for a server that other machines reach and that has no token, and for a token that no header can hold."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, but there is no token. "
            f"Set {variable} (of the clients, too), or listen on 127.0.0.1."
        )
    if any(not 33 <= ord(c) <= 126 for c in token):
        raise ConfigError(f"{variable} must consist of visible ASCII characters.")
