"""The known data sets: their files with checksums, where the public has them, and where coterie looks for them.

Sizes and checksums are those of the content, so a file may lie there plain or gzipped, whoever compressed it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from coterie.errors import UsageError, unknown

VARIABLE = "COTERIE_DATA"


@dataclass(frozen=True)
class File:
    """A file by its public name, below the data set's folder."""

    name: str
    size: int
    digest: str  # algorithm:hexadecimal
    urls: tuple[str, ...] = ()  # of the file, plain or gzipped


@dataclass(frozen=True)
class Known:
    """A data set: a title, the number of classes, the licence and its files (none where it is built in)."""

    name: str
    title: str
    classes: int
    licence: str
    files: tuple[File, ...]
    archive: File | None = None  # where the files come in one piece, its digest is that of the archive itself


def _idx(bases: tuple[str, ...], digests: tuple[str, ...]) -> tuple[File, ...]:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    return tuple(
        File(name, size, f"sha256:{digest}", tuple(f"{base}{name}.gz" for base in bases))
        for name, size, digest in zip(names, sizes, digests, strict=True)
    )


_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _cifar_binary(*digests: str) -> tuple[File, ...]:
    return tuple(
        File(f"cifar-10-batches-bin/{name}.bin", 30_730_000, f"sha256:{digest}")
        for name, digest in zip(_BATCHES, digests, strict=True)
    )


def _emotions(name: str, size: int, digest: str, public: str | None = None) -> File:
    base = "https://raw.githubusercontent.com/google-research/google-research/master/goemotions/data/"
    return File(name, size, f"sha256:{digest}", (base + (public or name),))


def _hospital(name: str, size: int, digest: str) -> File:
    base = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
    return File(f"processed.{name}.data", size, f"sha256:{digest}", (f"{base}processed.{name}.data",))


KNOWN: tuple[Known, ...] = (
    Known("digits", "scikit-learn's digits, 8 × 8", 10, "CC BY 4.0 (UCI)", ()),
    Known(
        "mnist",
        "MNIST handwritten digits, 28 × 28",
        10,
        "CC BY-SA 3.0, as commonly stated (Y. LeCun, C. Cortes)",
        _idx(
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
            (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
    ),
    Known(
        "fashion-mnist",
        "Fashion-MNIST clothes, 28 × 28",
        10,
        "MIT (Zalando SE)",
        _idx(
            (
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            ),
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
    ),
    Known(
        "cifar10",
        "CIFAR-10 photographs, 32 × 32 in colour",
        10,
        "none stated; cite A. Krizhevsky (2009)",
        _cifar_binary(
            "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        ),
        File(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        ),
    ),
    Known(
        "covtype",
        "Covertype, 54 features of forest plots",
        7,
        "CC BY 4.0 (UCI)",
        (
            File(
                "covtype.data",
                75_169_317,
                "sha256:0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
                (
                    "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/covtype.data.gz",
                    "https://ndownloader.figshare.com/files/5976039",
                ),
            ),
        ),
    ),
    Known(
        "goemotions",
        "GoEmotions, Reddit comments with 27 emotions or neutral",
        28,
        "CC BY 4.0 (Google Research)",
        (
            _emotions("train.tsv", 3_519_053, "1c254a142be5c00e80d819b9ae1bbd36d94b2eeb8f4b1271846508d57e57d9c5"),
            _emotions("dev.tsv", 439_059, "575489c079c9de1097062a01738f998590d6b7ead66dd1c9fd1d2ba01fd8bc62"),
            _emotions("test.tsv", 436_706, "0587b2dd8b27b97352adbfc3fb083d46005c8946657fdc2b1ca8b1cc7f1f8be4"),
            _emotions("emotions.txt", 248, "45c3ef86782d2a4d7fedcd6d8c111aa0d0e94720689bd164fac94fefb4495a89"),
            _emotions("ekman_mapping.json", 396, "d6b1fea382917c1685c42e1324a0344106be9390f52a3850ce032656d103a328"),
            _emotions(
                "sentiment_mapping.json",
                367,
                "801f6f028082141bd38541a4b14d65b33bdc55d29c7b2aaa029fefecf206f76b",
                public="sentiment_dict.json",
            ),
        ),
    ),
    Known(
        "heart-disease",
        "Heart Disease, patients of four hospitals",
        2,
        "CC BY 4.0 (UCI)",
        (
            _hospital("cleveland", 18_461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
            _hospital("hungarian", 10_263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
            _hospital("switzerland", 4_109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
            _hospital("va", 6_737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
        ),
    ),
)


def known(name: str) -> Known:
    """The data set of that name; an unknown one is an error that lists the nearest."""
    for entry in KNOWN:
        if entry.name == name:
            return entry
    raise unknown("data set", name, (entry.name for entry in KNOWN))


def places() -> list[Path]:
    """The folders that hold one folder per data set, in the order in which they are searched."""
    given = os.environ.get(VARIABLE, "")
    return [*([Path(given).expanduser()] if given else []), user_cache_path("coterie")]


def present(folder: Path, files: tuple[File, ...]) -> dict[str, Path]:
    """The files that exist, by name: plain or gzipped, in their subfolder or straight in the folder."""
    found = {}
    for file in files:
        bare = file.name.rpartition("/")[2]
        candidates = [folder / (name + end) for name in (file.name, bare) for end in ("", ".gz")]
        path = next((path for path in candidates if os.path.isfile(path)), None)  # unlike Path's, it never raises
        if path is not None:
            found[file.name] = path
    return found


def complete(entry: Known) -> dict[str, Path] | None:
    """The files of a data set in the first folder that has them all."""
    candidates = (present(folder / entry.name, entry.files) for folder in places())
    return next((found for found in candidates if found and len(found) == len(entry.files)), None)


def locate(name: str) -> dict[str, Path]:
    """The files of a data set, or an error that lists the folders searched and how to get the files."""
    entry = known(name)
    found = complete(entry)
    if found is None:
        raise UsageError(_missing(entry))
    return found


def _missing(entry: Known) -> str:
    folders = [folder / entry.name for folder in places()]
    searched = "; ".join(f"{folder} ({_state(folder, entry)})" for folder in folders)
    files = ", ".join(file.name for file in entry.files)
    return (
        f"data set {entry.name} was not found. Looked in: {searched}. Get it with `coterie data get {entry.name}`, or "
        f"put {files} (plain or .gz) into {folders[0]}; ${VARIABLE} sets another folder."
    )


def _state(folder: Path, entry: Known) -> str:
    """Why a folder will not do."""
    found = present(folder, entry.files)
    absent = ", ".join(file.name for file in entry.files if file.name not in found)
    return f"without {absent}" if found else "nothing there"
