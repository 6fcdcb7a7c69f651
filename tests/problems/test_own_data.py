"""Data as people have them: mapped files, Datasets larger than memory, sequences of unequal length."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import coterie
from coterie.errors import UsageError
from coterie.federation import mapped, pack, shards
from coterie.federation.mapped import Arrays
from coterie.numerics import Draw


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = Draw.of(seed).normal(n, 4)
    return x, (x.sum(1) > 0).long()


def on_disk(folder: Path, x: Tensor, name: str) -> Any:
    array = np.memmap(folder / name, dtype=np.float32, mode="w+", shape=tuple(x.shape))
    array[:] = x.numpy()
    array.flush()
    return np.memmap(folder / name, dtype=np.float32, mode="r", shape=tuple(x.shape))


class Reading(Dataset):  # type: ignore[type-arg]
    """A Dataset that counts how often it is asked."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.asked = x, y, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.x[i], self.y[i]


def trained(given: Any, **more: Any) -> coterie.Fit:
    torch.manual_seed(0)
    made = coterie.Weighting.on(given, rows(8, 9), model=nn.Linear(4, 2), loss="cross_entropy", **more)
    return coterie.fit(made, coterie.methods.meritfed(step=0.2, mirror_steps=2, local_steps=2, batch=3), 3)


def test_mapped_files_and_large_datasets_give_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (6, 9)
    given = [rows(n, k) for k, n in enumerate(sizes)]
    torch.manual_seed(0)
    plain = coterie.Weighting.on(given, rows(8, 9), model=nn.Linear(4, 2), loss="cross_entropy")
    method = coterie.methods.meritfed(step=0.2, mirror_steps=2, local_steps=2, batch=3)
    in_memory = coterie.fit(plain, method, 3, mode="sequential")
    from_disk = trained([(on_disk(tmp_path, x, f"{k}.bin"), y) for k, (x, y) in enumerate(given)])
    assert from_disk.weights is not None
    assert in_memory.weights is not None
    assert torch.equal(from_disk.weights, in_memory.weights)
    assert from_disk.summary["events"] == {"warning": 1}
    monkeypatch.setattr(shards, "READ", 100)
    datasets = [Reading(x, y) for x, y in given]
    lazy = trained(datasets)
    assert lazy.weights is not None
    assert torch.equal(lazy.weights, in_memory.weights)
    assert "stay on disk" in lazy._result.events[0]["reason"]


def test_only_what_is_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "READ", 100)
    dataset = Reading(*rows(1000))
    stack = pack([dataset, rows(3, 1)]).to(dtype=torch.float64, device="cpu")
    assert stack.mapped
    assert dataset.asked < 10
    batch = stack.client(0).take(torch.tensor([5, 900, 5]))
    assert torch.equal(batch.inputs, dataset.x[[5, 900, 5]].double())
    across = torch.stack([rows(3, 1)[0][1], dataset.x[2]]).double()
    assert torch.equal(stack.columns[0][torch.tensor([1001, 2])], across)
    assert dataset.asked < 25
    assert torch.equal(torch.cat([b.inputs for b in stack.client(0).blocks(300)]), dataset.x.double())


def test_bad_numbers_on_disk_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(50)
    x[31, 2] = torch.nan
    with pytest.raises(UsageError, match=r"column 0 of client 1 holds NaN or infinity \(first in row 31\)"):
        pack([rows(3, 1), (on_disk(tmp_path, x, "bad.bin"), y)])
    monkeypatch.setattr(shards, "READ", 100)
    with pytest.raises(UsageError, match=r"column 0 of client 0 holds NaN or infinity \(first in row 31\)"):
        pack([Reading(x, y)]).client(0).all()
    with pytest.raises(UsageError, match="labels from 0 to 5, but the model has 2 outputs"):
        trained([(on_disk(tmp_path, rows(6)[0], "good.bin"), torch.arange(6))])


def test_changes_of_private_maps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "RELEASE", 0)
    on_disk(tmp_path, torch.ones(4, 2), "a.bin")
    private = np.memmap(tmp_path / "a.bin", dtype=np.float32, mode="c", shape=(4, 2))
    private[1] = 7.0
    source = Arrays((private,))
    assert [source.read(np.array([1]))[0].tolist() for _ in range(2)] == [[[7.0, 7.0]]] * 2
    shared = Arrays((np.memmap(tmp_path / "a.bin", dtype=np.float32, mode="r+", shape=(4, 2)),))
    shared.columns[0][2] = 3.0
    assert [shared.read(np.array([2]))[0].tolist() for _ in range(2)] == [[[3.0, 3.0]]] * 2


