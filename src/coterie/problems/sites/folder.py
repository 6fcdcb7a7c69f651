"""The folder of a study at its coordinator: study.toml and what lies beside it."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from coterie.errors import UsageError
from coterie.problems.sites.terms import Terms
from coterie.storage import make_folder, write_atomically

FILE = "study.toml"


class Study(NamedTuple):
    """A study at its coordinator.

    Args:
        folder: its folder.
        name: how it is called.
        terms: what its sites are told of the columns.
        data: the coordinator's own file.
        engine: nvflare, or embedded where it is tried on one machine only.
        host: the coordinator's address, which sites dial.
        ports: the ports that sites dial.
        sites: the sites that are invited, in the order of their clients.
        problem: settings of the problem that runs of this study begin with.
    """

    folder: Path
    name: str
    terms: Terms
    data: Path
    engine: str
    host: str = "localhost"
    ports: tuple[int, ...] = ()
    sites: tuple[str, ...] = ()
    problem: dict[str, Any] = {}  # noqa: RUF012

    def write(self) -> Path:
        """Write study.toml; the file."""
        make_folder(self.folder)
        about = {
            "name": self.name,
            "engine": self.engine,
            "data": str(self.data.resolve()),
            "host": self.host,
            "ports": list(self.ports),
            "sites": list(self.sites),
        }
        text = tomli_w.dumps({"study": about, "problem": self.problem, "terms": self.terms.as_dict()})
        path = self.folder / FILE
        write_atomically(path, (HEADER + text).encode())
        return path

    @staticmethod
    def read(folder: str | Path) -> "Study":
        """The study in a folder."""
        path = Path(folder) / FILE
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
            about = tables["study"]
            return Study(
                Path(folder).resolve(),
                str(about["name"]),
                Terms.from_dict(tables["terms"]),
                Path(about["data"]),
                str(about["engine"]),
                str(about["host"]),
                tuple(map(int, about["ports"])),
                tuple(map(str, about["sites"])),
                dict(tables.get("problem", {})),
            )
        except FileNotFoundError:
            raise UsageError(
                f"{folder} is no study: it has no {FILE}. Make one with: coterie study new {folder} --label COLUMN "
                "--data mine.csv."
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is damaged: {error}.") from None


HEADER = """\
# A study of coterie. [terms] is what sites are told and agree to; it came from the coordinator's file. After a change
# of it, invite the sites again: they keep the terms that they were invited with.

"""
