"""Ends the connections of a server whose calls have ended, so that new calls on them fail with UNAVAILABLE.

While gRPC's server shuts down, it resets arriving calls with CANCELLED, which clients do not retry, and it cannot
refuse them earlier. On a connection that is closed, calls fail with UNAVAILABLE, which clients retry elsewhere.
"""

from __future__ import annotations

import contextlib
import socket

from kestrel_grpc.frontends.grpc.connections.own_sockets import OwnSockets, is_listening


def hang_up(sockets: OwnSockets) -> None:
    """Accept no further connection, and send no more on the existing ones. What has been sent still arrives."""
    # Listening sockets first, so that clients cannot reconnect.
    for are_listening, how in ((True, socket.SHUT_RD), (False, socket.SHUT_WR)):
        for _, item in sockets.each():
            with contextlib.suppress(OSError):  # the peer has closed it
                if is_listening(item) is are_listening:
                    item.shutdown(how)
