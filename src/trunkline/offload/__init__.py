"""Offload: tiers (`device`, `host`, `disk`) with budgets in bytes, and lanes that move chunks between them."""
