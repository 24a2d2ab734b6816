"""The meaning of every kernel, in plain torch: what the faster backends are tested against."""
