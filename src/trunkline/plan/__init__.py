"""Planning: memory, traffic and time of a step, simulated for any machine before the run."""
