# SPDX-License-Identifier: Apache-2.0
"""Pages with figures from the logs of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline_plugins.report.report import write_report
    from paceline_plugins.report.sections import ExtraTable
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ExtraTable": "sections",
            "write_report": "report",
        },
    )

__all__ = [
    "ExtraTable",
    "write_report",
]
