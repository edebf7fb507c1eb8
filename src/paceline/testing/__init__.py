# SPDX-License-Identifier: Apache-2.0
"""What rules and runs must obey, for tests: :mod:`~paceline.testing.laws` has the laws of every rule, and
:mod:`~devtools.world` simulated machines, networks and disks, on which one seed decides what happens when.

>>> from paceline.testing import check_rule
>>> check_rule("bmuf(period=3)")
"""

from paceline.testing.laws import agree, check_outer, check_rule, one_worker_is_the_program, repeat, resume, slices

__all__ = ["agree", "check_outer", "check_rule", "one_worker_is_the_program", "repeat", "resume", "slices"]
