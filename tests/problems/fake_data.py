"""Small files in every public format."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np

PIXELS = 3072


def write(path: Path, data: bytes, *, packed: bool = False) -> Path:
    path = path.with_name(path.name + ".gz") if packed else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    return path


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(
    folder: Path, *, packed: bool = True, train: int = 60, test: int = 30, side: int = 28
) -> dict[str, np.ndarray]:
    """An MNIST of random images, with labels 0 … 9 over and over."""
    rng = np.random.default_rng(0)
    arrays = {}
    for stem, count in (("train", train), ("t10k", test)):
        arrays[f"{stem}-images-idx3-ubyte"] = rng.integers(0, 256, (count, side, side), dtype=np.uint8)
        arrays[f"{stem}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    for name, array in arrays.items():
        write(folder / name, idx(array), packed=packed)
    return arrays


def batches(count: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Six CIFAR batches: name, pixels, labels."""
    rng = np.random.default_rng(1)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return [
        (n, rng.integers(0, 256, (count, PIXELS), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10) for n in names
    ]


def write_cifar_binary(folder: Path, count: int = 20) -> list[tuple[str, np.ndarray, np.ndarray]]:
    made = batches(count)
    for name, pixels, labels in made:
        write(folder / f"{name}.bin", np.concatenate([labels[:, None], pixels], axis=1).tobytes())
    return made


def covtype_text(count: int = 70) -> str:
    """Lines with all seven classes; the second column is constant, the third negative."""
    rng = np.random.default_rng(2)
    lines = []
    for i in range(count):
        measured = [2000 + i, 7, -int(rng.integers(1, 99)), *rng.integers(0, 7000, 7)]
        lines.append(",".join(map(str, [*measured, *rng.integers(0, 2, 44), i % 7 + 1])))
    return "\n".join(lines) + "\n"


EKMAN = {
    "anger": ("anger", "annoyance", "disapproval"),
    "disgust": ("disgust",),
    "fear": ("fear", "nervousness"),
    "joy": (
        *("joy", "amusement", "approval", "excitement", "gratitude", "love"),
        *("optimism", "relief", "pride", "admiration", "desire", "caring"),
    ),
    "sadness": ("sadness", "disappointment", "embarrassment", "grief", "remorse"),
    "surprise": ("surprise", "realization", "confusion", "curiosity"),
}
EMOTIONS = (*sorted(emotion for group in EKMAN.values() for emotion in group), "neutral")


def write_goemotions(folder: Path, times: int = 6) -> None:
    """A GoEmotions of made-up comments, as many of each emotion; a sixth of it in dev and in test."""
    for part, count in (("train", times), ("dev", max(1, times // 6)), ("test", max(1, times // 6))):
        lines = [f"{e} {i} of {part}\t{k}\tid{i}" for i in range(count) for k, e in enumerate(EMOTIONS)]
        write(folder / f"{part}.tsv", "\n".join([*lines, ""]).encode())
    write(folder / "emotions.txt", "\n".join(EMOTIONS).encode())
    write(folder / "ekman_mapping.json", json.dumps(EKMAN).encode())
    write(folder / "sentiment_mapping.json", b"{}")
