# SPDX-License-Identifier: Apache-2.0
"""The table of `seeds.py`: each claim, what would reach it, and where our figure for it stands."""

from __future__ import annotations

import _claims_bmuf
import _claims_ddl
import _claims_delay_compensation
import _claims_dual
import _claims_lightrnn
import _claims_middleware

CLAIMS = (
    *_claims_bmuf.CLAIMS,
    *_claims_ddl.CLAIMS,
    *_claims_lightrnn.CLAIMS,
    *_claims_delay_compensation.CLAIMS,
    *_claims_dual.CLAIMS,
    *_claims_middleware.CLAIMS,
)
