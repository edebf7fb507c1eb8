# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go besides its event log.

::

    base            the protocol of a sink, and adapters for trackers
    async_writer    a queue and a thread, so that training never waits for a sink
    dispatcher      the sinks of a run, and when each receives what
    metrics         metrics over HTTP for Prometheus, by prometheus_client

No tracker is imported here: TensorBoard, Weights & Biases, trackio and MLflow are recognised by their methods.
"""

from __future__ import annotations

from paceline.observe.sinks.base import Sink

__all__ = ["Sink"]
