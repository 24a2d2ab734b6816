"""Text and tokens: tokenizer, chat template, renderer, detokenizer, and what is known before text ends."""
