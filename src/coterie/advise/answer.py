"""`coterie.advise` from Python: data frames, arrays or files in, an `Advice` out."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import mkdtemp
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
from rich.console import Console

from coterie.advise import advise as finding
from coterie.advise import page
from coterie.ensemble.stack import Stack
from coterie.errors import UsageError
from coterie.experiment import config as configuration
from coterie.experiment.predict import load_model, outputs_of, shares_of, values_of
from coterie.experiment.records import prepare
from coterie.problems.files.frames import MINE, collected, holding, source
from coterie.problems.files.prepare import Preparation
from coterie.problems.files.reading import Unreadable
from coterie.report.card import write_card

WIDTH = 110  # columns of the text
HEIGHT = 720  # pixels of the page in a notebook
KEYWORDS = "In Python, problem.NAME of this message is the keyword NAME of coterie.advise."


class Partner(NamedTuple):
    """What was found of one partner.

    Args:
        name: as it was given.
        verdict: helps, nothing, left out, differs, or copy.
        probability: that it improves your model.
        gain: with it alone beside you, over your own models, in the measure that decides.
        low: lower end of the 95 % interval of the gain.
        high: upper end.
        share: of the delivered model.
        rows: how many it has.
        reason: of the verdict.
    """

    name: str
    verdict: str
    probability: float
    gain: float
    low: float
    high: float
    share: float
    rows: int
    reason: str


class Advice:
    """With whom to train, whether it is worth it, and the model. In a notebook it shows its page.

    Args:
        data: the advice as plain data, as in advice.json.
        folder: where its model is.
        labels: by the word that a class was read as, its value as your table has it.
        temporary: remove the folder when the advice is no longer used.
    """

    def __init__(
        self, data: Mapping[str, Any], folder: Path, labels: Mapping[str, Any] | None = None, *, temporary: bool = False
    ) -> None:
        self.data, self.folder, self._labels = dict(data), folder, dict(labels or {})
        if temporary:
            finalize(self, rmtree, folder, ignore_errors=True)
        self._loaded: tuple[Stack, Preparation] | None = None

    @property
    def answer(self) -> str:
        """The answer in one or two sentences."""
        return str(self.data["headline"])

    @property
    def worth_it(self) -> str:
        """Whether training together is worth it: yes, not yet, or no."""
        return str(self.data["worth_it"])

    @property
    def partners(self) -> tuple[Partner, ...]:
        """What was found of each partner; `pandas.DataFrame(advice.partners)` is a table of it."""
        return tuple(map(_partner, self.data["partners"]))

    @property
    def shares(self) -> dict[str, float]:
        """Whose models the delivered one consists of: by partner, "you", and "together" for your model that takes the
        partners' predictions as inputs."""
        return dict(self.data["delivered"]["shares"])

    @property
    def model(self) -> Stack:
        """The delivered model; `predict` takes rows as they are."""
        return self._model()[0]

    @property
    def classes(self) -> np.ndarray | None:
        """The classes in the order of `predict_proba`, as your table has them; None where a number is predicted."""
        names = self._model()[1].classes
        if not names:
            return None
        return np.array([self._labels[name] for name in names] if set(names) <= self._labels.keys() else list(names))

    def predict(self, rows: Any) -> np.ndarray:
        """The predicted classes or numbers of some rows; of times a risk, the larger the earlier the event.

        Args:
            rows: a data frame, a mapping of arrays by column, or the path of a file, with the columns of your table.
        """
        net, prepared = self._model()
        outputs = outputs_of(net, prepared, self._source(rows), [])
        classes = self.classes
        if net.goal.edges:
            return net.goal.predictions(outputs.numpy())[:, 0]
        if classes is None:
            return values_of(prepared, outputs).numpy()
        return classes[shares_of(outputs).argmax(1).numpy()]

    def predict_proba(self, rows: Any) -> np.ndarray:
        """The probabilities of the classes, one row per row and one column per class.

        Args:
            rows: as for `predict`.
        """
        net, prepared = self._model()
        if not prepared.classes:
            raise UsageError(f"{prepared.form.label} is a number and has no classes; use predict.")
        return shares_of(outputs_of(net, prepared, self._source(rows), [])).numpy()

    def save(self, folder: str | Path, *, force: bool = False) -> Path:
        """Write the result folder of `coterie advise`: advice.json, advice.html, and the model for `coterie predict`.

        Args:
            folder: where to write; it must be new or empty.
            force: empty an existing result folder first.
        """
        path = Path(folder)
        if not (self.folder / "model").is_dir():
            raise UsageError("the model holds estimators of your program and cannot be stored; use advice.predict.")
        prepare(path, force=force)
        copytree(self.folder, path, dirs_exist_ok=True)
        page.write(path)
        write_card(path)
        return path

    def hold(self, model: Stack, prepared: Preparation) -> None:
        """Use this model, without reading it from the folder.

        Args:
            model: the delivered one.
            prepared: how rows become its inputs.
        """
        self._loaded = model, prepared

    def _model(self) -> tuple[Stack, Preparation]:
        if self._loaded is None:
            net, prepared = load_model(self.folder / "model")
            assert isinstance(net, Stack)
            self._loaded = net, prepared
        return self._loaded

    def _source(self, rows: Any) -> Any:
        try:
            return source(rows, "rows")
        except Unreadable as error:
            raise UsageError(f"rows: {error}. {error.remedy}".rstrip()) from None

    def _repr_html_(self) -> str:
        """The page, in a frame of its own: its style is not the notebook's."""
        text = escape(page.page(self.data))
        style = f"width:100%;height:{HEIGHT}px;border:0"
        return f'<iframe sandbox="allow-scripts" title="With whom to train?" style="{style}" srcdoc="{text}"></iframe>'

    def __str__(self) -> str:
        """The answer and the partners, as the terminal shows them."""
        stream = StringIO()
        page.show(Console(file=stream, width=WIDTH, color_system=None), self.data, self.folder)
        parts = [part.strip("\n") for part in stream.getvalue().split("\n\n") if part.strip()]
        return "\n\n".join("\n".join(line.rstrip() for line in part.splitlines()) for part in parts[:2])

    def __repr__(self) -> str:
        return f"<coterie.Advice on {len(self.partners)} partners: {self.answer}>"


