"""Text and tokens: tokenizer, chat template, renderer, detokenizer, and the tokens of text that is still
being written."""
