"""A whole deployment under a virtual clock: the product's own policy objects, simulated GPUs and links (docs/simulator.md)."""
