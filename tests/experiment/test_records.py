"""The result folder: never overwritten by accident, cut back to a checkpoint's lengths, refused if cut."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coterie.errors import RunError, UsageError
from coterie.experiment.records import GROWING, Records, prepare
from coterie.storage import sole_user

Contents = Callable[[Path], dict[str, str]]


def result_in(folder: Path) -> Path:
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "config.toml").write_text("version = 1\n")
    (folder / "metrics.jsonl").write_text('{"round": 0}\n')
    (folder / "checkpoint" / "00000001.safetensors").write_bytes(b"...")
    return folder


def test_a_new_or_empty_folder_is_taken(tmp_path: Path) -> None:
    for folder in (tmp_path / "deep" / "down", tmp_path / "deep" / "down"):
        prepare(folder, force=False)
        assert list(folder.iterdir()) == []


def test_a_result_is_kept_without_force_and_emptied_with_it(tmp_path: Path, contents: Contents) -> None:
    folder = result_in(tmp_path / "run")
    (folder / "link").symlink_to(tmp_path)
    before = contents(folder)
    with pytest.raises(UsageError, match=r"is not empty; choose .*, continue with `coterie resume .*--force"):
        prepare(folder, force=False)
    assert contents(folder) == before
    prepare(folder, force=True)
    assert list(folder.iterdir()) == []
    assert tmp_path.is_dir()


def test_force_empties_nothing_but_results(tmp_path: Path, contents: Contents) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="no coterie result; --force empties only result folders"):
        prepare(tmp_path, force=True)
    assert contents(tmp_path) == before


def test_force_does_not_touch_a_folder_in_use(tmp_path: Path, contents: Contents) -> None:
    folder = result_in(tmp_path / "run")
    before = contents(folder)
    with sole_user(folder), pytest.raises(UsageError, match="another coterie is at work"):
        prepare(folder, force=True)
    assert contents(folder) == before


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file; name a folder"):
        prepare(tmp_path / "file", force=True)
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        prepare(tmp_path / "file" / "below", force=False)


def test_lines_are_json_and_rows_have_a_header(tmp_path: Path) -> None:
    with Records(tmp_path, {}) as records:
        records.metrics({"round": 0, "test_loss": 0.5})
        records.event({"round": 1, "event": "skipped"})
        records.weights(0, torch.tensor([0.25, 0.75]))
        records.weights(1, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"round": 0, "test_loss": 0.5}
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {"round": 1, "event": "skipped"}
    rows = (tmp_path / "weights.csv").read_text().splitlines()
    assert rows == ["round,client_0,client_1", "0,0.25,0.75", "1,0.333333333,0.666666667"]


def test_files_are_cut_back_to_the_lengths_of_a_checkpoint(tmp_path: Path) -> None:
    with Records(tmp_path, {}) as records:
        records.metrics({"round": 0})
        records.weights(0, torch.ones(1))
        records.flush()
        lengths = records.lengths()
        kept = {name: (tmp_path / name).read_bytes() for name in GROWING}
        for _ in range(1000):
            records.metrics({"round": 1})
            records.event({"round": 1})
        records.weights(1, torch.ones(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"half a li')
    with Records(tmp_path, lengths) as records:
        assert {name: (tmp_path / name).read_bytes() for name in GROWING} == kept
        assert records.lengths() == lengths
        records.weights(1, torch.ones(1))
    assert (tmp_path / "weights.csv").read_text() == "round,client_0\n0,1\n1,1\n"


def test_lengths_count_what_is_not_written_yet(tmp_path: Path) -> None:
    with Records(tmp_path, {}) as records:
        records.metrics({"round": 0})
        assert records.lengths()["metrics.jsonl"] == len('{"round": 0}\n')
        records.cut({})
        assert records.lengths() == dict.fromkeys(GROWING, 0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("name", GROWING)
def test_a_shorter_file_is_refused_and_no_file_is_cut(tmp_path: Path, contents: Contents, name: str) -> None:
    for other in GROWING:
        (tmp_path / other).write_bytes(b"x" * 30)
    (tmp_path / name).write_bytes(b"x" * 9)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=rf"{name} is 9 bytes long, but the checkpoint was made at 10; it was cut"):
        Records(tmp_path, dict.fromkeys(GROWING, 10))
    assert contents(tmp_path) == before
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=f"{name} is 0 bytes long"):
        Records(tmp_path, dict.fromkeys(GROWING, 10))


def test_a_full_disk_is_a_run_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    records = Records.__new__(Records)
    records.folder, records._on_disk = full.parent, {}
    records._files = {"metrics.jsonl": full.open("wb")}
    records.metrics({"round": 0})
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        records.flush()
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        records.close()


def test_a_record_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "weights.csv").mkdir()
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        Records(tmp_path, {})
