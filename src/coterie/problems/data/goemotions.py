"""GoEmotions (Demszky et al. 2020): comments with one or more of 28 emotions, in tab-separated lines.

A line is a text, its emotion numbers with commas between them, and an id. Here are the comments with a single emotion,
the 'truncated' set of the MeritFed paper; the Ekman mapping puts all emotions but neutral into six groups.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.problems.data.files import content, damaged
from coterie.problems.data.sets import locate

NEUTRAL = "neutral"


class Comments(NamedTuple):
    """Texts and the number of the one emotion of each."""

    texts: list[str]
    y: Tensor


class GoEmotions(NamedTuple):
    """The three parts as published, the emotions by number, and the numbers of each Ekman group."""

    train: Comments
    dev: Comments
    test: Comments
    emotions: tuple[str, ...]
    ekman: Mapping[str, tuple[int, ...]]

    @property
    def neutral(self) -> int:
        """The number of the emotion that is none."""
        return self.emotions.index(NEUTRAL)


def goemotions() -> GoEmotions:
    """36,308, 4,548 and 4,590 comments."""
    paths = locate("goemotions")
    emotions = read_emotions(paths["emotions.txt"])
    ekman = read_mapping(paths["ekman_mapping.json"], emotions)
    train, dev, test = (read_comments(paths[f"{part}.tsv"], len(emotions)) for part in ("train", "dev", "test"))
    return GoEmotions(train, dev, test, emotions, ekman)


def read_emotions(path: Path) -> tuple[str, ...]:
    """The names, a line each."""
    names = tuple(line.strip() for line in _text(path).split("\n") if line.strip())
    if NEUTRAL not in names:
        raise damaged(path, f"none of its {len(names)} lines is {NEUTRAL!r}")
    if len(set(names)) < len(names):
        raise damaged(path, "it names an emotion twice")
    return names


def read_mapping(path: Path, emotions: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The emotions of each group; every emotion but neutral is in one."""
    try:
        groups = json.loads(_text(path))
        members = [(group, emotion) for group, names in groups.items() for emotion in names]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise damaged(path, f"it is no JSON object of lists ({error})") from None
    if sorted(emotion for _, emotion in members) != sorted(set(emotions) - {NEUTRAL}):
        raise damaged(path, f"its groups do not hold each emotion of emotions.txt but {NEUTRAL} once")
    return {group: tuple(emotions.index(name) for name in names) for group, names in groups.items()}


def read_comments(path: Path, emotions: int) -> Comments:
    """The lines with one emotion."""
    texts, labels = [], []
    lines = _text(path).removesuffix("\n").split("\n")  # not splitlines: comments hold other kinds of line breaks
    for number, line in enumerate(lines, 1):
        fields = line.removesuffix("\r").split("\t")
        if len(fields) != 3:
            raise damaged(path, f"line {number} has {len(fields)} fields, not a text, emotions and an id")
        try:
            own = [int(label) for label in fields[1].split(",")]
        except ValueError:
            raise damaged(path, f"line {number} has the emotions {fields[1]!r}, which are no numbers") from None
        if min(own) < 0 or max(own) >= emotions:
            raise damaged(path, f"line {number} has the emotions {fields[1]}, where they are 0 … {emotions - 1}")
        if len(own) == 1:
            texts.append(fields[0])
            labels += own
    if not texts:
        raise damaged(path, "no line has a single emotion")
    return Comments(texts, torch.tensor(labels))


def _text(path: Path) -> str:
    try:
        return content(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is no UTF-8 text (byte {error.start})") from None
