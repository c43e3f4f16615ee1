"""The socket that a server listens on, opened before a model is: an address that cannot be had is said at once."""

from __future__ import annotations

import socket

from forerun.errors import BadRequest


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadRequest(f"cannot listen on {host}: {error}", "give an address of this machine") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(1024)
    except OSError as error:
        made.close()
        raise BadRequest(f"cannot listen on {host} port {port}: {error}", "choose another --port or --host") from None
    return made
