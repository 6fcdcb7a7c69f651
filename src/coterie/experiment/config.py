"""The configuration: tables, read from TOML, `--set` and flags (flags over file over defaults), fully resolved."""

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coterie import machine, plugins
from coterie.errors import UsageError, unknown
from coterie.federation.stages.faults import FaultsTable as FaultsTable
from coterie.methods.registry import METHODS, MethodEntry, method_entry
from coterie.problems.catalogue.registry import PROBLEMS, problem_entry
from coterie.settings import Count, NonNegative, Positive, Probability, checked, explain
from coterie.stop import rule

T = TypeVar("T", bound=BaseModel)

VERSION = 1
NETWORK_CLIP = 3.0  # measured: see docs/byzantine.md
PLATFORM = "platform"
CODE = "code"  # the table of a record that says which code its names stood for
ENGINES = ("local", "embedded", "flower", "nvflare", "ray")
ONLY_SIMULATED = frozenset({"friends", "groups", "optimal-weights"})  # known to nobody in a real federation
DECISIVE = ("run.method", "run.problem", "run.seed", "run.dtype", "method.", "problem.")
"""The settings that decide what is computed, whatever is settled by measurement."""
OWN_DATA = "own data"  # the name of a problem that Python was given as an object
TABLES = ("run", "method", "problem", "federation", "faults", "privacy", "engine")
ALIASES = {"problem.active": "federation.active"}  # for other tools
BARE_DECIMAL = re.compile(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)  # people write them, TOML does not
_LISTED = ", ".join(f"[{name}]" for name in TABLES)


Range = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=2, max_length=2)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)  # TOML has types: true is not 1, "5" not 5


class RunTable(_Table):
    """[run]: what to run, for how long, and how often to record."""

    method: str = "meritfed"
    problem: str = "friends"
    rounds: Count = 200
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    engine: str = "local"
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    compile: Literal["auto"] | bool | Count = "auto"  # or the round from which programs are used, see `compiling.py`
    portable: bool = False  # the same bits on Intel and AMD, see `machine.py`
    record: Count = 1
    evaluate: Literal["auto", "all"] | Count = "auto"  # test rows of every record but the last; auto: `measuring.MOST`
    checkpoint: Literal["auto"] | Count = "auto"  # auto: after the first round that ends a second after the last one
    baselines: list[str] | None = None
    budget: Count | None = None  # bytes: the first round that reaches it is the last
    exchanges: Count | None = None  # rounds of communication: the first round that reaches them is the last
    stop: str | None = None  # a rule of `coterie.stop` that ends the run early
    log: list[Literal["tensorboard", "mlflow", "wandb"]] | None = None

    @field_validator("engine")
    @classmethod
    def _engine_is_known(cls, name: str) -> str:
        if name not in ENGINES and plugins.find("engine", name) is None:
            known = (*ENGINES, *(plugin.name for plugin in plugins.registered("engine")))
            raise ValueError(f"input should be one of {', '.join(map(repr, known))}")
        return name

    @model_validator(mode="after")
    def _portable_is_held(self) -> "RunTable":
        if self.portable and (
            self.threads not in ("auto", 1) or self.compile not in ("auto", False) or self.device != "cpu"
        ):
            raise ValueError("portable = true needs threads = 1, device = cpu and compile = false; leave these out")
        return self


class FederationTable(_Table):
    """[federation]: participation, screening, where the target is, how the local engine runs clients, and how long a
    network engine waits for them."""

    active: Probability = 1.0
    count: Count | None = None
    norm: Positive | None = None
    clip: Positive | Literal["none"] | None = None  # times the median; not set: none locally, NETWORK_CLIP elsewhere
    trust: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] | None = None
    guard: Literal["auto"] | bool = "auto"  # reject rounds that undo the training; auto: for methods that learn weights
    screen_copies: Literal["auto"] | bool = "auto"  # leave out updates that are 0 or copies; auto: as with guard
    compress: Literal["none", "top-k", "random-k", "sketch"] = "none"
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    feedback: bool = True
    secure: bool = False  # means are secure sums, see `federation/secure`
    reveal: Annotated[int, Field(ge=0)] = 4  # numbers that one client may show by one gather in a secure run
    threshold: Annotated[float, Field(gt=0.5, le=1.0)] = 2 / 3  # share of a sum's clients that must stay
    range: Positive = 1e6  # largest magnitude of a number in a secure sum
    partners: Annotated[int, Field(ge=2)] = 2  # a client is hidden as in a sum of so many equals
    target: Literal["server"] | Annotated[int, Field(ge=0)] = "server"
    mode: Literal["auto", "vmap", "sequential"] = "auto"
    chunk: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    memory: Annotated[int, Field(ge=1)] = 1024
    timeout: Positive = 60.0
    retries: Annotated[int, Field(ge=0, le=10)] = 1
    quorum: Count = 1
    patience: Positive = 120.0


