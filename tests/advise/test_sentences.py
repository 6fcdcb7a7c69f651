"""What an advice says, in words, of what it found."""

from typing import Any

import pytest

from coterie.advise.sentences import headline, next_step

AUC = {"name": "auc", "label": "AUC", "better": "higher", "scale": "number", "rows": "", "unit": ""}


def advice(*, vetoed: bool, differs: str = "") -> dict[str, Any]:
    """An advice to use one's own model."""
    partner = {"name": "va.csv", "share": 0.0, "differs": [{"text": differs}] if differs else []}
    return {
        "measure": AUC,
        "partners": [partner],
        "delivered": {"what": "alone", "vetoed": vetoed},
        "alone": {"choice": "linear", "values": {"linear": {"auc": 0.65}}},
        "worth_it": "no",
        "data": {"target_rows": 85},
    }


@pytest.mark.parametrize(
    ("vetoed", "why"), [(True, "were not predicted clearly better"), (False, "tell more about your rows than yours do")]
)
def test_a_model_that_was_not_delivered_may_have_been_better_but_not_clearly(vetoed: bool, why: str) -> None:
    said = headline(advice(vetoed=vetoed))
    assert said.startswith("No: use your own model (AUC 0.650)")
    assert why in said


@pytest.mark.parametrize(("text", "end"), [("a code for no value?", "value?"), ("it runs the other way", "way.")])
def test_a_question_has_one_mark_at_its_end(text: str, end: str) -> None:
    assert next_step(advice(vetoed=False, differs=text)).endswith(end)
