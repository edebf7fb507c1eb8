# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a run go besides its event log.

::

    base          what a sink is, and what is taken for one
    async_writer  a queue and a thread: whoever logs never waits for a sink
    dispatcher    the sinks of a run, and what each is told when
    metrics       numbers over HTTP for Prometheus, by prometheus_client

No tracker is imported here: TensorBoard, Weights & Biases, trackio and MLflow are known by what they can do.
"""

from __future__ import annotations

from paceline.observe.sinks.base import Sink

__all__ = ["Sink"]
