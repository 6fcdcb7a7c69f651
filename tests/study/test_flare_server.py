"""FLARE's server of a study: its jobs are its own, and a site that is silent is taken for gone within a minute."""

import json
from pathlib import Path

import pytest
from hospitals import hospitals

pytest.importorskip("nvflare")

from coterie.problems.sites.terms import terms_of
from coterie.study import coordinator, flare

pytestmark = pytest.mark.nvflare


def test_two_studies_on_one_machine_share_no_jobs(tmp_path: Path) -> None:
    mine, files = hospitals(tmp_path)
    terms = terms_of(mine, "sick")[0]
    options = {"engine": "nvflare", "host": "localhost", "partners": tuple(files)}
    texts = []
    for name in ("one", "two"):
        study, _ = coordinator.new(tmp_path / name, terms, mine, **options)  # type: ignore[arg-type]
        text = (flare.kits(study) / "localhost" / "local" / "resources.json").read_text()
        resources = json.loads(text)
        (manager,) = [part for part in resources["components"] if part["id"] == "job_manager"]
        assert Path(manager["args"]["uri_root"]).is_relative_to(tmp_path / name)
        assert "/tmp/nvflare" not in text
        assert resources["servers"][0]["heart_beat_timeout"] == flare.SILENT
        texts.append(text)
    assert texts[0] != texts[1]
