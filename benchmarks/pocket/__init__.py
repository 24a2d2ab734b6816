"""The pocket model's world: its dialogues, its tokenizer, its training and the measure of what it learnt."""
