"""`headrace batch`: many requests from a file, here or at a gateway."""
