# SPDX-License-Identifier: Apache-2.0
"""A listener's place at a relay, and the shorter way to another one of the same site.

Members of one site connect directly; so does everybody to a member that no router hides. If a direct
connection fails once, the relay is used from then on.
"""

from __future__ import annotations

from paceline.communication.sockets.channel import TLS, Channel, connect
from paceline.core import runtime
from paceline.errors import MismatchError, PeerLostError
from paceline_plugins.sites.relay.member import Adopt, RelayMember
from paceline_plugins.sites.relay.protocol import door_of, member_name, site

DIRECT_S = 2.0
"""Seconds of the one attempt to connect directly."""


class RelayedPlace:
    """A process's place at a relay.

    Args:
        where: the relay's address and port.
        tls: this process's certificate.
        adopt: gets the connections of members that called this one.
        timeout_s: seconds in which the relay must be reached.

    Attributes:
        door: of this process.
    """

    def __init__(self, where: tuple[str, int], tls: TLS, adopt: Adopt, timeout_s: float) -> None:
        nonce = runtime.token_hex(4)
        self._relay = RelayMember(where, member_name(tls.identity.id, nonce), tls, adopt, timeout_s)
        self.door = door_of(nonce, self._relay.site)
        self._unreachable: set[tuple[str, int]] = set()

    @property
    def relay(self) -> RelayMember:
        """For calls of members that have no door."""
        return self._relay

    def dial(
        self, address: tuple[str, int], certificate: str, door: str, peer: str, timeout_s: float, tls: TLS | None
    ) -> Channel:
        """A channel to the member with that certificate and door, directly if there is a way; see `connect`."""
        if self._near(address, door):
            channel = self._directly(address, certificate, peer, tls)
            if channel is not None:
                return channel
        return self._relay.connect(member_name(certificate, door.partition("@")[0]), peer, timeout_s)

    def _near(self, address: tuple[str, int], door: str) -> bool:
        """Whether a direct connection may succeed."""
        hidden = site(door) != address[0]
        return address not in self._unreachable and not (hidden and site(door) != site(self.door))

    def _directly(self, address: tuple[str, int], certificate: str, peer: str, tls: TLS | None) -> Channel | None:
        """A direct connection to that very member; None if there is none."""
        try:
            channel = connect(*address, peer, DIRECT_S, tls)
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
