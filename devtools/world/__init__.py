# SPDX-License-Identifier: Apache-2.0
"""Simulated machines, networks, disks and clocks: one seed decides all that happens, and replays it.

Code of this package runs in it unchanged where it takes threads, locks, clock, connections and files from
:mod:`paceline.core.runtime`.

>>> from paceline.core import runtime
>>> from devtools.world import World
>>> world, seen = World(seed=1), []
>>> def program():
...     runtime.sleep(3600)
...     seen.append(runtime.monotonic() >= 3600)
>>> process = world.machine("a").start(program, "waits an hour")
>>> world.run(lambda: process.dead, seconds=7200)
True
>>> seen
[True]
>>> world.close()
"""

from devtools.world.process import Process, SimMachine, World
from devtools.world.scheduler import Broken, Killed

__all__ = ["Broken", "Killed", "Process", "SimMachine", "World"]
