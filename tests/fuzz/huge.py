"""Clients that reply with huge numbers, in form and finite: a method must go on without them or say that it failed."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from test_conformance import FIRST, Case

from coterie.experiment.build import assemble
from coterie.experiment.loop import Result, run_rounds
from coterie.federation import Call, Replies
from coterie.federation.stages.base import Stage, StageState, staged
from coterie.federation.tree import put, tree_map

SIZES = {
    "1e18": (1e18,),  # its square is finite in float32
    "1e30": (1e30,),
    "3e38": (3e38,),
    "-3e38": (-3e38,),
    "mixed": (3e38, -3e38, float("inf"), 1e30, float("nan")),
    "1e160": (1e160,),  # infinite in float32
}
"""By name, the numbers that hostile clients send in turn."""
HOSTILE = {"one": (1,), "three": (0, 2, 4)}
"""The hostile clients of five."""
DTYPES = ("float32", "float64")
OUTCOMES = ("finished", "diverged", "failed")


@dataclass(frozen=True)
class Huge(Stage):
    """A stage in which some clients reply with these numbers whatever they are asked."""

    key: ClassVar[str] = "attack"

    numbers: tuple[float, ...]
    clients: tuple[int, ...]

    def apply(self, call: Call, replies: Replies, state: StageState) -> tuple[Replies, StageState]:
        bad = torch.isin(replies.ids, torch.tensor(self.clients))
        return replies._replace(values=put(replies.values, bad, tree_map(self._lie, _rows(replies, bad)))), state

    def _lie(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        numbers = torch.tensor(self.numbers, dtype=torch.float64).to(leaf.dtype)
        return numbers.repeat(leaf.numel() // len(numbers) + 1)[: leaf.numel()].reshape(leaf.shape)


def _rows(replies: Replies, which: torch.Tensor) -> Any:
    return tree_map(lambda leaf: leaf[which] if isinstance(leaf, torch.Tensor) else leaf, replies.values)


def run(case: Case, size: str, hostile: str, dtype: str) -> Result:
    """A short run in which hostile clients send numbers of that size."""
    parts = assemble(case.config(dtype=dtype))
    engine = staged(parts.fed.engine, Huge(SIZES[size], HOSTILE[hostile]))
    return run_rounds(parts._replace(fed=replace(parts.fed, engine=engine)), None)


EVERY = [(case, size, hostile, dtype) for case in FIRST for size in SIZES for hostile in HOSTILE for dtype in DTYPES]
"""The whole campaign."""
