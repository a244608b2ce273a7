"""`headrace bench --compare`: the same load on the same engines, put together in different ways."""
