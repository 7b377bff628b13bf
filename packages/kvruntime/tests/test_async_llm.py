"""An engine in a thread: what readers get, and what is left of those that leave."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvblocks import Stats
from kvruntime import (
    LLM,
    AnswerStream,
    AsyncLLM,
    BeamSearchParams,
    CheckpointNotFound,
    Delta,
    Engine,
    EngineBusy,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    Observer,
    SamplingParams,
    StructuredOutputsParams,
)
from kvruntime.guidance import Guidance
from kvruntime.steps import SchedulerOutput

MakeLLM = Callable[..., LLM]

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


@asynccontextmanager
async def running(llm: LLM | Callable[[], LLM], *observers: Observer) -> AsyncIterator[AsyncLLM]:
    async_llm = AsyncLLM(llm, observers=observers)
    try:
        yield async_llm
    finally:
        await async_llm.stop()


@asynccontextmanager
async def held(async_llm: AsyncLLM) -> AsyncIterator[None]:
    """Let the engine wait between two steps; what is asked of it meanwhile comes before the next."""
    waiting, going_on = threading.Event(), threading.Event()

    def wait(engine: Engine) -> None:  # noqa: ARG001 -- as it is called
        waiting.set()
        assert going_on.wait(timeout=60)

    call = asyncio.create_task(async_llm.call(wait))
    await asyncio.to_thread(waiting.wait)
    try:
        yield
    finally:
        going_on.set()
        await call


async def pool(async_llm: AsyncLLM) -> Stats:
    return await async_llm.call(lambda engine: engine.manager.stats())


async def texts(stream: AnswerStream) -> dict[int, str]:
    found: dict[int, str] = {}
    async for delta in stream:
        found[delta.index] = found.get(delta.index, "") + delta.text
    return found


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(n=3, max_tokens=30, seed=4, temperature=1.0),
        SamplingParams(n=2, best_of=4, max_tokens=10, seed=4),
        SamplingParams(max_tokens=40, seed=1, stop=["e", "the "]),
        SamplingParams(max_tokens=40, seed=1, stop=["e"], include_stop_str_in_output=True),
        SamplingParams(max_tokens=8, seed=1, logprobs=2),
        BeamSearchParams(num_beams=3, n=2, max_tokens=8),
    ],
    ids=["greedy", "n", "best_of", "stop", "kept stop", "logprobs", "beams"],
)
def test_deltas_together_are_what_generate_returns(
    make_llm: MakeLLM, params: SamplingParams | BeamSearchParams
) -> None:
    [expected] = make_llm().generate("the cache keeps", params)

    async def answer() -> list[Delta]:
        async with running(make_llm()) as async_llm:
            stream = await async_llm.submit("the cache keeps", params, request_id="a")
            merged: dict[int, Delta] = {}
            async for delta in stream:
                before = merged.get(delta.index)
                assert before is None or before.finish_reason is None
                merged[delta.index] = delta if before is None else before.then(delta)
            return [merged[index] for index in sorted(merged)]

    deltas = asyncio.run(answer())
    assert [
        Delta(
            output.index,
            output.text,
            tuple(output.token_ids),
            output.logprobs or (),
            output.finish_reason,
            output.stop_reason,
        )
        for output in expected.outputs
    ] == deltas


def test_a_reader_gets_a_delta_a_token(make_llm: MakeLLM) -> None:
    """At least where it reads as fast as tokens come: here the engine waits for it."""

    async def read() -> list[Delta]:
        turn = threading.Semaphore(0)

        class OneAtATime(Observer):
            def stepped(self, engine: Engine, seconds: float) -> None:  # noqa: ARG002
                turn.acquire(timeout=10)

        async with running(make_llm(), OneAtATime()) as async_llm:
            stream = await async_llm.submit([5, 6, 7], GREEDY, request_id="a")
            deltas = []
            async for delta in stream:
                deltas.append(delta)
                turn.release()
            return deltas

    deltas = asyncio.run(read())
    assert [len(delta.token_ids) for delta in deltas] == [1] * 12


def test_constraints_are_compiled_once_and_beside_the_engine_however_many_there_are(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = Guidance._compile
    threads = []

    def note(guidance: Guidance, params: StructuredOutputsParams) -> Any:
        threads.append(threading.current_thread())
        return compile_(guidance, params)

    monkeypatch.setattr(Guidance, "_compile", note)
    each = [
        SamplingParams(
            n=2,
            seed=0,
            max_tokens=100,
            structured_outputs=StructuredOutputsParams(choice=["a" * number]),
        )
        for number in range(1, 71)
    ]

    async def answer() -> list[dict[int, str]]:
        before = set(threading.enumerate())
        async with running(make_llm(max_num_seqs=4)) as async_llm:
            [engine_thread] = set(threading.enumerate()) - before
            streams = [await async_llm.submit([5, 6, 7], params, request_id="") for params in each]
            found = [await texts(stream) for stream in streams]
            assert engine_thread not in threads
            return found

    assert asyncio.run(answer()) == [{0: "a" * number, 1: "a" * number} for number in range(1, 71)]
    assert len(threads) == 70


def test_a_constraint_that_cannot_be_followed_is_refused_and_counted(make_llm: MakeLLM) -> None:
    async def submit() -> None:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
        async with running(make_llm()) as async_llm:
            with pytest.raises(InvalidRequest, match="the regex cannot be followed"):
                await async_llm.submit([5], params, request_id="a")
            assert await async_llm.call(lambda engine: engine.stats().num_rejections) == 1

    asyncio.run(submit())


def test_deltas_are_merged_for_a_slow_reader_and_the_engine_does_not_wait(
    make_llm: MakeLLM,
) -> None:
    async def read() -> list[Delta]:
        async with running(make_llm()) as async_llm:
            params = SamplingParams(n=2, max_tokens=50, seed=0, ignore_eos=True)
            stream = await async_llm.submit([5, 6, 7], params, request_id="slow")
            await until(async_llm, lambda engine: not engine.has_work)
            assert (await pool(async_llm)).num_held_blocks == 0
            return [delta async for delta in stream]

    deltas = asyncio.run(read())
    assert [(delta.index, len(delta.token_ids)) for delta in deltas] == [(0, 50), (1, 50)]


def test_what_of_the_prompt_was_cached_is_told(make_llm: MakeLLM) -> None:
    async def count() -> list[tuple[int, int]]:
        async with running(make_llm()) as async_llm:
            counts = []
            for request_id in "ab":
                stream = await async_llm.submit(list(range(10, 50)), GREEDY, request_id=request_id)
                await texts(stream)
                counts.append((stream.num_prompt_tokens, stream.num_cached_tokens))
            return counts

    assert asyncio.run(count()) == [(40, 0), (40, 32)]


class TestWhoLeavesFreesItsBlocks:
    """An abort is carried out before the next step, in whatever state the request is."""

    async def assert_freed(
        self, async_llm: AsyncLLM, streams: list[AnswerStream], *, before: int
    ) -> None:
        async with held(async_llm):
            step = async_llm.llm.engine.stats().num_steps
            for stream in streams:
                await stream.aclose()
            counting = asyncio.create_task(
                async_llm.call(lambda engine: (engine.stats().num_steps, engine.manager.stats()))
            )
            await asyncio.sleep(0)  # until it is asked
        after, stats = await counting
        assert after == step
        assert stats.num_held_blocks == stats.num_held_host_blocks == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == before
        await async_llm.call(lambda engine: engine.manager.check())
        assert await texts(await async_llm.submit([5], GREEDY, request_id="next"))

    @pytest.mark.parametrize(
        "params",
        [
            ENDLESS,
            SamplingParams(n=4, max_tokens=400, seed=0, ignore_eos=True),
            BeamSearchParams(num_beams=4, max_tokens=400, ignore_eos=True),
        ],
        ids=["one", "n", "beams"],
    )
    def test_while_decoding(
        self, make_llm: MakeLLM, params: SamplingParams | BeamSearchParams
    ) -> None:
        async def leave() -> None:
            async with running(make_llm()) as async_llm:
                stream = await async_llm.submit([5, 6, 7], params, request_id="a")
                await until(async_llm, lambda engine: engine.stats().num_generated_tokens > 12)
                await self.assert_freed(async_llm, [stream], before=256)

        asyncio.run(leave())

    def test_while_it_waits_and_while_its_prompt_is_computed(self, make_llm: MakeLLM) -> None:
        async def leave() -> None:
            llm = make_llm(max_num_batched_tokens=8, max_num_seqs=1)
            async with running(llm) as async_llm:
                first = await async_llm.submit(list(range(10, 300)), ENDLESS, request_id="a")
                second = await async_llm.submit([5, 6, 7], ENDLESS, request_id="b")
                await until(async_llm, lambda engine: engine.stats().num_prefill_tokens > 20)
                await self.assert_freed(async_llm, [second, first], before=256)
                stats = await async_llm.call(lambda engine: engine.stats())
                assert stats.num_generated_tokens == GREEDY.max_tokens  # of the next request

        asyncio.run(leave())

    def test_while_it_is_swapped(self, make_llm: MakeLLM) -> None:
        async def leave() -> None:
            llm = make_llm(num_blocks=12, block_size=4, preemption="swap", prefix_caching=False)
            params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
            async with running(llm) as async_llm:
                streams = [
                    await async_llm.submit([i, 6, 7], params, request_id=str(i))
                    for i in range(4, 8)
                ]
                await until(async_llm, lambda e: e.manager.stats().num_held_host_blocks > 0)
                await self.assert_freed(async_llm, streams, before=12)

        asyncio.run(leave())

    def test_in_the_midst_of_a_step(self, make_llm: MakeLLM) -> None:
        stepping, going_on = threading.Event(), threading.Event()

        class Slow(Observer):
            def stepped(self, engine: Engine, seconds: float) -> None:  # noqa: ARG002 -- its interface
                stepping.set()
                assert going_on.wait(timeout=60)

        async def leave() -> None:
            async with running(make_llm(), Slow()) as async_llm:
                stream = await async_llm.submit([5, 6, 7], ENDLESS, request_id="a")
                await asyncio.to_thread(stepping.wait)
                stream.abort()
                going_on.set()
                await asyncio.sleep(0.1)  # in which the engine finds that it has nothing to do
                await self.assert_freed(async_llm, [], before=256)

        asyncio.run(leave())

    def test_before_the_engine_has_taken_it(self, make_llm: MakeLLM) -> None:
        async def leave() -> None:
            async with running(make_llm()) as async_llm:
                task = asyncio.create_task(async_llm.submit([5, 6, 7], ENDLESS, request_id="a"))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert (await pool(async_llm)).num_sequences == 0
                assert not await async_llm.call(lambda engine: engine.has_work)

        asyncio.run(leave())


async def until(async_llm: AsyncLLM, holds: Callable[[Engine], bool]) -> None:
    while not await async_llm.call(holds):
        pass


def test_what_cannot_be_served_is_refused_where_it_is_submitted(make_llm: MakeLLM) -> None:
    async def submit() -> None:
        async with running(make_llm(max_num_waiting=1, max_num_seqs=1)) as async_llm:
            with pytest.raises(InvalidRequest, match="the prompt is empty"):
                await async_llm.submit([], GREEDY, request_id="a")
            running_one = await async_llm.submit([5], ENDLESS, request_id="b")
            await until(async_llm, lambda engine: engine.stats().num_generated_tokens > 0)
            waiting = await async_llm.submit([6], GREEDY, request_id="c")
            with pytest.raises(EngineBusy, match="at most 1 answers may wait"):
                await async_llm.submit([7], GREEDY, request_id="d")
            await running_one.aclose()
            assert len((await texts(waiting))[0]) > 0

    asyncio.run(submit())


def test_a_call_that_raises_raises_where_it_was_asked_and_nowhere_else(
    make_llm: MakeLLM,
) -> None:
    async def ask() -> None:
        async with running(make_llm()) as async_llm:
            with pytest.raises(ZeroDivisionError):
                await async_llm.call(lambda engine: engine.vocab_size // 0)
            assert async_llm.status == "ready"
            assert await texts(await async_llm.submit([5], GREEDY, request_id="a"))

    asyncio.run(ask())


class Panic(BaseException):
    """What pyo3 raises for a panic in Rust is no `Exception` either."""


def fail_in(llm: LLM, step: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine fail in this step."""
    execute = llm.engine.runner.execute

    def fails_later(output: SchedulerOutput) -> Any:
        if output.step == step:
            raise error
        return execute(output)

    monkeypatch.setattr(llm.engine.runner, "execute", fails_later)


