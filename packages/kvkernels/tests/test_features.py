"""Dtypes, layouts, scales and what is made of scores: each agrees with float64 over the same bits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels import paged_attention, paged_attention_reference, write_kv
from kvkernels.dtypes import BY_NAME, CACHE_DTYPES, from_float32, to_float32
from kvkernels.layouts import require_cache

from .conftest import _make_batch as make

MakeBatch = Callable[..., dict[str, Any]]

CACHES = pytest.mark.parametrize("kv_dtype", [dtype.name for dtype in CACHE_DTYPES])
MODES = pytest.mark.parametrize("num_queries", [None, [9, 1, 0, 7]], ids=["decode", "mixed"])
LENGTHS = [40, 17, 0, 33]
# Relative norms: what rounding the result to the dtype of q costs.
TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}
SCALED = {"float8_e4m3": 0.25, "int8": 1 / 32}


def quantized(batch: dict[str, Any], kv_dtype: str, q_dtype: str = "float32") -> dict[str, Any]:
    """The batch with caches of `kv_dtype`; slots that no token owns hold NaN, or junk for int8."""
    dtype, scale = BY_NAME[kv_dtype], SCALED.get(kv_dtype, 1.0)
    caches = {}
    for name in ("k_cache", "v_cache"):
        junk = np.nan_to_num(batch[name], nan=4.0) if kv_dtype == "int8" else batch[name]
        caches[name] = from_float32(junk / np.float32(scale), dtype)
    q = from_float32(batch["q"], BY_NAME[q_dtype])
    changed = batch | caches | {"q": q, "k_scale": scale, "v_scale": scale}
    if kv_dtype in {"bfloat16", "float8_e4m3"}:
        changed["kv_dtype"] = kv_dtype
    return changed


def agrees(batch: dict[str, Any], dtype: str = "float32", **options: Any) -> None:
    out, lse = paged_attention(**batch, **options, return_lse=True)
    options.pop("num_splits", None)
    expected, expected_lse = paged_attention_reference(**batch, **options)
    error = np.linalg.norm(to_float32(out, BY_NAME[dtype]) - expected, axis=-1)
    assert (error <= TOLERANCES[dtype] * np.maximum(0.05, np.linalg.norm(expected, axis=-1))).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=4e-6)


@CACHES
@MODES
@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("block_size", [16, 5])
def test_every_cache_dtype(
    make_batch: MakeBatch,
    kv_dtype: str,
    num_queries: list[int] | None,
    head_dim: int,
    block_size: int,
) -> None:
    batch = make_batch(LENGTHS, num_queries, head_dim=head_dim, block_size=block_size, group=5)
    agrees(quantized(batch, kv_dtype))


@CACHES
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
def test_every_query_dtype(make_batch: MakeBatch, kv_dtype: str, q_dtype: str) -> None:
    agrees(quantized(make_batch(LENGTHS, head_dim=64), kv_dtype, q_dtype), q_dtype)


def test_torch_tensors_name_their_dtypes(make_batch: MakeBatch) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    batch = make_batch([40, 17], head_dim=64, unowned=0.0)
    names = ("q", "k_cache", "v_cache")
    tensors = {name: torch.from_numpy(batch[name]) for name in names}
    q = tensors["q"].to(torch.bfloat16)
    caches = {name: tensors[name].to(torch.float8_e4m3fn) for name in names[1:]}
    out = torch.empty_like(q)
    assert paged_attention(**batch | caches | {"q": q}, out=out) is out
    floats = {name: tensor.float().numpy() for name, tensor in {**caches, "q": q}.items()}
    expected, _ = paged_attention_reference(**batch | floats)
    np.testing.assert_allclose(out.float().numpy(), expected, rtol=6e-3, atol=2e-3)


@CACHES
@MODES
def test_scales_of_tokens(
    make_batch: MakeBatch, kv_dtype: str, num_queries: list[int] | None
) -> None:
    batch = quantized(make_batch(LENGTHS, num_queries, block_size=8), kv_dtype)
    shape, rng = batch["k_cache"].shape[:3], np.random.default_rng(1)
    for name in ("k_scale", "v_scale"):
        batch[name] = rng.uniform(0.02, 0.1, shape).astype(np.float32)
    agrees(batch)


@MODES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [-1, 6])
@pytest.mark.parametrize("feature", ["softcap", "alibi", "sinks", "all"])
def test_what_is_made_of_scores(
    make_batch: MakeBatch,
    num_queries: list[int] | None,
    feature: str,
    window_left: int,
    *,
    causal: bool,
) -> None:
    batch = make_batch(LENGTHS, num_queries, block_size=8, head_dim=64, group=3)
    rng = np.random.default_rng(2)
    options: dict[str, Any] = {"causal": causal, "window_left": window_left}
    if feature in {"softcap", "all"}:
        options["softcap"] = 1.5
    if feature in {"alibi", "all"}:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, 6).astype(np.float32)
    if feature in {"sinks", "all"}:
        options["sinks"] = rng.uniform(-3, 3, 6).astype(np.float32)
    agrees(batch, **options)


@pytest.mark.parametrize("softcap", [0.1, 5.0, 50.0, 1e4])
def test_softcap_of_any_size(make_batch: MakeBatch, softcap: float) -> None:
    agrees(make_batch([70]), softcap=softcap)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3"])
def test_splits_count_scales_and_sinks_once(
    make_batch: MakeBatch, num_splits: int, kv_dtype: str
) -> None:
    batch = quantized(make_batch([200, 17, 0, 90], [1, 3, 0, 20]), kv_dtype)
    agrees(batch, num_splits=num_splits, sinks=np.array([1, -1, 2, 0], np.float32))


@CACHES
@pytest.mark.parametrize("layout", ["NHD", "dense tokens", "packed keys", "keys beside values"])
def test_layouts_give_the_same_bits(make_batch: MakeBatch, kv_dtype: str, layout: str) -> None:
    batch = quantized(make_batch(LENGTHS, [9, 1, 0, 7], head_dim=64), kv_dtype)
    k, v = batch["k_cache"], batch["v_cache"]
    changed = dict(batch)
    if layout == "NHD":
        changed["k_cache"], changed["v_cache"] = (
            np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (k, v)
        )
    elif layout == "dense tokens":
        changed["v_cache"] = np.ascontiguousarray(v.swapaxes(2, 3)).swapaxes(2, 3)
    elif layout == "packed keys":
        x = 16 // k.itemsize
        parts = k.reshape(*k.shape[:3], -1, x).transpose(0, 1, 3, 2, 4)
        changed["k_cache"] = np.ascontiguousarray(parts)
    else:
        both = np.stack([k, v], axis=1)
        changed["k_cache"], changed["v_cache"] = both[:, 0], both[:, 1]
    assert paged_attention(**changed).tobytes() == paged_attention(**batch).tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_calls(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=5))
    rows = [data.draw(st.integers(0, n)) for n in lengths]
    batch = make(
        lengths,
        data.draw(st.sampled_from([None, rows])),
        num_kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 9)),
        head_dim=data.draw(st.sampled_from([16, 24, 64, 80])),
        block_size=data.draw(st.sampled_from([1, 3, 8, 16, 32])),
        layout=data.draw(st.sampled_from(["HND", "NHD"])),
    )
    agrees(
        quantized(batch, data.draw(st.sampled_from(list(BY_NAME)))),
        window_left=data.draw(st.sampled_from([-1, 0, 5, 33])),
        causal=data.draw(st.booleans()),
        softcap=data.draw(st.sampled_from([0.0, 3.0])),
        num_splits=data.draw(st.sampled_from([0, 1, 3])),
    )


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3"])
def test_rounding_agrees_with_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    numbers = (rng.standard_normal(20000) * 2.0 ** rng.uniform(-12, 8, 20000)).astype(np.float32)
    numbers = np.concatenate([numbers, np.arange(-896, 897) / 2, [0.0, -0.0]])
    numbers = np.clip(numbers, -448, 448).astype(np.float32)
    kind = getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(name, name))
    expected = torch.from_numpy(numbers).to(kind).float().numpy()
    bits = from_float32(numbers, BY_NAME[name])
    np.testing.assert_array_equal(to_float32(bits, BY_NAME[name]), expected)


@CACHES
def test_nan_stays_nan_and_what_is_too_large_saturates_in_8_bits(kv_dtype: str) -> None:
    dtype = BY_NAME[kv_dtype]
    numbers = np.array([np.inf, -np.inf, np.nan], np.float32)
    largest = {"int8": 127, "float8_e4m3": 448}.get(kv_dtype, np.inf)
    found = to_float32(from_float32(numbers[:2], dtype), dtype)
    assert found.tolist() == [largest, -largest]
    if kv_dtype != "int8":
        assert np.isnan(to_float32(from_float32(numbers[2:], dtype), dtype)).all()


@CACHES
@pytest.mark.parametrize("packed", [False, True])
def test_write_kv_rounds_into_every_cache(kv_dtype: str, *, packed: bool) -> None:
    dtype, scale = BY_NAME[kv_dtype], SCALED.get(kv_dtype, 1.0)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 16), dtype=np.float32)
    shape = (4, 2, 4, 8, 4) if packed else (4, 2, 8, 16)
    keys, values = np.zeros(shape, dtype.bits), np.zeros((4, 2, 8, 16), dtype.bits)
    name = kv_dtype if kv_dtype in {"bfloat16", "float8_e4m3"} else None
    options: dict[str, Any] = {"k_scale": scale, "v_scale": scale, "kv_dtype": name}
    write_kv(k, v, keys, values, np.array([9, -1, 30]), **options)
    if packed:
        keys = keys.transpose(0, 1, 3, 2, 4).reshape(4, 2, 8, 16)
    for new, cache in ((k, keys), (v, values)):
        expected = np.zeros_like(cache)
        rounded = from_float32(new / np.float32(scale), dtype)
        expected[1, :, 1], expected[3, :, 6] = rounded[0], rounded[2]
        assert cache.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("kv_dtype", "largest"), [("int8", 127), ("float8_e4m3", 448)])
def test_write_kv_gives_each_vector_its_own_scale(kv_dtype: str, largest: int) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 16), dtype=np.float32)
    v[0, 1] = 0
    dtype = BY_NAME[kv_dtype]
    keys, values = np.zeros((2, 4, 2, 4, 16), dtype.bits)
    k_scales, v_scales = np.full((2, 4, 2, 4), np.nan, np.float32)
    slots = np.array([9, -1, 3])
    name = None if kv_dtype == "int8" else kv_dtype
    write_kv(k, v, keys, values, slots, k_scale=k_scales, v_scale=v_scales, kv_dtype=name)
    for new, cache, scales in ((k, keys, k_scales), (v, values, v_scales)):
        for t in (0, 2):
            block, offset = divmod(int(slots[t]), 4)
            own = np.abs(new[t]).max(axis=-1) / largest
            np.testing.assert_allclose(scales[block, :, offset], own, rtol=1e-6)
            found = to_float32(cache[block, :, offset], dtype) * own[:, None]
            np.testing.assert_allclose(found, new[t], atol=own.max() * largest / 28)
        assert np.isnan(scales).sum() == scales.size - 4


def test_write_kv_rotates_keys_and_not_values() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 1, 8), dtype=np.float32)
    angles = rng.uniform(0, 6, (2, 3)).astype(np.float32)
    keys, values = np.zeros((2, 1, 1, 4, 8), np.float32)
    write_kv(k, v, keys, values, np.array([0, 1]), cos=np.cos(angles), sin=np.sin(angles))
    # As complex numbers: dimension d of the first half with d of the second.
    turned = (k[:, 0, :3] + 1j * k[:, 0, 3:6]) * np.exp(1j * angles.astype(np.float64))
    np.testing.assert_allclose(keys[0, 0, :2, :3], turned.real, atol=1e-6)
    np.testing.assert_allclose(keys[0, 0, :2, 3:6], turned.imag, atol=1e-6)
    assert np.array_equal(keys[0, 0, :2, 6:], k[:, 0, 6:])
    assert np.array_equal(values[0, 0, :2], v[:, 0])


def test_packed_cache_needs_a_dense_last_axis() -> None:
    with pytest.raises(ValueError, match=r"^the last axis of k_cache must be dense"):
        require_cache("k_cache", np.zeros((2, 1, 4, 8, 8), np.float32)[..., ::2])
