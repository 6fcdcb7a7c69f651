"""What `mkdocs build` does beyond its configuration: API pages name public imports, whatever file defines them.

A page says `::: coterie.methods.meritfed`. Static analysis cannot follow that import where a module has the same name,
or where a package fills its namespace when it runs. Then the file below the package that defines the name is taken,
and the heading stays.
"""

import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
DIRECTIVE = re.compile(r"^::: (?P<package>coterie(?:\.\w+)*)\.(?P<name>\w+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page whose `:::` lines can be resolved by static analysis."""
    return DIRECTIVE.sub(_resolvable, markdown)


def _resolvable(directive: re.Match[str]) -> str:
    package, name = directive["package"], directive["name"]
    folder = SOURCE.joinpath(*package.split("."))
    init, module = folder / "__init__.py", folder / f"{name}.py"
    imported = init.exists() and re.search(rf"\b{name}\b", init.read_text(encoding="utf-8"))
    if imported and not module.exists():
        return directive[0]
    defines = re.compile(rf"^(def|class) {name}\b", re.MULTILINE)
    homes = [file for file in sorted(folder.rglob("*.py")) if defines.search(file.read_text(encoding="utf-8"))]
    home = module if module in homes else homes[0] if len(homes) == 1 else None
    if home is None:
        return directive[0]
    path = ".".join(home.relative_to(SOURCE).with_suffix("").parts)
    return f"::: {path}.{name}\n    options:\n      heading: {package}.{name}\n      toc_label: {name}"
