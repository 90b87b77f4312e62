"""Load generator and benches."""
