# SPDX-License-Identifier: Apache-2.0
"""A Redis of the tests' own."""

import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from imaginaire.distributed import free_port
from tests.programs import HANG_S


def await_redis(port: int) -> None:
    import redis

    for _ in range(int(10 * HANG_S)):
        try:
            redis.Redis(port=port).ping()
            return
        except redis.ConnectionError:
            time.sleep(0.1)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed: apt-get install redis-server")
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    words = ["redis-server", "--port", str(port), "--dir", str(folder), "--appendonly", "yes", "--bind", "127.0.0.1"]
    process = subprocess.Popen([*words, "--save", ""], stdout=subprocess.DEVNULL)
    await_redis(port)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """An empty Redis."""
    import redis

    redis.Redis.from_url(redis_server).flushdb()
    return redis_server
