"""LEAF's format (Caldas et al. 2018): JSON files with users and their rows, below train/ and test/.

    {"users": ["f01"], "num_samples": [2], "user_data": {"f01": {"x": [...], "y": [...]}}}

LEAF's scripts make such files from public data, and which rows they hold depends on their options: there is no file
with one published checksum. What was read is therefore named by a digest of all files, which goes into the record.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.errors import UsageError
from coterie.problems.data.examples import Examples, Holder
from coterie.problems.data.files import content, damaged
from coterie.problems.data.sets import VARIABLE, places

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's alphabet for Shakespeare, 80 letters."""
Reader = Callable[[list[Any], list[Any]], Examples]


class Leaf(NamedTuple):
    """All users that have training and test rows, in the order of their names, and the digest of the files."""

    users: tuple[Holder, ...]
    digest: str


def read_leaf(folder: Path, reader: Reader) -> Leaf:
    """The users of a folder with train/*.json and test/*.json.

    Args:
        folder: LEAF's `data` folder of one data set.
        reader: makes inputs and labels of a user's x and y.
    """
    digest = sha256()
    train, test = (_part(folder / part, reader, digest) for part in ("train", "test"))
    both = sorted(name for name in train.keys() & test.keys() if min(len(train[name].y), len(test[name].y)) > 0)
    if not both:
        raise UsageError(
            f"no user of {folder} has training and test rows; make the files with LEAF's `preprocess.sh -t sample`, "
            "which splits the rows of every user."
        )
    return Leaf(tuple(Holder(name, train[name], test[name]) for name in both), digest.hexdigest())


def leaf_folder(name: str, given: str | None) -> Path:
    """The folder that was named, or the data set's own below the folders that coterie searches."""
    folders = [Path(given).expanduser()] if given else [folder / name for folder in places()]
    found = next((folder for folder in folders if (folder / "train").is_dir() and (folder / "test").is_dir()), None)
    if found is None:
        looked = ", ".join(map(str, folders))
        raise UsageError(
            f"no LEAF files of {name} were found in {looked}: there must be train/*.json and test/*.json. Make them "
            f"with LEAF's preprocess.sh, and name their folder in problem.folder or put it below ${VARIABLE}."
        )
    return found


def _part(folder: Path, reader: Reader, digest: Any) -> dict[str, Examples]:
    found: dict[str, Examples] = {}
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UsageError(f"{folder} holds no *.json; make the files with LEAF's preprocess.sh.")
    for path in paths:
        data = content(path)
        digest.update(data)
        found |= _users(path, bytes(data), reader)
    return found


def _users(path: Path, data: bytes, reader: Reader) -> dict[str, Examples]:
    try:
        table = json.loads(data)
        rows = {str(user): table["user_data"][user] for user in table["users"]}
        columns = {user: (list(part["x"]), list(part["y"])) for user, part in rows.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"it is not in LEAF's form: {type(error).__name__} {error}") from None
    found = {}
    for user, (x, y) in columns.items():
        if len(x) != len(y):
            raise damaged(path, f"user {user} has {len(x)} inputs and {len(y)} labels")
        try:
            found[user] = reader(x, y)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise damaged(path, f"the rows of user {user} cannot be read: {error}") from None
    return found


def characters(x: list[Any], y: list[Any]) -> Examples:
    """FEMNIST: 784 grey values between 0 and 1, and one of 62 classes."""
    images = torch.tensor(x, dtype=torch.float32).reshape(len(x), 1, 28, 28)
    labels = torch.tensor(y, dtype=torch.int64)
    if len(y) and (int(labels.min()) < 0 or int(labels.max()) > 61):
        raise ValueError("labels must be 0 … 61")
    return Examples(images, labels)


def next_letters(x: list[Any], y: list[Any]) -> Examples:
    """Shakespeare: texts of equal length, and the letter that follows each; letters by their number in `LETTERS`."""
    texts = [_numbers(text) for text in x]
    if len({len(text) for text in texts}) > 1:
        raise ValueError("texts differ in length")
    labels = [_numbers(letter)[0] for letter in y]
    return Examples(torch.tensor(texts, dtype=torch.int64).reshape(len(x), -1), torch.tensor(labels, dtype=torch.int64))


def _numbers(text: str) -> list[int]:
    return [max(0, LETTERS.find(letter)) for letter in text]  # as LEAF: unknown letters are the first one
