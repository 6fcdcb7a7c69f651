"""`coterie nvflare new DIR`: a FLARE job that runs as it is, and that is yours to change."""

from pathlib import Path

from coterie.engines.templates import write_template


def new(folder: Path) -> list[Path]:
    """Write the job into a new folder; the files."""
    return write_template(Path(__file__).parent / "template", folder)
