"""Projects to start from: files of a template, copied into a new folder."""

from pathlib import Path

from coterie.errors import UsageError


def write_template(template: Path, folder: Path, **names: str) -> list[Path]:
    """Write the files of a template into a new folder.

    Args:
        template: the folder with the files; each has the ending .txt behind its own.
        folder: where to; it must be new or empty.
        names: what stands for a word of the template, in paths and in texts.
    """
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise UsageError(f"{folder} is not empty; choose another folder.")
    written = []
    for source in sorted(template.rglob("*.txt")):
        name, text = source.relative_to(template).as_posix().removesuffix(".txt"), source.read_text(encoding="utf-8")
        for word, value in names.items():
            name, text = name.replace(word, value), text.replace(word, value)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
