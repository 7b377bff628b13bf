"""Options that several commands share: the model, the engine's settings, the form of the output.

A command states its own defaults; those of an engine's settings are the ones of `EngineConfig`.
"""

from typing import Annotated

import typer

__all__ = [
    "Admission",
    "Attention",
    "BlockSize",
    "Device",
    "Eviction",
    "Json",
    "KVDtype",
    "MaxNumBatchedTokens",
    "MaxNumSeqs",
    "Model",
    "NumBlocks",
    "NumHostBlocks",
    "NumThreads",
    "Preemption",
    "PrefixCaching",
    "SkipAhead",
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Model = Annotated[
    str, typer.Option(help="smollm2, a GGUF file, or a folder of Hugging Face.", metavar="MODEL")
]

BlockSize = Annotated[int, typer.Option(help="Tokens a block.")]
NumBlocks = Annotated[
    int | None, typer.Option(help="Blocks of the pool.  [default: what 512 MiB hold]")
]
PrefixCaching = Annotated[
    bool,
    typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse blocks of equal prefixes."),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Samples that run side by side.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Tokens a step at most.")]
SkipAhead = Annotated[
    int, typer.Option(help="Later prompts that may start before one that has no room yet.")
]
Admission = Annotated[
    str, typer.Option(help="What needs room to start: the prompt, or also the output.")
]
Eviction = Annotated[
    str, typer.Option(help="Evict cached blocks before or after somebody is preempted.")
]
Preemption = Annotated[str, typer.Option(help="recompute, swap or auto.")]
NumHostBlocks = Annotated[
    int | None,
    typer.Option(
        help="Blocks of the host to swap to.  [default: as many as the pool has; for recompute none]"
    ),
]
NumThreads = Annotated[int, typer.Option(help="Threads that compute, of torch and of the kernels.")]
KVDtype = Annotated[
    str, typer.Option(help="Keys and values as float32, float16, bfloat16, fp8 or int8.")
]
Attention = Annotated[
    str, typer.Option(help="kernels, or sdpa: torch on gathered blocks, a slow check.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
