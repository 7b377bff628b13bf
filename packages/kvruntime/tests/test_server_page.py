"""The page at `/`: its files, and what a browser makes of them beside a server that a test controls."""

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from kvruntime.server.page import page_routes

from .chromium import Chromium, Page, needs_chromium
from .page_server import CannedServer, chunk, holding, request_of, serving, state_of

PARTS = {
    part.name: part.read_text("utf-8")
    for part in files("kvruntime.server.page").iterdir()
    if part.name.endswith((".html", ".css", ".js", ".svg"))
}


# ── files ────────────────────────────────────────────────────────────────────────────────────


def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_is_served_as_what_it_is(name: str) -> None:
    answer = client().get("/" if name == "index.html" else f"/page/{name}")
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.text == PARTS[name]
    assert answer.headers["content-type"].startswith(kind[name.rpartition(".")[2]])


@pytest.mark.parametrize(
    "name", ["nothing.js", "__init__.py", "..%2f__init__.py", "%2e%2e/live.py"]
)
def test_nothing_else_is_served(name: str) -> None:
    assert client().get(f"/page/{name}").status_code == 404


def test_a_part_that_is_known_is_not_sent_again() -> None:
    first = client().get("/")
    again = client().get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_may_load_nothing_from_elsewhere() -> None:
    policy = client().get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:", policy)


@pytest.mark.parametrize("name", sorted(PARTS))
def test_no_part_names_another_host(name: str) -> None:
    text = PARTS[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.", text)


@pytest.mark.parametrize("name", sorted(name for name in PARTS if name.endswith(".js")))
def test_no_script_makes_markup_of_text(name: str) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PARTS[name]
    )


