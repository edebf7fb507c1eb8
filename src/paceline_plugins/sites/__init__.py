# SPDX-License-Identifier: Apache-2.0
"""Hosts at several places, behind relays."""