class PrivacyTable(_Table):
    """[privacy]: clipping and noise at the clients, see `federation/privacy.py`; off unless clip is set.

    For problem `files`, see `problems/files/private.py`: `statistics` is the noise multiplier of the clients' one
    upload of statistics (`noise` unless given), `bounds` holds the lowest and the highest value of each numeric column,
    `categories` the words of a column that are public beside those of the target.
    """

    clip: Positive | None = None
    noise: NonNegative = 0.0
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    statistics: Positive | None = None
    bounds: dict[str, Range] | None = None
    categories: dict[str, list[str]] | None = None

    @model_validator(mode="after")
    def _noise_needs_a_clip(self) -> "PrivacyTable":
        if self.noise and self.clip is None:
            raise ValueError("noise is in lengths of the longest update; set privacy.clip, for example to 1.0")
        if self.statistics is not None and not self.noise:
            raise ValueError("statistics are noisy only where updates are; set privacy.noise, for example to 1.0")
        for column, (low, high) in (self.bounds or {}).items():
            if not low < high:
                raise ValueError(f"bounds of {column!r} are [{low:g}, {high:g}]; the first must be below the second")
        return self


class EngineTable(_Table):
    """[engine]: where an engine runs: the address of a Ray cluster that is there, and how many processes; for Flower,
    whether its simulation runtime stands in for SuperNodes.
    """

    address: str | None = None
    workers: Count | None = None
    simulation: bool = False


OPTIONAL: dict[str, type[BaseModel]] = {"faults": FaultsTable, "privacy": PrivacyTable, "engine": EngineTable}


@dataclass(frozen=True)
class Config:
    """A complete configuration. `method` and `problem` hold every setting of their factories."""

    run: RunTable
    method: dict[str, Any]
    problem: dict[str, Any]
    federation: FederationTable
    faults: FaultsTable = field(default_factory=FaultsTable)
    privacy: PrivacyTable = field(default_factory=PrivacyTable)
    engine: EngineTable = field(default_factory=EngineTable)

    def tables(self) -> dict[str, dict[str, Any]]:
        """The tables as plain data."""
        own = {name: getattr(self, name).model_dump() for name in ("run", "federation", *OPTIONAL)}
        return {**own, "method": dict(self.method), "problem": dict(self.problem)}

    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name, also those that are not set."""
        return {f"{name}.{key}": value for name, table in self.tables().items() for key, value in table.items()}

    def digest(self, prefixes: tuple[str, ...], left_out: Collection[str] = ()) -> str:
        """A name for the settings whose dotted names begin so."""
        kept = {k: v for k, v in self.settings().items() if k.startswith(prefixes) and k not in left_out}
        return blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without the settings that are not set (TOML has no null), nor tables that change nothing."""
        kept = {name: {k: v for k, v in table.items() if v is not None} for name, table in self.tables().items()}
        idle = [name for name, kind in OPTIONAL.items() if getattr(self, name) == kind()]
        return {"version": VERSION, **{name: kept[name] for name in TABLES if name not in idle}}

    def as_toml(self) -> str:
        """The settings as TOML, enough to run them again."""
        return tomli_w.dumps(self.as_dict())

    def as_record(self) -> str:
        """The text of a result's config.toml: the settings, and the platform that it is made on."""
        code = {plugin.name: plugin.identity() for plugin in self.plugged_in()}
        made_with = {PLATFORM: machine.platform(), **({CODE: code} if code else {})}
        return f"{self.as_toml()}\n{tomli_w.dumps(made_with)}"

    def plugged_in(self) -> list[plugins.Plugin]:
        """The methods and problems of somebody else's that it names."""
        return plugins_in(self.run.method, self.run.problem, self.run.baselines or [])

    def modules(self) -> tuple[str, ...]:
        """The modules of these plug-ins: their works and named tuples may occur in orders to nodes."""
        return tuple(dict.fromkeys(module for plugin in self.plugged_in() for module in plugin.modules))

    def with_run(self, **changes: Any) -> "Config":
        """The same with other [run] values."""
        return replace(self, run=self.run.model_copy(update=changes))

    def with_federation(self, **changes: Any) -> "Config":
        """The same with other [federation] values."""
        return replace(self, federation=self.federation.model_copy(update=changes))

    def for_baseline(self, method: str) -> "Config":
        """The same problem and federation with another method at its defaults, without baselines of its own."""
        entry, other = problem_entry(self.run.problem), method_entry(method)
        settings = checked(other.make, "method", _followed(other, entry.tuned.get(method, {}), self.problem))
        run = self.run.model_copy(update={"method": method, "baselines": []})
        return replace(self, run=run, method=settings)


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


