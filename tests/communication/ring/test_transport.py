# SPDX-License-Identifier: Apache-2.0
"""Every operation over sockets, in the clear and with TLS: what virtual workers get, and no more bytes than said."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.communication import virtual
from paceline.communication.base import Transport
from paceline.communication.ring import RingTransport, wire
from tests.communication.connections import SOON
from tests.communication.ring.rings import everywhere, ring
from tests.communication.test_tls import Authority
from tests.processes.route_programs import operations as operations_in_parts
from tests.processes.route_programs import parts

SIZES = {1: [0, 100], 2: [0, 1, 4096, 4097], 3: [150_001], 4: [100], 5: [1, 20_000]}
"""Elements, for each number of workers: nothing, direct, the border, several pieces."""


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PIECE", 1 << 17)


def noise(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) * 10**rank
    return x.to(dtype)


def operations(t: Transport, numel: int) -> dict[str, Any]:
    """What each operation gives this worker, and the bytes that it counts."""
    rank, size = t.world.rank, t.world.size
    found: dict[str, Any] = {}
    x = noise(rank, numel)
    t.all_reduce(x).wait()
    found["all_reduce"] = x
    out = torch.empty(size, numel)
    t.all_gather(out, noise(rank, numel)).wait()
    found["all_gather"] = out
    row = torch.empty(numel)
    t.reduce_scatter(row, noise(rank, size, numel)).wait()
    found["reduce_scatter"] = row
    out = torch.empty(size, numel)
    t.all_to_all(out, noise(rank, size, numel)).wait()
    found["all_to_all"] = out
    to_each = [numel * (rank + other) for other in range(size)]  # rank 0 keeps nothing for itself
    place = torch.empty(sum(to_each))
    t.all_to_all(place, noise(rank, sum(to_each)), to_each, to_each).wait()
    found["sizes"] = place
    for source in {0, size - 1}:
        x = noise(rank, numel)
        t.broadcast(x, source).wait()
        found[f"broadcast {source}"] = x
    found["json"] = t.gather_json({"rank": rank, "text": "x" * rank})
    found["bytes"] = t.bytes_sent
    return found


def there(size: int, numel: int) -> list[Any]:
    """The same on virtual workers."""

    def body() -> dict[str, Any]:
        t = virtual.current()
        assert t is not None
        return operations(t, numel)

    return list(virtual.run(size, body))


@pytest.mark.parametrize("size", SIZES)
def test_all_operations(size: int) -> None:
    with ring(size) as members:
        for numel in SIZES[size]:
            before = [t.bytes_sent for t in members]
            found = everywhere(members, lambda t, n=numel: operations(t, n))
            for rank, want in enumerate(there(size, numel)):
                assert not isinstance(found[rank], Exception), found[rank]
                torch.testing.assert_close(found[rank].pop("all_reduce"), want.pop("all_reduce"), atol=1e-3, rtol=1e-4)
                assert found[rank].pop("bytes") - before[rank] == want.pop("bytes")
                for name, value in want.items():
                    same = (
                        torch.equal(found[rank][name], value)
                        if isinstance(value, Tensor)
                        else found[rank][name] == value
                    )
                    assert same, (numel, rank, name)


@pytest.mark.parametrize("numel", [100, 100_003])
def test_all_reduce_gives_the_same_bits_everywhere_and_every_time(numel: int) -> None:
    def body(t: RingTransport) -> list[Tensor]:
        found = []
        for _ in range(3):
            x = noise(t.world.rank, numel)
            t.all_reduce(x).wait()
            found.append(x)
        return found

    with ring(4) as members:
        found = [x for one in everywhere(members, body) for x in one]
    assert all(torch.equal(x, found[0]) for x in found[1:])


def test_small_sums_are_taken_in_rank_order() -> None:
    """So that what fits into one message is, bit for bit, what virtual workers get."""

    def body(t: Transport) -> Tensor:
        x = noise(t.world.rank, 1000)
        t.all_reduce(x).wait()
        return x

    with ring(4) as members:
        found = everywhere(members, body)
    want = virtual.run(4, lambda: body(virtual.current()))
    assert all(torch.equal(x, want[0]) for x in found)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    def body(t: RingTransport) -> Tensor:
        x = torch.ones(70_000, dtype=dtype)
        t.all_reduce(x).wait()
        out = torch.empty(3, 70_000, dtype=dtype)
        t.all_gather(out, x).wait()
        assert torch.equal(out, x.expand(3, -1))
        return x

    with ring(3) as members:
        for x in everywhere(members, body):
            assert torch.equal(x, torch.full((70_000,), 1 if dtype is torch.bool else 3, dtype=dtype))


def test_tensors_that_do_not_lie_in_one_piece() -> None:
    def body(t: RingTransport) -> tuple[Tensor, Tensor]:
        wide, tall = torch.zeros(50, 2), torch.empty(6, 3).t()
        t.all_reduce(wide[:, 1].fill_(1.0 + t.world.rank)).wait()
        t.all_gather(tall, torch.full((6,), float(t.world.rank))).wait()
        return wide, tall

    with ring(3) as members:
        for wide, tall in everywhere(members, body):
            assert torch.equal(wide, torch.tensor([0.0, 6.0]).expand(50, 2))
            assert torch.equal(tall, torch.arange(3.0)[:, None].expand(3, 6))


def test_channels_and_subgroups_do_not_wait_for_others() -> None:
    """Rank 0 does channel 1 before channel 0, the others the other way round; and a part does more than the other."""

    def reduce(t: Transport, numel: int) -> float:
        x = torch.full((numel,), 1.0 + t.world.rank)
        t.all_reduce(x).wait()
        return float(x.mean())

    def body(t: RingTransport) -> list[float]:
        t.open_channels(2)
        part = t.part([[2, 0], [1]])
        found = [reduce(part, 40_000) for _ in range(3 if part.world.size == 2 else 1)]
        order = [1, 0] if t.world.rank == 0 else [0, 1]
        pending = []
        tensors = [torch.full((60_000,), 1.0 + t.world.rank) for _ in order]
        for k in order:
            pending.append(t.channel(k).all_reduce(tensors[k]))
        for one in pending:
            one.wait()
        assert (part.world.hosts, part.world.rank) == (
            (("h2", "h0"), (1, 0, 0)[t.world.rank]) if part.world.size == 2 else (("h1",), 0)
        )
        return [found[-1], *(float(x.mean()) for x in tensors)]

    with ring(3) as members:
        assert everywhere(members, body) == [[3.0, 6.0, 6.0], [1.0, 6.0, 6.0], [3.0, 6.0, 6.0]]
        assert members[0].bytes_sent == 3 * 160_000 + 2 * (2 * 240_000 * 2 // 3)


def test_more_collectives_at_once_than_the_window_holds() -> None:
    """Started long before the others come, and waited for from the last to the first."""
    first = threading.Event()

    def body(t: RingTransport) -> list[float]:
        if t.world.rank:
            assert first.wait(SOON)
        tensors = [torch.full((n,), 1.0) for n in [10, 30_000] * 20]
        pending = [t.all_reduce(x) for x in tensors]
        first.set()
        for one in reversed(pending):
            one.wait()
        return sorted({float(x.mean()) for x in tensors})

    with ring(3) as members:
        assert everywhere(members, body) == [[3.0]] * 3


def test_a_source_that_runs_ahead_is_held_up() -> None:
    """It may not fill the memory of those who do not come: what they have not asked for is not sent."""

    def body(t: RingTransport) -> None:
        x = torch.zeros(1000)
        if t.world.rank == 0:
            pending = [t.broadcast(x, 0) for _ in range(3)]
            t.channel(1).barrier()
            assert all(one.needs(1) for one in pending)
            t.channel(1).barrier()
        else:
            t.channel(1).barrier()
            t.channel(1).barrier()
            pending = [t.broadcast(x, 0) for _ in range(3)]
        for one in pending:
            one.wait()

    with ring(2) as members:
        for one in members:
            one.open_channels(2)
        assert everywhere(members, body) == [None, None]


def test_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "job")
    tls = [authority.worker(f"w{k}") for k in range(3)]

    def body(t: RingTransport) -> Tensor:
        x = noise(t.world.rank, 200_000)
        t.all_reduce(x).wait()
        return x

    with ring(3, tls=tls) as members:
        found = everywhere(members, body)
    assert all(torch.equal(x, found[0]) for x in found)
    torch.testing.assert_close(found[0], sum(noise(k, 200_000) for k in range(3)), atol=1e-3, rtol=1e-4)


def test_partners_and_channels_that_there_are_not() -> None:
    with ring(2) as (t, _):
        with pytest.raises(ValueError, match="cannot send to rank 0: name another one of 0 to 1"):
            t.send(torch.ones(1), 0)
        with pytest.raises(IndexError, match="channel 1 was not opened"):
            t.channel(1)
        with pytest.raises(ValueError, match="groups must name each rank"):
            t.part([[0], [0, 1]])


@pytest.mark.parametrize("what", [operations_in_parts, parts])
def test_the_laws_of_routes(what: Callable[[Transport], Any]) -> None:
    """Sizes of all kinds, channels, and parts of parts: what virtual workers get."""

    def body(t: Transport | None) -> Any:
        assert t is not None
        return json.loads(json.dumps(what(t)))

    with ring(4) as members:
        found = everywhere(members, body)
    assert found == list(virtual.run(4, lambda: body(virtual.current()), [f"h{k}" for k in range(4)]))
