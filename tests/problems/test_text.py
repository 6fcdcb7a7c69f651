"""Text encoders, on a tiny BERT with random weights and a made-up vocabulary.

Most of it needs transformers, which is not among the test extras: `pip install -c constraints.txt -e '.[text]'` first.
"""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_data import write_goemotions
from torch import Tensor, nn
from torch.func import grad, vmap

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.federation import Batch
from coterie.numerics.tracing import Untraceable, recorded
from coterie.problems import Context
from coterie.problems.catalogue.mixture import TUNED_AT_ONCE, mixture
from coterie.problems.data import sets
from coterie.problems.models import FlatModel, build, text
from coterie.problems.models.text import Encoder, TextClassifier, encoder_folder, open_encoder, pooled
from coterie.problems.tasks.supervised import Supervised

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "joy", "love", "fear", "of", *"12345"]
TEXTS = ["joy of love", "fear", "love love love of fear 1 2 3 4 5", "something unheard of"]


def write_encoder(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="needs coterie[text]")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text, "user_cache_path", lambda _: tmp_path / "cache")
    return tmp_path / "cache" / "embeddings"


@pytest.fixture
def encoder(folder: Path, cache: Path) -> Encoder:
    return open_encoder(str(folder))


# ---------------------------------------------------------------- features


def test_the_vocabulary_is_used(encoder: Encoder) -> None:
    tokens = encoder.tokenize(TEXTS, 8)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (4, 8)
    assert tokens[1].tolist() == [2, WORDS.index("fear"), 3, 0, 0, 0, 0, 0]
    assert tokens[2, -1] == WORDS.index("[SEP]")  # cut, not left open
    assert encoder.tokenize(TEXTS, 999).shape == (4, 12)


def test_a_text_has_no_more_tokens_than_the_network_takes(encoder: Encoder) -> None:
    assert encoder.longest == 16
    assert encoder.tokenize(["joy " * 100], 999).shape == (1, 16)


def test_features_are_the_mean_state_at_norm_root_width(encoder: Encoder) -> None:
    tokens = encoder.tokenize(TEXTS, 16)
    real = (tokens != 0).float()
    with torch.no_grad():
        states = encoder.network(input_ids=tokens, attention_mask=real.long()).last_hidden_state
        ours = pooled(encoder.network, tokens, encoder.pad)
    mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    torch.testing.assert_close(ours, mean / mean.norm(dim=1, keepdim=True) * 8**0.5)


def test_padding_does_not_matter(encoder: Encoder) -> None:
    together = encoder._features(TEXTS, 16)
    for i, one in enumerate(TEXTS):
        torch.testing.assert_close(encoder._features([one], 16)[0], together[i], atol=1e-5, rtol=1e-4)


