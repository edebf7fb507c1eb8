# SPDX-License-Identifier: Apache-2.0
"""Every error that paceline raises on purpose.

::

    PacelineError
    ├── RuleError (ValueError)           the text or the numbers of a rule make no sense
    ├── UnsupportedError (ValueError)    the model, the optimizer or the loader cannot be served so
    ├── MismatchError (ValueError)       the workers do not agree on what they train
    │   └── ElsewhereError               some workers make a call that others do not
    ├── CheckpointError (ValueError)     a saved state is damaged or does not fit
    ├── DataError (ValueError)           a file of data is missing, damaged or of no kind that can be read
    ├── NotServedError (ValueError)      a source will not give a file, however often it is asked
    ├── CacheError (RuntimeError)        the cache has no room or no directory, or a source is lost
    │   └── CorruptFileError             what came is not what its source, or the caller, says it must be
    ├── NonFiniteError (RuntimeError)    no worker has a finite contribution left
    ├── DesyncError (RuntimeError)       workers that must hold the same bits do not
    ├── PeerLostError (RuntimeError)     somebody did not answer before the deadline
    └── ClosedError (RuntimeError)       the run was closed before this call

A message says what is wrong, the value seen and what to do. On a cluster it ends with the rank and the host that
speak, which :meth:`paceline.World.sign` adds.
"""

from __future__ import annotations


class PacelineError(Exception):
    """The root of the tree: `except paceline.PacelineError` catches all of it and nothing else."""


class RuleError(PacelineError, ValueError):
    """A rule's name, argument or value is not one that exists."""


class UnsupportedError(PacelineError, ValueError):
    """What was given to `attach` (or changed after it) cannot work under this rule."""


class MismatchError(PacelineError, ValueError):
    """Workers disagree on the rule, the model's shape or the data."""


class ElsewhereError(MismatchError):
    """Workers made different calls, such as `run.save` on one of them only; nothing under way will be answered."""


class CheckpointError(PacelineError, ValueError):
    """A checkpoint is missing, damaged or made by another program."""


class DataError(PacelineError, ValueError):
    """A file of data is missing, damaged or not of a kind that can be read; the message names file and place."""


class NotServedError(PacelineError, ValueError):
    """The source will not give this file, however often it is asked."""


class CacheError(PacelineError, RuntimeError):
    """The cache cannot bring a file: no room, no directory, or a source that does not answer."""


class CorruptFileError(CacheError):
    """Every download of a file had the wrong size or the wrong checksum."""


class NonFiniteError(PacelineError, RuntimeError):
    """Every worker's contribution holds inf or nan, so there is nothing left to average."""


class DesyncError(PacelineError, RuntimeError):
    """Workers hold different bits where the rule says that they hold the same."""


class PeerLostError(PacelineError, RuntimeError):
    """A worker died, hung or left before the others were done; the message names it."""


class ClosedError(PacelineError, RuntimeError):
    """The run is closed; attach again to go on."""


EXPELLED = 75
"""Exit code of a worker that was given up: a fresh process may come in its place (sysexits: try again later)."""


class GivenUpError(PeerLostError):
    """The control plane has given this worker up and the others go on without it; a fresh process may come."""


class OverError(GivenUpError):
    """This worker came when the others had come to the end of the program: it has nothing to do, and all is well."""


class RefusedError(MismatchError):
    """The control plane does not take this worker: it runs another program, there is no room, or it was given up."""
