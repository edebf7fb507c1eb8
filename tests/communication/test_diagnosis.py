# SPDX-License-Identifier: Apache-2.0
"""What a witness says, and what becomes of what others say; with real processes in tests/processes/test_waiting.py."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.communication.diagnosis import DiagnosisKeys, Doing, Responder, place_of, rows, table
from paceline.core.world import World

WORLD = World(0, 3, hosts=("alpha", "beta", "gamma"))


@pytest.mark.parametrize("text", [b"", b"nothing", b"[1]", b'{"state": "waits"}', b"\xff\xfe", b'{"state": {}}' * 1000])
def test_what_cannot_be_read_is_busy(text: bytes) -> None:
    assert Doing.unpack(text) == Doing("busy")


def test_the_table_begins_with_stragglers() -> None:
    doing = {0: Doing("waits", "all_reduce", 12, 8.2, "train.py:31 main"), 1: Doing("silent"), 2: Doing("busy", "", 11)}
    assert table(WORLD, doing).splitlines()[1:] == [
        "  rank 1 on beta does not answer: dead, stopped or cut off",
        "  rank 2 on gamma has not come: it began operation 11 last",
        "  rank 0 on alpha waits for all_reduce, operation 12, since 8.2 s (train.py:31 main)",
    ]
    assert [row["state"] for row in rows(doing)] == ["waits", "silent", "busy"]


def test_the_place_is_in_the_users_program() -> None:
    ready, leave = threading.Event(), threading.Event()

    def users() -> None:
        ready.set()
        leave.wait()  # whose own frames are in the standard library

    thread = threading.Thread(target=users)
    thread.start()
    ready.wait()
    assert thread.ident is not None
    assert place_of(thread.ident).startswith("test_diagnosis.py:") and place_of(thread.ident).endswith(" users")
    leave.set()
    thread.join()
    assert place_of(-1) == ""


clones = pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="this torch has no TCPStore.clone")


def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=20))


@clones
def test_a_witness_answers_when_it_is_asked() -> None:
    ours = store()
    witness = Responder(ours, "one", 2, lambda: Doing("busy", "", 5, 0.0, "train.py:3 f"), lambda: None)
    places, doing = DiagnosisKeys(ours, "one"), dict[int, Doing]()
    places.read(doing, [1, 2])
    assert doing == {}
    places.ask([2])
    ours.wait([places.key("answer", 2)], timedelta(seconds=20))
    places.read(doing, [1, 2])
    assert doing == {2: Doing("busy", "", 5, 0.0, "train.py:3 f")}
    ours.set(places.key("failed", 2), Doing("waits", "barrier", 6).pack())
    places.read(doing, [1, 2])
    assert doing[2].state == "waits"  # what it says itself is better
    witness.end()


@clones
def test_a_witness_survives_the_end_of_its_store() -> None:
    ours = store()
    witness = Responder(ours.clone(), "one", 0, lambda: Doing("busy"), lambda: None)
    thread = witness._thread
    assert thread is not None
    del ours
    thread.join(20)
    assert not thread.is_alive()
    witness.end()
