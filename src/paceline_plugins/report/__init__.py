# SPDX-License-Identifier: Apache-2.0
"""Pages with figures from the logs of a run, and its timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline_plugins.report.report import write_report
    from paceline_plugins.report.sections import ExtraTable
    from paceline_plugins.report.trace import Trace, write_trace
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ExtraTable": "sections",
            "Trace": "trace",
            "write_report": "report",
            "write_trace": "trace",
        },
    )

__all__ = [
    "ExtraTable",
    "Trace",
    "write_report",
    "write_trace",
]
