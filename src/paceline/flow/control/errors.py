# SPDX-License-Identifier: Apache-2.0
"""What a worker hears when the control plane will not have it, or not any more."""

from __future__ import annotations

from paceline.errors import MismatchError, PeerLostError

EXPELLED = 75
"""Exit code of a worker that was given up: a fresh process may come in its place (sysexits: try again later)."""


class GivenUpError(PeerLostError):
    """The control plane has given this worker up and the others go on without it; a fresh process may come."""


class OverError(GivenUpError):
    """This worker came when the others had come to the end of the program: it has nothing to do, and all is well."""


class RefusedError(MismatchError):
    """The control plane does not take this worker: it runs another program, there is no room, or it was given up."""
