"""Plug-ins: methods, problems and engines that somebody else's code defines.

A name is one of three things: coterie's own ("fednest"), which no package can replace; one that an installed package
registers as an entry point of `coterie.methods`, `coterie.problems` or `coterie.engines` ("soba"); or the name of code,
"package.module:factory" or "mine.py:factory". `coterie.consent` decides on the import of the last kind. Installing a
package is consent to the factories that it registers, on this machine and for its user's own commands: nothing is
imported before somebody names it, and a file can choose among registered factories only. A process that works for a
server elsewhere asks for more (`require_admitted`).
"""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from coterie.consent import FILE, admits, allow_code, resolve
from coterie.errors import CoterieError, UsageError, clean, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["method", "problem", "engine"]
OWN = "coterie"
SETTINGS = ("run.method", "run.problem", "problem.model", "problem.loss")
"""The settings that may name code."""


class Plugin(NamedTuple):
    """One name and the code behind it, not yet imported.

    Args:
        name: as configurations have it.
        module: a dotted name, or the absolute path of a file.
        attribute: the factory in the module.
        installed: the distribution and its version, where it is registered as an entry point.
        about: what the distribution says of itself, in one line.
    """

    name: str
    module: str
    attribute: str
    installed: str = ""
    about: str = ""

    @property
    def code(self) -> str:
        """The name of the code, which also works where the registered one is taken."""
        return f"{self.module}:{self.attribute}"

    @property
    def package(self) -> str:
        """The package around the module, or the module itself."""
        return self.module if self.module.endswith(FILE) else self.module.partition(".")[0]

    @property
    def source(self) -> str:
        """Where it comes from, for people: a distribution with its version, or the path of a file."""
        return self.installed or (self.module if self.module.endswith(FILE) else _distribution(self.package))

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules whose works and named tuples may occur in orders to nodes."""
        return modules_of(Path(self.module).stem if self.module.endswith(FILE) else self.module)

    def load(self, setting: str) -> Callable[..., Any]:
        """The factory; the package of an entry point needs no further consent.

        Args:
            setting: where the name stands, for errors.
        """
        return resolve(self.code, setting, [self.package] if self.installed else None)

    def identity(self) -> str:
        """Where the code comes from, and the digest of its file; the module must have been imported."""
        name = Path(self.module).stem if self.module.endswith(FILE) else self.module
        file = getattr(sys.modules.get(name), "__file__", None)
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else "unknown"
        return f"{self.source}, sha256 {digest}"


@dataclass(frozen=True)
class Entry:
    """A method or problem in its registry.

    Args:
        name: its name; the factory has the same one with underscores.
        home: the module that defines the factory, below the package of its registry; imported when it is used.
        summary: what it is, in one line.
        source: where it comes from: coterie, a distribution with its version, or a file.
        factory: the factory itself, where it is somebody else's.
    """

    name: str
    home: str
    summary: str
    source: str = OWN
    factory: Callable[..., Any] | None = None

    @property
    def identifier(self) -> str:
        """The name of the factory."""
        return self.name.replace("-", "_")

    def found(self, package: str) -> Callable[..., Any]:
        """The factory, from its module below a package."""
        found: Callable[..., Any] = self.factory or getattr(import_module(f"{package}.{self.home}"), self.identifier)
        return found


E = TypeVar("E", bound=Entry)


def entry(kind: Kind, name: str, own: Iterable[E], outside: Callable[[Plugin, Callable[..., Any]], E]) -> E:
    """The entry of that name; an unknown one is an error that lists the nearest.

    Args:
        kind: "method" or "problem".
        name: a registered name, package.module:factory, or file.py:factory.
        own: coterie's own entries, which come first.
        outside: makes the entry of a plug-in and its factory.
    """
    by_name = {entry.name: entry for entry in own}
    if name in by_name:
        return by_name[name]
    plugin = find(kind, name)
    if plugin is None:
        raise unknown(kind, name, (*by_name, *(other.name for other in registered(kind))))
    return outside(plugin, plugin.load(f"run.{kind}"))


def modules_of(module: str) -> tuple[str, ...]:
    """A module, the package around it and the modules inside that."""
    package = module.partition(".")[0]
    return tuple(dict.fromkeys((package, module, f"{package}.*")))


def find(kind: Kind, name: str) -> Plugin | None:
    """The plug-in of that name; None where no package registers it, an error where several do.

    Args:
        kind: "method", "problem" or "engine".
        name: the name of code, or one that a package registers.
    """
    if is_code(name):
        module, _, attribute = canonical(name).rpartition(":")
        return Plugin(canonical(name), module, attribute)
    if name.endswith(FILE):
        raise UsageError(f"run.{kind} = {clean(name)!r} names a file; name the function in it too: {name}:{kind}.")
    found = [plugin for plugin in registered(kind) if plugin.name == name]
    if len(found) > 1:
        both = " and ".join(f"{plugin.installed} ({plugin.code})" for plugin in found)
        raise UsageError(
            f"run.{kind} = {clean(name)!r} is registered by {both}; write package.module:factory, or uninstall one."
        )
    return found[0] if found else None


def registered(kind: Kind) -> list[Plugin]:
    """The entry points of installed packages, sorted by name; their metadata alone is read, nothing is imported.

    Args:
        kind: "method", "problem" or "engine".
    """
    from importlib.metadata import entry_points  # here: it imports much that --help does not need

    found = {(point.name, point.value): point for point in entry_points(group=f"coterie.{kind}s")}
    return [_of(point) for _, point in sorted(found.items())]


def listed(kind: Kind, own: Iterable[str]) -> list[Plugin]:
    """The registered plug-ins by the names that work: the name of its code where a registered name is taken.

    Args:
        kind: "method", "problem" or "engine".
        own: coterie's own names.
    """
    plugins = registered(kind)
    taken = Counter([*own, *(plugin.name for plugin in plugins)])
    return [plugin if taken[plugin.name] == 1 else plugin._replace(name=plugin.code) for plugin in plugins]


def is_code(name: object) -> bool:
    """Whether this is the name of code, module:attribute."""
    return isinstance(name, str) and ":" in name


def canonical(name: str) -> str:
    """The name of code as configurations keep it, so that another process finds it: with the file's absolute path."""
    module, colon, attribute = name.rpartition(":")
    return f"{Path(module).expanduser().resolve()}:{attribute}" if colon and module.endswith(FILE) else name


