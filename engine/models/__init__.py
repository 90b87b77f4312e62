"""Model code in torch: one file per architecture, a table of them, and the parts they share."""
