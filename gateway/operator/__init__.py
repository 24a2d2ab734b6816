"""The operator's routes: which sessions there are, one of them, all of it as a file, its end and its
deletion."""
