# SPDX-License-Identifier: Apache-2.0
"""Sockets of our own: framed messages, TLS, addresses, and who is turned away."""
