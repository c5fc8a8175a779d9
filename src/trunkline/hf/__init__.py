"""Hugging Face models: how a decoder is run in pieces, and what is refused."""
