"""Constraints on text (JSON Schema, regular expressions, grammars) as masks over a model's tokens, by llguidance."""
