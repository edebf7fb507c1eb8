# SPDX-License-Identifier: Apache-2.0
"""What the user holds: `attach` and the `Run` that it returns."""
