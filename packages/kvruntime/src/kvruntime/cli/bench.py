"""`kvruntime bench serve` and `kvruntime bench throughput`: load, and what it took.

Knows options. What they ask for, the modules of `kvruntime.bench` do.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from kvruntime.cli import options
from kvruntime.engine_config import EngineConfig, Preemption
from kvruntime.errors import InvalidRequest

__all__ = ["bench"]

bench = typer.Typer(
    help="Measure a server under load, or the engine itself.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

NumPrompts = Annotated[int, typer.Option(help="How many requests.")]
InputLen = Annotated[int, typer.Option(help="Tokens of a random prompt.")]
OutputLen = Annotated[int, typer.Option(help="Tokens of an answer, where nothing else says.")]
RangeRatio = Annotated[
    float, typer.Option(help="Draw each length within this share around the one given.")
]
PrefixLen = Annotated[int, typer.Option(help="Shared tokens in front of random prompts.")]
NumPrefixes = Annotated[int, typer.Option(help="Different shared beginnings, used in turn.")]
VocabSize = Annotated[int, typer.Option(help="Made-up prompts hold token ids below this.")]
TraceFile = Annotated[
    Path | None,
    typer.Option(help="Lengths, shared blocks and times of a trace: Azure CSV, Mooncake JSONL."),
]
LengthScale = Annotated[float, typer.Option(help="Multiply the lengths of a trace.")]
PromptsFile = Annotated[
    Path | None, typer.Option(help="Prompts, one a line: texts, or JSON objects.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts and times.")]


@bench.command(
    epilog="Example: kvruntime bench serve --url http://127.0.0.1:8000 --num-prompts 64 "
    "--request-rate 4 --goodput ttft:500"
)
def serve(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="[default: the first that the server lists]")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    text: Annotated[
        bool, typer.Option("--text", help="Send words, not token ids; chat always does.")
    ] = False,
    num_prompts: NumPrompts = 100,
    input_len: InputLen = 64,
    output_len: OutputLen = 32,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 0,
    num_prefixes: NumPrefixes = 1,
    vocab_size: VocabSize = 30_000,
    trace: TraceFile = None,
    length_scale: LengthScale = 1.0,
    speed: Annotated[float, typer.Option(help="Play the times of a trace so much faster.")] = 1.0,
    prompts: PromptsFile = None,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, or inf.  [default: a trace's times, or inf]"),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gaps: 1 is Poisson, less comes in bursts.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight at most; others wait here.")
    ] = None,
    seed: Seed = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length, as vLLM does.")
    ] = False,
    extra: Annotated[
        str, typer.Option(help="More fields of each request, a JSON object.", metavar="JSON")
    ] = '{"temperature": 0}',
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a byte after which a request has failed.")
    ] = 600.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, not measured.")] = 1,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help='Limits in milliseconds: "ttft:500 tpot:100 e2el:5000".'),
    ] = None,
    percentiles: Annotated[str, typer.Option(help="Which to show.")] = "50,90,99",
    plot: Annotated[
        Path | None, typer.Option(help="Draw requests and latencies into this file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Send requests to any OpenAI-compatible server and measure its answers.

    Latencies count from sending, tokens are those of the server's usage. Ctrl-C shows what was
    measured until then.
    """
    from kvruntime.bench.figures import parse_goodput, summarize
    from kvruntime.bench.prompts import Shape
    from kvruntime.bench.report import show_summary, to_json
    from kvruntime.bench.session import make_client, plotting, run_session
    from kvruntime.bench.workload import Workload
    from kvruntime.report import console

    limits, ranks = parse_goodput(goodput or ()), _ranks(percentiles)
    shape = Shape(input_len, output_len, range_ratio, prefix_len, num_prefixes, vocab_size)
    workload = Workload(
        num_prompts=num_prompts,
        shape=shape,
        trace=trace,
        length_scale=length_scale,
        prompts=prompts,
        request_rate=request_rate,
        burstiness=burstiness,
        speed=speed,
        seed=seed,
        is_text=text or endpoint == "chat",
    )
    fields = _object(extra) | ({"ignore_eos": True} if ignore_eos else {})
    client = make_client(url, endpoint, model=model, extra=fields, api_key=api_key, timeout=timeout)
    if plot:
        plotting().check_format(plot)
    run = run_session(client, workload, max_concurrency, warmup)
    summary = summarize(run.records, percentiles=ranks, limits=limits)
    title = f"{run.model} at {run.url}"
    if as_json:
        server = {"url": run.url, "model": run.model, "endpoint": endpoint}
        load = {**workload.to_json(), "max_concurrency": max_concurrency, "extra": fields}
        told = to_json(summary, run.records, server=server, load=load)
        print(json.dumps(told, indent=2), flush=True)
    else:
        show_summary(summary, console(), title=title)
    if plot:
        plotting().save_plot(plot, run.records, title=title, limits=limits)
    if not run.is_whole:
        raise typer.Exit(130)
    if not summary.num_completed:
        raise typer.Exit(1)


@bench.command(epilog="Example: kvruntime bench throughput --num-prompts 32 --input-len 64")
def throughput(
    model: options.Model = "smollm2",
    num_prompts: NumPrompts = 32,
    input_len: InputLen = 64,
    output_len: OutputLen = 32,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 0,
    num_prefixes: NumPrefixes = 1,
    vocab_size: Annotated[
        int | None, typer.Option(help="As in bench serve.  [default: the model's]")
    ] = None,
    trace: TraceFile = None,
    length_scale: LengthScale = 1.0,
    prompts: PromptsFile = None,
    seed: Seed = 0,
    num_threads: options.NumThreads = 1,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    prefix_caching: options.PrefixCaching = True,
    max_num_seqs: options.MaxNumSeqs = 64,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    preemption: options.Preemption = "recompute",
    as_json: options.Json = False,
) -> None:
    """Answer requests in this process, all there at once, and measure tokens a second."""
    from kvruntime.bench.prompts import Shape
    from kvruntime.bench.report import show_throughput
    from kvruntime.bench.throughput import measure_throughput
    from kvruntime.bench.workload import Workload
    from kvruntime.llm import LLM
    from kvruntime.report import console, progress_bars

    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        preemption=cast("Preemption", preemption),
    )
    with progress_bars() as progress:
        llm = LLM(model, config, num_threads=num_threads, progress=progress)
        size = llm.engine.vocab_size if vocab_size is None else vocab_size
        shape = Shape(input_len, output_len, range_ratio, prefix_len, num_prefixes, size)
        workload = Workload(
            num_prompts=num_prompts,
            shape=shape,
            trace=trace,
            length_scale=length_scale,
            prompts=prompts,
            seed=seed,
        )
        figures = measure_throughput(llm, workload.asked())
    if as_json:
        told = {"schema": 1, "model": model, "load": workload.to_json(), **figures.to_json()}
        print(json.dumps(told, indent=2), flush=True)
    else:
        show_throughput(figures, console(), title=f"{model}, {num_threads} thread(s)")


def _ranks(text: str) -> Sequence[float]:
    try:
        ranks = [float(item) for item in text.split(",")]
    except ValueError:
        ranks = [-1.0]
    if not all(0 <= rank <= 100 for rank in ranks):
        raise InvalidRequest(f"percentiles must be numbers from 0 to 100, got {text!r}")
    return ranks


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"--extra must be a JSON object, got {text!r}")
    return value
