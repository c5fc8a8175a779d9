"""Small helpers: folders written whole, device names, limits of the machine, records read from JSON."""
