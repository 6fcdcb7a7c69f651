"""What there is: list."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from coterie.cli.app import RESEARCH, Json, app, print_json, print_rows
from coterie.errors import UsageError, unknown

LISTS = ("methods", "problems", "engines", "papers", "models")


@app.command("list", rich_help_panel=RESEARCH, epilog="Example: coterie list methods meritfed")
def list_(
    what: Annotated[str, typer.Argument(help="methods, problems, engines, papers or models")],
    name: Annotated[
        str | None, typer.Argument(help="One method or problem: what it does, its settings, and what it needs.")
    ] = None,
    json: Json = False,
) -> None:
    """List methods, problems, engines, papers or models; or explain one method or problem.

    Methods, problems and engines come from coterie or from installed packages that register them.
    """
    if what not in LISTS:
        raise unknown("list", what, LISTS)
    if name is None:
        print_rows(_listing(what), json)
    elif what in ("methods", "problems"):
        from coterie.consent import allowing
        from coterie.plugins import admit_typed

        with allowing([]):
            admit_typed([name])
            _explain(_entry(what, name), json)
    else:
        raise UsageError(f"only methods and problems are explained one by one; write: coterie list {what}.")


def _listing(what: str) -> list[dict[str, Any]]:
    from coterie.plugins import listed

    if what == "models":
        from coterie.problems.models.zoo import MODELS

        return [{"name": name, "what": _first_line(make)} for name, make in MODELS.items()]
    if what == "problems":
        from coterie.problems.catalogue.registry import PROBLEMS

        own = [{"name": p.name, "from": p.source, "what": p.summary} for p in PROBLEMS]
        outside = listed("problem", (p.name for p in PROBLEMS))
        return [*own, *({"name": p.name, "from": p.source, "what": p.about} for p in outside)]
    if what == "engines":
        from coterie.cli.engines import listing

        return listing()
    from coterie.methods.registry import METHODS

    if what == "methods":
        keys = ("name", "from", "learns weights", "can be secure", "paper", "what")
        rows: list[tuple[Any, ...]] = [
            (m.name, m.source, m.learns_weights, m.secure, m.paper, m.summary) for m in METHODS
        ]
        rows += [(p.name, p.source, None, "", "", p.about) for p in listed("method", (m.name for m in METHODS))]
        return [dict(zip(keys, row, strict=True)) for row in rows]
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
        facts = {
            "from": method.source,
            "paper": method.paper,
            "learns weights": method.learns_weights,
            "can be secure": method.secure or "unknown",
            "needs": " or ".join(needs),
        }
        return {"name": name, "what": method.summary, **facts, **_documentation(method.make, "method")}
    from coterie.problems.catalogue.registry import problem_entry

    problem = problem_entry(name)
    tuned = {"from": problem.source, "baselines": list(problem.baselines), "tuned for": sorted(problem.tuned)}
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
