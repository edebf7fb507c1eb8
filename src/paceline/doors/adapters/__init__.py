# SPDX-License-Identifier: Apache-2.0
"""Adapters for frameworks, and for programs without a torch optimizer.

Each framework is imported by its own adapter only.

=============================  =============================================================================
:mod:`.lightning`              a strategy for the Trainer of Lightning
:mod:`.fabric`                 the same for Lightning's Fabric
:mod:`.hugging_face`           a callback for the Trainer of transformers
:mod:`.accelerate`             an `Accelerator`
:mod:`.arrays`                 writable arrays: NumPy, CuPy, Chainer, and other libraries with DLPack
:mod:`.jax`                    JAX, with or without optax
:mod:`.sklearn`                scikit-learn's models with `partial_fit`
:mod:`.tensorflow`             variables of TensorFlow; through `paceline.attach_arrays`
:mod:`.keras`                  Keras 3 on JAX, torch and TensorFlow
=============================  =============================================================================
"""
