# SPDX-License-Identifier: Apache-2.0
"""Receipts: what each worker of a run brought and took at every merge, as a chain of hashes that is sealed at the end.

::

    DIR/rank-000.jsonl    the chain of worker 0, a line of JSON for each merge (:mod:`.chain`)
    DIR/seal-0.json       what the launcher of host 0 signed when its workers had ended (:mod:`.seal`)

:mod:`.audit` checks them and counts samples, :mod:`.verify_command.again` compares a recomputed chain.
"""
