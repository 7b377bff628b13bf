"""When requests come. Knows random processes; does not know requests."""

import math

import numpy as np

from kvruntime.errors import InvalidRequest

__all__ = ["arrival_times"]


def arrival_times(
    num_requests: int, rate: float, *, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds at which requests come, the first at 0; O(num_requests).

    The gaps follow a gamma distribution of mean 1/`rate` whose shape is `burstiness`: 1 is a Poisson
    process, less comes in bursts, more is more even. With an infinite rate all come at once. One seed
    gives one pattern, stretched by the rate.

    >>> arrival_times(3, math.inf)
    [0.0, 0.0, 0.0]
    >>> slow, fast = arrival_times(9, 1.0, seed=3), arrival_times(9, 2.0, seed=3)
    >>> np.allclose(slow, np.multiply(fast, 2))
    True

    Raises `InvalidRequest` for a rate or a burstiness that is not above 0.
    """
    if not rate > 0:
        raise InvalidRequest(f"the request rate must be above 0, or inf, got {rate}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise InvalidRequest(f"burstiness must be a number above 0, got {burstiness}")
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps = np.random.default_rng(seed).standard_gamma(burstiness, num_requests)
    gaps[:1] = 0.0
    times: list[float] = (np.cumsum(gaps) / (rate * burstiness)).tolist()
    return times
