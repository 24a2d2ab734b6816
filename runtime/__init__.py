"""Room runtime: the engine, from a verb of the link to the rows of a step."""