async def submit_together(async_llm: AsyncLLM, num_requests: int) -> list[AnswerStream]:
    """Submit requests that the engine takes before the same step."""
    async with held(async_llm):
        submitting = [
            asyncio.create_task(async_llm.submit([5, i], ENDLESS, request_id=str(i)))
            for i in range(num_requests)
        ]
        await asyncio.sleep(0)  # until each is asked
    return await asyncio.gather(*submitting)


def test_an_engine_that_fails_answers_everybody_and_takes_nobody(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    fail_in(llm, 5, ValueError("no such layer"), monkeypatch)

    async def fail() -> None:
        async with running(llm) as async_llm:
            for stream in await submit_together(async_llm, 3):
                with pytest.raises(EngineFailed, match=r"ValueError\('no such layer'\)"):
                    await texts(stream)
            assert async_llm.status == "failed"
            assert repr(async_llm.error) == "ValueError('no such layer')"
            with pytest.raises(EngineUnavailable, match="no such layer"):
                await async_llm.submit([5], GREEDY, request_id="d")
            assert (await pool(async_llm)).num_held_blocks == 0

    asyncio.run(fail())


def test_a_panic_fails_the_engine_and_hangs_nobody(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    fail_in(llm, 3, Panic("out of range"), monkeypatch)

    async def fail() -> None:
        async with running(llm) as async_llm:
            stream = await async_llm.submit([5], ENDLESS, request_id="a")
            with pytest.raises(EngineFailed, match=r"Panic\('out of range'\)"):
                await texts(stream)
            assert async_llm.status == "failed"
            assert (await pool(async_llm)).num_held_blocks == 0

    asyncio.run(fail())


def test_a_panic_while_loading_fails_the_engine() -> None:
    def load() -> LLM:
        raise Panic

    async def fail() -> None:
        async with running(load) as async_llm:
            await async_llm.loaded()
            assert async_llm.status == "failed"
            assert isinstance(async_llm.error, Panic)

    asyncio.run(fail())


def test_a_panic_in_a_call_is_raised_where_it_was_asked_and_nowhere_else(
    make_llm: MakeLLM,
) -> None:
    def panic(engine: Engine) -> None:  # noqa: ARG001 -- as it is called
        raise Panic

    async def ask() -> None:
        async with running(make_llm()) as async_llm:
            with pytest.raises(Panic):
                await async_llm.call(panic)
            assert async_llm.status == "ready"
            assert await texts(await async_llm.submit([5], GREEDY, request_id="a"))

    asyncio.run(ask())


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_observers_that_fail_at_every_end_fail_the_engine_and_hang_nobody(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    class Broken(Observer):
        def ended(self, *_: object) -> None:
            raise kind

    recorder = Recorder()

    async def fail() -> None:
        async with running(make_llm(), Broken(), recorder) as async_llm:
            left, *others = await submit_together(async_llm, 3)
            await left.aclose()
            for stream in others:
                with pytest.raises(EngineFailed, match=kind.__name__):
                    await texts(stream)
            assert async_llm.status == "failed"
            assert (await pool(async_llm)).num_held_blocks == 0

    asyncio.run(fail())
    ends = [seen.partition(" ")[0] for seen in recorder.seen if seen[-1].isdigit()]
    assert ends == ["error", "error"]
    assert caplog.messages.count("an observer failed as a request ended") == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_an_engine_that_failed(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_too(*_: object) -> None:
        raise Panic

    llm = make_llm()
    fail_in(llm, 1, Panic(), monkeypatch)
    monkeypatch.setattr(AsyncLLM, "_fail", fails_too)

    async def fail() -> None:
        before = set(threading.enumerate())
        async with running(llm) as async_llm:
            [thread] = set(threading.enumerate()) - before
            await async_llm.submit([5], GREEDY, request_id="a")
            await asyncio.to_thread(thread.join)
            assert async_llm.status == "failed"
            with pytest.raises(EngineUnavailable, match="the engine failed"):
                await async_llm.submit([5], GREEDY, request_id="b")
            with pytest.raises(EngineUnavailable, match="the engine's thread has ended"):
                await pool(async_llm)

    asyncio.run(fail())


def test_a_model_that_cannot_be_loaded_fails(tmp_path: Path) -> None:
    async def load() -> None:
        async with running(lambda: LLM(tmp_path / "nothing")) as async_llm:
            await async_llm.loaded()
            assert async_llm.status == "failed"
            assert isinstance(async_llm.error, CheckpointNotFound)

    asyncio.run(load())


def test_nothing_is_taken_while_the_model_loads(make_llm: MakeLLM) -> None:
    gate = threading.Event()

    def load() -> LLM:
        gate.wait(timeout=60)
        return make_llm()

    async def submit() -> None:
        async with running(load) as async_llm:
            with pytest.raises(EngineUnavailable, match="the engine is loading"):
                await async_llm.submit([5], GREEDY, request_id="a")
            gate.set()
            await async_llm.loaded()
            assert await texts(await async_llm.submit([5], GREEDY, request_id="b"))

    asyncio.run(submit())


def test_draining_ends_what_runs_and_takes_nothing_new(make_llm: MakeLLM) -> None:
    async def drain() -> None:
        async with running(make_llm()) as async_llm:
            stream = await async_llm.submit([5], GREEDY, request_id="a")
            draining = asyncio.create_task(async_llm.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailable, match="the engine is draining"):
                await async_llm.submit([5], GREEDY, request_id="b")
            assert await draining
            assert [delta.finish_reason for delta in [d async for d in stream]][-1] == "length"

    asyncio.run(drain())


def test_a_drain_that_takes_too_long_says_so_and_stopping_ends_the_rest(
    make_llm: MakeLLM,
) -> None:
    async def drain() -> None:
        async with running(make_llm(num_blocks=2000)) as async_llm:
            params = SamplingParams(n=32, max_tokens=500, seed=0, ignore_eos=True)
            stream = await async_llm.submit([5], params, request_id="a")
            assert not await async_llm.drain(seconds=0.01)
            await async_llm.stop()
            with pytest.raises(EngineUnavailable, match="the engine was stopped"):
                await texts(stream)
            with pytest.raises(EngineUnavailable):
                await pool(async_llm)

    asyncio.run(drain())


def test_a_reader_whose_loop_is_closed_is_dropped(make_llm: MakeLLM) -> None:
    async_llm = AsyncLLM(make_llm())

    async def submit() -> None:
        await async_llm.submit([5], ENDLESS, request_id="a")

    async def assert_gone() -> None:
        await until(async_llm, lambda engine: not engine.has_work)
        assert async_llm.status == "ready"
        assert (await async_llm.call(lambda e: e.stats())).num_generated_tokens < 400
        await async_llm.stop()

    asyncio.run(submit())
    asyncio.run(assert_gone())


class Recorder(Observer):
    """Keeps what it is told, without the times."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.num_steps = 0

    def admitted(self, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append("admitted")

    def first_token(self, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append("first")

    def next_token(self, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append("next")

    def ended(self, seconds: float, reason: str, num_prompt_tokens: int, num_tokens: int) -> None:
        assert seconds >= 0
        self.seen.append(f"{reason} {num_prompt_tokens} {num_tokens}")

    def stepped(self, engine: Engine, seconds: float) -> None:
        assert seconds >= 0
        self.num_steps = engine.stats().num_steps


def observed(llm: LLM, act: Callable[[AsyncLLM], Awaitable[object]]) -> Recorder:
    recorder = Recorder()

    async def run() -> None:
        async with running(llm, recorder) as async_llm:
            await act(async_llm)

    asyncio.run(run())
    return recorder


def test_observers_see_each_token_and_each_end_once(make_llm: MakeLLM) -> None:
    async def act(async_llm: AsyncLLM) -> None:
        params = SamplingParams(n=2, max_tokens=3, seed=0, ignore_eos=True)
        await texts(await async_llm.submit([5, 6], params, request_id="a"))

    recorder = observed(make_llm(), act)
    assert recorder.seen == ["admitted", "first", *["next"] * 4, "length 2 6"]
    assert recorder.num_steps == 3


def test_observers_see_who_left(make_llm: MakeLLM) -> None:
    async def act(async_llm: AsyncLLM) -> None:
        stream = await async_llm.submit([5, 6], ENDLESS, request_id="a")
        await anext(aiter(stream))
        await stream.aclose()
        await stream.aclose()

    ends = [seen for seen in observed(make_llm(), act).seen if seen.startswith("abort")]
    assert len(ends) == 1
