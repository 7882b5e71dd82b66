"""Local processes on one host, nothing more; many hosts belong to torchrun and the cluster's scheduler."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def loopback_store() -> TCPStore:
    """A store served by this process on a free port of the loopback interface only.

    `TCPStore(host, port, is_master=True)` by itself listens on every interface, so the socket is bound here and handed over.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def gloo_on_loopback() -> dict[str, str]:
    """The environment that makes gloo listen on the loopback interface only, where there is one of a known name."""
    names = {name for _, name in socket.if_nameindex()}
    name = next((name for name in ("lo", "lo0") if name in names), None)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}
