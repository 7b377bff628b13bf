"""kvblocks by itself: run by `nox -s alone`, where nothing but the wheel is installed."""

import sys
from importlib.metadata import requires
from pathlib import Path

import kvblocks

assert "site-packages" in kvblocks.__file__, kvblocks.__file__
assert Path(kvblocks.__file__).with_name("py.typed").is_file()
assert not requires("kvblocks")
manager = kvblocks.BlockManager(num_blocks=8, block_size=4)
manager.allocate("a", range(6))
plan = manager.append({"a": 6})
manager.commit("a", 6)
manager.fork("a", "b")
manager.check()
foreign = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
assert foreign <= {"__main__", "kvblocks", "sitecustomize", "usercustomize"} | {
    n for n in foreign if n.startswith(("_", "sphinx"))
}
print("kvblocks", kvblocks.__version__, "stands alone")
