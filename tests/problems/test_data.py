"""Data sets: every public format in small, everything that can be wrong with a file, and the catalogue."""

import gzip
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from hashlib import md5, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_data import (
    PIXELS,
    covtype_text,
    idx,
    write,
    write_cifar_binary,
    write_mnist,
)

from coterie.errors import RunError, UsageError
from coterie.problems.data import catalogue, sets
from coterie.problems.data.digits import digits
from coterie.problems.data.load import LOADERS, load
from coterie.problems.data.sets import KNOWN, File, Known


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$COTERIE_DATA, with an empty cache behind it."""
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "home"))
    monkeypatch.setattr(sets, "user_cache_path", lambda _: tmp_path / "cache")
    return tmp_path / "home"


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_back(home: Path, name: str, packed: bool) -> None:
    arrays = write_mnist(home / name, packed=packed)
    data = load(name)
    assert data.test is not None
    assert data.train.x.dtype == torch.uint8
    assert data.shape == (1, 28, 28)
    np.testing.assert_array_equal(data.train.x[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.test.y, arrays["t10k-labels-idx1-ubyte"])
    scaled = data.scale()(data.train.x)
    np.testing.assert_allclose(scaled[:, 0], arrays["train-images-idx3-ubyte"] / 255.0, rtol=1e-6)


def test_a_file_that_a_browser_unpacked_but_did_not_rename_is_read(home: Path) -> None:
    arrays = write_mnist(home / "mnist")
    name = "train-labels-idx1-ubyte"
    (home / "mnist" / f"{name}.gz").write_bytes(idx(arrays[name]))
    assert len(load("mnist").train.y) == 60


@pytest.mark.parametrize("sub", ["cifar-10-batches-bin", "."])
def test_cifar_binary_is_read_back(home: Path, sub: str) -> None:
    made = write_cifar_binary(home / "cifar10" / sub)
    data = load("cifar10")
    assert data.test is not None
    assert data.train.x.shape == (100, 3, 32, 32)
    np.testing.assert_array_equal(data.train.x[20:40].reshape(20, PIXELS), made[1][1])
    np.testing.assert_array_equal(data.test.x.reshape(20, PIXELS), made[5][1])
    np.testing.assert_array_equal(data.test.y, made[5][2])


def test_the_pickled_version_of_cifar_is_not_read(home: Path) -> None:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        write(home / "cifar10" / "cifar-10-batches-py" / name, b"\x80\x02}.")
    with pytest.raises(UsageError, match=r"cifar10 was not found.*nothing there.*data_batch_1\.bin"):
        load("cifar10")


@pytest.mark.parametrize("packed", [True, False])
def test_covtype_is_read_back_and_standardised(home: Path, packed: bool) -> None:
    write(home / "covtype" / "covtype.data", covtype_text().encode(), packed=packed)
    data = load("covtype")
    assert data.test is None
    assert data.train.x.dtype == torch.int16
    assert data.train.y.unique().tolist() == list(range(7))
    rows = torch.arange(0, 70, 2)
    x = data.scale(rows)(data.train.x[rows])
    torch.testing.assert_close(x[:, :10].mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(x[:, [0, 2, 3]].std(0, correction=0), torch.ones(3))
    assert bool((x[:, 1] == 0).all())  # a constant column must not become NaN
    assert torch.equal(x[:, 10:], data.train.x[rows, 10:].float())


def test_scaling_leaves_the_examples_as_they_were() -> None:
    data = load("digits")
    before = data.train.x.clone()
    assert torch.equal(data.scale()(data.train.x), before)
    assert torch.equal(data.train.x, before)
    assert data.train.x.data_ptr() != data.scale()(data.train.x).data_ptr()


# ---------------------------------------------------------------- damage


def _break_mnist(home: Path, name: str, data: bytes) -> None:
    write_mnist(home / "mnist", packed=False)
    write(home / "mnist" / name, data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "has 0 bytes, fewer than an idx header"),
        (b"\0\0\x08\x03\0\0", "has 6 bytes"),
        (b"\0\0\x0d\x03" + bytes(12), "begins with 00000d03, not with the idx mark 00000803"),
        (b"<html>not found</html>", "begins with 3c68746d"),
        (b"\0\0\x08\x03" + b"\xff" * 12 + b"x", "4294967295 × 4294967295 × 4294967295 bytes, but 1 follow"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 60, 28, 28) + bytes(60 * 784 - 1), "but 47039 follow"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 0, 28, 28), "no rows"),
        (idx(np.zeros((59, 28, 28), np.uint8)), "59 images"),
        (idx(np.zeros((60, 27, 28), np.uint8)), "27×28 and 28×28"),
        (b"\x1f\x8b" + bytes(40), "gzip stream is broken"),
    ],
)
def test_damaged_images_are_named_with_what_is_wrong(home: Path, data: bytes, says: str) -> None:
    _break_mnist(home, "train-images-idx3-ubyte", data)
    with pytest.raises(UsageError, match=r"(train-images-idx3-ubyte|mnist)") as error:
        load("mnist")
    assert says in str(error.value)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.999])
def test_a_truncated_gzip_is_no_traceback(home: Path, keep: float) -> None:
    write_mnist(home / "mnist")
    path = home / "mnist" / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(UsageError, match=path.name):
        load("mnist")


def test_a_gzip_with_a_wrong_byte_is_no_traceback(home: Path) -> None:
    write_mnist(home / "mnist")
    path = home / "mnist" / "train-images-idx3-ubyte.gz"
    whole = bytearray(path.read_bytes())
    for place in (50, len(whole) // 2, len(whole) - 6):
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        path.write_bytes(broken)
        with pytest.raises(UsageError, match=path.name):
            load("mnist")


def test_a_label_out_of_range_is_refused(home: Path) -> None:
    _break_mnist(home, "t10k-labels-idx1-ubyte", idx(np.full(30, 10, np.uint8)))
    with pytest.raises(UsageError, match="label 10"):
        load("mnist")


def test_a_content_without_end_is_cut_short(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(home / "mnist")
    monkeypatch.setattr("coterie.problems.data.files.LARGEST", 1000)
    monkeypatch.setattr("coterie.problems.data.files.BLOCK", 100)
    with pytest.raises(UsageError, match="holds more than"):
        load("mnist")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bytes(PIXELS), "no multiple of 3073"),
        (b"", "no images"),
        (b"\x0a" + bytes(PIXELS), "labels from 10 to 10"),
    ],
)
def test_damaged_binary_batches_are_explained(home: Path, data: bytes, says: str) -> None:
    write_cifar_binary(home / "cifar10" / "cifar-10-batches-bin")
    write(home / "cifar10" / "cifar-10-batches-bin" / "data_batch_3.bin", data)
    with pytest.raises(UsageError, match="data_batch_3") as error:
        load("cifar10")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rows"),
        ("1,2,3\n", "lines have 3 numbers"),
        (covtype_text(3) + "1,2\n", "number of columns changed"),
        (covtype_text(3).replace("2001", "abc"), "could not convert string 'abc'"),
        (covtype_text(3).replace("2001", "99999"), "could not convert string '99999'"),
        (covtype_text(7).replace(",7\n", ",8\n"), "classes from 1 to 8"),
        ("\xff\xfe\n", "could not convert"),
    ],
)
def test_damaged_covtype_is_explained(home: Path, text: str, says: str) -> None:
    write(home / "covtype" / "covtype.data", text.encode("latin1"), packed=True)
    with pytest.raises(UsageError, match=r"covtype.data.gz is damaged") as error:
        load("covtype")
    assert says in str(error.value)


def test_truncated_covtype_is_explained(home: Path) -> None:
    path = write(home / "covtype" / "covtype.data", covtype_text().encode(), packed=True)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="gzip stream is broken"):
        load("covtype")


# ---------------------------------------------------------------- where they are looked for


def test_the_cache_is_searched_after_the_variable(home: Path, tmp_path: Path) -> None:
    write_mnist(tmp_path / "cache" / "mnist", train=40)
    assert len(load("mnist").train.y) == 40
    write_mnist(home / "mnist", train=50)
    assert len(load("mnist").train.y) == 50


def test_without_the_variable_only_the_cache_is_searched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", "")
    assert [place.name for place in sets.places()] == ["cache"]


def test_a_missing_data_set_says_where_it_was_looked_for_and_what_to_do(home: Path, tmp_path: Path) -> None:
    arrays = write_mnist(tmp_path / "cache" / "mnist")
    (tmp_path / "cache" / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UsageError) as error:
        load("mnist")
    text = str(error.value)
    assert f"{home / 'mnist'} (nothing there)" in text
    assert f"{tmp_path / 'cache' / 'mnist'} (without t10k-labels-idx1-ubyte)" in text
    assert "`coterie data get mnist`" in text
    assert "$COTERIE_DATA" in text
    assert all(name in text for name in arrays)


def test_an_unknown_data_set_lists_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean .*mnist"):
        load("mmist")
    with pytest.raises(UsageError, match="did you mean cifar10"):
        catalogue.check("cifar")


def test_every_loader_is_in_the_table_with_complete_files() -> None:
    names = [entry.name for entry in KNOWN]
    assert set(LOADERS) | {"goemotions", "heart-disease"} == set(names)
    for entry in KNOWN:
        assert entry.classes > 1
        assert entry.licence
        for file in entry.files:
            algorithm, _, digest = file.digest.partition(":")
            assert len(digest) == {"sha256": 64}[algorithm]
        if entry.files:
            assert entry.archive is not None or all(file.urls for file in entry.files)


# ---------------------------------------------------------------- the catalogue


CONTENT = {"a.txt": b"some rows\n" * 50, "b.txt": b"more rows\n" * 7}


def _toy(base: str, *, content: dict[str, bytes] = CONTENT, mirrors: tuple[str, ...] = ("",)) -> Known:
    files = tuple(
        File(name, len(data), f"sha256:{sha256(data).hexdigest()}", tuple(f"{base}{m}/{name}" for m in mirrors))
        for name, data in content.items()
    )
    return Known("toy", "a toy", 2, "none", files)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, bytes]]]:
    """A web server on loopback, and what it has to offer by path."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    offer: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = offer.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"") + ("/short/" in self.path)))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", offer
    server.shutdown()
    thread.join()
    server.server_close()


