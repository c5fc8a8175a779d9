"""Data: reading text, encoding it, cutting it into samples of exactly `context` tokens, and their order."""

from trunkline.data.samples import CutReport, SampleOrder, Samples, cut_documents
from trunkline.data.sources import Document, find_files, read_documents
from trunkline.data.tokenizers import Encoder, load_encoder, make_byte_tokenizer

__all__ = [
    "CutReport",
    "Document",
    "Encoder",
    "SampleOrder",
    "Samples",
    "cut_documents",
    "find_files",
    "load_encoder",
    "make_byte_tokenizer",
    "read_documents",
]
