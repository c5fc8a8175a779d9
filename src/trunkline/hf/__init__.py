"""Hugging Face models: a decoder run in pieces, and checks that refuse unsupported models."""
