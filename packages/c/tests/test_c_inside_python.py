# SPDX-License-Identifier: Apache-2.0
"""The library inside a Python: all calls of one worker, and what each says of wrong input."""

from __future__ import annotations

import ctypes
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from c_helpers import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, attach, columns, next_range, pointers, said, tuned
from paceline_c.mapped import writable
from paceline_c.ranges import Ranges

INVALID, STATE, REFUSED, FILE = -1, -2, -3, -6


def test_a_run_from_attach_to_close(library: Any) -> None:
    weights, bias = np.ones(6, np.float32), np.zeros(3)
    assert attach(library, [weights, bias]) == 0, said(library)
    assert (library.pl_rank(), library.pl_size(), library.pl_epoch(), library.pl_minibatches()) == (0, 1, 0, 0)
    seen: list[tuple[int, int]] = []
    for epoch in range(2):
        assert library.pl_epoch() == epoch
        while (found := next_range(library, 25, 10))[0] == 1:
            seen.append(found[1:])
            weights -= np.float32(tuned(library, "lr", 0.5)) * weights
            assert library.pl_step() == 0
        assert found == (0, 0, 0)
    assert seen == [(0, 10), (10, 20), (20, 25)] * 2
    assert library.pl_minibatches() == 6 and (weights == 0.5**6).all()
    assert library.pl_merge() == 0 and library.pl_mean(pointers([weights, bias])) == 0
    assert library.pl_close() == 0 and library.pl_close() == 0
    assert (library.pl_rank(), library.pl_size()) == (0, 1)


def test_steps_in_the_middle_of_a_block_are_counted_without_python(
    library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from paceline_c import bridge

    made, step = [], bridge.step
    monkeypatch.setattr(bridge, "step", lambda: (made.append(1), step())[1])
    weights = np.ones(3)
    assert attach(library, [weights]) == 0
    assert [library.pl_step() for _ in range(1000)] == [0] * 1000
    assert len(made) < 500 and library.pl_minibatches() == 1000
    assert library.pl_step() == 0 and library.pl_step() == 0
    assert library.pl_save(str(tmp_path / "saved").encode()) == 0, said(library)
    assert library.pl_step() == 0 and library.pl_step() == 0
    assert library.pl_resume(str(tmp_path / "saved").encode()) == 1 and library.pl_minibatches() == 1002
    assert library.pl_global_model(1) == 0 and library.pl_step() == STATE
    assert library.pl_global_model(0) == 0 and library.pl_step() == 0 and library.pl_step() == 0
    assert library.pl_close() == 0 and library.pl_step() == STATE


def test_a_setting_that_is_tuned_reaches_the_tool(library: Any) -> None:
    assert attach(library, [np.ones(3)]) == 0
    assert library.pl_tune(b"lr", 0.25) == REFUSED and "has not asked for lr" in said(library)
    assert tuned(library, "lr", 0.5) == 0.5
    assert library.pl_tune(b"lr", 0.25) == 0 and tuned(library, "lr", 0.5) == 0.25
    assert library.pl_tune(b"lr_factor", 0.5) == 0 and tuned(library, "lr", 0.5) == 0.125
    assert library.pl_tuned(b"speed", 1.0, ctypes.byref(ctypes.c_double())) == REFUSED and "speed" in said(library)
    value = ctypes.c_double()
    assert library.pl_close() == 0
    assert library.pl_tuned(b"lr", 0.5, ctypes.byref(value)) == STATE and value.value == 0.5  # the preset all the same


def test_settings_reach_attach_and_the_log(library: Any, tmp_path: Path) -> None:
    for name, value in (("log", str(tmp_path / "log")), ("seed", "3"), ("period", "5"), ("timeout_s", "12.5")):
        assert library.pl_set(name.encode(), value.encode()) == 0
    assert attach(library, [np.ones(3)], "bmuf") == 0, said(library)
    assert library.pl_log(b"error", 0.25) == 0
    assert library.pl_set(b"seed", b"4") == STATE and "before pl_attach" in said(library)
    assert library.pl_close() == 0
    (path,) = (tmp_path / "log").glob("rank-*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert any("bmuf(period=5)" in str(row.get("rule")) for row in rows)
    assert [row["value"] for row in rows if row.get("name") == "error"] == [0.25]


def test_a_checkpoint_continues_in_the_middle_of_an_epoch(library: Any, tmp_path: Path) -> None:
    weights, place = np.ones(4), str(tmp_path / "saved").encode()

    def train(ranges: int) -> list[tuple[int, int]]:
        seen = []
        for _ in range(ranges):
            status, begin, end = next_range(library, 40, 10)
            if status == 1:
                seen.append((begin, end))
                weights[:] -= 0.25 * weights * begin
                assert library.pl_step() == 0
        return seen

    assert attach(library, [weights]) == 0
    train(2)
    assert library.pl_save(place) == 0, said(library)
    train(3)
    ended = weights.copy()
    assert library.pl_close() == 0
    weights[:] = 7
    assert attach(library, [weights]) == 0
    assert library.pl_resume(place) == 1, said(library)
    assert library.pl_epoch() == 0 and library.pl_minibatches() == 2
    assert train(3) == [(20, 30), (30, 40)]
    assert (weights == ended).all()
    assert library.pl_resume(str(tmp_path / "nowhere").encode()) == FILE and "nowhere" in said(library)


def test_an_epoch_that_is_left_early(library: Any) -> None:
    assert attach(library, [np.ones(4)]) == 0
    assert next_range(library, 40, 10) == (1, 0, 10)
    assert next_range(library, 40, 20)[0] == INVALID and "40 samples in batches of 10" in said(library)
    assert library.pl_done() == 0 and library.pl_done() == 0
    assert next_range(library, 40, 20) == (1, 0, 20)


def test_the_global_model_can_be_looked_at(library: Any) -> None:
    weights = np.ones(4)
    assert attach(library, [weights]) == 0
    assert library.pl_global_model(1) == 0 and library.pl_global_model(1) == 0
    for call in (library.pl_step, library.pl_merge):
        assert call() == STATE and "pl_global_model(0)" in said(library)
    assert library.pl_global_model(0) == 0 and library.pl_step() == 0


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(FLOAT32, torch.float32), (FLOAT64, torch.float64), (FLOAT16, torch.float16), (BFLOAT16, torch.bfloat16)],
)
def test_numbers_are_seen_where_they_lie(library: Any, kind: int, dtype: torch.dtype) -> None:
    held = torch.ones(5, dtype=dtype)
    where = (ctypes.c_void_p * 1)(held.data_ptr())
    assert library.pl_attach(1, where, (ctypes.c_int64 * 1)(5), (ctypes.c_int * 1)(kind), None, None) == 0
    from paceline_c import bridge

    (seen,) = bridge.tool.run._parameters.values()
    assert (seen.data_ptr(), seen.dtype, seen.tolist()) == (held.data_ptr(), dtype, [1.0] * 5)


