"""Orders as calls of FLARE's Collab API: one call per site, all at once, payloads as bytes."""

from collections.abc import Callable, Collection, Iterable, Mapping
from time import monotonic, sleep
from typing import Any, Protocol

from coterie.errors import RunError
from coterie.federation.remote import Address, Message, Trouble

ASIDE = 60.0  # seconds for calls that the server does not wait for: a site may have to start its compute process first
PROBE = 5.0  # seconds without a reply after which a site is asked whether it is there
NOTHING = b""  # the order to do nothing, at which a site's own process answers
LOST = "Lost"  # the error of a site whose compute process has ended


class Stream(Protocol):
    """The result of a call of one site that FLARE is still waiting for: one outcome, sooner or later."""

    failures: Mapping[str, Any]

    def __len__(self) -> int:
        """How many results have come."""

    def __iter__(self) -> Any:
        """Wait for the result; nothing where there is a failure."""


Call = Callable[[str, bytes, float], Stream]


class FlareTransport:
    """The sites of a job.

    All sites are listed, also those that cannot be reached: the engine gives them no work until they declare their
    clients, and does not wait for that.

    Args:
        call: sends an order to a site and does not wait.
        clients: the client of each site.
        aborted: whether FLARE has aborted the job.
        own_rows: whether sites bring rows of their own, whose numbers the server does not know.
    """

    fixed = True  # FLARE admits no site to a job that has begun

    def __init__(
        self, call: Call, clients: Mapping[str, int | None], aborted: Callable[[], bool], *, own_rows: bool = False
    ) -> None:
        self.call, self.aborted, self.own_rows = call, aborted, own_rows
        self.clients: dict[Address, int | None] = dict(clients.items())
        self._pending: list[tuple[str, Stream]] = []

    def nodes(self) -> Mapping[Address, int | None]:
        """All sites of the job; FLARE knows them by their certificates."""
        return dict(self.clients)

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        """Call all sites and wait for those that are needed; replies of others are returned when they are there."""
        calls = [
            (str(site), self.call(str(site), bytes(order), timeout if site in needed else max(timeout, ASIDE)))
            for site, order in orders.items()
        ]
        waiting = [(site, stream) for site, stream in calls if site in needed]
        aside = [*self._pending, *((site, stream) for site, stream in calls if site not in needed)]
        answers: list[tuple[Address, bytes | Trouble]] = []
        gone = self._wait(waiting)
        for site, stream in waiting:
            answers += [(site, gone[site])] if site in gone else self._outcome(site, stream)
        self._pending = [(site, stream) for site, stream in aside if not _is_over(stream)]
        for site, stream in aside:
            if _is_over(stream):
                answers += self._outcome(site, stream)
        if self.aborted():
            raise RunError("FLARE has aborted the job; submit it again to go on from the last checkpoint.")
        return answers

    def _wait(self, waiting: Collection[tuple[str, Stream]]) -> dict[str, Trouble]:
        """Wait for replies; the sites that cannot be reached any more, for whose replies nobody waits."""
        begun, probes, gone = monotonic(), dict[str, tuple[float, Stream]](), dict[str, Trouble]()
        while late := [site for site, stream in waiting if site not in gone and not _is_over(stream)]:
            waited = monotonic() - begun
            sleep(min(waited / 20 + 0.0005, 0.25))
            for site in late:
                asked, probe = probes.get(site, (0.0, None))
                trouble = _trouble(site, probe) if probe is not None and probe.failures else None
                if trouble is not None and trouble.kind == "lost":
                    gone[site] = trouble
                elif waited - asked > PROBE:
                    probes[site] = waited, self.call(site, NOTHING, PROBE)
        return gone

    def _outcome(self, site: str, stream: Stream) -> Iterable[tuple[Address, bytes | Trouble]]:
        """The reply of a site, or why there is none; a timeout is left to the engine."""
        for _, reply in stream:
            if isinstance(reply, bytes):
                return [(site, reply)]
            return [(site, Trouble("rejected", "its reply is something else"))]
        trouble = _trouble(site, stream)
        return [] if trouble is None else [(site, trouble)]


def _trouble(site: str, stream: Stream) -> Trouble | None:
    """Why a site gave no reply; None where its time is over."""
    error = stream.failures.get(site)
    kind = str(getattr(error, "cause_type", ""))
    reason = str(getattr(error, "cause", error)).splitlines()[0][:200] if error else "FLARE gave no reason"
    if kind == "TimeoutError":
        return None
    if kind == LOST:
        return Trouble("lost", reason)
    if kind in ("str", "") or "rc=" in reason:  # FLARE's own return code: no client code was reached
        return Trouble("lost", f"the site cannot be reached ({reason})")
    return Trouble("client error", f"{kind}: {reason}")


def _is_over(stream: Stream) -> bool:
    return bool(len(stream) or stream.failures)
