"""Write constraints.txt: the version of every package that any extra installs, as one fresh environment has them.

python tools/constraints.py                # builds the environment in a temporary folder
python tools/constraints.py --python PATH  # freezes an environment that has all extras already

PyTorch stays at the version that is tested. CUDA's packages, which its other builds bring along, are left to pip.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
TARGET = ROOT / "constraints.txt"
HEADER = """\
# The tested versions of everything that coterie or one of its extras installs. Every install command uses them.
# Written by `make constraints`. The extra flower-simulation is not covered: it wants exactly one version of Ray.
"""
APART = {
    "flower-simulation"
}  # Flower's simulation wants exactly one version of Ray, another than the one that is tested
LEFT_OUT = re.compile(r"^(coterie|pip|torch|triton|nvidia-.*|cuda-.*)$")


def extras() -> list[str]:
    """The extras of pyproject.toml that can be installed together."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [extra for extra in found if extra not in APART]


def built(folder: Path) -> str:
    """A fresh environment with all extras; its Python."""
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = f"{ROOT}[{','.join(extras())}]"
    subprocess.run([python, "-m", "pip", "install", "--quiet", TORCH, "--editable", wanted], check=True)
    return python


def frozen(python: str) -> list[str]:
    """The lines for what an environment has."""
    command = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    versions = {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"].partition("+")[0] for one in found}
    return [TORCH, *(f"{name}=={versions[name]}" for name in sorted(versions) if not LEFT_OUT.match(name))]


def main() -> None:
    """Build or take an environment, and write what it has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="the Python of an environment that has all extras")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="constraints-") as name:
        lines = frozen(given.python or built(Path(name)))
    TARGET.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{TARGET.name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
