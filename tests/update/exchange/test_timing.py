# SPDX-License-Identifier: Apache-2.0
"""Where the time of an overlapped exchange is counted: the wire, or other workers."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.communication.base import SoloTransport
from paceline.rules.codec import Dense
from paceline.rules.topology import Flat
from paceline.update.exchange.exchanger import ExchangeHeader, Exchanger, ExchangeSummary, InFlightExchange


class Hands(SoloTransport):
    """Parts of an exchange whose times are given: until all headers are here, and until the payload is."""

    def __init__(self, headers_s: float, payload_s: float) -> None:
        super().__init__()
        self.now_s, self.headers_s, self.payload_s = 0.0, headers_s, payload_s

    def now(self) -> float:
        return self.now_s

    def summary(self) -> ExchangeSummary:
        self.now_s += self.headers_s
        return ExchangeSummary((ExchangeHeader(brings=True, factor=1.0),))

    def finish(self) -> tuple[None, None]:
        self.now_s += self.payload_s
        return None, None

    def keep(self, state: None) -> None: ...

    def move(self, made: int) -> None: ...


@pytest.mark.parametrize(("headers_s", "payload_s"), [(0.0, 3.0), (2.0, 0.0), (2.0, 3.0)])
def test_a_slow_network_is_no_slow_worker(headers_s: float, payload_s: float) -> None:
    hands: Any = Hands(headers_s, payload_s)
    exchanger = Exchanger(hands, Dense(), Flat())
    exchanger.waited(-99.0)  # a thread of the pipeline has waited while this one computed
    InFlightExchange(exchanger, hands, True, [(hands, hands)]).finish(made=4)
    assert (exchanger.timing.wait_s, exchanger.timing.met_at) == (headers_s, headers_s)
    assert hands.now_s == headers_s + payload_s
