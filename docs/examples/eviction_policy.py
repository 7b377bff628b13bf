"""An eviction policy of one's own, beside `lru`, where prompts that nobody repeats wash through the cache."""

# %% The policy, as a module of a package of yours. The lowest rank is evicted first.
import sys
import tempfile
from pathlib import Path

from kvblocks import BlockManager

MODULE = '''
class TwiceFound:
    """What fewer than two prompts found goes first, the longest unused first; then the rest."""

    def rank(self, run):
        return run.num_hits >= 2, run.last_used
'''

# %% What `pip install` would leave behind: the module, and the name of its entry point.
with tempfile.TemporaryDirectory() as folder:
    installed = Path(folder)
    (installed / "my_policies.py").write_text(MODULE, "utf-8")
    about = installed / "my_policies-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n", "utf-8"
    )
    names = "[kvblocks.policies]\ntwice-found = my_policies:TwiceFound\n"
    (about / "entry_points.txt").write_text(names, "utf-8")
    sys.path.append(folder)
    managers = {
        policy: BlockManager(num_blocks=40, block_size=4, policy=policy)
        for policy in ("lru", "twice-found")
    }
    sys.path.remove(folder)


# %% Traffic: four users come again and again; every third time there is a long prompt that is new.
def serve(manager: BlockManager) -> int:
    """Cached tokens in forty rounds."""
    for turn in range(40):
        users = [[*range(1000 * user, 1000 * user + 16), turn] for user in range(4)]
        scan = list(range(50_000 + 200 * turn, 50_000 + 200 * turn + 120))
        for name, prompt in enumerate([*users, scan] if turn % 3 == 2 else users):
            cached = manager.allocate(name, prompt).num_cached_tokens
            manager.append({name: len(prompt) - cached})
            manager.commit(name, len(prompt))
            manager.free(name)
    manager.check()
    return manager.stats().num_cached_tokens


# %% What each found. Under `lru` a scan of 30 blocks leaves little of the users in a pool of 40.
found = {policy: serve(manager) for policy, manager in managers.items()}
print(found)
assert found["twice-found"] > found["lru"]
