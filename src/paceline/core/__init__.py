# SPDX-License-Identifier: Apache-2.0
"""The words that every other folder uses.

::

    world            rank, number of workers, hosts
    flat             tensors seen as one flat tensor, and cut into fragments
    optimizer_state  what an optimizer holds, by parameter
    rng              the random generators of torch, NumPy and Python
    state_tree       a tree of state as tensors and JSON, for checkpoints and messages
    parse            `name(key=value)` as text
    lazy, extras     names that load when they are used; packages that only some programs need
    printable        text of others, made harmless for a terminal
"""
