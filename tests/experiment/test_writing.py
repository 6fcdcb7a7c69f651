"""Files as they are written: modes by the umask, and words that a spreadsheet would take for formulas."""

import csv
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.experiment.predict import Predictions
from coterie.storage import cell, write_atomically

Command = Callable[..., Any]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> tuple[set[int], set[int]]:
    """Of files, and of folders with the outermost."""
    paths = [folder, *folder.rglob("*")]
    found = [(path.is_dir(), path.stat().st_mode & 0o777) for path in paths]
    return {mode for is_dir, mode in found if not is_dir}, {mode for is_dir, mode in found if is_dir}


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755), (0, 0o666, 0o777)])
def test_the_umask_decides_who_reads_results(
    coterie: Command, tmp_path: Path, mask: int, file: int, folder: int
) -> None:
    out = tmp_path / "run"
    with umask(mask):
        done = coterie("run", "--problem", "quadratic", "--rounds", 1, "--out", out)
        assert done.code == 0, done.err
        assert coterie("report", out).code == 0
    assert modes(out) == ({file}, {folder})


def test_a_file_is_replaced_whole_and_with_the_mode_of_now(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o666)
    with umask(0o077):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "word", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "－1+x", "+inf"]
)
def test_a_word_that_is_a_formula_gets_a_quote(word: str) -> None:
    assert cell(word) == f"'{word}"


@pytest.mark.parametrize("value", ["-1", "+0.5", "-1e-3", "healthy", "a=b", "", 3, -1.5, None])
def test_other_values_stay(value: object) -> None:
    assert cell(value) == value


def test_predictions_are_safe_in_a_spreadsheet_and_raw_if_asked() -> None:
    table = Predictions(["row", "@label", "p(=x)"], [[1, "=cmd", "0.5"], [2, "-1", "0.25"]], [])
    safe, raw = io.StringIO(), io.StringIO()
    table.write(safe)
    table.write(raw, raw=True)
    assert list(csv.reader(io.StringIO(safe.getvalue()))) == [
        ["row", "'@label", "p(=x)"],
        ["1", "'=cmd", "0.5"],
        ["2", "-1", "0.25"],
    ]
    assert list(csv.reader(io.StringIO(raw.getvalue()))) == [table.header, ["1", "=cmd", "0.5"], ["2", "-1", "0.25"]]
