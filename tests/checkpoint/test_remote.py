# SPDX-License-Identifier: Apache-2.0
"""Steps under a URL: in memory through fsspec, and in a double of S3 through obstore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from paceline.checkpoint.store import store_for
from paceline.errors import CheckpointError
from paceline_plugins.data.checkpoint_store import RemoteStore
from tests.checkpoint.test_exact import kept
from tests.helpers import Program, adam, same_bits, simulate, train

RULE = "bmuf_adam(period=3)"
CHOICES: dict[str, Any] = {"optimizer": adam, "samples": 48}


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    pytest.importorskip("obstore")
    server_module = pytest.importorskip("moto.server")
    import boto3

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=names["AWS_ENDPOINT_URL"], region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        client.close()
        yield "s3://bucket/deep/run"
    server.stop()


def stopped(url: str, **more: Any) -> None:
    train(RULE, 2, **CHOICES, stop_at=10, settings=kept(url, **more))  # type: ignore[arg-type]


def harm(url: str, name: str) -> None:
    files = fsspec.filesystem("memory")
    data = bytearray(files.cat_file(f"{url}/{name}"))
    data[len(data) // 2] ^= 1
    files.pipe_file(f"{url}/{name}", bytes(data))


def test_the_newest_step_is_resumed_and_old_ones_go(memory: str) -> None:
    stopped(memory, keep=2)
    assert store_for(memory).numbers() == [6, 9]
    outs = train(RULE, 2, **CHOICES, settings=kept(memory, keep=2))  # type: ignore[arg-type]
    assert len(outs[0].losses) == 12 - 9 and store_for(memory).numbers() == [9, 12]
    assert same_bits(outs[0].model, train(RULE, 2, **CHOICES)[0].model)
    names = {name.rpartition("/")[0].rpartition("/")[2] for name in fsspec.filesystem("memory").find("bucket")}
    assert names == {"step-000000009", "step-000000012"}


def test_damage_and_what_was_not_finished(memory: str, caplog: pytest.LogCaptureFixture) -> None:
    stopped(memory)
    harm(memory, "step-000000009/rank-001.safetensors")
    fsspec.filesystem("memory").rm_file(f"{memory}/step-000000006/manifest.json")
    outs = train(RULE, 2, **CHOICES, settings=kept(memory, every=1000))  # type: ignore[arg-type]
    assert len(outs[0].losses) == 12 - 3
    said = {one.getMessage() for one in caplog.records}
    assert len(said) == 1 and "step-000000009/rank-001.safetensors is damaged" in next(iter(said))
    outs = train(RULE, 2, **CHOICES, settings=kept(memory))  # type: ignore[arg-type]
    assert store_for(memory).numbers() == [6, 9, 12]


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers(workers: int, memory: str) -> None:
    stopped(memory)
    outs = train(RULE, workers, **CHOICES, settings=kept(memory, every=1000))  # type: ignore[arg-type]
    assert outs[0].minibatches >= 9 and outs[0].losses


def test_one_step_by_its_url_and_a_place_without_any(memory: str) -> None:
    stopped(memory)
    outs = simulate(Program(RULE, resume=f"{memory}/step-000000006", **CHOICES), 2)
    assert len(outs[0].losses) == 12 - 6
    for wrong, said in (("memory://empty/run", "has no step in it"), (f"{memory}/step-000000007", "cannot be read")):
        with pytest.raises(CheckpointError, match=said):
            simulate(Program(RULE, resume=wrong, **CHOICES), 2)


def test_what_a_store_refuses_is_a_warning(
    memory: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, *arguments: Any, **more: Any) -> None:
        raise PermissionError("no, thank you")

    monkeypatch.setattr(RemoteStore, "_put_rank", refuse)
    train(RULE, 2, **CHOICES, settings=kept(memory, every=3))  # type: ignore[arg-type]
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 2 and all("no, thank you" in text and "training goes on" in text for text in said)
    assert store_for(memory).numbers() == []
