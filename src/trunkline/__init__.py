"""Trunkline."""
