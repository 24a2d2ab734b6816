"""What terminal agents send to a server: recorded by `tests/clients`, and sent again without them."""
