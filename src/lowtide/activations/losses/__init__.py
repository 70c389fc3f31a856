"""Losses of language models without the logits of all tokens: chunk of tokens by chunk."""
