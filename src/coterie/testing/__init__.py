"""Conformance checks for methods and problems of your own: the same code that tests coterie's. pytest is not needed.

Example:
    ```python
    from coterie.testing import check_method, check_problem

    def test_mine():
        check_method(mine)
    ```
"""

from coterie.testing.comparing import ConformanceError
from coterie.testing.methods import check_method
from coterie.testing.problems import check_problem

__all__ = ["ConformanceError", "check_method", "check_problem"]
