"""`headrace demo`, and the small model that it serves."""
