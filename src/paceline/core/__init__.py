# SPDX-License-Identifier: Apache-2.0
"""Definitions that all other folders use.

::

    world            rank, number of workers, hosts
    flat             tensors as one flat tensor
    optimizer_state  the state of torch's optimizers, by parameter
    rng              the random generators of torch, NumPy and Python
    state_tree       a tree of state as tensors and JSON, for checkpoints and messages
    parse            `name(key=value)` as text
    lazy, extras     names that load on first use; optional packages
    printable        foreign text, made harmless for a terminal
"""
