# SPDX-License-Identifier: Apache-2.0
"""The numbers of one worker over HTTP, at `/metrics`, for Prometheus to scrape; prometheus_client writes the page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.extras import needed
from paceline.core.world import World
from paceline.errors import UnsupportedError
from paceline.observe.sinks.base import PREFIX, Values

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Family(NamedTuple):
    """A metric of Prometheus; the name of a counter ends in `_total`."""

    name: str
    help: str


SECONDS = Family("paceline_seconds_total", "Seconds of the thread that trains, by what it did.")
SETTING = Family("paceline_setting", "A setting that can be tuned, as it is at present.")
VALUE = Family("paceline_value", "What the program gave to run.log last.")

KNOWN = {
    "block": Family("paceline_block", "Number of the last block that was exchanged; under asynchronous rules, pushes."),
    "exchanges": Family("paceline_exchanges_total", "Exchanges that this worker took part in."),
    "minibatches": Family("paceline_minibatches_total", "Minibatches of this worker."),
    "samples": Family("paceline_samples_total", "Samples of this worker, counted by run.share."),
    "bytes_sent": Family("paceline_sent_bytes_total", "Bytes sent to other workers."),
    "left_out": Family("paceline_left_out_total", "Contributions of any worker that were kept out of the mean."),
    "workers": Family("paceline_workers", "Workers of the run."),
    "minibatches_per_s": Family("paceline_minibatches_per_second", "Minibatches a second, lately."),
    "samples_per_s": Family("paceline_samples_per_second", "Samples a second, lately."),
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The format that `generate_latest` writes."""
PARTS = {"computing_s": "computing", "waiting_s": "waiting", "exchanging_s": "exchanging", "waiting_for_data_s": "data"}
"""The run's own numbers by name, and what its seconds went to; all others of its own are settings."""


class Metrics:
    """Serves what it was told last.

    Args:
        address: HOST:PORT to listen on; worker k of its host takes PORT + k, and port 0 is any that is free.
        world: where this worker stands at present: rank and host are labels.

    Attributes:
        address: where it listens, as HOST:PORT.

    Raises:
        UnsupportedError: the address is none, or cannot be had.
        MissingExtraError: prometheus_client is not installed.
    """

    def __init__(self, address: str, world: Callable[[], World]) -> None:
        with needed("run.serve_metrics", "metrics"):
            from prometheus_client import CollectorRegistry, generate_latest

            from paceline.observe.sinks.metrics_server import MetricsServer

        self._world, self._lock, self._values = world, threading.Lock(), dict[str, float]()
        host, port = split(address)
        if port:
            port += world().local_rank
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = MetricsServer((host, port), lambda: (generate_latest(registry), CONTENT_TYPE))
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
        """What a scrape gets, as prometheus_client asks for it."""
        with self._lock:
            values = dict(self._values)
        world = self._world()
        return iter(families(values, {"rank": str(world.rank), "host": world.host}))

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def families(values: Values, labels: dict[str, str]) -> list[Metric]:
    """Every value with `labels`, by family."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    found: dict[Family, Any] = {}
    for name, value in values.items():
        family, own = _place(name)
        if family not in found:
            make = CounterMetricFamily if family.name.endswith("_total") else GaugeMetricFamily
            found[family] = make(family.name, family.help, labels=[*labels, *own])
        found[family].add_metric([*labels.values(), *own.values()], value)
    return list(found.values())


def _place(name: str) -> tuple[Family, dict[str, str]]:
    """The family of a value, and its labels of its own."""
    if not name.startswith(PREFIX):
        return VALUE, {"name": name}
    own = name.removeprefix(PREFIX)
    if own in PARTS:
        return SECONDS, {"part": PARTS[own]}
    return (KNOWN[own], {}) if own in KNOWN else (SETTING, {"name": own})


def split(address: str) -> tuple[str, int]:
    """HOST and PORT of "HOST:PORT", "[::1]:PORT" for version 6; `UnsupportedError` where it is none."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise UnsupportedError(
            f"metrics are served at HOST:PORT, such as 127.0.0.1:9400 (0.0.0.0 for all interfaces), got {address!r}"
        )
    return host.strip("[]"), int(port)
