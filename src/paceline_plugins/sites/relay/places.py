# SPDX-License-Identifier: Apache-2.0
"""The dialer of runs over several sites: a listener's place at a relay, and the shorter way within a site.

Members of one site connect directly; so does everybody to a member that no router hides. If a direct
connection fails once, the relay is used from then on.
"""

from __future__ import annotations

from paceline.communication.sockets.channel import TLS, Channel, connect
from paceline.core import runtime
from paceline.errors import MismatchError, PeerLostError
from paceline_plugins.sites.relay.member import Adopt, RelayMember
from paceline_plugins.sites.relay.protocol import CONTROL_NAME, address_of, member_name, site

DIRECT_S = 2.0
"""Seconds of the one attempt to connect directly."""


class RelayedPlace:
    """A process's place at a relay.

    Args:
        where: the relay's address and port.
        tls: this process's certificate.
        adopt: gets the connections of members that called this one.
        timeout_s: seconds in which the relay must be reached.
    """

    def __init__(self, where: tuple[str, int], tls: TLS, adopt: Adopt, timeout_s: float) -> None:
        nonce, self._tls = runtime.token_hex(4), tls
        self._relay = RelayMember(where, member_name(tls.identity.id, nonce), tls, adopt, timeout_s)
        self.address = address_of(nonce, self._relay.site)  # of this process there
        self._unreachable: set[tuple[str, int]] = set()

    def dial_control(self, peer: str, timeout_s: float) -> Channel:
        """A channel to the control plane, which has no address; `peer`: its name for messages."""
        return self._relay.connect(CONTROL_NAME, peer, timeout_s)

    def dial(self, listener: tuple[str, int], certificate: str, relayed: str, peer: str, timeout_s: float) -> Channel:
        """A channel to another member.

        Args:
            listener: the address and port where it listens.
            certificate: ID of its certificate.
            relayed: its address at the relay.
            peer: its name, for messages.
            timeout_s: see `connect`.
        """
        if self._near(listener, relayed):
            channel = self._directly(listener, certificate, peer)
            if channel is not None:
                return channel
        return self._relay.connect(member_name(certificate, relayed.partition("@")[0]), peer, timeout_s)

    def _near(self, listener: tuple[str, int], relayed: str) -> bool:
        """Whether a direct connection may succeed."""
        hidden = site(relayed) != listener[0]
        return listener not in self._unreachable and not (hidden and site(relayed) != site(self.address))

    def _directly(self, address: tuple[str, int], certificate: str, peer: str) -> Channel | None:
        """A direct connection to that very member; None if there is none."""
        try:
            channel = connect(*address, peer, DIRECT_S, self._tls)
        except (PeerLostError, MismatchError, OSError):
            self._unreachable.add(address)
            return None
        if channel.identity is not None and channel.identity.id != certificate:  # another host with that address
            channel.close()
            self._unreachable.add(address)
            return None
        return channel

    def close(self) -> None:
        """Leave the relay."""
        self._relay.close()
