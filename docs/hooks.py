"""What `mkdocs build` does beyond its configuration: complete API pages, without an import of coterie.

A page says `::: coterie.methods.meritfed`. Static analysis cannot follow that import where a module has the same name,
or where a package fills its namespace when it runs. Then the file below the package that defines the name is taken,
and the heading stays. `:::rest coterie.federation` stands for the public names of a package that its page does not
list, `:::registered problems` for the factories of all registered problems.

Docstrings of factories are completed when coterie is imported (`coterie.settings.documented`). `Docstrings` writes the
same text from the source alone: the meaning of a setting from the docstring or from the glossary, its type in words.
"""

import ast
import re
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any

try:
    from griffe import Extension
except ImportError:  # the tests use these functions where mkdocs is not installed
    Extension = object

SOURCE = Path(__file__).resolve().parent.parent / "src"
DIRECTIVE = re.compile(r"^::: (?P<package>coterie(?:\.\w+)*)\.(?P<name>\w+)$", re.MULTILINE)
REST = re.compile(r"^:::rest (?P<package>coterie(?:\.\w+)*)$", re.MULTILINE)
REGISTERED = re.compile(r"^:::registered problems$", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)Example:\n(?=(?:\1 +.*\n|\n)*?\1 +>>> )", re.MULTILINE)
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "of length ≥"}
KINDS = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page whose `:::` lines are complete and can be resolved by static analysis."""
    return REGISTERED.sub(_problems, DIRECTIVE.sub(_resolvable, complete(markdown)))


def complete(markdown: str) -> str:
    """A page with an entry for every public name, where it asks for the rest."""
    listed = {directive[0].removeprefix("::: ") for directive in DIRECTIVE.finditer(markdown)}

    def entries(rest: re.Match[str]) -> str:
        paths = [f"{rest['package']}.{name}" for name in _public(rest["package"])]
        return "\n\n".join(f"::: {path}" for path in paths if path not in listed)

    return REST.sub(entries, markdown)


def _public(package: str) -> list[str]:
    """`__all__` of a package, as far as it is written down."""
    init = SOURCE.joinpath(*package.split("."), "__init__.py")
    for statement in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            parts = statement.value.elts if isinstance(statement.value, ast.List | ast.Tuple) else []
            return [str(part.value) for part in parts if isinstance(part, ast.Constant)]
    return []


def _imported(init: Path) -> set[str]:
    """The names that a package imports, also those for type checkers alone."""
    tree = ast.parse(init.read_text(encoding="utf-8"))
    found = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.asname or alias.name for alias in found}


def _resolvable(directive: re.Match[str]) -> str:
    package, name = directive["package"], directive["name"]
    folder = SOURCE.joinpath(*package.split("."))
    init, module = folder / "__init__.py", folder / f"{name}.py"
    if init.exists() and name in _imported(init) and not module.exists():
        return directive[0]
    defines = re.compile(rf"^(def|class) {name}\b", re.MULTILINE)
    homes = [file for file in sorted(folder.rglob("*.py")) if defines.search(file.read_text(encoding="utf-8"))]
    home = module if module in homes else homes[0] if len(homes) == 1 else None
    if home is None:
        return directive[0]
    path = ".".join(home.relative_to(SOURCE).with_suffix("").parts)
    return f"::: {path}.{name}\n    options:\n      heading: {package}.{name}\n      toc_label: {name}"


class Docstrings(Extension):  # type: ignore[misc, valid-type]
    """Docstrings as a reader of the site needs them: every setting has a line, and examples are code."""

    def on_instance(self, *, node: Any, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of whatever was just read from the source.

        Args:
            node: its syntax tree.
            obj: griffe's object.
        """
        if obj.docstring is None:
            return
        text = obj.docstring.value
        if isinstance(node, ast.FunctionDef) and obj.parent.is_module:
            text = documented(text, node, Path(obj.filepath))
        if isinstance(node, ast.ClassDef):
            text = fields(text, node)
        obj.docstring.value = examples(text)


def fields(doc: str, node: ast.ClassDef) -> str:
    """A docstring whose Args are attributes where the class is a NamedTuple: no function takes them."""
    named = "NamedTuple" in map(ast.unparse, node.bases)
    return re.sub(r"^( *)Args:$", r"\1Attributes:", doc, flags=re.MULTILINE) if named else doc


def examples(doc: str) -> str:
    """A docstring whose examples with `>>>` have the heading that griffe shows as code."""
    return EXAMPLE.sub(r"\1Examples:\n", doc + "\n").rstrip("\n")


