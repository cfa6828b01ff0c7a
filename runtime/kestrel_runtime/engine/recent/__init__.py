"""What came before and may come again, within bounds: the tokens of prompts."""
