# SPDX-License-Identifier: Apache-2.0
"""Ways in: unchanged programs (`zero`), other frameworks (`adapters`), tools that cannot be changed (`files`)."""

from __future__ import annotations

from paceline.core.lazy import lazily

__getattr__, __dir__ = lazily(__name__, {})
