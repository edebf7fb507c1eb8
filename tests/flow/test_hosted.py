# SPDX-License-Identifier: Apache-2.0
"""The number of workers grows under a launcher that knows nothing of elastic runs; rank 0 hosts the control plane."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import same_bits
from tests.processes.grown_programs import EPOCHS, SAMPLES
from tests.processes.launch import Launch, run

pytestmark = pytest.mark.processes
MODULE = "grown_programs"
GROWS = "bmuf(period=4, grow='2:80, 4:100000')"


def test_every_sample_is_trained_once_in_an_epoch_as_workers_join(tmp_path: Path) -> None:
    run("grown", 4, tmp_path, GROWS, module=MODULE)
    rows = [json.loads((tmp_path / f"seen.{rank}").read_text()) for rank in range(4)]
    given = Counter(chain.from_iterable(chain.from_iterable(seen for seen, _, _ in rows)))
    assert given == dict.fromkeys(range(SAMPLES), EPOCHS)
    first, second, *joined = [sizes for _, sizes, _ in rows]
    assert first[0] == second[0] == 2 and first[-1] == 4
    assert all(set(sizes) == {4} for sizes in joined)
    assert [rank for _, _, rank in rows] == [0, 1, 2, 3], "the members have the launcher's ranks"
    states = [load_file(tmp_path / f"model.{rank}.safetensors") for rank in range(4)]
    assert all(same_bits(state, states[0]) for state in states[1:])


def test_who_is_never_needed_ends_well(tmp_path: Path) -> None:
    ended = run("grown", 3, tmp_path, "bmuf(period=4, grow='2:1000000')", module=MODULE)
    assert "was not needed" in ended[2].err and "Traceback" not in ended[2].err
    assert sorted(path.name for path in tmp_path.glob("seen.*")) == ["seen.0", "seen.1"]


def test_all_end_with_the_worker_that_hosts_the_control_plane(tmp_path: Path) -> None:
    """Also those that wait to be needed, and long before the deadline."""
    with Launch("grown", 3, tmp_path, "bmuf(period=4, grow='2:1000000')", "0", module=MODULE) as launch:
        ended = launch.wait(deadline_s=25)
    assert "the user's own" in ended[0].err and ended[0].code == 1
    for rank in (1, 2):
        assert ended[rank].code != 0
        assert re.search("rank 0, which hosts the control plane of this run, has left it", ended[rank].err)
