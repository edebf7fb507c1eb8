# SPDX-License-Identifier: Apache-2.0
"""Doors into frameworks, and for programs that step no torch optimizer themselves.

Each framework is imported by its own door only.

=============================  =============================================================================
:mod:`.lightning`              a strategy for the Trainer of Lightning
:mod:`.fabric`                 the same for Lightning's Fabric
:mod:`.hugging_face`           a callback for the Trainer of transformers
:mod:`.accelerate`             an `Accelerator`
:mod:`.arrays`                 any arrays that can be written to: NumPy, CuPy, whatever speaks DLPack
:mod:`.jax`                    JAX, with or without optax
:mod:`.sklearn`                scikit-learn's models with `partial_fit`
:mod:`.keras`                  Keras 3 on JAX and torch
=============================  =============================================================================
"""
