"""A `BlockManager` in shapes that engines call already: vLLM's and SGLang's.

Knows where the facades are. Does not know them apart; neither engine is imported.
"""

from kvblocks.facades.sglang import SGLangFacade
from kvblocks.facades.vllm import VLLMFacade

__all__ = ["SGLangFacade", "VLLMFacade"]
