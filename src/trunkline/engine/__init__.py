"""The engine: sweeps over the chunks of each layer, forward and backward."""
