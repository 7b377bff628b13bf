"""The interface as a client meets it."""

import json

import pytest

from kvruntime import InvalidRequest
from kvruntime.wire import EventReader, base_url

EVENTS = [{"text": "日本語 🙂\u2028\x85"}, {"text": "b"}]


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:x"])
def test_an_address_without_such_a_port_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="url must be the address of a server"):
        base_url(url)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("size", range(1, 12))
def test_events_are_the_same_wherever_a_stream_is_cut(ending: str, size: int) -> None:
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}{ending}" for event in EVENTS]
    text = ending.join([f": hello{ending}", *lines, f"data: [DONE]{ending}", f"data: x{ending}"])
    data = text.encode()
    reader = EventReader()
    found = []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
        if reader.is_done:
            break
    assert found == EVENTS
    assert reader.is_done


def test_a_line_that_is_not_whole_is_no_event() -> None:
    assert EventReader().feed(b'data: {"text": "a"}') == []
