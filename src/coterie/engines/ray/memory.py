"""What clients remember, on its way: bundles that an actor hands out, and that the driver keeps for when it is lost."""

from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.federation.remote import Address, Limits, Names, Store
from coterie.federation.remote.codec import decode, encode
from coterie.federation.tree import Tree, row, stack, tree_flatten
from coterie.storage import write_atomically

Bytes = NDArray[np.uint8]
LIMITS = Limits(bytes=1 << 32, structure=1 << 28)  # one trust domain, and 10⁵ clients in a message


def as_array(data: bytes) -> Bytes:
    """Bytes in the form that Ray shares without a copy."""
    return np.frombuffer(data, dtype=np.uint8)


class BundleStore(Store):
    """Memory that is handed out as it is made, in one bundle an order, and taken back after a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: list[tuple[str, int, int, Tree]] = []
        self.bundles: dict[str, tuple[str, set[tuple[int, int]]]] = {}

    def put(self, run: str, client: int, version: int, memory: Tree) -> None:
        """Keep a version, and note that it is new."""
        super().put(run, client, version, memory)
        self.fresh.append((run, client, version, memory))

    def news(self) -> tuple[str, bytes] | None:
        """What was remembered since the last look, as a named bundle."""
        if not self.fresh:
            return None
        run, client, version, _ = self.fresh[0]
        name = f"{run}-{client}-{version}"
        self.bundles[name] = run, {(k, v) for _, k, v, _ in self.fresh}
        parts = []
        for _, some in groupby(self.fresh, key=lambda new: _form(new[3])):  # several works may keep different things
            _, clients, versions, memories = zip(*some, strict=True)
            parts.append((clients, versions, stack(list(memories))))
        self.fresh = []
        return name, encode((run, tuple(parts)))

    def needed(self) -> list[str]:
        """The bundles of which something is still in use."""
        here = {name for name, (run, what) in self.bundles.items() if what & self._kept.get(run, {}).keys()}
        self.bundles = {name: what for name, what in self.bundles.items() if name in here}
        return sorted(here)

    def refill(self, name: str, data: bytes, clients: set[int]) -> None:
        """Take a bundle back, as far as it is about these clients."""
        run, parts = decode(data, Names(), LIMITS)
        mine = set()
        for whose, versions, memories in parts:
            for i, (client, version) in enumerate(zip(whose, versions, strict=True)):
                if client in clients:
                    super().put(run, client, version, row(memories, i))
                    mine.add((client, version))
        if mine:
            self.bundles[name] = run, mine


def _form(memory: Tree) -> Any:
    leaves, structure = tree_flatten(memory)
    return str(structure), [(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


class MemoryBundles:
    """What clients remember, in bundles as they were made; with a folder, for a resumed run too."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.bundles: dict[str, Bytes] = {}
        if folder is not None and folder.is_dir():
            self.bundles = {path.stem: as_array(path.read_bytes()) for path in sorted(folder.glob("*.memory"))}
        self.of: dict[Address, set[str]] = {}

    def add(self, group: Address, name: str, data: Bytes) -> None:
        """Keep a bundle that a group made."""
        self.bundles[name] = np.array(data)  # Ray's own is gone with the reply
        self.of.setdefault(group, set(self.bundles)).add(name)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / f"{name}.memory", data.tobytes())

    def only(self, group: Address, names: Collection[str]) -> None:
        """Forget what no group needs any more."""
        self.of[group] = set(names)
        for name in self.bundles.keys() - set().union(*self.of.values()):
            del self.bundles[name]
            if self.folder is not None:
                (self.folder / f"{name}.memory").unlink(missing_ok=True)
