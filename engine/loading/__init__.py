"""Weights from disk to tensors in the compute dtype, under their Hugging Face names."""
