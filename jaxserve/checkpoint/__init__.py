"""Checkpoints: in from Hugging Face and GGUF, stored with Orbax."""
