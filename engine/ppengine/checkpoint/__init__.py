"""Reading a Hugging Face folder: config.json, the list of tensors and tokenizer.json. No torch, no pickled weights."""
