"""`coterie nvflare new DIR`: a FLARE job that runs as it is, and that is yours to change."""

from pathlib import Path

from coterie.errors import UsageError

CONFIG = """\
# What the job runs; see `coterie list methods` and `coterie list problems`.
[run]
method = "meritfed"
problem = "friends"
rounds = 20
engine = "nvflare"

[problem]
clients = 3
friends = 1
model = "logistic"

[federation]
timeout = 60.0
"""

JOB = '''\
"""The job. `python job.py` runs it on this machine; `python job.py --write DIR` writes it for a deployment of FLARE.

Run or submit it again to go on with a run that was interrupted: the result folder has its checkpoints.
"""

import sys
from pathlib import Path

from coterie.experiment.config import load
from coterie.engines.nvflare.launch import launch, recipe

HERE = Path(__file__).parent
RESULTS = HERE / "results"  # on the server's machine
SITES = ["site-1", "site-2", "site-3"]  # site k has the rows of client k

config = load(HERE / "config.toml")

if __name__ == "__main__":
    if "--write" in sys.argv:  # not --export: FLARE takes that word for itself
        # every site builds the problem and keeps the rows of its own client; with load="data:rows" it has its own rows
        job = recipe("coterie", SITES, config=config.as_toml(), folder=str(RESULTS), memory="coterie-memory")
        job.export(sys.argv[sys.argv.index("--write") + 1])
    else:
        begun = (RESULTS / "config.toml").is_file()
        summary = launch(config, RESULTS, lambda *_: None, force=False, resume=begun, options={})
        print(summary["outcome"], summary["final"])
'''

DATA = '''\
"""A site's own rows, for jobs with load="data:rows" and files=("data.py",)."""

import torch
from torch import nn

from coterie.engines.own import ClientData


def rows(site: str) -> ClientData:
    """Inputs and labels of this site. Model and loss must be those of the server's problem."""
    make = torch.Generator().manual_seed(int(site.rpartition("-")[2]))
    inputs = torch.randn(100, 64, generator=make)
    return ClientData((inputs, (inputs[:, 0] > 0).long()), nn.Linear(64, 10), "cross_entropy")
'''

FILES = {"config.toml": CONFIG, "job.py": JOB, "data.py": DATA}


def new(folder: Path) -> list[Path]:
    """Write the job into a new folder."""
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in FILES]
