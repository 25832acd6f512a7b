"""Model files: Hugging Face folders and GGUF, checked and loaded."""
