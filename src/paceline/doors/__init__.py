# SPDX-License-Identifier: Apache-2.0
"""Ways in: programs without a line of ours (`zero`), and other frameworks (`adapters`)."""

from __future__ import annotations

from paceline.core.lazy import lazily

__getattr__, __dir__ = lazily(__name__, {})
