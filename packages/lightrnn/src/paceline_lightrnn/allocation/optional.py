# SPDX-License-Identifier: Apache-2.0
"""Functions of SciPy, which only re-allocation needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline import UnsupportedError


def _missing(error: ImportError) -> UnsupportedError:
    return UnsupportedError(f"re-allocation needs SciPy ({error}); install it with: pip install scipy")


def assign(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SciPy's `linear_sum_assignment`: the exact assignment of cheapest cost (Crouse, IEEE Trans. AES 52, 2016)."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise _missing(error) from error
    rows, columns = linear_sum_assignment(cost)
    return rows, columns


def minimize(*given: Any, **options: Any) -> Any:
    """SciPy's `minimize`."""
    try:
        from scipy.optimize import minimize as minimize_
    except ImportError as error:
        raise _missing(error) from error
    return minimize_(*given, **options)
