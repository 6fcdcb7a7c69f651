"""Files that stay at their holders: what a study agrees on, a site's side of it, and the coordinator's."""

from coterie.problems.sites.problem import load_study, study

__all__ = ["load_study", "study"]
