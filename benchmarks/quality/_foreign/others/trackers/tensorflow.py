# SPDX-License-Identifier: Apache-2.0
"""As `wandb.py`."""

from unittest.mock import MagicMock

summary = MagicMock()
