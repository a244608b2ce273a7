"""The HTTP edge: holds connections, and passes bodies through to the pipeline."""
