# SPDX-License-Identifier: Apache-2.0
"""A server with faults, a double of S3, and short pauses between tries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from paceline_plugins.data.cache import download
from tests.data.cache.server import Server

SHA = hashlib.sha256(b"x").hexdigest()
SECRETS = {"region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """A bucket with a few objects on a double of S3, as options for the cache."""
    pytest.importorskip("obstore")
    server_module = pytest.importorskip("moto.server")
    import boto3

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="dir/a b.bin", Body=b"hello")
    client.put_object(Bucket="bucket", Key="large", Body=bytes(range(256)) * 5000)
    client.put_object(Bucket="bucket", Key="100%?#.bin", Body=b"percent")
    client.put_object(Bucket="bucket", Key="signed", Body=b"x", Metadata={"sha256": SHA})
    client.put_object(Bucket="bucket", Key="wrong", Body=b"y", Metadata={"sha256": SHA})
    client.put_object(Bucket="bucket", Key="crc32c", Body=b"123456789", Metadata={"crc32c": "E3069283"})
    client.put_object(Bucket="bucket", Key="wrong-crc32c", Body=b"123456789", Metadata={"crc32c": "00000000"})
    client.close()
    yield {"endpoint": endpoint, **SECRETS}
    server.stop()
