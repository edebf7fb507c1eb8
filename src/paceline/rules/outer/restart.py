# SPDX-License-Identifier: Apache-2.0
"""Restarts of the outer momentum.

    BMUF:    Delta_n <- 0,  rho_n <- 0     after theta_t = theta_{t-tau} + Delta_n, for n = R, 2R, ..
    DiLoCo:  b_n <- 0,  rho_n <- 0         after theta_n = theta_{n-1} - nu (g_n + mu b_n)

So what block n brought stays in the model, and the next block begins as the first one did: BMUF's at theta, without a
look-ahead. eta, mu and the rates are as without restarts. rho counts equivalent minibatches
(:mod:`paceline.rules.outer.block_momentum`). Under a steady displacement d the k-th block after a restart moves BMUF's
model by zeta d (1 - eta^k) / (1 - eta), so R limits the gain.

Source: arXiv 2605.28585 (restarts). Momentum that fades out towards the end (Pier, arXiv 2511.17849) is not offered: a
rule does not know how many blocks a run will have.
"""

from __future__ import annotations

from paceline.errors import RuleError


def check_restart(restart: object) -> None:
    """Raise `RuleError` unless `restart` is a whole number of blocks, at least 0."""
    if not isinstance(restart, int) or isinstance(restart, bool) or restart < 0:
        raise RuleError(f"restart must be a whole number of blocks, 0 for never, got {restart!r}")


def restarts(restart: int, block: int) -> bool:
    """Whether the momentum is set to 0 after block `block` (the first is 1), with R = `restart`."""
    return restart > 0 and block % restart == 0
