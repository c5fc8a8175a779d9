"""Prefill and generation on streamed models, and caches on disk."""
