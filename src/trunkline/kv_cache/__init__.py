"""Keys and values that a model has computed, in tiers, and forwards of new tokens over them."""
