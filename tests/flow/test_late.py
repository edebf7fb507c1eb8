# SPDX-License-Identifier: Apache-2.0
"""A worker that comes when the others have come to the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flow.cluster import Cluster
from tests.flow.test_elastic import check, terms

pytestmark = pytest.mark.processes


def test_a_worker_that_starts_after_the_end_says_so_and_exits_cleanly(tmp_path: Path) -> None:
    with Cluster(tmp_path, terms(1), samples=40, epochs=1) as cluster:
        cluster.start(1)
        check(cluster)
        cluster.start(1)
        assert cluster.children[1].wait(60.0) == 0
        (said,) = cluster.file(1).read_text().splitlines()
        assert "the run is over" in said and "nothing left to do" in said
