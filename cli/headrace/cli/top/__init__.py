"""`headrace top`: a live view of workers, queues and requests."""
