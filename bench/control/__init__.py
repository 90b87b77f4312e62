"""`baton bench control`: how well sizes follow a load, beside what else could have decided them."""
