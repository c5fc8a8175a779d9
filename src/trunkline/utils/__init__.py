"""Small helpers: folders written whole, devices, JSON fields."""
