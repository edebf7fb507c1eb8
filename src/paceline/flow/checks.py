# SPDX-License-Identifier: Apache-2.0
"""Which rules an elastic run supports, and which settings all of its workers must share."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from paceline.core.flat import Modules
from paceline.core.optimizer_state import Owned
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine import agreement
from paceline.update.engine.agreement import exchanged_parts, frozen, layout, untrained
from paceline.update.engine.settings import Settings


def check_rule(rule: Rule) -> None:
    """Refuse rules whose workers cannot join and leave."""
    schedule = rule.schedule
    wrong = ""
    if not schedule.can_be_elastic:
        wrong = "exchanges no blocks; asynchronous rules survive losses by themselves, others are started again"
    elif schedule.overlap or schedule.warmup or rule.settings.within:
        wrong = "has overlap, a warm-up or one worker for each host, which are not served where workers come and go"
    if wrong:
        raise UnsupportedError(f"an elastic run needs a block rule such as bmuf(period=16), and {rule.text()} {wrong}")


def fingerprint(rule: Rule, model: Modules, owned: Owned, settings: Settings) -> dict[str, Any]:
    """The settings that all workers must share; serializable as JSON."""
    rows = [row for part in exchanged_parts(model, owned) for row in part.layout()] + layout(untrained(model, owned))
    rows += [[name] for name in frozen(model, owned)]
    about = agreement.about_optimizers(owned)
    del about["optimizer state at attach"]  # a joining worker receives it
    about["guard"] = str(settings.guard)
    found = {"rule": rule.text(), "seed": settings.seed, "outer_state": settings.outer_state, **about}
    numbers = sum(p.numel() for _, named in owned for _, p in named)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    return {**found, "tensors": len(rows), "numbers": numbers, "model": digest}
