"""What there is: list."""

from typing import Annotated, Any

import typer

from coterie.cli.app import Json, app, print_rows
from coterie.errors import unknown


@app.command("list", epilog="Example: coterie list methods --json")
def list_(what: Annotated[str, typer.Argument(help="methods, problems or papers")], json: Json = False) -> None:
    """What there is: methods, problems, papers."""
    print_rows(_listing(what), json)


def _listing(what: str) -> list[dict[str, Any]]:
    if what not in ("methods", "problems", "papers"):
        raise unknown("list", what, ("methods", "problems", "papers"))
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
