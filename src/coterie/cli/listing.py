"""What there is: list."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from coterie.cli.app import Json, app, print_json, print_rows
from coterie.errors import UsageError, unknown

LISTS = ("methods", "problems", "papers", "models")


@app.command("list", epilog="Example: coterie list methods meritfed")
def list_(
    what: Annotated[str, typer.Argument(help="methods, problems, papers or models")],
    name: Annotated[
        str | None, typer.Argument(help="One method or problem: what it does, its settings, and what it needs.")
    ] = None,
    json: Json = False,
) -> None:
    """List methods, problems, papers or models; or explain one method or problem."""
    if what not in LISTS:
        raise unknown("list", what, LISTS)
    if name is None:
        print_rows(_listing(what), json)
    elif what in ("methods", "problems"):
        _explain(_entry(what, name), json)
    else:
        raise UsageError(f"only methods and problems are explained one by one; write: coterie list {what}.")


def _listing(what: str) -> list[dict[str, Any]]:
    if what == "models":
        from coterie.problems.models.zoo import MODELS

        return [{"name": name, "what": _first_line(make)} for name, make in MODELS.items()]
    if what == "problems":
        from coterie.problems.catalogue.registry import PROBLEMS

        return [{"name": p.name, "what": p.summary} for p in PROBLEMS]
    from coterie.methods.registry import METHODS

    if what == "methods":
        return [
            {"name": m.name, "learns weights": m.learns_weights, "paper": m.paper, "what": m.summary} for m in METHODS
        ]
    papers: dict[str, list[str]] = {}
    for m in METHODS:
        papers.setdefault(m.paper, []).append(m.name)
    return [{"paper": paper, "methods": names} for paper, names in sorted(papers.items())]


def _first_line(make: Any) -> str:
    """The summary of a network's docstring; a variant has the options that it fixes behind it."""
    options = ", ".join(f"{key}={value}" for key, value in getattr(make, "keywords", {}).items())
    text = str(getattr(make, "func", make).__doc__).split("\n")[0]
    return f"{text.rstrip('.')}; {options}." if options else text


def _entry(what: str, name: str) -> dict[str, Any]:
    """Everything that a user may want to know of one method or problem."""
    if what == "methods":
        from coterie.methods.registry import method_entry

        method = method_entry(name)
        made = method.make()
        needs = [" and ".join(sorted(each)) for each in (made.needs, *made.alternatives)]
        facts = {"paper": method.paper, "learns weights": method.learns_weights, "needs": " or ".join(needs)}
        return {"name": name, "what": method.summary, **facts, **_documentation(method.make, "method")}
    from coterie.problems.catalogue.registry import problem_entry

    problem = problem_entry(name)
    tuned = {"baselines": list(problem.baselines), "tuned for": sorted(problem.tuned)}
    return {"name": name, "what": problem.summary, **tuned, **_documentation(problem.make, "problem")}


def _documentation(make: Callable[..., Any], glossary: str) -> dict[str, Any]:
    """What a factory says of itself and of each setting."""
    from coterie.settings import describe, overview

    settings = [
        {"setting": s.name, "values": s.values, "default": s.default, "meaning": s.meaning}
        for s in describe(make, glossary)
    ]
    return {"about": overview(make), "settings": settings}


def _explain(entry: dict[str, Any], json: bool) -> None:
    if json:
        print_json(entry)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(f"{entry['name']}: {entry['what']}\n\n{entry['about']}\n", soft_wrap=True)
    for key in [key for key in entry if key not in ("name", "what", "about", "settings")]:
        console.print(f"{key}: {_shown(entry[key])}", soft_wrap=True)
    console.print()
    print_rows([{**setting, "default": _shown(setting["default"])} for setting in entry["settings"]], json=False)


def _shown(value: Any) -> str:
    """A value as configuration files have it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
