# SPDX-License-Identifier: Apache-2.0
"""hivemind: its optimizer, and its averager called once a block."""

from __future__ import annotations

import logging
from typing import Any

from _emulate import EmulatedModel, plain_step, sgd

from .fleet import Place
from .setting import Setting, Trainer

MATCHMAKING_S, REQUEST_TIMEOUT_S, TIMEOUT_S = 2.0, 1.0, 30.0
AVERAGED = "Averaged parameters with"


def _dht(place: Place, first: list[str]) -> Any:
    import hivemind

    return hivemind.DHT(host_maddrs=[f"/ip4/{place.address}/tcp/0"], initial_peers=first, start=True)


def first_peer(place: Place) -> tuple[Any, list[str]]:
    """A peer that the workers find each other by, on this host, and its addresses."""
    dht = _dht(place, [])
    return dht, [str(address) for address in dht.get_visible_maddrs()]


def averager(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """Parameters averaged once a block, waited for."""
    import hivemind

    inner = sgd(model)
    average = hivemind.TrainingAverager(
        inner,
        average_parameters=True,
        average_gradients=False,
        dht=_dht(place, place.service),
        prefix="peers",
        target_group_size=place.size,
        min_group_size=place.size,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=REQUEST_TIMEOUT_S,
        allreduce_timeout=TIMEOUT_S,
        bandwidth=setting.rate_mbit * 1e6 / 8,
        start=True,
    )
    made, local = [0, 0], plain_step(model, inner)

    def step() -> None:
        local()
        made[0] += 1
        if made[0] % setting.period == 0 and average.step(timeout=TIMEOUT_S) is not None:
            made[1] += 1

    return Trainer(step, lambda: made[1], average)


class Averagings(logging.Handler):
    """Counts the averagings that the optimizer reports."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += AVERAGED in record.getMessage()


def optimizer(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """Local updates, and parameters averaged in the background about once in as many samples as a block has."""
    import hivemind

    averagings = Averagings()
    logging.getLogger("hivemind").addHandler(averagings)
    made = hivemind.Optimizer(
        dht=_dht(place, place.service),
        run_id="peers",
        batch_size_per_step=1,
        target_batch_size=setting.period * place.size,
        optimizer=sgd(model),
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=TIMEOUT_S,
        averager_opts={
            "bandwidth": setting.rate_mbit * 1e6 / 8,
            "target_group_size": place.size,
            "request_timeout": REQUEST_TIMEOUT_S,
        },
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5},
        verbose=True,
    )
    return Trainer(plain_step(model, made), lambda: averagings.count, made)
