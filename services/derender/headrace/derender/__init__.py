"""Derender: token IDs in, OpenAI chunks out."""
