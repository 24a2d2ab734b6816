"""One turn: the request, the reply while it is generated, and the events it tells."""
