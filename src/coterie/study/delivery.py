"""What sites receive of a run: one model for all or, where every site is a target, each its own model and its own row
of the weights; nobody receives what is another's.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from coterie.engines.embedded import examined_sites, plan_of
from coterie.errors import UsageError
from coterie.experiment.config import Config
from coterie.experiment.predict import load_model
from coterie.federation import Each, Stack
from coterie.federation.remote import PERMISSIVE
from coterie.problems.sites.agreement import Agreement
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import Choices, prepared_node
from coterie.study.invitation import write_private

MODEL, PREPROCESS, ROW = "model.safetensors", "preprocess.json", "collaboration.json"
PERSONAL = re.compile(r"client_(\d+)\.(.+)")
Files = dict[str, bytes]


def is_personal(folder: Path) -> bool:
    """Whether a result folder holds one model per client."""
    weights = json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("weights")
    return bool(weights) and isinstance(weights[0], list)


def parcels(folder: Path) -> list[Files]:
    """By client, what it receives of a run with one model per client: its model, how rows become inputs, and its row.

    Args:
        folder: the result folder.
    """
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    about = {"format": "pt", "coterie_method": summary["method"], "coterie_problem": summary["problem"]}
    common: dict[str, Tensor] = {}
    own: list[dict[str, Tensor]] = [{} for _ in summary["names"]]
    for name, value in load_file(folder / MODEL).items():
        if found := PERSONAL.fullmatch(name):
            own[int(found[1])][found[2]] = value
        else:
            common[name] = value
    packed = []
    for name, state, weights in zip(summary["names"], own, summary["weights"], strict=True):
        row = {"site": name, "rounds": summary["rounds"], "weights": dict(zip(summary["names"], weights, strict=True))}
        files = {MODEL: save({**common, **state}, about), PREPROCESS: _preparation(folder), ROW: _json(row)}
        packed.append(files)
    return packed


def parts_for(folder: Path, sites: Sequence[str]) -> tuple[Tensor | Each, ...]:
    """What an order to the sites carries of a result folder: bytes for all, or for each site its own.

    Args:
        folder: the result folder.
        sites: the sites, in the order of their clients.
    """
    if not is_personal(folder):
        return tuple(_bytes(data) for data in ((folder / MODEL).read_bytes(), _preparation(folder)))
    own = parcels(folder)[: len(sites)]
    return tuple(_each([files[name] for files in own]) for name in (MODEL, PREPROCESS, ROW))


def files_of(parts: Any) -> Files:
    """The files that an order brought to a site.

    Args:
        parts: what the order carries.
    """
    if not isinstance(parts, tuple) or len(parts) not in (2, 3):
        raise UsageError("this is no model")
    tensors = [part.rows[0] if isinstance(part, Each) and len(part.rows) == 1 else part for part in parts]
    if not all(isinstance(part, Tensor) and part.dtype == torch.uint8 and part.dim() == 1 for part in tensors):
        raise UsageError("this is no model")
    return {
        name: bytes(part.numpy()) for name, part in zip((MODEL, PREPROCESS, ROW)[: len(parts)], tensors, strict=True)
    }


def keep(folder: Path, files: Files, site: str, tests: Stack | None) -> None:
    """Write what a site received into a folder of its own; its model is tested there, on the site's own test rows.

    Args:
        folder: where the files go.
        files: what came.
        site: the name of the site.
        tests: the site's test rows.
    """
    row = _row(files[ROW], site) if ROW in files else None
    write_private(folder, {name: data for name, data in files.items() if name != ROW})
    if row is not None:
        write_private(folder, {ROW: _json({**row, **_tested(folder, tests)})})


def keep_own(folder: Path) -> Path:
    """Write the coordinator's own model and row out of a result folder with one model per client; the folder."""
    files = parcels(folder)[-1]
    final = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["final"]
    row = json.loads(files[ROW])
    test = {key.removeprefix("test_"): value for key, value in final.items() if key.startswith("test_")}
    write_private(folder / "own", {**files, ROW: _json({**row, "test": test})})
    return folder / "own"


def deliver_trial(config: Config, folder: Path) -> list[dict[str, Any]]:
    """Give every site of a trial its own model and row, in a folder each; one line per site and one of the coordinator.

    Args:
        config: of the run, with the pattern of the sites' files.
        folder: the result folder.
    """
    study = Study.read(config.problem["folder"])
    sites = examined_sites(study, config.problem["sites"], Choices(unseen=config.problem["unseen"]))
    plan = plan_of(config, Agreement.read(study.folder, config.problem["agreement"]))
    places = []
    for k, (files, (name, site)) in enumerate(zip(parcels(folder), sites.items(), strict=False)):
        assert site.tables is not None
        node = prepared_node(site.tables, study.terms, plan, k, policy=PERMISSIVE)
        keep(folder / "sites" / name, files, name, node.tests)
        places.append(folder / "sites" / name)
    return [as_line(place) for place in (*places, keep_own(folder))]


def as_line(folder: Path) -> dict[str, Any]:
    """What a site received, in one line: the most helpful of the others, and its model on its own test rows."""
    row = json.loads((folder / ROW).read_text(encoding="utf-8"))
    others = sorted(((w, name) for name, w in row["weights"].items() if name != row["site"] and w > 0.0), reverse=True)
    return {
        "site": row["site"],
        "own weight": round(row["weights"].get(row["site"], 0.0), 3),
        "helped by": ", ".join(f"{name} {weight:.2f}" for weight, name in others[:3] if weight >= 0.005) or "nobody",
        **{f"test {key}": round(value, 4) for key, value in row.get("test", {}).items()},
        "test rows": row.get("test_rows"),
    }


def _row(data: bytes, site: str) -> dict[str, Any]:
    """A site's row, checked: it comes from elsewhere."""
    try:
        found = json.loads(data)
        weights = {str(name): float(weight) for name, weight in found["weights"].items()}
        row = {"site": str(found["site"]), "rounds": int(found["rounds"]), "weights": weights}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError("this is no row of weights") from None
    if row["site"] != site:
        raise UsageError("this row of weights is another site's")
    return row


def _tested(folder: Path, tests: Stack | None) -> dict[str, Any]:
    """Loss and, for classes, accuracy of the model in a folder on some rows, and how many rows these are."""
    if tests is None:
        return {}
    net, prepared = load_model(folder)
    rows = tests.client(0).all()
    with torch.no_grad():
        outputs = net(rows.inputs.to(torch.float32))
    if prepared.classes:
        loss = float(torch.nn.functional.cross_entropy(outputs, rows.labels.long()))
        found = {"loss": loss, "accuracy": float((outputs.argmax(1) == rows.labels).double().mean())}
    else:
        found = {"loss": float(0.5 * (outputs.flatten() - rows.labels).square().mean())}
    return {"test": found, "test_rows": len(rows.labels)}


def _preparation(folder: Path) -> bytes:
    """How rows become inputs, without the names of the clients."""
    stored = json.loads((folder / PREPROCESS).read_text(encoding="utf-8"))
    return _json({key: value for key, value in stored.items() if key != "clients"})


def _json(data: Any) -> bytes:
    return json.dumps(data).encode()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _each(contents: list[bytes]) -> Each:
    """One row of bytes per site, filled up with spaces: JSON allows them, and models have one length."""
    longest = max(map(len, contents))
    return Each(torch.stack([_bytes(data.ljust(longest)) for data in contents]))
