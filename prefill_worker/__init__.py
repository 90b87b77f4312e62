"""The prefill role: queue, chunk, reserve, ship, first token."""