def test_buffers_and_momentum_are_those_of_attach_arrays(library: Any) -> None:
    weights, running, speed = np.ones(4), np.zeros(2), np.full(4, 0.5)
    place, sizes, kinds = columns([running])
    assert library.pl_buffers(1, place, sizes, kinds) == 0
    assert library.pl_momentum(1, pointers([speed]), 0.9) == 0
    assert attach(library, [weights], "bmuf(period=4, local_state='reset')") == 0, said(library)
    from paceline_c import bridge

    run = bridge.tool.run
    (state,) = run._stepper.state.values()
    assert state["momentum_buffer"].data_ptr() == speed.ctypes.data
    assert next(iter(run._model.buffers())).data_ptr() == running.ctypes.data


def nothing(library: Any) -> Any:
    return library.pl_attach(1, None, *columns([np.ones(3)])[1:], b"cpu", b"bmuf")


def attached_with(**changed: Any) -> Callable[[Any], int]:
    """`pl_attach` of one array with something wrong."""

    def call(library: Any) -> int:
        held = np.ones(3)
        place, sizes, kinds = columns([held])
        given = {
            "count": 1,
            "arrays": place,
            "sizes": sizes,
            "kinds": kinds,
            "device": b"cpu",
            "rule": b"bmuf",
            **changed,
        }
        return int(library.pl_attach(*given.values()))

    return call


