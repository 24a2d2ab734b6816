"""The pocket model's world: its dialogues, tokenizer, training and evaluation."""
