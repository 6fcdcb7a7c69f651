"""What is fuzzed: readers of files and settings, each with sound examples that are mutated.

A target accepts an input, or refuses it by an error that says why (`CoterieError`); anything else is a bug. Used by
test_fuzz.py for a moment and by `python -m benchmarks.robustness fuzz` for as long as one likes.
"""

import gzip
import json
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "problems"))

from fake_data import EKMAN, EMOTIONS, PIXELS, covtype_text, idx

from coterie.errors import CoterieError
from coterie.experiment import checkpoint
from coterie.experiment.config import load, parse_sets
from coterie.federation import Memory
from coterie.problems.data.cifar import read_binary
from coterie.problems.data.covtype import read_table
from coterie.problems.data.goemotions import read_comments, read_emotions, read_mapping
from coterie.problems.data.idx import read_idx

WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)


class Target(NamedTuple):
    """A reader of bytes, with sound examples."""

    name: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], None]

    def accepts(self, data: bytes, place: Path) -> bool:
        """Whether it takes this input; refused is fine, any other exception goes through."""
        try:
            self.read(data, place)
        except CoterieError:
            return False
        return True


def mutated(target: Target, number: int) -> bytes:
    """The number-th input of a target: an example with a few things wrong, sometimes bytes at random or gzipped."""
    chance = random.Random(f"{target.name} {number}")
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(200))
    seeds = _seeds(target)
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, 4)):
        _mutate(data, chance, seeds)
    packed = chance.random()
    if packed < 0.1:
        return gzip.compress(bytes(data))
    if packed < 0.15:  # a broken stream
        return gzip.compress(bytes(data))[: chance.randrange(40)]
    return bytes(data)


@cache
def _seeds(target: Target) -> list[bytes]:
    return target.seeds()


def _mutate(data: bytearray, chance: random.Random, seeds: list[bytes]) -> None:
    place = chance.randrange(min(len(data), chance.choice((16, 200, 10**9))) or 1) if data else 0
    size = chance.choice((1, 2, 4, 8, chance.randrange(1, 65)))
    kind = chance.randrange(7)
    if kind == 0 and data:
        data[place] ^= 1 << chance.randrange(8)
    elif kind == 1:
        word = chance.choice(WORDS) % 256 ** min(size, 8)
        data[place : place + size] = word.to_bytes(size, chance.choice(("little", "big")))
    elif kind == 2:
        del data[place:]
    elif kind == 3:
        del data[place : place + size]
    elif kind == 4:
        data[place:place] = chance.randbytes(size)
    elif kind == 5:
        data[place:place] = data[place : place + size] * chance.choice((1, 2, 100))
    else:
        other = chance.choice(seeds)
        data[place:] = other[chance.randrange(len(other)) :]


def _file(reader: Callable[[Path], object]) -> Callable[[bytes, Path], None]:
    def read(data: bytes, place: Path) -> None:
        path = place / "input.bin"
        path.write_bytes(data)
        reader(path)

    return read


def _configuration(path: Path) -> None:
    load(path)


def _settings(data: bytes, place: Path) -> None:
    load(sets=parse_sets(data.decode("utf-8", "replace").split("\n")))


CONFIGURATIONS = (
    'version = 1\n[run]\nmethod = "meritfed"\nrounds = 5\n[method]\nstep = 0.1\n[federation]\nactive = 0.5\n',
    '[run]\nproblem = "quadratic"\nbaselines = ["fedavg"]\n[problem]\nclients = 4\n[faults]\ncrash = 0.1\n',
    '[run]\nseed = 9223372036854775807\ndtype = "float64"\n[method]\nmirror_steps = 3\n[privacy]\nclip = 1.0\n',
    f"[run]\nrounds = {'[' * 3000}",
    "[method]\nstep = nan\n[federation]\nnorm = inf\ncount = -1\nclip = 1e400\n",
)
SETTINGS = (
    "method.step=0.1\nrun.rounds=3",
    "run.baselines=[]\nproblem.active=.5\nfaults.any=0.1",
    'run.method="krum"\nproblem.clients=1e400\nfederation.norm=-nan',
    f"method.step={'[' * 3000}",
    "run.rounds=999999999999999999999999\nrun.seed=-1\na.b.c=1\n.=\n=",
)


class Remembered(NamedTuple):
    x: torch.Tensor
    memory: Memory
    step: int


def _state(value: float) -> Remembered:
    return Remembered(torch.full((5,), value), Memory(torch.full((3, 2), value)), int(value))


PROGRESS = checkpoint.Progress(1, 0.5, {"total": {}, "by_cause": {}}, {"metrics.jsonl": 7})


def _checkpoints() -> list[bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        checkpoint.save(Path(place), _state(2.0), PROGRESS, {"run.seed": 0})
        return [next(Path(place).iterdir()).read_bytes()]


def _checkpoint(data: bytes, place: Path) -> None:
    """Refused, or every value as it was saved."""
    folder = place / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "00000001.safetensors").write_bytes(data)
    state, progress, _ = checkpoint.load(folder, _state(0.0), {"run.seed": 0})
    right = _state(2.0)
    assert progress == PROGRESS
    assert torch.equal(state.x, right.x)
    assert torch.equal(state.memory.payload, right.memory.payload)
    assert state.step == right.step


def _images(dimensions: int) -> Callable[[], list[bytes]]:
    def make() -> list[bytes]:
        shape = (3, 4, 4)[:dimensions]
        return [idx(np.arange(np.prod(shape), dtype=np.uint8).reshape(shape))]

    return make


def _binary_batches() -> list[bytes]:
    return [bytes([label]) + bytes(PIXELS) for label in (0, 9)]


def _comments() -> list[bytes]:
    return ["\n".join(f"text {k}\t{k}\tid{k}" for k in range(5)).encode(), b"a\t0,1\tb\nc\t2\td\n"]


def _mappings() -> list[bytes]:
    return [json.dumps(EKMAN).encode(), b"[" * 5000, b'{"a": ' * 5000]


TARGETS = (
    Target("configuration file", lambda: [text.encode() for text in CONFIGURATIONS], _file(_configuration)),
    Target("settings (--set)", lambda: [text.encode() for text in SETTINGS], _settings),
    Target("checkpoint", _checkpoints, _checkpoint),
    Target("idx images", _images(3), _file(lambda path: read_idx(path, 3))),
    Target("idx labels", _images(1), _file(lambda path: read_idx(path, 1))),
    Target("CIFAR-10, binary", _binary_batches, _file(read_binary)),
    Target("Covertype", lambda: [covtype_text(4).encode()], _file(read_table)),
    Target("GoEmotions comments", _comments, _file(lambda path: read_comments(path, 28))),
    Target("GoEmotions names", lambda: ["\n".join(EMOTIONS).encode()], _file(read_emotions)),
    Target("GoEmotions groups", _mappings, _file(lambda path: read_mapping(path, EMOTIONS))),
)
