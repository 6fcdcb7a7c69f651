"""What `mkdocs build` does beyond its configuration: API pages name public imports, whatever file defines them.

A page says `::: coterie.methods.meritfed`. Static analysis cannot follow that import where a module has the same name,
or where a package fills its namespace when it runs. Then the file below the package that defines the name is taken,
and the heading stays. `:::rest coterie.federation` stands for the public names of a package that its page does not
list.
"""

import ast
import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
DIRECTIVE = re.compile(r"^::: (?P<package>coterie(?:\.\w+)*)\.(?P<name>\w+)$", re.MULTILINE)


REST = re.compile(r"^:::rest (?P<package>coterie(?:\.\w+)*)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page whose `:::` lines are complete and can be resolved by static analysis."""
    return DIRECTIVE.sub(_resolvable, complete(markdown))


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
