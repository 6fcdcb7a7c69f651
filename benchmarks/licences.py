"""Licences of everything that coterie installs, as installed packages state them.

python -m benchmarks.licences > docs/LICENSES.md
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OWN = "coterie"
GROUPS = {"running": "", "privacy": "privacy", "test": "test", "dev": "dev"}
GROUPS |= {
    name: name
    for name in (
        "files",
        "onnx",
        "text",
        "lora",
        "tensorboard",
        "mlflow",
        "wandb",
        "flower",
        "ray",
        "nvflare",
        "docs",
        "bench",
    )
}
TEXTS = (("MIT", "MIT License"), ("BSD-3-Clause", "BSD 3-Clause"), ("Apache-2.0", "Apache License"))


def declared(extra: str) -> list[Requirement]:
    """What pyproject.toml asks for, to run or with an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    found = [Requirement(text) for text in texts]
    inner = [one for requirement in found if requirement.name == OWN for e in requirement.extras for one in declared(e)]
    return [requirement for requirement in found if requirement.name != OWN] + inner


def needed(extra: str) -> set[str]:
    """The canonical names of all that is installed for it, whatever brought it along."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [one for one in declared(extra) if _applies(one, set())]
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen or not _installed(key[0]):
            continue
        seen.add(key)
        found = map(Requirement, distribution(key[0]).requires or [])
        waiting += [one for one in found if _applies(one, requirement.extras)]
    return {name for name, _ in seen}


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    """Whether it is installed here for a package of which these extras were asked for."""
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in {"", *extras})


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def licence(name: str) -> str:
    """The expression, or else the classifiers, or else the first line of what the package says of its licence."""
    about = distribution(name).metadata
    expression = about.get("License-Expression")
    if expression:
        return str(expression)
    classified = [c.rsplit(" :: ", 1)[-1] for c in about.get_all("Classifier") or [] if c.startswith("License :: ")]
    if classified and classified != ["OSI Approved"]:
        return ", ".join(classified)
    text = str(about.get("License") or "")
    known = [short for short, words in TEXTS if words.lower() in text.lower()]
    first = re.split(r"\n|\. ", text.strip())[0][:60]
    return known[0] if known and len(text) > 80 else first or "not stated"


def rows() -> list[tuple[str, str, str]]:
    """(package, licence, what it is needed for), the first group that needs it."""
    found: dict[str, str] = {}
    for group, extra in GROUPS.items():
        for name in needed(extra):
            found.setdefault(name, group)
    return [(name, licence(name), found[name]) for name in sorted(found)]


def main() -> None:
    print("# Licences of dependencies\n")
    print("coterie itself is Apache-2.0. It bundles none of these; pip installs them. `python -m benchmarks.licences`")
    print("writes this page from what the packages state about themselves.\n")
    print("| package | licence | needed for |\n|---|---|---|")
    for name, text, group in rows():
        print(f"| {name} | {text} | {group} |")


if __name__ == "__main__":
    main()
