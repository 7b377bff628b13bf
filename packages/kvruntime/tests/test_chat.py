"""Conversations: what is kept of them, what they cost, and how they look in a terminal and a pipe."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from kvruntime import LLM, InvalidRequest, SamplingParams, ServerError
from kvruntime.chat.local import LocalAnswerer
from kvruntime.chat.remote import RemoteAnswerer
from kvruntime.chat.session import Chat, Message, Turn
from kvruntime.chat.terminal import Terminal

TIMEOUT = 60  # seconds; only a hang reaches it


class Parrot:
    """Says what it was asked, word by word; "refuse" it refuses, at "^C" somebody presses it."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.num_closed = 0
        self.answers: list[Generator[str, None, None]] = []

    def answer(self, messages: Sequence[Message], turn: Turn) -> Generator[str, None, None]:
        answer = self._words(messages, turn)
        self.answers.append(answer)  # so that nobody closes it by forgetting it
        return answer

    def _words(self, messages: Sequence[Message], turn: Turn) -> Generator[str, None, None]:
        self.asked.append(list(messages))
        words = messages[-1]["content"].split()
        if words == ["refuse"]:
            raise InvalidRequest("the prompt has 9 tokens, but the pool holds 8")
        turn.num_prompt_tokens, turn.num_cached_tokens = 10 * len(messages), 5
        try:
            for word in words:
                for _ in range(word.count("^C")):
                    signal.raise_signal(signal.SIGINT)
                turn.num_output_tokens += 1
                yield f"{word} "
            turn.finish_reason = "stop"
        finally:
            self.num_closed += 1


@pytest.fixture
def talk() -> Callable[..., tuple[Parrot, str]]:
    """Return a function from lines to a parrot that heard them, and what was printed."""

    def talk(*lines: str, is_interactive: bool = True, **settings: Any) -> tuple[Parrot, str]:
        parrot, file = Parrot(), io.StringIO()
        out = Console(file=file, width=100, highlight=False)
        chat = Chat(parrot, settings.pop("system", None))
        Terminal(chat, out, is_interactive=is_interactive, **settings).run(iter(lines))
        return parrot, file.getvalue()

    return talk


Talk = Callable[..., tuple[Parrot, str]]


def contents(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"].strip()) for message in messages]


def test_each_question_is_asked_with_all_before_it(talk: Talk) -> None:
    parrot, printed = talk("one\n", "\n", "two\n", system="be brief")
    assert contents(parrot.asked[1]) == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "one"),
        ("user", "two"),
    ]
    assert [line.strip() for line in printed.splitlines() if "[" not in line] == ["one", "two"]


def test_reset_begins_anew_and_keeps_the_system_prompt(talk: Talk) -> None:
    parrot, _ = talk("one", "/reset", "two", system="be brief")
    assert contents(parrot.asked[1]) == [("system", "be brief"), ("user", "two")]


def test_system_changes_what_stands_first_and_shows_it(talk: Talk) -> None:
    parrot, printed = talk("/system", "one", "/system be long", "two", "/system")
    assert contents(parrot.asked[0]) == [("user", "one")]
    assert contents(parrot.asked[1])[0] == ("system", "be long")
    assert "no system prompt" in printed
    assert printed.count("be long") == 2


def test_a_refused_question_is_told_and_forgotten(talk: Talk) -> None:
    parrot, printed = talk("refuse", "two")
    assert "the prompt has 9 tokens, but the pool holds 8" in printed
    assert contents(parrot.asked[1]) == [("user", "two")]


def test_in_a_pipe_a_refused_question_ends_the_program(talk: Talk) -> None:
    with pytest.raises(InvalidRequest):
        talk("refuse", "two", is_interactive=False)


def test_a_pipe_gets_answers_and_nothing_else(talk: Talk) -> None:
    _, printed = talk("one two\n", "three\n", is_interactive=False)
    assert printed == "one two \nthree \n"


@pytest.mark.parametrize("at_once", [False, True])
def test_ctrl_c_stops_an_answer_and_not_the_program(talk: Talk, *, at_once: bool) -> None:
    parrot, printed = talk("one ^C two three", "four", stop_at_once=at_once)
    assert parrot.num_closed == 2
    assert "three" not in printed
    assert "stopped]" in printed
    # What came of it is part of the conversation; a step that runs is waited for.
    assert contents(parrot.asked[1])[1] == ("assistant", "one" if at_once else "one ^C")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_waits_for_no_step(talk: Talk) -> None:
    parrot, printed = talk("^C^C one", "two")
    assert "one" not in printed
    assert contents(parrot.asked[1]) == [("user", "two")]


def test_ctrl_c_ends_a_pipe(talk: Talk) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk("one ^C two", is_interactive=False)


def test_a_question_that_nothing_came_of_is_forgotten(talk: Talk) -> None:
    parrot, _ = talk("^C one", "two", stop_at_once=True)
    assert contents(parrot.asked[1]) == [("user", "two")]


