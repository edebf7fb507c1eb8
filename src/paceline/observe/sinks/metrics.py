# SPDX-License-Identifier: Apache-2.0
"""The metrics of one worker over HTTP, at `/metrics`, for Prometheus to scrape; prometheus_client writes the page."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from typing import TYPE_CHECKING, Any

from paceline.core.lazy import needed
from paceline.core.world import World
from paceline.errors import UnsupportedError
from paceline.observe.sinks.base import PREFIX, Values

if TYPE_CHECKING:
    from prometheus_client.core import Metric


Family = tuple[str, str]
"""Name and help of a metric family of Prometheus; the name of a counter ends in `_total`."""
SECONDS = ("paceline_seconds_total", "Seconds of the training thread, by activity.")
SETTING = ("paceline_setting", "Present value of a tunable.")
VALUE = ("paceline_value", "Last value passed to run.log.")
KNOWN: dict[str, Family] = {
    "block": ("paceline_block", "Number of the last block that was exchanged; under asynchronous rules, pushes."),
    "exchanges": ("paceline_exchanges_total", "Exchanges that this worker took part in."),
    "minibatches": ("paceline_minibatches_total", "Minibatches of this worker."),
    "samples": ("paceline_samples_total", "Samples of this worker, counted by run.share."),
    "bytes_sent": ("paceline_sent_bytes_total", "Bytes sent to other workers."),
    "left_out": ("paceline_left_out_total", "Contributions of any worker that were rejected."),
    "workers": ("paceline_workers", "Workers of the run."),
    "minibatches_per_s": ("paceline_minibatches_per_second", "Recent minibatches a second."),
    "samples_per_s": ("paceline_samples_per_second", "Recent samples a second."),
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of `generate_latest`
PARTS = {"computing_s": "computing", "waiting_s": "waiting", "exchanging_s": "exchanging", "waiting_for_data_s": "data"}
"""Seconds of the run by name -> activity; other metrics of the run that are not in `KNOWN` are tunables."""


def _place(world: World) -> int:
    """Which worker of its host this is; its place at the launcher in an elastic run, whose ranks move."""
    elastic = "PACELINE_CONTROL" in os.environ or "PACELINE_RELAY" in os.environ
    place = os.environ.get("LOCAL_RANK", "") if elastic else ""
    return int(place) if place.isdecimal() else world.local_rank


class Metrics:
    """Serves the latest values at `address`, HOST:PORT.

    Args:
        address: worker k of its host takes PORT + k, and port 0 is any that is free.
        world: this worker's present rank and host, which are labels.
    """

    def __init__(self, address: str, world: Callable[[], World]) -> None:
        with needed("run.serve_metrics", "metrics"):
            from prometheus_client import CollectorRegistry, generate_latest

            from paceline.observe.http_server import Answer, BoundedServer

        self._world, self._lock, self._values = world, threading.Lock(), dict[str, float]()
        host, port = split_address(address)
        if port:
            port += _place(world())
        registry = CollectorRegistry()
        registry.register(self)

        def answer(path: str, headers: Message) -> Answer:
            if path.partition("?")[0] != "/metrics":
                return Answer(404)
            return Answer(200, CONTENT_TYPE, generate_latest(registry))

        try:
            self._server = BoundedServer((host, port), answer)
        except (OSError, OverflowError) as error:
            raise UnsupportedError(
                world().sign(f"cannot serve metrics at {host}:{port}: {error}; choose another address or port")
            ) from error
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="paceline-metrics", daemon=True)
        self._thread.start()

    def take(self, values: Values, step: int) -> None:
        """Keep the values for the next scrape."""
        with self._lock:
            self._values |= values

    def collect(self) -> Iterator[Metric]:
        """All families; prometheus_client calls this for each scrape."""
        with self._lock:
            values = dict(self._values)
        world = self._world()
        return iter(families(values, {"rank": str(world.rank), "host": world.host}))

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def families(values: Values, labels: dict[str, str]) -> list[Metric]:
    """Every value with `labels`, by family."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    metrics: dict[Family, Any] = {}
    for name, value in values.items():
        family, own = _family_of(name)
        if family not in metrics:
            make = CounterMetricFamily if family[0].endswith("_total") else GaugeMetricFamily
            metrics[family] = make(*family, labels=[*labels, *own])
        metrics[family].add_metric([*labels.values(), *own.values()], value)
    return list(metrics.values())


def _family_of(name: str) -> tuple[Family, dict[str, str]]:
    """The family of a value, and its additional labels."""
    if not name.startswith(PREFIX):
        return VALUE, {"name": name}
    own = name.removeprefix(PREFIX)
    if own in PARTS:
        return SECONDS, {"part": PARTS[own]}
    return (KNOWN[own], {}) if own in KNOWN else (SETTING, {"name": own})


def split_address(address: str) -> tuple[str, int]:
    """HOST and PORT of "HOST:PORT" or "[::1]:PORT"; `UnsupportedError` for other text."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise UnsupportedError(
            f"metrics are served at HOST:PORT, such as 127.0.0.1:9400 (0.0.0.0 for all interfaces), got {address!r}"
        )
    return host.strip("[]"), int(port)
