# SPDX-License-Identifier: Apache-2.0
"""The simulator."""

from __future__ import annotations

from paceline.core.lazy import lazily

__getattr__, __dir__ = lazily(__name__, {})
