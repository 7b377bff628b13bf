"""How a replay tells how far it is: it calls a function with the number of requests replayed.

Knows the shape of that function. Does not know terminals.
"""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int], object]


def silent(_num_requests: int) -> None:
    """Tell nobody."""
