"""KV blocks from one worker to another. Knows layouts and bytes, not models."""