def _only(monkeypatch: pytest.MonkeyPatch, entry: Known) -> None:
    for module in (sets, catalogue):
        monkeypatch.setattr(module, "KNOWN", (entry,))


def _states() -> list[str]:
    return [row["state"] for row in catalogue.check("toy")]


def test_get_downloads_verifies_and_reports(
    home: Path, serve: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, offer = serve
    _only(monkeypatch, _toy(base))
    offer |= {"/a.txt": gzip.compress(CONTENT["a.txt"], mtime=0), "/b.txt": CONTENT["b.txt"]}
    assert catalogue.listing()[0]["state"] == "missing"
    seen: list[tuple[str, int, int]] = []
    assert catalogue.fetch("toy", None, lambda *step: seen.append(step)) == str(home / "toy")
    assert _states() == ["fine", "fine"]
    assert sorted(path.name for path in (home / "toy").iterdir()) == ["a.txt.gz", "b.txt"]
    assert seen[-1] == ("b.txt", len(CONTENT["b.txt"]), len(CONTENT["b.txt"]))
    assert catalogue.listing()[0]["state"] == "ready"
    assert catalogue.listing()[0]["found"] == str(home / "toy")


def test_get_keeps_what_is_sound_and_replaces_what_is_not(
    home: Path, serve: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, offer = serve
    _only(monkeypatch, _toy(base))
    write(home / "toy" / "a.txt", CONTENT["a.txt"])  # sound, and no longer on the server
    write(home / "toy" / "b.txt", b"cut off")
    assert _states() == ["fine", "damaged"]
    offer["/b.txt"] = gzip.compress(CONTENT["b.txt"], mtime=0)
    catalogue.fetch("toy")
    assert _states() == ["fine", "fine"]
    assert sorted(path.name for path in (home / "toy").iterdir()) == ["a.txt", "b.txt.gz"]


def test_get_tries_the_next_source(
    home: Path, serve: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, offer = serve
    _only(monkeypatch, _toy(base, mirrors=("/gone", "/other")))
    offer |= {f"/other/{name}": data for name, data in CONTENT.items()}
    catalogue.fetch("toy", home)
    assert _states() == ["fine", "fine"]


@pytest.mark.parametrize(
    ("mirror", "body", "says"),
    [
        ("", None, "HTTP 404"),
        ("", b"another file", "it holds 12 bytes, published are 500"),
        ("", b"x" * 500, "its sha256 is"),
        ("", b"x" * 501, "sends more than 500 bytes"),
        ("", gzip.compress(CONTENT["a.txt"], mtime=0)[:-9], "gzip stream is broken"),
        ("", gzip.compress(bytes(1 << 22), mtime=0), "sends more than 500|holds more than the published 500"),
        ("/short", b"x" * 499, "broke off|IncompleteRead|500"),
    ],
)
def test_a_bad_transfer_leaves_nothing_behind(
    home: Path,
    serve: tuple[str, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    mirror: str,
    body: bytes | None,
    says: str,
) -> None:
    base, offer = serve
    _only(monkeypatch, _toy(base, mirrors=(mirror,)))
    if body is not None:
        offer[f"{mirror}/a.txt"] = body
    write(home / "toy" / "a.txt", b"what was there")
    with pytest.raises(RunError, match=says) as error:
        catalogue.fetch("toy")
    assert str(home / "toy") in str(error.value)
    assert [path.name for path in (home / "toy").iterdir()] == ["a.txt"]
    assert (home / "toy" / "a.txt").read_bytes() == b"what was there"


def test_no_network_is_explained(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, _toy("http://127.0.0.1:9"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(RunError, match=r"could not be fetched .*refused.*proxy"):
        catalogue.fetch("toy")


def test_a_folder_that_cannot_be_written_is_explained(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, _toy("http://127.0.0.1:9"))
    write(home, b"a file where a folder should be")
    with pytest.raises(RunError, match="toy cannot be stored in"):
        catalogue.fetch("toy")


def _tar(content: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def test_an_archive_gives_only_the_wanted_files(
    home: Path, serve: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, offer = serve
    content = {f"inner/{name}": data for name, data in CONTENT.items()}
    packed = _tar({**content, "../outside.txt": b"!", "inner/readme.html": b"?"})
    archive = File("toy.tar.gz", len(packed), f"md5:{md5(packed, usedforsecurity=False).hexdigest()}", (f"{base}/t",))
    toy = _toy("", content=content)
    _only(monkeypatch, Known(toy.name, toy.title, 2, "none", toy.files, archive))
    offer["/t"] = packed
    catalogue.fetch("toy")
    assert _states() == ["fine", "fine"]
    files = sorted(str(path.relative_to(home)) for path in home.parent.rglob("*") if path.is_file())
    assert files == ["toy/inner/a.txt", "toy/inner/b.txt"]
    offer["/t"] = packed[:-1]
    (home / "toy" / "inner" / "a.txt").unlink()
    with pytest.raises(RunError, match="bytes"):
        catalogue.fetch("toy")


def test_the_built_in_set_needs_nothing() -> None:
    assert catalogue.check("digits")[0]["state"] == "fine"
    assert catalogue.fetch("digits") == "scikit-learn"
    assert load("digits").train.x.shape == (1797, 1, 8, 8)


def test_listing_without_any_data(home: Path) -> None:
    states = {row["name"]: row["state"] for row in catalogue.listing()}
    assert states.pop("digits") == "ready"
    assert set(states.values()) == {"missing"}
    write(home / "covtype" / "nothing", b"")
    write(home / "goemotions" / "dev.tsv", b"")
    states = {row["name"]: row["state"] for row in catalogue.listing()}
    assert states["covtype"] == "missing"
    assert states["goemotions"] == "incomplete"


# ---------------------------------------------------------------- the real thing


REAL = {
    "mnist": ((60_000, 1, 28, 28), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
    "fashion-mnist": ((60_000, 1, 28, 28), [6000] * 10),
    "cifar10": ((50_000, 3, 32, 32), [5000] * 10),
    "covtype": ((581_012, 54), [211840, 283301, 35754, 2747, 9493, 17367, 20510]),
}


def need(name: str) -> None:
    if sets.complete(sets.known(name)) is None:
        pytest.skip(f"{name} is not in {' or '.join(str(place) for place in sets.places())}")


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_the_published_data_are_read_whole(name: str) -> None:
    need(name)
    shape, counts = REAL[name]
    data = load(name)
    assert tuple(data.train.x.shape) == shape
    assert data.train.y.bincount().tolist() == counts
    assert (data.test is None) == (name == "covtype")
    if data.test is not None:
        assert len(data.test.y) == 10_000


@pytest.mark.data
@pytest.mark.parametrize("name", [*REAL, "goemotions"])
def test_the_published_data_have_their_checksums(name: str) -> None:
    need(name)
    assert {row["state"] for row in catalogue.check(name)} == {"fine"}


def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    found, theirs = digits(), load_digits()
    assert (16 * found.x[:, 0]).double().equal(torch.tensor(theirs.images))
    assert found.y.equal(torch.tensor(theirs.target))
