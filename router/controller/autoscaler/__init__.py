"""Decides how many workers of which role there should be, and how each is tuned. Pure: facts in, proposals out."""
