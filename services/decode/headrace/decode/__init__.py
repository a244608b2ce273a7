"""Decode: owns a job, gets its prompt computed, generates the token IDs of its answer."""
