"""`headrace bench`: load for any OpenAI-compatible server, and what it measured."""
