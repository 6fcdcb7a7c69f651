"""Try the bounds of pyproject.toml: a fresh environment with the lowest (or newest) versions, and a quick suite in it.

python tools/bounds.py lowest [--venv DIR]
python tools/bounds.py newest [--extra flower] [--venv DIR]

The lowest versions are those that the specifiers name; what these packages need themselves is pip's choice. torch is
the one of constraints.txt in both: of other versions the registry may have builds with CUDA only.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
SUITE = [
    "tests/cli/test_commands.py",
    "tests/experiment/test_config.py",
    "tests/experiment/test_loop.py",
    "tests/experiment/test_checkpoint.py",
    "tests/experiment/test_lifetime.py",
    "tests/methods/test_meritfed.py",
    "tests/problems/test_files.py",
    "tests/remote/test_codec.py",
    "tests/test_layers.py",
]
FIXED = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]


def declared(extra: str) -> list[Requirement]:
    """The requirements of an extra, with those of the extras that it names, or the base ones for an empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    found = []
    for requirement in map(Requirement, texts):
        own = requirement.name == project["name"]
        found += [other for name in requirement.extras for other in declared(name)] if own else [requirement]
    return found


def lowest(requirement: Requirement) -> str:
    """The requirement with the version that its lower bound names."""
    bounds = [clause.version for clause in requirement.specifier if clause.operator in (">=", "==")]
    if len(bounds) != 1:
        raise SystemExit(f"{requirement} has no single lower bound")
    return f"{requirement.name}=={bounds[0]}"


def main() -> None:
    """Build the environment, show what is in it, run the suite; the exit code is the suite's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=["lowest", "newest"])
    parser.add_argument("--extra", action="append", default=[], help="install this extra too")
    parser.add_argument("--venv", type=Path, help="where to build it; by default a temporary folder")
    given = parser.parse_args()
    wanted = [r for extra in ("", "test", *given.extra) for r in declared(extra) if r.name != "torch"]
    texts = sorted({lowest(r) if given.which == "lowest" else str(r) for r in wanted})
    with tempfile.TemporaryDirectory(prefix="bounds-") as name:
        venv = given.venv or Path(name)
        python = str(venv / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--upgrade", *FIXED, *texts], check=True)
        subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)
        subprocess.run([python, "-m", "pip", "freeze"], check=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE]
        sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
