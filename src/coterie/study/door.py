"""The door of a SuperLink: what partners reach of it, over TLS.

Flower serves three interfaces on one port: for SuperNodes, for the command line, and for its own processes. Whoever
reaches the second can start runs. So the SuperLink itself listens on loopback, and this process hands on the calls of
SuperNodes (`/v1/fleet/`) and nothing else. SuperNodes sign their calls with their keys, which the SuperLink checks.
"""

import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn

PATHS = re.compile(r"/v1/fleet/[a-z-]+")  # as it was sent, before anything is decoded
LARGEST = 32 << 20  # bytes of a call; Flower sends what is larger in chunks of 5 MiB
PASSED = frozenset({"content-length", "connection", "host", "transfer-encoding", "keep-alive"})  # of this hop alone

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Door:
    """An ASGI application that hands calls of SuperNodes on.

    Args:
        upstream: the address of the SuperLink, https://127.0.0.1:port.
        authority: the certificate that the SuperLink's own is checked by.
    """

    def __init__(self, upstream: str, authority: Path) -> None:
        self.upstream = upstream
        context = ssl.create_default_context(cafile=str(authority))
        self.client = httpx.AsyncClient(verify=context, timeout=300.0, limits=httpx.Limits(), trust_env=False)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one call."""
        if scope["type"] != "http":
            return
        path = scope["raw_path"].decode("latin-1")
        if scope["method"] != "POST" or not PATHS.fullmatch(path):
            await _answer(send, 404, [], b"")
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        body = await _body(receive) if declared.isdigit() and int(declared) <= LARGEST else None
        if body is None:
            await _answer(send, 413, [], b"")
            return
        headers = [(name, value) for name, value in scope["headers"] if name.decode().lower() not in PASSED]
        try:
            reply = await self.client.post(f"{self.upstream}{path}", content=body, headers=headers)
        except httpx.HTTPError:
            await _answer(send, 502, [], b"")
            return
        kept = [(name, value) for name, value in reply.headers.raw if name.decode().lower() not in PASSED]
        kept = [(name, value) for name, value in kept if name.lower() != b"content-encoding"]  # it is unpacked here
        await _answer(send, reply.status_code, kept, reply.content)


async def _body(receive: Receive) -> bytes | None:
    """The body of a call; None where it is too large, or the caller has gone before its end."""
    parts = bytearray()
    while True:
        event = await receive()
        parts += event.get("body", b"")
        if len(parts) > LARGEST or event["type"] == "http.disconnect":
            return None
        if not event.get("more_body"):
            return bytes(parts)


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def server(door: Door, host: str, port: int, certificate: Path, key: Path) -> uvicorn.Server:
    """The server of a door; it runs until `should_exit` is set."""
    config = uvicorn.Config(
        door,
        host=host,
        port=port,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        log_level="warning",
        lifespan="off",
        access_log=False,
        ws="none",
    )
    return uvicorn.Server(config)


async def serve(front: uvicorn.Server, door: Door) -> None:
    """Run the server of a door until its end, and close what the door has open."""
    try:
        await front.serve()
    finally:
        await door.client.aclose()
