"""`kvruntime serve`: an OpenAI-compatible server."""

import os
from pathlib import Path
from typing import Annotated, cast

import typer

from kvruntime import engine_config
from kvruntime.cli import options
from kvruntime.engine_config import EngineConfig
from kvruntime.errors import InvalidRequest, MissingDependency

__all__ = ["serve"]

_NEEDED = {"prometheus_client", "pydantic", "starlette", "uvicorn"}


def serve(
    model: options.Model = "smollm2",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 takes any that is free.")
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call it.  [default: the model's name]", metavar="NAME"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that is accepted; also in KVRUNTIME_API_KEY.", metavar="KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Keys, one a line, each with its tenant's name if it has one; # begins a comment.",
            metavar="FILE",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name of this server, where only some are answered.", metavar="NAME"),
    ] = None,
    max_num_waiting: Annotated[
        int, typer.Option(help="Answers that may wait; more get 429.")
    ] = 128,
    max_num_waiting_tokens: Annotated[
        int, typer.Option(help="Tokens of prompts that may wait; more get 429.")
    ] = 65536,
    request_seconds: Annotated[
        float, typer.Option(help="How long a request may take; 0 lets it run.")
    ] = 600,
    drain_seconds: Annotated[
        float, typer.Option(help="How long a signal waits for what runs, at most.")
    ] = 60,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log each path that is asked for.")
    ] = False,
    num_threads: options.NumThreads = 1,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer.  [default: the model's]")
    ] = None,
    prefix_caching: options.PrefixCaching = True,
    max_num_seqs: options.MaxNumSeqs = 64,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    policy: Annotated[str, typer.Option(help="Who goes first: fcfs, or priority.")] = "fcfs",
    skip_ahead: options.SkipAhead = 0,
    admission: options.Admission = "prompt",
    eviction: options.Eviction = "before",
    preemption: options.Preemption = "auto",
    num_host_blocks: options.NumHostBlocks = None,
    kv_dtype: options.KVDtype = "float32",
    attention: options.Attention = "kernels",
    device: options.Device = "cpu",
) -> None:
    """Serve a model to OpenAI's clients, until Ctrl-C."""
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=cast("engine_config.Policy", policy),
        skip_ahead=skip_ahead,
        admission=cast("engine_config.Admission", admission),
        eviction=cast("engine_config.Eviction", eviction),
        preemption=cast("engine_config.Preemption", preemption),
        num_host_blocks=num_host_blocks,
        kv_dtype=cast("engine_config.KVDtype", kv_dtype),
        attention=cast("engine_config.Attention", attention),
        device=cast("engine_config.Device", device),
        max_num_waiting=max_num_waiting,
        max_num_waiting_tokens=max_num_waiting_tokens,
    )
    for name, seconds in {
        "request_seconds": request_seconds,
        "drain_seconds": drain_seconds,
    }.items():
        if not seconds >= 0:
            raise InvalidRequest(f"{name} must not be negative, got {seconds}")
    api_keys = _api_keys(api_key or [], api_key_file)
    try:
        from kvruntime.llm import LLM
        from kvruntime.server.run import run
        from kvruntime.server.settings import ServerSettings
    except ImportError as error:
        if error.name not in _NEEDED:
            raise
        raise MissingDependency(
            f"kvruntime serve needs {error.name}: pip install 'kvruntime[serve]'"
        ) from error
    settings = ServerSettings(
        model_names=tuple(served_model_name or [Path(model).name]),
        api_keys=api_keys,
        allowed_hosts=tuple(allowed_host or ()),
        request_seconds=request_seconds or None,
    )
    has_answered_all = run(
        lambda: LLM(model, config, num_threads=num_threads),
        settings,
        host=host,
        port=port,
        drain_seconds=drain_seconds,
        access_log=access_log,
    )
    if not has_answered_all:
        raise typer.Exit(1)


def _api_keys(given: list[str], path: Path | None) -> dict[str, str | None]:
    """The keys of the options, the environment and a file, with their tenants."""
    keys: dict[str, str | None] = dict.fromkeys(given)
    if key := os.environ.get("KVRUNTIME_API_KEY"):
        keys[key] = None
    if path is None:
        return keys
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} must be a text in UTF-8: {error.reason}") from error
    for number, line in enumerate(lines, 1):
        words = [] if line.lstrip().startswith("#") else line.split()
        if len(words) > 2:
            raise InvalidRequest(
                f"{path}, line {number}: a line must be a key, or a key and a tenant, "
                f"got {len(words)} words"
            )
        if words:
            keys[words[0]] = words[1] if len(words) == 2 else None
    if not keys:
        raise InvalidRequest(f"{path} must have at least one key, got none")
    return keys
