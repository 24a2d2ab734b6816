"""One turn of a session: the request, the reply while it is generated, and the events that its reader gets."""
