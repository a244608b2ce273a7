"""The command line: `headrace up`, `headrace serve`, `headrace demo`."""
