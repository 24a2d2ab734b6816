"""The torch version of every kernel, which defines what the faster backends must compute."""
