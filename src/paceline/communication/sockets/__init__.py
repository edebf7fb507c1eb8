# SPDX-License-Identifier: Apache-2.0
"""Sockets: frames, TLS, addresses, and the log of rejected connections."""
