# SPDX-License-Identifier: Apache-2.0
"""The bytes that each worker sends under a rule: the payload's by topology and codec, and the headers'."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.communication.sockets import frames
from paceline.rules.codec import Dense, Layout
from paceline.rules.rule import Rule

HEADER_BYTES = 88
"""Of an exchange's header, to each other worker (:mod:`paceline.update.exchange.exchanger`)."""
FOOTER_BYTES = 40
"""Of a gradient exchange's footer, likewise (:mod:`paceline.update.engine.gradients.update`)."""
FRAME_BYTES = frames.HEADER_BYTES
"""Of a shard's header, to its owner and back, under asynchronous rules."""


def bytes_per_block(
    rule: Rule,
    workers: int,
    parameters: int | Layout,
    buffers: int = 0,
    moments: int = 2,
    *,
    rank: int = 0,
    hosts: Sequence[str] | None = None,
    exchange: int = 1 << 30,
) -> int:
    """Bytes that one worker sends for one exchange of every parameter (a block, or a step), without headers.

    >>> from paceline import rule_from_text
    >>> bytes_per_block(rule_from_text("bmuf"), workers=4, parameters=1_000_000)
    6000000

    Args:
        rule: the rule.
        workers: N.
        parameters: trainable parameters as they lie in the flat tensor, or their number of 32-bit elements.
        buffers: elements of averaged buffers, likewise (a whole number of 64 bits counts as two); always dense.
        moments: moments of the local optimizer, if they are sent: 2 for Adam, 1 for SGD with momentum; dense.
        rank: the worker, if workers send different numbers of bytes.
        hosts: each worker's host, for hierarchical routes; None for one worker a host.
        exchange: the number of the exchange, for codecs with a warm-up.
    """
    layout = Layout.vector(parameters) if isinstance(parameters, int) else parameters
    hosts = [str(k) for k in range(workers)] if hosts is None else hosts
    besides = (moments * layout.numel if rule.payload.rides(moments) else 0) + buffers
    sent = rule.topology.bytes_sent(rule.codec.at(exchange), layout, hosts, rank)
    return sent + rule.topology.bytes_sent(Dense(), Layout.vector(besides), hosts, rank)


def overhead_bytes(rule: Rule, workers: int, parameters: int | Layout | None = None, *, rank: int = 0) -> int:
    """Bytes of headers and footers that one worker sends for one exchange.

    Args:
        rule: the rule.
        workers: N.
        parameters: as for `bytes_per_block`, under an asynchronous rule: each shard has a header. None for one shard an
            owner, the fewest.
        rank: the worker, likewise.
    """
    if rule.schedule.workers_meet:
        return (HEADER_BYTES + (FOOTER_BYTES if rule.schedule.sends_footer else 0)) * (workers - 1)
    numel = parameters.numel if isinstance(parameters, Layout) else parameters
    sent = 2 * (workers - 1) if numel is None else rule.sharded.frames_sent(numel, workers, rank)
    apart = rule.steps_at_owners and rule.schedule.overlap > 0  # pushed, and pulled later
    return FRAME_BYTES * sent * (2 if apart else 1)


def bytes_formula(rule: Rule) -> str:
    """The formula behind `bytes_per_block`."""
    rides = rule.payload.rides()
    what = "4 (1 + M) P" if rides else "4 P"
    means = "P parameters, M moments (Adam 2)" if rides else "P parameters"
    often = "block" if rule.payload.spans_block else "step"
    if not rule.schedule.workers_meet:
        return (
            f"2 (N-1)/N * {what} bytes a {often} from each worker, pushed and answered, {means}; "
            f"a header of {FRAME_BYTES} bytes a piece"
        )
    small = overhead_bytes(rule, 2)
    if not rule.codec.exact:
        layout = Layout.of([(1000, 1000)])
        sent = bytes_per_block(rule, 4, layout, moments=2) / layout.numel
        return (
            f"{sent:.3g} P bytes a {often} from each of 4 workers for a matrix of 1000 x 1000 "
            f"({rule.codec.describe(4)}), {means}; a header of {small} (N-1) bytes"
        )
    return f"2 (N-1)/N * {what} bytes a {often} from each worker, {means}; a header of {small} (N-1) bytes"