class Tagger(nn.Module):
    """The mean of embeddings without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(30, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.last((self.embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def padded(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    ids = pad_sequence([words for words, _ in items], batch_first=True)
    return {"ids": ids, "mask": (ids > 0).float(), "labels": torch.tensor([label for _, label in items])}


def sentences(n: int, seed: int) -> list[tuple[Tensor, int]]:
    lengths = Draw.of(seed).phase("length").integers(4, n).tolist()
    return [(Draw.of(seed).client(i).integers(29, 1 + k) + 1, i % 2) for i, k in enumerate(lengths)]


def test_sequences_of_unequal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Tagger()

    def fit(**options: Any) -> coterie.Fit:
        made = coterie.Weighting.on(
            [sentences(7, 1), sentences(5, 2)], sentences(6, 3), model=net, loss="cross_entropy", collate=padded
        )
        return coterie.fit(made, coterie.methods.fedavg(step=0.5, batch=3), 3, **options)

    together = fit(mode="sequential").variables
    for name, value in fit(mode="vmap").variables.items():
        torch.testing.assert_close(value, together[name])
    monkeypatch.setattr(shards, "READ", 100)  # now padding is by batch
    for name, value in fit().variables.items():
        torch.testing.assert_close(value, together[name])


@pytest.mark.parametrize(
    ("given", "collate", "complaint"),
    [
        ([sentences(4, 0)], None, "holds a list|not equally shaped|no numeric array"),
        (
            [TensorDataset(torch.ones(3, 2), torch.ones(3))],
            lambda items: 1 / 0,
            "collate fails on 1 items of client 0",
        ),
        ([rows(3)], padded, "client 0 is a tuple; with collate=, give torch Datasets or lists of items"),
        ([[]], padded, "client 0 is empty"),
        ([sentences(4, 0)], lambda items: padded(items[:1]), "collate made 1 rows of 4 items"),
        ([DataLoader(TensorDataset(*rows(3)))], None, "client 0 is a DataLoader; give"),
    ],
)
def test_bad_items(given: Any, collate: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        coterie.Weighting.on(given, model=Tagger(), loss="cross_entropy", collate=collate)


class Ragged(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.ones(i + 1), 0


def test_ragged_items_without_collate_are_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"items of client 0 are not equally shaped.*Give collate="):
        pack([Ragged()])


GROWTH = """
import sys, numpy as np, torch, coterie
from torch import nn
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
n, d, clients = 51_200, 1024, 8
path = sys.argv[1]
x = np.memmap(path, dtype=np.float32, mode="r", shape=(n, d))
y = torch.arange(n) % 2
each = n // clients
torch.manual_seed(0)
def problem(shards):
    return coterie.Weighting.on(shards, shards[0], model=nn.Linear(d, 2), loss="cross_entropy")
def fit(made):
    return coterie.fit(made, coterie.methods.meritfed(step=0.1, mirror_steps=2), 2)
small = np.array(x[:each])
fit(problem([(small, y[: len(small)])]))  # what torch and one client take
before = resident()
peak = 0.0
class Watch:
    def started(self, parts, done): pass
    def ended(self, summary): pass
    def recorded(self, line, view):
        global peak
        peak = max(peak, resident())
made = problem([(x[k * each : (k + 1) * each], y[k * each : (k + 1) * each]) for k in range(clients)])
peak = max(peak, resident())
coterie.fit(made, coterie.methods.meritfed(step=0.1, mirror_steps=2), 2, observer=Watch())
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_200_megabytes_of_a_mapped_file_do_not_come_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    array = np.memmap(path, dtype=np.float32, mode="w+", shape=(51_200, 1024))
    for start in range(0, 51_200, 5_120):
        array[start : start + 5_120] = Draw.of(start).normal(5_120, 1024).numpy()
    array.flush()
    assert path.stat().st_size == 200 << 20
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(path)], capture_output=True, text=True, timeout=600, check=True
    )
    assert float(done.stdout) < 100.0
