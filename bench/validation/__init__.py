"""The simulator and the timing model against what others have published: `python -m bench.validation`, docs/validation.md."""
