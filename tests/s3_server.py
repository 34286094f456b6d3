# SPDX-License-Identifier: Apache-2.0
"""A real S3 server over HTTP, started once per session on a free port, and a fresh bucket for each test."""

import os
import uuid
from collections.abc import Iterator

import pytest

from imaginaire import storage

OF_AWS = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "ENDPOINT_URL", "ENDPOINT_URL_S3")
OF_PROD = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "REGION_NAME")
CREDENTIAL_VARIABLES = [f"AWS_{name}" for name in (*OF_AWS, "REGION", "DEFAULT_REGION")]
CREDENTIAL_VARIABLES += [f"PROD_S3_CHECKPOINT_{name}" for name in OF_PROD]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of the running server."""
    moto_server = pytest.importorskip("moto.server", reason="moto or flask is not installed: pip install -e '.[dev]'")
    # moto looks for credentials of its own when it starts
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says nothing about S3."""
    for name in CREDENTIAL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)


@pytest.fixture
def s3_bucket(s3_server: str, no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh bucket as ``s3://name``, reachable through the standard variables; copies of its files end with it."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"test-{uuid.uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=s3_server).create_bucket(Bucket=name)
    yield f"s3://{name}"
    storage.forget_copies()
