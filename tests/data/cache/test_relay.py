# SPDX-License-Identifier: Apache-2.0
"""Object stores where obstore cannot be used: in processes that were forked after their parent had used it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from paceline.data.cache import Cache, Files, NotServedError, download, fetch_subprocess
from paceline.data.cache.errors import Unavailable
from paceline.data.cache.objects import ObstoreSource
from paceline.data.packed import PackedDataset
from tests.data.cache.conftest import SHA
from tests.data.cache.server import until
from tests.data.packed.made import packed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
KB, MB = 1000, 1 << 20


def gone(pid: int) -> bool:
    """Whether a process has ended, also where nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def pids() -> list[int]:
    """The relays of this process."""
    return [one.pid for one in fetch_subprocess._all]


def content_and_pids(path: Path) -> tuple[bytes, list[int]]:
    return path.read_bytes(), pids()


def same(batch: list[Any]) -> list[Any]:
    return batch


def put(s3: dict[str, str], bodies: dict[str, bytes]) -> list[str]:
    """Objects in the bucket; their urls."""
    import boto3

    client = boto3.client(
        "s3", endpoint_url=s3["endpoint"], region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    for key, body in bodies.items():
        client.put_object(Bucket="bucket", Key=key, Body=body)
    client.close()
    return [f"s3://bucket/{key}" for key in bodies]


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` says in a forked child."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sender, work().encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as if it had been forked from one that has used obstore."""
    pytest.importorskip("obstore")
    monkeypatch.setattr(fetch_subprocess, "_obstore_is_lost", True)
    monkeypatch.setattr(fetch_subprocess, "END_S", 60.0)
    yield
    gc.collect()
    assert pids() == []


@pytest.fixture
def source(s3: dict[str, str], lost: None) -> Iterator[ObstoreSource]:
    made = ObstoreSource("s3://bucket", s3, 60.0)
    yield made
    made.close()


def read(source: ObstoreSource, key: str) -> bytes:
    with source.begin(f"s3://bucket/{key}") as remote:
        return b"".join(remote.chunks)


def test_a_loader_whose_forked_processes_miss(s3: dict[str, str], tmp_path: Path) -> None:
    bodies = {f"file{i}": bytes([i]) * KB for i in range(12)}
    urls = put(s3, bodies)
    with Cache(tmp_path, 3 * KB, options=s3) as cache:
        cache.prefetch(urls)
        assert cache.read(urls[0]) == bodies["file0"]
        loader = DataLoader(
            Files(urls, cache, content_and_pids),
            batch_size=2,
            num_workers=2,
            multiprocessing_context="fork",
            collate_fn=same,
        )
        samples = [sample for batch in loader for sample in batch]
        assert [body for body, _ in samples] == list(bodies.values())
        used = {pid for _, found in samples for pid in found}
        assert used, "nothing was read beside the children"
        until(lambda: all(gone(pid) for pid in used), "a process was left over")
        assert pids() == [], "the parent needs none"


def test_packed_samples_in_forked_processes(s3: dict[str, str], tmp_path: Path) -> None:
    place = packed(tmp_path)
    put(s3, {f"set/{path.name}": path.read_bytes() for path in place.iterdir()})
    with Cache(tmp_path / "cache", 40_000, options=s3) as cache:
        data = PackedDataset("s3://bucket/set", cache=cache)
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork", collate_fn=same)
        for _ in range(2):
            assert [sample for batch in loader for sample in batch] == list(PackedDataset(place))


def test_a_forked_child_reads_on_and_so_does_its_parent(s3: dict[str, str], tmp_path: Path) -> None:
    with Cache(tmp_path, options=s3) as cache:
        cache.read("s3://bucket/signed")
        urls = ("s3://bucket/signed", "s3://bucket/dir/a b.bin")
        assert in_a_fork(lambda: " ".join(cache.read(url).decode() for url in urls)) == "x hello"
        assert cache.read("s3://bucket/100%?#.bin") == b"percent"


def test_one_process_answers_again_and_again(source: ObstoreSource) -> None:
    with source.begin("s3://bucket/signed") as remote:
        assert (remote.size, str(remote.checksum)) == (1, f"sha256:{SHA}") and b"".join(remote.chunks) == b"x"
    (first,) = pids()
    with pytest.raises(NotServedError, match=r"s3://bucket/none: there is no such object"):
        read(source, "none")
    assert read(source, "100%?#.bin") == b"percent" and pids() == [first]


def test_two_files_at_a_time_are_read_by_two(source: ObstoreSource) -> None:
    with source.begin("s3://bucket/signed") as one, source.begin("s3://bucket/dir/a b.bin") as two:
        assert len(pids()) == 2
        assert b"".join(one.chunks) + b"".join(two.chunks) == b"xhello"


def test_what_nobody_reads_to_its_end_is_given_up(source: ObstoreSource) -> None:
    with source.begin("s3://bucket/dir/a b.bin"):
        (first,) = pids()
    assert gone(first) and read(source, "signed") == b"x"


def test_closing_ends_it_by_the_end_of_its_input_also_beside_a_forked_child(source: ObstoreSource) -> None:
    read(source, "signed")
    (one,) = fetch_subprocess._all
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(sender)
        os.read(receiver, 1)  # until the parent has closed it
        os._exit(0)
    try:
        source.close()
        assert one._process.returncode == 0, "it had to be killed"
    finally:
        os.close(sender)
        os.close(receiver)
        os.waitpid(child, 0)


def test_it_ends_when_its_parent_is_killed(s3: dict[str, str], lost: None) -> None:
    def work() -> str:
        source = ObstoreSource("s3://bucket", s3, 60.0)
        read(source, "signed")
        os.write(sender, str(*pids()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        return "still here"

    receiver, sender = os.pipe()
    assert in_a_fork(work) == ""
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        pid = int(pipe.read())
    until(lambda: gone(pid), "it was left over")


def test_a_killed_one_is_worth_another_try(s3: dict[str, str], source: ObstoreSource) -> None:
    body = os.urandom(8 * MB)  # more than the pipe takes
    put(s3, {"large": body})
    with pytest.raises(Unavailable, match=r"reads the store for this one, has ended \(status -9\)"):
        with source.begin("s3://bucket/large") as remote:
            (pid,) = pids()
            os.kill(pid, signal.SIGKILL)
            assert b"".join(remote.chunks)
    assert read(source, "large") == body
    (pid,) = pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), "it is not dead")
    assert read(source, "signed") == b"x", "one that died with nothing to do is replaced without an error"


def test_the_cache_tries_again_when_it_is_killed_in_the_middle(
    s3: dict[str, str], lost: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = os.urandom(8 * MB)
    (url,) = put(s3, {"large": body})
    original, killed = download.write_all, list[int]()

    def write(file: Any, chunk: bytes) -> None:
        if not killed:
            killed.extend(pids())
            os.kill(killed[0], signal.SIGKILL)
        original(file, chunk)

    monkeypatch.setattr(download, "write_all", write)
    with Cache(tmp_path, options=s3, timeout_s=60) as cache:
        assert cache.read(url) == body
        stats = cache.stats()["s3://bucket"]
        (second,) = pids()
    assert stats.retries == 1 and len(killed) == 1 and second != killed[0]
    assert gone(second), "closing the cache ends it"


def test_a_stopped_one_is_noticed_and_replaced(source: ObstoreSource, monkeypatch: pytest.MonkeyPatch) -> None:
    read(source, "signed")
    (pid,) = pids()
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(fetch_subprocess, "GRACE_S", -59.9)
    with pytest.raises(Unavailable, match=f"process {pid}, .* has not answered"):
        read(source, "signed")
    assert gone(pid)
    monkeypatch.setattr(fetch_subprocess, "GRACE_S", 30.0)
    assert read(source, "signed") == b"x"


def test_a_store_that_is_down_or_has_other_options(lost: None) -> None:
    down = {"endpoint": "http://127.0.0.1:9", "region": "x", "access_key_id": "a", "secret_access_key": "b"}
    source = ObstoreSource("s3://bucket", {**down, "client_options": {"timeout": timedelta(seconds=5)}}, 60.0)
    with pytest.raises(Unavailable):
        read(source, "a")
    (pid,) = pids()
    with pytest.raises(Unavailable):
        read(source, "a")
    assert pids() == [pid], "it is not to blame"
    source.close()
    source = ObstoreSource("s3://bucket", {**down, "no_such_option": "x"}, 60.0)
    with pytest.raises(NotServedError, match=r"the options of this store: .*no_such_option"):
        read(source, "a")
    source.close()


def test_options_that_cannot_be_told(lost: None) -> None:
    for options, where in (
        ({"credential_provider": print}, r"options\['credential_provider'\] is a builtin"),
        ({"client_options": {"default_headers": {"a": b"b"}}}, r"options\['client_options'\].*\['a'\] is a bytes"),
    ):
        with pytest.raises(NotServedError, match=where + ".*multiprocessing_context='spawn'.*'backend': 'fsspec'"):
            read(ObstoreSource("s3://bucket", options, 1.0), "a")


def test_no_module_beside_the_program_hides_one_of_the_standard_library() -> None:
    beside = {path.stem for path in Path(fetch_subprocess.__file__).parent.glob("*.py")}
    assert "bucket" in beside and not beside & sys.stdlib_module_names


def test_secrets_stand_on_no_command_line(source: ObstoreSource, s3: dict[str, str]) -> None:
    read(source, "signed")
    (pid,) = pids()
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert [Path(os.fsdecode(word)).name for word in words[1:]] == ["bucket.py", ""]
