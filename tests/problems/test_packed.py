"""A packed table that would become far larger than it is gets refused before it is read: what, where, remedy."""

import io
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.problems.files import reading
from coterie.problems.files.reading import Unreadable, blocks_of
from coterie.problems.files.sizes import SMALL, check_archive

ROWS = SMALL // 8 + 1  # of one column: just too many


def npz_of_zeros(path: Path) -> None:
    np.savez_compressed(path, x=np.zeros(ROWS // 2), label=np.zeros(ROWS - ROWS // 2))


def npz_with_a_false_header(path: Path) -> None:
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("label.npy", array.getvalue())


def parquet(path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"label": np.zeros(ROWS)}), path, compression="zstd")


def arrow_stream(path: Path) -> None:
    _arrow(path, "new_stream")


def arrow_file(path: Path) -> None:
    _arrow(path, "new_file")


def _arrow(path: Path, form: str, rows: int = ROWS, column: Any = None, packed: str | None = "zstd") -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"label": np.zeros(rows) if column is None else column})
    with (
        arrow.OSFile(str(path), "wb") as sink,
        getattr(arrow.ipc, form)(sink, table.schema, options=arrow.ipc.IpcWriteOptions(compression=packed)) as writer,
    ):
        writer.write_table(table, max_chunksize=1 << 20)


def arrow_without_values(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    _arrow(path, "new_file", column=arrow.nulls(ROWS), packed=None)


BOMBS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "zeros": (".npz", npz_of_zeros, "the member 'label.npy'"),
    "a false header": (".npz", npz_with_a_false_header, "the member 'label.npy'"),
    "Parquet": (".parquet", parquet, "row group"),
    "an Arrow file": (".arrow", arrow_file, "batch 8"),
    "an Arrow stream": (".arrow", arrow_stream, "batch 8"),
    "an Arrow file without values": (".arrow", arrow_without_values, "batch 8"),
}


@pytest.mark.parametrize("which", BOMBS)
def test_a_table_that_unpacks_to_far_more_is_refused_before_it_is_read(tmp_path: Path, which: str) -> None:
    ending, make, part = BOMBS[which]
    path = tmp_path / f"north{ending}"
    make(path)
    assert path.stat().st_size < SMALL / 20
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable) as refused:
            list(blocks_of(path))
        assert tracemalloc.get_traced_memory()[1] < SMALL / 8
    finally:
        tracemalloc.stop()
    said = str(refused.value)
    assert path.name in said
    assert part in said
    assert "64 MiB" in said
    assert "without compression" in refused.value.remedy


@pytest.mark.parametrize("packed", [None, "zstd", "lz4"])
@pytest.mark.parametrize("form", ["new_file", "new_stream"])
def test_sound_arrow_is_read_as_before(tmp_path: Path, form: str, packed: str | None) -> None:
    arrow = pytest.importorskip("pyarrow")
    words = arrow.array(["a", "b", None] * 1000).dictionary_encode()
    _arrow(tmp_path / "a.arrow", form, column=words, packed=packed)
    (block,) = blocks_of(tmp_path / "a.arrow")
    assert block == {"label": ["a", "b", None] * 1000}


def test_large_tables_that_are_not_packed_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", label=np.zeros(ROWS, dtype=np.uint8))
    check_archive(tmp_path / "a.npz")
    (block,) = blocks_of(tmp_path / "a.npz")
    assert len(block["label"]) == ROWS


def test_a_file_cannot_list_its_batches_more_often_than_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _arrow(tmp_path / "a.arrow", "new_file", rows=10)
    monkeypatch.setattr(reading, "check_arrow", lambda *_: 0)
    with pytest.raises(Unreadable, match="lists 1 batches and has 0"):
        list(blocks_of(tmp_path / "a.arrow"))


@pytest.mark.parametrize("form", ["new_file", "new_stream"])
def test_mutated_arrow_is_read_or_refused(tmp_path: Path, form: str) -> None:
    path, dice = tmp_path / "a.arrow", np.random.default_rng(0)
    _arrow(path, form, rows=50)
    sound = path.read_bytes()
    refused = 0
    for _ in range(300):
        data = bytearray(sound)
        for place in dice.integers(0, len(data), 3):
            data[place] = dice.integers(0, 256)
        path.write_bytes(data[: dice.integers(1, len(data) + 1)] if dice.random() < 0.3 else data)
        try:
            list(blocks_of(path))
        except Unreadable:
            refused += 1
    assert refused > 30
