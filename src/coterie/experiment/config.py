"""The configuration: four tables, read from TOML, `--set` and flags (flags over file over defaults), fully resolved."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.errors import UsageError, unknown
from coterie.methods.registry import MethodEntry, method_entry
from coterie.problems.parameters import Count, Positive, Probability, checked, explain
from coterie.problems.registry import problem_entry

T = TypeVar("T", bound="_Table")

VERSION = 1
TABLES = ("run", "method", "problem", "federation")
ALIASES = {"problem.active": "federation.active"}  # for other tools
_LISTED = ", ".join(f"[{name}]" for name in TABLES)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)  # TOML has types: true is not 1, "5" not 5


class RunTable(_Table):
    """[run]: what to run, for how long, and how often to record."""

    method: str = "meritfed"
    problem: str = "friends"
    rounds: Count = 200
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    engine: Literal["local"] = "local"
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    compile: bool = False
    record: Count = 1
    checkpoint: Count = 1
    baselines: list[str] | None = None


class FederationTable(_Table):
    """[federation]: participation, screening, where the target is, and how the local engine runs clients."""

    active: Probability = 1.0
    count: Count | None = None
    norm: Positive | None = None
    clip: Positive | None = None
    compress: Literal["none", "top-k", "random-k", "sketch"] = "none"
    ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    feedback: bool = True
    target: Literal["server"] | Annotated[int, Field(ge=0)] = "server"
    mode: Literal["auto", "vmap", "sequential"] = "auto"
    chunk: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    memory: Annotated[int, Field(ge=1)] = 1024


@dataclass(frozen=True)
class Config:
    """A complete configuration. `method` and `problem` hold every setting of their factories."""

    run: RunTable
    method: dict[str, Any]
    problem: dict[str, Any]
    federation: FederationTable

    def tables(self) -> dict[str, dict[str, Any]]:
        """The four tables as plain data."""
        run, federation = self.run.model_dump(), self.federation.model_dump()
        return {"run": run, "method": dict(self.method), "problem": dict(self.problem), "federation": federation}

    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name, also those that are not set."""
        return {f"{name}.{key}": value for name, table in self.tables().items() for key, value in table.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without the settings that are not set (TOML has no null)."""
        kept = {name: {k: v for k, v in table.items() if v is not None} for name, table in self.tables().items()}
        return {"version": VERSION, **kept}

    def as_toml(self) -> str:
        """The text of config.toml, enough to run it again."""
        return tomli_w.dumps(self.as_dict())

    def with_run(self, **changes: Any) -> "Config":
        """The same with other [run] values."""
        return Config(self.run.model_copy(update=changes), self.method, self.problem, self.federation)

    def with_federation(self, **changes: Any) -> "Config":
        """The same with other [federation] values."""
        return Config(self.run, self.method, self.problem, self.federation.model_copy(update=changes))

    def for_baseline(self, method: str) -> "Config":
        """The same problem and federation with another method at its defaults, without baselines of its own."""
        entry, other = problem_entry(self.run.problem), method_entry(method)
        settings = checked(other.make, "method", _followed(other, entry.tuned.get(method, {}), self.problem))
        run = self.run.model_copy(update={"method": method, "baselines": []})
        return Config(run, settings, self.problem, self.federation)


def load(
    file: Path | None = None, sets: Mapping[str, Any] | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Resolve a configuration. sets and flags are {'table.key': value}; later sources win."""
    tables = _without_aliases(_read(file)) if file else {}
    for dotted, value in [*(sets or {}).items(), *(flags or {}).items()]:
        table, _, key = ALIASES.get(dotted, dotted).partition(".")
        if not key:
            raise UsageError(f"{dotted!r} names no setting; write table.key=value, for example method.step=0.1.")
        if table not in TABLES:
            raise unknown("table", table, TABLES)
        tables.setdefault(table, {})[key] = value
    return resolve(tables)


def resolve(tables: Mapping[str, Mapping[str, Any]]) -> Config:
    """Complete and check raw tables."""
    for name in tables:
        if name not in TABLES:
            raise unknown("table", name, TABLES)
    given: dict[str, dict[str, Any]] = {name: {} for name in TABLES} | _without_aliases(tables)
    run = checked_table(RunTable, "run", given["run"])
    federation = checked_table(FederationTable, "federation", given["federation"])
    method, problem = method_entry(run.method), problem_entry(run.problem)
    if run.baselines is None:
        wanted = problem.baselines if method.learns_weights else ()
        run = run.model_copy(update={"baselines": [name for name in wanted if name != run.method]})
    for name in run.baselines or []:
        method_entry(name)
    settings = {**problem.tuned.get(method.name, {}), **given["method"]}
    settings = checked(method.make, "method", _followed(method, settings, given["problem"]))
    if "everyone" in method.make(**settings).needs and _has_everyone(problem.make):
        given["problem"] = {"everyone": True, **given["problem"]}
    return Config(run, settings, checked(problem.make, "problem", given["problem"]), federation)


def _followed(method: MethodEntry, settings: Mapping[str, Any], problem: Mapping[str, Any]) -> dict[str, Any]:
    """A method's settings: where every client of the problem is a target, and the method can, it serves all of them."""
    serves = problem.get("everyone") is True and _has_everyone(method.make)
    return {"everyone": True, **settings} if serves else dict(settings)


def _has_everyone(make: Callable[..., Any]) -> bool:
    return "everyone" in signature(make).parameters


def checked_table(kind: type[T], name: str, values: Mapping[str, Any]) -> T:
    """One table, complete and within bounds."""
    for key in values:
        if key not in kind.model_fields:
            raise unknown(f"key in [{name}]", key, kind.model_fields)
    try:
        return kind(**values)
    except ValidationError as error:
        raise UsageError(explain(error, name)) from None


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no configuration file {file}.") from None
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder; name the configuration file in it, or use `coterie resume`.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is not valid TOML: {error}.") from None
    version = data.pop("version", VERSION)
    if not isinstance(version, int) or version > VERSION:
        raise UsageError(
            f"{file} has configuration version {version!r}; this coterie reads up to {VERSION}. Install a newer one."
        )
    for name, table in data.items():
        if name in TABLES and not isinstance(table, dict):
            raise UsageError(f"{file}: {name} must be a table, [{name}], not {table!r}.")
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {name} stands outside of any table; put it below one of {_LISTED}.")
    return data


def _without_aliases(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """A copy in which settings stand where they belong; an alias yields to the setting itself."""
    plain = {name: dict(table) for name, table in tables.items()}
    for alias, dotted in ALIASES.items():
        (old, key), (new, name) = alias.split("."), dotted.split(".")
        if key in plain.get(old, {}):
            value = plain[old].pop(key)
            plain.setdefault(new, {}).setdefault(name, value)
    return plain


def parse_sets(pairs: list[str]) -> dict[str, Any]:
    """`--set dotted.key=value` pairs; a value is read as TOML where it is TOML, else as text."""
    return dict(map(_pair, pairs))


def _pair(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"--set {text!r} has no '='; write --set table.key=value.")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
