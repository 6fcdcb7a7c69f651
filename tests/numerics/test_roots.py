"""Square roots that do not depend on the processor."""

import math
import re
from pathlib import Path

import pytest
import torch

import coterie
from coterie.numerics import Draw
from coterie.numerics.roots import square_root

SOURCE = Path(coterie.__file__).parent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_are_within_one_rounding_of_the_nearest_number(dtype: torch.dtype) -> None:
    x = Draw.of(0).uniform(2000, dtype=dtype) * 10.0 ** Draw.of(1).integers(20, 2000).sub(10).to(dtype)
    nearest = torch.tensor([math.sqrt(value) for value in x.tolist()], dtype=torch.float64).to(dtype)
    apart = (square_root(x) - nearest).abs()
    assert (apart <= torch.finfo(dtype).eps * nearest).all()


def test_a_root_is_made_of_operations_whose_rounding_is_fixed() -> None:
    x = Draw.of(0).uniform(500, dtype=torch.float64)
    by_hand = [1.0 / (1.0 / math.sqrt(value)) for value in x.tolist()]
    assert square_root(x).tolist() == by_hand


def test_ends_of_the_range() -> None:
    x = torch.tensor([0.0, math.inf, 1e-45, 4.0, -1.0])
    assert square_root(x)[:2].tolist() == [0.0, math.inf]
    assert float(square_root(x)[2]) == pytest.approx(math.sqrt(float(x[2])), rel=1e-6)
    assert float(square_root(x)[3]) == 2.0
    assert square_root(x)[4].isnan()


def test_the_derivative_is_that_of_a_root() -> None:
    x = torch.tensor(9.0, requires_grad=True)
    square_root(x).backward()
    assert float(x.grad) == pytest.approx(1 / 6)


def test_the_source_takes_no_other_roots_of_tensors() -> None:
    """torch's sqrt has other last bits on Intel than on AMD."""
    other = re.compile(r"\.sqrt\(\)|torch\.sqrt\(|\.pow\(0?\.5\)")
    found = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if other.search(line)
    ]
    assert found == [], "use coterie.numerics.roots.square_root"
