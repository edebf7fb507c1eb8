# SPDX-License-Identifier: Apache-2.0
"""Connections between workers that cannot reach each other: both dial out to a relay, which passes their bytes on."""
