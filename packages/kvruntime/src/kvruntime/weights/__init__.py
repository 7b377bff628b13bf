"""Checkpoints: a GGUF file or a Hugging Face folder becomes a configuration, tensors, a tokenizer.

There is one loader, of Hugging Face folders; a GGUF file is converted to such a folder once and
found again in the user's cache by its content.
"""

from kvruntime.weights.checkpoint import Checkpoint, load_checkpoint
from kvruntime.weights.progress import Progress

__all__ = ["Checkpoint", "Progress", "load_checkpoint"]
