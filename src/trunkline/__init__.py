"""Trunkline: train Hugging Face language models on very long contexts, chunk by chunk, with exact gradients."""

from trunkline.config import Progress, StreamConfig
from trunkline.streaming import stream, unstream

__version__ = "0.1.0"
__all__ = ["Progress", "StreamConfig", "stream", "unstream"]