WRONG: list[tuple[Callable[[Any], int], int, str]] = [
    (attached_with(arrays=None), INVALID, "arrays is a null pointer"),
    (attached_with(sizes=None), INVALID, "sizes is a null pointer"),
    (attached_with(kinds=None), INVALID, "dtypes is a null pointer"),
    (attached_with(arrays=(ctypes.c_void_p * 1)(None)), INVALID, "array 0 is a null pointer, for 3 elements"),
    (attached_with(arrays=(ctypes.c_void_p * 1)(4097)), INVALID, "0x1001, which is no address of a float64"),
    (attached_with(sizes=(ctypes.c_int64 * 1)(-3)), INVALID, "array 0 has the size -3"),
    (attached_with(kinds=(ctypes.c_int * 1)(9)), INVALID, "dtype 9, and there are PL_FLOAT32 (1)"),
    (attached_with(sizes=(ctypes.c_int64 * 1)(1 << 50)), INVALID, "does not lie in memory that this process can write"),
    (attached_with(arrays=(ctypes.c_void_p * 1)(4096)), INVALID, "array 0 at 0x1000 with 24 bytes does not lie in"),
    (attached_with(sizes=(ctypes.c_int64 * 1)((1 << 63) - 1)), INVALID, "its size or its dtype is wrong"),
    (attached_with(count=0), INVALID, "count is 0"),
    (attached_with(count=-1), INVALID, "count is -1"),
    (attached_with(device=b"tpu"), INVALID, "device is 'tpu'"),
    (attached_with(rule=b"bmfu"), REFUSED, "bmfu"),
    (attached_with(rule=b"bmuf(period=0)"), REFUSED, "period"),
    (attached_with(rule=b"dc_asgd"), REFUSED, "dc_asgd"),
    (attached_with(rule=b"\xff\xfe"), INVALID, "rule must be text in UTF-8, got b'\\xff\\xfe'"),
    (attached_with(rule=b"bmuf(period="), REFUSED, "cannot read the rule 'bmuf(period='"),
    (attached_with(rule=b""), REFUSED, "cannot read the rule ''"),
    (lambda library: library.pl_step(), STATE, "call pl_attach first"),
    (lambda library: library.pl_close(), STATE, "call pl_attach first"),
    (lambda library: library.pl_rank(), STATE, "call pl_attach first"),
    (lambda library: library.pl_minibatches(), STATE, "call pl_attach first"),
    (lambda library: library.pl_log(b"loss", 1.0), STATE, "call pl_attach first"),
    (lambda library: library.pl_mean(None), STATE, "call pl_attach first"),
    (lambda library: library.pl_set(None, b"1"), INVALID, "name is a null pointer"),
    (lambda library: library.pl_set(b"seed", None), INVALID, "value is a null pointer"),
    (lambda library: library.pl_next_range(1, 1, None, None), INVALID, "one of them is NULL"),
    (lambda library: library.pl_tuned(b"lr", 1.0, None), INVALID, "is NULL"),
]


@pytest.mark.parametrize(("call", "status", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_wrong_input_is_a_status_and_a_sentence(
    library: Any, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], int], status: int, says: str
) -> None:
    from paceline_c import bridge

    monkeypatch.setattr(bridge, "tool", bridge.Tool())
    assert call(library) == status, said(library)
    assert says in said(library)


WRONG_IN_A_RUN: list[tuple[Callable[[Any], int], int, str]] = [
    (lambda library: attach(library, [np.ones(3)]), STATE, "attached already"),
    (lambda library: library.pl_mean(None), INVALID, "gradients is a null pointer"),
    (lambda library: library.pl_mean((ctypes.c_void_p * 1)(None)), INVALID, "gradient 0 is a null pointer"),
    (lambda library: next_range(library, 0, 1)[0], INVALID, "total 0 and batch 1"),
    (lambda library: next_range(library, 5, -1)[0], INVALID, "total 5 and batch -1"),
    (lambda library: library.pl_save(None), INVALID, "path is a null pointer"),
    (lambda library: library.pl_save(b"/proc/nowhere"), FILE, "/proc/nowhere"),
    (lambda library: library.pl_save(b""), INVALID, "path is empty"),
    (lambda library: library.pl_save(b"/tmp/\xe9"), INVALID, "path must be text in UTF-8"),
    (lambda library: library.pl_save(b"/tmp/" + b"a" * 5000), FILE, "File name too long"),
    (lambda library: library.pl_resume(__file__.encode()), FILE, "is no checkpoint"),
    (lambda library: library.pl_tune(b"period", math.inf), REFUSED, "period must be a whole number"),
    (lambda library: library.pl_tune(b"lr", math.nan), REFUSED, "lr must be a finite number, got nan"),
    (lambda library: library.pl_tune(b"self", 1.0), REFUSED, "self"),
    (lambda library: library.pl_log(None, 1.0), INVALID, "name is a null pointer"),
    (lambda library: library.pl_buffers(1, None, None, None), STATE, "before pl_attach"),
]


