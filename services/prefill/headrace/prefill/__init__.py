"""Prefill: a prompt's token IDs in, a lease on its KV cache out."""
