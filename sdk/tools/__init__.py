"""Python callables as tools of a model."""
