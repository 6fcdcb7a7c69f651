"""Types of settings, shared by problems and methods; their bounds become error texts and help."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from coterie.errors import UsageError, unknown

Count = Annotated[int, Field(ge=1)]
BatchSize = Annotated[int, Field(ge=1)] | Literal["all"]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]
Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class StatisticsPrivacy:
    """How the clients hide their part of federated statistics.

    Args:
        noise: the multiplier of the Gaussian noise that each client adds.
        bounds: by numeric column, the lowest and the highest value that counts; public.
        categories: by column of words, words that are public beside those of the target.
    """

    noise: float
    bounds: Mapping[str, Sequence[float]]
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)


def schema(make: Callable[..., Any]) -> type[BaseModel]:
    """The keyword-only settings of a factory, as a model with their types, bounds and defaults."""
    hints = get_type_hints(make, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return create_model(f"{make.__name__}_settings", __config__=ConfigDict(extra="forbid", strict=True), **fields)


def checked(make: Callable[..., Any], table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a factory, complete and within bounds; an error names the key and the remedy."""
    known = schema(make)
    for key in values:
        if key not in known.model_fields:
            raise unknown(f"key in [{table}]", key, known.model_fields)
    try:
        return known(**values).model_dump()
    except ValidationError as error:
        raise UsageError(explain(error, table)) from None


def explain(error: ValidationError, table: str) -> str:
    """pydantic's complaints as one paragraph, with the keys as the user writes them."""
    texts = []
    for problem in error.errors():
        place = ".".join([table, *(str(part) for part in problem["loc"][:1])]) if table else str(problem["loc"][0])
        given = problem.get("input")
        text = problem["msg"].removeprefix("Value error, ")
        texts.append(f"{place} = {given!r}: {text[0].lower()}{text[1:]}")
    return "; ".join(dict.fromkeys(texts)) + "."