@pytest.mark.parametrize(("call", "status", "says"), WRONG_IN_A_RUN, ids=[says for _, _, says in WRONG_IN_A_RUN])
def test_wrong_input_leaves_the_run_as_it_is(library: Any, call: Callable[[Any], int], status: int, says: str) -> None:
    held = np.ones(3)
    assert attach(library, [held]) == 0
    assert call(library) == status, said(library)
    assert says in said(library)
    held *= 0.5
    assert library.pl_step() == 0 and library.pl_close() == 0
    assert library.pl_step() == STATE and "the run is closed" in said(library)


def test_momentum_needs_an_array_for_each(library: Any) -> None:
    held = [np.ones(3), np.ones(2)]
    assert library.pl_momentum(1, pointers([np.zeros(3)]), 0.9) == 0
    assert attach(library, held) == INVALID and "pl_momentum named 1 arrays, and pl_attach 2" in said(library)


@pytest.mark.parametrize(("name", "value"), [("sped", "3"), ("timeout_s", "abc"), ("timeout_s", "-5"), ("seed", "x")])
def test_a_wrong_setting_is_refused_at_attach(
    library: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    from paceline_c import bridge

    monkeypatch.setattr(bridge, "tool", bridge.Tool())
    assert library.pl_set(name.encode(), value.encode()) == 0
    assert attach(library, [np.ones(3)]) == REFUSED and name in said(library)


def test_threads_that_step_at_once_are_all_counted(library: Any) -> None:
    assert attach(library, [np.ones(3)]) == 0
    threads = [threading.Thread(target=lambda: [library.pl_step() for _ in range(250)]) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert library.pl_minibatches() == 1000


def test_memory_is_that_which_can_be_written() -> None:
    text = "1000-3000 rw-p 0 0:0 0\n3000-4000 rw-p 0 0:0 0 [heap]\n5000-6000 r--p 0 0:0 0 x\nf000-ffff rw-s 0 0:0 0"
    assert writable(text) == [(0x1000, 0x4000), (0xF000, 0xFFFF)]


def test_an_error_belongs_to_its_thread(library: Any) -> None:
    assert attach(library, [np.ones(3)]) == 0
    assert library.pl_next_range(1, 1, None, None) == INVALID
    before, others = said(library), []

    def elsewhere() -> None:
        others.append(said(library))
        library.pl_tuned(b"lr", 1.0, None)
        others.append(said(library))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert others[0] == "" and "pl_tuned" in others[1] and said(library) == before


def test_a_mistake_of_ours_is_a_status_too(library: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    assert attach(library, [np.ones(3)]) == 0
    monkeypatch.setattr(paceline.doors.adapters.arrays.WritableRun, "step", lambda self: 1 / 0)
    assert library.pl_step() == -8 and "ZeroDivisionError" in said(library)
    assert "Traceback" in capfd.readouterr().err
    monkeypatch.setattr(
        paceline.doors.adapters.arrays.WritableRun, "step", lambda self: (_ for _ in ()).throw(SystemExit(3))
    )
    assert library.pl_step() == -8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(library: Any) -> None:
    assert attach(library, [np.ones(3)], device="cuda:0") == REFUSED
    assert "'cuda:0'" in said(library) and "sees 0 CUDA devices" in said(library)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_numbers_on_a_device_are_seen_where_they_lie(library: Any) -> None:
    held = torch.ones(5, device="cuda")
    where, sizes, kinds = (ctypes.c_void_p * 1)(held.data_ptr()), (ctypes.c_int64 * 1)(5), (ctypes.c_int * 1)(FLOAT32)
    assert library.pl_attach(1, where, sizes, kinds, b"cuda:0", b"bmuf") == 0, said(library)
    from paceline_c import bridge

    (seen,) = bridge.tool.run._parameters.values()
    held.mul_(0.5)
    assert library.pl_step() == 0 and seen.data_ptr() == held.data_ptr() and seen.tolist() == [0.5] * 5


@pytest.mark.parametrize(("total", "batch"), [(1, 1), (7, 3), (9, 3), (2, 10)])
def test_ranges_hold_every_sample_once(total: int, batch: int) -> None:
    found = Ranges(total, batch)
    assert [k for one in found for k in range(one.begin, one.end)] == list(range(total))
    assert all(one.shape == (one.end - one.begin,) for one in found)
    part = found[len(found) - 1][0:1]
    assert (part.begin, part.end) == (found[len(found) - 1].begin, found[len(found) - 1].begin + 1)
