"""The decode role: grant, adopt, step, stream; local prefill."""
