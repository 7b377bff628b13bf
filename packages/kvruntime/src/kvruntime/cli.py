"""The command line: `kvruntime generate` and `kvruntime demo`.

Knows options and exit codes: 0 on success, 2 with one sentence for a user's mistake, 1 with one
sentence when the system refuses, as a full disk does. Data goes to standard output, everything else
to standard error.
"""

import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from kvruntime._version import __version__
from kvruntime.demo import run_demo
from kvruntime.engine_config import Admission, EngineConfig, Eviction, Preemption
from kvruntime.errors import InvalidRequest, KVRuntimeError
from kvruntime.llm import LLM
from kvruntime.report import Answer, progress_bars, show_answers, show_stats, show_steps, to_json
from kvruntime.sampling_params import SamplingParams

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvruntime",
    help="A small transformer engine on paged memory.",
    epilog="Example: kvruntime demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Model = Annotated[
    str, typer.Option(help="smollm2, a GGUF file, or a folder of Hugging Face.", metavar="MODEL")
]


def main() -> None:
    """Run the command line; an error of ours or of the system becomes one sentence."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks shows as a question mark.
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except KVRuntimeError as error:
        print(f"kvruntime: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"kvruntime: {error}", file=sys.stderr)
        # What is still buffered has nowhere to go, and Python would try once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 -- typer calls it with the flag
    if wanted:
        print(__version__, flush=True)
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """A small transformer engine on paged memory."""


@app.command(epilog='Example: kvruntime generate --prompt "What is a page table?" --max-tokens 64')
def generate(
    prompt: Annotated[list[str], typer.Option(help="A prompt; give several to batch them.")],
    model: Model = "smollm2",
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
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the pool.  [default: what 512 MiB hold]")
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching", help="Reuse blocks of equal prefixes."
        ),
    ] = True,
    max_num_seqs: Annotated[int, typer.Option(help="Samples that run side by side.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens a step at most.")] = 512,
    skip_ahead: Annotated[
        int, typer.Option(help="Later prompts that may start before one that has no room yet.")
    ] = 0,
    admission: Annotated[
        str, typer.Option(help="What needs room to start: the prompt, or also the output.")
    ] = "prompt",
    eviction: Annotated[
        str, typer.Option(help="Evict cached blocks before or after somebody is preempted.")
    ] = "before",
    preemption: Annotated[str, typer.Option(help="recompute, swap or auto.")] = "recompute",
    num_host_blocks: Annotated[
        int | None,
        typer.Option(help="Blocks of the host to swap to.  [default: as many as the pool has]"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say who waited, was preempted and why.")
    ] = False,
    as_json: Json = False,
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
        # A step computes one token at least, so that this is all of them.
        log_steps=100_000 if verbose else 1,
    )
    with progress_bars() as progress:
        llm = LLM(model, config, progress=progress)
        if raw:
            outputs = llm.generate(prompt, params)
        else:
            first = [] if system is None else [{"role": "system", "content": system}]
            outputs = llm.chat(
                [[*first, {"role": "user", "content": text}] for text in prompt], params
            )
    if verbose:
        show_steps(llm)
    _show(llm, list(zip(prompt, outputs, strict=True)), as_json=as_json)


@app.command(epilog="Example: kvruntime demo --json")
def demo(model: Model = "smollm2", as_json: Json = False) -> None:
    """Show prefix sharing and copy-on-write on a real model."""
    with progress_bars() as progress:
        llm, answers = run_demo(model, progress)
    _show(llm, answers, as_json=as_json)


def _show(llm: LLM, answers: Sequence[Answer], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(answers, llm), indent=2), flush=True)
    else:
        show_answers(answers)
        show_stats(llm)
