"""With whom should we train? One message from each partner, weighed on one's own rows, and the page that answers.

The package can be called: `coterie.advise(mine, partners, label)` is `coterie.advise.answer.advise`.
"""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.advise.answer import Advice


class _Callable(ModuleType):
    """A package that can be called: it is imported as any other, and asked as a function."""

    @property
    def __signature__(self) -> Signature:
        from coterie.advise.answer import advise

        return signature(advise)

    def __call__(self, *args: Any, **settings: Any) -> "Advice":
        """With whom should you train, and is it worth it? See `help(coterie.advise.answer.advise)`."""
        from coterie.advise.answer import advise

        return advise(*args, **settings)


sys.modules[__name__].__class__ = _Callable
