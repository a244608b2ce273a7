"""Engines behind one interface: vLLM with NIXL, and a deterministic fake for load and faults."""
