"""`heart-disease`: logistic regression over the patients of four hospitals (FLamby's Fed-Heart-Disease).

Data, split and scale are FLamby's (problems/data/heart.py), and so is the model: one linear map, here with one output
per class. FLamby sets nothing aside for validation: `validation = 0` trains on all its training rows, and then there is
no target. Its own measure is the accuracy at every hospital: `personal_accuracy` is their mean.
"""

from typing import Annotated, Literal

from pydantic import Field

from coterie.numerics import Draw
from coterie.problems.base import Context
from coterie.problems.catalogue.holders import of_holders
from coterie.problems.data.heart import HOSPITALS, heart_disease_hospitals
from coterie.problems.models import FlatModel, build
from coterie.problems.weighting import Weighting
from coterie.settings import Name

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


def heart_disease(
    context: Context,
    *,
    target: Literal["cleveland", "hungarian", "switzerland", "va"] = "cleveland",
    validation: Share = 0.25,
    model: Name = "logistic",
) -> Weighting:
    """Disease or none, for patients of four hospitals; one of them is the target.

    Args:
        target: the hospital whose model is wanted.
        validation: share of every hospital's training rows that judges models; 0 is FLamby's protocol.

    Example:
        `coterie run --problem heart-disease --method meritfed`, after `coterie data get heart-disease`.
    """
    hospitals = heart_disease_hospitals()
    width = tuple(hospitals[0].train.x.shape[1:])
    return of_holders(
        context,
        hospitals,
        FlatModel(build(model, width, 2, context.seed)),
        target=HOSPITALS.index(target),
        validation=validation,
        draw=Draw.of(context.seed).phase("heart-disease"),
        names=("Cleveland", "Hungary", "Switzerland", "Long Beach"),
    )