def luminance(colour: str) -> float:
    """Relative luminance, by WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_requests_stand_out_from_the_paper(theme: str) -> None:
    block = PARTS["page.css"].partition(f'data-theme="{theme}"] {{')[2].partition("}")[0]
    colours = dict(re.findall(r"--(\w+): (#\w{6});", block))
    for ground in ("paper", "raised"):
        for name in ("ink", "quiet", "warning", *(f"c{index}" for index in range(7))):
            low, high = sorted(luminance(colours[each]) for each in (ground, name))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ground, name)


# ── a browser ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def server() -> Iterator[CannedServer]:
    canned = CannedServer()
    with serving(canned.app) as canned.url:
        yield canned
        canned.is_live = canned.hangs = False


SHARED = holding(60, request_of(0, [0, 1, 2], [0, 1, 3]), request_of(1, [0, 4]))


def opened(chromium: Chromium, server: CannedServer, **options: Any) -> Page:
    """The page, once it shows what the server holds."""
    page = chromium.open(server.url, **options)
    page.wait_for("document.getElementById('connection').dataset.state === 'live'")
    page.wait_for("document.querySelector('#key-list b').textContent")
    return page


def say(page: Page, text: str) -> None:
    page.evaluate("document.getElementById('message').focus()")
    page.type(text)
    page.press("Enter")


ANSWER: list[dict[str, Any] | str] = [
    chunk("A page "),
    chunk("table."),
    chunk("", finish="stop"),
    "[DONE]",
]


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_follows_light_and_dark_without_complaint_or_other_hosts(
    chromium: Chromium, server: CannedServer, *, dark: bool
) -> None:
    server.state, server.chunks = SHARED, ANSWER
    page = opened(chromium, server, dark=dark)
    say(page, "hello")
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 23, 29)" if dark else "rgb(255, 255, 255)")
    assert page.complaints == []
    assert {url.startswith(server.url) for url in page.urls} == {True}
    page.close()


@needs_chromium
def test_the_map_is_drawn_in_the_colours_of_its_theme(
    chromium: Chromium, server: CannedServer
) -> None:
    server.state = SHARED
    page = opened(chromium, server)
    colour = (
        "[...document.querySelector('#blocks').getContext('2d').getImageData(5, 25, 1, 1).data]"
    )
    before = page.evaluate(colour)
    page.prefer(dark=True)
    page.wait_for(f"String({colour}) !== '{','.join(map(str, before))}'")
    assert (before, page.evaluate(colour)) == ([11, 98, 176, 255], [111, 180, 245, 255])
    page.close()


@needs_chromium
def test_light_and_dark_can_be_chosen_and_are_remembered(
    chromium: Chromium, server: CannedServer
) -> None:
    page = opened(chromium, server)
    page.click("#theme")
    page.reload()
    page.wait_for("document.documentElement.dataset.theme === 'dark'")
    page.close()


@needs_chromium
def test_the_arrow_keys_say_who_holds_a_block(chromium: Chromium, server: CannedServer) -> None:
    server.state = SHARED
    page = opened(chromium, server)
    page.press("Tab")
    page.evaluate("document.getElementById('map').focus()")
    assert page.text("#tip").splitlines() == [
        "block 0: shared, in 3 tables, 4 of 4 slots filled",
        "request 0, sample 0: its block 0",
        "request 0, sample 1: its block 0",
        "request 1: its block 0",
    ]
    page.press("ArrowRight", 2)
    told = page.text("#tip").splitlines()
    assert told == ["block 2: 3 of 4 slots filled", "request 0, sample 0: its block 2"]
    page.press("ArrowDown")
    assert page.text("#tip").endswith(": free")
    page.press("Escape")
    assert page.evaluate("document.getElementById('tip').hidden")
    page.close()


@needs_chromium
def test_a_pointer_says_who_holds_a_block(chromium: Chromium, server: CannedServer) -> None:
    server.state = SHARED
    page = opened(chromium, server)
    left, top = page.evaluate(
        "(() => { const b = document.getElementById('blocks').getBoundingClientRect();"
        " return [b.left, b.top]; })()"
    )
    page.point(left + 4 * 43 + 20, top + 20)
    page.wait_for("!document.getElementById('tip').hidden")
    assert page.text("#tip") == "block 4: 3 of 4 slots filled\nrequest 1: its block 1"
    page.close()


@needs_chromium
def test_each_table_is_a_strip(chromium: Chromium, server: CannedServer) -> None:
    server.state = SHARED
    page = opened(chromium, server)
    strips = page.evaluate(
        "[...document.querySelectorAll('#requests canvas')].map((each) => each.ariaLabel)"
    )
    assert strips == [
        "blocks 0, 1, 2; 2 shared",
        "blocks 0, 1, 3; 2 shared",
        "blocks 0, 4; 1 shared",
    ]
    page.close()


@needs_chromium
def test_the_key_counts_the_blocks_of_each_kind(chromium: Chromium, server: CannedServer) -> None:
    server.state = SHARED
    page = opened(chromium, server)
    assert page.text("#key-list").split("\n") == [
        "held by one 3",
        "shared 2",
        "cached 0",
        "free 55",
    ]
    page.close()


@needs_chromium
def test_blocks_in_host_memory_are_told_if_there_are_any(
    chromium: Chromium, server: CannedServer
) -> None:
    server.state = {**SHARED, "num_host_blocks": 8, "num_free_host_blocks": 3}
    page = opened(chromium, server)
    assert page.text("#key-list").split("\n")[-1] == "in host memory 5"
    page.close()


@needs_chromium
def test_a_request_that_ends_leaves_the_page(chromium: Chromium, server: CannedServer) -> None:
    server.state = SHARED
    page = opened(chromium, server)
    server.state = holding(24, request_of(1, [0, 4]))
    page.wait_for("document.querySelectorAll('#requests > li').length === 1")
    assert "held by one 2" in page.text("#key-list")
    assert page.text("#requests .name") == "request 1"
    server.state = state_of(24)
    page.wait_for("!document.querySelector('#requests > li')")
    assert not page.evaluate("document.getElementById('no-requests').hidden")
    page.close()


@needs_chromium
def test_who_has_no_blocks_says_why(chromium: Chromium, server: CannedServer) -> None:
    swapped = request_of(1, [], state="swapped")
    server.state = holding(
        8,
        request_of(0, [], state="preempted"),
        swapped,
        request_of(2, [], state="waiting"),
    )
    page = opened(chromium, server)
    states = page.evaluate(
        "[...document.querySelectorAll('#requests .state')].map((e) => e.innerText)"
    )
    assert states == [
        "preempted, waits to be computed again",
        "preempted, swapped out to host memory",
        "waiting",
    ]
    page.close()


def event(step: int, kind: str, request: int | None = None, detail: str = "") -> dict[str, Any]:
    return {
        "step": step,
        "request": request,
        "sequence": None if request is None else 0,
        "kind": kind,
        "detail": detail,
        "blocks": [0, 1] if kind == "copied on write" else [],
    }


@needs_chromium
def test_what_happens_is_told_the_newest_first(chromium: Chromium, server: CannedServer) -> None:
    server.state = {**SHARED, "events": [event(1, "admitted", 0, "0 of 5 tokens cached")]}
    page = opened(chromium, server)
    server.state = {
        **SHARED,
        "events": [
            *server.state["events"],
            event(2, "copied on write", None, "block 0 to block 1"),
        ],
    }
    page.wait_for("document.querySelectorAll('#events li').length === 2")
    told = page.text("#events").replace("\n", " ")
    assert (
        told
        == "step 2 copied on write: block 0 to block 1 step 1 request 0 admitted: 0 of 5 tokens cached"
    )
    page.close()


@needs_chromium
def test_ten_thousand_blocks_have_a_square_each(chromium: Chromium, server: CannedServer) -> None:
    tables = [list(range(start, start + 200)) for start in range(0, 9800, 200)]
    server.state = holding(10_000, *(request_of(i, table) for i, table in enumerate(tables)))
    page = opened(chromium, server)
    page.press("Tab")
    page.evaluate("document.getElementById('map').focus()")
    page.press("End")
    assert page.text("#tip") == "block 9999: free"
    assert page.text("#more-requests") == "and 25 more"
    height = page.evaluate("document.getElementById('blocks').getBoundingClientRect().height")
    assert 200 < height <= 400
    page.close()


# ── the chat ─────────────────────────────────────────────────────────────────────────────────


@needs_chromium
def test_an_answer_is_streamed_and_asked_for_with_what_the_page_says(
    chromium: Chromium, server: CannedServer
) -> None:
    usage = {
        "prompt_tokens": 54,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    server.chunks = [*ANSWER[:-1], {"id": "chatcmpl-0", "choices": [], "usage": usage}, "[DONE]"]
    page = opened(chromium, server)
    page.evaluate("document.getElementById('system').value = 'Be brief.'")
    say(page, "What is it?")
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    page.wait_for("!document.getElementById('send').disabled")
    assert page.text(".answer .text") == "A page table."
    assert page.text(".answer .facts").startswith(
        "54 prompt tokens, 32 of them cached · 3 generated"
    )
    assert server.bodies == [
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is it?"},
            ],
            "n": 1,
            "max_tokens": 96,
            "temperature": 0.7,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    page.close()


@needs_chromium
def test_the_first_answer_goes_on_as_the_conversation(
    chromium: Chromium, server: CannedServer
) -> None:
    server.chunks = ANSWER
    page = opened(chromium, server)
    say(page, "What is it?")
    page.wait_for("!document.getElementById('send').disabled && document.querySelector('.answer')")
    say(page, "And then?")
    page.wait_for("document.querySelectorAll('.answer[data-state=done]').length === 2")
    said = [message["content"] for message in server.bodies[1]["messages"][1:]]
    assert said == ["What is it?", "A page table.", "And then?"]
    page.close()


def wait_until_idle(page: Page) -> None:
    """Wait for the end of every answer that was asked for."""
    page.wait_for("document.querySelector('.said') && !document.getElementById('send').disabled")


def told(body: dict[str, Any]) -> list[str]:
    """The conversation that a request has, after the system prompt."""
    return [message["content"] for message in body["messages"][1:]]


@needs_chromium
def test_a_new_chat_knows_nothing_of_an_answer_that_it_broke_off(
    chromium: Chromium, server: CannedServer
) -> None:
    server.chunks, server.hangs = [chunk("A page ")], True
    page = opened(chromium, server)
    say(page, "What is it?")
    page.wait_for("document.querySelector('.answer .text')?.textContent === 'A page '")
    page.click("#clear")
    page.wait_for("!document.getElementById('send').disabled")
    server.chunks, server.hangs = ANSWER, False
    for question in ("Hello?", "And then?"):
        say(page, question)
        wait_until_idle(page)
    assert [told(body) for body in server.bodies[1:]] == [
        ["Hello?"],
        ["Hello?", "A page table.", "And then?"],
    ]
    page.close()


@needs_chromium
@pytest.mark.parametrize(("button", "times"), [("#send", 1), ("#send-four", 4)])
def test_trying_again_takes_what_came_of_the_question_back(
    chromium: Chromium, server: CannedServer, button: str, times: int
) -> None:
    server.chunks = [chunk("A page ")]
    page = opened(chromium, server)
    page.evaluate("document.getElementById('message').focus()")
    page.type("What is it?")
    page.click(button)
    page.wait_for(f"document.querySelectorAll('.error').length === {times}")
    wait_until_idle(page)
    server.chunks = ANSWER
    page.click(".error button")
    page.wait_for(f"document.querySelectorAll('.answer[data-state=done]').length === {times}")
    wait_until_idle(page)
    say(page, "And then?")
    page.wait_for(f"document.querySelectorAll('.answer[data-state=done]').length === {times + 1}")
    assert [told(body) for body in server.bodies] == [
        *[["What is it?"]] * 2 * times,
        ["What is it?", "A page table.", "And then?"],
    ]
    page.close()


@needs_chromium
def test_what_a_model_and_a_person_say_is_never_markup(
    chromium: Chromium, server: CannedServer
) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    server.chunks = [chunk(evil), chunk("", finish="stop"), "[DONE]"]
    page = opened(chromium, server)
    say(page, evil)
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    assert (page.text(".said"), page.text(".answer .text")) == (evil, evil)
    assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
    page.close()


@needs_chromium
def test_samples_are_answers_of_one_request(chromium: Chromium, server: CannedServer) -> None:
    server.chunks = [
        *(chunk(text, index, finish="stop") for index, text in enumerate(["one", "two", "three"])),
        "[DONE]",
    ]
    page = opened(chromium, server)
    page.evaluate("document.getElementById('samples').focus()")
    page.press("ArrowRight", 2)
    say(page, "Choose.")
    page.wait_for("!document.getElementById('send').disabled && document.querySelector('.answer')")
    texts = page.evaluate("[...document.querySelectorAll('.answer .text')].map((e) => e.innerText)")
    assert texts == ["one", "two", "three"]
    assert [body["n"] for body in server.bodies] == [3]
    page.close()


@needs_chromium
def test_a_prompt_can_be_sent_four_times_at_once(chromium: Chromium, server: CannedServer) -> None:
    server.chunks = ANSWER
    page = opened(chromium, server)
    page.evaluate("document.getElementById('message').focus()")
    page.type("Once more.")
    page.click("#send-four")
    page.wait_for("document.querySelectorAll('.answer[data-state=done]').length === 4")
    assert len(server.bodies) == 4
    assert all(body == server.bodies[0] for body in server.bodies)
    page.close()


@needs_chromium
def test_stop_leaves_the_request_and_keeps_what_came(
    chromium: Chromium, server: CannedServer
) -> None:
    server.chunks, server.hangs = [chunk("A page ")], True
    page = opened(chromium, server)
    say(page, "What is it?")
    page.wait_for("document.querySelector('.answer .text')?.textContent === 'A page '")
    page.click("#stop")
    page.wait_for("document.querySelector('.answer[data-state=stopped]')")
    page.wait_for("!document.getElementById('send').disabled")
    assert page.text(".answer .facts") == "stopped"
    while not server.num_left:
        page.wait_for("true")
    page.close()


@needs_chromium
def test_an_answer_has_the_colour_of_its_request(chromium: Chromium, server: CannedServer) -> None:
    server.chunks, server.hangs = [chunk("A page ")], True
    server.state = holding(24, request_of(7, [3]), request_of(9, [0, 1], name="chatcmpl-0-0"))
    page = opened(chromium, server)
    say(page, "What is it?")
    page.wait_for("document.querySelector('.answer.c1')")
    page.close()


@needs_chromium
@pytest.mark.parametrize(
    ("status", "headers", "told"),
    [
        (
            429,
            {"Retry-After": "3"},
            "The server is busy: its queue is full. It says: too much. Try again in 3 s.",
        ),
        (503, {}, "The server takes no requests now. It says: too much."),
        (400, {}, "The server refused (400). It says: too much."),
    ],
)
def test_a_refusal_is_said_and_can_be_tried_again(
    chromium: Chromium, server: CannedServer, status: int, headers: dict[str, str], told: str
) -> None:
    server.refusal = JSONResponse({"error": {"message": "too much."}}, status, headers)
    server.chunks = ANSWER
    page = opened(chromium, server)
    say(page, "What is it?")
    page.wait_for("document.querySelector('.error')")
    assert page.evaluate("document.querySelector('.error').firstChild.textContent") == told
    server.refusal = None
    page.click(".error button")
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    assert page.evaluate("document.querySelectorAll('.said').length") == 1
    assert len(server.bodies[1]["messages"]) == 2
    page.close()


@needs_chromium
def test_a_refused_request_is_said_once_for_all_its_answers(
    chromium: Chromium, server: CannedServer
) -> None:
    server.refusal = JSONResponse({"error": {"message": "too much"}}, 400)
    page = opened(chromium, server)
    page.evaluate("document.getElementById('samples').value = 4")
    say(page, "What is it?")
    page.wait_for("document.querySelector('.error')")
    page.wait_for("document.querySelectorAll('.answer').length === 1")
    page.close()


@needs_chromium
def test_an_answer_that_breaks_off_is_said_to(chromium: Chromium, server: CannedServer) -> None:
    server.chunks = [chunk("A page ")]
    page = opened(chromium, server)
    say(page, "What is it?")
    page.wait_for("document.querySelector('.error')")
    assert "The connection was lost; the answer is not complete." in page.text(".error")
    page.close()


@needs_chromium
def test_an_error_in_the_midst_of_an_answer_is_said(
    chromium: Chromium, server: CannedServer
) -> None:
    server.chunks = [chunk("A page "), {"error": {"message": "the engine died"}}]
    page = opened(chromium, server)
    say(page, "What is it?")
    page.wait_for("document.querySelector('.error')")
    assert "The server failed: the engine died" in page.text(".error")
    page.close()


@needs_chromium
def test_a_server_with_keys_is_asked_for_one(chromium: Chromium, server: CannedServer) -> None:
    server.key, server.chunks = "sesame", ANSWER
    page = chromium.open(server.url)
    page.wait_for("!document.getElementById('access').hidden")
    page.wait_for("document.activeElement.id === 'key'")
    page.type("wrong")
    page.press("Enter")
    page.wait_for(
        "document.getElementById('key').value === '' && !document.getElementById('access').hidden"
    )
    page.type("sesame")
    page.press("Enter")
    page.wait_for("document.getElementById('connection').dataset.state === 'live'")
    say(page, "What is it?")
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    page.close()


@needs_chromium
def test_a_lost_connection_is_said_and_found_again(
    chromium: Chromium, server: CannedServer
) -> None:
    page = opened(chromium, server)
    server.is_live = False
    page.wait_for("document.getElementById('connection').dataset.state === 'lost'")
    assert page.evaluate("document.getElementById('memory').className") == "stale"
    server.is_live = True
    page.wait_for("document.getElementById('connection').dataset.state === 'live'")
    page.close()


@needs_chromium
def test_a_server_that_comes_back_may_have_another_model(
    chromium: Chromium, server: CannedServer
) -> None:
    server.chunks = ANSWER
    page = opened(chromium, server)
    page.wait_for("document.getElementById('model').innerText === 'tiny'")
    server.is_live = False
    page.wait_for("document.getElementById('connection').dataset.state === 'lost'")
    server.is_live, server.model = True, "other"
    page.wait_for("document.getElementById('model').innerText === 'other'")
    say(page, "What is it?")
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    assert server.bodies[0]["model"] == "other"
    page.close()


@needs_chromium
def test_a_question_that_waits_for_a_key_can_be_stopped(
    chromium: Chromium, server: CannedServer
) -> None:
    page = opened(chromium, server)
    server.key = "sesame"
    say(page, "What is it?")
    page.wait_for("!document.getElementById('access').hidden")
    page.click("#stop")
    page.wait_for("document.querySelector('.answer[data-state=stopped]')")
    page.close()


# ── keys, names and phones ───────────────────────────────────────────────────────────────────


@needs_chromium
def test_the_tab_key_goes_through_the_page_in_reading_order(
    chromium: Chromium, server: CannedServer
) -> None:
    server.state = {**SHARED, "events": [event(1, "admitted", 0)]}
    page = opened(chromium, server)
    visited = []
    for _ in range(15):
        page.press("Tab")
        visited.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className"
                " || document.activeElement.tagName"
            )
        )
    assert visited == [
        "skip",
        "theme",
        "log",
        *["BUTTON"] * 3,
        "SUMMARY",
        "samples",
        "message",
        "send",
        "send-four",
        "clear",
        "map",
        "events",
        "SUMMARY",
    ]
    page.close()


@needs_chromium
def test_whatever_can_be_used_has_a_name(chromium: Chromium, server: CannedServer) -> None:
    server.state = SHARED
    page = opened(chromium, server)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    tree = page.command("Accessibility.getFullAXTree")["nodes"]
    used = {"button", "textbox", "slider", "spinbutton", "group", "image", "link", "log", "list"}
    nameless = [
        node["role"]["value"]
        for node in tree
        if not node["ignored"]
        and node["role"]["value"] in used - {"list", "group"}
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    page.close()


@needs_chromium
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_it_in_one_column(
    chromium: Chromium, server: CannedServer, width: int
) -> None:
    server.state, server.chunks = SHARED, [chunk("long" * 60, finish="stop"), "[DONE]"]
    page = opened(chromium, server, width=width, height=800)
    say(page, "word " * 30)
    page.wait_for("document.querySelector('.answer[data-state=done]')")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    chat, memory = (
        page.evaluate(f"document.getElementById('{name}').getBoundingClientRect().toJSON()")
        for name in ("chat", "memory")
    )
    assert chat["bottom"] <= memory["top"]
    assert json.dumps(page.complaints) == "[]"
    page.close()


@needs_chromium
def test_a_page_can_be_pictured(chromium: Chromium, server: CannedServer, tmp_path: Path) -> None:
    server.state = SHARED
    page = opened(chromium, server)
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    page.close()
