"""The live page at `/console`: files that ship with the package, and one JSON document that they ask for."""
