"""The page about metrics names all there are, and no others."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvblocks import BlockManager
from kvruntime.server.metrics import PREFIX, EngineReading, ServerMetrics, engine_metrics
from kvruntime.stats import EngineStats

PAGE = Path(__file__).parent.parent / "docs" / "observe.md"


def test_the_page_names_every_metric_and_no_other() -> None:
    thread: Any = SimpleNamespace(status="ready")
    counters = EngineStats(**dict.fromkeys((field.name for field in fields(EngineStats)), 0))
    reading = EngineReading(0, 0, 0, counters, BlockManager(4, 4).stats())
    families = [*ServerMetrics(thread).registry.collect(), *engine_metrics(reading)]
    exposed = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in families
    }
    named = set(re.findall(rf"`({PREFIX}\w+)[^`]*`", PAGE.read_text("utf-8")))
    assert named == exposed
