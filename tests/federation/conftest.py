"""Small federations: one without a model for the verbs, one with a network for the engine."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.federation import Federation, LocalEngine, Shard, pack


@pytest.fixture
def tiny() -> Callable[..., Federation]:
    """Client k of n holds two rows of the number k, the target two of the number 100; there is no model."""

    def make(n: int = 4, *, mode: str = "vmap", chunk: int | None = None, **options: Any) -> Federation:
        train = pack([torch.full((2, 1), float(k)) for k in range(n)])
        target = Shard(None, None, pack([torch.full((2, 1), 100.0)]).client(0))
        return Federation.on(LocalEngine(None, train, None, target, mode=mode, chunk=chunk), **options)

    return make


@pytest.fixture
def shards() -> Callable[..., list[tuple[Tensor, Tensor]]]:
    """Classification shards of the given sizes: Gaussian inputs, three classes."""

    def make(sizes: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return [
            (torch.randn(n, *shape, dtype=dtype, generator=generator), torch.randint(3, (n,), generator=generator))
            for n in sizes
        ]

    return make
