# SPDX-License-Identifier: Apache-2.0
"""Addresses that servers print, and that clients connect to."""

from urllib.parse import urlsplit

from imaginaire.listening import in_address


def test_every_host_comes_back_from_an_address() -> None:
    for host in ("::1", "fe80::2", "127.0.0.1", "gpubox"):
        place = urlsplit(f"http://{in_address(host)}:8080")
        assert (place.hostname, place.port) == (host, 8080)
