"""What can be computed where, and compiling it ahead. It knows dtypes and limits, and no kernel."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkernels.arguments import check_group
from kvkernels.cuda import launch
from kvkernels.dtypes import ALIASES, BY_NAME, CACHE_DTYPES, LARGEST, QUERY_DTYPES, Dtype
from kvkernels.errors import ArgumentError, KVKernelsError

MAX_HEAD_DIM_ON_GPU = 256
LAYOUTS = ("HND", "NHD", "x-packed")


@dataclass(frozen=True, slots=True)
class Support:
    """Whether something can be computed, and the rule that it breaks if not. True or false itself."""

    is_supported: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.is_supported


def supports(
    *,
    device: str = "cpu",
    q_dtype: str = "float32",
    kv_dtype: str = "float32",
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 128,
    block_size: int = 16,
    layout: str = "HND",
    has_token_scales: bool = False,
    num_splits: int = 0,
    num_shared_tokens: int = 0,
) -> Support:
    """Say whether attention of this kind can be computed, before there are arrays for it.

    Masks, windows, soft-capping, ALiBi, sinks and LSE are supported wherever attention is.

    Args:
        device: "cpu" or "cuda"; for the latter CuPy and a GPU must be there.
        q_dtype: Of queries and results.
        kv_dtype: Of the cache.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Dimension of a head.
        block_size: Tokens of a block.
        layout: "HND" or "NHD" (by strides), or "x-packed" keys.
        has_token_scales: Whether k_scale and v_scale are arrays.
        num_splits: As in `paged_attention`.
        num_shared_tokens: As in `cascade_attention`.

    Cost: nothing is imported but, for a GPU, CuPy.

    >>> supports(kv_dtype="int8", num_heads=8, num_kv_heads=2).is_supported
    True
    >>> print(supports(num_heads=8, num_kv_heads=3).reason)
    num_heads must be a positive multiple of num_kv_heads, got 8 and 3
    """
    try:
        _dtype("q_dtype", q_dtype, QUERY_DTYPES)
        cache = _dtype("kv_dtype", kv_dtype, CACHE_DTYPES)
        check_group(num_heads, num_kv_heads)
        if head_dim < 1 or block_size < 1:
            rule = "head_dim and block_size must be positive"
            raise ArgumentError(f"{rule}, got {head_dim} and {block_size}")
        if layout not in LAYOUTS:
            raise ArgumentError(f"layout must be {', '.join(LAYOUTS)}, got {layout!r}")
        if device == "cuda":
            _check_gpu(cache, head_dim, layout, has_token_scales=has_token_scales)
            if num_splits or num_shared_tokens:
                rule = "num_splits and num_shared_tokens must be 0 on a GPU"
                raise ArgumentError(f"{rule}, got {num_splits} and {num_shared_tokens}")
        elif device != "cpu":
            raise ArgumentError(f"device must be 'cpu' or 'cuda', got {device!r}")
    except KVKernelsError as error:
        return Support(is_supported=False, reason=str(error))
    return Support(is_supported=True)


def _dtype(name: str, given: str, allowed: tuple[Dtype, ...]) -> Dtype:
    found = BY_NAME.get(ALIASES.get(given, given))
    if found not in allowed:
        rule = f"{name} must be one of {', '.join(dtype.name for dtype in allowed)}"
        raise ArgumentError(f"{rule}, got {given!r}")
    return found


def _check_gpu(cache: Dtype, head_dim: int, layout: str, *, has_token_scales: bool) -> None:
    if head_dim > MAX_HEAD_DIM_ON_GPU:
        raise ArgumentError(f"head_dim must be at most {MAX_HEAD_DIM_ON_GPU}, got {head_dim}")
    if layout == "x-packed":
        raise ArgumentError("x-packed keys are taken on a CPU only, got layout 'x-packed'")
    if has_token_scales and cache.name not in LARGEST:
        rule = f"scales for each token need a cache of {' or '.join(LARGEST)}"
        raise ArgumentError(f"{rule}, got {cache.name}")
    missing = launch.why_no_gpu()
    if missing:
        raise ArgumentError(missing)


@dataclass(frozen=True, slots=True)
class Warmed:
    """A kernel that is ready, and the seconds that compiling or loading it took."""

    name: str
    seconds: float


def warmup(
    kv_dtypes: Sequence[str] | None = None,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Warmed, ...]:
    """Compile all that calls on a CPU need, or load it from disk, so that no call waits for it.

    Args:
        kv_dtypes: Of caches, by name; None means all.
        progress: Called with (done, total, name of the next kernel) before each kernel, and with
            (total, total, "") at the end.

    Raises:
        ArgumentError: before anything is compiled, for a dtype that there is not.

    Cost: some seconds for each dtype that is not on disk, else some tenths of a second in all.
    """
    names = [dtype.name for dtype in CACHE_DTYPES] if kv_dtypes is None else list(kv_dtypes)
    dtypes = tuple(dict.fromkeys(_dtype("kv_dtypes", name, CACHE_DTYPES) for name in names))
    from kvkernels.cpu import warm  # noqa: PLC0415  # importing Numba is slow

    jobs = warm.jobs(dtypes)
    warmed = []
    for done, (name, prepare) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), name)
        start = time.perf_counter()
        prepare()
        warmed.append(Warmed(name, time.perf_counter() - start))
    if progress is not None:
        progress(len(jobs), len(jobs), "")
    return tuple(warmed)
