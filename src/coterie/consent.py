"""Code by consent: files may name code as "module:attribute", but only what the caller has admitted is imported.

A caller admits a module by `--allow-code`, by `coterie.allow_code(…)`, or in `config.toml` of the user's own
configuration folder:

    [code]
    allow = ["mine", "/home/me/models.py"]

An entry is a module that Python finds by itself (with it, all modules inside), the path of one `.py` file, or the
address of a Ray cluster, whose replies can run code here. The current folder is never searched: a file in it is
admitted by its path, `--allow-code ./mine.py`. A name of code that is typed on the command line admits its own module
(`coterie.plugins.typed`), and installing a package admits the factories that it registers. Consent belongs to a
process. The processes that it starts inherit it by an environment variable; no result folder, configuration of a run,
checkpoint or message can give it.
"""

import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from platformdirs import user_config_path

from coterie.errors import UsageError, clean

VARIABLE = "COTERIE_ALLOW_CODE"  # how child processes inherit the consent of their parent
FILE = ".py"
ADDRESS = re.compile(r"(ray://)?[\w.\-]+:\d+|(ray://)?\[[0-9a-fA-F:.]+\]:\d+")
OWN = re.compile(r"auto|local|(ray://)?(127\.0\.0\.1|localhost|\[::1\]):\d+")  # clusters of this machine


def allow_code(*modules: str) -> None:
    """Let configurations and models name code in these modules, in this process and in those that it starts.

    Args:
        modules: names of modules that Python finds, paths of `.py` files, or addresses of Ray clusters.

    Example:
        >>> coterie.allow_code("mine")  # doctest: +SKIP
    """
    entries = dict.fromkeys([*_inherited(), *(_entry(module) for module in modules)])
    os.environ[VARIABLE] = "\n".join(entries)


@contextmanager
def allowing(modules: Iterable[str]) -> Iterator[None]:
    """`allow_code` for the duration of a `with` statement."""
    before = os.environ.get(VARIABLE)
    allow_code(*modules)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def admitted() -> frozenset[str]:
    """What this process may import by name: by its caller's word, and by the user's own configuration."""
    return frozenset([*_inherited(), *_configured(user_config_path("coterie") / "config.toml")])


def resolve(name: str, setting: str, entries: Iterable[str] | None = None) -> Callable[..., Any]:
    """The function or class that "module:attribute" names; refused before any import unless its module is admitted.

    Args:
        name: "package.module:attribute" or "path/to/file.py:attribute".
        setting: where the name stands, for errors: "problem.model".
        entries: the modules and files that are admitted; by default those of this process.

    Example:
        >>> resolve("mine:network", "problem.model", ["mine"])  # doctest: +SKIP
    """
    module, _, attribute = name.rpartition(":")
    is_file = module.endswith(FILE)
    if not attribute.isidentifier() or not (is_file or _is_dotted(module)):
        raise UsageError(f"{setting} = {clean(name)!r} is no name of code; write package.module:function.")
    entry = _admission(module, is_file, frozenset(entries) if entries is not None else admitted())
    if entry is None and is_file and not Path(module).expanduser().exists():
        raise UsageError(
            f"{setting} = {clean(name)!r} names code in a file that is not there. If it was moved, and you trust it, "
            f"add --allow-code with its new path: FOLDER/{clean(Path(module).name)}."
        )
    if entry is None:
        raise UsageError(
            f"{setting} = {clean(name)!r} names code, and a file that names code does not run it. If you trust "
            f"{clean(module)}, add --allow-code {_remedy(module, is_file)} (in Python: coterie.allow_code(…)), or list "
            f"it under [code] allow in {user_config_path('coterie') / 'config.toml'}."
        )
    return _defined(_loaded(module, entry, setting), attribute, name, setting, entry)


def admits(module: str) -> bool:
    """Whether this process may import a module, by its dotted name or by the path of its file."""
    return _admission(module, module.endswith(FILE), admitted()) is not None


def load(entry: str, setting: str) -> str:
    """Import what an operator has listed, a module or the path of a file, and return the name of the module.

    Args:
        entry: a dotted name, or a path that ends in .py.
        setting: where the entry stands, for errors.
    """
    entry = _entry(entry)
    return _loaded(entry, entry, setting).__name__


def is_address(value: object) -> TypeGuard[str]:
    """Whether this is HOST:PORT or ray://HOST:PORT."""
    return isinstance(value, str) and ADDRESS.fullmatch(value) is not None


def check_address(address: str, setting: str) -> None:
    """Refuse a cluster elsewhere that only a file names: it would get the rows, and its replies can run code here.

    Args:
        address: HOST:PORT or ray://HOST:PORT; those of this machine, "auto" and "local" need no consent.
        setting: where the address stands, for errors.
    """
    if not OWN.fullmatch(address) and address not in admitted():
        raise UsageError(
            f"{setting} = {clean(address)!r} is another machine, which would get the clients' rows and could run code "
            f"here. If you trust it, add --allow-code {clean(address)}."
        )


