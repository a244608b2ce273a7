"""`headrace doctor`: what is wrong on this machine and in a stack that runs, and which setting mends it."""