def test_stats_are_a_row_a_turn_and_their_sum(talk: Talk) -> None:
    _, printed = talk("one", "two", "/stats", pool=lambda: "8 blocks")
    rows = [line.replace("│", " ").split() for line in printed.splitlines() if "│" in line]
    assert [row[:5] for row in rows] == [
        ["1", "10", "5", "5", "1"],
        ["2", "30", "5", "25", "1"],
        ["all", "40", "10", "30", "2"],
    ]
    assert "8 blocks" in printed


def test_each_answer_tells_what_it_cost(talk: Talk) -> None:
    _, printed = talk("one")
    assert (
        "[10 tokens of the conversation, 5 of them in the cache, 1 generated in 0.0 s]" in printed
    )


@pytest.mark.parametrize("command", ["/quit", "/exit"])
def test_quit_leaves(talk: Talk, command: str) -> None:
    parrot, _ = talk("one", command, "two")
    assert len(parrot.asked) == 1


def test_help_and_a_wrong_command_say_what_there_is(talk: Talk) -> None:
    _, printed = talk("/help", "/foo")
    assert "/stats" in printed
    assert "there is no command /foo" in printed


def test_what_a_model_writes_does_not_steer_the_terminal(talk: Talk) -> None:
    _, printed = talk("\x1b[2J")
    assert "\x1b" not in printed


# ── answers of a model in this process ───────────────────────────────────────────────────────────


