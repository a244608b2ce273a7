"""`headrace dlq`: dead letters, for operators."""
