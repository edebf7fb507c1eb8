# SPDX-License-Identifier: Apache-2.0
"""Closed tools: a block is one invocation of the tool on each worker, and the model files that it writes are merged.

=====================  ===============================================================================
:mod:`.formats`        the formats of model files
:mod:`.placeholders`   `{model}` and the like in the tool's command
:mod:`.parts`          which part of the data a worker takes
:mod:`.plan`           the options of a run
:mod:`.invocation`     one invocation of the tool
:mod:`.workplace`      the files of a run: atomic, resumable
:mod:`.training`       the loop of a worker, and the rate of a block
:mod:`.worker`         the program of a worker
=====================  ===============================================================================
"""
