# SPDX-License-Identifier: Apache-2.0
"""Where the time of an overlapped exchange is counted: the wire, or other workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.update.exchange.exchanger import InFlightExchange
from paceline.update.exchange.header import ExchangeHeader, ExchangeKind, ExchangeSummary, Timing


class Hands:
    """Parts of an exchange whose times are given: until all headers are here, and until the payload is."""

    def __init__(self, headers_s: float, payload_s: float) -> None:
        self.now_s, self.headers_s, self.payload_s = 0.0, headers_s, payload_s
        transport = SimpleNamespace(now=lambda: self.now_s, world=None)
        self.timing = Timing(wait_s=99.0, exchange_s=99.0)
        self.exchanger: Any = SimpleNamespace(transport=transport, timing=self.timing)

    def summary(self) -> ExchangeSummary:
        self.now_s += self.headers_s
        return ExchangeSummary((ExchangeHeader(0, ExchangeKind(0), True, False, True, 1, 1.0, 1.0, 1, 0),))

    def finish(self) -> tuple[None, None]:
        self.now_s += self.payload_s
        return None, None

    def keep(self, state: None) -> None: ...

    def move(self, made: int) -> None: ...


@pytest.mark.parametrize(("headers_s", "payload_s"), [(0.0, 3.0), (2.0, 0.0), (2.0, 3.0)])
def test_a_slow_network_is_no_slow_worker(headers_s: float, payload_s: float) -> None:
    hands: Any = Hands(headers_s, payload_s)
    flight = InFlightExchange(hands.exchanger, hands, True, [(hands, hands)])
    flight.finish(made=4)
    assert (hands.timing.wait_s, hands.timing.exchange_s) == (headers_s, payload_s)
