"""GoEmotions: files are read as they are published, and whatever is wrong with one is said."""

import json
from pathlib import Path

import pytest
import torch
from fake_data import EMOTIONS, write, write_goemotions

from coterie.errors import UsageError
from coterie.problems.data import sets
from coterie.problems.data.goemotions import goemotions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole data set in small, where coterie looks for it."""
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    monkeypatch.setattr(sets, "user_cache_path", lambda _: tmp_path / "cache")
    write_goemotions(tmp_path / "goemotions")
    return tmp_path / "goemotions"


def test_the_small_set_is_read_back(folder: Path) -> None:
    found = goemotions()
    assert found.emotions == EMOTIONS
    assert found.emotions[found.neutral] == "neutral"
    assert [len(part.texts) for part in (found.train, found.dev, found.test)] == [168, 28, 28]
    assert torch.equal(found.train.y, torch.arange(28).repeat(6))
    assert found.train.texts[found.emotions.index("joy")] == "joy 0 of train"
    assert found.ekman["fear"] == (EMOTIONS.index("fear"), EMOTIONS.index("nervousness"))
    assert len(found.ekman["joy"]) == 12
    assert sorted(e for group in found.ekman.values() for e in group) == [e for e in range(28) if e != found.neutral]


def test_only_comments_with_one_emotion_are_kept(folder: Path) -> None:
    write(folder / "dev.tsv", b"one\t3\ta\ntwo\t3,27\tb\nthree\t1,2,3\tc\nfour\t27\td\n")
    dev = goemotions().dev
    assert dev.texts == ["one", "four"]
    assert dev.y.tolist() == [3, 27]


def test_texts_may_hold_quotes_and_strange_line_breaks(folder: Path) -> None:
    lines = 'He said "no\t2\ta\r\n\u2028 so what\x85\x0b\t0\tb\n  [NAME] ☹ \t27\tc'
    write(folder / "test.tsv", lines.encode(), packed=False)
    assert goemotions().test.texts == ['He said "no', "\u2028 so what\x85\x0b", "  [NAME] ☹ "]


def test_gzipped_files_are_read(folder: Path) -> None:
    (folder / "train.tsv").unlink()
    write(folder / "train.tsv", b"packed\t5\tx\n", packed=True)
    assert goemotions().train.texts == ["packed"]


@pytest.mark.parametrize(
    ("name", "data", "complaint"),
    [
        ("train.tsv", b"fine\t1\ta\nno tabs here\n", r"train\.tsv is damaged: line 2 has 1 fields, not a text, emo"),
        ("train.tsv", b"fine\t1\ta\n\nfine\t1\tb\n", "line 2 has 1 fields"),
        ("dev.tsv", b"a\tb\t1\tid\n", "line 1 has 4 fields"),
        ("dev.tsv", b"text\tjoy\tid\n", "line 1 has the emotions 'joy', which are no numbers"),
        ("dev.tsv", b"text\t\tid\n", "line 1 has the emotions '', which are no numbers"),
        ("test.tsv", b"text\t28\tid\n", r"line 1 has the emotions 28, where they are 0 … 27"),
        ("test.tsv", b"text\t-1\tid\n", "where they are 0"),
        ("test.tsv", b"text\t1,2\tid\n", "no line has a single emotion"),
        ("test.tsv", b"", "line 1 has 1 fields"),
        ("train.tsv", b"caf\xe9\t1\tid\n", r"no UTF-8 text \(byte 3\)"),
        ("emotions.txt", b"joy\nanger\n", "none of its 2 lines is 'neutral'"),
        ("emotions.txt", b"joy\njoy\nneutral\n", "names an emotion twice"),
        ("ekman_mapping.json", b"{", "no JSON object of lists"),
        ("ekman_mapping.json", b"[1]", "no JSON object of lists"),
        ("ekman_mapping.json", b'{"joy": 3}', "no JSON object of lists"),
        ("ekman_mapping.json", json.dumps({"joy": ["joy", "glee"]}).encode(), "do not hold each emotion"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(folder: Path, name: str, data: bytes, complaint: str) -> None:
    write(folder / name, data)
    with pytest.raises(UsageError, match=complaint) as caught:
        goemotions()
    assert "coterie data get" in str(caught.value)
    assert str(folder / name) in str(caught.value)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "dev.tsv").unlink()
    with pytest.raises(UsageError, match=r"without dev\.tsv.*coterie data get goemotions"):
        goemotions()


@pytest.mark.data
def test_the_published_set() -> None:
    if sets.complete(sets.known("goemotions")) is None:
        pytest.skip(f"goemotions is not in {' or '.join(str(place) for place in sets.places())}")
    found = goemotions()
    assert [len(part.texts) for part in (found.train, found.dev, found.test)] == [36_308, 4_548, 4_590]
    assert found.train.texts[0] == "My favourite food is anything I didn't have to cook myself."
    assert found.emotions[int(found.train.y[0])] == "neutral"
    assert list(found.ekman) == ["anger", "disgust", "fear", "joy", "sadness", "surprise"]
    counts = {group: int(torch.isin(found.train.y, torch.tensor(e)).sum()) for group, e in found.ekman.items()}
    assert counts == {"anger": 3878, "disgust": 498, "fear": 515, "joy": 12920, "sadness": 2121, "surprise": 3553}
