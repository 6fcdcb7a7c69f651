"""Orders as calls of Ray actors. Tensors that several orders share, those of a broadcast, are put into store once."""

from collections.abc import Collection, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from numpy import concatenate
from ray.exceptions import RayActorError, RayError

from coterie import machine
from coterie.engines.ray.group import LARGE, Group, GroupSpec
from coterie.engines.ray.memory import MemoryBundles
from coterie.errors import RunError
from coterie.federation.remote import Address, Message, Trouble


class RayTransport:
    """One actor per group of clients. An actor that is lost is started again by Ray, and refilled here.

    Args:
        specs: what each actor starts with.
        memory: the folder for client memory, so that a run can be resumed; None keeps it in this process.
        patience: seconds to wait for the actors to start.
        chosen: mode and chunk of the local engine, as they are written into the resolved configuration.
        code: the modules and files of plug-ins, which the actors import before they open their specification.
    """

    def __init__(
        self,
        specs: list[GroupSpec],
        *,
        memory: Path | None,
        patience: float,
        chosen: dict[str, Any] | None = None,
        code: tuple[str, ...] = (),
    ) -> None:
        self.chosen = chosen
        self.memory = MemoryBundles(memory)
        environment = {"env_vars": machine.environment(machine.wanted())}  # a cluster that was there has its own
        actor = ray.remote(Group).options(num_cpus=1, max_restarts=-1, max_task_retries=0, runtime_env=environment)
        self._specs = [ray.put(spec) for spec in specs]  # held, for actors that are started again
        self.actors: dict[Address, Any] = {i: actor.remote([spec], code) for i, spec in enumerate(self._specs)}
        self.memory.of = {group: set(self.memory.bundles) for group in self.actors}
        self._mending: dict[Address, Any] = {group: self._refill(group) for group in self.actors}
        self._calls: dict[Any, Address] = {}
        self.processes: dict[Address, int] = {}
        _, late = ray.wait(list(self._mending.values()), num_returns=len(self.actors), timeout=patience)
        if late:
            self.close()
            raise RunError(
                f"{len(late)} of {len(specs)} Ray actors did not start within {patience:g} s; is the cluster "
                "busy? Lower engine.workers, or raise federation.patience."
            )
        for group, ref in list(self._mending.items()):
            if (trouble := self._mended(group, ref)) is not None:
                self.close()
                raise RunError(f"a Ray actor does not start: {trouble.reason}")

    def nodes(self) -> Mapping[Address, int | None]:
        """All groups; Ray brings back those that were lost."""
        return dict.fromkeys(self.actors)

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        """Call, wait, collect; the call of a lost actor begins when it is there again and refilled."""
        deadline = monotonic() + timeout
        answers: list[tuple[Address, bytes | Trouble]] = []
        waiting, parts = set(needed), _split(orders)
        for group in orders.keys() - self._mending.keys():
            self._call(group, *parts.pop(group))
        while self._calls or parts:
            mending = {self._mending[group]: group for group in parts}
            left = max(0.0, deadline - monotonic()) if waiting else 0.0
            at_once = 1 if mending or not waiting.issuperset(self._calls.values()) else len(self._calls)
            done, _ = ray.wait([*self._calls, *mending], num_returns=at_once, timeout=left)
            if not done:
                break
            found = self._replies([ref for ref in done if ref in self._calls])
            for group in (mending[ref] for ref in done if ref in mending):
                trouble = self._mended(group, self._mending[group])
                order = parts.pop(group)
                if trouble is None:
                    self._call(group, *order)
                else:
                    found.append((group, trouble))
            answers += found
            waiting -= {group for group, _ in found}
        return answers

    def close(self) -> None:
        """End all actors."""
        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)
        self.actors = {}

    def _call(self, group: Address, head: bytes, tail: Any) -> None:
        self._calls[self.actors[group].handle.remote(head, tail)] = group

    def _replies(self, refs: list[Any]) -> list[tuple[Address, bytes | Trouble]]:
        """The replies that are there; where nothing went wrong, one call fetches them all."""
        try:
            values: list[Any] = ray.get(refs)
        except RayError:
            values = [None] * len(refs)
        groups = [self._calls.pop(ref) for ref in refs]
        return [(g, self._reply(g, ref, value)) for g, ref, value in zip(groups, refs, values, strict=True)]

    def _reply(self, group: Address, ref: Any, value: Any) -> bytes | Trouble:
        try:
            reply, news, needed = ray.get(ref) if value is None else value
        except RayActorError as error:
            self._mending[group] = self._refill(group)
            return Trouble("lost", f"its actor is gone ({type(error).__name__})")
        except RayError as error:
            return Trouble("client error", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        if news is not None:
            self.memory.add(group, *news)
        self.memory.only(group, needed)
        return reply if isinstance(reply, bytes) else reply.tobytes()

    def _refill(self, group: Address) -> Any:
        """Restore the client memory of an actor; Ray repeats this until the actor is there."""
        bundles = {name: self.memory.bundles[name] for name in self.memory.of[group]}
        return self.actors[group].refill.options(max_task_retries=-1).remote(bundles)

    def _mended(self, group: Address, ref: Any) -> Trouble | None:
        """Whether an actor is there again."""
        try:
            self.processes[group] = ray.get(ref)
        except RayError as error:
            self._mending[group] = self._refill(group)
            return Trouble("lost", f"its actor does not come back ({_first_line(error)})")
        del self._mending[group]
        return None


def _split(orders: Mapping[Address, Message]) -> dict[Address, tuple[bytes, Any]]:
    """Each order as its structure and its tensors; tensors that several orders share become one object in store.
    Small orders stay whole.
    """
    parts: dict[Address, tuple[bytes, Any]] = {}
    stored: dict[Any, Any] = {}
    for group, order in orders.items():
        if len(order) - len(order.head) < LARGE:
            parts[group] = bytes(order), None
            continue
        if order.location not in stored:
            tensors = order.tensors
            stored[order.location] = ray.put(tensors[0] if len(tensors) == 1 else concatenate(tensors))
        parts[group] = order.head, stored[order.location]
    return parts


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"
