"""Bytes over a stream: their length in eight bytes, then they themselves."""

import socket

MOST = 1 << 34
STALE = b"stale"  # what a worker of another run says


def send(line: socket.socket, data: bytes) -> None:
    """Send one frame."""
    line.sendall(len(data).to_bytes(8, "little"))
    line.sendall(data)


def receive(line: socket.socket) -> bytes:
    """Receive one frame; EOFError where the other side has hung up."""
    length = int.from_bytes(_exactly(line, 8), "little")
    if length > MOST:
        raise EOFError("this is no frame")
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = line.recv_into(view)
        if not got:
            raise EOFError("the other side has hung up")
        view = view[got:]
    return bytes(data)