def test_the_encoder_leaves_the_global_generator_alone(folder: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two = (open_encoder(str(folder)).network.state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any("pooler" in name for name in one)


# ---------------------------------------------------------------- the cache


def test_texts_are_embedded_once(
    encoder: Encoder, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "coterie"):
        first = encoder.embed(TEXTS, 16)
        monkeypatch.setattr(Encoder, "_features", lambda *_: pytest.fail("embedded again"))
        assert torch.equal(encoder.embed(TEXTS, 16), first)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        f"embedding 4 texts with {encoder.folder}"
    ]
    assert len(list(cache.iterdir())) == 1


def test_other_texts_lengths_and_weights_have_other_keys(encoder: Encoder, tmp_path: Path) -> None:
    other = open_encoder(str(write_encoder(tmp_path / "other")))
    assert other._key(TEXTS, 16) == encoder._key(TEXTS, 16)
    weights = next((tmp_path / "other").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    keys = [
        *(encoder._key(texts, 16) for texts in (TEXTS, TEXTS[::-1], TEXTS[:3], ["".join(TEXTS)])),
        encoder._key(TEXTS, 8),
        other._key(TEXTS, 16),
    ]
    assert len(set(keys)) == 6


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\x00" * 100])
def test_a_damaged_cache_is_made_anew(encoder: Encoder, cache: Path, damage: bytes) -> None:
    first = encoder.embed(TEXTS, 16)
    (path,) = cache.iterdir()
    sound = path.read_bytes()
    path.write_bytes(damage)
    assert torch.equal(encoder.embed(TEXTS, 16), first)
    assert path.read_bytes() == sound


def test_without_a_place_to_keep_them_features_are_made_all_the_same(
    encoder: Encoder, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert encoder.embed(TEXTS, 16).shape == (4, 8)
    assert "cannot be kept" in caplog.text


class _Attention(nn.Module):
    """A stand-in for an encoder: every token's state is a mean over the open places, and shapes are noted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.states = nn.Embedding(9, 4).double()
        self.seen: list[tuple[int, int]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        self.seen.append((input_ids.shape[0], input_ids.shape[1]))
        x = self.states(input_ids)
        return SimpleNamespace(last_hidden_state=x + torch.softmax(x @ x.mT + attention_mask[:, 0], 2) @ x)


def test_texts_are_taken_by_length_and_come_back_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two texts of similar length, cut to the longer one; a token of padding inside a text is left out."""
    monkeypatch.setattr(text, "ALIKE", 2)
    tokens = torch.tensor([[1, 0, 3, 4, 5, 6], [2, 0, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0], [7, 8, 0, 0, 0, 0]])
    network = _Attention()
    by_length = pooled(network, tokens, 0)
    assert network.seen == [(2, 2), (2, 6)]
    torch.testing.assert_close(by_length, vmap(lambda row: pooled(network, row[None], 0)[0])(tokens))
    assert network.seen[2:] == [(1, 6)]  # vmap shows no numbers, so nothing is cut
    with recorded(), pytest.raises(Untraceable, match="lengths"):  # a program would be of one length
        pooled(network, tokens, 0)


# ---------------------------------------------------------------- tuning


def classifier(encoder: Encoder, dtype: torch.dtype = torch.float64) -> FlatModel:
    head = build("mlp", (encoder.width,), 3, seed=0)
    return FlatModel(TextClassifier(encoder, head)).to(dtype=dtype, device="cpu")


def test_at_the_start_tuning_sees_the_fixed_features(encoder: Encoder) -> None:
    head = build("logistic", (8,), 3, seed=0)
    model = FlatModel(TextClassifier(encoder, head))
    with torch.no_grad():
        fixed = head(encoder._features(TEXTS, 16))
        torch.testing.assert_close(model(model.start, encoder.tokenize(TEXTS, 16)), fixed, atol=1e-5, rtol=1e-4)
    assert model.size == sum(p.numel() for part in (encoder.network, head) for p in part.parameters())


def test_gradients_and_products_by_vmap_are_those_one_by_one(encoder: Encoder) -> None:
    model = classifier(encoder)
    task = Supervised.of(model, "cross_entropy")
    tokens = encoder.tokenize(TEXTS, 16)
    y = torch.tensor([0, 1, 2, 0])
    torch.manual_seed(0)
    thetas = model.start + 0.01 * torch.randn(2, model.size, dtype=torch.float64)
    v = torch.randn(2, model.size, dtype=torch.float64)
    rows = torch.tensor([[0, 1], [2, 3]])

    def gradient(theta: Tensor, some: Tensor) -> Tensor:
        return task.gradient(theta, Batch((tokens[some], y[some])))

    def product(theta: Tensor, u: Tensor, some: Tensor) -> Tensor:
        return task.hvp(theta, u, Batch((tokens[some], y[some])))

    together, curved = vmap(gradient)(thetas, rows), vmap(product)(thetas, v, rows)
    for k in range(2):
        torch.testing.assert_close(together[k], gradient(thetas[k], rows[k]))
        step = 1e-6 / float(v[k].norm())
        ahead, behind = (gradient(thetas[k] + s * step * v[k], rows[k]) for s in (1, -1))
        torch.testing.assert_close(curved[k], (ahead - behind) / (2 * step), atol=1e-5, rtol=1e-4)


def test_a_frozen_encoder_in_the_network_is_no_variable(encoder: Encoder) -> None:
    encoder.network.requires_grad_(False)
    model = FlatModel(TextClassifier(encoder, nn.Linear(8, 3)))
    assert model.size == 27
    tokens = encoder.tokenize(TEXTS, 16)
    features = encoder._features(TEXTS, 16)
    got = grad(lambda t: model(t, tokens).square().sum())(model.start)
    other = FlatModel(nn.Linear(8, 3))
    torch.testing.assert_close(
        got, grad(lambda t: other(t, features).square().sum())(model.start), atol=1e-3, rtol=1e-4
    )


# ---------------------------------------------------------------- the problem


@pytest.fixture
def emotions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "home"))
    monkeypatch.setattr(sets, "user_cache_path", lambda _: tmp_path / "nothing")
    write_goemotions(tmp_path / "home" / "goemotions")


SMALL = {"clients": 4, "friends": 2, "rows": 6}


@pytest.mark.parametrize("fine_tune", [False, True])
@pytest.mark.parametrize("mode", ["vmap", "sequential"])
def test_the_problem_runs(folder: Path, emotions: None, fine_tune: bool, mode: str) -> None:
    problem = {**SMALL, "data": "goemotions", "encoder": str(folder), "fine_tune": fine_tune, "tokens": 8}
    tables: dict[str, Any] = {f"problem.{key}": value for key, value in problem.items()}
    flags = {"run.method": "meritfed", "run.problem": "mixture", "run.rounds": 2, "federation.mode": mode}
    result = run_rounds(assemble(load(sets={**tables, "run.baselines": [], "method.batch": 4}, flags=flags)), None)
    assert result.summary["outcome"] == "finished", result.summary["message"]
    assert bool(torch.isfinite(result.view.model).all())
    assert 0.0 <= result.history[-1]["test_accuracy"] <= 1.0


def test_tuned_and_fixed_problems_start_at_the_same_loss(folder: Path, emotions: None) -> None:
    fixed, tuned = (
        mixture(Context(0), data="goemotions", encoder=str(folder), fine_tune=tune, **SMALL) for tune in (False, True)
    )
    assert fixed.train.columns[0].shape == (24, 8)
    assert tuned.train.columns[0].dtype == torch.int64
    assert isinstance(tuned.task, Supervised)
    assert tuned.task.block == TUNED_AT_ONCE
    for k in range(4):
        a, b = (float(p.task.full_loss(p.start, p.train.client(k))) for p in (fixed, tuned))
        assert a == pytest.approx(b, rel=1e-4)


# ---------------------------------------------------------------- where encoders are


def test_an_installed_package_is_looked_into_and_not_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tiny_encoder_package"
    (package / "model" / "1_Pooling").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "model" / "1_Pooling" / "config.json").write_text("{}")
    for path in folder.iterdir():
        (package / "model" / path.name).write_bytes(path.read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_encoder("tiny-encoder-package").folder == package / "model"


@pytest.mark.parametrize("name", ["no-such-package-here", "a/folder/that/is/not", "os.path", "json.decoder", "sys"])
def test_what_is_neither_a_folder_nor_a_package_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"problem\.encoder: .* neither a folder nor an installed package.*pip"):
        encoder_folder(name)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(UsageError, match=r"no folder with config\.json and \*\.safetensors"):
        encoder_folder(str(tmp_path))
    with pytest.raises(UsageError, match=r"json holds no folder with config\.json"):
        encoder_folder("json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_broken_encoder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(UsageError, match=r"problem\.encoder: .* cannot be read as an encoder"):
        open_encoder(str(tmp_path))


def test_a_missing_extra_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"transformers, which is not installed.*pip install 'coterie\[text\]'"):
        open_encoder("anything")
