"""The tests: a package per room, and what goes through all of them."""