def search_path() -> str:
    """PYTHONPATH for a process that should find the modules that this one finds; start it with -P."""
    return os.pathsep.join(path for path in sys.path if path)


def _entry(text: str) -> str:
    """An entry in its one form: a dotted name, or the absolute path of a file."""
    if text.endswith(FILE):
        path = Path(text).expanduser().resolve()
        if not path.is_file():
            raise UsageError(f"--allow-code {text}: there is no file {path}.")
        if not path.stem.isidentifier() or "\n" in str(path):
            raise UsageError(f"--allow-code {text}: rename the file so that its name is that of a Python module.")
        return str(path)
    if not _is_dotted(text) and not is_address(text):
        raise UsageError(
            f"--allow-code {clean(text)!r} is neither the name of a module, nor a path that ends in .py, nor HOST:PORT."
        )
    return text


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _inherited() -> list[str]:
    return [entry for entry in os.environ.get(VARIABLE, "").split("\n") if entry]


def _configured(path: Path) -> list[str]:
    """The allow-list of the user's own configuration; a file that others may write is no consent of the user's."""
    try:
        about = path.stat()
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from None
    if os.name == "posix" and (about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise UsageError(
            f"{path} can admit code only if it is yours and nobody else can write it: chown it, and chmod go-w {path}."
        )
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}.") from None
    table = tables.get("code", {})
    entries = table.get("allow", []) if isinstance(table, dict) and table.keys() <= {"allow"} else None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise UsageError(f'{path}: write [code] with allow = ["module", "/path/of/file.py"] and nothing else.')
    return [_entry(entry) for entry in entries]


def _admission(module: str, is_file: bool, entries: frozenset[str]) -> str | None:
    """The entry that admits a module: the module, a package around it, or a file of that name."""
    if is_file:
        path = Path(module).expanduser().resolve()
        if str(path) in entries or path.exists():
            return str(path) if str(path) in entries else None
        module = path.stem  # the file was elsewhere when its name was written down
    files = sorted(entry for entry in entries if entry.endswith(FILE) and Path(entry).stem == module)
    if len(files) > 1:
        raise UsageError(f"{module} could be {' or '.join(files)}; admit one of them only.")
    if is_file:
        return next(iter(files), None)
    parts = module.split(".")
    packages = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next(iter(files), None) or next((name for name in packages if name in entries), None)


def _remedy(module: str, is_file: bool) -> str:
    return clean(module) if is_file or not Path(f"{module}{FILE}").is_file() else f"./{module}{FILE}"


def _loaded(module: str, entry: str, setting: str) -> ModuleType:
    try:
        return _from_file(Path(entry), setting) if entry.endswith(FILE) else import_module(module)
    except UsageError:
        raise
    except ImportError as error:
        local = Path(f"{module}{FILE}").is_file() and not entry.endswith(FILE)
        hint = (
            f" The current folder is not searched; admit the file by --allow-code ./{module}{FILE}, or name it by its "
            f"path: {module}{FILE}:…."
            if local
            else ""
        )
        raise UsageError(f"{setting}: {module} cannot be imported: {error}.{hint}") from None
    except Exception as error:  # whatever somebody's own code raises
        raise UsageError(f"{setting}: importing {module} failed: {type(error).__name__}: {error}.") from None


def _from_file(path: Path, setting: str) -> ModuleType:
    """The module of one file, under the file's name, so that other processes can name its functions."""
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if Path(getattr(loaded, "__file__", None) or "?").resolve() == path:
            return loaded
        raise UsageError(f"{setting}: another module is called {name}; rename {path}.")
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{setting}: {path} is no file of Python.")
    module = sys.modules[name] = module_from_spec(spec)
    beside = str(path.parent)
    sys.path.append(beside)  # last, so that nothing beside the file stands in for an installed module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(beside)
    return module


def _defined(module: ModuleType, attribute: str, name: str, setting: str, entry: str) -> Callable[..., Any]:
    found = vars(module).get(attribute)
    if found is None:
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        offered = f" It defines {', '.join(own[:8])}." if own else ""
        raise UsageError(f"{setting}: {module.__name__} has no {attribute!r}.{offered}")
    if not callable(found):
        raise UsageError(f"{setting}: {name} is a {type(found).__name__}, not a function.")
    home = getattr(found, "__module__", None)
    if home != module.__name__ and not f"{home}.".startswith(f"{entry}."):  # a package may gather what it defines
        raise UsageError(
            f"{setting}: {name} is not defined in {module.__name__} but comes from {home}; admit and name that module, "
            "or define a function in your own."
        )
    return found


__all__ = [
    "VARIABLE",
    "admits",
    "admitted",
    "allow_code",
    "allowing",
    "check_address",
    "is_address",
    "load",
    "resolve",
    "search_path",
]
