# SPDX-License-Identifier: Apache-2.0
"""Floor 5, doors for programs that step no torch optimizer themselves; each framework is imported by its own door.

=============================  =============================================================================
:mod:`.arrays`                 any arrays that can be written to: NumPy, CuPy, whatever speaks DLPack
:mod:`.jax`                    JAX, with or without optax
:mod:`.sklearn`                scikit-learn's models with `partial_fit`
:mod:`.keras`                  Keras 3 on JAX and torch
=============================  =============================================================================
"""
