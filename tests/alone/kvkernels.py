"""kvkernels by itself: run by `nox -s alone`, without its siblings, torch or CuPy."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

import kvkernels

assert "site-packages" in kvkernels.__file__, kvkernels.__file__
assert Path(kvkernels.__file__).with_name("py.typed").is_file()
assert not any(map(find_spec, ("kvblocks", "kvruntime", "torch", "cupy")))

random = np.random.default_rng(0)
keys = random.standard_normal((4, 1, 4, 16), dtype=np.float32)
values = random.standard_normal((4, 1, 4, 16), dtype=np.float32)
query = random.standard_normal((1, 2, 16), dtype=np.float32)
table, lengths = np.array([[2, 0]], np.int32), np.array([6], np.int32)
out = kvkernels.paged_attention(query, keys, values, table, lengths)
expected, _ = kvkernels.paged_attention_reference(query, keys, values, table, lengths)
np.testing.assert_allclose(out, expected, atol=1e-6)
print("kvkernels", kvkernels.__version__, "stands alone")
