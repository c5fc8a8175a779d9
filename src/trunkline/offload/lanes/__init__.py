"""Lanes: queues of moves that run beside compute."""
