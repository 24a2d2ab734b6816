"""Tool calls and reasoning as models write them, and the grammars that hold a model to them."""
