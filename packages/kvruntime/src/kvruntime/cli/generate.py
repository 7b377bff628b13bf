"""`kvruntime generate`: texts for prompts, batched together."""

from typing import Annotated, cast

import typer

from kvruntime.cli import options
from kvruntime.engine_config import (
    Admission,
    Attention,
    Device,
    EngineConfig,
    Eviction,
    KVDtype,
    Preemption,
)
from kvruntime.errors import InvalidRequest
from kvruntime.sampling_params import SamplingParams

__all__ = ["generate"]


def generate(
    prompt: Annotated[list[str], typer.Option(help="A prompt; give several to batch them.")],
    model: options.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="A system prompt for all of them.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text itself, without a chat template.")
    ] = False,
    n: Annotated[int, typer.Option(help="Samples a prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most, a sample.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token.  [default: 0, or 0.8 with --n above 1]"),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep tokens up to this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal samples.")] = 0,
    num_threads: options.NumThreads = 1,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    prefix_caching: options.PrefixCaching = True,
    max_num_seqs: options.MaxNumSeqs = 64,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    skip_ahead: options.SkipAhead = 0,
    admission: options.Admission = "prompt",
    eviction: options.Eviction = "before",
    preemption: options.Preemption = "recompute",
    num_host_blocks: options.NumHostBlocks = None,
    kv_dtype: options.KVDtype = "float32",
    attention: options.Attention = "kernels",
    device: options.Device = "cpu",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say who waited, was preempted and why.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Generate text for one prompt or several, batched together."""
    if raw and system is not None:
        raise InvalidRequest("--system needs the chat template, so it cannot go with --raw")
    if any(not text.strip() for text in prompt):
        raise InvalidRequest("the prompt is empty: --prompt needs some text")
    if temperature is None:
        temperature = 0.0 if n == 1 else 0.8
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        skip_ahead=skip_ahead,
        admission=cast("Admission", admission),
        eviction=cast("Eviction", eviction),
        preemption=cast("Preemption", preemption),
        num_host_blocks=num_host_blocks,
        kv_dtype=cast("KVDtype", kv_dtype),
        attention=cast("Attention", attention),
        device=cast("Device", device),
        # A step computes one token at least, so that this is all of them.
        log_steps=100_000 if verbose else 1,
    )
    from kvruntime.cli.show import show
    from kvruntime.llm import LLM
    from kvruntime.report import progress_bars, show_steps

    with progress_bars() as progress:
        llm = LLM(model, config, num_threads=num_threads, progress=progress)
        if raw:
            outputs = llm.generate(prompt, params)
        else:
            first = [] if system is None else [{"role": "system", "content": system}]
            outputs = llm.chat(
                [[*first, {"role": "user", "content": text}] for text in prompt], params
            )
    if verbose:
        show_steps(llm)
    show(llm, list(zip(prompt, outputs, strict=True)), as_json=as_json)
