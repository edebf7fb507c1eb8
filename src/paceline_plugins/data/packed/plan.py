# SPDX-License-Identifier: Apache-2.0
"""Can this storage and network feed N workers at this speed? Compares the need with measured rates.

With N workers on H hosts, s samples a second of each worker and b bytes a sample, a host needs (N / H) s b bytes a
second. It has the measured rate of several readers, and no more than its link. A cache of c bytes a host, of data of d
bytes, holds a fraction min(1, c / d) of them after many epochs; in the second epoch a host has seen only 1 / H of the
data. Shards go to other hosts in every epoch, so these fractions are the hit rates of a host's cache.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from paceline_plugins.data.packed.measure import Holding, Speed
from paceline_plugins.data.packed.sizes import bytes_text

HEADROOM = 1.25  # of have over need, below which a plan is tight
SMALL_FILE = 1 << 20  # bytes
LATENCY_SHARE = 0.2  # of the time of a file, above which larger files help
SCALING = 0.6  # of the ideal speed-up, above which more readers help


@dataclass(frozen=True)
class Need:
    """What training needs."""

    workers: int  # in all, spread evenly over the hosts
    hosts: int
    samples_s: float  # of each worker
    link_bytes_s: float | None = None  # of a host to the storage; None: unknown
    cache_bytes: int = 0  # of a host; 0: no cache

    @property
    def workers_a_host(self) -> int:
        """Workers of the fullest host."""
        return math.ceil(self.workers / self.hosts)

    def host_bytes_s(self, bytes_per_sample: float) -> float:
        """Bytes a second that the fullest host consumes."""
        return self.workers_a_host * self.samples_s * bytes_per_sample


@dataclass(frozen=True)
class Epoch:
    """Need and have of a host in one epoch."""

    name: str
    hits: float  # fraction from the cache
    need_bytes_s: float  # from the storage
    have_bytes_s: float  # from the storage

    @property
    def waiting(self) -> float:
        """Fraction of the time that workers wait for data."""
        return max(0.0, 1 - self.have_bytes_s / self.need_bytes_s) if self.need_bytes_s > 0 else 0.0

    @property
    def tight(self) -> bool:
        """Fed, with little headroom."""
        return self.waiting == 0 and self.have_bytes_s < HEADROOM * self.need_bytes_s


@dataclass(frozen=True)
class StoragePlan:
    """Need, measurements and verdict."""

    need: Need
    holding: Holding
    first_byte_s: float
    one: Speed
    several: Speed
    epochs: tuple[Epoch, ...]
    feeds: bool
    verdict: str
    advice: tuple[str, ...]
    notes: tuple[str, ...]


def to_json(plan: StoragePlan) -> dict[str, Any]:
    """All of a plan but the list of files."""
    found = asdict(plan)
    files = found["holding"].pop("files")
    found["holding"].update(files=len(files), file_bytes=plan.holding.file_bytes)
    for name in ("one", "several"):
        found[name]["bytes_s"] = getattr(plan, name).bytes_s
    for epoch, row in zip(plan.epochs, found["epochs"], strict=True):
        row["waiting"] = epoch.waiting
    need = plan.need.host_bytes_s(plan.holding.bytes_per_sample)
    return {**found, "need_bytes_s_a_host": need, "need_bytes_s": _total(plan.need, plan.holding)}


def _total(need: Need, holding: Holding) -> float:
    return need.workers * need.samples_s * holding.bytes_per_sample


def judge(need: Need, holding: Holding, remote: bool, first_byte_s: float, one: Speed, several: Speed) -> StoragePlan:
    """Compare what training needs with what the storage gives; the cache counts only where the storage is `remote`."""
    have = min(several.bytes_s, need.link_bytes_s or math.inf)
    epochs = _epochs(need, holding, remote, have)
    feeds = all(epoch.waiting == 0 for epoch in epochs)
    advice: tuple[str, ...] = ()
    if not feeds or any(epoch.tight for epoch in epochs):
        advice = tuple(_advice(need, holding, remote, first_byte_s, one, several, epochs))
    notes = (*holding.notes, *_notes(need, holding, remote, several))
    return StoragePlan(need, holding, first_byte_s, one, several, epochs, feeds, _verdict(need, epochs), advice, notes)


def _epochs(need: Need, holding: Holding, remote: bool, have: float) -> tuple[Epoch, ...]:
    host = need.host_bytes_s(holding.bytes_per_sample)
    first = Epoch("first epoch", 0.0, host, have)
    if not remote or need.cache_bytes == 0 or holding.bytes is None:
        return (Epoch("every epoch", 0.0, host, have),)
    held = min(1.0, need.cache_bytes / holding.bytes)
    if need.hosts == 1:
        return first, Epoch("later epochs", held, host * (1 - held), have)
    second = min(held, 1 / need.hosts)
    return (
        first,
        Epoch("second epoch", second, host * (1 - second), have),
        Epoch("in the long run", held, host * (1 - held), have),
    )


def _verdict(need: Need, epochs: tuple[Epoch, ...]) -> str:
    first, last = epochs[0], epochs[-1]
    numbers = f"a host has {bytes_text(first.have_bytes_s)}/s and needs {bytes_text(first.need_bytes_s)}/s"
    who = f"{need.workers} worker{'s' if need.workers > 1 else ''}"
    if first.waiting == 0:
        return f"{'barely' if first.tight else 'yes'}: {who} would be fed; {numbers}"
    waits = f"would wait about {100 * first.waiting:.0f} % of the time"
    if len(epochs) == 1:
        return f"no: {who} {waits}; {numbers}"
    later = "be fed" if last.waiting == 0 else f"wait about {100 * last.waiting:.0f} %"
    return f"no: {who} {waits} in the first epoch and {later} {last.name.replace('later', 'in later')}; {numbers}"


def _advice(
    need: Need,
    holding: Holding,
    remote: bool,
    first_byte_s: float,
    one: Speed,
    several: Speed,
    epochs: tuple[Epoch, ...],
) -> list[str]:
    host, have = epochs[0].need_bytes_s, epochs[0].have_bytes_s
    found = []
    latency = first_byte_s * one.bytes_s / holding.file_bytes  # share of a file's time before its first byte
    size = bytes_text(holding.file_bytes)
    if holding.kind == "files" and holding.file_bytes < SMALL_FILE:
        found.append(f"pack them (paceline data pack): files of {size} cost {1e3 * first_byte_s:.2g} ms each to open")
    elif latency > LATENCY_SHARE:
        share = 100 * min(1.0, latency)
        found.append(f"larger shards: {share:.0f} % of a {size} file's time passes before its first byte")
    if need.link_bytes_s is not None and need.link_bytes_s < min(several.bytes_s, HEADROOM * host):
        gbit_s = 8 * HEADROOM * host / 1e9
        found.append(f"a link of {gbit_s:.3g} Gbit/s a host; the storage itself gave more than the link")
    elif several.readers > 1 and several.bytes_s > SCALING * several.readers * one.bytes_s and have < HEADROOM * host:
        threads = math.ceil(HEADROOM * host / (several.bytes_s / several.readers))
        found.append(f"more readers: speed still grew at {several.readers}; about {threads} a host, if it goes on so")
    if holding.bytes is not None and epochs[0].waiting > 0:
        enough = min(1.0, 1 - have / (HEADROOM * host)) * holding.bytes
        if remote and need.cache_bytes < enough:
            found.append(f"a cache of {bytes_text(enough)} a host, for all epochs but the first")
    return found or ["faster storage, or smaller samples"]


def _notes(need: Need, holding: Holding, remote: bool, several: Speed) -> list[str]:
    found = []
    if need.hosts > 1:
        found.append(
            f"measured from one host; whether the storage gives as much to {need.hosts} at once, "
            f"{bytes_text(_total(need, holding))}/s in all, was not"
        )
    if several.readers < need.workers_a_host:
        found.append(f"measured with {several.readers} readers, a host will have {need.workers_a_host} workers")
    if not remote:
        found.append(
            "files were read front to back, after the kernel was asked to forget them; where it kept them (or a server "
            "did), the figures are those of memory"
        )
        if need.cache_bytes:
            found.append("a path is read as it is: the cache is for URLs and was left out")
    else:
        found.append("files were read by ranges through fsspec; the cache fetches them whole, perhaps faster")
    if remote and need.cache_bytes:
        known = holding.bytes is not None
        found.append(
            "the cache's own disk was not measured"
            if known
            else "the size of all data is unknown, so later epochs are not judged"
        )
    if several.files > len(holding.files):
        found.append("there are few files, so some were read more than once")
    found.append("decoding and augmentation were not measured")
    return found
