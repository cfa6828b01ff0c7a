"""Ends the connections of servers whose calls have ended, so that no client is told that its call was cancelled.

While gRPC's server shuts down it resets calls that arrive with CANCELLED, which clients do not retry, and it has no
way to turn them away before. A connection that is closed means UNAVAILABLE to the calls on it, which clients retry
elsewhere.
"""

from __future__ import annotations

import contextlib
import socket

from kestrel_grpc.frontends.grpc.connections.own_sockets import OwnSockets, is_listening


def hang_up(sockets: OwnSockets) -> None:
    """Accept no further connection, and send no more on those that there are. What has been sent still arrives."""
    # First those that accept, so that no connection is made in place of one that is ended.
    for are_listening, how in ((True, socket.SHUT_RD), (False, socket.SHUT_WR)):
        for _, item in sockets.each():
            with contextlib.suppress(OSError):  # the peer has closed it
                if is_listening(item) is are_listening:
                    item.shutdown(how)
