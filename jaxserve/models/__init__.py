"""Pure-functional forward passes and sampling."""
