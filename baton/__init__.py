"""The vocabulary that every Baton process shares. Imports nothing above itself, and no torch, ray or ucxx."""
