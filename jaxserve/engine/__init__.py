"""Continuous batching over token ids: scheduler, pages, runner, loop."""
