"""docs/SECURITY.md says who sees what as a rehearsal of every method finds it."""

from pathlib import Path

import pytest
import seen

from coterie.methods.registry import METHODS

CORE = ("meritfed", "primal-dual", "fedavg", "krum", "top-k")  # the others are slow


def test_every_method_has_a_row() -> None:
    assert list(seen.shown()) == [entry.name for entry in METHODS], seen.CHECK


@pytest.mark.parametrize(
    "name",
    [pytest.param(e.name, marks=[] if e.name in CORE else pytest.mark.slow) for e in METHODS],
)
def test_a_row_is_what_a_rehearsal_finds(name: str) -> None:
    assert seen.shown()[name] == seen.row(name), seen.CHECK


def test_no_disclosure_is_deleted_by_writing_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["| `a` | sums: `a/steps`, `curvature/extremes` | nothing | asks none |", "| `b` | nothing | nothing | x |"]
    page = tmp_path / "SECURITY.md"
    page.write_text("\n".join(["top", seen.BEGIN, *rows, seen.END, "bottom"]))
    monkeypatch.setattr(seen, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["seen.py", "--write"])
    for fewer in ([rows[0].replace(", `curvature/extremes`", ""), rows[1]], rows[1:]):
        before = page.read_text()
        monkeypatch.setattr(seen, "table", lambda made=fewer: "\n".join(made))
        with pytest.raises(SystemExit, match=r"would delete disclosures(.|\n)*a: `curvature/extremes` of sums"):
            seen.main()
        assert page.read_text() == before
    more = [rows[0], rows[1].replace("nothing | x", "nothing | x, `b/goal`")]
    monkeypatch.setattr(seen, "table", lambda: "\n".join(more))
    seen.main()
    assert seen.shown() == seen.rows_of("\n".join(more))
    assert page.read_text().split()[0] == "top"
    assert page.read_text().split()[-1] == "bottom"
