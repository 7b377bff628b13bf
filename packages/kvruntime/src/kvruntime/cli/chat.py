"""`kvruntime chat`: a conversation in a terminal."""

import io
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.text import Text

from kvruntime.cli import options
from kvruntime.engine_config import EngineConfig
from kvruntime.errors import MissingDependency
from kvruntime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvruntime.chat.session import Answerer

__all__ = ["chat"]

Pool: TypeAlias = Callable[[], str]


def chat(
    model: Annotated[
        str | None,
        typer.Option(
            help="smollm2, a GGUF file or a folder; of a server, a name.  [default: smollm2, or "
            "the server's first]",
            metavar="MODEL",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask this server instead of loading a model.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Keep tokens up to this probability.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="For --url: a bearer token.")
    ] = None,
    num_threads: options.NumThreads = 1,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    prefix_caching: options.PrefixCaching = True,
) -> None:
    """Talk with a model; /help says what else there is. In a pipe, each line is a question."""
    from kvruntime.chat.session import Chat
    from kvruntime.chat.terminal import PersonsLines, Terminal
    from kvruntime.report import console

    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text
    out = console()
    out.no_color = out.no_color or not is_interactive
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    if url is None:
        config = EngineConfig(
            block_size=block_size, num_blocks=num_blocks, prefix_caching=prefix_caching
        )
        params = SamplingParams(**settings)
        answerer, pool = _local(model or "smollm2", config, params, num_threads)
    else:
        answerer, pool = _remote(url, model=model, api_key=api_key, settings=settings)
    terminal = Terminal(
        Chat(answerer, system),
        out,
        is_interactive=is_interactive,
        pool=pool,
        stop_at_once=url is not None,
    )
    if is_interactive:
        out.print(Text("/help says what there is besides questions", style="dim"))
    terminal.run(PersonsLines() if is_interactive else iter(sys.stdin))


def _local(
    model: str, config: EngineConfig, params: SamplingParams, num_threads: int
) -> tuple["Answerer", Pool]:
    """A model in this process, and what its pool holds."""
    from kvruntime.chat.local import LocalAnswerer
    from kvruntime.llm import LLM
    from kvruntime.report import progress_bars

    with progress_bars() as progress:
        llm = LLM(model, config, num_threads=num_threads, progress=progress)

    def pool() -> str:
        stats = llm.engine.manager.stats()
        return (
            f"{stats.num_blocks:,} blocks of {config.block_size} tokens: "
            f"{stats.num_cached_blocks:,} cached for the next turn, {stats.num_held_blocks:,} held, "
            f"{stats.num_free_blocks:,} free"
        )

    return LocalAnswerer(llm, params), pool


def _remote(
    url: str, *, model: str | None, api_key: str | None, settings: Mapping[str, Any]
) -> tuple["Answerer", Pool]:
    """A server, whose pool cannot be seen from here."""
    try:
        from kvruntime.chat.remote import RemoteAnswerer
    except ImportError as error:
        raise MissingDependency(
            "kvruntime chat --url needs the package httpx, which is not installed: "
            "pip install 'kvruntime[bench]'"
        ) from error
    body = {key: value for key, value in settings.items() if value is not None}
    return RemoteAnswerer(url, model=model, api_key=api_key, body=body), lambda: ""
