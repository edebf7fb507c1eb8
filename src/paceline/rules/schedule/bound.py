# SPDX-License-Identifier: Apache-2.0
"""The setting `within=` of the recipe `auto`: a bound on what longer periods and more workers may cost."""

from __future__ import annotations

import math

from paceline.errors import RuleError

MOST = 0.5
"""The largest bound; what costs more is no longer the same training."""


def read_within(value: object) -> tuple[str, float | None]:
    """(the word of :class:`paceline.rules.rule.BlockSettings`, the bound as a share of the held-out loss, or None).

    >>> from paceline.rules.schedule.bound import read_within
    >>> read_within("1%"), read_within(0.01), read_within("host")
    (('', 0.01), ('', 0.01), ('host', None))

    Args:
        value: "1%", 0.01, "host" or "".

    Raises:
        RuleError: it is none of these, or not above 0 and at most 50 %.
    """
    if value in ("", "host"):
        return str(value), None
    asked = f"within must be a share of the held-out loss such as '1%' or 0.01, or 'host', got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise RuleError(asked)
    percent = isinstance(value, str) and value.rstrip().endswith("%")
    try:
        bound = float(value.rstrip().removesuffix("%") if isinstance(value, str) else value) / (100 if percent else 1)
    except ValueError as error:
        raise RuleError(asked) from error
    if not (math.isfinite(bound) and 0 < bound <= MOST):
        raise RuleError(f"{asked}; it must be above 0 and at most {100 * MOST:g} %")
    return "", bound
