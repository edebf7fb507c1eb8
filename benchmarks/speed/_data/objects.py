# SPDX-License-Identifier: Apache-2.0
"""Large objects from a double of S3: the rate of the cache over that of obstore alone.

The double (moto) runs in a process of its own. In turn, several times, the same objects of 16 MB are fetched by obstore
into memory, by obstore into files, by obstore into files that it checks, and through an empty cache; each time by as
many threads. Each object has an ETag, an MD5, and some have a CRC32C in their metadata, which the cache then checks in
its place. `ratio` is that of the medians, ours with the CRC32C over obstore's into memory without any check, and
`ratio_md5` the same with the MD5, which takes 20 ms of a processor for 16 MB, more than all of obstore's own work.
`ratio_by_obstore` is ours with the CRC32C where obstore has to receive, as it has with TLS. `ratio_same_work` and
`ratio_same_work_md5` are ours over obstore's into files with the same check, which is what the cache costs.
`ratio_unchecked` is for objects whose checksums are ignored; the cache computes one, for damage on disk.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _idle import wait_until_idle
from _workers import is_quick

from paceline_plugins.data.cache import Cache
from paceline_plugins.data.cache.checksums import hasher

OBJECT_BYTES = (4 if is_quick() else 16) << 20
SECRETS = {"region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}


def missing() -> str | None:
    """Why this cannot be measured here; None where it can."""
    try:
        import boto3
        import google_crc32c
        import moto.server
        import obstore
    except ImportError as error:
        return f"{error.name} is not installed"
    del boto3, google_crc32c, moto, obstore
    return None


@contextmanager
def double() -> Iterator[str]:
    """The endpoint of a moto server in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise RuntimeError(f"moto's server did not start: {' '.join(command)}") from None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def fill(endpoint: str, count: int) -> dict[str, list[str]]:
    """Put `count` objects twice, with and without a CRC32C in their metadata; their keys by the checksum to use."""
    import boto3
    import google_crc32c

    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="bucket")
    keys = {name: [f"{name}-{number}.bin" for number in range(count)] for name in ("md5", "crc32c")}
    for number in range(count):
        body = number.to_bytes(4, "big") * (OBJECT_BYTES // 4)
        about = {"crc32c": f"{google_crc32c.value(body):08x}"}
        client.put_object(Bucket="bucket", Key=keys["md5"][number], Body=body)
        client.put_object(Bucket="bucket", Key=keys["crc32c"][number], Body=body, Metadata=about)
    client.close()
    return keys


def by_obstore(endpoint: str, keys: list[str], threads: int, directory: Path | None, check: str = "") -> None:
    """Fetch with obstore alone, into memory or into files, and compare the checksum with the store's if told to."""
    import obstore
    from obstore.store import from_url

    store = from_url("s3://bucket", endpoint=endpoint, client_options={"allow_http": True}, **SECRETS)

    def fetch(key: str) -> None:
        answer = obstore.get(store, key)
        if directory is None:
            assert len(answer.bytes()) == OBJECT_BYTES
            return
        running = hasher(check) if check else None
        with open(directory / key, "wb", buffering=0) as file:
            for chunk in answer.stream(min_chunk_size=2 << 20):
                file.write(chunk)
                if running is not None:
                    running.update(chunk)
        if running is not None:
            expected = answer.meta["e_tag"].strip('"') if check == "md5" else answer.attributes[check]
            assert running.hexdigest() == expected

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fetch, keys))


def by_cache(endpoint: str, keys: list[str], threads: int, directory: Path, options: dict[str, Any]) -> None:
    """Fetch through an empty cache, ahead of use."""
    urls = [f"s3://bucket/{key}" for key in keys]
    with Cache(directory, threads=threads, options={"endpoint": endpoint, **SECRETS, **options}) as cache:
        cache.prefetch(urls)
        for url in urls:
            with cache.open(url) as path:
                assert path.stat().st_size == OBJECT_BYTES


def seconds(action: Callable[[Path], None]) -> float:
    """The time that `action` takes with an empty directory."""
    directory = Path(tempfile.mkdtemp(prefix="objects-"))
    try:
        began = time.perf_counter()
        action(directory)
        return time.perf_counter() - began
    finally:
        shutil.rmtree(directory)


def objects(*, count: int = 12, repeats: int = 7, threads: int = 4, idle_s: float = 0.0) -> dict[str, Any]:
    """Rates in MB/s (10^6 bytes) and `ratio`, ours over obstore's own; or `skipped`, with the reason.

    Each measurement first waits until the processors are idle, at most `idle_s`; `idle` says how many of them were.
    """
    reason = missing()
    if reason:
        return {"ratio": None, "skipped": reason}
    with double() as endpoint:
        keys = fill(endpoint, count)
        md5, crc32c = keys["md5"], keys["crc32c"]
        ways: dict[str, Callable[[Path], None]] = {
            "obstore": lambda _: by_obstore(endpoint, md5, threads, None),
            "obstore_to_files": lambda directory: by_obstore(endpoint, md5, threads, directory),
            "obstore_to_crc32c_files": lambda directory: by_obstore(endpoint, crc32c, threads, directory, "crc32c"),
            "obstore_to_md5_files": lambda directory: by_obstore(endpoint, md5, threads, directory, "md5"),
            "cache": lambda directory: by_cache(endpoint, crc32c, threads, directory, {}),
            "cache_by_obstore": lambda directory: by_cache(
                endpoint, crc32c, threads, directory, {"client_options": {}}
            ),
            "cache_md5": lambda directory: by_cache(endpoint, md5, threads, directory, {}),
            "cache_unchecked": lambda directory: by_cache(endpoint, md5, threads, directory, {"checksums": False}),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        idle = 0
        for way in ways.values():  # the first of each warms up
            seconds(way)
        for _ in range(repeats):
            for name, way in ways.items():
                idle += wait_until_idle(idle_s)
                times[name].append(seconds(way))
    rates = {name: count * OBJECT_BYTES / 1e6 / statistics.median(spent) for name, spent in times.items()}
    return {
        "ratio": round(rates["cache"] / rates["obstore"], 3),
        "ratio_by_obstore": round(rates["cache_by_obstore"] / rates["obstore"], 3),
        "ratio_same_work": round(rates["cache"] / rates["obstore_to_crc32c_files"], 3),
        "ratio_md5": round(rates["cache_md5"] / rates["obstore"], 3),
        "ratio_same_work_md5": round(rates["cache_md5"] / rates["obstore_to_md5_files"], 3),
        "ratio_unchecked": round(rates["cache_unchecked"] / rates["obstore"], 3),
        "ratio_unchecked_to_files": round(rates["cache_unchecked"] / rates["obstore_to_files"], 3),
        "mb_per_s": {name: round(rate) for name, rate in rates.items()},
        "objects": count,
        "object_bytes": OBJECT_BYTES,
        "threads": threads,
        "repeats": repeats,
        "idle": idle,
    }
