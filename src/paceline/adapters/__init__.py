# SPDX-License-Identifier: Apache-2.0
"""Floor 5, doors into training frameworks; each framework is imported by its own door only.

=============================  =============================================================================
:mod:`.lightning`              a strategy for the Trainer of Lightning
:mod:`.fabric`                 the same for Lightning's Fabric
:mod:`.hugging_face`           a callback for the Trainer of transformers
:mod:`.accelerate`             an `Accelerator`
=============================  =============================================================================
"""