def documented(doc: str, function: ast.FunctionDef, file: Path) -> str:
    """The docstring of a factory with one line per setting, as `help()` shows it; any other docstring as it is.

    Args:
        doc: the docstring.
        function: the definition.
        file: where it is.
    """
    doc, decorators = cleandoc(doc), {ast.unparse(node).partition("(")[0] for node in function.decorator_list}
    if "validated" in decorators:
        meanings = _glossary("METHOD_SETTINGS")
    elif problems().get(function.name) == file:
        meanings = _glossary("PROBLEM_SETTINGS")
    else:
        return doc
    meanings = {**meanings, **_args(doc)}
    settings = zip(function.args.kwonlyargs, map(_annotation, function.args.kwonlyargs), strict=True)
    lines = [f"    {arg.arg}: {meanings.get(arg.arg, '')} ({_words(kind, file)})." for arg, kind in settings]
    before, found, rest = doc.partition("\n\nArgs:\n")
    after = rest.partition("\n\n")[2]
    if not found:
        before, found, rest = doc.partition("\n\nExample:\n")
        after = f"Example:\n{rest}" if found else ""
    args = ["Args:\n" + "\n".join(lines)] if lines else []
    return "\n\n".join([before, *args, *([after] if after else [])])


@cache
def problems() -> dict[str, Path]:
    """The factories of the registered problems, in order: the file of each by its name."""
    catalogue = ast.literal_eval(_assigned(_tree(_module("coterie.problems.catalogue.registry")))["CATALOGUE"])
    pairs = [(name.replace("-", "_"), home) for name, home, _ in catalogue]
    return {name: _defining(_module(f"coterie.problems.{home}"), name) for name, home in pairs}


def _problems(_: re.Match[str]) -> str:
    """One entry per registered problem, headed by the name that configurations use."""
    entry = "::: {path}.{name}\n    options:\n      heading: {shown}\n      toc_label: {shown}"
    return "\n\n".join(
        entry.format(
            path=".".join(home.relative_to(SOURCE).with_suffix("").parts), name=name, shown=name.replace("_", "-")
        )
        for name, home in problems().items()
    )


def _args(doc: str) -> dict[str, str]:
    """The lines below `Args:` by name, without the full stop."""
    section = doc.partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\n +", " ", text).rstrip(".") for name, text in entries}


def _glossary(name: str) -> dict[str, str]:
    value = _assigned(_tree(SOURCE / "coterie/glossary.py"))[name]
    return dict(ast.literal_eval(value))


def _annotation(argument: ast.arg) -> ast.expr:
    if argument.annotation is None:
        raise ValueError(f"the setting {argument.arg} has no type")
    return argument.annotation


def _words(kind: ast.expr, file: Path) -> str:
    """A type in words, as `coterie.settings` says it: "number > 0", "'md' or 'smd'"."""
    if isinstance(kind, ast.BinOp):
        return f"{_words(kind.left, file)} or {_words(kind.right, file)}"
    if isinstance(kind, ast.Subscript):
        of = ast.unparse(kind.value)
        parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        if of == "Literal":
            return " or ".join(repr(ast.literal_eval(part)) for part in parts)
        if of == "Annotated":
            fields = [part for part in parts[1:] if isinstance(part, ast.Call)]
            bounds = [
                f"{BOUNDS[rule.arg]} {_number(rule.value, file):g}"
                for field in fields
                for rule in field.keywords
                if rule.arg in BOUNDS
            ]
            return f"{_words(parts[0], file)} {' and '.join(bounds)}".strip()
        return f"list, each: {_words(parts[0], file)}" if of == "list" else of
    name = ast.unparse(kind)
    if name == "None":
        return "not set"
    alias = _alias(name, file)
    return KINDS.get(name, name) if alias is None else _words(*alias)


def _number(value: ast.expr, file: Path) -> float:
    """A bound: a number, a power such as 2**31, a constant of the module, or the length of one."""
    constants = _assigned(_tree(file))
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Pow):
        return _number(value.left, file) ** _number(value.right, file)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "len":
        return float(len(ast.literal_eval(constants[ast.unparse(value.args[0])])))
    if isinstance(value, ast.Name):
        return _number(constants[value.id], file)
    return float(ast.literal_eval(value))


def _alias(name: str, file: Path) -> tuple[ast.expr, Path] | None:
    """What a name of a module stands for, and the file that says so; nothing for a class or a builtin."""
    tree = _tree(file)
    if name in _assigned(tree):
        return _assigned(tree)[name], file
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coterie"):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _alias(alias.name, _module(node.module or ""))
    return None


def _assigned(tree: ast.Module) -> dict[str, Any]:
    """The values of a module's constants."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = node.value
    return found


def _module(name: str) -> Path:
    path = SOURCE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _defining(file: Path, name: str) -> Path:
    """The file that defines a function: this one, or the one that it imports the function from."""
    tree = _tree(file)
    if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
                return _defining(_module(node.module or ""), name)
    return file


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