def plugins_in(method: str, problem: str, baselines: Sequence[str] = ()) -> list[plugins.Plugin]:
    """The plug-ins behind the names of a configuration, each once; nothing is imported.

    Args:
        method: the name of the method.
        problem: the name of the problem; one that Python was given as an object has a method of that kind.
        baselines: the names of the baselines.
    """
    if problem == OWN_DATA:
        return []
    own = {entry.name for entry in METHODS}
    found = [plugins.find("method", name) for name in dict.fromkeys([method, *baselines]) if name not in own]
    if problem not in {entry.name for entry in PROBLEMS}:
        found.append(plugins.find("problem", problem))
    return [plugin for plugin in found if plugin is not None]


def code_changes(config: Config, file: Path) -> list[str]:
    """What a user should know before a run is resumed: which code is not the one that it was begun with.

    Args:
        config: the configuration, whose plug-ins have been imported.
        file: the config.toml of the result.
    """
    begun = _record(file, CODE)
    other = [plugin.name for plugin in config.plugged_in() if begun.get(plugin.name, "") not in ("", plugin.identity())]
    return [f"resumed with other code, so that the result may differ: {', '.join(other)} has changed"] if other else []


def platform_of(file: Path) -> dict[str, Any]:
    """The platform that a result was begun on, by its config.toml; empty where it names none."""
    return _record(file, PLATFORM)


def _record(file: Path, table: str) -> dict[str, Any]:
    """What a config.toml records beside the settings."""
    found = recorded_tables(file).get(table)
    return found if isinstance(found, dict) else {}


def recorded_tables(file: Path) -> dict[str, Any]:
    """The tables of a config.toml as they are, unchecked; empty where it cannot be read."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        return {}  # `load` says what is wrong with it


def resolve(tables: Mapping[str, Mapping[str, Any]]) -> Config:
    """Complete and check raw tables."""
    for name in tables:
        if name not in TABLES:
            raise unknown("table", name, TABLES)
    given: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    given |= plugins.canonical_tables(_without_aliases(tables))
    run = checked_table(RunTable, "run", given["run"])
    federation = checked_table(FederationTable, "federation", given["federation"])
    method, problem = method_entry(run.method), problem_entry(run.problem)
    federation = clipped(run, federation)
    if run.baselines is None:
        run = run.model_copy(update={"baselines": default_baselines(run)})
    for name in run.baselines or []:
        method_entry(name)
    if run.stop is not None:
        rule(run.stop)
    settings = {**problem.tuned.get(method.name, {}), **given["method"]}
    settings = checked(method.make, "method", _followed(method, settings, given["problem"]))
    if "everyone" in method.make(**settings).needs and _has_everyone(problem.make):
        given["problem"] = {"everyone": True, **given["problem"]}
    optional: dict[str, Any] = {name: checked_table(kind, name, given[name]) for name, kind in OPTIONAL.items()}
    return Config(run, settings, checked(problem.make, "problem", given["problem"]), federation, **optional)


def default_baselines(run: RunTable) -> list[str]:
    """The baselines of a run that names none: those of its problem, where weights are learned on this machine."""
    wanted = method_entry(run.method).learns_weights and run.engine == "local"  # a network is slow
    return [name for name in problem_entry(run.problem).baselines if name != run.method] if wanted else []


def clipped(run: RunTable, federation: FederationTable) -> FederationTable:
    """[federation] with the clip of network engines written in, where none was asked for."""
    if run.engine == "local" or federation.clip is not None or federation.secure:
        return federation
    return federation.model_copy(update={"clip": NETWORK_CLIP})


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
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}.") from None
    for record in (PLATFORM, CODE):  # where a run was made, and with what code; no settings
        data.pop(record, None)
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
    """`--set dotted.key=value` pairs; a value is read as TOML where it is that, .5 and 5. as numbers, else as text."""
    return dict(map(_pair, pairs))


def _pair(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"--set {text!r} has no '='; write --set table.key=value.")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return key.strip(), float(value) if BARE_DECIMAL.fullmatch(value.strip()) else value.strip()