@pytest.fixture
def local(make_llm: Callable[..., LLM]) -> LocalAnswerer:
    """Return a tiny model that never stops by itself."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    return LocalAnswerer(make_llm(block_size=4), params)


def test_an_answer_is_the_one_of_the_engine(local: LocalAnswerer) -> None:
    chat = Chat(local)
    text = "".join(chat.ask("The cache"))
    [expected] = local.llm.chat(
        [{"role": "user", "content": "The cache"}],
        SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
    )
    assert text == expected.outputs[0].text
    assert chat.turns[0].finish_reason == "length"
    assert chat.turns[0].num_output_tokens == 24


def test_a_turn_finds_the_blocks_of_the_turns_before(local: LocalAnswerer) -> None:
    chat = Chat(local)
    for question in ("The cache", "keeps blocks", "what the tokens"):
        list(chat.ask(question))
    assert chat.turns[0].num_cached_tokens == 0
    for before, turn in zip(chat.turns, chat.turns[1:], strict=False):
        # Of the answer itself only what is encoded again as it was generated.
        assert before.num_prompt_tokens - 4 <= turn.num_cached_tokens < turn.num_prompt_tokens


def test_an_answer_that_is_stopped_gives_its_blocks_back_and_leaves_them_cached(
    local: LocalAnswerer,
) -> None:
    chat = Chat(local)
    answer = chat.ask("The cache keeps what the tokens before it have left behind")
    next(answer)
    answer.close()
    engine = local.llm.engine
    assert not engine.has_work
    assert engine.manager.stats().num_held_blocks == 0
    list(chat.ask("again"))
    assert chat.turns[1].num_cached_tokens >= chat.turns[0].num_prompt_tokens - 4


def test_a_conversation_that_outgrows_the_context_is_refused(local: LocalAnswerer) -> None:
    chat = Chat(local)
    with pytest.raises(InvalidRequest, match="but the model's context holds 512"):
        list(chat.ask("blocks " * 400))
    assert (chat.history, chat.turns) == ([], [])


def test_a_checkpoint_without_a_template_cannot_chat(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    monkeypatch.setattr(llm.tokenizer, "_chat_template", None)
    with pytest.raises(InvalidRequest, match="has no chat template, so it cannot chat"):
        LocalAnswerer(llm, SamplingParams())


# ── answers of a server ──────────────────────────────────────────────────────────────────────────


def stream(*events: Any) -> httpx.Response:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))


def piece(content: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish_reason}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 8},
    },
}


def server(
    answer: httpx.Response | Exception, bodies: list[Any] | None = None
) -> httpx.MockTransport:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "first"}]})
        if bodies is not None:
            bodies.append(json.loads(request.content))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.MockTransport(handle)


def test_a_server_is_asked_for_the_whole_conversation() -> None:
    bodies: list[Any] = []
    answer = stream(piece(""), piece("Pa"), piece("ris"), piece("", "stop"), USAGE, "[DONE]")
    remote = RemoteAnswerer("http://server", body={"seed": 3}, transport=server(answer, bodies))
    chat = Chat(remote, "be brief")
    assert "".join(chat.ask("Where?")) == "Paris"
    assert contents(bodies[0]["messages"]) == [("system", "be brief"), ("user", "Where?")]
    assert (bodies[0]["model"], bodies[0]["seed"]) == ("first", 3)
    [turn] = chat.turns
    assert (turn.num_prompt_tokens, turn.num_cached_tokens, turn.num_output_tokens) == (9, 8, 3)
    assert turn.finish_reason == "stop"


def test_an_answer_may_have_any_character() -> None:
    text = "one\N{LINE SEPARATOR}two\N{PARAGRAPH SEPARATOR}three\x85"
    answer = stream(json.dumps(piece(text, "stop"), ensure_ascii=False), "[DONE]")
    chat = Chat(RemoteAnswerer("http://server", transport=server(answer)))
    assert "".join(chat.ask("Where?")) == text


def test_a_server_that_wants_a_key_says_so() -> None:
    said = httpx.Response(401, json={"error": {"message": "a key is needed"}})
    with pytest.raises(ServerError, match=r"models answered 401: a key is needed$"):
        RemoteAnswerer("http://server", transport=httpx.MockTransport(lambda _: said))


@pytest.mark.parametrize("key", ["sk-é", "sk-a\r"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="an API key must be printable ASCII"):
        RemoteAnswerer("http://server", api_key=key)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(429, json={"error": {"message": "full"}}), "429: full"),
        (stream({"error": {"message": "out of memory"}}), "out of memory"),
        (httpx.ReadError("reset"), "does not answer"),
    ],
)
def test_what_a_server_says_of_an_error_is_one_sentence(
    answer: httpx.Response | Exception, message: str
) -> None:
    chat = Chat(RemoteAnswerer("http://server", transport=server(answer)))
    with pytest.raises(ServerError, match=message):
        list(chat.ask("Where?"))
    assert chat.history == []


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvruntime", "chat", "--model", str(folder), *arguments]


def test_a_pipe_is_answered_line_by_line(tiny_checkpoint: Callable[[str], Path]) -> None:
    done = subprocess.run(
        command(tiny_checkpoint("llama"), "--temperature", "0", "--max-tokens", "4"),
        input=b"The cache\nkeeps \xff blocks\n/stats\n",
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout
    assert "│   2 │" in done.stdout.decode().replace("│    2", "│   2")


def test_a_mistake_is_one_sentence(tiny_checkpoint: Callable[[str], Path]) -> None:
    done = subprocess.run(
        command(tiny_checkpoint("llama"), "--temperature", "-1"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"kvruntime: temperature must be")


# Makes standard input the terminal whose Ctrl-C reaches a program, and becomes that program.
_LOGIN = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"


class Screen:
    """What a person sees of a program, and a keyboard."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._side, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOGIN, *arguments], stdin=side, stdout=side, stderr=side
        )
        os.close(side)
        self._unread = ""

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._side, keys.encode())

    def read_until(self, text: str, pressing: str = "") -> str:
        """What comes until a text does, and no more.

        Keys are pressed, and again when nothing has come of them for seconds: Python misses a
        Ctrl-C in the moment between handling a key and waiting for the next.
        """
        deadline = time.monotonic() + TIMEOUT
        while (at := self._unread.find(text)) < 0:
            assert time.monotonic() < deadline, self._unread
            self.type(pressing)
            while select.select([self._side], [], [], 5)[0]:
                self._unread += os.read(self._side, 65536).decode(errors="replace")
                if text in self._unread:
                    break
        end = at + len(text)
        read, self._unread = self._unread[:end], self._unread[end:]
        return read

    def read_prompt(self) -> str:
        """What comes until the program reads keys.

        It does so a moment after its prompt is seen: a control key pressed in between would be lost.
        """
        text = self.read_until("> ")
        deadline = time.monotonic() + TIMEOUT
        while termios.tcgetattr(self._side)[3] & termios.ICANON:
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
        return text

    def close(self) -> None:
        """End the program, whatever it does."""
        self.process.kill()
        self.process.wait(TIMEOUT)
        os.close(self._side)


@pytest.fixture
def screen(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Screen]:
    """Return a terminal in which a tiny model chats, whose answers are long."""
    arguments = ["--temperature", "0", "--max-tokens", "400", "--block-size", "4"]
    opened = Screen(command(tiny_checkpoint("qwen2"), *arguments))
    yield opened
    opened.close()


def test_a_person_stops_an_answer_by_ctrl_c_and_goes_on(screen: Screen) -> None:
    screen.read_prompt()
    screen.type("The cache keeps\n")
    screen.read_until("keeps\r\n")
    screen.read_until("e")  # the answer has begun
    screen.type("\x03")
    assert "stopped]" in screen.read_prompt()
    screen.type("/stats\n")
    assert "all" in screen.read_until("cached for the next turn")
    screen.read_prompt()
    screen.type("\x04")
    assert screen.process.wait(TIMEOUT) == 0


def test_ctrl_c_at_the_prompt_leaves_nothing(screen: Screen) -> None:
    screen.read_prompt()
    screen.type("half a line")
    screen.read_until("half a line")
    screen.read_until("Ctrl-D or /quit leaves", pressing="\x03")
    screen.read_prompt()
    screen.type("/quit\n")
    assert screen.process.wait(TIMEOUT) == 0
