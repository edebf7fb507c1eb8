# SPDX-License-Identifier: Apache-2.0
"""The stages of an exchange, in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from paceline.communication.base import Pending
from paceline.update.exchange.pipeline import Pipeline

SOON = 30.0
"""Seconds that nothing in a test takes unless it is broken."""


class Operation:
    """An operation that is over when it is told."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.over.wait(SOON)


def exchange(operations: list[Operation]) -> Iterator[Pending]:
    yield from operations
    return len(operations)  # type: ignore[return-value]


def test_an_exchange_that_is_under_way_ends_after_the_pipeline_was_closed() -> None:
    pipeline, operations = Pipeline(threads=True, operations=3), [Operation() for _ in range(3)]
    running = pipeline.start(exchange(operations))
    assert operations[0].begun.wait(SOON), "a later stage waits for the first operation"
    pipeline.close()
    for operation in operations:
        operation.over.set()
    assert running._done is not None and running._done.wait(SOON)
    assert running.finish() == 3