def _partner(entry: Mapping[str, Any]) -> Partner:
    """One partner of advice.json."""
    return Partner(
        entry["name"],
        entry["verdict"],
        entry["probability"],
        entry["gain"]["value"],
        entry["gain"]["low"],
        entry["gain"]["high"],
        entry["share"],
        entry["rows"],
        entry["reason"],
    )


def advise(
    mine: Any,
    partners: Any,
    label: str,
    *,
    event: str | None = None,
    seed: int = 0,
    measure: str = "auto",
    cautious: bool = False,
    models: Sequence[Any] = (),
    out: str | Path | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Advice:
    """With whom should you train, and is it worth it? As `coterie advise`, for tables that your program holds.

    Tables are pandas, polars or pyarrow data frames, mappings of arrays by column, or paths of files. They are read and
    checked as files are: your table decides which columns are numbers and which are words, an index is not read, and
    doubtful faults end the call with a proposal. No row is written to disk.

    Args:
        mine: your own table.
        partners: the partners' tables by name; or a pattern of files, such as "sites/*.csv".
        label: the column to predict.
        event: the column that tells whether the event happened, where the label is a time.
        seed: fixes the folds and the trees.
        measure: what to decide by, such as "auc", "accuracy" or "r2"; "auto" follows the label.
        cautious: use partners' models only where they are better by a standard error.
        models: further estimators (with fit and predict_proba, or predict) that you and every partner fit.
        out: a folder for advice.json, the page and the model; by default a temporary one, see `Advice.save`.
        force: empty an existing result folder first.
        progress: called with messages on the way, for example print.
        settings: how tables are read: kind, categorical, drop, missing, keep, units, align_labels, repair.

    Example:
        >>> import numpy as np, coterie
        >>> rng = np.random.default_rng(0)
        >>> def rows(n, opposite=False):
        ...     x = rng.normal(size=(n, 2))
        ...     ill = x.sum(1) + rng.normal(size=n) > 0
        ...     return {"a": x[:, 0], "b": x[:, 1], "ill": ill != opposite}
        >>> tables = {"north": rows(300), "east": rows(300, opposite=True)}
        >>> advice = coterie.advise(rows(40), tables, "ill")
        >>> {partner.name: partner.verdict for partner in advice.partners}["east"]
        'differs'
        >>> bool(advice.predict({"a": [2.0], "b": [2.0]})[0])
        True
    """
    chosen = {key: value for key, value in settings.items() if value is not None}
    for key in ("clients", "target"):
        if key in chosen:
            raise UsageError(f"coterie.advise takes tables; give {key} as {'partners' if key == 'clients' else MINE}.")
    held = collected(mine, partners, label, tuple(chosen.get("drop", ())))
    categories = getattr(held.goal, "categories", ())
    if categories:
        left_out = {*chosen.get("drop", ()), *chosen.get("categorical", ())}
        chosen["categorical"] = [*chosen.get("categorical", ()), *(c for c in categories if c not in left_out)]
    flags = {"run.problem": "files", "run.seed": seed} | ({} if event is None else {"problem.event": event})
    flags |= {f"problem.{key}": list(value) if isinstance(value, tuple) else value for key, value in chosen.items()}
    flags |= {"problem.clients": held.clients, "problem.target": held.target, "problem.label": label}
    config = configuration.load(None, {}, flags)
    folder = Path(mkdtemp(prefix="coterie-") if out is None else out)
    advice = Advice({}, folder, held.labels(), temporary=out is None)
    try:
        with holding(held):
            found = finding.advise(
                config,
                folder,
                measure=measure,
                cautious=cautious,
                models=models,
                say=progress or _silent,
                force=force,
            )
    except UsageError as error:
        if "problem." in str(error):
            error.add_note(KEYWORDS)
        raise
    advice.data = found.advice
    advice.hold(found.model, found.prepared)
    if out is not None:
        page.write(folder)
        write_card(folder)
    return advice


def _silent(text: str) -> None:
    """Nothing is shown."""