def canonical_tables(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tables of settings in which names of code are canonical."""
    done = {name: dict(table) for name, table in tables.items()}
    for table, key in (setting.split(".") for setting in SETTINGS):
        if is_code(done.get(table, {}).get(key)):
            done[table][key] = canonical(done[table][key])
    baselines = done.get("run", {}).get("baselines")
    if isinstance(baselines, list):
        done["run"]["baselines"] = [canonical(name) if is_code(name) else name for name in baselines]
    return done


def typed(settings: Mapping[str, Any]) -> None:
    """Admit the code that the operator's own words name: flags, and settings by `--set`.

    Args:
        settings: values by dotted name.
    """
    values = [settings.get(name) for name in SETTINGS]
    baselines = settings.get("run.baselines")
    admit_typed([*values, *(baselines if isinstance(baselines, list) else [])])


def admit_typed(names: Iterable[object]) -> None:
    """Admit the modules of those names that are names of code, for as long as the consent of this process lasts."""
    for name in names:
        if isinstance(name, str) and is_code(name):
            module = canonical(name).rpartition(":")[0]
            if module.endswith(FILE) and not Path(module).is_file():
                raise UsageError(f"{clean(name)!r}: there is no file {clean(module)}.")
            if module.endswith(FILE) or all(part.isidentifier() for part in module.split(".")):
                allow_code(module)  # else the resolver says what is wrong with the name


def require_admitted(plugins: Iterable[Plugin]) -> None:
    """Refuse plug-ins that this machine's operator has not admitted, registered ones too: a server elsewhere named
    them."""
    for plugin in plugins:
        if not admits(plugin.module):
            raise UsageError(
                f"{plugin.name} is code of {plugin.source}, and a configuration from elsewhere names it. If you trust "
                f"it, admit {plugin.package} on this machine: under [code] allow in your own configuration, or in the "
                "variable COTERIE_ALLOW_CODE of the process that starts the node."
            )


def label(name: str) -> str:
    """A short name for tables, charts and folders: of "mine.py:two_lines", "two-lines".

    Args:
        name: the name of a method or problem.
    """
    return re.sub(r"[^\w.-]+", "-", name.rpartition(":")[2]).replace("_", "-") if is_code(name) else name


def labels(names: Iterable[str]) -> dict[str, str]:
    """Short names that differ: with the module's name before them where two would be equal."""
    names = list(names)
    count = Counter(map(label, names))
    return {name: label(name) if count[label(name)] == 1 else _longer(name) for name in names}


def _longer(name: str) -> str:
    module = name.rpartition(":")[0]
    return f"{Path(module).stem if module.endswith(FILE) else module}-{label(name)}" if module else name


def returning(factory: Callable[..., Any], kind: type[Any], setting: str, remedy: str) -> Callable[..., Any]:
    """A factory of somebody else's whose failures, and results of another kind, are explained.

    Args:
        factory: what makes a method or a problem.
        kind: what it must return.
        setting: "run.method = mine.py:soba", for errors.
        remedy: what to change where it returns something else.
    """

    @wraps(factory)
    def make(*arguments: Any, **settings: Any) -> Any:
        try:
            made = factory(*arguments, **settings)
        except CoterieError:
            raise
        except Exception as error:  # whatever somebody's own code raises
            where = _place(error)
            raise UsageError(f"{setting} failed: {type(error).__name__}: {error}{where}.") from error
        if not isinstance(made, kind):
            raise UsageError(f"{setting} returned a {type(made).__name__}, no {kind.__name__}; {remedy}")
        return made

    return make


def summary(factory: Callable[..., Any]) -> str:
    """The first line of a factory's docstring."""
    return (factory.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def _place(error: BaseException) -> str:
    """The line at which an error was raised."""
    frames = extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _of(point: "EntryPoint") -> Plugin:
    """An entry point as a plug-in; other packages wrote the text."""
    said: Mapping[str, Any] = {} if point.dist is None else point.dist.metadata.json
    installed = clean(f"{said.get('name', 'unknown package')} {said.get('version', '')}")
    module, _, attribute = point.value.partition("[")[0].strip().partition(":")
    return Plugin(point.name, module, attribute, installed, clean(str(said.get("summary", ""))))


def _distribution(package: str) -> str:
    """The distribution that a package belongs to, with its version; the package itself where there is none."""
    from importlib.metadata import packages_distributions, version

    names = packages_distributions().get(package)
    return f"{names[0]} {version(names[0])}" if names else package
