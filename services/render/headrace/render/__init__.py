"""Render: an OpenAI body in, token IDs and sampling parameters out."""
