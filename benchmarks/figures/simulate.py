"""Tables of simulators side by side."""

from __future__ import annotations

from benchmarks.figures.tables import Figures, command, result, table


def simulate_ratios() -> str:
    """Seconds of a replay beside those of another simulator."""
    rows = []
    for row in result("simulate")["policies"]:
        seconds, ratios = row["median_seconds"], row["ratio_to_kvblocks"]
        peers = ("kvcache-simulator", "kvcache-simulator, C++")
        others = (f"{seconds[peer]:.2f} s ({ratios[peer]:.1f}x)" for peer in peers)
        rows.append([row["policy"], f"{seconds['kvblocks']:.2f} s", *others])
    return table(["policy", "kvblocks", "kvcache-simulator", "its C++"], rows)


def simulate_lru() -> str:
    """How long the whole curve of LRU takes, and for how many capacities."""
    curve = result("simulate")["lru_curve"]
    return f"{curve['seconds']:.2f} s of processor time for all {curve['capacities']:,} capacities"


FIGURES: Figures = {
    "simulate/ratios": simulate_ratios,
    "simulate/command": command("simulate"),
    "simulate/lru": simulate_lru,
}
