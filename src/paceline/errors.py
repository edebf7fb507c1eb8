# SPDX-License-Identifier: Apache-2.0
"""The errors that paceline raises; all are `PacelineError`, and a ValueError or a RuntimeError as well.

A message says what is wrong, the value seen and what to do. On a cluster it ends with the rank and the host
(:meth:`paceline.World.sign`).
"""

from __future__ import annotations


class PacelineError(Exception):
    """The base class: `except paceline.PacelineError` catches all errors of paceline and no others."""


class RuleError(PacelineError, ValueError):
    """A rule's name, argument or value is invalid."""


class UnsupportedError(PacelineError, ValueError):
    """An argument of `attach`, or a later change of it, does not work under this rule."""


class MismatchError(PacelineError, ValueError):
    """Workers disagree on the rule, the model's shape or the data."""


class ElsewhereError(MismatchError):
    """Workers made different calls, such as `run.save` on one of them only; pending exchanges cannot complete."""


class CheckpointError(PacelineError, ValueError):
    """A checkpoint is missing, damaged or made by another program."""


class DataError(PacelineError, ValueError):
    """A data file is missing, damaged or of an unknown format; the message names file and position."""


class NotServedError(PacelineError, ValueError):
    """The source refuses this file; a retry does not help."""


class CacheError(PacelineError, RuntimeError):
    """The cache cannot get a file: no room, no directory, or a source that does not answer."""


class CorruptFileError(CacheError):
    """Every download of a file had the wrong size or the wrong checksum."""


class NonFiniteError(PacelineError, RuntimeError):
    """Every worker's contribution has inf or nan, so there is nothing to average."""


class DesyncError(PacelineError, RuntimeError):
    """Workers hold different bits where the rule requires the same."""


class WorkerFailedError(PacelineError, RuntimeError):
    """A process that `paceline.launch` started failed; the message ends with its traceback."""


class PeerLostError(PacelineError, RuntimeError):
    """A worker died, hung or left early; the message names it."""


class ClosedError(PacelineError, RuntimeError):
    """The run is closed; attach again to continue."""


EXPELLED = 75
"""Exit code of a worker that was declared lost: a new process may replace it (sysexits: try again later)."""
LEFT = 85
"""Exit code of a worker, and of a launcher, that left an elastic run in order; started again, it joins again."""


class GivenUpError(PeerLostError):
    """The control plane has declared this worker lost, and the run continues without it; a new process may join."""


class OverError(GivenUpError):
    """This worker joined after the end of the run, and has nothing to do; no failure."""


class RefusedError(MismatchError):
    """The control plane refuses this worker: it runs another program, was declared lost, or the run is full."""
